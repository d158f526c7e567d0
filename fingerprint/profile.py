"""Driver of a profile of fingerprints as they are: what it takes an engine to run them, within a time budget.

The driver decides what to run, in which order and when to stop. How an engine is started and how a fingerprint is
cut are arguments. One launch per (tp, pp) serves all fingerprints and formats.

The order: every pass goes over all fingerprints and all points of a launch, forth and then back, so that a slow
drift of the machine falls on all of them alike. Every visit is a load of its own, even where the way turns: how
far loads differ is part of what is measured. The first run of every point, and the first after every load, is
never counted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from fingerprint.engines import largest_graph
from fingerprint.errors import ConfigError, IserveError
from fingerprint.measurements import MemoryPoint, Profile, RunReading, TimingPoint, Unreached
from fingerprint.model_spec import ModelSpec
from fingerprint.profile_budget import Action, Budget, OutOfTimeError
from fingerprint.profile_plan import EngineSizes, ProfilePlan, default_plan, fingerprint_layers
from fingerprint.profile_points import Shape, Visit
from fingerprint.profile_sessions import ProfileSession, ProfileTarget
from fingerprint.trimmed_mean import locate

__all__ = ["ProfilePlan", "ProfileProgress", "default_plan", "fingerprint_layers", "profile"]


@dataclass(frozen=True, slots=True)
class ProfileProgress:
    """Progress of a profile. ``total`` grows when points need more than their minimum of runs."""

    done: int  # runs, warm-ups included
    total: int  # runs foreseen
    elapsed_s: float
    budget_s: float
    running: str  # "tp=1 pp=2, 4 layers, int8: batch 4, 512 in, 17 out"


_FEWEST_RUNS = 2  # of a point, to have an interval at all; below the plan's minimum, when the budget is short


def profile(
    source_name: str,
    spec: ModelSpec,
    target: ProfileTarget[ProfileSession],
    fingerprints: Callable[[Sequence[int]], Path],
    plan: ProfilePlan,
    *,
    clock: Callable[[], float] = time.monotonic,
    progress: Callable[[ProfileProgress], None] = lambda _: None,
    launch_s: float = 0.0,
) -> Profile:
    """Measure the fingerprints of ``spec`` on ``target`` as ``plan`` says.

    tp = pp = 1 comes first: every estimate rests on it, so nothing is spent on another degree before all its
    points have ``min_repeats`` runs. Then the other degrees get theirs, as far as the budget goes; points whose
    interval is wider than asked get more until all are tight (``complete``) or the budget is spent. No launch is
    begun that is foreseen to end, with its first fingerprint, after the budget; one load or run may end after it.
    Sessions are closed whatever happens.

    Args:
        source_name: the model's name, recorded as it is.
        fingerprints: the checkpoint directory that holds these layers of the model.
        clock: seconds that only grow.
        progress: called before every load and run.
        launch_s: what a launch is known to take, where the target has launched its first worker already.

    Raises:
        IserveError: the first launch failed or broke off; a later one that fails is noted in the profile.
    """
    budget = Budget(clock, plan.budget_s, launch_s, plan.uncharged)
    with budget.note(Action("launch")):  # an engine that is a process may be launched to tell
        machine = target.machine()
    driver = _Driver(spec, target, fingerprints, plan, machine.num_devices, budget, progress)
    driver.run_all()
    return Profile(
        model=source_name,
        spec=spec,
        engine=target.engine,
        machine=machine,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        budget_s=plan.budget_s,
        spent_s=driver.budget.elapsed_s,
        complete=driver.complete,
        graph_tokens=largest_graph(target.engine, is_mixture=spec.is_mixture),
        memory=tuple(driver.memory),
        timing=driver.timing(),
        notes=tuple(driver.notes),
        unreached=driver.unreached(),
    )


class _Driver:
    """The state of one profile being taken."""

    def __init__(
        self,
        spec: ModelSpec,
        target: ProfileTarget[ProfileSession],
        fingerprints: Callable[[Sequence[int]], Path],
        plan: ProfilePlan,
        num_devices: int,
        budget: Budget,
        progress: Callable[[ProfileProgress], None],
    ) -> None:
        self.spec, self.target, self.fingerprints, self.plan = spec, target, fingerprints, plan
        self.budget, self._report = budget, progress
        self.notes: list[str] = []
        self.memory: list[MemoryPoint] = []
        self.runs: dict[tuple[Visit, Shape], list[RunReading]] = {}
        self.loads: dict[tuple[Visit, Shape], list[int]] = {}  # of each run, which load it was of
        self.num_loads = 0
        self.shapes = self._shapes()
        self.dropped: list[Shape] = []  # of them, what the budget could not hold
        self.failed: set[tuple[int, int]] = set()
        self.sessions = self._sessions(num_devices)
        self.done = 0
        self.total = sum(len(self._points(*degree)) for degree in self.sessions) * (plan.min_repeats + 1)

    def shapes_at(self, tp: int, pp: int) -> list[Shape]:
        """Points of one degree, cheap ones first; a split model runs at the plan's ``split_input_tokens`` only."""
        wanted = self.plan.split_input_tokens if tp * pp > 1 else ()
        chosen = [shape for shape in self.shapes if shape.input_tokens in wanted]
        return chosen or list(self.shapes)

    def _sizes(self) -> EngineSizes:
        """Return the sizes of the next load: as planned, else what all points need that are not dropped."""
        longest = max(s.input_tokens + s.output_tokens for s in self.shapes)
        return self.plan.sizes or EngineSizes(
            max_batch=max(s.batch for s in self.shapes),
            max_context_tokens=longest,
            max_batched_tokens=0,
            kv_tokens=0,
        )

    def _shapes(self) -> list[Shape]:
        plan, room = self.plan, self.spec.max_context_tokens
        bursts = [(b, n) for b in plan.batches for n in plan.input_tokens]
        shapes = [Shape(b, n, m) for b, n in bursts for m in plan.outputs_of(b, n)]
        fitting = sorted((s for s in shapes if s.input_tokens + s.output_tokens <= room), key=lambda s: s.cost)
        if not fitting:
            raise ConfigError(
                f"no point of the profile fits the model's context of {room} tokens: inputs {plan.input_tokens}, "
                f"outputs {plan.output_tokens}"
            )
        if len(fitting) < len(shapes):
            self.notes.append(
                f"{len(shapes) - len(fitting)} of {len(shapes)} points left out: longer than the model's context "
                f"of {room} tokens"
            )
        return fitting

    def _sessions(self, num_devices: int) -> dict[tuple[int, int], list[Visit]]:
        plan, num_layers = self.plan, self.spec.num_layers
        sessions: dict[tuple[int, int], list[Visit]] = {}
        for tp, pp in plan.degrees:
            cuts = plan.cuts(self.spec, pp)
            if tp * pp > num_devices:
                self.notes.append(f"tp={tp} pp={pp} left out: needs {tp * pp} devices, there are {num_devices}")
                continue
            if not cuts:
                self.notes.append(f"tp={tp} pp={pp} left out: the model has {num_layers} layers, {pp} are needed")
                continue
            if not plan.whole and len(cuts) < 1 + len(self.spec.kinds):
                self.notes.append(
                    f"tp={tp} pp={pp}: no fingerprint of {2 * pp} layers"
                    + (" for each kind of layers" if self.spec.several_kinds else "")
                    + f", the model has {num_layers}; the cost of a layer is not measured there"
                )
            sessions[tp, pp] = [Visit(cut, w, kv, tp, pp) for w in plan.weights for kv in plan.kv for cut in cuts]
        return dict(sorted(sessions.items(), key=lambda item: item[0] != (1, 1)))

    def run_all(self) -> None:
        degrees = list(self.sessions)
        for index, (tp, pp) in enumerate(degrees):
            try:
                if index:
                    self._check_launch(tp, pp, degrees[0])
                later = [self.sessions[degree] for degree in degrees[index + 1 :]]
                self._launch(tp, pp, later, first=not index)
                if self.plan.sizes:
                    self._note_missing(tp, pp, "")
            except OutOfTimeError as reason:
                self._note_missing(tp, pp, str(reason))
            except IserveError as error:
                if index == 0:
                    raise
                self.failed.add((tp, pp))
                self.notes.append(f"tp={tp} pp={pp} failed: {error}")

    def _check_launch(self, tp: int, pp: int, first: tuple[int, int]) -> None:
        """Raises OutOfTimeError: the first degree is not done, or this launch would measure nothing in time."""
        least = self.plan.min_repeats
        if self._fewest_runs(*first) < least:
            raise OutOfTimeError(
                f"tp={first[0]} pp={first[1]} comes first and has points with fewer than {least} runs"
            )
        visit, budget = self.sessions[tp, pp][0], self.budget
        shapes = self.shapes_at(tp, pp)
        actions = [Action("launch"), _load_action(visit), *(_run_action(visit, s) for s in shapes)]
        need_s = sum(budget.expected_s(action) for action in actions)
        if need_s > budget.left_s:
            raise OutOfTimeError(
                f"a launch with its first fingerprint takes about {need_s:.1f} s, {max(budget.left_s, 0.0):.1f} s "
                "are left when the worker before has ended"
            )

    def _note_missing(self, tp: int, pp: int, reason: str) -> None:
        least, counts = self.plan.min_repeats, self._run_counts(tp, pp)
        if reason:
            self.notes.append(f"tp={tp} pp={pp} left out, the budget was too short: {reason}")
        elif short := sum(count < least for count in counts):
            self.notes.append(
                f"tp={tp} pp={pp}: {short} of {len(counts)} points have fewer than {least} runs, the budget was "
                "too short"
            )

    def _fewest_runs(self, tp: int, pp: int) -> int:
        return min(self._run_counts(tp, pp))

    def _run_counts(self, tp: int, pp: int) -> list[int]:
        return [len(self.runs.get(point, ())) for point in self._points(tp, pp)]

    def _points(self, tp: int, pp: int) -> list[tuple[Visit, Shape]]:
        return [(visit, shape) for visit in self.sessions[tp, pp] for shape in self.shapes_at(tp, pp)]

    def _launch(self, tp: int, pp: int, later: list[list[Visit]], *, first: bool) -> None:
        visits, budget = self.sessions[tp, pp], self.budget
        self._tell(f"tp={tp} pp={pp}: launching")
        fair_end = budget.clock() + budget.left_s / (1 + len(later))
        with budget.spend(Action("launch"), math.inf if first else budget.end):
            session = self.target.open(tp=tp, pp=pp)
        try:
            for number in range(1 if self.plan.sizes else 2 * self.plan.max_repeats):
                is_short = self._fewest_runs(tp, pp) < self.plan.min_repeats
                must_run = is_short and (first or number == 0)
                deadline = budget.end if must_run else self._deadline(visits, fair_end, later, is_short)
                soft = fair_end if is_short else deadline
                if not self._pass_over(session, visits if number % 2 == 0 else visits[::-1], deadline, soft):
                    return
        finally:
            with budget.note(Action("close")):
                session.close()

    def _deadline(self, visits: list[Visit], fair_end: float, later: list[list[Visit]], is_short: bool) -> float:
        """Return when a pass must end to leave later launches their minimum."""
        end = self.budget.end
        if not later:
            return end
        reserve = self._minimum_cost_s(visits, later)
        if is_short:
            return max(fair_end, end - reserve)
        return min(fair_end, end - 2 * reserve)  # a split launch may cost more than this one

    def _is_tight(self, runs: list[RunReading]) -> bool:
        if len(runs) < max(2, self.plan.min_repeats):
            return False
        location = locate([run.e2e_s for run in runs])
        return location.half_width <= self.plan.target_relative_interval * location.value

    @property
    def complete(self) -> bool:
        """Return whether all that the machine and the model allow was measured, and tightly."""
        points = [point for degree in self.sessions for point in self._points(*degree)]
        return not self.dropped and all(self._is_tight(self.runs.get(point, [])) for point in points)

    def unreached(self) -> tuple[Unreached, ...]:
        """Return what the budget ended before: configurations with points of too few runs."""
        found = []
        for (tp, pp), visits in self.sessions.items():
            shapes = [*self.shapes_at(tp, pp), *self._dropped_at(tp, pp)]
            for key in dict.fromkeys(visit.key for visit in visits):
                own = [visit for visit in visits if visit.key == key]
                runs = [len(self.runs.get((visit, shape), ())) for visit in own for shape in shapes]
                missing = sum(count < self.plan.min_repeats for count in runs)
                if missing and (tp, pp) not in self.failed:
                    config = key.config(self.target.engine)
                    found.append(Unreached(config=config, missing_points=missing, planned_points=len(runs)))
        return tuple(found)

    def _dropped_at(self, tp: int, pp: int) -> list[Shape]:
        lengths = {shape.input_tokens for shape in self.shapes_at(tp, pp)}
        return [shape for shape in self.dropped if tp * pp == 1 or shape.input_tokens in lengths]

    def timing(self) -> tuple[TimingPoint, ...]:
        return tuple(
            visit.timing_point(self.spec, shape, tuple(runs), loads=tuple(self.loads[visit, shape]))
            for (visit, shape), runs in self.runs.items()
        )

    def _tell(self, running: str) -> None:
        self.total = max(self.total, self.done)
        self._report(ProfileProgress(self.done, self.total, self.budget.elapsed_s, self.plan.budget_s, running))

    def _pass_over(self, session: ProfileSession, visits: list[Visit], deadline: float, soft: float) -> bool:
        """Run every point that needs it, once after ``soft`` and maybe more before; False when none does.

        An engine that starts anew with each load gets all runs of a fingerprint in one visit, each its share of
        the time until ``soft``.
        """
        clock, once = self.budget.clock, self.plan.sizes is not None
        wanted = [(visit, shapes) for visit in visits if (shapes := self._open_shapes(visit))]
        for index, (visit, shapes) in enumerate(wanted):
            due = clock() + (soft - clock()) / (len(wanted) - index) if once else soft
            self._load(session, visit, deadline)
            shapes = [s for s in shapes if s not in self.dropped]  # while warming up
            for repeat in range(self._repeats_of(visit, shapes)):
                if repeat >= (_FEWEST_RUNS if once else 1) and clock() >= due:
                    break
                for shape in self._open_shapes(visit) if once else shapes:
                    reading = self._run(session, visit, shape, deadline)
                    self.runs.setdefault((visit, shape), []).append(reading)
                    self.loads.setdefault((visit, shape), []).append(self.num_loads)
        return bool(wanted)

    def _seen_s(self, visit: Visit, shape: Shape) -> float:
        return self.budget.seen_s.get(_run_action(visit, shape), 0.0)

    def _open_shapes(self, visit: Visit) -> list[Shape]:
        return [
            shape
            for shape in self.shapes_at(visit.tp, visit.pp)
            if len(runs := self.runs.get((visit, shape), [])) < self.plan.max_repeats and not self._is_tight(runs)
        ]

    def _repeats_of(self, visit: Visit, shapes: list[Shape]) -> int:
        load_s = self.budget.seen_s.get(_load_action(visit), 0.0)
        return self.plan.repeats_per_visit(load_s, sum(self._seen_s(visit, shape) for shape in shapes))

    def _load(self, session: ProfileSession, visit: Visit, deadline: float) -> None:
        budget = self.budget
        self._tell(f"tp={visit.tp} pp={visit.pp}: loading {visit.num_layers} layers, {visit.weights}")
        checkpoint = self.fingerprints(visit.layers)
        action, sizes = _load_action(visit), self._sizes()
        first = action not in budget.seen_s
        with budget.spend(action, deadline):
            visit.load(session, checkpoint, sizes)
        self.num_loads += 1
        if first:
            self._first_runs(session, visit, sizes, deadline)
        else:
            self._run(session, visit, self._open_shapes(visit)[0], deadline)

    def _first_runs(self, session: ProfileSession, visit: Visit, loaded: EngineSizes, deadline: float) -> None:
        """Warm every point up, small ones first; read memory after the smallest step and after all."""
        smaller: Shape | None = None
        tokens, readings = 0, 0
        for shape in self.shapes_at(visit.tp, visit.pp):
            if smaller is not None and self._too_dear(session, visit, shape, smaller, deadline):
                continue
            step_tokens = shape.batch * shape.input_tokens
            if 0 < tokens < step_tokens and readings == 0 and not self.plan.sizes:
                self._read_memory(session, visit, loaded, tokens)
                readings += 1
            self._run(session, visit, shape, deadline)
            smaller, tokens = shape, max(tokens, step_tokens)
        self._read_memory(session, visit, loaded, tokens)

    def _too_dear(
        self, session: ProfileSession, visit: Visit, shape: Shape, smaller: Shape, deadline: float
    ) -> bool:
        """Drop a point that leaves no time for two runs of everything here; its smaller neighbour tells its time.

        The smallest burst is never dropped: its two output lengths are the least that an estimate can rest on.
        """
        budget = self.budget
        smallest = min((s.batch, s.input_tokens) for s in self.shapes_at(visit.tp, visit.pp))
        if self.runs or self.num_loads > 1 or (shape.batch, shape.input_tokens) == smallest:
            return False  # decided once, on the first fingerprint, so that all have the same points

        def need_s() -> float:
            warm = sum(self._seen_s(visit, known) for known in self.shapes)
            once = warm + self._seen_s(visit, smaller) * shape.cost / smaller.cost
            load_s = budget.seen_s[_load_action(visit)]
            return len(self.sessions[visit.tp, visit.pp]) * (load_s + (1 + _FEWEST_RUNS) * once)

        if need_s() <= budget.left_s:
            return False
        self._run(session, visit, smaller, deadline)  # once more: its first run may have been a compilation
        left_s = budget.left_s
        if need_s() <= left_s:
            return False
        self.shapes.remove(shape)
        self.dropped.append(shape)
        self.notes.append(
            f"batch {shape.batch}, {shape.input_tokens} in, {shape.output_tokens} out left out: with it two runs "
            f"of every point at tp={visit.tp} pp={visit.pp} take about {need_s():.1f} s, {left_s:.1f} s are left"
        )
        return True

    def _read_memory(self, session: ProfileSession, visit: Visit, loaded: EngineSizes, tokens: int) -> None:
        point = visit.memory_point(self.spec, session.memory(), loaded)
        if self.plan.sizes is None:  # else counted while the engine starts, in blocks that all sequences share
            room = loaded.max_batch * loaded.max_context_tokens
            point = replace(
                point, max_batched_tokens=tokens, max_batch=0, kv_tokens=room, kv_sequences=loaded.max_batch
            )
        self.memory.append(point)

    def _run(self, session: ProfileSession, visit: Visit, shape: Shape, deadline: float) -> RunReading:
        self._tell(
            f"tp={visit.tp} pp={visit.pp}, {visit.num_layers} layers, {visit.weights}: batch {shape.batch}, "
            f"{shape.input_tokens} in, {shape.output_tokens} out"
        )
        with self.budget.spend(_run_action(visit, shape), deadline):
            reading = session.run(
                batch=shape.batch, input_tokens=shape.input_tokens, output_tokens=shape.output_tokens
            )
        self.done += 1
        return reading

    def _minimum_cost_s(self, here: list[Visit], later: list[list[Visit]]) -> float:
        """Time that the later launches need for their minimum, if they cost what this one did."""
        seen = self.budget.seen_s.items()
        loads = [s for action, s in seen if action.kind == "load" and action.where in here]
        runs = [s for action, s in seen if action.kind == "run" and action.where in here]
        once = sum(runs) / len(runs) * len(self.shapes_at(2, 1)) if runs else 0.0  # later ones are split
        load = max(loads, default=0.0)
        repeats = self.plan.min_repeats
        visit_s = once * (repeats + 1) + load * math.ceil(repeats / self.plan.repeats_per_visit(load, once))
        return sum(self.budget.launch_s + len(visits) * visit_s for visits in later)


def _load_action(visit: Visit) -> Action:
    return Action("load", None, visit)


def _run_action(visit: Visit, shape: Shape) -> Action:
    return Action("run", shape, visit)
