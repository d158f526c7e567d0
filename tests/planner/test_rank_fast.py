"""Ranking under a rate works out few numbers; what it tells is what working out all of them tells."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fingerprint.config import DeploymentConfig, KvFormat, WeightFormat, Workload
from planner import cells as cells_module
from planner.attainment import Attainment
from planner.cells import Cells, Column, Mask, Rows, smallest
from planner.costs import figures
from planner.intent import Intent, IntentKind, Quality, Slo, Traffic
from planner.paces import paces
from planner.plan import Candidate, LimitKind
from planner.rank import rank
from tests.planner.candidates import estimate, everything_fits
from tests.planner.slow_rank import METRICS, slowly

SPACE = [
    DeploymentConfig(tp, pp, weights, kv, engine=engine)
    for tp, pp, weights, kv, engine in product(
        (1, 2, 4, 8),
        (1, 2, 3, 4),
        (WeightFormat.BITS16, WeightFormat.INT8, WeightFormat.INT4),
        KvFormat,
        ("a", "b"),
    )
]


def many(count: int, seed: int) -> list[Candidate]:
    """Return candidates of random figures; a batch takes up to twice what one request does."""
    rng = random.Random(seed)
    found = []
    for config in rng.sample(SPACE, count):
        batch, spread = rng.choice((1, 8, 32)), rng.choice((0.0, 0.1, 0.3))
        ttft_s, tpot_s, grown = rng.uniform(0.05, 1), rng.uniform(0.005, 0.05), rng.uniform(1, 2)
        size = 8.0 + rng.random()
        full, alone = (
            estimate(
                config,
                gib_per_gpu=size,
                ttft_s=ttft_s * factor * (n if n > 1 else 1),
                tpot_s=tpot_s * factor,
                spread=spread,
                workload=Workload(n, 512, 101),
            )
            for n, factor in ((batch, grown if batch > 1 else 1.0), (1, 1.0))
        )
        found.append(Candidate(config, full, None, alone))
    return found


limits = st.one_of(st.none(), st.floats(0.3, 4.0))


@st.composite
def intents(draw: st.DrawFn) -> Intent:
    """Limits and rates about the candidates' own."""
    ttft, tpot, e2e = draw(limits), draw(limits), draw(limits)
    slo = Slo(
        ttft_s=ttft,
        tpot_s=None if tpot is None else tpot / 40,
        e2e_s=3 * e2e if e2e else 3.0 if not ttft else None,
    )
    return Intent(
        kind=draw(st.sampled_from([IntentKind.LATENCY_SLO, IntentKind.MIN_LATENCY])),
        slo=slo,
        rate_per_s=draw(st.sampled_from([0.05, 0.3, 1.0, 3.0, 20.0])),
        percentile=draw(st.sampled_from([50.0, 95.0, 99.0])),
        quality=draw(st.sampled_from([Quality.EXACT, Quality.ANY])),
        traffic=draw(st.sampled_from([Traffic(), Traffic(burstiness=3.0, input_cv=0.5, output_cv=1.0)])),
    )


@settings(max_examples=20, deadline=None)
@example(  # nothing keeps the limit at any rate: all are infinitely far
    intent=Intent(
        kind=IntentKind.LATENCY_SLO,
        slo=Slo(e2e_s=6.0),
        rate_per_s=3.0,
        percentile=95.0,
        quality=Quality.EXACT,
        traffic=Traffic(burstiness=3.0, input_cv=0.5, output_cv=1.0),
    ),
    seed=98,
    batch=1,
)
@example(  # one of them is 99.8% busy
    intent=Intent(kind=IntentKind.MIN_LATENCY, slo=Slo(e2e_s=3.0), rate_per_s=0.3),
    seed=262,
    batch=1,
)
@given(intent=intents(), seed=st.integers(0, 1000), batch=st.sampled_from([1, 16]))
@pytest.mark.slow
def test_fast_is_slow(intent: Intent, seed: int, batch: int) -> None:
    """The fast ranking equals the slow one, also where few rows are computed at once and bounds must separate the
    rest.
    """
    candidates = many(60, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cells_module, "_BATCH", batch)
        plan, slow = rank(candidates, intent, fits=everything_fits), slowly(candidates, intent)
    assert {r.config for r in plan.candidates if r.feasible} == slow.feasible
    told = {ranked.config: ranked for ranked in plan.candidates}
    if plan.chosen is None:
        assert plan.why_not.nearest is not None
        config, missed = slow.nearest()
        assert plan.why_not.nearest.config == config
        assert [(v.limit, v.actual) for v in plan.nearest_misses] == numbers(missed)
        relaxed = {r.limit: (r.config, r.needed) for r in plan.why_not.relaxations}
        assert relaxed.keys() == slow.relaxed().keys()
        for limit, (config, needed) in slow.relaxed().items():
            assert relaxed[limit] == (config, pytest.approx(needed, rel=0.01)), "rounded to three digits"
    for row, config in enumerate(slow.configs):
        own = told[config].objective
        assert (np.inf if own is None else own) == pytest.approx(slow.objectives[row], rel=0.02)
        assert told[config].risk == pytest.approx(float(slow.risk[row]), abs=1e-9)
        assert [(v.limit, v.actual) for v in told[config].violations] == numbers(slow.actual(row))


def numbers(told: list[tuple[LimitKind, float]]) -> list[tuple[LimitKind, object]]:
    return [(kind, pytest.approx(actual, rel=1e-6)) for kind, actual in told]


@settings(max_examples=40)
@given(
    seed=st.integers(0, 1000),
    busy=st.floats(0.05, 1.2),
    share=st.sampled_from([0.01, 0.05, 0.5]),
    limit=st.floats(0.5, 8.0),
    metric=st.sampled_from(METRICS),
)
def test_a_part_of_the_sum_says_what_the_sum_says(
    seed: int, busy: float, share: float, limit: float, metric: str
) -> None:
    candidates = many(40, seed)
    full, alone = [c.estimate for c in candidates if c.estimate], [c.alone for c in candidates if c.alone]
    moving = Traffic(relative_rates=(1.5, 0.5), window_s=30.0)
    for traffic in (Traffic(), Traffic(burstiness=4.0, input_cv=1.0, output_cv=1.0), moving):
        served = Attainment(paces(figures(full), alone, traffic), traffic)
        rates, limits_s = busy / served.service_s, limit * served.alone_high(metric)  # type: ignore[arg-type]
        missed = served.misses(metric, limits_s, rates)  # type: ignore[arg-type]
        sure = np.abs(missed - share) > 1e-12
        over = served.exceeds(metric, limits_s, rates, share)  # type: ignore[arg-type]
        assert (over == (missed > share))[sure].all()


def test_what_a_row_comes_to_does_not_depend_on_those_beside_it() -> None:
    candidates = many(30, 3)
    full, alone = [c.estimate for c in candidates if c.estimate], [c.alone for c in candidates if c.alone]
    traffic = Traffic(burstiness=2.0, input_cv=0.3, output_cv=1.0)
    served = Attainment(paces(figures(full), alone, traffic), traffic)
    rates = 0.7 / served.service_s
    for metric in METRICS:
        together = served.quantile(metric, 95.0, rates)
        for row in range(len(candidates)):
            one = served.take(np.array([row])).quantile(metric, 95.0, rates[[row]])[0]
            assert one == pytest.approx(together[row], rel=1e-9)


class Counted:
    """Numbers that are known, with a record of which were asked for."""

    def __init__(self, values: Column) -> None:
        self.values = values
        self.found: list[int] = []

    def find(self, rows: Rows) -> Column:
        self.found += rows.tolist()
        return self.values[rows]

    def reaches(self, rows: Rows, values: Column) -> Mask:
        return np.asarray(self.values[rows] <= values)


@given(
    values=st.lists(st.sampled_from([1.0, 2.0, 3.0, 5.0, float("inf")]), max_size=80),
    slack=st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=80, max_size=80),
    admitted=st.sets(st.integers(0, 79)),
)
def test_the_smallest_is_the_first_of_the_smallest_that_are_admitted(
    values: list[float], slack: list[float], admitted: set[int]
) -> None:
    work, rows = Counted(np.array(values)), np.arange(len(values))
    cells = Cells(work.values - np.array(slack[: len(values)]), work, np.ones(len(values), np.bool_))
    found = smallest(
        rows,
        cells.bounds(rows),
        cells.of,
        lambda some, value: cells.reach(some, np.full(len(some), value)),
        admitted.__contains__,
    )
    fine = [row for row in rows.tolist() if row in admitted]
    assert found == min(fine, key=lambda row: values[row], default=None)
    assert len(work.found) == len(set(work.found)), "each is worked out once"
    assert set(work.found) <= admitted


def test_of_ten_thousand_few_are_worked_out() -> None:
    values = np.random.default_rng(1).random(10_000)
    work, rows = Counted(values), np.arange(10_000)
    cells = Cells(np.zeros(10_000), work, np.ones(10_000, np.bool_))
    found = smallest(
        rows,
        cells.bounds(rows),
        cells.of,
        lambda some, v: cells.reach(some, np.full(len(some), v)),
        lambda row: True,
    )
    assert found == int(values.argmin())
    assert len(work.found) < 200
