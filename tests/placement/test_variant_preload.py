"""Choice of what idle workers load before it is asked for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from placement.variant_preload import choose_preloads
from placement.variant_routing import WorkerVariants

NAMES = "abcdefgh"
SETS = st.sets(st.sampled_from(NAMES), max_size=4)


def worker(loaded, slots: int = 2, max_loaded: int = 4) -> WorkerVariants:
    found = WorkerVariants(slots, max_loaded)
    for name in sorted(loaded):
        found.load(name, 0.0)
    return found


@given(
    idle=st.lists(st.tuples(SETS, st.integers(1, 4)), max_size=4),
    busy=st.lists(SETS, max_size=2),
    known=st.permutations(NAMES),
    served_s=st.dictionaries(st.sampled_from(NAMES), st.floats(0, 100)),
)
def test_free_slots_get_what_no_worker_has_and_nothing_is_evicted(idle, busy, known, served_s) -> None:
    workers = [worker(loaded, slots) for loaded, slots in idle]
    there = [one.loaded for one in workers] + busy
    found = choose_preloads(workers, there, known, served_s)
    names, places = [name for _, name in found], [index for index, _ in found]
    absent = set(known) - set().union(*there)
    free = [index for index, one in enumerate(workers) if len(one.loaded) < one.slots]
    assert len(found) == min(len(free), len(absent))
    assert len(set(names)) == len(names)
    assert len(set(places)) == len(places)
    assert set(names) <= absent
    assert set(places) <= set(free)
    first = [served_s.get(name, -1.0) for name in names]
    assert first == sorted(first, reverse=True)
    assert not found or all(served_s.get(name, -1.0) <= first[-1] for name in absent - set(names))


def test_the_last_asked_is_first_then_the_first_known_and_the_emptiest_worker() -> None:
    workers = [worker("a"), worker("")]
    assert choose_preloads(workers, ["a", ""], "abcd", {"c": 5.0, "b": 1.0}) == [(1, "c"), (0, "b")]
    assert choose_preloads(workers, ["a", ""], "abcd", {}) == [(1, "b"), (0, "c")]


def test_no_more_than_the_slots_are_filled() -> None:
    assert choose_preloads([worker("ab")], ["ab"], "abc", {}) == []
