"""Quality of adapters and deltas on a Llama of 53 million weights, trained from nothing on one GPU.

    python -m tests.bench.quality_at_scale OUT [--scale large] [--device cuda] [--jobs 3] [--budget-s 540]
        [--tasks style ...] [--work FOLDER]

The tasks of ``variant_quality``, enlarged. The base learns to copy, reverse, shift and restyle strings of 8, the
fine-tunes 8,192 random facts of 40 bits (beyond two bits a parameter of rank 1), sums of numbers of three digits,
and another style. Checkpoints are kept in bfloat16. A delta is compensated on 1,024 rows of its fine-tune's
training, and what is measured is the exported checkpoint, in float32: all facts, and sums and strings that were
never trained on. *Whole weights* are the fine-tune itself in the same bits (the delta of a base whose linears
are zero). Controls that must fail: the base, and an adapter merged into the base of another seed.

``case_order`` has the cases, the most important ones first. Each seed writes OUT/seed-N.json after each of its
outcomes; a run that was cut short is a study of fewer cases, and the same command with ``--work`` goes on. Numbers
differ between runs, for sums on a GPU have no fixed order.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import mean

import numpy as np
import torch
import transformers
from transformers import LlamaForCausalLM

from daemon.variants.compress import CalibrationTexts, CompressOrder, compress_delta
from fingerprint.checkpoint import Checkpoint
from fingerprint.codec import to_json
from fingerprint.delta import FORMATS, DeltaManifest, export_delta, read_delta
from tests.bench.delta_quality import (
    RANDOM,
    ROUNDED,
    TEXTS,
    WHOLE,
    as_texts,
    without_linears,
    write_tokenizer,
)
from tests.bench.quality_at_scale_studies import (
    Case,
    ScaleOutcome,
    SeedStudy,
    StudyScale,
    begun,
    write_study,
)
from tests.bench.variant_quality import (
    BASE,
    FULL,
    OTHER_BASE,
    VOCAB,
    Sizes,
    Task,
    load_model,
    lora_name,
    measure_model,
    merged_model,
    new_model,
    pretraining_rows,
    tasks,
    train_adapter,
    train_model,
)

__all__ = ["LEARNED_BEFORE", "SCALES", "case_order", "run_seed"]

LEARNED_BEFORE = "what the base learned"
_FACTS, _ADDITION, _STYLE = "facts", "addition", "style"


LARGE = StudyScale(
    sizes=Sizes(
        hidden=768,
        layers=9,
        heads=12,
        facts=8192,
        fact_symbols=8,
        digits=3,
        string=8,
        batch=512,
        pretraining_steps=1000,
        steps=((_FACTS, 1500), (_ADDITION, 1200), (_STYLE, 300)),
        held_out=2000,
        full_lr=2e-4,
        lora_lr=1e-3,
    ),
    pretraining_lr=5e-4,
    calibration_rows=1024,
)
TINY = StudyScale(
    sizes=Sizes(
        hidden=64,
        layers=2,
        facts=64,
        batch=32,
        pretraining_steps=20,
        steps=((_FACTS, 20), (_ADDITION, 5), (_STYLE, 5)),
        ranks=(1, 4),
        held_out=32,
    ),
    pretraining_lr=2e-3,
    calibration_rows=32,
)
SCALES = {"large": LARGE, "tiny": TINY}


def case_order(scale: StudyScale) -> list[Case]:
    """Return all cases, the most important ones first."""
    found: dict[Case, None] = {}

    def add(task: str, *methods: str, calibration: str = "") -> None:
        known = [name for name, _ in scale.sizes.steps]
        for method in methods if task in (*known, LEARNED_BEFORE) else ():
            is_format = method.removeprefix(f"{WHOLE} ") in FORMATS
            found.setdefault(Case(task=task, method=method, calibration=calibration or TEXTS * is_format))

    ranks = [lora_name(rank) for rank in scale.sizes.ranks]
    whole = [f"{WHOLE} {name}" for name in FORMATS]
    add(LEARNED_BEFORE, BASE)
    add(_FACTS, BASE, FULL, "int2", "sparse24-int4", "int4", "int3", f"{WHOLE} int2", f"{WHOLE} int4")
    add(_ADDITION, BASE, FULL, "int2", "sparse24-int4", "int4")
    add(_FACTS, *ranks, f"{WHOLE} sparse24-int4")
    add(_STYLE, BASE, FULL, "int2", "sparse24-int4")
    add(_ADDITION, *ranks, f"{WHOLE} int2", f"{WHOLE} sparse24-int4")
    add(_FACTS, OTHER_BASE)
    add(_STYLE, *ranks, f"{WHOLE} int2", f"{WHOLE} sparse24-int4")
    add(_FACTS, "int2", calibration=ROUNDED)
    add(_FACTS, "int2", calibration=RANDOM)
    for task in (_FACTS, _ADDITION, _STYLE):
        add(task, *FORMATS, *whole)
    for task in (_FACTS, _ADDITION, _STYLE):
        for calibration in (ROUNDED, RANDOM):
            add(task, *FORMATS, calibration=calibration)
        add(task, *whole, calibration=ROUNDED)
    return list(found)


class _Models:
    """Checkpoints of one seed in a folder, each made when a case first needs it."""

    def __init__(self, scale: StudyScale, seed: int, device: str, work: Path) -> None:
        self._scale, self._seed, self._device, self._work = scale, seed, device, work
        self.tasks = tasks(scale.sizes, seed)
        self.ranks = {lora_name(rank): rank for rank in scale.sizes.ranks}

    def base(self) -> Path:
        def train(folder: Path) -> None:
            sizes = self._scale.sizes
            torch.manual_seed(self._seed)
            model = new_model(sizes).to(torch.device(self._device))  # type: ignore[arg-type]
            rng = np.random.default_rng([self._seed, 2])
            draw = partial(pretraining_rows, rng, sizes.batch, sizes.string)
            train_model(model, sizes.pretraining_steps, self._scale.pretraining_lr, draw, sizes.string + 2)
            model.to(torch.bfloat16).save_pretrained(folder)

        return self._made("base", train)

    def tuned(self, name: str) -> Path:
        base, sizes, task = self.base(), self._scale.sizes, self.tasks[name]

        def train(folder: Path) -> None:
            model, rng = load_model(base, self._device), np.random.default_rng([self._seed, 0])
            draw = partial(task.train, rng, sizes.batch)
            train_model(model, dict(sizes.steps)[name], sizes.full_lr, draw, task.answer)
            model.to(torch.bfloat16).save_pretrained(folder)
            write_tokenizer(folder)

        return self._made(f"tuned-{name}", train)

    def zero(self, name: str) -> Path:
        tuned = self.tuned(name)
        return self._made(f"zero-{name}", lambda folder: without_linears(tuned, folder))

    def adapter(self, name: str, rank: int) -> Path:
        base, sizes = self.base(), self._scale.sizes
        steps = dict(sizes.steps)[name]

        def train(folder: Path) -> None:
            train_adapter(base, self.tasks[name], steps, rank, sizes, self._seed, folder, self._device)

        return self._made(f"r{rank}-{name}", train)

    def other_base(self) -> Path | None:
        """Return the base of another seed, where there is one."""
        others = sorted(self._work.parent.glob("*/base"))
        return next((folder for folder in others if folder.parent != self._work), None)

    def learned_before(self) -> Task:
        sizes = self._scale.sizes
        rows = pretraining_rows(np.random.default_rng([self._seed, 3]), sizes.held_out, sizes.string)
        return Task(partial(pretraining_rows, length=sizes.string), rows, sizes.string + 2)

    def calibration(self, name: str, calibration: str) -> CalibrationTexts | None:
        task, count = self.tasks[name], self._scale.calibration_rows
        rng = np.random.default_rng([self._seed, 1])
        if calibration == ROUNDED:
            return None
        if calibration == TEXTS:
            return as_texts(task.train(rng, count))
        return as_texts(rng.integers(VOCAB, size=(count, task.measured.shape[1])))

    def scratch(self) -> tempfile.TemporaryDirectory[str]:
        return tempfile.TemporaryDirectory(dir=self._work)

    def _made(self, name: str, make: Callable[[Path], object]) -> Path:
        folder = self._work / name
        if not folder.exists():
            part = self._work / f".{name}.part"
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            make(part)
            part.rename(folder)
        return folder


def _measure(case: Case, models: _Models, device: str) -> ScaleOutcome | None:
    """Return the outcome of a case; None where the control's other base is not there."""
    started = time.monotonic()
    task = models.learned_before() if case.task == LEARNED_BEFORE else models.tasks[case.task]
    with models.scratch() as scratch:
        found = _model_of(case, models, Path(scratch), device)
        if found is None:
            return None
        model, facts = found
        exact, nll = measure_model(model, task)
    params = sum(parameter.numel() for parameter in model.parameters())
    return ScaleOutcome(
        case=case,
        exact_match=round(exact, 5),
        nll=round(nll, 5),
        trained_params=facts.trained_params,
        error=round(facts.error, 6),
        bits=round(facts.bits, 3),
        kept_bytes=facts.kept_bytes or 2 * params,
        model_bytes=2 * params,
        seconds=round(time.monotonic() - started, 1),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Facts:
    trained_params: int = 0
    error: float = 0.0
    bits: float = 0.0
    kept_bytes: int = 0  # 0: those of the model


def _model_of(case: Case, models: _Models, scratch: Path, device: str) -> tuple[LlamaForCausalLM, _Facts] | None:
    if case.method == BASE:
        return load_model(models.base(), device), _Facts()
    if case.method == FULL:
        model = load_model(models.tuned(case.task), device)
        return model, _Facts(trained_params=sum(parameter.numel() for parameter in model.parameters()))
    if case.method in models.ranks:
        adapter = models.adapter(case.task, models.ranks[case.method])
        return _merge(models.base(), adapter, scratch, device)
    if case.method != OTHER_BASE:
        return _exported(case, models, scratch, device)
    other = models.other_base()
    if other is None:
        return None
    return _merge(other, models.adapter(case.task, max(models.ranks.values())), scratch, device)


def _merge(base: Path, adapter: Path, scratch: Path, device: str) -> tuple[LlamaForCausalLM, _Facts]:
    tensors = Checkpoint.of_file(adapter / "adapter_model.safetensors").tensors.values()
    params = sum(entry.num_bytes // 4 for entry in tensors)  # as they are trained, in float32
    facts = _Facts(trained_params=params, kept_bytes=2 * params)
    return merged_model(base, adapter, scratch / "merged", device), facts


def _exported(case: Case, models: _Models, scratch: Path, device: str) -> tuple[LlamaForCausalLM, _Facts]:
    is_whole = case.method.startswith(WHOLE)
    base, tuned = models.zero(case.task) if is_whole else models.base(), models.tuned(case.task)
    order = CompressOrder(
        base=base,
        finetuned=tuned,
        target=scratch / "delta",
        format=FORMATS[case.method.removeprefix(f"{WHOLE} ")],
        calibration=models.calibration(case.task, case.calibration),
        is_compensated=case.calibration != ROUNDED,
        max_error=None,
        base_name="base",
        finetuned_name="tuned",
        device=torch.device(device),
    )
    manifest = compress_delta(order).manifest
    export_delta(base, read_delta(order.target), scratch / "exported")
    linears = [each for each in manifest.matrices if "embed" not in each.name]
    weights = sum(each.shape[0] * each.shape[1] for each in linears)
    linear_bytes = sum(FORMATS[each.format].matrix_bytes(each.shape) for each in linears)
    facts = _Facts(
        error=mean(each.error for each in linears),
        bits=8 * linear_bytes / weights,
        kept_bytes=_kept_bytes(manifest, Checkpoint.open(tuned), is_whole=is_whole),
    )
    return load_model(scratch / "exported", device), facts


def _kept_bytes(manifest: DeltaManifest, tuned: Checkpoint, *, is_whole: bool) -> int:
    """Return the bytes of a delta's tensors; of whole weights those of unchanged ones as well."""
    matrices = {each.name: FORMATS[each.format].matrix_bytes(each.shape) for each in manifest.matrices}
    exact = {each.name for each in manifest.exact}
    rest = {name for name in tuned.tensors if name not in matrices} if is_whole else exact
    return sum(matrices.values()) + sum(tuned.tensors[name].num_bytes for name in rest)


# Running.


def run_seed(
    scale: StudyScale,
    seed: int,
    cases: Sequence[Case],
    *,
    out: Path,
    work: Path,
    device: str,
    until: float = math.inf,
) -> int:
    """Do the cases that the seed's file does not have, and write it after each one; return how many failed.

    Args:
        out: folder of the file.
        work: folder of checkpoints, for all seeds and scales.
        until: time of day (``time.time``) after which no case begins.

    Raises:
        ConfigError: the seed's file is of another scale, machine, torch or transformers.
    """
    file = out / f"seed-{seed}.json"
    study = begun(file, _empty(scale, seed, device))
    own = work / _name(scale) / f"seed-{seed}"
    own.mkdir(parents=True, exist_ok=True)
    models = _Models(scale, seed, device, own)
    done, failed = {outcome.case for outcome in study.outcomes}, 0
    for case in cases:
        if case in done:
            continue
        if time.time() > until:
            break
        try:
            outcome = _measure(case, models, device)
        except Exception:  # noqa: BLE001 - the cases that are left may work, and a GPU is lent for minutes
            traceback.print_exc()
            failed += 1
            continue
        if outcome is None:
            continue
        study = replace(study, outcomes=(*study.outcomes, outcome))
        write_study(file, study)
        print(
            f"seed {seed} {case.task}, {case.method} {case.calibration}: exact match {outcome.exact_match:.2%}, "
            f"NLL {outcome.nll:.4f}, {outcome.seconds:.1f} s",
            file=sys.stderr,
            flush=True,
        )
    return failed


def _name(scale: StudyScale) -> str:
    """Return a name of all that the checkpoints of a scale depend on."""
    return f"scale-{hashlib.sha256(to_json(scale)).hexdigest()[:12]}"


def _empty(scale: StudyScale, seed: int, device: str) -> SeedStudy:
    return SeedStudy(
        date=datetime.now(UTC).date().isoformat(),
        machine=torch.cuda.get_device_name() if device == "cuda" else f"CPU, {os.cpu_count()} shared cores",
        torch=str(torch.__version__),
        transformers=str(transformers.__version__),
        seed=seed,
        model_params=sum(parameter.numel() for parameter in new_model(scale.sizes).parameters()),
        scale=scale,
        outcomes=(),
    )


def _run_one(
    seed: int,
    *,
    scale: str,
    only: Sequence[str],
    out: Path,
    work: Path,
    device: str,
    threads: int,
    until: float,
) -> int:
    torch.set_num_threads(threads)
    transformers.utils.logging.disable_progress_bar()
    cases = [case for case in case_order(SCALES[scale]) if not only or case.task in only]
    return run_seed(SCALES[scale], seed, cases, out=out, work=work, device=device, until=until)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--scale", choices=SCALES, default="large")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--tasks", nargs="+", default=(), help="only these; all where none is named")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=3, help="seeds that run at once")
    parser.add_argument("--budget-s", type=float, default=540.0, help="no case begins after so many seconds")
    parser.add_argument("--work", type=Path, help="folder of the checkpoints, kept for the next run")
    args = parser.parse_args(argv)
    until = time.time() + args.budget_s
    args.out.mkdir(parents=True, exist_ok=True)
    threads = max(1, (os.cpu_count() or 1) // args.jobs)
    with tempfile.TemporaryDirectory() as temporary:
        run = partial(
            _run_one,
            scale=args.scale,
            only=args.tasks,
            out=args.out,
            work=args.work or Path(temporary),
            device=args.device,
            threads=threads,
            until=until,
        )
        with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
            failed = sum(pool.map(run, range(args.seeds)))
    if failed:
        raise SystemExit(f"{failed} cases failed")


if __name__ == "__main__":
    main()
