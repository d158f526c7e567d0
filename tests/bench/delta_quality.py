"""Quality and cost of compressed deltas, by format, on small models trained from nothing.

    python -m tests.bench.delta_quality OUT.json [--seeds 3] [--jobs 2]

A small Llama is pretrained and fine-tuned in full on random facts, as in ``variant_quality``. Its delta is made in
every format: compensated on the fine-tune's own texts, on random tokens, and rounded without calibration. What is
measured is the exported checkpoint. Controls that must fail: the base, and the whole weights of the fine-tune in
the same bits (the delta of a base whose linears are zero). Then a larger random model is compressed, and CPU
seconds and memory are taken layer by layer. One thread a process.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from zlib import compress

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from daemon.variants.compress import CalibrationTexts, CompressOrder, compress_delta
from fingerprint.checkpoint import Checkpoint
from fingerprint.codec import to_json
from fingerprint.delta import FORMATS, DeltaManifest, export_delta, read_delta
from fingerprint.delta.reader import codes_name
from tests.bench.kept import write_kept
from tests.bench.variant_quality import (
    VOCAB,
    Rows,
    Sizes,
    load_model,
    mean_and_range,
    measure_model,
    pretrained_model,
    tasks,
    train_model,
)

__all__ = [
    "BASE",
    "FULL",
    "RANDOM",
    "ROUNDED",
    "TEXTS",
    "WHOLE",
    "DeltaCost",
    "DeltaOutcome",
    "DeltaStudy",
    "as_texts",
    "cost_table",
    "quality_table",
    "run_study",
    "without_linears",
    "write_tokenizer",
]

SIZES = Sizes(hidden=128, facts=1024, batch=128, pretraining_steps=300, steps=(("facts", 500),))
TEXTS, RANDOM, ROUNDED = "its own texts", "random tokens", "rounded"
_RANDOM_ROWS = 512
BASE, FULL, WHOLE = "base", "full fine-tune", "whole weights"


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaOutcome:
    """Measured quality of one model."""

    method: str  # BASE, FULL, a format, or WHOLE and a format
    calibration: str  # TEXTS, RANDOM or ROUNDED; empty where nothing is compressed
    seed: int
    exact_match: float  # facts that are right in every symbol
    nll: float  # nats per symbol of the answers
    error: float  # mean over the linears: of what the change adds to outputs
    bits: float  # of a weight of the linears that were compressed, padding included
    zlib_bits: float  # of a code, after zlib (level 9) of the codes


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaCost:
    """Time and memory of one unit of a compression."""

    unit: str
    cpu_s: float  # of one thread
    peak_bytes: int  # resident, of the process until then


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaStudy:
    """Outcomes, with what they were made by."""

    date: str
    machine: str
    torch: str
    sizes: Sizes
    outcomes: tuple[DeltaOutcome, ...]
    cost_model: str
    costs: tuple[DeltaCost, ...] = field(default=())


def write_tokenizer(folder: Path, size: int = VOCAB) -> None:
    """Write a tokenizer whose text is the numbers of the tokens."""
    vocabulary = {str(token): token for token in range(size)}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def as_texts(rows: Rows) -> CalibrationTexts:
    texts = tuple(" ".join(map(str, row)) for row in rows.tolist())
    return CalibrationTexts(sha256=hashlib.sha256("\n".join(texts).encode()).hexdigest(), texts=texts)


def without_linears(folder: Path, target: Path) -> Path:
    """Write the checkpoint with zeros in its linears: a base of which the delta is the whole weights."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype="auto")
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.zero_()
    model.save_pretrained(target)
    return target


def _zlib_bits(folder: Path, manifest: DeltaManifest) -> float:
    linears = [matrix for matrix in manifest.matrices if "embed" not in matrix.name]
    files = {matrix.file: Checkpoint.of_file(folder / matrix.file) for matrix in linears}
    packed = sum(len(compress(files[each.file].read(codes_name(each.name)), 9)) for each in linears)
    return 8 * packed / sum(each.shape[0] * each.shape[1] for each in linears)


def _outcomes_of(seed: int) -> list[DeltaOutcome]:
    torch.set_num_threads(1)
    task = tasks(SIZES, seed)["facts"]
    found: list[DeltaOutcome] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        base = pretrained_model(SIZES, seed, folder / "base")
        model, rng = load_model(base), np.random.default_rng([seed, 0])
        train_model(model, SIZES.steps[0][1], SIZES.full_lr, lambda: task.train(rng, SIZES.batch), task.answer)
        model.save_pretrained(folder / "tuned")
        write_tokenizer(folder / "tuned")
        zero = without_linears(folder / "tuned", folder / "zero")
        random = np.random.default_rng([seed, 1]).integers(VOCAB, size=(_RANDOM_ROWS, task.measured.shape[1]))
        calibrations = {TEXTS: as_texts(task.measured), RANDOM: as_texts(random), ROUNDED: None}

        def keep(method: str, calibration: str, checkpoint: Path, manifest: DeltaManifest | None = None) -> None:
            exact, nll = measure_model(load_model(checkpoint), task)
            linears = [] if manifest is None else [each for each in manifest.matrices if "embed" not in each.name]
            weights = sum(each.shape[0] * each.shape[1] for each in linears)
            num_bytes = sum(FORMATS[each.format].matrix_bytes(each.shape) for each in linears)
            outcome = DeltaOutcome(
                method=method,
                calibration=calibration,
                seed=seed,
                exact_match=round(exact, 4),
                nll=round(nll, 4),
                error=round(mean(each.error for each in linears), 5) if linears else 0.0,
                bits=round(8 * num_bytes / weights, 3) if weights else 0.0,
                zlib_bits=round(_zlib_bits(folder / "delta", manifest), 3) if manifest is not None else 0.0,
            )
            found.append(outcome)
            print(outcome, file=sys.stderr, flush=True)

        keep(BASE, "", base)
        keep(FULL, "", folder / "tuned")
        for of_base, prefix in ((base, ""), (zero, f"{WHOLE} ")):
            for name, format_ in FORMATS.items():
                for calibration, texts in calibrations.items():
                    if prefix and calibration == RANDOM:
                        continue
                    order = CompressOrder(
                        base=of_base,
                        finetuned=folder / "tuned",
                        target=folder / "delta",
                        format=format_,
                        calibration=texts,
                        is_compensated=calibration != ROUNDED,
                        max_error=None,
                        base_name="base",
                        finetuned_name="tuned",
                    )
                    manifest = compress_delta(order).manifest
                    export_delta(of_base, read_delta(folder / "delta"), folder / "exported")
                    keep(f"{prefix}{name}", calibration, folder / "exported", manifest)
                    for made in ("delta", "exported"):
                        shutil.rmtree(folder / made)
    return found


# Cost.

COST_CONFIG = LlamaConfig(
    vocab_size=4096,
    hidden_size=512,
    intermediate_size=1408,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=2048,
    tie_word_embeddings=False,
)


def _costs() -> Iterator[DeltaCost]:
    """Yield time and memory of the units of one compression at 2 bits, on 16,384 random tokens."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = LlamaForCausalLM(COST_CONFIG).to(torch.bfloat16)
        model.save_pretrained(folder / "base")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 1e-3)
        model.save_pretrained(folder / "tuned")
        del model
        order = CompressOrder(
            base=folder / "base",
            finetuned=folder / "tuned",
            target=folder / "delta",
            format=FORMATS["int2"],
            calibration=None,
            max_error=None,
            base_name="base",
            finetuned_name="tuned",
        )
        started, marks = time.process_time(), []

        def mark(what: str, done: int, total: int) -> None:
            marks.append((what, done, total, time.process_time() - started, _resident_bytes()))

        compress_delta(order, mark)
        yield from _units(marks)


def _resident_bytes() -> int:
    """Return the most that this process has had in memory; ``ru_maxrss`` has its parent's, too."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def _units(marks: Sequence[tuple[str, int, int, float, int]]) -> Iterator[DeltaCost]:
    """Yield a cost for reading, the embeddings, each layer (seven linears) and the output layer."""
    before = 0.0
    read = [mark for mark in marks if not mark[0].startswith("matrices")]
    done = [mark for mark in marks if mark[0].startswith("matrices")]
    ends = [("read and hashed", read[-1]), ("embeddings", done[0])]
    layers = COST_CONFIG.num_hidden_layers
    ends += [(f"layer {layer}", done[7 * (layer + 1)]) for layer in range(layers)]
    ends.append(("output layer", done[-1]))
    for name, (_, _, _, cpu_s, peak) in ends:
        yield DeltaCost(unit=name, cpu_s=round(cpu_s - before, 2), peak_bytes=peak)
        before = cpu_s


def run_study(seeds: int, *, jobs: int = 1) -> DeltaStudy:
    """Train, compress and measure everything, in ``jobs`` processes."""
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        cost_list = pool.submit(_cost_list)
        outcomes = [outcome for part in pool.map(_outcomes_of, range(seeds)) for outcome in part]
        costs = cost_list.result()
    linears = COST_CONFIG.num_hidden_layers * (
        2 * COST_CONFIG.hidden_size**2
        + COST_CONFIG.hidden_size**2
        + 3 * COST_CONFIG.hidden_size * COST_CONFIG.intermediate_size
    )
    return DeltaStudy(
        date=datetime.now(UTC).date().isoformat(),
        machine=f"{platform.machine()} CPU, {os.cpu_count()} shared cores, one thread a process",
        torch=str(torch.__version__),
        sizes=SIZES,
        outcomes=tuple(outcomes),
        cost_model=f"{COST_CONFIG.hidden_size} wide, {COST_CONFIG.num_hidden_layers} layers, {linears:,} weights "
        "in linears",
        costs=tuple(costs),
    )


def _cost_list() -> list[DeltaCost]:
    torch.set_num_threads(1)
    return list(_costs())


def quality_table(study: DeltaStudy) -> str:
    """Return means and ranges over the seeds by format and calibration, in Markdown."""
    lines = [
        "| | calibration | bits a weight | error | exact match | NLL |",
        "|---|---|---|---|---|---|",
    ]
    for method, calibration in dict.fromkeys((each.method, each.calibration) for each in study.outcomes):
        own = [each for each in study.outcomes if (each.method, each.calibration) == (method, calibration)]
        error = f"{mean(each.error for each in own):.3f}" if own[0].bits else ""
        bits = f"{own[0].bits:.3f}" if own[0].bits else ""
        exact = mean_and_range([100 * each.exact_match for each in own], ".1f")
        nll = mean_and_range([each.nll for each in own], ".3f")
        lines.append(f"| {method} | {calibration} | {bits} | {error} | {exact}% | {nll} |")
    return "\n".join(lines)


def cost_table(study: DeltaStudy) -> str:
    """Return CPU seconds and memory by unit, in Markdown."""
    rows = [f"| {cost.unit} | {cost.cpu_s:.1f} | {cost.peak_bytes / 2**20:.0f} |" for cost in study.costs]
    return "\n".join(["| unit | CPU seconds | memory at most until then, MiB |", "|---|---|---|", *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--jobs", type=int, default=1, help="processes of one thread each")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    study = run_study(args.seeds, jobs=args.jobs)
    write_kept(args.out, json.dumps(json.loads(to_json(study)), indent=1) + "\n")
    print(quality_table(study))
    print(cost_table(study))


if __name__ == "__main__":
    main()
