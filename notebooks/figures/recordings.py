"""Recordings of the paper's models on an H200 with vLLM: fingerprints and whole models, in one call."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from functools import cache

from fingerprint.codec import from_json
from fingerprint.config import DeploymentConfig
from fingerprint.measurements import TimingPoint
from tests.bench.accuracy import RESULTS
from tests.bench.accuracy_measure import Recorded
from tests.bench.kept import read_kept

__all__ = ["RECORDED", "config_of", "recorded", "recording_of", "seconds", "where"]

# Those of the paper's six that were; a later recording of another takes its line here, and `make evaluation`.
RECORDED = ("gpt-j-6b", "falcon-7b", "Llama-2-7b-hf", "Llama-2-13b-hf")


@cache
def recording_of(model: str) -> Recorded:
    """Return the recording in 16 bits on one GPU.

    Further ones, in fp8 or over several GPUs, are used by no figure.
    """
    path = RESULTS / "h200" / f"{model}-16bit-tp1-pp1.json.xz"
    return from_json(read_kept(path), Recorded, what=str(path))


def recorded() -> dict[str, Recorded]:
    """Return the recordings of the paper's models, by model."""
    return {model: recording_of(model) for model in RECORDED}


def where() -> str:
    """The machine and the days, for a figure's source line."""
    ones = recorded().values()
    days = sorted({one.measured_at[:10] for one in ones})
    machine = next(iter(ones)).profile.machine
    return f"measured on one {machine.device.name} with {dict(machine.versions)['engine']}, {' and '.join(days)}"


def config_of(one: Recorded) -> DeploymentConfig:
    """Return the configuration it was run under."""
    return DeploymentConfig(tp=one.tp, pp=one.pp, weights=one.weights, engine="vllm")


def seconds(points: Iterable[TimingPoint], num_layers: int, batch: int, input_tokens: int) -> tuple[float, float]:
    """TTFT and TPOT by the wall's clock at one depth: medians of the runs at the two output lengths."""
    took = {
        p.output_tokens: statistics.median(run.e2e_s for run in p.runs)
        for p in points
        if (p.num_layers, p.repeat, p.batch, p.input_tokens) == (num_layers, 1, batch, input_tokens)
    }
    short, long = min(took), max(took)
    return took[short], (took[long] - took[short]) / (long - short)
