"""Effect of a skewed draw of experts on one mixture, recorded once with each draw.

Run: ``python -m tests.bench.accuracy_routing``. Both are recordings of ``tests.bench.accuracy_measure``, the
skewed one with ``VLLM_MOE_ROUTING_SIMULATION_STRATEGY=normal_routing`` on both sides. A profile draws uniformly,
so what users' traffic makes of its predictions is those of the uniform profile against the skewed whole model.
Errors of the model's own family are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from tests.bench.accuracy import RESULTS, load, predict_l3
from tests.bench.accuracy_families import calibration_without, family_of, recordings_of
from tests.bench.accuracy_measure import Recorded
from tests.bench.accuracy_rows import Row

__all__ = ["FOLDER", "Pair", "busiest", "pairs", "recorded", "table"]

FOLDER = RESULTS / "skewed-h200-vllm-0.33"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """A point of the whole model with both draws, and what either's profile predicts of it."""

    skewed: Row
    uniform: Row

    @property
    def ratio(self) -> float:
        """Time with the skewed draw over that with the uniform one."""
        return self.skewed.truth_s / self.uniform.truth_s

    @property
    def error(self) -> float:
        """Error of the uniform profile, asked of the skewed whole model."""
        return self.uniform.predicted_s / self.skewed.truth_s - 1

    @property
    def inside(self) -> bool:
        return self.uniform.low_s <= self.skewed.truth_s <= self.uniform.high_s


def recorded() -> tuple[Recorded, Recorded]:
    """Return the skewed recording and the uniform one of the same model."""
    (skewed,) = load(FOLDER)
    alike = (one for one in recordings_of("families-h200-vllm-0.33") if one.model == skewed.model)
    (uniform,) = (one for one in alike if one.config == skewed.config)
    return skewed, uniform


def busiest(one: Recorded) -> float:
    """Return the tokens of the whole model's busiest expert over the mean of all."""
    (count,) = (rank.expert_count for rank in one.whole_memory)
    assert count is not None, f"{one.model}: experts were not counted"
    return count.busiest


def _predicted(one: Recorded) -> dict[tuple[str, int, int], Row]:
    rows = predict_l3(one, calibration_without(family_of(one)))
    return {(row.metric, row.batch, row.input_tokens): row for row in rows}


def pairs() -> tuple[Pair, ...]:
    """Return the points that both recordings have."""
    skewed, uniform = map(_predicted, recorded())
    return tuple(Pair(skewed=row, uniform=uniform[key]) for key, row in skewed.items() if key in uniform)


def table() -> str:
    """Return what the draw changes, by sequences."""
    found = pairs()
    lines = [
        "| sequences | TPOT, skewed over uniform | by the uniform profile | TTFT, skewed over uniform | "
        "by the uniform profile |",
        "|--:|--:|--:|--:|--:|",
    ]
    for batch in sorted({pair.skewed.batch for pair in found}):
        cells = [str(batch)]
        for metric in ("tpot", "ttft"):
            here = [pair for pair in found if (pair.skewed.batch, pair.skewed.metric) == (batch, metric)]
            ratios = sorted(pair.ratio for pair in here)
            cells += [f"{ratios[0]:.2f} to {ratios[-1]:.2f}", _range([pair.error for pair in here])]
        lines.append(f"| {' | '.join(cells)} |")
    cells = ["all, median"]
    for metric in ("tpot", "ttft"):
        here = [pair for pair in found if pair.skewed.metric == metric]
        inside = sum(pair.inside for pair in here)
        cells += [
            f"{median(pair.ratio for pair in here):.2f}",
            f"{median(abs(pair.error) for pair in here):.1%}, {inside} of {len(here)} inside",
        ]
    return "\n".join([*lines, f"| {' | '.join(cells)} |"])


def _range(errors: Sequence[float]) -> str:
    return f"{min(errors):+.0%} to {max(errors):+.0%}"


if __name__ == "__main__":
    print(table())
