"""Windows of bursts by an engine that compiles kernels, or whose pace changes, on a clock of its own."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from tests.daemon.profiling_modules import profiling_module
from tests.golden_words import Golden

QUICK_S, COMPILE_S = 0.1, 0.8


@pytest.fixture(scope="module")
def base() -> ModuleType:
    return profiling_module("base")


class Engine:
    """Takes as long for each call as ``calls`` say, and compiles in those that are negative."""

    engine, step_timer = "vLLM", True

    def __init__(self, calls: Iterator[float]) -> None:
        self._calls = calls
        self.now, self.made = 0.0, 0
        self._compiled: list[tuple[float, float]] = []

    def set_timer(self, *, repeat: int, record: bool) -> None:
        pass

    def read_timer(self) -> list[list[Any]]:
        return [[]]

    def compilations(self) -> list[tuple[float, float]]:
        found, self._compiled = self._compiled, []
        return found

    def generate(self, prompts: list[list[int]], output_tokens: int, active: int) -> list[int]:
        took_s = next(self._calls)
        if took_s < 0:
            self._compiled.append((self.now, self.now - took_s))
        self.now += abs(took_s)
        self.made += 1
        return [output_tokens] * len(prompts)


Visit = Callable[..., tuple[Engine, Any]]


@pytest.fixture
def visit(base: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Visit:
    def visited(calls: Iterator[float], *, most: int = 4, limit_s: float = 20.0) -> tuple[Engine, Any]:
        engine = Engine(calls)
        monkeypatch.setattr(base.time, "perf_counter", lambda: engine.now)
        order = {"batch": 2, "input_tokens": 8, "output_tokens": 1, "repeat": 1, "most": most, "until_s": 1e6}
        order |= {"steps": False, "active": 0, "agree_within": 0.10, "agree_limit_s": limit_s}
        return engine, base._Visit(engine, order, [[1] * 8] * 2)

    return visited


def seconds(visited: Any) -> list[float]:
    return [round(end - begin, 6) for begin, end in visited.counted()]


def test_calls_in_which_a_kernel_was_compiled_do_not_count(visit: Visit) -> None:
    """Also a short one that would pass for a slow call."""
    _, found = visit(itertools.chain([-COMPILE_S, -0.15], itertools.repeat(QUICK_S)))
    found.run()
    assert seconds(found)
    assert set(seconds(found)) == {QUICK_S}


def test_calls_that_become_faster_are_made_until_their_halves_agree(visit: Visit) -> None:
    calls = itertools.chain([0.2, 0.19, 0.17, 0.15, 0.13, 0.12], itertools.repeat(QUICK_S))
    engine, found = visit(calls)
    found.run()
    times = seconds(found)
    middle = len(times) // 2
    assert engine.made > 4
    earlier, later = statistics.median(times[:middle]), statistics.median(times[middle:])
    assert abs(earlier - later) <= 0.10 * later + 1e-9


def test_an_engine_that_compiles_in_every_call_tells_no_time(
    base: ModuleType, visit: Visit, golden: Golden
) -> None:
    engine, found = visit(itertools.repeat(-COMPILE_S))
    with golden.raises("daemon", base.WorkError):
        found.run()
    assert engine.made <= 4 * base._MOST_WINDOWS + 2 * base._MOST_WINDOWS


def test_calls_that_never_agree_are_given_up_with_how_far_they_are_apart(
    base: ModuleType, visit: Visit, golden: Golden
) -> None:
    _, found = visit(QUICK_S * 1.2**number for number in itertools.count())
    with golden.raises("daemon", base.WorkError):
        found.run()


def test_no_further_window_begins_after_the_limit(visit: Visit, base: ModuleType) -> None:
    engine, found = visit((QUICK_S * 1.2**number for number in itertools.count()), limit_s=0.0)
    with pytest.raises(base.WorkError):
        found.run()
    assert engine.made == 4
