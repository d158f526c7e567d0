"""Places of loaded variants, and eviction by frequency, reload time and size: by sums over all, and in replays."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fingerprint.load_time import recorded_load_s
from placement.worker_variants import WorkerVariants, protected_pins
from traces.simulator import variants as replays
from traces.simulator.variants import VariantArrival, VariantWorkers, replay_variants

NAMES = "abcdefgh"
MIB = 2**20
SIZES = st.lists(st.integers(1, 3000), min_size=8, max_size=8)  # MiB
USES = st.lists(st.tuples(st.sampled_from(NAMES), st.floats(0, 900)), max_size=40)


def worker(sizes: list[int], uses: list[tuple[str, float]], factor: float = 1.0) -> WorkerVariants:
    bytes_of = {name: size * MIB for name, size in zip(NAMES, sizes, strict=True)}
    found = WorkerVariants(2, len(NAMES), lambda name: factor * recorded_load_s(bytes_of[name]))
    for name in NAMES:
        found.load(name, 0.0)
    for name, at_s in sorted(uses, key=lambda use: use[1]):
        found.admit(name, at_s)
        found.leave(name)
    return found


@given(SIZES, USES)
def test_the_one_that_is_cheapest_to_miss_goes(sizes: list[int], uses: list[tuple[str, float]]) -> None:
    frequency = {name: sum(2.0 ** ((at_s - 1000) / 300) for used, at_s in uses if used == name) for name in NAMES}
    costs = {name: frequency[name] * recorded_load_s(size * MIB) for name, size in zip(NAMES, sizes, strict=True)}
    found = worker(sizes, uses).evictions("new", 1000.0)
    assert found is not None
    assert costs[found[0]] == pytest.approx(min(costs.values()))
    by_bytes = worker(sizes, uses).evictions("new", 1000.0, size=lambda name: sizes[NAMES.index(name)] * MIB)
    assert by_bytes is not None
    of_each = {name: costs[name] / size for name, size in zip(NAMES, sizes, strict=True)}
    assert of_each[by_bytes[0]] == pytest.approx(min(of_each.values()))


@given(SIZES, USES, st.sampled_from([0.25, 2.0, 1024.0]))
def test_a_machine_that_loads_all_faster_evicts_the_same(
    sizes: list[int], uses: list[tuple[str, float]], factor: float
) -> None:
    assert worker(sizes, uses).evictions("new", 1000.0) == worker(sizes, uses, factor).evictions("new", 1000.0)


@given(USES, st.integers(1, 3000))
def test_variants_alike_go_by_frequency_alone(uses: list[tuple[str, float]], size: int) -> None:
    plain = WorkerVariants(2, len(NAMES))
    for name in NAMES:
        plain.load(name, 0.0)
    for name, at_s in sorted(uses, key=lambda use: use[1]):
        plain.admit(name, at_s)
        plain.leave(name)
    assert worker([size] * len(NAMES), uses).evictions("new", 1000.0) == plain.evictions("new", 1000.0)


def test_slots_are_of_those_in_flight_and_used_last() -> None:
    found = WorkerVariants(2, 4)
    for at_s, name in enumerate("abcd"):
        found.load(name, float(at_s))
    assert found.in_slots == {"c", "d"}
    found.admit("a", 9.0)
    assert found.in_slots == {"a", "d"}


@given(
    st.lists(st.integers(1, 64), min_size=8, max_size=8),
    st.integers(1, 5),
    st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 3)), max_size=60),
)
def test_loaded_variants_take_no_more_than_the_places_and_none_goes_that_needs_not(
    shares: list[int], places: int, turns: list[tuple[str, int]]
) -> None:
    share_of = {name: share / 64 for name, share in zip(NAMES, shares, strict=True)}
    found = WorkerVariants(1, places, share=lambda name: share_of[name])
    in_flight: list[str] = []
    for at_s, (name, leaves) in enumerate(turns):
        for _ in range(min(leaves, len(in_flight))):
            found.leave(in_flight.pop(0))
        if not found.has_slot(name):
            continue
        before = set(found.loaded)
        evicted = found.evictions(name, float(at_s))
        assert evicted is not None  # places for all that is in flight
        assert not {*evicted} & {*in_flight}
        if name not in found.loaded:
            free = places - sum(share_of[one] for one in before) + sum(share_of[one] for one in evicted)
            assert share_of[name] <= free
            assert not [one for one in evicted if share_of[name] <= free - share_of[one]]
            found.load(name, float(at_s), evicted)
        found.admit(name, float(at_s))
        in_flight.append(name)
        assert found.taken == sum(share_of[one] for one in found.loaded) <= places


def test_small_ones_share_a_place() -> None:
    found = WorkerVariants(1, 2, share=lambda name: 1.0 if name.isupper() else 0.25)
    for at_s, name in enumerate("Aabcd"):
        assert found.evictions(name, float(at_s)) == ()
        found.load(name, float(at_s))
    found.admit("A", 5.0)
    found.leave("A")
    assert found.evictions("e", 6.0) == ("a",)
    assert found.evictions("B", 6.0) == ("a", "b", "c", "d")
    assert found.evictions("B", 6.0, {"a", "b", "c", "d"}) == ("A",)  # that is enough


def test_pinned_variants_leave_one_place() -> None:
    assert protected_pins("abcdef", 2.0, lambda name: 0.25) == ("a", "b", "c", "d")
    assert protected_pins("abc", 2.0) == ("a",)
    assert protected_pins("abc", 0.5, lambda name: 0.125) == ()


@pytest.mark.parametrize("large_mib", [7, 52, 350, 2300])
def test_no_more_time_goes_into_loads_for_one_than_its_own_would_take(large_mib: int) -> None:
    """Four small ones in turn, and a large one that was asked for once, where four have a place."""
    bytes_of = {name: (large_mib if name == "large" else 7) * MIB for name in ("large", *"abcd")}
    found = WorkerVariants(2, 4, lambda name: recorded_load_s(bytes_of[name]))
    found.load("large", 0.0)
    found.admit("large", 0.0)
    found.leave("large")
    loads_s = 0.0
    for number in range(1, 4000):
        name, now_s = "abcd"[number % 4], float(number)
        if name not in found.loaded:
            loads_s += recorded_load_s(bytes_of[name])
            found.load(name, now_s, found.evictions(name, now_s) or ())
        found.admit(name, now_s)
        found.leave(name)
    assert "large" not in found.loaded
    assert loads_s <= recorded_load_s(bytes_of["large"]) + 8 * recorded_load_s(7 * MIB)


@pytest.mark.parametrize("seed", range(3))
def test_less_time_goes_into_loads_of_adapters_of_different_ranks(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of rank 8, half of rank 64 with the same popularity: the small ones make room."""
    rng, count = random.Random(seed), 60
    bytes_of = {f"v{number}": (52 if number % 2 else 7) * MIB for number in range(count)}
    weights = [1 / (1 + number // 2) for number in range(count)]
    names = rng.choices(list(bytes_of), weights, k=3000)
    at_s, requests = 0.0, []
    for name in names:
        at_s += rng.expovariate(4.0)
        requests.append(VariantArrival(arrived_s=at_s, variant=name, service_s=0.5))
    workers = VariantWorkers(
        num_workers=1, slots=8, max_loaded=16, variant_bytes=0, bytes_of=bytes_of, load_bytes_per_s=100e6
    )
    taken: list[float] = []

    class Counted(replays._Replay):
        def load(self, worker: Any, variant: str, now_s: float) -> None:
            taken.append(workers.load_s(variant))
            super().load(worker, variant, now_s)

    class Blind(replays.VariantFleet):  # type: ignore[type-arg]
        def __class_getitem__(cls, item: object) -> type:
            return cls

        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **{name: one for name, one in named.items() if name != "reload_s"})

    monkeypatch.setattr(replays, "_Replay", Counted)
    replay_variants(requests, workers)
    counted_s, taken[:] = sum(taken), []
    monkeypatch.setattr(replays, "VariantFleet", Blind)
    replay_variants(requests, workers)
    assert counted_s < 0.97 * sum(taken)
