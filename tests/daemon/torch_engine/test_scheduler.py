"""The batching policy: laws over random arrivals, lengths, ends and cancellations; and its small cases."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.torch_engine.runtime.scheduler import Demand, Scheduler, Work
from fingerprint.errors import BadInputError, ConfigError, UnavailableError
from tests.golden_words import Golden

CONTEXT = 24


def scheduler(**changes: int) -> Scheduler:
    sizes = {"max_batch": 2, "max_batched_tokens": 8, "max_context_tokens": CONTEXT, "max_waiting": 100}
    return Scheduler(**(sizes | changes))


ARRIVALS = st.lists(
    st.tuples(
        st.integers(0, 12),  # the step before which it arrives
        st.integers(1, 16),  # prompt
        st.integers(1, 8),  # max_tokens
        st.one_of(st.none(), st.integers(1, 8)),  # the output token that ends it early
        st.one_of(st.none(), st.integers(0, 30)),  # the step before which it is cancelled
        st.booleans(),  # cancelled rather while that step runs
    ),
    max_size=14,
)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(arrivals=ARRIVALS, max_batch=st.integers(1, 4), budget=st.integers(1, 12))
def test_laws(arrivals: list[tuple], max_batch: int, budget: int) -> None:
    """Everyone finishes or is cancelled, in slots of their own, within the budget, first come first served."""
    policy = scheduler(max_batch=max_batch, max_batched_tokens=budget)
    arrivals = sorted(arrivals, key=lambda arrival: arrival[0])
    written: dict[int, int] = {}  # tokens whose KV is there
    made: dict[int, int] = {}
    slot_of: dict[int, int] = {}
    gone: set[int] = set()
    first_tokens: list[int] = []
    submitted = step = 0
    while submitted < len(arrivals) or policy.has_work:
        while submitted < len(arrivals) and arrivals[submitted][0] <= step:
            policy.submit([Demand(submitted, arrivals[submitted][1], arrivals[submitted][2])])
            submitted += 1
        cancelled_now = [i for i in range(submitted) if arrivals[i][4] == step and i not in gone]
        for i in cancelled_now:
            if not arrivals[i][5]:
                assert policy.cancel(i)
                gone.add(i)
        plan = policy.plan()
        assert sum(work.num_tokens for work in plan) <= budget
        assert bool(plan) == policy.has_work, "work is never left lying"
        assert len({work.slot for work in plan}) == len({work.sequence_id for work in plan}) == len(plan)
        assert policy.num_running <= max_batch
        decodes = [work.num_tokens == 1 and made.get(work.sequence_id, 0) > 0 for work in plan]
        assert decodes == sorted(decodes, reverse=True), "decodes first"
        ended = []
        sampled = []
        for work in plan:
            i = work.sequence_id
            assert i not in gone
            assert 0 <= work.slot < max_batch
            assert slot_of.setdefault(i, work.slot) == work.slot, "a sequence keeps its slot"
            assert all(slot_of[j] != work.slot or j == i or j in gone for j in slot_of), "a slot has one owner"
            assert work.start == written.get(i, 0), "each token is computed once, in order"
            written[i] = work.start + work.num_tokens
            known = arrivals[i][1] + made.get(i, 0)
            assert written[i] <= known <= CONTEXT
            assert work.samples == (written[i] == known)
            if work.samples:
                sampled.append(i)
        for i in cancelled_now:
            if arrivals[i][5] and i not in gone:
                policy.cancel(i)
                gone.add(i)
        for i in sampled:
            if i in gone:
                continue
            made[i] = made.get(i, 0) + 1
            if made[i] == 1:
                first_tokens.append(i)
            if made[i] == arrivals[i][3]:
                ended.append(i)
        at_length = policy.complete(plan, ended)
        assert set(at_length) == {i for i in sampled if i not in gone and made[i] == arrivals[i][2]} - set(ended)
        gone |= set(at_length) | set(ended)
        step += 1
        assert step < 2000, "it ends"
    assert first_tokens == sorted(first_tokens), "first come, first served"
    assert gone == set(range(len(arrivals)))
    assert policy.cached_tokens == policy.num_running == policy.num_waiting == 0


def test_a_long_prompt_is_cut_and_never_stalls_who_decodes() -> None:
    policy = scheduler(max_batched_tokens=4)
    policy.submit([Demand(1, 2, 5), Demand(2, 7, 5)])
    plan = policy.plan()
    assert plan == (Work(1, 0, 0, 2, samples=True), Work(2, 1, 0, 2, samples=False))
    policy.complete(plan)
    plan = policy.plan()
    assert plan == (Work(1, 0, 2, 1, samples=True), Work(2, 1, 2, 3, samples=False))
    policy.complete(plan)
    assert policy.plan() == (Work(1, 0, 3, 1, samples=True), Work(2, 1, 5, 2, samples=True))


def test_no_more_run_than_a_step_has_tokens_for() -> None:
    policy = scheduler(max_batch=3, max_batched_tokens=2)
    policy.submit([Demand(i, 1, 3) for i in (1, 2, 3)])
    served = []
    while policy.has_work:
        plan = policy.plan()
        served.append([work.sequence_id for work in plan])
        policy.complete(plan)
    assert served == [[1, 2], [1, 2], [1, 2], [3], [3], [3]]


def test_the_queue_is_bounded_and_all_or_nothing(golden: Golden) -> None:
    policy = scheduler(max_batch=1, max_waiting=2)
    policy.submit([Demand(1, 1, 1), Demand(2, 1, 1)])
    with golden.raises("daemon", UnavailableError):
        policy.submit([Demand(3, 1, 1), Demand(4, 1, 1)])
    assert policy.num_waiting == 2
    policy.submit([Demand(3, 1, 1)])


@pytest.mark.parametrize(("prompt", "output"), [(0, 1), (1, 0), (CONTEXT, 1), (1, CONTEXT)])
def test_what_never_fits_is_refused(prompt: int, output: int) -> None:
    policy = scheduler()
    with pytest.raises(BadInputError):
        policy.submit([Demand(1, prompt, output)])
    assert not policy.has_work


def test_cancelling_frees_the_slot_for_the_next() -> None:
    policy = scheduler(max_batch=1)
    policy.submit([Demand(1, 1, 5), Demand(2, 1, 5), Demand(3, 1, 5)])
    policy.complete(policy.plan())
    assert policy.cancel(1)
    assert policy.cancel(2)
    assert not policy.cancel(2)
    assert policy.plan() == (Work(3, 0, 0, 1, samples=True),)


def test_sizes_are_positive(golden: Golden) -> None:
    with golden.raises("daemon", ConfigError):
        scheduler(max_batch=0)
