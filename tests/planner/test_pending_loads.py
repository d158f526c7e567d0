"""Loads of a worker in their order, and what a request waits for."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.pending_loads import LoadsAhead, PendingLoads, loads_ahead_in_queue

_LOAD_S = 2.0


def pending(*names: str, at_s: float = 0.0) -> PendingLoads:
    loads = PendingLoads()
    for name in names:
        loads.order(name, at_s)
    return loads


@given(st.lists(st.tuples(st.floats(0.0, 3.0), st.sampled_from("abcdef")), max_size=20), st.sampled_from("abcdef"))
def test_loads_end_when_it_says(orders: list[tuple[float, str]], asked: str) -> None:
    """Hold what is left of loads after each order against a thread that makes each in the same time."""
    loads, now_s, ends = PendingLoads(), 0.0, list[tuple[float, str]]()
    for gap_s, name in orders:
        now_s += gap_s
        while ends and ends[0][0] <= now_s:
            end_s, ended = ends.pop(0)
            assert loads.end(ended, end_s) == pytest.approx(_LOAD_S)
        loads.order(name, now_s)
        ends.append((max(now_s, ends[-1][0] if ends else 0.0) + _LOAD_S, name))
        ahead = loads.ahead(asked, now_s, has_place=True)
        last_s = max((end_s for end_s, one in ends if one == asked), default=None)
        assert (ahead is None) == (last_s is None) == (asked not in loads)
        if ahead is not None and last_s is not None:
            assert ahead.left_s(_LOAD_S) == pytest.approx(last_s - now_s)
        further = loads.ahead(asked, now_s, has_place=False)
        assert further is not None
        assert further.left_s(_LOAD_S) == pytest.approx(ends[-1][0] + _LOAD_S - now_s)


def test_a_load_that_takes_longer_than_planned_is_about_to_end() -> None:
    assert pending("a", "b").ahead("b", 9.0, has_place=True) == LoadsAhead(2, 9.0)
    assert LoadsAhead(2, 9.0).left_s(_LOAD_S) == _LOAD_S


def test_one_that_lost_its_place_while_it_was_loaded_is_loaded_again() -> None:
    loads = pending("a", "b")
    assert loads.ahead("a", 0.0, has_place=False) == LoadsAhead(3)
    loads.order("a", 0.0)
    assert loads.ahead("a", 0.0, has_place=True) == LoadsAhead(3)
    loads.end("a", 1.0)
    assert loads.ahead("a", 1.5, has_place=True) == LoadsAhead(2, 0.5)


def test_of_a_load_that_ends_before_one_ordered_earlier_no_time_is_known() -> None:
    loads = pending("a", "b")
    assert loads.end("b", 1.0) is None
    assert loads.end("a", 3.0) == 3.0


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=20), st.randoms(use_true_random=False))
def test_in_any_order_of_ends_the_times_that_are_known_add_up(names: list[str], random: Random) -> None:
    """None is missing for ever, nor counted twice: the last end is the sum of all times, whichever ends first."""
    loads, now_s, known_s = pending(*names), 0.0, 0.0
    left = list(names)
    while left:
        now_s += 1.0
        name = left.pop(random.randrange(len(left)))
        took_s = loads.end(name, now_s)
        known_s += took_s or 0.0
        assert len(loads) == len(left)
    assert took_s is not None
    assert known_s == now_s


def test_a_load_that_fails_before_it_was_to_begin_took_no_time() -> None:
    loads = pending("a", at_s=30.0)
    assert loads.end("a", 10.0) == 0.0


def test_a_load_that_begins_later_has_not_run() -> None:
    """A worker that starts until 30 s begins it then."""
    loads = pending("a", at_s=30.0)
    assert loads.ahead("a", 10.0, has_place=True) == LoadsAhead(1)
    assert loads.ahead("b", 10.0, has_place=False) == LoadsAhead(2)
    assert loads.ahead("a", 31.0, has_place=True) == LoadsAhead(1, 1.0)


class TestQueue:
    def test_one_worker_that_has_it_is_enough(self) -> None:
        workers = [({"a", "b"}, pending("a")), ({"a"}, pending())]
        assert loads_ahead_in_queue("a", workers, ["x", "y"], 0.0) is None

    def test_fewest_loads_count_and_one_that_is_ordered_is_before_what_waits(self) -> None:
        workers = [({"a", "b", "c"}, pending("b", "c", "a")), ({"d"}, pending("d"))]
        assert loads_ahead_in_queue("a", workers, ["x"], 0.5) == LoadsAhead(2, 0.5)

    def test_variants_that_wait_before_it_are_loaded_before_it(self) -> None:
        """Five requests before it lack two variants; of two workers each makes one of these loads."""
        before = ["x", None, "x", "y", "b"]
        assert loads_ahead_in_queue("a", [({"b"}, pending())], before, 0.0) == LoadsAhead(1, waiting=2)
        two = [({"b"}, pending()), (set[str](), pending())]
        assert loads_ahead_in_queue("a", two, before, 0.0) == LoadsAhead(1, waiting=1)

    @given(
        st.lists(st.tuples(st.integers(0, 3), st.floats(0.0, 1.0)), min_size=1, max_size=4), st.floats(0.01, 99.0)
    )
    def test_fewest_loads_end_first_whatever_a_load_takes(
        self, workers: list[tuple[int, float]], load_s: float
    ) -> None:
        """Each worker has so many loads, of which the first has run for a share of its time."""
        now_s, held = 100.0, list[tuple[set[str], PendingLoads]]()
        for number, share in workers:
            names = [f"v{index}" for index in range(number)]
            held.append((set(names), pending(*names, at_s=now_s - share * load_s)))
        found = loads_ahead_in_queue("a", held, (), now_s)
        left_s = [number * load_s + load_s - (share * load_s if number else 0.0) for number, share in workers]
        assert found is not None
        assert found.left_s(load_s) == pytest.approx(min(left_s))
