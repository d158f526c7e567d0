"""Adapters in the batching policy: so many in a step, first come first served within one, and none starves."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.torch_engine.runtime.scheduler import _MAX_PASSED, Demand, Scheduler, Work

ARRIVALS = st.lists(
    st.tuples(
        st.integers(0, 12),  # the step before which it arrives
        st.integers(1, 8),  # prompt
        st.integers(1, 6),  # max_tokens
        st.sampled_from([None, None, 1, 2, 3, 4]),  # adapter
        st.one_of(st.none(), st.integers(0, 20)),  # the step before which it is cancelled
    ),
    max_size=20,
)
Arrivals = list[tuple[int, int, int, int | None, int | None]]


def scheduler(**changes: int) -> Scheduler:
    sizes = {"max_batch": 4, "max_batched_tokens": 8, "max_context_tokens": 24, "max_waiting": 1000}
    return Scheduler(**(sizes | {"adapter_slots": 1} | changes))


def steps(policy: Scheduler, arrivals: Arrivals) -> Iterator[tuple[Work, ...]]:
    """Yield each plan until all have ended; the number of a sequence is its place in ``arrivals``."""
    submitted = step = 0
    while submitted < len(arrivals) or policy.has_work:
        while submitted < len(arrivals) and arrivals[submitted][0] <= step:
            _, prompt, max_tokens, adapter, _ = arrivals[submitted]
            policy.submit([Demand(submitted, prompt, max_tokens, adapter)])
            submitted += 1
        for number in range(submitted):
            if arrivals[number][4] == step:
                policy.cancel(number)
        plan = policy.plan()
        assert bool(plan) == policy.has_work, "work is never left lying"
        yield plan
        policy.complete(plan)
        step += 1
        assert step < 2000, "it ends"


@settings(max_examples=300, deadline=None)
@given(arrivals=ARRIVALS, slots=st.integers(1, 3), max_batch=st.integers(1, 4), budget=st.integers(4, 12))
def test_laws(arrivals: Arrivals, slots: int, max_batch: int, budget: int) -> None:
    """All end; a step has no more adapters than slots; those of one adapter, and of the base, keep their order."""
    arrivals = sorted(arrivals, key=lambda arrival: arrival[0])
    policy = scheduler(max_batch=max_batch, max_batched_tokens=budget, adapter_slots=slots)
    begun: list[int] = []
    for plan in steps(policy, arrivals):
        assert len({arrivals[work.sequence_id][3] for work in plan} - {None}) <= slots
        begun += [work.sequence_id for work in plan if work.start == 0 and work.sequence_id not in begun]
    for adapter in (None, 1, 2, 3, 4):
        own = [number for number in begun if arrivals[number][3] == adapter]
        assert own == sorted(own)
    assert set(begun) >= {number for number, arrival in enumerate(arrivals) if arrival[4] is None}


@settings(max_examples=200, deadline=None)
@given(arrivals=ARRIVALS, slots=st.integers(1, 5))
def test_plans_are_those_without_adapters_where_all_are_of_one_or_every_adapter_has_a_slot(
    arrivals: Arrivals, slots: int
) -> None:
    arrivals = sorted(arrivals, key=lambda arrival: arrival[0])
    of_base = [(*arrival[:3], None, arrival[4]) for arrival in arrivals]
    expected = list(steps(scheduler(adapter_slots=0), of_base))
    assert list(steps(scheduler(adapter_slots=4), arrivals)) == expected
    assert list(steps(scheduler(adapter_slots=slots), [(*a[:3], 1, a[4]) for a in arrivals])) == expected


def test_the_base_and_adapters_that_run_pass_one_that_finds_no_slot() -> None:
    policy = scheduler()
    policy.submit([Demand(1, 1, 3, 1), Demand(2, 1, 1, 2), Demand(3, 1, 1, None), Demand(4, 1, 1, 1)])
    plans = []
    while policy.has_work:
        plan = policy.plan()
        plans.append([work.sequence_id for work in plan])
        policy.complete(plan)
    assert plans == [[1, 3, 4], [1], [1], [2]]


def test_an_adapter_whose_requests_never_cease_does_not_starve_another() -> None:
    """Each step one more request of adapter 1 arrives, and of the base; adapter 2 runs after the bound."""
    policy = scheduler()
    policy.submit([Demand(0, 1, 4, 1), Demand(1, 1, 4, 2)])
    number, passed = 2, 0
    while True:
        policy.submit([Demand(number, 1, 4, 1), Demand(number + 1, 1, 4, None)])
        number += 2
        plan = policy.plan()
        new = [work.sequence_id for work in plan if work.start == 0]
        if 1 in new:
            break
        passed += sum(each % 2 == 0 for each in new)
        policy.complete(plan)
        assert number < 1000, "it starves"
    assert passed == _MAX_PASSED + 1, "the first was there before it"


def test_one_that_is_cancelled_keeps_no_slot() -> None:
    policy = scheduler()
    policy.submit([Demand(1, 1, 5, 1), Demand(2, 1, 5, 2), Demand(3, 1, 5, 3)])
    assert [work.sequence_id for work in policy.plan()] == [1]
    policy.cancel(1)
    policy.cancel(2)
    assert [work.sequence_id for work in policy.plan()] == [3]
