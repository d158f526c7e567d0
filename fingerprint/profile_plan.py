"""Plan of what a profile measures: decided from the model and the workload alone, before anything runs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from fingerprint.config import KvFormat, WeightFormat, Workload
from fingerprint.errors import ConfigError

if TYPE_CHECKING:
    from fingerprint.model_spec import ModelSpec  # which the command line, asking for ``Shards``, does without

__all__ = ["EngineSizes", "ProfilePlan", "Shards", "default_plan", "fingerprint_cuts", "fingerprint_layers"]

# Prompt tokens that take about as long as a decode step. On a CPU 30 to 90 (the demo model, batch 1 to 8); on a
# GPU some hundred, where this makes more steps than it takes, which cost little.
_TOKENS_PER_STEP = 64
_LONGEST_OUTPUT = 49  # three times the steps of small bursts: more would leave a short budget fewer runs of those
_MOST_BURST_TOKENS = 16_384  # prompt tokens of a batch


class Shards(StrEnum):
    """Choice of degrees that a profile takes as one rank of a tensor-parallel group, alone on one GPU."""

    NEVER = "never"
    AUTO = "auto"  # those whose GPUs are there and not free
    ALWAYS = "always"  # and those that need more GPUs than there are


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSizes:
    """Sizes that an engine is started with for each load, which its memory follows from."""

    max_batch: int
    max_context_tokens: int
    max_batched_tokens: int  # of the largest step
    kv_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfilePlan:
    """Measurements of a profile, and their time budget."""

    degrees: tuple[tuple[int, int], ...] = ((1, 1), (2, 1), (1, 2))  # (tp, pp)
    weights: tuple[WeightFormat, ...] = (WeightFormat.BITS16,)
    kv: tuple[KvFormat, ...] = (KvFormat.BITS16,)
    batches: tuple[int, ...] = (1, 4)
    input_tokens: tuple[int, ...] = (128, 512)
    split_input_tokens: tuple[int, ...] = ()  # of those, what tp * pp > 1 is run at; empty: all
    output_tokens: tuple[int, int] = (1, 17)
    longest_output_tokens: int = 0  # of bursts with many prompt tokens: see ``outputs_of``; 0: all alike
    budget_s: float = 60.0  # launches included, but for an engine that starts anew with each load
    min_repeats: int = 5  # fewer leave nothing to trim
    max_repeats: int = 100
    target_relative_interval: float = 0.05  # half of the 90% interval of a point's run time, over that time
    sizes: EngineSizes | None = None  # of an engine that starts anew with each load; None: loading takes a moment
    whole: bool = False  # the model itself instead of its fingerprints: what M1 and L1 are made of

    def __post_init__(self) -> None:
        for name in ("degrees", "weights", "kv", "batches", "input_tokens"):
            values = getattr(self, name)
            if not values or len(set(values)) != len(values):
                raise ConfigError(f"a profile needs distinct {name}, at least one; got {values}")
        if any(tp < 1 or pp < 1 for tp, pp in self.degrees):
            raise ConfigError(f"tp and pp must be at least 1, got {self.degrees}")
        if min(self.batches) < 1 or min(self.input_tokens) < 1:
            raise ConfigError(f"batches {self.batches} and input_tokens {self.input_tokens} must be at least 1")
        if not set(self.split_input_tokens) <= set(self.input_tokens):
            raise ConfigError(
                f"split_input_tokens {self.split_input_tokens} must be among input_tokens {self.input_tokens}"
            )
        if not 1 <= self.output_tokens[0] < self.output_tokens[1]:
            raise ConfigError(f"a profile needs two output lengths, the shorter first; got {self.output_tokens}")
        if not 1 <= self.min_repeats <= self.max_repeats:
            raise ConfigError(f"need 1 <= min_repeats <= max_repeats, got {self.min_repeats}, {self.max_repeats}")
        if not (0 < self.budget_s < math.inf and 0 < self.target_relative_interval < math.inf):
            raise ConfigError(
                f"budget_s={self.budget_s} and target_relative_interval={self.target_relative_interval} "
                "must be positive and finite"
            )

    @property
    def uncharged(self) -> frozenset[str]:
        """Kinds of actions that take nothing of the budget: a start takes longer than all that follows it."""
        return frozenset() if self.sizes is None else frozenset({"launch", "load", "close"})

    def cuts(self, spec: ModelSpec, pp: int) -> tuple[tuple[int, ...], ...]:
        """Layers of the model in each checkpoint that is run at ``pp``; none where it has fewer than stages."""
        if not self.whole:
            return fingerprint_cuts(spec, pp)
        return (tuple(range(spec.num_layers)),) if spec.num_layers >= pp else ()

    def repeats_per_visit(self, load_s: float, once_s: float) -> int:
        """Return how often the points of a fingerprint are run before another one is loaded.

        A visit should not be shorter than its load, and the minimum of runs takes two visits at least; an engine
        that starts anew with each load is visited once.
        """
        if self.sizes is not None:
            return self.max_repeats
        most = math.ceil(self.min_repeats / 2)
        return max(1, min(most, math.ceil(load_s / once_s) if once_s > 0 else most))

    def outputs_of(self, batch: int, input_tokens: int) -> tuple[int, int]:
        """The two output lengths of a burst.

        A run's noise is a part of all of it, so decode steps drown where the prompts take most of the time: steps
        of time d after prompts of time P, each run off by a part s of itself, give d with an error of
        ``s * hypot(P, P + steps * d) / steps``. It falls until the steps take about as long as the prompts.
        """
        short, long = self.output_tokens
        return short, max(long, min(self.longest_output_tokens, 1 + batch * input_tokens // _TOKENS_PER_STEP))


def default_plan(
    spec: ModelSpec,
    workload: Workload,
    *,
    weights: tuple[WeightFormat, ...] = (WeightFormat.BITS16,),
    kv: tuple[KvFormat, ...] = (KvFormat.BITS16,),
    degrees: tuple[tuple[int, int], ...] = ((1, 1), (2, 1), (1, 2)),
    budget_s: float = 60.0,
) -> ProfilePlan:
    """Points around ``workload``: batches 1 and its own (4 when its own is 1), its input length and a quarter.

    Input lengths are bounded by the model's context, batches by 16,384 prompt tokens at once (a
    workload beyond that is reached by extrapolation or scaling, with the interval that goes with it).

    Raises:
        ConfigError: a context too short to generate in (fewer than 3 tokens).
    """
    if spec.max_context_tokens < 3:
        raise ConfigError(f"a context of {spec.max_context_tokens} tokens is too short to profile; it needs 3")
    most_output = max(2, min(_LONGEST_OUTPUT, workload.output_tokens, spec.max_context_tokens // 2))
    long_output = min(17, most_output)
    longest = min(workload.input_tokens, spec.max_context_tokens - most_output, _MOST_BURST_TOKENS)
    batch = workload.batch if workload.batch > 1 else 4
    batch = max(1, min(batch, _MOST_BURST_TOKENS // longest))
    return ProfilePlan(
        degrees=degrees,
        weights=weights,
        kv=kv,
        batches=tuple(sorted({1, batch})),
        input_tokens=tuple(sorted({max(1, longest // 4), longest})),
        split_input_tokens=(longest,),  # the time of a split model is wanted at the workload's own length
        output_tokens=(1, long_output),
        longest_output_tokens=most_output,
        budget_s=budget_s,
        min_repeats=3,  # the least that shows a spread; the budget buys more where that is wide
    )


def fingerprint_layers(num_layers: int, pp: int) -> tuple[int, ...]:
    """Layer counts profiled at ``pp``: one and two layers on every stage, as far as the model has them."""
    return tuple(k for k in (pp, 2 * pp) if k <= num_layers)


def fingerprint_cuts(spec: ModelSpec, pp: int) -> tuple[tuple[int, ...], ...]:
    """Layers of the model in each fingerprint at ``pp``: ``pp`` of the commonest kind, alone and with ``pp`` more
    of each kind in turn, as far as the model has them. Of layers all alike they are ``fingerprint_layers``.

    With K kinds these K + 1 tell one layer of each kind, and what is outside the layers: which stage holds which
    of them does not matter, since a burst passes all stages one after the other.
    """
    indexes = spec.kind_indexes
    places = sorted(
        ([layer for layer, index in enumerate(indexes) if index == kind] for kind in range(len(spec.kinds))),
        key=lambda layers: -len(layers),
    )
    if len(places[0]) < pp:
        return ()
    base = places[0][:pp]
    deeper = [places[0][: 2 * pp], *(sorted(base + others[:pp]) for others in places[1:])]
    return (tuple(base), *(tuple(cut) for cut in deeper if len(cut) == 2 * pp))
