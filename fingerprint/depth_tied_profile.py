"""Profiles an engine that carries our step timer: fingerprints, every forward repeated to the model's depth.

A fingerprint of k layers per stage with every forward run r = N / (p * k) times takes the whole model's time in a
fingerprint's memory (``daemon/profiling_worker``). What a repeat costs outside its layers shows between two depths
(``depth_tied_cuts``). An engine start takes longer than all that is measured after it, so each fingerprint is
started once and run through all its points; the budget counts the GPU's seconds after the starts.

Bursts run back to back until the GPU's clock and power have settled, since a GPU that works for 200 ms under its
power cap is slower than one that works for 7; the earlier half of them is not kept. A host that shares its cores
changes its pace by half within seconds, and short prompts wait for the host: those are visited again later on.
What disturbs the GPU meanwhile (``gpu_disturbance``) has a point measured again, or is noted. An engine that
compiles for minutes is waited for until the budget ends.

A degree of tensor parallelism for which there are not enough GPUs is profiled as one rank on one GPU per stage:
the rank's shape (``shard_config``) is loaded with tp = 1. Its points are marked ``shard``, and estimators add the
work of a group (``estimators.all_reduce``).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from fingerprint.config import DeploymentConfig
from fingerprint.depth_tied_cuts import repeats_the_mix, tied_depths, why_no_cuts
from fingerprint.depth_tied_plan import DepthTiedPlan, Point, tokens_of
from fingerprint.engine_caches import cache_differences
from fingerprint.engines import largest_graph
from fingerprint.errors import InfeasibleError, IserveError, NotMeasuredError, TooLittleTimeError
from fingerprint.gpu_disturbance import disturbance, disturbance_marks
from fingerprint.measurements import MemoryPoint, Profile, RunReading, TimingPoint
from fingerprint.model_spec import ModelSpec
from fingerprint.profile import ProfileProgress
from fingerprint.profile_checks import check_ranks, check_runs, contradiction
from fingerprint.profile_gaps import Gaps, lack_of
from fingerprint.profile_points import Shape, Visit, settled
from fingerprint.profile_sessions import CallState, ProfileTarget, StepTimedSession
from fingerprint.shard_config import refuses_shards

__all__ = ["depth_tied_profile"]

_LONG_CALL_S = 5.0  # longer than foreseen, and progress says why
_MOST_AGAIN = 2  # further measurements of a point whose GPU was disturbed
_LEAST_COMPILE_S = 1.0  # of compilation, to be noted


def depth_tied_profile(
    source_name: str,
    spec: ModelSpec,
    target: ProfileTarget[StepTimedSession],
    fingerprints: Callable[..., Path],
    plan: DepthTiedPlan,
    *,
    num_gpus: int | None = None,
    clock: Callable[[], float] = time.monotonic,
    progress: Callable[[ProfileProgress], None] = lambda _: None,
    needless: Callable[[DeploymentConfig, Profile], str | None] = lambda _config, _so_far: None,
) -> Profile:
    """Measure ``spec`` on ``target``. Sessions are closed whatever happens.

    A point or a configuration that fails (out of memory, a flag the engine refuses, a kill) is noted with the
    engine's own last words, and the rest goes on with a fresh worker. Depths whose times contradict each other
    (two layers faster than one) are measured once more and then left out.

    Args:
        fingerprints: a directory with the config.json of the first so many layers, and for a shard of so many
            ranks, the second argument, that of one rank's shape; weights are not read.
        num_gpus: degrees that need more are taken as shards, after the rest; None: there are enough for all.
        needless: asked before each configuration but the first that was measured, with what is measured by then:
            why it need not be; None: it is measured. Of a shard's formats it is asked before the first.

    Raises:
        InfeasibleError: no degree can be taken, not even as a shard; the message says why.
        IserveError: nothing at all could be measured; the first failure.
    """
    driver = _Driver(source_name, spec, target, fingerprints, plan, num_gpus, clock, progress, needless)
    driver.run_all()
    return driver.profile()


@dataclass
class _Driver:
    source_name: str
    spec: ModelSpec
    target: ProfileTarget[StepTimedSession]
    fingerprints: Callable[..., Path]
    plan: DepthTiedPlan
    num_gpus: int | None
    clock: Callable[[], float]
    progress: Callable[[ProfileProgress], None]
    needless: Callable[[DeploymentConfig, Profile], str | None]
    memory: list[MemoryPoint] = field(default_factory=list)
    timing: list[TimingPoint] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    spent_s: float = 0.0
    compile_s: float = 0.0  # of ``spent_s``
    complete: bool = True
    _session: StepTimedSession | None = None
    _disturbed: Visit | None = None  # all along
    _first_error: IserveError | None = None
    _done: int = 0
    _gaps: Gaps = field(default_factory=Gaps)
    # GPU-seconds, as ``spent_s``: per prompt token by tp, pp, layers; and by tp, pp, plain, point
    _cost_s: dict[tuple[int, int, int], float] = field(default_factory=dict)
    _took_s: dict[tuple[int, int, bool, Point], float] = field(default_factory=dict)

    def profile(self) -> Profile:
        """Return the profile measured so far."""
        return Profile(
            model=self.source_name,
            spec=self.spec,
            engine=self.target.engine,
            machine=self.target.machine(),
            created_at=datetime.now(UTC).isoformat(timespec="seconds"),
            budget_s=self.plan.budget_s,
            spent_s=self.spent_s,
            compile_s=self.compile_s,
            graph_tokens=largest_graph(self.target.engine, is_mixture=self.spec.is_mixture),
            complete=self.complete,
            memory=tuple(self.memory),
            timing=tuple(self.timing),
            notes=self._all_notes(),
            unreached=self._gaps.unreached(self.target.engine, len(self.plan.points)),
        )

    def _all_notes(self) -> tuple[str, ...]:
        notes = [*self.notes, *disturbance_marks(self.timing), *cache_differences(self.spec, self.memory)]
        if self.compile_s >= _LEAST_COMPILE_S:
            spent = f"{self.compile_s:.0f} of {self.spent_s:.0f} GPU-seconds"
            notes.append(f"{spent} compiled kernels, of which the next profile here finds what the engine keeps")
        return tuple(dict.fromkeys(notes))

    def run_all(self) -> None:
        refused = 0
        for tp, pp in sorted(self.plan.degrees, key=lambda degree: self._is_shard(*degree)):
            degree, depths, shard = f"tp={tp} pp={pp}", tied_depths(self.spec, pp), self._is_shard(tp, pp)
            refusal = self._shard_refusal(tp, pp) if shard else None
            if why_not := refusal or ("" if depths else why_no_cuts(self.spec, pp)):
                self.notes.append(f"{degree} left out: {why_not}")
                self.complete = self.complete and not shard
                refused += refusal is not None
                continue
            try:
                self._degree(tp, pp, depths)
            except IserveError as error:
                self._failed(degree, error)
            finally:
                self._close()
        if not self.timing and self._first_error is not None:
            raise self._first_error
        if refused == len(self.plan.degrees):
            raise InfeasibleError("; ".join(self.notes))

    def _is_shard(self, tp: int, pp: int) -> bool:
        return self.num_gpus is not None and tp * pp > self.num_gpus

    def _shard_refusal(self, tp: int, pp: int) -> str | None:
        """Return why no rank of this degree can be taken alone."""
        if self.num_gpus is not None and pp > self.num_gpus:
            return f"its {pp} stages need as many GPUs, there are {self.num_gpus}"
        if self.plan.expert_parallel:
            return "one rank alone would divide each expert, not the experts"
        if (why_not := refuses_shards(self.spec.family)) is not None:
            return why_not
        if self.spent_s < self.plan.budget_s:
            return None
        for key in self.plan.keys(tp, pp):
            self._gaps.add(key, self.plan.points)
        return f"the budget of {self.plan.budget_s:g} GPU-seconds is spent"

    def _degree(self, tp: int, pp: int, depths: tuple[int, ...]) -> None:
        """Measure each pair of formats; raise IserveError if no worker becomes ready."""
        shard = self._is_shard(tp, pp)
        before = self.profile() if shard else None
        keys = self.plan.keys(tp, pp)
        for number, key in enumerate(keys):
            visits = [Visit.of(key, tuple(range(depth * pp)), shard=shard) for depth in depths]
            if self.spent_s >= self.plan.budget_s:
                self._gaps.add(key, self.plan.points)
                self._left_out(str(key))
                continue
            so_far = before or self.profile()
            if so_far.timing and (why := self.needless(key.config(self.target.engine), so_far)):
                self.notes.append(f"{key} not measured: {why}")
                continue
            try:
                self._open(visits[0])
            except IserveError as error:
                for rest in keys[number:]:
                    self._gaps.add(rest, self.plan.points, lack_of(error))
                raise
            try:
                self._case(visits)
            except IserveError as error:
                self._gaps.add(key, self.plan.points, lack_of(error))
                self._failed(str(key), error)
                self._close()  # whatever it left, the next one finds a fresh worker

    def _open(self, visit: Visit) -> StepTimedSession:
        if self._session is None:
            self._session = self.target.open(
                tp=1 if visit.shard else visit.tp, pp=visit.pp, expert_parallel=visit.expert_parallel
            )
            if visit.shard:
                self.notes.append(f"tp={visit.tp} was run as one rank's shape, without communication")
        return self._session

    def _close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _left_out(self, what: str) -> None:
        self.complete = False
        self.notes.append(f"{what} left out, the budget of {self.plan.budget_s:g} GPU-seconds is spent")

    def _failed(self, what: str, error: IserveError) -> None:
        self._first_error = self._first_error or error
        self.complete = False
        self.notes.append(f"{what} failed: {error}")

    def _not_trusted(self, what: str, error: NotMeasuredError) -> None:
        self._first_error = self._first_error or error
        self.complete = False
        self.notes.append(f"{what}: {error}")

    def _case(self, visits: Sequence[Visit]) -> None:
        key = visits[0].key
        for attempt in (1, 2):
            timing: list[TimingPoint] = []
            memory: list[MemoryPoint] = []
            points = sorted(self.plan.points, key=tokens_of)
            for visit in visits:
                self._depth(visit, points, timing, memory, is_deepest=len(visits) > 1 and visit is visits[0])
                points = self._shallow(timing)
            problem = contradiction(timing)
            if problem is None:
                break
            if attempt == 1:
                self.notes.append(f"{key}: {problem}; measured again")
        self.memory += memory
        if problem is not None:
            raise NotMeasuredError(
                f"{key} is unusable, measured twice: {problem}; profile it when the machine is quiet"
            )
        self.timing += timing

    def _shallow(self, timing: list[TimingPoint]) -> list[Point]:
        """Return the points of the next depth: useful only where the depth before has the same point.

        Raises:
            NotMeasuredError: there is none.
        """
        there = sorted({(p.batch, p.input_tokens) for p in timing}, key=tokens_of)
        if not there:
            raise NotMeasuredError("not one point could be measured")
        return [point for point in there if point in self.plan.shallow_points] or there[:1]

    def _depth(
        self,
        visit: Visit,
        points: list[Point],
        timing: list[TimingPoint],
        memory: list[MemoryPoint],
        *,
        is_deepest: bool,
    ) -> None:
        """Measure one fingerprint. An engine that dies at a point is started once more for the points that follow.

        Raises:
            IserveError: it does not start.
        """
        plan = self.plan
        session: StepTimedSession | None = self._load(visit)
        memory.append(self._memory(visit))  # counted while the engine starts
        repeat, end_s = max(1, self.spec.num_layers // visit.num_layers), plan.budget_s
        if is_deepest and not repeats_the_mix(self.spec, visit.pp):  # each point is wanted of both
            end_s = (end_s + self.spent_s) / 2
        jobs = [(point, repeat) for point in points]
        jobs += [(point, 1) for point in sorted(plan.plain_points, key=tokens_of)]
        died = False
        for number, (point, times) in enumerate(jobs):
            plain = number >= len(points)
            foreseen_s = self._foreseen_s(visit, times, point, plain=plain)
            if number and (self.spent_s >= end_s or foreseen_s > end_s - self.spent_s):
                if not plain:
                    self._gaps.add(visit.key, [point])
                self._left_out(f"{visit}: batch {point[0]} with {point[1]} in")
                continue  # not of the cheapest, without which the other depth's points would tell nothing
            try:
                session = session or self._load(visit)
                timing += self._undisturbed(session, visit, times, point, timing, plain=plain)
            except NotMeasuredError as error:
                if isinstance(error, TooLittleTimeError):  # the call was cut, and the engine is busy with it
                    self._failed(f"{visit}, batch {point[0]} with {point[1]} in", error)
                    self._close()
                    session = None
                else:  # its calls do not agree; the engine is as good as before
                    self._not_trusted(str(visit), error)
                if not plain:
                    self._gaps.add(visit.key, [point], lack_of(error))
            except IserveError as error:
                lost = points[number:] if died else points[number : number + 1]
                self._gaps.add(visit.key, lost, lack_of(error))
                self._failed(f"{visit}, batch {point[0]} with {point[1]} in", error)
                self._close()
                session = None
                if died:
                    self.notes.append(f"{visit}: its engine died twice, the rest is left out")
                    return
                died = True
        if session is not None and not died and is_deepest:  # the other tells what a repeat costs, no whole
            goes_on = self._revisit(session, visit, repeat, timing)
            if goes_on and plan.second_calls:
                self._call_again(session, visit, repeat, timing)

    def _kept_s(self, visit: Visit) -> float:
        """Return seconds of the budget for the other depth, which tells of the whole and takes about as long."""
        shallow = (self._took_s.get((visit.tp, visit.pp, False, at), 0.0) for at in self.plan.shallow_points)
        return 1.1 * sum(shallow)

    def _call_again(self, session: StepTimedSession, visit: Visit, repeat: int, timing: list[TimingPoint]) -> None:
        """Add a second burst to points that have one, the shortest first, while the other depth leaves budget."""
        alike = [i for i, p in enumerate(timing) if (p.num_layers, p.repeat) == (visit.num_layers, repeat)]
        lone = [index for index in alike if len(timing[index].runs) == 1]
        for index in sorted(lone, key=lambda index: timing[index].runs[0].e2e_s):
            point = timing[index]
            burst_s = session.num_devices * point.runs[0].e2e_s
            if self.spent_s + burst_s > self.plan.budget_s - self._kept_s(visit):
                self.notes.append(f"{visit}: points called once, by the budget: their intervals are wider")
                return
            if (both := self._again(session, visit, repeat, point, (point.output_tokens, 1, 0.0))) is None:
                return
            timing[index] = both

    def _revisit(self, session: StepTimedSession, visit: Visit, repeat: int, timing: list[TimingPoint]) -> bool:
        """Add to settled bursts of short prompts what later visits see, out of what the other depth leaves of the
        budget. Return whether the engine goes on and all of it was done."""
        plan = self.plan
        kept_s = self._kept_s(visit)
        for _ in range(1, plan.visits):
            for index, point in enumerate(timing):
                at = (point.batch, point.input_tokens)
                alike = (point.num_layers, point.repeat, point.output_tokens) == (visit.num_layers, repeat, 1)
                if not alike or not plan.is_visited_again(at):
                    continue
                settled_s = session.num_devices * (plan.settle_s + point.runs[-1].e2e_s)
                visit_s = min(settled_s, self._took_s[visit.tp, visit.pp, False, at])
                if self.spent_s + visit_s > plan.budget_s - kept_s:
                    self._left_out(f"{visit}: further visits to short prompts")
                    return False
                if (both := self._again(session, visit, repeat, point, plan.bursts(at)[0])) is None:
                    return False
                timing[index] = both
        return True

    def _again(
        self, session: StepTimedSession, visit: Visit, repeat: int, point: TimingPoint, how: tuple[int, int, float]
    ) -> TimingPoint | None:
        """Return a point with a further visit's runs, or as it was where these are not trusted.

        None: the engine is gone.
        """
        at = (point.batch, point.input_tokens)
        try:
            more = self._bursts(session, visit, repeat, at, *how)
        except IserveError as error:
            if isinstance(error, NotMeasuredError) and not isinstance(error, TooLittleTimeError):
                self.notes.append(f"{visit}, again: {error}")  # nothing is missing: the point has trusted calls
                return point
            self._failed(f"{visit}, batch {at[0]} with {at[1]} in, again", error)
            self._close()
            return None
        both = replace(point, runs=point.runs + settled(more.runs))
        if why := disturbance([both], ()):
            self.notes.append(f"{visit}, again: not kept, {why}")
            return point
        return both

    def _memory(self, visit: Visit) -> MemoryPoint:
        ranks = self._open(visit).memory()
        check_ranks(ranks, pp=visit.pp)
        return visit.memory_point(self.spec, ranks, self.plan.sizes)

    def _load(self, visit: Visit) -> StepTimedSession:
        session, num_layers = self._open(visit), visit.num_layers
        self._tell(f"{visit.key}: starting the engine on {num_layers} layers")
        checkpoint = self.fingerprints(num_layers, visit.tp) if visit.shard else self.fingerprints(num_layers)
        visit.load(session, checkpoint, self.plan.sizes)
        return session

    def _undisturbed(
        self,
        session: StepTimedSession,
        visit: Visit,
        repeat: int,
        point: Point,
        timing: Sequence[TimingPoint],
        *,
        plain: bool,
    ) -> list[TimingPoint]:
        """Measure a point; again where the GPU was disturbed, while the budget lasts.

        What is disturbed to the end is kept as it is, and marked (``disturbance_marks``); further points of the
        fingerprint are then measured once, since what lasts would take the time of all of them.
        """
        measured = self._point(session, visit, repeat, point, plain=plain)
        for _ in range(_MOST_AGAIN):
            took_s = self._took_s[visit.tp, visit.pp, plain, point]
            why = disturbance(measured, timing)
            if why is None or visit == self._disturbed or self.spent_s + took_s > self.plan.budget_s:
                break
            self.notes.append(f"{visit}, batch {point[0]} with {point[1]} in: measured again, {why}")
            try:
                measured = self._point(session, visit, repeat, point, plain=plain)
            except NotMeasuredError as error:  # calls that do not agree: those before it did
                if isinstance(error, TooLittleTimeError):
                    raise
                self._not_trusted(f"{visit}, again", error)
                break
        else:
            self._disturbed = visit if disturbance(measured, timing) else self._disturbed
        return measured

    def _point(
        self, session: StepTimedSession, visit: Visit, repeat: int, point: Point, *, plain: bool
    ) -> list[TimingPoint]:
        """Bursts of one token until settled, then the long ones."""
        plan, begun = self.plan, self.clock()
        wanted = plan.bursts(point)
        if plain:
            wanted = tuple((output, plan.plain_bursts, plan.settle_s) for output in (1, plan.long_output))
        measured = [self._bursts(session, visit, repeat, point, *how) for how in wanted]
        if not plain:
            measured = [replace(p, runs=settled(p.runs)) if p.output_tokens == 1 else p for p in measured]
        took_s, at = session.num_devices * (self.clock() - begun), (visit.tp, visit.pp, visit.num_layers * repeat)
        self._took_s[visit.tp, visit.pp, plain, point] = took_s
        self._cost_s[at] = min(took_s / tokens_of(point), self._cost_s.get(at, math.inf))
        return measured

    def _foreseen_s(self, visit: Visit, repeat: int, point: Point, *, plain: bool) -> float:
        """Return seconds of all its GPUs: as at the other depth, else as if nothing had a fixed cost."""
        cost_s = self._cost_s.get((visit.tp, visit.pp, visit.num_layers * repeat), 0.0)
        return self._took_s.get((visit.tp, visit.pp, plain, point), cost_s * tokens_of(point))

    def _bursts(
        self,
        session: StepTimedSession,
        visit: Visit,
        repeat: int,
        point: Point,
        output: int,
        most: int,
        until_s: float,
    ) -> TimingPoint:
        batch, input_tokens = point
        what = f"{visit.key}, {visit.num_layers} x {repeat} layers: batch {batch}, {input_tokens} in, {output} out"
        state = CallState()

        def tell(now: CallState) -> None:
            nonlocal state
            state = now
            if not now.ended and now.elapsed_s > until_s + _LONG_CALL_S:
                doing = "compiling kernels" if now.compiling else "no answer yet, it may be compiling kernels"
                self._tell(f"{what}: {doing} ({now.elapsed_s:.0f} s)", session.num_devices * now.elapsed_s)

        self._tell(what)
        begun = self.clock()
        try:
            runs: tuple[RunReading, ...] = session.bursts(
                batch=batch,
                input_tokens=input_tokens,
                output_tokens=output,
                repeat=repeat,
                most=most,
                until_s=until_s,
                agree_within=self.plan.agree_within,
                agree_limit_s=self.plan.agree_limit_s,
                limit_s=max(self.plan.least_call_s, (self.plan.budget_s - self.spent_s) / session.num_devices),
                tell=tell,
            )
        finally:
            self.spent_s += session.num_devices * (self.clock() - begun)
            self.compile_s += session.num_devices * state.compile_s
            self._done += 1
        check_runs(runs, batch=batch, input_tokens=input_tokens)
        return visit.timing_point(self.spec, Shape(batch, input_tokens, output), runs, repeat=repeat)

    def _tell(self, running: str, running_s: float = 0.0) -> None:
        plan, spent_s = self.plan, self.spent_s + running_s
        of_degrees = sum(plan.num_bursts(tied_depths(self.spec, pp)) for _, pp in plan.degrees)
        total = of_degrees * len(plan.weights) * len(plan.kv)
        self.progress(ProfileProgress(self._done, max(total, self._done), spent_s, plan.budget_s, running))
