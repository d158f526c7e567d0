"""The second best of a plan, and what would make it the first: another batch, or another intent. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import takewhile

from fingerprint.config import DeploymentConfig
from fingerprint.errors import NotMeasuredError
from planner.costs import OBJECTIVES, Objective, objective_of
from planner.intent import LIMITED, Intent, IntentKind
from planner.plan import Plan, Ranked

__all__ = ["MOST_BATCH", "BatchRange", "IntentLead", "RunnerUpDocument", "Winner", "runner_up"]

MOST_BATCH = 256
_BATCHES = tuple(1 << exponent for exponent in range(MOST_BATCH.bit_length()))
_LEAST_LEAD = 0.01  # relative; less is no reason to change an intent
_OTHER_INTENTS = tuple(kind for kind in OBJECTIVES if kind not in LIMITED)

# Which of the given configurations is chosen at a batch and for an intent, all else equal; None: none would do.
# Raises NotMeasuredError: nothing is predicted there.
Winner = Callable[[tuple[DeploymentConfig, ...], int, IntentKind], Ranked | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchRange:
    """Batches, tried at powers of two, at which the runner-up would be chosen over the chosen configuration."""

    first: int
    """Smallest such batch."""
    last: int
    """Largest such batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IntentLead:
    """An intent under which the runner-up is ahead of the chosen configuration, and both values."""

    intent: str
    """Intent under which the runner-up wins."""
    unit: str
    """Unit of both values."""
    value: float
    """Value of the runner-up."""
    chosen_value: float
    """Value of the chosen configuration."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerUpDocument:
    """Second choice of a plan, and what would make it the first."""

    config: DeploymentConfig
    """Configuration of the runner-up."""
    objective: float | None
    """Value of what the intent optimises, in the plan's `objective_unit`; None: not known."""
    chosen_objective: float | None
    """Value of the chosen configuration."""
    wins_at_batch: BatchRange | None = None
    """Batches at which it would be chosen; None: none that was tried."""
    wins_by: tuple[IntentLead, ...] = ()
    """Other intents under which it would be chosen."""
    equivalent: tuple[DeploymentConfig, ...] = ()
    """Feasible configurations with the same figures as the chosen one."""
    is_measured: bool = False
    """Whether the runner-up was run."""
    is_ahead: bool = False
    """Whether it is better by its value, and was passed over because it was not measured."""
    is_distinguishable: bool = True
    """Whether the two intervals lie apart."""
    is_tried: bool = True
    """Whether other batches and intents were tried."""


def runner_up(plan: Plan, winner: Winner | None = None) -> RunnerUpDocument | None:
    """Return the best feasible configuration with other figures than the chosen one; None without one.

    Args:
        winner: None: other batches and intents are not tried.
    """
    best = plan.best
    if best is None:
        return None
    others = [ranked for ranked in plan.candidates if ranked.feasible and ranked is not best]
    passed_over = {one.config for one in plan.passed_over}
    overlapping = {plan.candidates[i].config for i in plan.indistinguishable}
    alike = tuple(takewhile(lambda other: _figures(other) == _figures(best), others))
    rival = next(iter(others[len(alike) :]), None)
    if rival is None:
        return None
    return RunnerUpDocument(
        config=rival.config,
        objective=rival.objective,
        chosen_objective=best.objective,
        wins_at_batch=None if winner is None else _batches(best, rival, plan.intent.kind, winner),
        wins_by=() if winner is None else tuple(_leads(best, rival, plan.intent, winner)),
        equivalent=tuple(ranked.config for ranked in alike),
        is_measured=rival.is_measured,
        is_ahead=rival.config in passed_over,
        is_distinguishable=rival.config not in overlapping,
        is_tried=winner is not None,
    )


def _figures(ranked: Ranked) -> tuple[object, ...]:
    estimate = ranked.estimate
    assert estimate is not None, "a feasible candidate has an estimate"
    return estimate.ttft_s, estimate.tpot_s, estimate.memory, ranked.config.num_gpus


def _batches(best: Ranked, rival: Ranked, kind: IntentKind, winner: Winner) -> BatchRange | None:
    """Return the range next to the planned batch, larger batches before smaller ones."""
    assert best.estimate is not None, "a feasible candidate has an estimate"
    planned = best.estimate.workload.batch
    larger = [batch for batch in _BATCHES if batch > planned]
    smaller = [batch for batch in reversed(_BATCHES) if batch < planned]
    for tried in (larger, smaller):
        won: list[int] = []
        for batch in tried:
            try:
                first = winner((best.config, rival.config), batch, kind)
            except NotMeasuredError:
                break
            if first is not None and first.config == rival.config:
                won.append(batch)
            elif won or first is None:
                break
        if won:
            return BatchRange(first=min(won), last=max(won))
    return None


def _leads(best: Ranked, rival: Ranked, intent: Intent, winner: Winner) -> list[IntentLead]:
    """Return intents under which ``rival`` is chosen by more than a hair, every limit of ``intent`` kept."""
    assert best.estimate is not None, "a feasible candidate has an estimate"
    planned, own, found = best.estimate.workload.batch, objective_of(intent), []
    for kind in _OTHER_INTENTS:
        objective = objective_of(replace(intent, kind=kind))
        if objective.of is own.of:
            continue
        first = winner((best.config, rival.config), planned, kind)
        alone = winner((best.config,), planned, kind)
        if first is None or first.config != rival.config or alone is None:
            continue
        value, chosen_value = first.objective, alone.objective
        if value is not None and chosen_value is not None and _is_ahead(value, chosen_value, objective):
            found.append(IntentLead(intent=str(kind), unit=objective.unit, value=value, chosen_value=chosen_value))
    return found


def _is_ahead(value: float, than: float, objective: Objective) -> bool:
    """Compare with a margin, below which an intent is not worth changing."""
    return value > (1 + _LEAST_LEAD) * than if objective.maximize else value < (1 - _LEAST_LEAD) * than
