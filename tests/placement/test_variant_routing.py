"""Laws of the scheduling of LoRA variants, for every policy, and choices by hand."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fingerprint.errors import ConfigError
from placement.variant_routing import (
    DEFAULT_VARIANT_POLICY,
    VARIANT_POLICIES,
    Admission,
    BusiestLoaded,
    Candidate,
    DeltaZip,
    FirstComeFirstServed,
    LeastLoaded,
    RoundRobin,
    VariantPolicy,
    WorkerVariants,
    admit_waiting,
    choose_prefetch,
    make_variant_policy,
    protected_pins,
)

BOUND_S = 5.0


@dataclass(eq=False)
class Request:
    arrived_s: float
    variant: str | None
    service_s: float = 1.0
    ends_s: float = 0.0
    worker: int = -1
    is_parent: bool = False


@dataclass
class Cluster:
    """Driver of a policy that checks the limits at each step."""

    policy: VariantPolicy
    workers: list[WorkerVariants]
    max_outstanding: int
    waiting: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)
    served: list[Request] = field(default_factory=list)
    served_s: dict[str, float] = field(default_factory=dict)
    held: dict[int, list[str]] = field(
        default_factory=lambda: defaultdict(list)
    )  # slots, in order of their taking

    def step(self, now_s: float) -> None:
        for request in [one for one in self.running if one.ends_s <= now_s]:
            self.running.remove(request)
            if request.variant is not None:
                self.workers[request.worker].leave(request.variant, is_parent=request.is_parent)
                if not any((request.variant, request.worker) == (one.variant, one.worker) for one in self.running):
                    self.held[request.worker].remove(request.variant)
        admitted: list[Request] = []

        def admit(request: Request, passes: bool) -> bool:
            if is_admitted := self.admit(request, now_s, passes):
                admitted.append(request)
                if not isinstance(self.policy, FirstComeFirstServed) and request.variant is not None:
                    late = [
                        one
                        for one in self.waiting
                        if one not in admitted and one.variant is not None and now_s - one.arrived_s >= BOUND_S
                    ]
                    held = self.held[request.worker]
                    is_new = (
                        sum((one.variant, one.worker) == (request.variant, request.worker) for one in self.running)
                        == 1
                    )
                    assert all(one.arrived_s >= request.arrived_s for one in late) or (
                        request.variant in held[1:] and not is_new
                    ), "it passed one that is overdue, in a new slot or in the one that is emptied"
            return is_admitted

        admit_waiting(self.policy, self.waiting, self.served_s, now_s, admit)
        self.waiting = [one for one in self.waiting if one not in admitted]
        wanted = [one.variant for one in self.waiting if one.variant is not None]
        for variant in wanted:
            found = choose_prefetch(variant, self.workers, now_s, wanted)
            if found is not None:
                self.load(found.index, variant, now_s, found.evicted)
                assert not set(found.evicted) & set(wanted)

    def admit(self, request: Request, now_s: float, passes: bool) -> bool:
        counts = [sum(1 for one in self.running if one.worker == index) for index in range(len(self.workers))]
        rooms = [index for index, count in enumerate(counts) if count < self.max_outstanding]
        if request.variant is None:
            if not rooms:
                return False
            request.worker = rooms[0]
        else:
            wanted = [one.variant for one in self.waiting if one.variant is not None]
            candidates = [Candidate(worker=self.workers[index], outstanding=counts[index]) for index in rooms]
            admission = self.policy.choose(request.variant, candidates, now_s, wanted, passes=passes)
            if admission is None:
                return False
            request.worker = rooms[admission.index]
            worker = self.workers[request.worker]
            if isinstance(self.policy, DeltaZip) and passes:
                assert any(
                    one.is_parent and one.variant == request.variant and one.worker == request.worker
                    for one in self.running
                ), "it passed one that waits, and follows no parent"
            request.is_parent = worker.admit(request.variant, now_s, passes=passes)
            if request.variant not in self.held[request.worker]:
                self.held[request.worker].append(request.variant)
            self.served_s[request.variant] = now_s
            if request.variant not in worker.loaded:
                self.load(request.worker, request.variant, now_s, admission.evicted)
            assert len(worker.in_flight) <= worker.slots
            assert worker.in_flight.keys() <= worker.loaded
        request.ends_s = now_s + request.service_s
        self.running.append(request)
        self.served.append(request)
        return True

    def load(self, index: int, variant: str, now_s: float, evicted: tuple[str, ...]) -> None:
        worker = self.workers[index]
        assert not set(evicted) & set(worker.in_flight)
        assert not set(evicted) & set(worker.pinned)
        assert set(evicted) <= worker.loaded
        worker.load(variant, now_s, evicted)
        assert len(worker.loaded) <= worker.max_loaded


SKIPPING = tuple(make(bound_s=BOUND_S) for make in (LeastLoaded, BusiestLoaded, RoundRobin))
POLICIES = (FirstComeFirstServed(), DeltaZip(), *SKIPPING)
REQUESTS = st.lists(
    st.tuples(
        st.floats(0, 2),
        st.one_of(st.sampled_from("aaaabbc"), st.sampled_from("defghij"), st.none()),
        st.floats(0.1, 4),
    ),
    max_size=60,
)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
@given(
    gaps=REQUESTS,
    num_workers=st.integers(1, 3),
    slots=st.integers(1, 3),
    spare=st.integers(0, 3),
    pins=st.integers(0, 5),
    room=st.integers(1, 4),
)
def test_limits_hold_and_every_request_is_served(policy, gaps, num_workers, slots, spare, pins, room) -> None:
    cluster = Cluster(policy, [WorkerVariants(slots, slots + spare) for _ in range(num_workers)], room)
    for worker in cluster.workers:
        worker.pinned = protected_pins("abcde"[:pins], slots + spare)
    now_s, requests = 0.0, []
    for gap_s, variant, service_s in gaps:
        now_s += gap_s
        while cluster.running and (ends_s := min(one.ends_s for one in cluster.running)) <= now_s:
            cluster.step(ends_s)
        requests.append(Request(now_s, variant, service_s))
        cluster.waiting.append(requests[-1])
        cluster.step(now_s)
    while cluster.running:
        cluster.step(min(one.ends_s for one in cluster.running))
    assert cluster.waiting == []
    assert len(cluster.served) == len(requests)
    if policy.name == "fcfs":
        order = [one for one in cluster.served if one.variant is not None]
        assert order == [one for one in requests if one.variant is not None]


@pytest.mark.parametrize("policy", SKIPPING, ids=lambda policy: policy.name)
def test_a_stream_of_one_variant_does_not_starve_another(policy) -> None:
    """Followers of "a" pass "b" until it has waited for the bound; then "a" drains and "b" runs."""
    cluster = Cluster(policy, [WorkerVariants(1, 2)], max_outstanding=8)
    waiting = Request(0.5, "b")
    for tick in range(200):
        now_s = tick / 10
        cluster.waiting.append(Request(now_s, "a"))
        if now_s == waiting.arrived_s:
            cluster.waiting.append(waiting)
        cluster.step(now_s)
    began_s = waiting.ends_s - waiting.service_s
    assert BOUND_S <= began_s - waiting.arrived_s <= BOUND_S + 1.0  # the last of "a" takes a second


@pytest.mark.parametrize("policy", SKIPPING, ids=lambda policy: policy.name)
def test_past_the_bound_slots_are_emptied_one_by_one(policy) -> None:
    """Two slots, two streams: "a" took its slot first and drains for "c"; "b" goes on until "d" is the next."""
    cluster = Cluster(policy, [WorkerVariants(2, 3)], max_outstanding=64)
    late = [Request(0.5, "c"), Request(0.5, "d")]
    for tick in range(150):
        now_s = tick / 10
        cluster.waiting += [Request(now_s, "a"), Request(now_s + 0.01, "b")]
        if now_s == 0.5:
            cluster.waiting += late
        cluster.step(now_s)
    first, second = (one.ends_s - one.service_s - one.arrived_s for one in late)
    assert BOUND_S <= first <= BOUND_S + 1.0
    assert first < second <= BOUND_S + 2.1
    began_s = sorted(one.ends_s - one.service_s for one in cluster.served if one.variant == "b")
    assert any(late[0].arrived_s + BOUND_S + 0.1 < at_s < late[0].arrived_s + first for at_s in began_s)


def test_followers_of_a_parent_that_has_ended_pass_none() -> None:
    """A stream of "a" passes "b" while its parent runs; those that followed drain, and "b" has the slot."""
    cluster = Cluster(DeltaZip(), [WorkerVariants(1, 2)], max_outstanding=8)
    waiting = Request(0.05, "b")
    for tick in range(40):
        now_s = tick / 10
        cluster.waiting.append(Request(now_s, "a"))
        if not tick:
            cluster.waiting.append(waiting)
        cluster.step(now_s)
    followers = [one for one in cluster.served if 0 < one.arrived_s < 0.7 and one is not waiting]
    assert len(followers) == 6
    assert all(one.ends_s - one.service_s == pytest.approx(one.arrived_s) for one in followers)
    began_s = waiting.ends_s - waiting.service_s
    assert 1.0 < began_s <= 2.0
    late = [one for one in cluster.served if one.arrived_s >= 1.0]
    assert late
    assert all(one.ends_s - one.service_s >= began_s for one in late)


def test_a_waiting_request_has_a_slot_once_parents_and_followers_of_that_moment_have_ended() -> None:
    """Two slots, two streams: "c" waits for a parent's and a follower's time at most, however long they go on."""
    cluster = Cluster(DeltaZip(), [WorkerVariants(2, 3)], max_outstanding=64)
    waiting = Request(1.0, "c")
    for tick in range(100):
        now_s = tick / 10
        cluster.waiting += [Request(now_s, "a"), Request(now_s, "b")]
        if now_s == waiting.arrived_s:
            cluster.waiting.append(waiting)
        cluster.step(now_s)
    assert waiting.ends_s - waiting.service_s - waiting.arrived_s <= 2.0


def worker(*loaded: str, slots: int = 2, max_loaded: int = 3, in_flight: str = "") -> WorkerVariants:
    variants = WorkerVariants(slots, max_loaded)
    for variant in loaded:
        variants.load(variant, 0.0)
    for variant in in_flight:
        variants.admit(variant, 1.0)
    return variants


def candidates(*pairs: tuple[WorkerVariants, int]) -> list[Candidate]:
    return [Candidate(worker=one, outstanding=outstanding) for one, outstanding in pairs]


class TestLeastLoaded:
    def test_least_outstanding_of_those_that_have_it(self) -> None:
        rooms = candidates((worker("a"), 3), (worker("a"), 1), (worker("b"), 0))
        assert LeastLoaded().choose("a", rooms, 2.0) == Admission(index=1)

    @pytest.mark.parametrize(("there", "elsewhere", "taken"), [(4, 0, 0), (5, 0, 1), (10, 3, 0), (11, 3, 1)])
    def test_a_further_worker_loads_it_once_the_best_has_much_more_to_do(self, there, elsewhere, taken) -> None:
        rooms = candidates((worker("a"), there), (worker("b"), elsewhere), (worker("b"), elsewhere + 1))
        assert LeastLoaded().choose("a", rooms, 2.0) == Admission(index=taken)

    def test_a_slot_that_is_scarce_counts_as_requests(self) -> None:
        """Half of the slots taken: two requests more, where "a" would take the other."""
        rooms = candidates((worker("a", "b", in_flight="b"), 1), (worker("a", in_flight="a"), 2))
        assert LeastLoaded().choose("a", rooms, 2.0) == Admission(index=1)
        rooms = candidates((worker("a", "b", in_flight="b"), 1), (worker("a", in_flight="a"), 4))
        assert LeastLoaded().choose("a", rooms, 2.0) == Admission(index=0)

    def test_a_cold_variant_goes_to_the_worker_with_least_to_do_and_then_least_to_lose(self) -> None:
        popular, rare = worker("b", "c", "d"), worker("e", "f", "g")
        for variant in "bcdbcd":
            popular.admit(variant, 1.0)
            popular.leave(variant)
        assert LeastLoaded().choose("a", candidates((popular, 1), (rare, 2)), 2.0) == Admission(
            index=0, evicted=("b",)
        )
        assert LeastLoaded().choose("a", candidates((popular, 2), (rare, 2)), 2.0) == Admission(
            index=1, evicted=("e",)
        )

    def test_no_worker_of_a_hot_variant_stays_idle(self) -> None:
        cluster = Cluster(LeastLoaded(), [WorkerVariants(8, 32) for _ in range(2)], max_outstanding=64)
        for turn in range(40):
            cluster.waiting.append(Request(turn / 1000, "a", service_s=9.0))
            cluster.step(turn / 1000)
        counts = [sum(1 for one in cluster.running if one.worker == index) for index in range(2)]
        assert counts == [20, 20]


def test_round_robin_takes_the_worker_not_used_for_longest() -> None:
    rooms = [Candidate(worker=worker("a"), outstanding=0, last_turn=turn) for turn in (3, 1, 2)]
    assert RoundRobin().choose("a", rooms, 2.0) == Admission(index=1)


class TestChoices:
    def test_busiest_of_those_that_have_it(self) -> None:
        rooms = candidates((worker("a"), 1), (worker("a"), 3), (worker("b"), 5))
        assert BusiestLoaded().choose("a", rooms, 2.0) == Admission(index=1)

    def test_loaded_without_a_slot_is_passed_over(self) -> None:
        rooms = candidates((worker("a", "b", "c", in_flight="bc"), 2), (worker(), 0))
        assert BusiestLoaded().choose("a", rooms, 2.0) == Admission(index=1)

    def test_load_where_the_least_is_lost(self) -> None:
        popular, rare = worker("b", "c", "d"), worker("e", "f", "g")
        for variant in "bbbccd":
            popular.admit(variant, 1.0)
            popular.leave(variant)
        for variant in "efgfg":
            rare.admit(variant, 1.0)
            rare.leave(variant)
        popular.admit("d", 1.0)
        popular.leave("d")
        rooms = candidates((popular, 0), (rare, 5))
        assert BusiestLoaded().choose("a", rooms, 2.0) == Admission(index=1, evicted=("e",))
        assert BusiestLoaded().choose("a", candidates((popular, 0), (worker(), 9)), 2.0) == Admission(index=1)

    def test_a_worker_that_failed_is_the_last(self) -> None:
        rooms = [Candidate(worker=worker("a"), outstanding=3, is_avoided=True)]
        assert BusiestLoaded().choose("a", rooms, 2.0) == Admission(index=0)
        rooms.append(Candidate(worker=worker(), outstanding=0))
        assert BusiestLoaded().choose("a", rooms, 2.0) == Admission(index=1)

    def test_first_come_first_served_takes_the_least_loaded(self) -> None:
        rooms = candidates((worker("a"), 2), (worker("b"), 1))
        assert FirstComeFirstServed().choose("a", rooms, 2.0) == Admission(index=1)

    def test_no_worker_has_a_slot(self) -> None:
        rooms = candidates((worker("b", "c", in_flight="bc"), 2))
        for make in VARIANT_POLICIES.values():
            assert make().choose("a", rooms, 2.0) is None


class TestEviction:
    def test_frequencies_decay(self) -> None:
        variants = worker("a", "b", max_loaded=2)
        for _ in range(4):
            variants.admit("a", 0.0)
            variants.leave("a")
        variants.admit("b", 3600.0)
        variants.leave("b")
        assert variants.evictions("c", 3601.0) == ("a",)

    def test_equals_by_least_recent_use(self) -> None:
        variants = WorkerVariants(1, 2)
        variants.load("b", 1.0)
        variants.load("a", 2.0)
        assert variants.evictions("c", 3.0) == ("b",)

    def test_wanted_variants_go_last(self) -> None:
        variants = worker("a", "b", max_loaded=2)
        variants.admit("b", 1.0)
        variants.leave("b")
        assert variants.evictions("c", 2.0, {"a"}) == ("b",)
        assert variants.evictions("c", 2.0, {"a", "b"}) == ("a",)
        assert variants.evictions("c", 2.0, {"a", "b"}, spare_wanted=True) is None

    def test_as_many_as_are_needed(self) -> None:
        """A worker may have more loaded than it should: its limit was lowered."""
        variants = worker("a", "b", "c")
        variants.max_loaded = 2
        assert variants.evictions("d", 1.0) == ("a", "b")


@pytest.mark.parametrize("make", [LeastLoaded, BusiestLoaded, RoundRobin])
def test_fairness_near_the_bound(make) -> None:
    policy = make(bound_s=10.0)
    first, second = Request(0.0, "a"), Request(1.0, "b")
    served_s = {"a": 3.0, "b": 2.0}
    assert policy.order([first, second], served_s, 4.0) == [first, second]
    assert policy.order([first, second], served_s, 6.0) == [second, first]
    assert policy.order([first, second], served_s, 10.0) == [first, second]


def test_a_request_of_the_base_passes_variants_that_wait() -> None:
    offered: list[Request] = []

    def admit(request: Request, passes: bool) -> bool:
        assert passes == bool(offered)
        offered.append(request)
        return request.variant is None

    waiting = [Request(0.0, "a"), Request(1.0, "b"), Request(2.0, None)]
    admit_waiting(FirstComeFirstServed(), waiting, {}, 3.0, admit)
    assert offered == [waiting[0], waiting[2]]


def test_policies_by_name() -> None:
    assert {name: make_variant_policy(name).name for name in VARIANT_POLICIES} == {
        name: name for name in VARIANT_POLICIES
    }
    assert make_variant_policy().name == DEFAULT_VARIANT_POLICY
    with pytest.raises(ConfigError, match="choose one of"):
        make_variant_policy("best")


@pytest.mark.parametrize(("slots", "max_loaded"), [(0, 4), (3, 2)])
def test_impossible_limits(slots, max_loaded) -> None:
    with pytest.raises(ConfigError):
        WorkerVariants(slots, max_loaded)
