"""Bench of vLLM's variant costs, on a machine whose true costs are known."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fingerprint.config import SlotFormat
from fingerprint.errors import EngineError
from fingerprint.estimators import adapter_slots
from fingerprint.families import load_spec
from fingerprint.variant_measurements import VariantKind
from fingerprint.variant_step_plan import step_plan
from tests.bench import variant_costs_vllm as bench
from tests.fingerprint.synthetic_machine import llama
from tests.fingerprint.variant_step_machine import INT2, RANK_16, StepMachine, StepTruth

SPEC = llama(32, max_context_tokens=8192)


class Target:
    """Target on the machine, with the names of its folders."""

    def __init__(self, machine: StepMachine) -> None:
        self.machine = machine
        self.formats: list[SlotFormat] = []

    def open(self, *, tp: int, pp: int, delta_format: SlotFormat = SlotFormat.NONE) -> Any:
        assert (tp, pp) == (1, 1)
        self.formats.append(delta_format)
        return self.machine.open()


class Shapes(bench.Shapes):
    def cut(self, layers: Any) -> Path:
        target = self._folder / str(len(layers))
        target.mkdir(exist_ok=True)
        if len(layers) == SPEC.num_layers:
            self.whole = target
        return target


def write_small(base: Path, target: Path, kind: VariantKind, number: int) -> int:
    target.mkdir()
    (target / "variant.safetensors").write_bytes(b"0" * 100)
    return 100


def target_for(kind: VariantKind) -> Target:
    """Return a machine whose slots add nothing to what deltas take."""
    truth = StepTruth()
    if kind.is_delta:
        truth = replace(
            truth,
            step_layer=(*truth.step_layer[:2], 0.0, 0.0),
            prompt_layer=(*truth.prompt_layer[:2], 0.0, 0.0),
            rest=(*truth.rest[:3], 0.0),
        )
    return Target(StepMachine(spec=SPEC, truth=truth, alone_first=lambda burst: 64))


@pytest.mark.parametrize("kind", [RANK_16, INT2], ids=["rank-16", "int2"])
def test_parts_measure_and_the_table_compares(
    kind: VariantKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "write_random_variant", write_small)
    target = target_for(kind)
    runs = {"fingerprints": bench.measure_fingerprints, "whole": bench.measure_whole}
    for part in bench.PARTS:
        kept = bench.Kept(tmp_path / f"{part}-{bench.name_of(kind)}.json")
        shapes = Shapes(tmp_path / part)
        shapes.cut(range(SPEC.num_layers))
        runs[part](SPEC, shapes, target, kind, kept)
    assert target.formats == [kind.delta_format] * 2
    rows = [line.split("|") for line in bench.table(tmp_path, kind) if line.startswith(("| step", "| prompts"))]
    assert len(rows) == len(bench.STEPS[kind.is_delta]) + sum(len(actives) for *_, actives in bench.PROMPTS)
    for row in rows:
        assert float(row[6]) == pytest.approx(float(row[5]), abs=0.02), row


def test_a_part_that_fails_keeps_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "write_random_variant", write_small)
    machine = StepMachine(spec=SPEC, failing=EngineError("gone"))
    kept, shapes = bench.Kept(tmp_path / "kept.json"), Shapes(tmp_path / "models")
    with pytest.raises(EngineError):
        bench.measure_fingerprints(SPEC, shapes, Target(machine), RANK_16, kept)
    written = json.loads((tmp_path / "kept.json").read_text())
    assert [row["kind"] for row in written["rows"]][:3] == ["start", "memory", "burst"]
    assert written["rows"][-1]["kind"] == "memory"


@pytest.mark.parametrize(("model", "layers"), [(bench.LLAMA, 32), ("Qwen/Qwen3-8B", 36)])
def test_shapes_are_of_the_model_that_is_named(model: str, layers: int, tmp_path: Path) -> None:
    spec = load_spec(bench.Shapes(tmp_path / "models", model).whole)
    assert spec.num_layers == layers
    assert spec.max_context_tokens > max(tokens for _, tokens, _ in bench.PROMPTS)


def test_an_interpreter_without_a_web_framework_can_run_it() -> None:
    """vLLM's own Python has none, and a part imports more at its start."""
    missing = ("fastapi", "starlette", "pydantic", "sqlalchemy", "uvicorn", "aiohttp", "httpx", "typer", "rich")
    program = f"import sys; sys.modules.update(dict.fromkeys({missing}))\n"
    program += "import tests.bench.variant_costs_vllm, tests.bench.accuracy_measure"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])


def test_cases_have_more_distinct_variants_than_fingerprints() -> None:
    """And lengths of prompts that fingerprints do not have."""
    assert max(bench.STEPS[False]) == bench.SLOTS[False]
    assert re.search(r"Fingerprints\n# have bursts", Path(bench.__file__).read_text())
    for kind in (RANK_16, INT2):
        plan = step_plan(SPEC, bench.PROFILED, kind)
        assert max(plan.active) < max(bench.STEPS[kind.is_delta])
        assert not {shape.input_tokens for shape in plan.prompts} & {tokens for _, tokens, _ in bench.PROMPTS[:3]}


@pytest.mark.parametrize(("kind", "several"), [(RANK_16, {1, 4, 8}), (INT2, {1, 4})], ids=["rank-16", "int2"])
def test_fingerprints_run_what_the_cases_say_and_none_of_what_is_judged_of_the_whole(
    kind: VariantKind, several: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of 1 and 32 requests, prompts of one at lengths of their own, and of 4 short ones: all as they ran."""
    monkeypatch.setattr(bench, "write_random_variant", write_small)
    kept, shapes = bench.Kept(tmp_path / "kept.json"), Shapes(tmp_path / "models")
    bench.measure_fingerprints(SPEC, shapes, target_for(kind), kind, kept)
    bursts = [row for row in kept.document["rows"] if row["kind"] == "burst"]
    assert {row["layers"] for row in bursts} == {1, 2}
    steps = {(row["batch"], row["active"]) for row in bursts if row["output_tokens"] > 1}
    assert steps == {(1, 0), (1, 1), (bench.ROWS, 0), *((bench.ROWS, active) for active in several)}
    prompts = {(row["batch"], row["input_tokens"], row["active"]) for row in bursts if row["output_tokens"] == 1}
    assert {(batch, active) for batch, _, active in prompts} == {(1, 0), (1, 1), (4, 0), (4, 1), (4, 4)}
    assert {tokens for batch, tokens, _ in prompts if batch == 4} == {256}
    judged = {(batch, tokens) for batch, tokens, _ in bench.PROMPTS}
    assert not {(batch, tokens) for batch, tokens, _ in prompts} & judged
    assert max(active for _, active in steps) < max(bench.STEPS[kind.is_delta])


class TestTime:
    """The bursts of a whole model, on an engine that takes a second for each."""

    def rounds(self, tmp_path: Path, end_s: float) -> tuple[list[dict[str, int]], list[Any]]:
        kept, asked = bench.Kept(tmp_path / "kept.json"), list[dict[str, int]]()

        class Session:
            def bursts(self, **order: int) -> None:
                asked.append(order)

        bench.run_rounds(Session(), RANK_16, kept, has_slots=True, end_s=end_s, clock=lambda: float(len(asked)))
        return asked, kept.document["rows"]

    def count(self, asked: list[dict[str, int]], tokens: int) -> int:
        """Return the rounds of a prompt's length, or of steps."""
        return sum(order["input_tokens"] == tokens and order["active"] == 1 for order in asked)

    def test_all_rounds_run_where_there_is_time(self, tmp_path: Path) -> None:
        asked, rows = self.rounds(tmp_path, 1000.0)
        assert self.count(asked, 3000) == 1 + bench.PROMPT_ROUNDS
        assert self.count(asked, bench.INPUT) == 1 + bench.STEP_ROUNDS
        assert rows == []

    def test_rounds_that_would_end_too_late_are_left_out_and_said(self, tmp_path: Path) -> None:
        """A round has 5 steps and 9 prompts: the third ends after 42 s."""
        asked, rows = self.rounds(tmp_path, 45.0)
        assert len(asked) == 42
        assert [(row["kind"], row["rounds"]) for row in rows] == [("left-out", 3)]

    def test_each_engine_has_a_round_to_compare(self, tmp_path: Path) -> None:
        asked, _ = self.rounds(tmp_path, 0.0)
        assert self.count(asked, 3000) == self.count(asked, bench.INPUT) == 2


def test_a_table_without_fingerprints_has_what_was_measured(tmp_path: Path) -> None:
    """The part that predicts ended by an error, say."""
    kept = Path(__file__).parent / "results/variant_costs_h200"
    for part in bench.PARTS:
        document = json.loads(bench._part_file(kept, part, RANK_16))
        document.pop("measurement", None)
        (tmp_path / f"{part}-16.json").write_text(json.dumps(document))
    columns = [[line.split("|")[1:6] for line in bench.table(out, RANK_16)] for out in (tmp_path, kept)]
    assert columns[0][:-1] == columns[1][:-1]


def test_what_the_decision_cites_is_what_was_kept() -> None:
    """Steps with 1, 4, 8 and 32 adapters on an H200: measured, and predicted within the interval."""
    kept = Path(__file__).parent / "results/variant_costs_h200"
    table = bench.table(kept, VariantKind(16))
    lines = [line.split(" | ") for line in table if line.startswith("| step of 32 |")]
    assert [line[1] for line in lines] == ["0", "1", "4", "8", "32"]
    assert all(line[6].endswith("within") for line in lines[1:])
    assert all(line.split("|")[6:8] == ["  ", "  "] for line in table if line.startswith("| prompts")), (
        "no long ones"
    )
    page = (Path(__file__).parents[2] / "docs/decisions/0053-variants-by-steps.md").read_text()
    for line in lines[1:]:
        assert re.search(rf"\| {re.escape(line[4])} \| [\d.]+ \| {re.escape(line[5])} \(", page), line


KEPT = Path(__file__).parent / "results/variant_costs_h200"


@pytest.mark.parametrize(
    ("folder", "kind", "most_off"),
    [
        ("qwen3-8b", RANK_16, {"step": 0.04, "prompts": 0.05}),
        (".", INT2, {}),
        ("qwen3-8b", INT2, {"step": 0.133}),
    ],
)
def test_what_was_judged_on_an_h200_is_what_the_decision_says(
    folder: str, kind: VariantKind, most_off: dict[str, float]
) -> None:
    """Adapters are met within the shares of the whole time that are cited, but for a prompt at its host's pace."""
    page = (Path(__file__).parents[2] / "docs/decisions/0053-variants-by-steps.md").read_text()
    judged = page[page.index("## Judged on another model") :]
    cited = {(active, float(value)) for active, value in re.findall(r"\| (\d+) \| (-?[\d.]+) \|", judged)}
    lines = bench.table(KEPT / folder, kind)
    rows = [line.split("|") for line in lines if line.startswith(("| step", "| prompts"))]
    assert len(rows) == len(bench.STEPS[kind.is_delta]) + sum(len(actives) for *_, actives in bench.PROMPTS)
    for _, what, active, measured, _, added, predicted, *_ in rows:
        assert any(count == active.strip() and abs(value - float(added)) < 0.06 for count, value in cited), what
        off = abs(float(predicted) - float(added)) / float(measured)
        is_at_host_pace = "1024" in what and int(active)
        assert off < most_off.get(what.split()[0], math.inf) or is_at_host_pace, (what, active, off)


def test_what_the_decision_says_of_loads_is_what_was_kept() -> None:
    """Measured and predicted seconds."""
    judged = ((".", RANK_16), ("qwen3-8b", RANK_16), (".", INT2), ("qwen3-8b", INT2))
    lines = [bench.table(KEPT / folder, kind)[-1] for folder, kind in judged]
    found = [tuple(map(float, re.findall(r"\d+\.\d+", line))) for line in lines]
    assert found == [(0.139, 0.161), (0.143, 0.129), (2.671, 1.831), (2.706, 1.911)]


class TestDeltasOnASecondModel:
    """Qwen3-8B in int2, by which plans keep the recording for prompts of deltas."""

    def page(self) -> str:
        page = (Path(__file__).parents[2] / "docs/decisions/0053-variants-by-steps.md").read_text()
        return page[page.index("**Qwen3-8B with deltas in int2**") : page.index("**Loads** by a line")]

    def rows(self, what: str) -> list[list[str]]:
        """Return active variants, time with slots, added, predicted, interval and the recording's, of each row."""
        lines = [
            line.split(" | ") for line in bench.table(KEPT / "qwen3-8b", INT2) if line.startswith(f"| {what}")
        ]
        return [[*line[1:3], *line[4:7], line[7].removesuffix(" |")] for line in lines]

    def off(self, row: list[str], predicted: str) -> float:
        """Return a prediction's distance, in parts of the whole time."""
        return (float(predicted) - float(row[2])) / float(row[1])

    def test_every_figure_of_the_table_is_kept(self) -> None:
        for what, digits in (("step", 2), ("prompts", 1)):
            for active, _, *values, interval, recorded in self.rows(what):
                low, high = interval.split(",")[0].split(" to ")
                added, predicted, least, most, scaled = (
                    f"{float(value):.{digits}f}" for value in (*values, low, high, recorded)
                )
                assert f"| {active} | {added} | {predicted} ({least} to {most}) | {scaled} |" in self.page()

    def test_the_measured_law_of_prompts_is_no_nearer_than_the_recording(self) -> None:
        rows = self.rows("prompts")
        ours, recorded = ([self.off(row, row[column]) for row in rows] for column in (3, 5))
        means = [sum(map(abs, each)) / len(rows) for each in (ours, recorded)]
        assert means[0] > means[1]
        assert f"| | {means[0]:.1%} | {means[1]:.1%} |" in self.page()
        cited = re.findall(r"\| (\d) \| ([+-]?\d+)% \| ([+-]?\d+)% \|", self.page())
        found = [(row[0], round(100 * a), round(100 * b)) for row, a, b in zip(rows, ours, recorded, strict=True)]
        assert [(active, int(a), int(b)) for active, a, b in cited] == found
        assert sum(row[4].endswith("within") for row in rows) == 5
        assert sum(abs(a) < abs(b) for a, b in zip(ours, recorded, strict=True)) == 6
        assert not adapter_slots.TAKES_DELTA_PROMPTS

    @pytest.mark.parametrize(
        ("name", "is_of_deltas"), [("the four of the base", False), ("the five with deltas", True)]
    )
    def test_of_prompts_with_deltas_alone_the_measured_law_is_nearer(self, name: str, is_of_deltas: bool) -> None:
        """The verdict hangs on the prompts of the base, which count as much in the mean of all nine."""
        rows = [row for row in self.rows("prompts") if (row[0] != "0") == is_of_deltas]
        ours, recorded = (sum(abs(self.off(row, row[column])) for row in rows) / len(rows) for column in (3, 5))
        assert (ours < recorded) == is_of_deltas
        held = sum(row[4].endswith("within") for row in rows)
        added, factor = [(float(row[2]), float(row[5])) for row in rows], adapter_slots.ADDED_ERROR
        of_recording = sum(scaled / factor <= now <= factor * scaled for now, scaled in added)
        assert f"| {name} | {ours:.1%} | {recorded:.1%} | {held}, {of_recording} |" in self.page()
        assert sum(now > factor * scaled for now, scaled in added) == (3 if is_of_deltas else 4)

    def test_two_prompts_are_within_what_the_recording_says(self) -> None:
        """From half to twice of what it adds."""
        added = [(float(row[2]), float(row[5])) for row in self.rows("prompts")]
        factor = adapter_slots.ADDED_ERROR
        assert sum(scaled / factor <= now <= factor * scaled for now, scaled in added) == 2

    def test_steps_are_met_up_to_four_deltas(self) -> None:
        rows = self.rows("step")
        assert [f"{self.off(row, row[3]):+.1%}" for row in rows[1:]] == ["+2.0%", "+0.0%", "-13.2%"]
        assert [row[4].rsplit(", ")[-1] for row in rows] == ["outside", "within", "within", "within"]
