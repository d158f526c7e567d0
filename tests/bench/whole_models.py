"""Whole models on this machine's devices, and their fingerprints, through real workers of the embedded engine.

What ``full_model_accuracy`` and ``strategies`` share: models, a worker as the daemon would launch it, a profile
as a deployment would take it, and the whole model measured under every configuration. Nothing is predicted here.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from daemon.devices import Device
from daemon.engines.torch import TorchEngine
from daemon.profile_client import WorkerProfileTarget
from daemon.torch_engine.parallel.rank_device import CORES_VARIABLE
from daemon.worker_spec import WorkerLimits, WorkerSpec
from fingerprint.codec import to_json
from fingerprint.config import DeploymentConfig, KvFormat, WeightFormat, Workload, even_split
from fingerprint.estimators.roofline import DEFAULT_MAX_BATCHED_TOKENS
from fingerprint.families import load_spec
from fingerprint.measurements import Profile
from fingerprint.model_spec import ModelSpec
from fingerprint.profile import ProfileProgress, profile
from fingerprint.profile_plan import ProfilePlan, default_plan
from fingerprint.profile_sessions import ProfileSession, ProfileTarget
from fingerprint.trimmed_mean import locate
from fingerprint.truncate import generate, generate_dummy
from iserve.demo import demo_model_path

ROOT = Path(__file__).parents[2]
DEGREES = ((1, 1), (2, 1), (1, 2))
FORMATS = (WeightFormat.BITS16, WeightFormat.INT8)
BATCHES = (1, 4)
STOP_S = 20.0

LLAMA = {  # 16 layers of 12.8 million parameters: 25 MB each in bfloat16
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


WIDE = LLAMA | {  # 16 of the layers of Llama-2-7B: 405 MB each
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}


GEMMA = LLAMA | {  # 12 layers of 25 MB, of which the 6th and the 12th look all the way back
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 12,
    "num_key_value_heads": 8,
    "sliding_window": 128,
}
GPT_OSS = LLAMA | {  # 8 layers of 8 experts, 53 MB, a token of which reads 2; every second looks all the way back
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "num_hidden_layers": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 1024,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
    "pad_token_id": 0,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Model, and the requests it is judged on."""

    name: str
    directory: Path
    has_weights: bool
    input_tokens: int
    output_tokens: int  # of the predicted workload; the fingerprints ran at most 17
    weights: tuple[WeightFormat, ...] = FORMATS
    degrees: tuple[tuple[int, int], ...] = DEGREES


@dataclass(frozen=True, kw_only=True)
class Options:
    profile_s: float
    repeats: int
    devices: tuple[Device, ...]
    batches: tuple[int, ...] = BATCHES

    def degrees_of(self, case: Case) -> tuple[tuple[int, int], ...]:
        return tuple((tp, pp) for tp, pp in case.degrees if tp * pp <= len(self.devices))


def cases(folder: Path, which: str) -> Iterable[Case]:
    if which in {"demo", "both"}:
        yield Case(
            name="iserve-demo", directory=demo_model_path(), has_weights=True, input_tokens=512, output_tokens=33
        )
    if which in {"llama", "both"}:
        config = folder / "llama-16x25MB"
        config.mkdir()
        (config / "config.json").write_text(json.dumps(LLAMA))
        yield Case(name=config.name, directory=config, has_weights=False, input_tokens=64, output_tokens=33)
    if which == "kinds":
        for name, shape, weights in (
            ("gemma3-12x25MB", GEMMA, FORMATS),
            ("gpt-oss-8x53MB", GPT_OSS, (WeightFormat.BITS16,)),
        ):
            config = folder / name
            config.mkdir()
            (config / "config.json").write_text(json.dumps(shape))
            yield Case(
                name=name,
                directory=config,
                has_weights=False,
                input_tokens=256,
                output_tokens=33,
                weights=weights,
                degrees=((1, 1),),
            )
    if which == "wide":
        config = folder / "llama-16x405MB"
        config.mkdir()
        (config / "config.json").write_text(json.dumps(WIDE))
        yield Case(name=config.name, directory=config, has_weights=False, input_tokens=512, output_tokens=33)


class WorkerProcess:
    """``daemon.profile_client.WorkerHandle`` on a child process, which gets its devices as from the daemon."""

    def __init__(self, spec: WorkerSpec, folder: Path, devices: tuple[Device, ...]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            spec = replace(spec, port=probe.getsockname()[1])
        folder.mkdir()
        (folder / "spec.json").write_bytes(to_json(spec))
        command = TorchEngine().command(spec, folder, {})
        self.url, self.token = f"http://127.0.0.1:{spec.port}", None
        self._log = folder / "log"
        with self._log.open("wb") as log:
            environment = os.environ | dict(command.env) | device_environment(spec, devices)
            self._process = subprocess.Popen(command.argv, cwd=ROOT, stdout=log, stderr=log, env=environment)

    @property
    def pid(self) -> int:
        return self._process.pid

    def failure(self) -> str | None:
        code = self._process.poll()
        return None if code is None else f"exit code {code}: {self._log.read_text(errors='replace')[-500:]}"

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def device_environment(spec: WorkerSpec, devices: tuple[Device, ...]) -> dict[str, str]:
    used = [device_id for stage in spec.stages for device_id in stage.device_ids]
    if devices[0].kind == "cuda":
        return {"CUDA_VISIBLE_DEVICES": ",".join(used)}
    return {CORES_VARIABLE: ";".join(f"{d.device_id}={','.join(map(str, d.cores))}" for d in devices)}


@contextmanager
def worker_target(checkpoint: Path, folder: Path, devices: tuple[Device, ...]) -> Iterator[WorkerProfileTarget]:
    limits = WorkerLimits(
        max_batch=1,
        max_batched_tokens=DEFAULT_MAX_BATCHED_TOKENS,
        max_context_tokens=1024,
        kv_tokens=1024,
        memory_bytes_per_device=int(0.8 * devices[0].total_bytes),
    )
    launched = iter(range(10_000))

    def launch(spec: WorkerSpec) -> WorkerProcess:
        return WorkerProcess(spec, folder / f"worker-{next(launched)}", devices)

    ids = [device.device_id for device in devices]
    with WorkerProfileTarget(launch, checkpoint=checkpoint, device_ids=ids, limits=limits) as target:
        yield target


# Profile and truth


Reading = tuple[float, float, float]  # a median and its 90% interval, low and high


@dataclass(frozen=True, kw_only=True)
class Whole:
    """The whole model under one configuration, in a load of its own; ``measured`` as ``AccuracyRow.quantity``."""

    config: DeploymentConfig
    workload: Workload
    repeats: int
    measured: Mapping[str, Reading]


def plan_of(case: Case, spec: ModelSpec, options: Options) -> ProfilePlan:
    """The default plan of a deployment, for the larger batch."""
    workload = Workload(max(options.batches), case.input_tokens, case.output_tokens)
    degrees = options.degrees_of(case)
    return default_plan(spec, workload, weights=case.weights, degrees=degrees, budget_s=options.profile_s)


def take_profile(case: Case, spec: ModelSpec, target: ProfileTarget, folder: Path, plan: ProfilePlan) -> Profile:
    """Take a profile of the fingerprints, or of the whole model where ``plan`` says so."""

    def checkpoint(layers: Sequence[int]) -> Path:
        if len(layers) == spec.num_layers:
            return full_checkpoint(case, folder)
        path = folder / f"fingerprint-{'-'.join(map(str, layers))}"
        if not path.exists():
            if case.has_weights:
                generate(case.directory, path, layers)
            else:
                generate_dummy(case.directory, path, layers)
        return path

    def show(progress: ProfileProgress) -> None:
        note(f"{case.name}: {progress.done}/{progress.total} {progress.running}", end="\r")

    return profile(case.name, spec, target, checkpoint, plan, progress=show)


def full_checkpoint(case: Case, folder: Path) -> Path:
    if case.has_weights:
        return case.directory
    path = folder / "full"
    if not path.exists():
        generate_dummy(case.directory, path, load_spec(case.directory).num_layers)
    return path


def measure_whole(
    case: Case, spec: ModelSpec, target: ProfileTarget, folder: Path, options: Options
) -> Iterator[Whole]:
    """Every configuration and batch, each in a load of its own."""
    checkpoint = full_checkpoint(case, folder)
    for tp, pp in options.degrees_of(case):
        session = target.open(tp=tp, pp=pp)
        try:
            for weights in case.weights:
                for batch in options.batches:
                    config = DeploymentConfig(tp=tp, pp=pp, weights=weights)
                    workload = Workload(batch, case.input_tokens, case.output_tokens)
                    note(f"{case.name}: full model, {config}, batch {batch}", end="\r")
                    split = even_split(spec.num_layers, pp)
                    yield measure_one(session, checkpoint, split, config, workload, options.repeats)
        finally:
            session.close()


def measure_one(
    session: ProfileSession,
    checkpoint: Path,
    split: tuple[int, ...],
    config: DeploymentConfig,
    workload: Workload,
    repeats: int,
) -> Whole:
    session.load(
        checkpoint,
        weights=config.weights,
        kv=KvFormat.BITS16,
        layers_per_stage=split,
        max_batch=workload.batch,
        max_context_tokens=workload.context_tokens,
    )
    lengths = (1, workload.output_tokens)
    runs: dict[int, list[float]] = {length: [] for length in lengths}
    for repeat in range(repeats + 1):  # the first warms up
        for length in lengths:
            reading = session.run(batch=workload.batch, input_tokens=workload.input_tokens, output_tokens=length)
            if repeat:
                runs[length].append(reading.e2e_s)
    ttft, tpot = times(runs[1], runs[workload.output_tokens], workload.output_tokens - 1)
    ranks = session.memory()
    counted = [r.weights_bytes + r.kv_bytes + r.activation_peak_bytes + r.pp_buffer_bytes for r in ranks]
    fullest = max(total + rank.runtime_bytes for total, rank in zip(counted, ranks, strict=True))
    held = {"memory_bytes_per_gpu": float(fullest), "engine_bytes_per_gpu": float(max(counted))}
    measured = {"ttft_s": ttft, "tpot_s": tpot} | {name: (value, value, value) for name, value in held.items()}
    return Whole(config=config, workload=workload, repeats=repeats, measured=measured)


def times(short: list[float], long: list[float], steps: int) -> tuple[Reading, Reading]:
    """(value, low, high) of TTFT and TPOT: medians, with the 90% intervals of the trimmed means."""
    at_short, at_long = float(np.median(short)), float(np.median(long))
    half_short = locate(short).half_width
    half = float(np.hypot(half_short, locate(long).half_width)) / steps
    tpot = (at_long - at_short) / steps
    return (at_short, at_short - half_short, at_short + half_short), (tpot, tpot - half, tpot + half)


def note(text: str, end: str = "\n") -> None:
    if end == "\n" or sys.stderr.isatty():
        print(f"{text:<100}", end=end, file=sys.stderr, flush=True)
