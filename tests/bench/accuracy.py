"""Predictions from fingerprints against whole models measured on the same GPU and engine: errors and coverage.

Run: ``python -m tests.bench.accuracy [RESULTS_DIR] [--json FILE]``.

Reads what ``tests.bench.accuracy_measure`` recorded (``tests/bench/results/h200`` by default), predicts every
point of every model from its fingerprints alone, and prints, as Markdown: the errors per model, how many truths
lie inside the 90% intervals (calibrated on the other models, never on the model's own truth), memory, what
profiling cost, and the same points by other methods: where fingerprints ran unrepeated, L2-device, L2 and the
paper's method taken literally; the roofline; AIConfigurator where it has an answer.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fingerprint.codec import from_json, to_json
from fingerprint.config import Workload
from fingerprint.errors import NotMeasuredError
from fingerprint.estimates import Quantity, Source
from fingerprint.estimators.base import LatencyStrategy
from fingerprint.estimators.calibration import Calibration, MeasuredError, kernels_of
from fingerprint.estimators.depth_tied import DepthTiedEstimator
from fingerprint.estimators.engine_memory import CountedMemory
from fingerprint.estimators.l2 import L2
from fingerprint.estimators.l2_device import L2Device
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.measurements import Profile, RankMemory, TimingPoint
from tests.bench.accuracy_measure import OUTPUT, REPEATS, Recorded
from tests.bench.accuracy_rows import CostRow, MemoryRow, Row, TimerRow, Truth
from tests.bench.accuracy_tables import markdown
from tests.bench.kept import read_kept

RESULTS = Path(__file__).parent / "results"
AICONFIGURATOR = ("aiconfigurator_h200.json.gz", "aiconfigurator_families.json.gz")
GIB = 2**30
_READ: dict[int, tuple[Profile, DepthTiedEstimator]] = {}  # by the profile's identity: hashing one takes long


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerPoint:
    """The part of a point of ``tests.bench.aiconfigurator_static`` that is compared."""

    model: str
    system: str  # "h200_sxm"
    backend: str
    tp: int
    pp: int
    weights: str
    batch: int
    input_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Answer of AIConfigurator; None where it has no data."""

    point: AnswerPoint
    ttft_s: float | None = None
    tpot_s: float | None = None


@dataclass(frozen=True, slots=True)
class _Answers:
    answers: tuple[Answer, ...]


def load(folder: Path) -> list[Recorded]:
    """Every recording in ``folder``, by name."""
    return [from_json(read_kept(path), Recorded, what=str(path)) for path in sorted(folder.glob("*.json.xz"))]


def truths(recorded: Recorded) -> list[Truth]:
    """TTFT = T(1), TPOT = (T(65) - T(1)) / 64, medians over the runs."""
    times = {
        (p.batch, p.input_tokens, p.output_tokens): np.array([run.e2e_s for run in p.runs]) for p in recorded.whole
    }
    found = []
    for (b, n, output), short in sorted(times.items(), key=lambda item: item[0]):
        if output == 1 and (b, n, OUTPUT) in times:
            ttft_s = float(np.median(short))
            tpot_s = (float(np.median(times[b, n, OUTPUT])) - ttft_s) / (OUTPUT - 1)
            low, high = np.percentile(short, [5, 95])
            found.append(Truth(b, n, ttft_s, tpot_s, float(high - low) / 2 / ttft_s))
    return found


def timer_rows(recorded: Recorded) -> list[TimerRow]:
    """Return what the step timer costs the whole model."""
    beside = recorded.whole_between or recorded.whole  # before calls were in turns, those of minutes before
    off = {(p.batch, p.input_tokens): p for p in beside if p.output_tokens == OUTPUT}
    return [
        TimerRow(
            model=recorded.model,
            variant=_variant(recorded),
            batch=p.batch,
            input_tokens=p.input_tokens,
            calls=len(p.runs),
            off_s=statistics.median(run.e2e_s for run in off[p.batch, p.input_tokens].runs),
            on_s=statistics.median(run.e2e_s for run in p.runs),
        )
        for p in recorded.whole_timed
    ]


def _rows(recorded: Recorded, method: str, truth: Truth, ttft: Quantity, tpot: Quantity) -> list[Row]:
    return [
        Row(
            model=recorded.model,
            variant=_variant(recorded),
            method=method,
            metric=metric,
            batch=truth.batch,
            input_tokens=truth.input_tokens,
            truth_s=true_s,
            predicted_s=predicted.value,
            low_s=predicted.low,
            high_s=predicted.high,
            truth_spread=truth.ttft_spread,
        )
        for metric, true_s, predicted in (("ttft", truth.ttft_s, ttft), ("tpot", truth.tpot_s, tpot))
    ]


def _variant(recorded: Recorded) -> str:
    """Weight format, and the degrees where there are several GPUs."""
    degrees = [f"{name}={n}" for name, n in (("tp", recorded.tp), ("pp", recorded.pp)) if n > 1]
    return " ".join((recorded.weights, *degrees, *(["experts=parallel"] if recorded.expert_parallel else [])))


def predict_l3(recorded: Recorded, calibration: Calibration) -> list[Row]:
    """Ours: depth-tied fingerprints."""
    estimator = _read(recorded).with_calibration(calibration)
    rows = []
    for truth in truths(recorded):
        found = estimator.estimate(recorded.config, truth.workload)
        rows += _rows(recorded, "L3", truth, found.ttft_s, found.tpot_s)
    return rows


def _read(recorded: Recorded) -> DepthTiedEstimator:
    profile = recorded.profile
    if id(profile) not in _READ:
        _READ[id(profile)] = profile, DepthTiedEstimator(profile, _roofline(recorded), Calibration())
    return _READ[id(profile)][1]


def predict_rank(recorded: Recorded) -> list[Row]:
    """From one TP rank alone and modelled sums, where that was profiled too."""
    if recorded.rank_profile is None:
        return []
    alone = replace(recorded, profile=recorded.rank_profile)
    return [replace(row, method="L3 from one rank") for row in predict_l3(alone, Calibration())]


def predict_plain(recorded: Recorded) -> list[Row]:
    """From fingerprints run once a step, at the points where those were run so.

    The paper's method extrapolates the wall's clock; L2 here fits device and host apart; L2-device takes the
    forward from the step records and the host as the engine composes it.
    """
    plain = replace(recorded.profile, timing=tuple(p for p in recorded.profile.timing if p.repeat == 1))
    strategies: dict[str, LatencyStrategy] = {
        "L2-device": L2Device(plain),
        "L2": L2(plain),
        "L2 by the wall's clock (paper)": L2(replace(plain, timing=tuple(map(on_the_wall, plain.timing)))),
    }
    ran = {(p.batch, p.input_tokens) for p in plain.timing}
    rows = []
    for method, strategy in strategies.items():
        for truth in truths(recorded):
            if (truth.batch, truth.input_tokens) in ran:
                try:
                    latency = strategy.latency(recorded.config, truth.workload)
                except NotMeasuredError:
                    continue
                rows += _rows(recorded, method, truth, latency.ttft_s, latency.tpot_s)
    return rows


def on_the_wall(point: TimingPoint) -> TimingPoint:
    """Return the point as the paper reads it: all of a run is what the clock on the wall shows."""
    return replace(point, runs=tuple(replace(run, device_s=run.e2e_s, host_s=0.0) for run in point.runs))


def predict_roofline(recorded: Recorded) -> list[Row]:
    """From the datasheet, nothing measured."""
    roofline = _roofline(recorded)
    rows = []
    for truth in truths(recorded):
        found = roofline.estimate(recorded.config.without_expert_parallel, truth.workload)
        rows += _rows(recorded, "roofline", truth, found.ttft_s, found.tpot_s)
    return rows


def predict_aiconfigurator(recorded: Recorded, answers: Sequence[Answer]) -> list[Row]:
    """AIConfigurator's static mode, by its data of vLLM 0.24, where it has some; it gives no interval."""
    if recorded.expert_parallel:  # it was asked of matrices that are divided
        return []
    system = recorded.profile.machine.device.name.replace("-", "_")
    found = {
        (a.point.batch, a.point.input_tokens): a
        for a in answers
        if a.ttft_s is not None
        and a.tpot_s is not None
        and a.point.model.rpartition("/")[2] == recorded.model
        and (a.point.system, a.point.backend, a.point.weights, a.point.tp, a.point.pp)
        == (system, "vllm", recorded.weights, recorded.tp, recorded.pp)
    }
    rows = []
    for truth in truths(recorded):
        answer = found.get((truth.batch, truth.input_tokens))
        if answer is not None and answer.ttft_s is not None and answer.tpot_s is not None:
            ttft, tpot = (Quantity(s, s, s, Source.ROOFLINE) for s in (answer.ttft_s, answer.tpot_s))
            rows += _rows(recorded, "AIConfigurator 0.12.0", truth, ttft, tpot)
    return rows


def _roofline(recorded: Recorded) -> RooflineEstimator:
    return RooflineEstimator(recorded.profile.spec, recorded.profile.machine.device)


def measured_errors(recorded: Sequence[Recorded]) -> tuple[MeasuredError, ...]:
    """ln(measured / predicted) of L3 at every point; predictions' values do not depend on any calibration."""
    found = []
    for one in recorded:
        versions = dict(one.profile.machine.versions)
        for row in predict_l3(one, Calibration()):
            found.append(
                MeasuredError(
                    model=one.model,
                    shape_hash=one.profile.spec.shape_hash,
                    engine=versions.get("engine", "vllm"),
                    gpu=one.profile.machine.device.name,
                    weights=kernels_of(one.profile.spec, one.weights),
                    tp=one.tp,
                    pp=one.pp,
                    metric=row.metric,
                    batch=row.batch,
                    input_tokens=row.input_tokens,
                    log_error=round(math.log(row.truth_s / row.predicted_s), 5),
                    graph_tokens=one.profile.graph_tokens,
                    expert_parallel=one.expert_parallel,
                )
            )
    return tuple(found)


def memory_row(recorded: Recorded) -> MemoryRow:
    """The engine's counts of its fullest rank against the prediction."""
    estimator = CountedMemory(recorded.profile)
    found = estimator.memory(recorded.config, Workload())
    layers = recorded.profile.spec.num_layers // recorded.pp
    stage = max((found.stage(i, layers) for i in range(recorded.pp)), key=lambda s: s.weights_bytes)
    rank = max(recorded.whole_memory, key=_non_kv_bytes)
    return MemoryRow(
        model=recorded.model,
        variant=_variant(recorded),
        weights_bytes=rank.weights_bytes,
        weights_predicted=stage.weights_bytes,
        non_kv_bytes=_non_kv_bytes(rank),
        non_kv_predicted=stage.weights_bytes + stage.activation_bytes + stage.runtime_bytes,
        blocks=min(r.kv_blocks for r in recorded.whole_memory),
        blocks_predicted=estimator.kv_blocks(recorded.config, budget_bytes(recorded)),
    )


def _non_kv_bytes(rank: RankMemory) -> int:
    return rank.weights_bytes + rank.activation_peak_bytes + rank.runtime_bytes + rank.graph_bytes


def budget_bytes(recorded: Recorded) -> int:
    """Return what the engine might take of a GPU: by its own account, else what it was given."""
    return recorded.whole_memory[0].budget_bytes or recorded.budget_bytes


def cost_row(recorded: Recorded) -> CostRow:
    """GPU time and memory x time after engine starts, and the starts at the memory held after them.

    Of the fingerprints all that was run is counted, but for the points that ran unrepeated: those serve the other
    methods of this page. Of the whole model five calls of each kind.
    """
    profile = recorded.profile
    gpus = recorded.tp * recorded.pp
    plain_s = sum(run.e2e_s for p in profile.timing if p.repeat == 1 for run in p.runs)
    profile_s = profile.spent_s / gpus - plain_s
    whole_s = sum(REPEATS * statistics.median(run.e2e_s for run in p.runs) for p in recorded.whole)
    whole_start_s = sum(recorded.start_s) - recorded.profile_start_s
    held, whole_held = _held_gib(p for p in profile.timing if p.repeat > 1), _held_gib(recorded.whole)
    return CostRow(
        model=recorded.model,
        variant=_variant(recorded),
        profile_s=profile_s,
        profile_gib_s=held and profile_s * held,
        profile_start_s=recorded.profile_start_s,
        profile_start_gib_s=held and recorded.profile_start_s * held,
        whole_s=whole_s,
        whole_gib_s=whole_held and whole_s * whole_held,
        whole_start_s=whole_start_s,
        whole_start_gib_s=whole_held and whole_start_s * whole_held,
    )


def _held_gib(points: Iterable[TimingPoint]) -> float | None:
    """Mean over time of the bytes that the driver saw in use."""
    runs = [run for point in points for run in point.runs if run.held_bytes]
    if not runs:
        return None
    return sum(run.e2e_s * run.held_bytes for run in runs) / sum(run.e2e_s for run in runs) / GIB


def by_other_methods(recorded: Sequence[Recorded]) -> list[Row]:
    """Return the predictions by which L3 is judged: iServe's other methods, the roofline and AIConfigurator."""
    answers = [
        answer
        for file in AICONFIGURATOR
        for answer in from_json(read_kept(RESULTS / file), _Answers, what=file).answers
    ]
    return [
        row
        for one in recorded
        for row in (
            *predict_rank(one),
            *predict_plain(one),
            *predict_roofline(one),
            *predict_aiconfigurator(one, answers),
        )
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="?", default=RESULTS / "h200")
    parser.add_argument("--json", type=Path, help="write every row here")
    parser.add_argument("--points", action="store_true", help="print every point too")
    options = parser.parse_args()
    recorded = load(options.results)
    if not recorded:
        raise SystemExit(f"no recordings in {options.results}; make some with tests.bench.accuracy_measure")
    errors = measured_errors(recorded)
    calibration = Calibration(errors)
    rows = [row for one in recorded for row in predict_l3(one, calibration)]
    others = by_other_methods(recorded)
    memory, costs = [memory_row(one) for one in recorded], [cost_row(one) for one in recorded]
    timers = [row for one in recorded for row in timer_rows(one)]
    print(markdown(rows, memory, costs, timers, others))
    if options.points:
        for row in rows:
            print(
                f"{row.model:14s} {row.variant:10s} {row.metric} {row.batch:4d} {row.input_tokens:5d} "
                f"{1e3 * row.truth_s:9.3f} {1e3 * row.predicted_s:9.3f} {row.error:+7.2%} "
                f"{'' if row.inside else 'OUTSIDE'}"
            )
    if options.json:
        options.json.write_bytes(
            to_json({"rows": rows, "others": others, "memory": memory, "costs": costs}, indent=1)
        )


if __name__ == "__main__":
    main()
