"""Predictions of AIConfigurator 0.12.0, as JSON, for a comparison on the same points. Imports nothing of iServe.

It runs in an environment of its own (``pip install aiconfigurator==0.12.0``; it is no dependency of iServe):

    python tests/bench/aiconfigurator_static.py --configs $ISERVE_REFERENCE_DATA/reference/model-configs.json \
        --json tests/bench/results/aiconfigurator_h200.json.gz

With ``--points FILE`` (a JSON list of objects with the fields of :class:`Point`) it answers those points instead
of the H200 grid below, each in the mode that it names: ``static`` is one batch handed over at once, ``agg`` steady
continuous batching at ``batch`` concurrent requests. A point that AIConfigurator refuses keeps the reason it
gives. Models are handed to it as local folders that hold only a config.json.
"""

from __future__ import annotations

import argparse
import gzip
import json
import logging
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import product
from pathlib import Path

MODELS = (
    "meta-llama/Llama-2-7b-hf",
    "meta-llama/Llama-2-13b-hf",
    "meta-llama/Llama-3.1-8B",
    "tiiuae/falcon-7b",
    "EleutherAI/gpt-j-6b",
    "Qwen/Qwen3-8B",
    "mistralai/Mistral-7B-v0.1",
    "mistralai/Mixtral-8x7B-v0.1",
    "Qwen/Qwen3-30B-A3B",
)
SPLIT_MODEL, SPLIT_TP = "meta-llama/Llama-2-70b-hf", (2, 4)
BATCHES, INPUTS, OUTPUT_TOKENS = (1, 8, 32, 128), (128, 512, 1024, 2048), 65
MAX_PROMPT_TOKENS = 131_072  # of all prompts of a batch together
BACKENDS = ("vllm", "trtllm")
LINEAR = {"16bit": "bfloat16", "fp8": "fp8", "int8": "int8_wo"}
KV = {"16bit": "bfloat16", "fp8": "fp8", "int8": "int8"}
ABOUT_THE_MODEL = ("planner", "source", "unconfirmed")  # what the configs file adds to each config.json
REASON_CHARS = 120
TELL_EVERY_S = 5  # of progress


@dataclass(frozen=True, kw_only=True)
class Point:
    """Question to AIConfigurator. ``model`` is a name in the configs file; formats are iServe's names."""

    model: str
    system: str  # "h200_sxm"
    backend: str
    mode: str  # "static" or "agg"
    tp: int
    pp: int
    weights: str
    kv: str
    batch: int
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, kw_only=True)
class Answer:
    """``point`` and what was said of it. ``reason``: why nothing was predicted; the figures are then None.

    TPOT is the mean over the steps of the answer, so at the mean context. Memory is of one GPU, in GiB, as
    AIConfigurator itemises it; ``fits`` is its own verdict (it predicts times for what does not fit as well).
    """

    point: Point
    version: str | None  # of the backend whose measured operators were used
    ttft_s: float | None = None
    tpot_s: float | None = None
    output_tokens_per_s: float | None = None  # of ``agg``: all requests together
    memory_gib: dict[str, float] | None = None
    fits: bool | None = None
    reason: str | None = None


def h200_grid() -> Iterator[Point]:
    """The grid of issue B: one GPU, and Llama-2-70B on two and four."""
    cases = [(model, 1) for model in MODELS] + [(SPLIT_MODEL, tp) for tp in SPLIT_TP]
    for (model, tp), backend, weights, batch, tokens in product(
        cases, BACKENDS, ("16bit", "fp8"), BATCHES, INPUTS
    ):
        if batch * tokens <= MAX_PROMPT_TOKENS:
            yield Point(
                model=model,
                system="h200_sxm",
                backend=backend,
                mode="static",
                tp=tp,
                pp=1,
                weights=weights,
                kv="16bit",
                batch=batch,
                input_tokens=tokens,
                output_tokens=OUTPUT_TOKENS,
            )


class Asker:
    """Asks AIConfigurator one point at a time; keeps what depends on the model or the system only."""

    def __init__(self, configs: dict[str, dict[str, object]], folder: Path) -> None:
        self._configs, self._folder = configs, folder
        self._versions: dict[tuple[str, str], str | None] = {}

    def ask(self, point: Point) -> Answer:
        from aiconfigurator.cli.api import cli_estimate

        known = self._version(point.system, point.backend)
        if known is None:
            return Answer(point=point, version=None, reason=f"no data for {point.backend} on {point.system}")
        if point.model not in self._configs:
            return Answer(point=point, version=known, reason="no config.json at hand")
        moe = self._is_moe(point.model)
        try:
            found = cli_estimate(
                str(self._model_folder(point.model)),
                point.system,
                mode=point.mode,
                backend_name=point.backend,
                backend_version=known,
                isl=point.input_tokens,
                osl=point.output_tokens,
                batch_size=point.batch,
                tp_size=point.tp,
                pp_size=point.pp,
                moe_tp_size=point.tp if moe else None,
                moe_ep_size=1 if moe else None,
                gemm_quant_mode=LINEAR[point.weights],
                moe_quant_mode=LINEAR[point.weights] if moe else None,
                kvcache_quant_mode=KV[point.kv],
                stride=1,  # every step of the answer, not one in 32
            )
        except Exception as error:  # noqa: BLE001
            # whatever it raises is its answer, and is kept
            return Answer(point=point, version=known, reason=f"{type(error).__name__}: {error}"[:REASON_CHARS])
        parts = {name: round(float(gib), 3) for name, gib in found.summary.get_memory().items()}
        return Answer(
            point=point,
            version=known,
            ttft_s=found.ttft / 1e3,
            tpot_s=found.tpot / 1e3,
            output_tokens_per_s=float(found.raw["tokens/s"]) if point.mode == "agg" else None,
            memory_gib=parts,
            fits=found.kv_cache_warning is None,
        )

    def _version(self, system: str, backend: str) -> str | None:
        from aiconfigurator.sdk.perf_database import get_latest_database_version

        key = (system, backend)
        if key not in self._versions:
            self._versions[key] = get_latest_database_version(system=system, backend=backend)
        return self._versions[key]

    def _is_moe(self, model: str) -> bool:
        config = self._configs[model]
        return any(config.get(name) for name in ("num_local_experts", "num_experts"))

    def _model_folder(self, model: str) -> Path:
        folder = self._folder / model.replace("/", "--")
        if not folder.exists():
            folder.mkdir()
            config = {key: value for key, value in self._configs[model].items() if key not in ABOUT_THE_MODEL}
            (folder / "config.json").write_text(json.dumps(config))
        return folder


def read_points(path: Path) -> list[Point]:
    return [Point(**entry) for entry in json.loads(path.read_text())]


def describe(answers: list[Answer]) -> None:
    """Print one line per case: how many points were answered, or why none."""
    cases = dict.fromkeys(
        (a.point.model, a.point.backend, a.version, a.point.weights, a.point.tp) for a in answers
    )
    for case in cases:
        own = [
            a for a in answers if (a.point.model, a.point.backend, a.version, a.point.weights, a.point.tp) == case
        ]
        reasons = dict.fromkeys(a.reason for a in own if a.reason)
        good = [a for a in own if a.reason is None]
        misfits = sum(a.fits is False for a in good)
        print(*case, f"{len(good)} of {len(own)} answered, {misfits} of them do not fit", *reasons, sep="; ")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--configs", type=Path, required=True, help="JSON object of config.json by model name")
    parser.add_argument("--points", type=Path, help="the points to answer instead of the H200 grid")
    parser.add_argument("--json", type=Path, required=True, help="where the answers go")
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)  # it warns of every point that does not fit; that is in ``fits``
    points = read_points(options.points) if options.points else list(h200_grid())
    start, told = time.monotonic(), 0.0
    answers = []
    with tempfile.TemporaryDirectory() as folder:
        asker = Asker(json.loads(options.configs.read_text()), Path(folder))
        for number, point in enumerate(points):
            answers.append(asker.ask(point))
            if (now := time.monotonic() - start) - told > TELL_EVERY_S:
                told = now
                print(f"{number + 1} of {len(points)} points, {now:.0f} s", file=sys.stderr)
    describe(answers)
    document = {
        "aiconfigurator": version("aiconfigurator"),
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "wall_s": round(time.monotonic() - start, 1),
        "answers": [compact(answer) for answer in answers],
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    text = written(document).encode()  # no module of ours: this runs in AIConfigurator's environment
    options.json.write_bytes(gzip.compress(text, mtime=0) if options.json.suffix == ".gz" else text)


def compact(answer: Answer) -> dict[str, object]:
    """The answer without its empty fields, times to six significant digits."""
    found = {key: value for key, value in asdict(answer).items() if value is not None}
    return {key: float(f"{value:.6g}") if isinstance(value, float) else value for key, value in found.items()}


def written(document: dict[str, object]) -> str:
    """JSON with one answer per line, so that a change of one is a change of one line."""
    head = json.dumps({key: value for key, value in document.items() if key != "answers"}, indent=1)
    lines = ",\n  ".join(json.dumps(answer, separators=(",", ":")) for answer in document["answers"])
    return f'{head[:-2]},\n "answers": [\n  {lines}\n ]\n}}\n'


if __name__ == "__main__":
    main(sys.argv[1:])
