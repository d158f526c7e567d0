"""Choice of the calls that count: on call times recorded on an H200, and laws."""

from __future__ import annotations

import importlib
import math
import sys
from itertools import accumulate
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.engines.external import PROFILING_PATH
from tests.daemon.profiling_modules import profiling_module

# GPT-OSS 20B of random weights, whole: five calls of 128 prompts of 128 tokens with 65 out, vLLM 0.24.
STALLED_MS = (1327.4, 656.0, 656.5, 1426.9, 1338.6)
# A fingerprint of it, 8 prompts of 128 tokens: the first call compiled.
FIRST_COMPILED_MS = (664.5, 52.2, 55.2, 60.2, 62.6, 61.7, 73.1, 55.5)
# Gemma 2 9B, whole, 128 prompts of 1,024 tokens.
SETTLED_MS = (3643.6, 3623.4, 3635.6, 3645.9, 3640.3)


@pytest.fixture(scope="module")
def agreement() -> ModuleType:
    return profiling_module("agreement")


def spans(milliseconds: tuple[float, ...]) -> list[tuple[float, float]]:
    ends = list(accumulate(ms / 1e3 for ms in milliseconds))
    return list(zip([0.0, *ends[:-1]], ends, strict=True))


def seconds(of: list[tuple[float, float]]) -> list[float]:
    return [end - begin for begin, end in of]


class TestRecordedCalls:
    def test_stalled_calls_do_not_agree(self, agreement) -> None:
        assert agreement.difference(seconds(agreement.alike(spans(STALLED_MS)))) > 0.10

    def test_without_the_calls_that_compiled_they_agree(self, agreement) -> None:
        bursts = spans(STALLED_MS)
        compiled = [(bursts[index][0] + 0.1, bursts[index][0] + 0.7) for index in (0, 3, 4)]
        kept = agreement.counted(bursts, compiled)
        assert kept == [bursts[1], bursts[2]]
        assert agreement.difference(seconds(kept)) < 0.001

    def test_a_long_first_call_is_left_out_where_nothing_tells_that_it_compiled(self, agreement) -> None:
        bursts = spans(FIRST_COMPILED_MS)
        assert agreement.counted(bursts, []) == bursts[1:]

    def test_settled_calls_agree(self, agreement) -> None:
        bursts = spans(SETTLED_MS)
        assert agreement.counted(bursts, []) == bursts
        assert agreement.difference(seconds(bursts)) < 0.01


class TestLaws:
    def test_none_never_agree_and_one_is_taken_as_it_is(self, agreement) -> None:
        assert agreement.difference([]) == math.inf
        assert agreement.difference([0.2]) == 0.0

    @given(
        st.lists(st.floats(1e-4, 10.0), min_size=2, max_size=30), st.floats(1e-3, 1e3), st.integers(0, 1_000_000)
    )
    def test_equal_times_agree_and_the_unit_does_not_matter(self, agreement, times, unit, seed) -> None:
        assert agreement.difference([times[0]] * len(times)) == 0.0
        scaled = agreement.difference([unit * time for time in times])
        assert scaled == pytest.approx(agreement.difference(times), rel=1e-9, abs=1e-12)

    @given(st.lists(st.floats(1.0, 300.0), min_size=1, max_size=20), st.data())
    def test_a_call_counts_if_and_only_if_nothing_was_compiled_in_it(self, agreement, times, data) -> None:
        """Leave none out for its length where all take less than 300 ms."""
        bursts = spans(tuple(times))
        chosen = data.draw(st.sets(st.integers(0, len(bursts) - 1)))
        compiled = [
            ((2 * begin + end) / 3, (begin + 2 * end) / 3) for begin, end in map(bursts.__getitem__, chosen)
        ]
        kept = agreement.counted(bursts, compiled)
        assert kept == [burst for index, burst in enumerate(bursts) if index not in chosen]


class TestCompileWatch:
    @pytest.fixture
    def watched(self, monkeypatch) -> tuple[ModuleType, type]:
        monkeypatch.syspath_prepend(PROFILING_PATH)
        module = importlib.import_module("iserve_profiling.compile_watch")
        jit = ModuleType("triton.runtime.jit")

        class JITFunction:
            def _do_compile(self, seconds: float) -> str:
                if seconds < 0:
                    raise ValueError("no such kernel")
                end = module.time.perf_counter() + seconds
                while module.time.perf_counter() < end:
                    pass
                return "kernel"

        jit.JITFunction = JITFunction
        for name, of in (("triton", ModuleType("triton")), ("triton.runtime.jit", jit)):
            monkeypatch.setitem(sys.modules, name, of)
        return module, JITFunction

    def test_each_compilation_is_noted_once_and_told_once(self, watched) -> None:
        module, function = watched
        watch = module.CompileWatch()
        found = watch.install()
        assert watch.install() == found >= 1  # and is not noted twice for it
        before = module.time.perf_counter()
        assert function()._do_compile(0.002) == "kernel"
        after = module.time.perf_counter()
        ((begin, end),) = watch.read()
        assert before <= begin
        assert begin + 0.002 <= end <= after
        assert watch.read() == []

    def test_one_that_fails_is_noted_too_and_its_error_passed_on(self, watched, monkeypatch) -> None:
        module, function = watched
        monkeypatch.setattr(module, "_LEAST_S", 0.0)
        watch = module.CompileWatch()
        watch.install()
        with pytest.raises(ValueError, match="no such kernel"):
            function()._do_compile(-1.0)
        assert len(watch.read()) == 1
