"""The rate that the gateway tells."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from iserve.gateway.rate_window import WINDOW_S, RateWindow, VariantCounts


class Clock:
    def __init__(self, now_s: float) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


@given(begin_s=st.floats(0, 1e6), gaps_s=st.lists(st.floats(0, 200), max_size=60), after_s=st.floats(0, 300))
def test_it_is_what_came_in_the_window(begin_s: float, gaps_s: list[float], after_s: float) -> None:
    """To the second: the oldest may still count, or not any more, for what is left of its second."""
    clock = Clock(begin_s)
    arrivals, came = RateWindow(clock), []
    for gap_s in gaps_s:
        clock.now_s += gap_s
        came.append(clock.now_s)
        arrivals.count()
    clock.now_s += after_s
    over_s = clock.now_s - begin_s
    if over_s < 30:
        assert arrivals.per_s is None
        return
    over_s = min(WINDOW_S, over_s)
    surely = sum(clock.now_s - one <= WINDOW_S - 1 for one in came)
    perhaps = sum(clock.now_s - one <= WINDOW_S for one in came)
    assert surely / over_s <= arrivals.per_s <= perhaps / over_s


def test_a_new_one_does_not_know_and_silence_ends_at_nothing() -> None:
    clock = Clock(7.75)
    arrivals = RateWindow(clock)
    for _ in range(30):
        arrivals.count()
    assert arrivals.per_s is None  # within its first second
    clock.now_s += 30
    assert arrivals.per_s == 1.0
    clock.now_s += 30
    assert arrivals.per_s == 0.5
    clock.now_s += 1e9
    assert arrivals.per_s == 0.0


@given(
    begin_s=st.floats(0, 1e6),
    arrivals=st.lists(st.tuples(st.floats(0, 60), st.sampled_from("abc")), max_size=60),
    after_s=st.floats(0, 300),
)
def test_the_requests_of_variants_are_those_of_the_window(
    begin_s: float, arrivals: list[tuple[float, str]], after_s: float
) -> None:
    """To the second, most first; what has left the window takes no memory."""
    clock = Clock(begin_s)
    window, counts, came = RateWindow(clock), VariantCounts(clock), []
    for gap_s, variant in arrivals:
        clock.now_s += gap_s
        came.append((int(clock.now_s), variant))
        counts.count(variant)
        window.count()
    clock.now_s += after_s
    inside = Counter(variant for second, variant in came if second > int(clock.now_s) - WINDOW_S)
    assert dict(counts.requests) == inside
    assert [number for _, number in counts.requests] == sorted(inside.values(), reverse=True)
    assert window.requests == inside.total()
    assert len(counts._seconds) <= WINDOW_S
