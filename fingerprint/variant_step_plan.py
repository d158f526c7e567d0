"""Plan of a measurement of variants by steps of repeated fingerprints: starts of engines, and bursts of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fingerprint.config import Workload
from fingerprint.depth_tied_cuts import tied_depths, why_no_cuts
from fingerprint.engines import GRAPH_TOKENS
from fingerprint.errors import ConfigError, UnmeasurableError
from fingerprint.model_spec import ModelSpec
from fingerprint.profile_points import Shape
from fingerprint.variant_measurements import LONG_TOKENS, VariantKind

__all__ = ["BUDGET_S", "StepPlan", "StepVisit", "are_enough", "step_plan"]

BUDGET_S = 30.0
_MOST_TOKENS = 2048  # of a prompt of bursts of several requests
_ALONE_TOKENS = 64  # of the prompt next to whose decode steps a row is measured
# Of prompts alone: the largest step with a graph and one beyond it, then those that take their device's time.
_LENGTHS = (GRAPH_TOKENS, 640, LONG_TOKENS, 4096, 8192)
_APART = 1.9  # from the longest, at least: of a closer one the host may be slower still, and a line their noise
_TOGETHER_TOKENS = 1024  # of the prompts of a burst of several: of as many tokens, no part of a row would be known
_FEW = 4  # requests whose prompts are compared: more arrive in steps that no other burst repeats
_LONGEST_OUTPUT = 33  # a GPU's clock needs half of them to recover from the prompts
_ACTIVE = {False: (1, 4, 8), True: (1, 4)}  # distinct adapters, or deltas
_ADAPTER_SLOTS = (32, 8)  # of the deeper fingerprint and the shallower one: kernels start programs for each slot


@dataclass(frozen=True, slots=True)
class StepVisit:
    """Start of an engine on a fingerprint."""

    layers: tuple[int, ...]
    repeat: int
    slots: int

    def __str__(self) -> str:
        return f"{len(self.layers)} x {self.repeat} layers, {self.slots} slots"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """Bursts of a measurement, and its time budget."""

    kind: VariantKind
    alone: Shape
    few: Shape  # for their prompts
    together: Shape  # for their decode steps
    prompts: tuple[Shape, ...]  # of one request, the shortest first
    active: tuple[int, ...]  # distinct variants of a burst of several requests
    slots: tuple[int, int]  # of the deeper fingerprint, and of the shallower one
    budget_s: float

    def __post_init__(self) -> None:
        most = max(self.active, default=0)
        if not 1 <= most <= min(self.together.batch, *self.slots):
            raise ConfigError(
                f"bursts of {self.together.batch} on {min(self.slots)} slots ask for as many variants at most, "
                f"got {most}"
            )

    @property
    def bursts(self) -> tuple[tuple[Shape, int], ...]:
        """Shapes of the bursts, each with the distinct variants that it asks for; those of the base first."""
        of_few = tuple((self.few, active) for active in sorted({1, self.few.batch}))
        of_together = tuple((self.together, active) for active in self.active)
        of_prompts = tuple((shape, 1) for shape in self.prompts)
        return (*self.base_bursts, (self.alone, 1), *of_few, *of_together, *of_prompts)

    @property
    def base_bursts(self) -> tuple[tuple[Shape, int], ...]:
        return tuple((shape, 0) for shape in (self.alone, self.few, self.together, *self.prompts))

    @property
    def max_context_tokens(self) -> int:
        return max(shape.input_tokens + shape.output_tokens for shape, _ in self.base_bursts)

    @property
    def kv_tokens(self) -> int:
        """Room that the largest burst takes: a batch of the longest context is never asked for."""
        return max(shape.batch * (shape.input_tokens + shape.output_tokens) for shape, _ in self.base_bursts)

    def visits(self, spec: ModelSpec) -> tuple[StepVisit, ...]:
        """Return the engine starts, the one without slots first.

        Raises:
            UnmeasurableError: the model has no fingerprints whose forward can be repeated to its depth.
        """
        depths = tied_depths(spec, 1)
        if not depths:
            raise UnmeasurableError(
                f"no fingerprint can be repeated to the model's depth: {why_no_cuts(spec, 1)}; --engine torch "
                "measures fingerprints as they are"
            )
        slots = (0, *self.slots)
        visits = [(depths[0], slots[0]), *zip(depths, slots[1:], strict=False)]
        return tuple(StepVisit(tuple(range(k)), max(1, spec.num_layers // k), count) for k, count in visits)


def step_plan(
    spec: ModelSpec,
    workload: Workload,
    kind: VariantKind,
    *,
    budget_s: float = BUDGET_S,
    step_tokens: int = _LENGTHS[-1],
) -> StepPlan:
    """Return the plan for ``workload``: prompts of one request, and its batch (4 where that is 1) of short ones.

    Args:
        step_tokens: that one step of the engine takes at most; a longer prompt would be several steps.

    Raises:
        ConfigError: a context too short to generate in.
    """
    if spec.max_context_tokens < 6:
        raise ConfigError(f"a context of {spec.max_context_tokens} tokens is too short to profile; it needs 6")
    batch = min(_TOGETHER_TOKENS, workload.batch) if workload.batch > 1 else 4
    output = min(_LONGEST_OUTPUT, spec.max_context_tokens // 2)
    longest = min(workload.input_tokens, spec.max_context_tokens - output, _MOST_TOKENS)
    active, few = tuple(sorted({min(count, batch) for count in _ACTIVE[kind.is_delta]})), min(_FEW, batch)
    most = min(spec.max_context_tokens - 1, workload.batch * workload.input_tokens, step_tokens)
    return StepPlan(
        kind=kind,
        alone=Shape(1, min(longest, _ALONE_TOKENS), output),
        few=Shape(few, max(1, min(longest, _TOGETHER_TOKENS // few)), 1),
        together=Shape(batch, max(1, min(longest, _TOGETHER_TOKENS // batch)), output),
        prompts=tuple(Shape(1, tokens, 1) for tokens in _lengths(most)),
        active=active,
        slots=(max(active), max(active)) if kind.is_delta else _ADAPTER_SLOTS,
        budget_s=budget_s,
    )


def _lengths(most: int) -> tuple[int, ...]:
    """Return the lengths of prompts up to ``most``; none where fewer than two are long."""
    longest = min(most, _LENGTHS[-1])
    found = (*(tokens for tokens in _LENGTHS if tokens * _APART <= longest), longest)
    return found if are_enough(found) else ()


def are_enough(lengths: Sequence[int]) -> bool:
    """Return whether prompts of these lengths are measured: two long ones at least."""
    return sum(tokens >= LONG_TOKENS for tokens in lengths) > 1
