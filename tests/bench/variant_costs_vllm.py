"""Times of variants predicted from repeated fingerprints against a whole model: vLLM, on one GPU.

Run with vLLM's own Python on the GPU machine, from the repository's root::

    python -m tests.bench.variant_costs_vllm measure OUT [--parts fingerprints whole] [--kind 16] [--gpu 0]
        [--model Qwen/Qwen3-8B] [--seconds 540]
    python -m tests.bench.variant_costs_vllm table OUT [--kind 16]

``fingerprints`` measures variants as a profile does (three starts of one and two layers). ``whole`` starts the
whole shape with random weights, without slots and with them, and runs the requests of ``STEPS`` and ``PROMPTS``,
which were written down before the first result, in interleaved rounds. After the first two rounds of an engine, of
which one warms up, none begins that is expected to end more than ``--seconds`` after the start of all. The parts
may run at once on two GPUs: each has files of its own, ``OUT/PART-KIND.json``, written after each burst, with the
error where one ended it, and the table takes what there is; each model needs an OUT of its own. Kinds are a rank
of adapters, or a format of deltas. No web framework is imported.

Kept in ``results/variant_costs_h200`` are the shapes of Llama-3.1-8B and, in ``qwen3-8b``, of Qwen3-8B, each with
adapters of rank 16 and with deltas in int2: docs/decisions/0053 says what they judged. ``own_kernels`` has our
kernels of adapters, of the first shape without the whole model (docs/decisions/0054). A sitting is repeated by::

    python -m tests.bench.variant_costs_vllm measure OUT --model Qwen/Qwen3-8B --kind int2
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fingerprint.codec import from_json, to_json
from fingerprint.config import DeploymentConfig, SlotFormat, Workload
from fingerprint.errors import IserveError
from fingerprint.estimates import Quantity
from fingerprint.estimators.adapter_slots import variant_cost
from fingerprint.estimators.measured_variants import measured_cost
from fingerprint.families import load_spec
from fingerprint.measurements import RunReading, StepReading
from fingerprint.model_spec import ModelSpec
from fingerprint.random_variants import write_random_variant
from fingerprint.truncate import generate_shape
from fingerprint.variant_measurements import VariantKind, VariantMeasurement
from fingerprint.variant_step_plan import step_plan
from fingerprint.variant_steps import measure_variant_steps
from tests.bench.delta_served_files import LLAMA_8B
from tests.bench.format_configs import model_folder
from tests.bench.kept import read_kept

PROFILED = Workload(batch=32, input_tokens=2048, output_tokens=129)
ROWS, INPUT, OUTPUT = 32, 64, 65
SLOTS = {False: 32, True: 8}  # of adapters, of deltas
# What is judged: distinct variants of decode steps of 32 rows; requests, tokens and distinct variants of prompts
# at once (in the first sitting 1 and 4 x 2,048 tokens, with steps in four rounds; kept in results). Fingerprints
# have bursts of 1 and 32 requests with 1, 4 and 8 distinct adapters (deltas: 1 and 4), prompts of one request, and
# prompts of 4 x 256 tokens.
STEPS = {False: (0, 1, 4, 8, 32), True: (0, 1, 4, 8)}
PROMPTS = ((1, 1024, (0, 1)), (1, 3000, (0, 1)), (1, 6000, (0, 1)), (4, 2048, (0, 1, 4)))
STEP_ROUNDS, PROMPT_ROUNDS = 3, 5
LEAST_ROUNDS = 2  # of each engine, whatever time there is: one that warms up and one to compare
CONTENTS = {False: 4, True: 1}  # files that differ, of adapters and deltas; each slot has a copy of its own
PARTS = ("fingerprints", "whole")
LLAMA = "Llama-3.1-8B"  # whose context here is 8,192


class Kept:
    """Rows of one part, written after each."""

    def __init__(self, file: Path, **facts: object) -> None:
        self._file, self._begun_s = file, time.monotonic()
        self.document: dict[str, Any] = {"facts": facts, "rows": []}
        file.parent.mkdir(parents=True, exist_ok=True)
        self._write()

    def add(self, kind: str, **row: object) -> None:
        at_s = round(time.monotonic() - self._begun_s, 1)
        self.document["rows"].append({"kind": kind, "at_s": at_s, **row})
        print(f"{at_s} {kind} {json.dumps(row)[:240]}", flush=True)
        self._write()

    def keep(self, name: str, value: object) -> None:
        self.document[name] = value
        self._write()

    def _write(self) -> None:
        partial_file = self._file.with_suffix(".part")
        partial_file.write_text(json.dumps(self.document) + "\n")
        os.replace(partial_file, self._file)


class Watched:
    """Session whose starts, loads and bursts are kept."""

    def __init__(self, inner: Any, kept: Kept) -> None:
        self._inner, self._kept, self._engine = inner, kept, dict[str, object]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def load_with_slots(self, checkpoint: Path, **order: Any) -> None:
        begun_s = time.monotonic()
        self._engine = {"layers": order["num_layers"], "slots": order["slots"]}
        self._inner.load_with_slots(checkpoint, **order)
        self._kept.add("start", **self._engine, start_s=time.monotonic() - begun_s)
        try:
            self._kept.add("memory", **self._engine, ranks=json.loads(to_json(self._inner.memory())))
        except IserveError as error:
            self._kept.add("error", text=f"memory: {error}")

    def load_variants(self, folders: Sequence[Path]) -> tuple[float, ...]:
        found: tuple[float, ...] = self._inner.load_variants(folders)
        self._kept.add("loads", **self._engine, loads_s=found)
        return found

    def bursts(self, **order: Any) -> tuple[RunReading, ...]:
        found: tuple[RunReading, ...] = self._inner.bursts(**order)
        names = ("batch", "input_tokens", "output_tokens", "repeat", "active")
        asked = {name: order.get(name) for name in names}
        for reading in found:
            self._kept.add("burst", **self._engine, **asked, **summary_of(reading, order["batch"]))
        return found


def summary_of(reading: RunReading, batch: int) -> dict[str, object]:
    """Return what a burst took: each step of prompts, and medians of the later half of those that decode."""
    decoding = [step for step in reading.steps if not step.prefill_tokens and step.sequences == batch]
    settled = decoding[len(decoding) // 2 :]

    def times(step: StepReading) -> dict[str, float]:
        return {name: getattr(step, name) for name in ("gap_s", "lead_s", "forward_s", "tail_s")}

    return {
        "e2e_s": reading.e2e_s,
        "sm_clock_mhz": reading.sm_clock_mhz,
        "prompts": [
            {"tokens": step.tokens, "sequences": step.sequences, **times(step)}
            for step in reading.steps
            if step.prefill_tokens
        ],
        "decoding": len(settled),
        **(
            {
                "step_s": statistics.median(step.cadence_s for step in settled),
                **{name: statistics.median(times(step)[name] for step in settled) for name in times(settled[0])},
            }
            if settled
            else {}
        ),
    }


def kind_named(name: str) -> VariantKind:
    return VariantKind(int(name)) if name.isdigit() else VariantKind(delta_format=SlotFormat(name))


def config_of(kind: VariantKind) -> DeploymentConfig:
    return DeploymentConfig(
        engine="vllm",
        adapter_slots=SLOTS[kind.is_delta],
        adapter_rank=kind.rank,
        delta_format=kind.delta_format,
    )


def config_named(model: str, folder: Path) -> dict[str, Any]:
    """Return the config of ``LLAMA``, or of another that ``format_configs`` knows and writes in ``folder``."""
    if model == LLAMA:
        return dict(LLAMA_8B)
    return dict(json.loads((model_folder(model, folder) / "config.json").read_text()))


class Shapes:
    """Folders of the whole shape, its cuts and their variants."""

    def __init__(self, folder: Path, model: str = LLAMA) -> None:
        self._folder, self.whole = folder, folder / "whole"
        self.whole.mkdir(parents=True)
        self._config = config_named(model, folder)
        (self.whole / "config.json").write_text(json.dumps(self._config))

    def cut(self, layers: Sequence[int]) -> Path:
        target = self._folder / f"layers-{len(layers)}"
        if len(layers) == self._config["num_hidden_layers"]:
            return self.whole
        if not target.exists():
            generate_shape(self.whole, target, layers)
        return target

    def variant(self, layers: Sequence[int], kind: VariantKind, number: int) -> tuple[Path, int]:
        """Return a variant; those beyond the first few share their files."""
        target = self._folder / f"variant-{len(layers)}-{kind.rank or kind.delta_format}-{number}"
        contents = CONTENTS[kind.is_delta]
        if number >= contents:
            first, _ = self.variant(layers, kind, number % contents)
            if not target.exists():
                target.mkdir()
                for file in first.iterdir():
                    os.link(file, target / file.name)
        elif not target.exists():
            write_random_variant(self.cut(layers), target, kind, number)
        return target, sum(file.stat().st_size for file in target.glob("*.safetensors"))


def measure_fingerprints(spec: ModelSpec, shapes: Shapes, target: Any, kind: VariantKind, kept: Kept) -> None:
    """Measure as a profile does."""
    measured = measure_variant_steps(
        spec,
        lambda: Watched(target.open(tp=1, pp=1, delta_format=kind.delta_format), kept),
        shapes.cut,
        shapes.variant,
        step_plan(spec, PROFILED, kind),
        progress=lambda p: print(f"{p.elapsed_s:.1f} s: {p.running}", flush=True),
    )
    kept.keep("measurement", json.loads(to_json(measured)))
    kept.add("measured", spent_s=measured.spent_s, steps=len(measured.steps), failure=measured.failure)


def measure_whole(
    spec: ModelSpec, shapes: Shapes, target: Any, kind: VariantKind, kept: Kept, end_s: float = math.inf
) -> None:
    """Run the whole model without slots, with them, and with variants in them.

    Args:
        end_s: by ``time.monotonic``, when the last round should have ended.
    """
    slots, layers = SLOTS[kind.is_delta], range(spec.num_layers)
    folders = [shapes.variant(layers, kind, number)[0] for number in range(slots)]
    kept.add("written", variants=len(folders))
    session = Watched(target.open(tp=1, pp=1, delta_format=kind.delta_format), kept)
    try:
        for count in (0, slots):
            session.load_with_slots(
                shapes.whole,
                num_layers=spec.num_layers,
                max_batch=ROWS,
                max_context_tokens=max(tokens for _, tokens, _ in PROMPTS) + OUTPUT,
                kv_tokens=max(ROWS * (INPUT + OUTPUT), *(batch * (tokens + 1) for batch, tokens, _ in PROMPTS)),
                slots=count,
                rank=kind.rank if count else 0,
                delta_format=kind.delta_format if count else SlotFormat.NONE,
            )
            if count:
                session.load_variants(folders)
            run_rounds(session, kind, kept, has_slots=count > 0, end_s=end_s)
    finally:
        session.close()


def run_rounds(
    session: Any,
    kind: VariantKind,
    kept: Kept,
    *,
    has_slots: bool,
    end_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Run rounds of steps and prompts, every second one backwards. The first warms up: the table leaves it out."""
    steps = [(ROWS, INPUT, OUTPUT, active) for active in STEPS[kind.is_delta]]
    prompts = [(batch, tokens, 1, active) for batch, tokens, actives in PROMPTS for active in actives]
    most, shortest_s = 1 + max(STEP_ROUNDS, PROMPT_ROUNDS), math.inf
    for number in range(most):
        begun_s = clock()
        if number >= LEAST_ROUNDS and begun_s + shortest_s > end_s:
            kept.add("left-out", has_slots=has_slots, rounds=most - number)
            return
        bursts = [*(steps if number <= STEP_ROUNDS else ()), *(prompts if number <= PROMPT_ROUNDS else ())]
        for batch, tokens, output, active in bursts if number % 2 else bursts[::-1]:
            if has_slots or not active:
                _burst(session, batch, tokens, output, active)
        shortest_s = min(shortest_s, clock() - begun_s)


def _burst(session: Any, batch: int, tokens: int, output: int, active: int) -> None:
    session.bursts(batch=batch, input_tokens=tokens, output_tokens=output, most=1, until_s=0.0, active=active)


def measure(
    out: Path, parts: Sequence[str], kind: VariantKind, model: str, gpu: int, seconds: float = math.inf
) -> bool:
    """Measure each part; return whether all of them ended without an error."""
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # it is compiled at the first start
    os.environ.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)  # an engine in the worker's process would not end
    all_ended, end_s = True, time.monotonic() + seconds
    for part in parts:
        at = time.strftime("%Y-%m-%dT%H:%M:%S")
        kept = Kept(out / f"{part}-{name_of(kind)}.json", at=at, gpu=gpu, model=model)
        with tempfile.TemporaryDirectory(prefix="variant-costs-") as folder:
            try:
                _measure_part(part, kind, model, gpu, out, Path(folder), kept, end_s)
            except (Exception, SystemExit):  # noqa: BLE001  # the file says what ended the part
                all_ended = False
                kept.add("error", text=traceback.format_exc())
            finally:
                for log in sorted(Path(folder).glob("workers/*/log.txt")):
                    lines = log.read_text(errors="replace").splitlines()
                    chosen = [line[:400] for line in lines if _is_worth_keeping(line)]
                    kept.keep("log", [*chosen[-400:], *(line[:400] for line in lines[-80:])])
    return all_ended


def _measure_part(
    part: str, kind: VariantKind, model: str, gpu: int, out: Path, folder: Path, kept: Kept, end_s: float
) -> None:
    from tests.bench.accuracy_measure import MEMORY_FRACTION, _Bench, machine_here, total_bytes

    machine = machine_here(1)
    kept.keep("machine", json.loads(to_json(machine)))
    shapes, scratch = Shapes(folder / "models", model), folder / "workers"
    scratch.mkdir()
    spec = load_spec(shapes.whole)
    bench = _Bench(
        out=out,
        tp=1,
        pp=1,
        machine=machine,
        budget_bytes=int(MEMORY_FRACTION * total_bytes()),
        scratch=scratch,
        port=18_080 + 100 * gpu + 20 * PARTS.index(part),
        first_gpu=gpu,
    )
    with bench.target(shapes.whole, spec) as target:
        if part == "whole":
            measure_whole(spec, shapes, target, kind, kept, end_s)
        else:
            measure_fingerprints(spec, shapes, target, kind, kept)


def _is_worth_keeping(line: str) -> bool:
    words = (
        "LoRA",
        "lora",
        "slots of deltas",
        "Graph capturing",
        "Model loading",
        "init engine",
        "WARNING",
        "rror",
    )
    return any(word in line for word in words)


def name_of(kind: VariantKind) -> str:
    return str(kind.rank or kind.delta_format)


def _part_file(out: Path, part: str, kind: VariantKind) -> bytes:
    """Return a part's text; committed ones are compressed."""
    written = out / f"{part}-{name_of(kind)}.json"
    return read_kept(written if written.exists() else written.with_suffix(".json.xz"))


def table(out: Path, kind: VariantKind) -> list[str]:
    """Return lines of a table: what variants and slots add to the engine without slots, and what is predicted.

    A prediction is blank where the fingerprints were not measured, or not with prompts that are long enough.
    """
    parts = {part: json.loads(_part_file(out, part, kind)) for part in PARTS}
    kept = parts["fingerprints"].get("measurement")
    measured = [] if kept is None else [from_json(json.dumps(kept).encode(), VariantMeasurement)]
    config, slots = config_of(kind), SLOTS[kind.is_delta]
    with tempfile.TemporaryDirectory(prefix="variant-costs-") as folder:
        spec = load_spec(Shapes(Path(folder) / "models", parts["whole"]["facts"].get("model", LLAMA)).whole)
    cost, recorded = measured_cost(measured, spec.num_layers, config), variant_cost(None, spec, config)
    assert recorded is not None
    bursts = _Bursts([row for row in parts["whole"]["rows"] if row["kind"] == "burst"], slots)
    lines = ["| what | active | measured | without slots | added | predicted | interval | the recording's |"]
    lines.append("|---|--:|--:|--:|--:|--:|--:|--:|")
    for active in STEPS[kind.is_delta]:
        times = bursts.times("step_s", ROWS, INPUT, active)
        step = cost.step_s(ROWS, active) if cost else None
        lines += _line(f"step of {ROWS}", active, times, step, recorded.step_s(ROWS, active))
    for batch, tokens, actives in bursts.prompts():
        work = Workload(batch=batch, input_tokens=tokens, output_tokens=1)
        for active in actives:
            times = bursts.times("e2e_s", batch, tokens, active)
            asked = (work, times[1] or 0.0, 0.0 if active else 1.0, float(active))
            predicted = cost.prompts_s(*asked) if cost and cost.has_measured_prompts else None
            lines += _line(f"prompts of {batch} x {tokens}", active, times, predicted, recorded.prompts_s(*asked))
    loads = [row["loads_s"] for row in parts["whole"]["rows"] if row["kind"] == "loads"]
    if loads:
        predicted_s = f"{cost.load.value:.3f} s" if cost else "none"
        lines.append(f"a load: measured {statistics.median(loads[0][1:]):.3f} s, predicted {predicted_s}")
    return lines


class _Bursts:
    """Bursts of the whole model, by what was asked."""

    def __init__(self, rows: Sequence[dict[str, Any]], slots: int) -> None:
        self._rows, self._slots = rows, slots

    def prompts(self) -> list[tuple[int, int, tuple[int, ...]]]:
        """Return the requests and tokens of prompts, with the distinct variants of each."""
        asked: dict[tuple[int, int], set[int]] = {}
        for row in self._rows:
            if row["output_tokens"] == 1:
                asked.setdefault((row["batch"], row["input_tokens"]), set()).add(row["active"])
        return [(*requests, tuple(sorted(actives))) for requests, actives in sorted(asked.items())]

    def times(self, name: str, batch: int, tokens: int, active: int) -> tuple[float | None, float | None]:
        """Return the time with slots, and the base's without them."""
        return (
            self._median_of(name, batch, tokens, self._slots, active),
            self._median_of(name, batch, tokens, 0, 0),
        )

    def _median_of(self, name: str, batch: int, tokens: int, slots: int, active: int) -> float | None:
        asked = {"batch": batch, "input_tokens": tokens, "slots": slots, "active": active}
        found = [row[name] for row in self._rows if all(row[key] == value for key, value in asked.items())]
        return statistics.median(found[1:]) if len(found) > 1 else None


def _line(
    what: str,
    active: int,
    times: tuple[float | None, float | None],
    predicted: Quantity | None,
    recorded: Quantity,
) -> list[str]:
    """Return a line of the table; none where the run ended before."""
    now_s, plain_s = times
    if now_s is None or plain_s is None:
        return []
    added_s = now_s - plain_s
    ours = " | "
    if predicted is not None:
        holds = "within" if predicted.low <= added_s <= predicted.high else "outside"
        ours = f"{1e3 * predicted.value:.2f} | {1e3 * predicted.low:.2f} to {1e3 * predicted.high:.2f}, {holds}"
    return [
        f"| {what} | {active} | {1e3 * now_s:.2f} | {1e3 * plain_s:.2f} | {1e3 * added_s:.2f} | {ours} | "
        f"{1e3 * recorded.value:.2f} |"
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("order", choices=("measure", "table"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--kind", default="16", help="rank of adapters, or format of deltas")
    parser.add_argument("--model", default=LLAMA, help="name of a recorded config, or its folder")
    parser.add_argument("--gpu", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=540.0, help="after which no round of `whole` ends")
    given = parser.parse_args(arguments)
    kind = kind_named(given.kind)
    if given.order == "table":
        print("\n".join(table(given.out, kind)))
    elif not measure(given.out, given.parts, kind, given.model, given.gpu, given.seconds):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
