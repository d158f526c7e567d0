"""AlpaServe's simulator-guided greedy model selection: which models, how often, on given groups of GPUs.

Algorithm 1 of arXiv 2302.11665 (a beam; with width 1 the greedy that the paper uses): add the replica with which
the simulated SLO attainment is highest until no more fits, and keep the best selection on the way. And its fast
heuristic: one simulation per step; the model with the most requests that missed their SLO goes to the least busy
group with room for it. Equal attainment is decided by more requests answered, then by less latency.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from fingerprint.config import DeploymentConfig
from placement.types import ClusterSnapshot, GpuState, Placement
from traces.baselines.grouping import Group
from traces.baselines.model_info import Knowledge, Places, sixteen_bit, without

__all__ = ["Judge", "Placed", "Score", "Selected", "Selector", "Verdict"]

Device: TypeAlias = tuple[str, str]  # node, device


class Score(NamedTuple):
    """More is better, the first number that differs decides. Scores of models that share no GPU add up."""

    met: int  # requests that kept their SLO
    answered: int
    minus_latency_s: float  # of all that were answered, together, negative

    def plus(self, other: Score) -> Score:
        return Score(
            self.met + other.met, self.answered + other.answered, self.minus_latency_s + other.minus_latency_s
        )


class Verdict(NamedTuple):
    """Result of simulating a selection."""

    score: Score
    missed: Mapping[str, int]  # of each model's requests: too late or not served
    busy: Mapping[Device, float]  # fraction of the time, of each GPU in use


class Placed(NamedTuple):
    """Replica with its configuration and its place."""

    model: str
    config: DeploymentConfig
    placement: Placement


Judge = Callable[[Sequence[str], Sequence[Placed]], Verdict]  # (models that are asked for, replicas)


@dataclass(frozen=True, slots=True)
class Selected:
    """Replicas on groups. ``states``: the groups' GPUs with the memory that is left."""

    groups: tuple[Group, ...]
    states: tuple[tuple[GpuState, ...], ...]
    members: tuple[tuple[str, ...], ...]  # models of each group, sorted
    replicas: tuple[Placed, ...]

    @property
    def key(self) -> tuple[object, ...]:
        """Equal where groups were only exchanged."""
        of = zip(self.groups, self.members, strict=True)
        return tuple(sorted((g.tp, g.pp, len(g.gpus), members) for g, members in of if members))

    @property
    def models(self) -> frozenset[str]:
        return frozenset(model for members in self.members for model in members)


class Selector:
    """Search of Algorithm 1, or its fast form.

    Args:
        batch_of: what a replica of each model is launched for.
        keep_all: no model may be left out: models without a replica go first, only where the rest still fit.
    """

    def __init__(
        self,
        models: Mapping[str, Knowledge],
        batch_of: Mapping[str, int],
        places: Places,
        judge: Judge,
        *,
        keep_all: bool = False,
    ) -> None:
        self._models, self._batch_of, self._places, self._judge = models, batch_of, places, judge
        self._keep_all = keep_all
        self._configs = {name: sixteen_bit(model.configs) for name, model in models.items()}
        self._fits: dict[tuple[str, int, int, tuple[GpuState, ...]], Placed | None] = {}
        self._verdicts: dict[tuple[object, ...], Verdict] = {}

    @property
    def simulations(self) -> int:
        """So far, equal selections counted once."""
        return len(self._verdicts)

    def __call__(
        self, models: Sequence[str], groups: tuple[Group, ...], *, beam: int = 0
    ) -> tuple[Score, Selected] | None:
        """Return the best selection on the way; None: not all models could be placed, where they must be.

        Args:
            beam: the width of Algorithm 1; 0: the fast heuristic.
        """
        empty = Selected(groups, tuple(g.gpus for g in groups), tuple(() for _ in groups), ())
        steps = self._by_beam(models, empty, beam) if beam else self._fast(models, empty)
        best: tuple[Score, Selected] | None = None
        for score, selected in steps:
            if self._keep_all and len(selected.models) < len(models):
                continue
            if best is None or score > best[0]:
                best = score, selected
        return best

    def _fast(self, models: Sequence[str], selected: Selected) -> Iterator[tuple[Score, Selected]]:
        following: Selected | None = selected
        while following is not None:
            selected = following
            verdict = self._verdict(models, selected)
            yield verdict.score, selected
            following = self._next(models, selected, verdict)

    def _next(self, models: Sequence[str], selected: Selected, verdict: Verdict) -> Selected | None:
        """Return the selection with the most missed model added to the least busy group that has room for it."""

        def busy(index: int) -> tuple[float, int]:
            devices = [(gpu.node_id, gpu.device_id) for gpu in selected.groups[index].gpus]
            return sum(verdict.busy.get(device, 0.0) for device in devices) / len(devices), index

        wanted = sorted(self._wanted(models, selected), key=lambda model: (-verdict.missed[model], model))
        for index in sorted(range(len(selected.groups)), key=busy):
            for model in wanted:
                child = self._with(models, selected, model, index)
                if child is not None:
                    return child
        return None

    def _by_beam(self, models: Sequence[str], selected: Selected, width: int) -> Iterator[tuple[Score, Selected]]:
        beam = [selected]
        while beam:
            for one in beam:
                yield self._verdict(models, one).score, one
            children: dict[tuple[object, ...], Selected] = {}
            for one in beam:
                for model in self._wanted(models, one):
                    for index in range(len(one.groups)):
                        child = self._with(models, one, model, index)
                        if child is not None:
                            children.setdefault(child.key, child)
            scored = [(self._verdict(models, child).score, child) for child in children.values()]
            scored.sort(key=lambda pair: pair[0], reverse=True)
            beam = [child for _, child in scored[:width]]

    def _wanted(self, models: Sequence[str], selected: Selected) -> list[str]:
        missing = [model for model in models if model not in selected.models] if self._keep_all else []
        return missing or list(models)

    def _with(self, models: Sequence[str], selected: Selected, model: str, index: int) -> Selected | None:
        """Return the selection with one more replica; None: it exists, has no room, or leaves none for a required
        model.
        """
        child = self._add(selected, model, index)
        if child is None or not self._keep_all:
            return child
        rest = [m for m in models if m not in child.models]
        return child if self._go_in(rest, child) else None

    def _add(self, selected: Selected, model: str, index: int) -> Selected | None:
        if model in selected.members[index]:
            return None
        group, state = selected.groups[index], selected.states[index]
        placed = self._fit(model, group, state)
        if placed is None:
            return None
        left = without(ClusterSnapshot(state), placed.placement).gpus
        return Selected(
            selected.groups,
            (*selected.states[:index], left, *selected.states[index + 1 :]),
            (
                *selected.members[:index],
                tuple(sorted((*selected.members[index], model))),
                *selected.members[index + 1 :],
            ),
            (*selected.replicas, placed),
        )

    def _go_in(self, rest: Sequence[str], selected: Selected) -> bool:
        """Return whether all of ``rest`` fit, the largest first, each on the group with most room."""
        for model in sorted(rest, key=lambda name: (-self._models[name].spec.num_params, name)):
            roomiest = sorted(
                range(len(selected.groups)), key=lambda i: -min(gpu.free_bytes for gpu in selected.states[i])
            )
            following = next(
                (child for i in roomiest if (child := self._add(selected, model, i)) is not None), None
            )
            if following is None:
                return False
            selected = following
        return True

    def _fit(self, model: str, group: Group, state: tuple[GpuState, ...]) -> Placed | None:
        key = (model, group.tp, group.pp, state)
        if key not in self._fits:
            config = self._config(model, group)
            found = (
                None
                if config is None
                else self._places.find(self._models[model], config, self._batch_of[model], ClusterSnapshot(state))
            )
            self._fits[key] = Placed(model, config, found) if config and isinstance(found, Placement) else None
        return self._fits[key]

    def _config(self, model: str, group: Group) -> DeploymentConfig | None:
        """Return the group's degrees; for a model that cannot be cut so, the most TP below the group's."""
        over_all = [c for c in self._configs[model] if c.num_gpus == len(group.gpus) and c.tp <= group.tp]
        return max(over_all, key=lambda c: c.tp, default=None)

    def _verdict(self, models: Sequence[str], selected: Selected) -> Verdict:
        key = (tuple(models), selected.key)
        if key not in self._verdicts:
            self._verdicts[key] = self._judge(models, selected.replicas)
        return self._verdicts[key]
