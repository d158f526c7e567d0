"""Orders of configurations, and the first that fits: max TP, max PP, the rule of thumb."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fingerprint.config import WeightFormat
from fingerprint.errors import ConfigError
from fingerprint.gpus import gpu_spec
from tests.golden_words import Golden
from tests.traces.baselines.small_models import GPU_BYTES, batched, bytes_on, cluster, known
from traces.baselines.first_fit import FirstFit, Preference, common_batch, max_pp, max_tp
from traces.baselines.model_info import Knowledge, Places, StepTimes, halvings, largest, without
from traces.baselines.rule_of_thumb import rule_of_thumb
from traces.simulator.scenario import Deployed, NotDeployed

PLACES = Places(1)


def deployer(*models: Knowledge, order: object = max_tp, batch: int = 1) -> FirstFit:
    preferences = [Preference(model, order(model), batch) for model in models]  # type: ignore[operator]
    return FirstFit("a rule", preferences, PLACES, StepTimes())


def test_each_takes_its_degree_as_far_as_it_goes() -> None:
    model = known("m")
    assert [(c.tp, c.pp) for c in max_tp(model)] == [(4, 1), (2, 1), (2, 2), (1, 1), (1, 2), (1, 4)]
    assert [(c.tp, c.pp) for c in max_pp(model)] == [(1, 4), (1, 2), (2, 2), (1, 1), (2, 1), (4, 1)]


def test_neither_quantizes_and_the_rule_takes_the_narrowest() -> None:
    model = known("m", weights=(WeightFormat.BITS16, WeightFormat.INT8))
    assert {c.weights for c in (*max_tp(model), *max_pp(model))} == {WeightFormat.BITS16}
    by_rule = sorted(model.configs, key=rule_of_thumb(model.spec, gpu_spec("a6000"), fast=True))
    assert (by_rule[0].tp, by_rule[0].pp, by_rule[0].weights) == (4, 1, WeightFormat.INT8)
    cheap = sorted(model.configs, key=rule_of_thumb(model.spec, gpu_spec("a6000"), fast=False))
    assert [c.num_gpus for c in cheap] == sorted(c.num_gpus for c in cheap)
    assert cheap[0].weights is WeightFormat.INT8


def test_every_gpu_or_as_few_stages_as_do() -> None:
    """The order is of equal TP; decision regret was recorded with the first."""
    model = known("m", degrees=((2, 1), (2, 2), (1, 4)))
    gpu = gpu_spec("a6000")
    firsts = [
        min(model.configs, key=rule_of_thumb(model.spec, gpu, fast=True, every_gpu=e)) for e in (True, False)
    ]
    assert [(c.tp, c.pp) for c in firsts] == [(2, 2), (2, 1)]


def test_what_does_not_fit_at_the_favourite_degree_goes_on_with_the_next(golden: Golden) -> None:
    """256 bytes are 64 on each of four GPUs, which leaves 36: the next model goes in in halves."""
    big, small = known("big", 256), known("small", 64, degrees=((1, 1), (1, 2)))
    both = deployer(big, small)
    first = both("big", cluster(4))
    assert isinstance(first, Deployed)
    assert bytes_on(first.placement) == {f"gpu{i}": 64 for i in range(4)}
    second = both("small", without(cluster(4), first.placement))
    assert isinstance(second, Deployed)
    assert second.placement.layers_per_stage == (4, 4)  # tp=1,pp=1 needs 64, 36 are free
    third = both("big", without(cluster(4), first.placement))
    assert isinstance(third, NotDeployed)
    golden("traces", third.reason)


def test_the_least_loaded_gpus_are_taken() -> None:
    model = known("m", 40, degrees=((1, 1),))
    snapshot = cluster(3)
    placed = []
    for _ in range(3):
        decided = deployer(model)("m", snapshot)
        assert isinstance(decided, Deployed)
        placed.append(decided.placement)
        snapshot = without(snapshot, decided.placement)
    assert bytes_on(*placed) == {"gpu0": 40, "gpu1": 40, "gpu2": 40}


def test_a_batch_that_does_not_fit_is_halved() -> None:
    model = known("m", 64, kv_bytes=8, degrees=((1, 1),))  # 64 + 8 a sequence: four fit into 100
    decided = deployer(model, batch=16)("m", cluster(1))
    assert isinstance(decided, Deployed)
    assert decided.steps.limits.max_batch == 4
    assert "batch 4" in decided.what
    assert halvings(16) == (16, 8, 4, 2, 1)


def test_the_common_batch_leaves_room_for_all_that_come() -> None:
    """Two models with 16 + 8b and 40 + 8b bytes on each of two GPUs of 100, by hand: 56 + 16b <= 100."""
    a, b = known("a", 32, kv_bytes=16), known("b", 80, kv_bytes=16)
    order = ((2, 1),)
    models = [(m, [c for c in m.configs if (c.tp, c.pp) in order], 1) for m in (a, b)]
    assert common_batch(models, cluster(2), PLACES) == 2
    assert common_batch([*models, models[1]], cluster(2), PLACES) == 0  # 96 + 24b
    assert common_batch([(known("c", 1000), known("c", 1000).configs, 1)], cluster(2), PLACES) == 0


def test_the_common_batch_keeps_replicas_apart() -> None:
    """The batch is the largest with which 40 + 8b bytes fit two replicas on two GPUs of 100, by hand.

    Three replicas do not fit. At tp=2 not even two go in, so the next degree's turn follows.
    """
    model = known("m", 40, kv_bytes=8)
    alone = [c for c in model.configs if c.num_gpus == 1]
    assert common_batch([(model, alone, 2)], cluster(2), PLACES) == 7  # 40 + 56 <= 100
    assert common_batch([(model, max_tp(model), 2)], cluster(2), PLACES) == 7
    assert common_batch([(model, alone, 3)], cluster(2), PLACES) == 0


@pytest.mark.parametrize(
    ("replicas", "gpus"),
    [
        pytest.param(1, [{"gpu0", "gpu1", "gpu2", "gpu3"}], id="all GPUs for one"),
        pytest.param(2, [{"gpu0", "gpu1"}, {"gpu2", "gpu3"}], id="halves, though two would fit on all four"),
        pytest.param(4, [{"gpu0"}, {"gpu1"}, {"gpu2"}, {"gpu3"}], id="a GPU each"),
    ],
)
def test_replicas_have_gpus_of_their_own(replicas: int, gpus: list[set[str]]) -> None:
    decided = deployer(known("m", 40)).several("m", cluster(4), replicas)
    assert not isinstance(decided, NotDeployed), decided
    assert [set(one.placement.device_ids) for one in decided] == gpus
    assert len({one.what for one in decided}) == 1


def test_more_replicas_than_have_a_gpu_are_refused(golden: Golden) -> None:
    decided = deployer(known("m", 40)).several("m", cluster(4), 5)
    assert isinstance(decided, NotDeployed)
    golden("traces", decided.reason)


@given(
    sizes=st.lists(st.sampled_from([8, 16, 32, 64, 128]), min_size=1, max_size=6),
    batch=st.sampled_from([1, 4, 64]),
    pipelines=st.booleans(),
)
def test_memory_is_never_exceeded(sizes: list[int], batch: int, pipelines: bool) -> None:
    models = [batched(known(str(i), size, kv_bytes=8), batch) for i, size in enumerate(sizes)]
    decide = deployer(*models, order=max_pp if pipelines else max_tp, batch=batch)
    snapshot, placed = cluster(4), []
    for model in models:
        decided = decide(model.name, snapshot)
        if isinstance(decided, Deployed):
            placed.append(decided.placement)
            snapshot = without(snapshot, decided.placement)
    assert all(used <= GPU_BYTES for used in bytes_on(*placed).values())


@given(st.integers(0, 300), st.integers(0, 256))
def test_largest(most: int, bound: int) -> None:
    assert largest(lambda n: n <= bound, most) == min(most, bound)


def test_a_name_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="one name"):
        deployer(known("a"), known("a"))


def test_step_times_are_made_once() -> None:
    times, model = StepTimes(), known("m")
    made = [times(model, config, batch) for config in model.configs[:2] for batch in (1, 2)]
    again = [times(model, config, batch) for config in model.configs[:2] for batch in (1, 2)]
    assert all(one is other for one, other in zip(made, again, strict=True))
    assert all(one is not other for one, other in pairwise(made))
