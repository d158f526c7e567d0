"""The order and number of a check's bursts, and what their times are. Pure: bursts and clock are arguments.

TTFT is the time of a burst with one output token; TPOT is ``(T(n) - T(1)) / (n - 1)`` of the two bursts of a pair,
run one after the other so that what drifts meets both (definitions: ``fingerprint.estimates``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from fingerprint.config import Workload
from fingerprint.errors import ConflictError, NotMeasuredError, TooLittleTimeError
from fingerprint.trimmed_mean import locate
from fingerprint.verification import Reading

__all__ = ["Burst", "Times", "time_batches", "time_bursts"]

_FEWEST_PAIRS, _WANTED_PAIRS, _MOST_PAIRS = 3, 5, 50
_TIGHT = 0.01  # half-width of the interval over the mean, at which repeating ends
_FULL_SHARE = 0.7  # of the time, for the whole batch; what it leaves is for one request
_PROBE_TOKENS = 9  # output tokens of the burst that shows how long the rest will take
_FEW_TOKENS, _TELLING_TOKENS = 9, 65  # below, five pairs tell less of a token than three of as many as the latter


class Burst(NamedTuple):
    elapsed_s: float
    alone: bool  # False: the worker served other requests meanwhile


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Times of a check, under the workload whose bursts were run."""

    workload: Workload
    ttft_s: Reading
    tpot_s: Reading | None  # None: one output token
    disturbed: int  # pairs left out because other requests were served meanwhile


def time_batches(
    burst: Callable[[Workload], Burst],
    workload: Workload,
    *,
    max_seconds: float,
    clock: Callable[[], float],
    progress: Callable[[int, int, float], None],
) -> tuple[Times, Times | None, str | None]:
    """Time the whole batch, then one request without any other, or say why that was not timed.

    A batch of one is both.

    Raises:
        NotMeasuredError, ConflictError: as ``time_bursts`` of the whole batch.
    """
    if workload.batch == 1:
        return (
            time_bursts(burst, workload, max_seconds=max_seconds, clock=clock, progress=progress),
            None,
            None,
        )
    started_s = clock()
    full = time_bursts(burst, workload, max_seconds=max_seconds, aim=_FULL_SHARE, clock=clock, progress=progress)
    left_s = started_s + max_seconds - clock()
    try:
        lone = replace(full.workload, batch=1)
        alone = time_bursts(burst, lone, max_seconds=left_s, clock=clock, progress=progress)
    except (ConflictError, NotMeasuredError) as error:
        return full, None, str(error)
    return full, alone, None


def time_bursts(
    burst: Callable[[Workload], Burst],
    workload: Workload,
    *,
    max_seconds: float,
    clock: Callable[[], float],
    progress: Callable[[int, int, float], None],
    aim: float = 1.0,
) -> Times:
    """Run pairs of bursts until both times are tight or the time is up; an answer that would be too long is cut.

    Args:
        clock: seconds.
        progress: pairs run, pairs expected in all (more of them once they take less time than the first did),
            seconds since the start.
        aim: the share of the time to do with, unless three pairs take more.

    Raises:
        TooLittleTimeError: three pairs of the shortest answers take longer than that.
        NotMeasuredError: the noise is larger than what is measured.
        ConflictError: other requests were served in nearly every burst.
    """
    started_s = clock()
    end_s = started_s + aim * max_seconds
    one = replace(workload, output_tokens=1)
    progress(0, _WANTED_PAIRS, 0.0)
    burst(one)  # the first compiles, captures and fills caches
    first_s = burst(one).elapsed_s
    probe = replace(workload, output_tokens=min(workload.output_tokens, _PROBE_TOKENS))
    step_s = 0.0
    if probe != one:
        step_s = max(0.0, burst(probe).elapsed_s - first_s) / (probe.output_tokens - 1)
    if _least_s(workload, first_s, step_s) > end_s - clock():
        end_s = started_s + max_seconds
    many = _affordable(workload, first_s, step_s, end_s - clock(), max_seconds)
    pair_s = first_s if many == one else 2 * first_s + (many.output_tokens - 1) * step_s
    planned = max(_FEWEST_PAIRS, min(_MOST_PAIRS, int((end_s - clock()) / pair_s) if pair_s > 0 else _MOST_PAIRS))
    ttft: list[float] = []
    tpot: list[float] = []
    disturbed = 0
    while len(ttft) < _MOST_PAIRS:
        progress(len(ttft), max(planned, len(ttft) + 1), clock() - started_s)
        short = burst(one)
        long = short if many == one else burst(many)
        if short.alone and long.alone:
            ttft.append(short.elapsed_s)
            if many != one:
                tpot.append((long.elapsed_s - short.elapsed_s) / (many.output_tokens - 1))
        else:
            disturbed += 1
        enough = len(ttft) >= _FEWEST_PAIRS
        if enough and (clock() + pair_s > end_s or (len(ttft) >= _WANTED_PAIRS and _tight(ttft) and _tight(tpot))):
            break
        if not enough and disturbed and clock() > end_s:
            raise ConflictError(
                f"other requests ran meanwhile: only {len(ttft)} of {len(ttft) + disturbed} pairs of bursts ran "
                "alone; verify it when it is quiet"
            )
    return Times(
        workload=many, ttft_s=_reading(ttft), tpot_s=_reading(tpot) if tpot else None, disturbed=disturbed
    )


def _affordable(workload: Workload, first_s: float, step_s: float, left_s: float, max_seconds: float) -> Workload:
    """Return the workload with as much of its answer as lets the wanted pairs be run.

    Raises:
        TooLittleTimeError: not even the fewest of the shortest.
    """
    least_s, fits = _least_s(workload, first_s, step_s), workload.output_tokens
    if fits > 1 and step_s > 0:
        fits, fewer = (1 + int((left_s / n - 2 * first_s) / step_s) for n in (_WANTED_PAIRS, _FEWEST_PAIRS))
        if fits < _FEW_TOKENS:  # next to the noise of two long prefills: fewer pairs tell more
            fits = max(2, min(_TELLING_TOKENS, fewer))
    if least_s > left_s:
        limit_s = max(0.0, max_seconds)
        left = f"{left_s:.1f} s of {limit_s:g} s are" if left_s > 0 else f"none of {limit_s:g} s is"
        raise TooLittleTimeError(
            f"a burst of batch {workload.batch} and {workload.input_tokens} input tokens takes {first_s:.2f} s to "
            f"its first tokens, and {left} left, not enough for three pairs of bursts; raise --max-seconds"
        )
    return replace(workload, output_tokens=min(workload.output_tokens, fits))


def _least_s(workload: Workload, first_s: float, step_s: float) -> float:
    """Return the fewest pairs of the shortest answers."""
    return _FEWEST_PAIRS * (first_s if workload.output_tokens == 1 else 2 * first_s + step_s)


def _tight(values: Sequence[float]) -> bool:
    if not values:
        return True
    location = locate(values)
    return location.half_width <= _TIGHT * location.value


def _reading(values: Sequence[float]) -> Reading:
    """Return the reading. Raises NotMeasuredError: the noise is larger than what is measured."""
    location = locate(values)
    if location.value <= 0:
        raise NotMeasuredError(
            "bursts with longer answers took no longer than those with one token: the machine is too noisy, or "
            "the answers are too short, for a time per output token; verify it when it is quiet, or with more "
            "--output-tokens"
        )
    low = max(location.value - location.half_width, 1e-3 * location.value)
    return Reading(value=location.value, low=low, high=location.value + location.half_width, repeats=len(values))
