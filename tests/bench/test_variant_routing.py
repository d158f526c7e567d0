"""The rule by which decision 44 chose the default policy of variants, on cells that are quick to replay."""

from __future__ import annotations

import numpy as np
import pytest

from placement.variant_routing import DEFAULT_VARIANT_POLICY, make_variant_policy
from tests.bench.variant_routing import Case, outcome
from tests.bench.variant_stops import LOAD_S, capacity_per_s
from tests.bench.variant_stops import Case as Stopping
from tests.traces.simulator.variant_worlds import variants_of


@pytest.mark.slow
@pytest.mark.parametrize(("variants", "load"), [(40, 0.3), (40, 0.6), (1, 0.6)])
def test_the_default_is_no_slower_than_round_robin_and_loads_less(variants: int, load: float) -> None:
    case = Case("steep", variants, load, requests=1500)
    ours, turns = (
        outcome(case, lambda name=name: make_variant_policy(name), seeds=2)  # type: ignore[misc]
        for name in (DEFAULT_VARIANT_POLICY, "round-robin")
    )
    assert ours.p95_s <= turns.p95_s
    assert ours.mean_s <= turns.mean_s
    assert ours.loads <= turns.loads / (2 if variants > 1 else 1)


@pytest.mark.slow
@pytest.mark.parametrize("load", [0.3, 0.6])
def test_so_it_is_where_loads_stop_the_worker(load: float) -> None:
    case = Stopping(LOAD_S, requests=1500)
    requests = case.arrivals(0, load * capacity_per_s(case))
    ours, turns = (case.served(requests, name) for name in (DEFAULT_VARIANT_POLICY, "round-robin"))
    assert np.quantile(ours.outcomes.e2e_s, 0.95) <= np.quantile(turns.outcomes.e2e_s, 0.95)
    assert ours.outcomes.e2e_s.mean() <= turns.outcomes.e2e_s.mean()
    assert variants_of(ours).loads <= variants_of(turns).loads / 2
