"""Requests, orders and summary of the contest of deltas and swapped models, with an engine of set times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from tests.bench.delta_contest import LAWS, Asked, AtOnce, Swapping, Times, draw, play, summary_of

STEP_S, SWAP_S = 0.01, 0.3


class Clock:
    """Time that engine and pauses move."""

    def __init__(self) -> None:
        self.now_s = 5.0

    def __call__(self) -> float:
        return self.now_s

    def pause(self, seconds: float) -> None:
        self.now_s += seconds


class SetEngine:
    """Engine whose steps take ``STEP_S``, each a token for all."""

    def __init__(self, clock: Clock) -> None:
        self.engine, self._clock = self, clock
        self.left: dict[str, tuple[int, int]] = {}  # tokens so far and at the end
        self.batches: list[set[int]] = []
        self._variants: dict[str, int] = {}

    def add(self, prompt: Sequence[int], number: int, output: int) -> str:
        name = str(len(self._variants))
        self._variants[name], self.left[name] = number, (0, output)
        return name

    def step(self) -> list[Any]:
        self._clock.now_s += STEP_S
        self.batches.append({self._variants[name] for name in self.left})
        outputs = []
        for name, (tokens, most) in list(self.left.items()):
            self.left[name] = tokens + 1, most
            is_last = tokens + 1 == most
            outputs.append(
                SimpleNamespace(
                    request_id=name, outputs=[SimpleNamespace(token_ids=[0] * (tokens + 1))], finished=is_last
                )
            )
            if is_last:
                del self.left[name]
        return outputs

    def abort_request(self, names: Sequence[str]) -> None:
        for name in names:
            self.left.pop(name, None)

    def has_unfinished_requests(self) -> bool:
        return bool(self.left)


def asked(*arrivals: tuple[float, int], output: int = 10) -> list[Asked]:
    return [Asked(at_s=at, variant=one, input_tokens=16, output_tokens=output) for at, one in arrivals]


def played(requests: list[Asked], order: str, seconds: float = 60.0) -> tuple[list[Times], SetEngine, int]:
    clock = Clock()
    engine = SetEngine(clock)
    there = [0]

    def swap(variant: int) -> None:
        assert not engine.left, "weights change under requests"
        there[0] = variant
        clock.pause(SWAP_S)

    queue = AtOnce() if order == "slots" else Swapping(order, swap)
    times = play(
        engine,
        requests,
        queue,
        seconds,
        prompt=lambda seed, length: [seed] * length,
        number_of=lambda variant: variant,
        clock=clock,
        pause=clock.pause,
    )
    assert not engine.left
    return times, engine, queue.swaps if isinstance(queue, Swapping) else 0


@pytest.mark.parametrize("law", LAWS)
def test_requests_are_as_many_and_as_popular_as_the_law_says(law: str) -> None:
    requests = draw(law, 2000.0, seed=3)
    assert requests == draw(law, 2000.0, seed=3) != draw(law, 2000.0, seed=4)
    assert len(requests) == pytest.approx(24_000, rel=0.05)
    assert [one.at_s for one in requests] == sorted(one.at_s for one in requests)
    counts = Counter(one.variant for one in requests)
    zipf = 1 / sum(number**-1.5 for number in range(1, 33))
    assert counts[1] / len(requests) == pytest.approx(zipf if law == "zipf-bursts" else 1 / 32, rel=0.2)
    of_first = [one.at_s for one in requests if one.variant == 1]
    gaps = [later - earlier for earlier, later in pairwise(of_first)]
    mean = sum(gaps) / len(gaps)
    variation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 / mean
    assert variation == pytest.approx(4.0 if law == "zipf-bursts" else 1.0, rel=0.25)


@pytest.mark.parametrize("order", ["fcfs", "grouped"])
def test_one_model_runs_at_a_time_and_all_are_answered(order: str) -> None:
    requests = draw("even", 20.0, seed=1)
    times, engine, swaps = played(requests, order, seconds=900.0)
    assert all(len(batch) == 1 for batch in engine.batches)
    assert all(one.last_s is not None for one in times)
    assert swaps > 31


def test_first_come_first_served_swaps_for_each_run_of_a_model_and_grouping_joins_them() -> None:
    requests = asked((0.0, 1), (0.001, 2), (0.002, 1), (0.003, 2))
    assert played(requests, "fcfs")[2] == 4
    assert played(requests, "grouped")[2] == 2


def test_grouping_lets_none_pass_who_has_waited_too_long() -> None:
    requests = asked(*((0.05 * number, 1) for number in range(600)), (1.0, 2))
    requests.sort(key=lambda one: one.at_s)
    times, _, _ = played(requests, "grouped")
    (mine,) = [found for found, one in zip(times, requests, strict=True) if one.variant == 2]
    assert mine.first_s is not None
    assert 10.0 < mine.first_s - mine.arrived_s < 11.0


def test_slots_take_all_at_once_and_what_has_not_ended_is_a_lower_bound() -> None:
    requests = asked((0.0, 1), (0.0, 2), (0.5, 3), output=100)
    times, engine, swaps = played(requests, "slots", seconds=1.2)
    assert (swaps, max(len(batch) for batch in engine.batches)) == (0, 3)
    found = summary_of(times, 1.2)
    assert (found["requests"], found["ended"]) == (3, 2)
    assert found["tokens_per_s"] == pytest.approx((100 + 100 + 70) / 1.2, rel=0.02)
    assert found["e2e_s"]["mean"] == pytest.approx((1.0 + 1.0 + 0.7) / 3, rel=0.02)
    assert STEP_S <= found["ttft_s"]["mean"] + 1e-9 <= 2 * STEP_S
