"""Step times of a deployment, tabulated once from its estimator so that looking one up costs little.

An estimator answers for whole batches: TTFT and TPOT over (batch, input, context). A simulator meets other steps:
chunks of prompts together with sequences that decode. Three tables lead from one to the other, with x new tokens
in a step, n sequences that decode, and m their mean context (tokens attended to, the new one included):

*   decode(n, m): TPOT at batch n and context m, linear between knots in both. While no sequence joins or leaves,
    the m of a step is one more than that of the step before, so many steps have a closed sum. Where steps are
    padded, it is that of as many sequences as the graph has rows, less the growth with contexts of those that pad.
*   tokens(x): TTFT of x prompt tokens as short prompts, as many as may run at once.
*   attention(l): what the first l tokens of one prompt take beyond that, because they attend to one another:
    TTFT(1, l) less the tokens(x) of its chunks, never falling and never negative. A chunk [s, e) takes
    attention(e) - attention(s).

A step of prompts takes ``tokens(x) + attention of its chunks``, with decoders ``tokens(x + n) + attention of its
chunks + decode(n, m) - decode(n, 1)`` (their tokens go through the same matrices, their KV is read on top): never
less than either part alone, never more than both. At the knots, a lone prompt takes the estimator's TTFT and a
pure decode step its TPOT, so one request alone has the estimator's E2E (but where chunks are smaller than the
estimator's own, which costs a little: the weights are read for each).

Some engines plan and prepare a step while the one before runs (:func:`plans_ahead`). A TTFT is that of prompts
that find the device idle and wait for the host; behind another step those ``hidden_s`` are not paid again.

Estimators answer for equal contexts. Where they know what one that is longer than the rest costs, m is the mean
and ``longest_share`` of the longest context's surplus over it (:meth:`StepModel.context`), one more with each step
too.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from fingerprint.config import DeploymentConfig, Workload
from fingerprint.engines import largest_graph, traits_of
from fingerprint.errors import ConfigError
from fingerprint.estimates import Estimator, Source, SteadyState, TellsSteadyState

__all__ = ["Limits", "StepModel", "plans_ahead", "tabulate"]

_SHORT_PROMPT = 128  # tokens: of attention to one another they have next to none
_HALF_ANSWER = 32  # tokens
_DENSE_FROM = 64  # tokens: from here on the knots of prompts are closer than a factor of two apart,
_DENSE_RATIO = 1.25  # because somewhere there reading the weights gives way to arithmetic, with a bend

_NOTHING_TOLD = SteadyState()

Table = npt.NDArray[np.float64]
_Ttft = Callable[[int, int], float]  # (batch, tokens of each) -> seconds
_Reached = Callable[[int, int], bool]  # the same: whether it lies between what was measured


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits that a worker is launched with.

    Raises:
        ConfigError: a limit below 1, or a step that does not hold one token of each sequence.
    """

    max_batch: int
    max_context_tokens: int  # prompt and answer of one request
    max_batched_tokens: int  # of one step
    kv_tokens: int | None = None  # of all sequences together; None: every slot has room for a whole context
    kv_window: int | None = None  # most that is kept of one of them; None: all of its tokens
    preempts: bool = False  # a request is admitted when its prompt fits; else when its whole answer does too
    pads_steps: bool = False  # a step without drafts, of one stage, has the rows of its graph (``EngineTraits``)

    def __post_init__(self) -> None:
        for name in ("max_batch", "max_context_tokens", "max_batched_tokens", "kv_tokens", "kv_window"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if self.max_batched_tokens < self.max_batch:
            raise ConfigError(
                f"a step of {self.max_batched_tokens} tokens has no room for one token of each of "
                f"{self.max_batch} sequences; raise max_batched_tokens"
            )

    def kept_tokens(self, tokens: int) -> int:
        """Return how many of a sequence's ``tokens`` are kept."""
        return tokens if self.kv_window is None else min(tokens, self.kv_window)

    @property
    def longest(self) -> int:
        """Tokens of the longest request that is ever admitted."""
        if self.kv_tokens is None or self.kept_tokens(self.max_context_tokens) <= self.kv_tokens:
            return self.max_context_tokens
        return self.kv_tokens


class StepModel:
    """Step times of one deployment, in seconds (module docstring). Never changes once it is built.

    Args:
        contexts: knots of the mean context, ascending, from 1.
        decode_s: [max_batch, knots], row n - 1 for n sequences.
        tokens_s: of 0 to ``max_batched_tokens`` new tokens.
        attention_s: of the first 0 to ``max_context_tokens`` tokens of one prompt; starts at 0, never falls.
        plans_ahead: what is in a step is settled when the one before begins.
        steady_state: what a step of prompts takes less behind another step, and what one long context costs.

    Raises:
        ConfigError: a time that is not finite and positive, or tables of other sizes.
    """

    __slots__ = (
        "_base", "_knots", "_least", "_slope", "attention_s", "hidden_s", "limits", "longest_share", "plans_ahead",
        "tokens_s",
    )  # fmt: skip

    def __init__(
        self,
        limits: Limits,
        *,
        contexts: Table,
        decode_s: Table,
        tokens_s: Table,
        attention_s: Table,
        plans_ahead: bool = False,
        steady_state: SteadyState = _NOTHING_TOLD,
    ) -> None:
        sizes = (decode_s.shape, tokens_s.shape, attention_s.shape)
        wanted = (
            (limits.max_batch, len(contexts)),
            (limits.max_batched_tokens + 1,),
            (limits.max_context_tokens + 1,),
        )
        if sizes != wanted or len(contexts) < 2:
            raise ConfigError(f"tables of {wanted} are needed, got {sizes}")
        for name, table in (("decode", decode_s), ("prefill", tokens_s[1:])):
            if not (np.isfinite(table).all() and (table > 0).all()):
                raise ConfigError(f"a {name} time of this deployment is not a positive, finite number of seconds")
        if attention_s[0] or not np.isfinite(attention_s).all() or (np.diff(attention_s) < 0).any():
            raise ConfigError("the attention times must begin at 0 and never fall")
        hidden_s, longest_share = steady_state.hidden_s, steady_state.longest_share
        if not 0 <= hidden_s < math.inf:
            raise ConfigError(f"hidden_s must be a number of seconds of at least 0, got {hidden_s}")
        if not 0 <= longest_share <= 1:
            raise ConfigError(f"longest_share must be between 0 and 1, got {longest_share}")
        self.limits = limits
        self.plans_ahead = plans_ahead
        self.hidden_s = hidden_s
        self.longest_share = longest_share
        slope = np.diff(decode_s, axis=1) / np.diff(contexts)
        base = decode_s[:, :-1] - slope * contexts[:-1]
        # Row 0 keeps the number of sequences and the row's index the same.
        self._slope: list[list[float]] = [[], *slope.tolist()]
        self._base: list[list[float]] = [[], *base.tolist()]
        self._least: list[float] = [0.0, *decode_s[:, 0].tolist()]
        self._knots: list[float] = contexts[1:-1].tolist()  # the last segment goes on beyond its end
        self.tokens_s = array("d", tokens_s)
        self.attention_s = array("d", attention_s)

    def with_kv_tokens(self, kv_tokens: int) -> StepModel:
        """Return the same times for a worker with another KV cache."""
        found = copy(self)
        found.limits = replace(self.limits, kv_tokens=kv_tokens)
        return found

    def with_longer_steps(self, added_s: Callable[[int], float]) -> StepModel:
        """Return the same times, but for steps that decode: each is longer by a time that its sequences tell."""
        found = copy(self)
        more = [0.0, *(added_s(n) for n in range(1, self.limits.max_batch + 1))]
        found._base = [[base + by for base in row] for row, by in zip(self._base, more, strict=True)]
        found._least = [least + by for least, by in zip(self._least, more, strict=True)]
        return found

    def context(self, mean: float, longest: float) -> float:
        """Return the context of equal ones that take as long in a step as those with this mean and longest."""
        return mean + self.longest_share * (longest - mean)

    def decode_s(self, sequences: int, mean_context: float) -> float:
        """Return the time of one step of ``sequences`` that each attend to ``mean_context`` tokens, the new one
        included (:meth:`context`).
        """
        segment = bisect_right(self._knots, mean_context)
        return self._base[sequences][segment] + self._slope[sequences][segment] * mean_context

    def mixed_s(
        self, tokens: int, attention_s: float, sequences: int, mean_context: float, *, prepared: bool = False
    ) -> float:
        """Return the time of one step of prompts and of ``sequences`` that decode.

        Args:
            tokens: of the prompts.
            attention_s: of the prompts' tokens to themselves.
            prepared: while another step ran.
        """
        hidden_s, least = self.hidden_s if prepared else 0.0, self._least
        whole_s = self.tokens_s[tokens] + attention_s
        prompts_s = max(whole_s - hidden_s, min(whole_s, least[1]))  # the weights are read for any step
        if not sequences:
            return prompts_s
        alone_s = self.decode_s(sequences, mean_context)
        both_s = self.tokens_s[tokens + sequences] + attention_s - hidden_s + alone_s - least[sequences]
        return max(alone_s, prompts_s, min(both_s, prompts_s + alone_s))

    def run_s(self, sequences: int, mean_context: float, steps: int) -> float:
        """Return the time of ``steps`` decode steps, the first at ``mean_context``, each later one at one token
        more.
        """
        knots, slopes, bases = self._knots, self._slope[sequences], self._base[sequences]
        segment = bisect_right(knots, mean_context)
        total_s = 0.0
        while segment < len(knots):
            here = math.ceil(knots[segment] - mean_context)  # steps before the knot
            if here >= steps:
                break
            total_s += here * (bases[segment] + slopes[segment] * (mean_context + (here - 1) / 2))
            mean_context += here
            steps -= here
            segment = bisect_right(knots, mean_context, segment)
        return total_s + steps * (bases[segment] + slopes[segment] * (mean_context + (steps - 1) / 2))

    def steps_until(self, sequences: int, mean_context: float, elapsed_s: float) -> int:
        """Return how many steps of such a run have begun within ``elapsed_s``: the fewest that take it, at least
        1.
        """
        return self.step_at(sequences, mean_context, elapsed_s)[0]

    def step_at(self, sequences: int, mean_context: float, elapsed_s: float) -> tuple[int, float]:
        """Return :meth:`steps_until`, and :meth:`run_s` of so many."""
        knots, slopes, bases = self._knots, self._slope[sequences], self._base[sequences]
        segment, before, before_s = bisect_right(knots, mean_context), 0, 0.0
        while segment < len(knots):
            here = math.ceil(knots[segment] - mean_context)
            here_s = here * (bases[segment] + slopes[segment] * (mean_context + (here - 1) / 2))
            if here_s >= elapsed_s:
                break
            elapsed_s -= here_s
            before += here
            before_s += here_s
            mean_context += here
            segment = bisect_right(knots, mean_context, segment)
        slope, base = slopes[segment], bases[segment]
        first_s = base + slope * mean_context
        # Smallest j with j * first + slope * j (j - 1) / 2 >= elapsed: the root, then one step of doubt each way.
        half = first_s - slope / 2
        j = max(1, math.ceil(2 * elapsed_s / (half + math.sqrt(max(half * half + 2 * slope * elapsed_s, 0.0)))))
        while j > 1 and (j - 1) * (first_s + slope * (j - 2) / 2) >= elapsed_s:
            j -= 1
        while j * (first_s + slope * (j - 1) / 2) < elapsed_s:
            j += 1
        return before + j, before_s + j * (base + slope * (mean_context + (j - 1) / 2))

    def prompt_s(self, tokens: int) -> float:
        """Return the TTFT of one prompt alone, in chunks of the largest step."""
        step = self.limits.max_batched_tokens
        whole, rest = divmod(tokens, step)
        chunks_s = whole * self.tokens_s[step] + (self.tokens_s[rest] if rest else 0.0)
        behind = max(0, whole + (rest > 0) - 1)  # another chunk: the host prepares them while that runs
        return chunks_s - self.hidden_s * behind + self.attention_s[tokens]


def plans_ahead(config: DeploymentConfig) -> bool:
    """Return whether the engine of ``config`` settles the content of a step when the one before begins."""
    return config.pp == 1 and traits_of(config.engine).schedules_ahead


def tabulate(estimator: Estimator, config: DeploymentConfig, limits: Limits) -> StepModel:
    """Tabulate ``config`` from some two hundred answers of ``estimator``.

    Raises:
        ConfigError: an answer that is not a positive, finite time.
        NotMeasuredError: the estimator does not reach a point.
    """

    def ttft_s(batch: int, tokens: int) -> float:
        return estimator.estimate(config, Workload(batch, tokens, 1)).ttft_s.value

    def reached(batch: int, tokens: int) -> bool:
        return estimator.estimate(config, Workload(batch, tokens, 1)).ttft_s.source is not Source.SCALED

    def tpot_s(batch: int, context: int) -> float:
        # TPOT is that of the mean context, input + output / 2. Of an answer of two tokens it is the one step after
        # the prompts, which a measured estimator may tell apart: steps in a row are what is asked for.
        half = min(_HALF_ANSWER, context // 2)
        return estimator.estimate(config, Workload(batch, context - half, 2 * half)).tpot_s.value

    sequences = np.arange(1, limits.max_batch + 1)
    rows = sequences
    if limits.pads_steps and config.pp == 1 and not config.draft_tokens:
        traits, largest = traits_of(config.engine), largest_graph(config.engine, is_mixture=True)
        rows = np.array([traits.rows_of_graph(int(n), largest=largest) for n in sequences])
    batches = _doubled(int(rows[-1]))
    contexts = _doubled(max(limits.max_context_tokens, 3))
    # No estimator is asked for an empty prompt: the first knot has the second's time.
    known = np.array([[tpot_s(n, max(m, 2)) for m in contexts] for n in batches])
    every_n = np.arange(1, rows[-1] + 1)
    all_s = np.stack([np.interp(every_n, batches, column) for column in known.T], axis=1)[rows - 1]
    decode_s = all_s[:, :1] + (all_s - all_s[:, :1]) * (sequences / rows)[:, None]  # what pads a step reads no KV
    tokens_s = _tokens_table(ttft_s, reached, limits)
    ahead = plans_ahead(config)
    told = estimator.steady_state(config) if ahead and isinstance(estimator, TellsSteadyState) else _NOTHING_TOLD
    return StepModel(
        limits,
        contexts=np.array(contexts, np.float64),
        decode_s=decode_s,
        tokens_s=tokens_s,
        attention_s=_attention_table(ttft_s, limits, tokens_s, told.hidden_s),
        plans_ahead=ahead,
        steady_state=told,
    )


def _tokens_table(ttft_s: _Ttft, reached: _Reached, limits: Limits) -> Table:
    """Return the times of tokens as prompts, as many as run at once. Fewer tokens never take more."""
    knots: list[float] = []
    times: list[float] = []
    for wanted in _lengths(limits.max_batched_tokens):
        splits = _splits(wanted, limits, reached)
        held = splits[0][0] * splits[0][1]
        if not knots or held > knots[-1]:
            knots.append(held)
            times.append(min(ttft_s(*split) for split in splits))
    if knots[-1] < limits.max_batched_tokens:  # not a multiple: the last slope goes on
        slope = (times[-1] - times[-2]) / (knots[-1] - knots[-2]) if len(knots) > 1 else 0.0
        times.append(times[-1] + slope * (limits.max_batched_tokens - knots[-1]))
        knots.append(limits.max_batched_tokens)
    return np.asarray(np.interp(np.arange(limits.max_batched_tokens + 1), knots, _never_falling(times)))


def _splits(tokens: int, limits: Limits, reached: _Reached) -> list[tuple[int, int]]:
    """Return splits of ``tokens`` into (prompts, tokens of each): the shortest that were measured, and one prompt.

    The TTFTs of these splits are no less than what the tokens take without attention. Below what was measured an
    estimator guesses. A guess that is too low would count as attention of longer prompts, and be paid anew by each
    prompt of a step; one too high would have them take longer than alone.
    """
    lengths = [_SHORT_PROMPT * 2**i for i in range((tokens // _SHORT_PROMPT).bit_length())]
    shorter = [(prompts, tokens // prompts) for prompts in (min(limits.max_batch, tokens // n) for n in lengths)]
    measured = next((split for split in shorter if reached(*split)), None)
    several = measured or (shorter[0] if tokens > limits.max_context_tokens and shorter else (1, tokens))
    held = several[0] * several[1]
    return [several, (1, held)] if held <= limits.max_context_tokens else [several]


def _attention_table(ttft_s: _Ttft, limits: Limits, tokens_s: Table, hidden_s: float) -> Table:
    """Return what a lone prompt's TTFT has beyond its chunks, of which all but the first follow another step."""
    length = np.arange(limits.max_context_tokens + 1)
    whole, rest = np.divmod(length, limits.max_batched_tokens)
    behind = np.maximum(0, whole + (rest > 0) - 1)
    chunks_s = whole * tokens_s[-1] + np.where(rest > 0, tokens_s[rest], 0.0) - hidden_s * behind
    knots = _lengths(limits.max_context_tokens)
    alone_s = _never_falling([ttft_s(1, x) for x in knots])
    beyond_s = np.maximum.accumulate([max(0.0, s - chunks_s[x]) for x, s in zip(knots, alone_s, strict=True)])
    return np.asarray(np.interp(length, [0, *knots], [0.0, *beyond_s]))


def _never_falling(times: Sequence[float] | Table) -> Table:
    """Return the longest that are none longer: where an estimator's fall, it guesses at the fewest tokens."""
    return np.asarray(np.minimum.accumulate(np.asarray(times)[::-1])[::-1])


def _doubled(largest: int) -> list[int]:
    powers = [2**i for i in range(largest.bit_length())]
    return sorted({*powers, largest})


def _lengths(largest: int) -> list[int]:
    """Return knots from 1 to ``largest``: powers of two at first, then closer together."""
    knots = {largest, *(x for x in _doubled(_DENSE_FROM) if x < largest)}
    knot = float(_DENSE_FROM)
    while (knot := knot * _DENSE_RATIO) < largest:
        knots.add(round(knot))
    return sorted(knots)
