"""Driver that measures what variants take on an engine with our step timer: steps of repeated fingerprints.

An engine step of one or two layers is bound by its host, which hides what the kernels of variants add. So each
forward runs as often as the model is deep (``depth_tied_profile``), and what is compared are single steps by their
composition, of variants and of the base in one round on one engine. Three engines are started: the deeper
fingerprint without slots, the same with slots, and the shallower one with fewer slots, by which the parts of a
layer, of a forward and of a slot are told apart (``estimators.measured_variants``). The budget counts the seconds
after the starts and without each engine's first round, in which kernels are compiled.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from fingerprint.config import SlotFormat, Workload
from fingerprint.depth_tied_cuts import tied_depths, why_no_cuts
from fingerprint.errors import BadInputError, ConfigError, NotMeasuredError
from fingerprint.measurements import RunReading, StepReading, StepTimedVariantSession
from fingerprint.model_spec import ModelSpec
from fingerprint.profile import ProfileProgress
from fingerprint.profile_points import Shape
from fingerprint.variant_measurements import VariantKind, VariantLoads, VariantMeasurement, VariantSteps

__all__ = ["BUDGET_S", "StepPlan", "StepVisit", "measure_variant_steps", "step_plan"]

BUDGET_S = 30.0
_MOST_TOKENS = 2048  # of a prompt
_TOGETHER_TOKENS = 1024  # of the prompts of a burst of several: of as many tokens, no part of a row would be known
_FEW = 4  # requests whose prompts are compared: more arrive in steps that no other burst repeats
_SLOWED = 2.0  # a forward of so many times the shortest compiled a kernel
_LONGEST_OUTPUT = 33  # a GPU's clock needs half of them to recover from the prompts
_ACTIVE = {False: (1, 4, 8), True: (1, 4)}  # distinct adapters, or deltas
_ADAPTER_SLOTS = (32, 8)  # of the deeper fingerprint and the shallower one: kernels start programs for each slot
_FEWEST_ROUNDS, _MOST_ROUNDS = 2, 8
# No burst begins that is expected to end after so many times the budget. Where nothing is compiled, warming up is
# half as long as the fewest rounds after it, which is twice the budget in all.
_OVERRUN = 4 / 3
_MOST_WARM_UP_S = 120.0  # of all engines: no burst that warms up begins after it


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
        return (*self.base_bursts, (self.alone, 1), *of_few, *((self.together, active) for active in self.active))

    @property
    def base_bursts(self) -> tuple[tuple[Shape, int], ...]:
        return (self.alone, 0), (self.few, 0), (self.together, 0)

    @property
    def max_context_tokens(self) -> int:
        return max(shape.input_tokens + shape.output_tokens for shape, _ in self.base_bursts)

    def visits(self, spec: ModelSpec) -> tuple[StepVisit, ...]:
        """Return the engine starts, the one without slots first.

        Raises:
            NotMeasuredError: the model has no fingerprints whose forward can be repeated to its depth.
        """
        depths = tied_depths(spec, 1)
        if not depths:
            raise NotMeasuredError(f"no fingerprint can be repeated: {why_no_cuts(spec, 1)}")
        slots = (0, *self.slots)
        visits = [(depths[0], slots[0]), *zip(depths, slots[1:], strict=False)]
        return tuple(StepVisit(tuple(range(k)), max(1, spec.num_layers // k), count) for k, count in visits)


def step_plan(spec: ModelSpec, workload: Workload, kind: VariantKind, *, budget_s: float = BUDGET_S) -> StepPlan:
    """Return the plan for ``workload``: one prompt of its length, and its batch (4 where that is 1) of short ones.

    Raises:
        ConfigError: a context too short to generate in.
    """
    if spec.max_context_tokens < 6:
        raise ConfigError(f"a context of {spec.max_context_tokens} tokens is too short to profile; it needs 6")
    batch = min(_TOGETHER_TOKENS, workload.batch) if workload.batch > 1 else 4
    output = min(_LONGEST_OUTPUT, spec.max_context_tokens // 2)
    longest = min(workload.input_tokens, spec.max_context_tokens - output, _MOST_TOKENS)
    active, few = tuple(sorted({min(count, batch) for count in _ACTIVE[kind.is_delta]})), min(_FEW, batch)
    return StepPlan(
        kind=kind,
        alone=Shape(1, longest, output),
        few=Shape(few, max(1, min(longest, _TOGETHER_TOKENS // few)), 1),
        together=Shape(batch, max(1, min(longest, _TOGETHER_TOKENS // batch)), output),
        active=active,
        slots=(max(active), max(active)) if kind.is_delta else _ADAPTER_SLOTS,
        budget_s=budget_s,
    )


def measure_variant_steps(
    spec: ModelSpec,
    open_session: Callable[[], StepTimedVariantSession],
    fingerprints: Callable[[Sequence[int]], Path],
    variants: Callable[[Sequence[int], VariantKind, int], tuple[Path, int]],
    plan: StepPlan,
    *,
    forget: Callable[[Sequence[int]], None] = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
    progress: Callable[[ProfileProgress], None] = lambda _: None,
) -> VariantMeasurement:
    """Measure variants of ``plan.kind`` in repeated fingerprints of ``spec``. The session is closed whatever
    happens.

    What an engine refuses as wrong is a measurement with its failure, so that it is not tried at each plan anew.
    Any other failure may be gone the next time and is raised.

    Args:
        open_session: launches a worker at tp = pp = 1.
        fingerprints: the folder that holds the config.json of these layers of the model.
        variants: the folder of a variant of these layers by its number, and the bytes of its tensors.
        forget: called with the layers whose variants are not needed any more.
        clock: seconds that only grow.
        progress: called before every start and burst; what it raises ends the measurement.

    Raises:
        NotMeasuredError: no fingerprint can be repeated, engines compile for too long, or the fewest rounds take
            more than 4/3 of the budget.
        IserveError: a failure that need not happen again.
    """
    driver = _Driver(spec, fingerprints, variants, plan, forget, clock, progress)
    visits, failure = plan.visits(spec), ""
    try:
        session = open_session()
        try:
            driver.run_all(session, visits)
        finally:
            session.close()
    except BadInputError as error:
        failure = str(error)
    return VariantMeasurement(
        kind=plan.kind,
        slots=max(plan.slots),
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        spent_s=driver.spent_s + driver.warm_up_s,
        warm_up_s=driver.warm_up_s,
        steps=() if failure else driver.steps(),
        loads=() if failure else tuple(driver.loads),
        failure=failure,
    )


@dataclass(frozen=True, order=True, slots=True)
class _Composition:
    """Step by what it computes."""

    is_prompt: bool
    tokens: int
    sequences: int
    number: int  # of the prompts' step in its burst


_Times = tuple[float, float]  # of the forward, and of the rest
_Key = tuple[StepVisit, _Composition, int]  # and distinct variants


@dataclass
class _Driver:
    spec: ModelSpec
    fingerprints: Callable[[Sequence[int]], Path]
    variants: Callable[[Sequence[int], VariantKind, int], tuple[Path, int]]
    plan: StepPlan
    forget: Callable[[Sequence[int]], None]
    clock: Callable[[], float]
    progress: Callable[[ProfileProgress], None]
    spent_s: float = 0.0  # loads and the rounds that count
    warm_up_s: float = 0.0
    loads: list[VariantLoads] = field(default_factory=list)
    _done: int = 0
    _took_s: dict[tuple[Shape, int], float] = field(default_factory=dict)  # shortest burst after warming up
    _pairs: dict[_Key, list[tuple[_Times, _Times]]] = field(default_factory=dict)
    # of the base's steps: by fingerprint, whether there were slots, and composition
    _base: dict[tuple[tuple[int, ...], int, _Composition], list[_Times]] = field(default_factory=dict)

    def run_all(self, session: StepTimedVariantSession, visits: Sequence[StepVisit]) -> None:
        """Start each engine and run its bursts; the later ones have what the former left of the budget.

        Raises:
            NotMeasuredError: the bursts take too long.
        """
        bursts = [self.plan.bursts if visit.slots else self.plan.base_bursts for visit in visits]
        for number, visit in enumerate(visits):
            self._refuse_overrun(_FEWEST_ROUNDS * sum(map(self._expected_s, bursts[number:])))
            share = len(bursts[number]) / sum(map(len, bursts[number:]))
            until_s = self.spent_s + share * max(0.0, self.plan.budget_s - self.spent_s)
            self._visit(session, visit, bursts[number], until_s)
            if not any(later.layers == visit.layers for later in visits[number + 1 :]):
                self.forget(visit.layers)

    def _visit(
        self,
        session: StepTimedVariantSession,
        visit: StepVisit,
        bursts: Sequence[tuple[Shape, int]],
        until_s: float,
    ) -> None:
        folders = self._written(visit)
        self._start(session, visit)
        if folders:
            self._load(session, visit, folders)
        self._warm_up(session, visit, bursts)
        for number in range(_MOST_ROUNDS):
            if number >= _FEWEST_ROUNDS and self.spent_s + self._expected_s(bursts) > until_s:
                break
            order = bursts if number % 2 == 0 else bursts[::-1]
            found = self._round(session, visit, order)
            for (shape, active), reading in found.items():
                base = found[shape, 0]
                self._keep(visit, _times(reading, shape), _times(base, shape), active)

    def _written(self, visit: StepVisit) -> list[tuple[Path, int]]:
        if not visit.slots:
            return []
        count = max(self.plan.active)
        self._tell(f"{visit}: writing {count} {self.plan.kind}")
        return [self.variants(visit.layers, self.plan.kind, number) for number in range(count)]

    def _start(self, session: StepTimedVariantSession, visit: StepVisit) -> None:
        self._tell(f"{visit}: starting the engine")
        kind = self.plan.kind
        session.load_with_slots(
            self.fingerprints(visit.layers),
            num_layers=len(visit.layers),
            max_batch=self.plan.together.batch,
            max_context_tokens=self.plan.max_context_tokens,
            slots=visit.slots,
            rank=kind.rank if visit.slots else 0,
            delta_format=kind.delta_format if visit.slots else SlotFormat.NONE,
        )

    def _load(
        self, session: StepTimedVariantSession, visit: StepVisit, folders: Sequence[tuple[Path, int]]
    ) -> None:
        self._tell(f"{visit}: loading {len(folders)} {self.plan.kind}")
        begun_s = self.clock()
        loads_s = session.load_variants([folder for folder, _ in folders])
        self.spent_s += self.clock() - begun_s
        self.loads.append(
            VariantLoads(
                num_layers=len(visit.layers),
                file_bytes=max(num_bytes for _, num_bytes in folders),
                held_bytes=0,  # the engine reserved all slots at its start
                loads_s=loads_s[1:] or loads_s,
            )
        )

    def _warm_up(
        self, session: StepTimedVariantSession, visit: StepVisit, bursts: Sequence[tuple[Shape, int]]
    ) -> None:
        """Run each burst once, so that all is compiled that is compiled once.

        Raises:
            NotMeasuredError: the engines compile for too long.
        """
        for shape, active in bursts:
            if self.warm_up_s > _MOST_WARM_UP_S:
                raise NotMeasuredError(
                    f"bursts that warm up took {self.warm_up_s:.0f} s, more than the {_MOST_WARM_UP_S:g} s that "
                    "they may: the engine compiles kernels for minutes, or is too slow"
                )
            self.warm_up_s += self._burst(session, visit, shape, active)[1]

    def _round(
        self, session: StepTimedVariantSession, visit: StepVisit, bursts: Sequence[tuple[Shape, int]]
    ) -> dict[tuple[Shape, int], RunReading]:
        """Run each burst once.

        Raises:
            NotMeasuredError: one is expected to end too late.
        """
        found = {}
        for burst in bursts:
            self._refuse_overrun(self._expected_s([burst]))
            found[burst], took_s = self._burst(session, visit, *burst)
            self._took_s[burst] = min(took_s, self._took_s.get(burst, took_s))
            self.spent_s += took_s
        return found

    def _burst(
        self, session: StepTimedVariantSession, visit: StepVisit, shape: Shape, active: int
    ) -> tuple[RunReading, float]:
        """Run one burst; return its reading and the seconds that it took."""
        of = f"{self.plan.kind}, {active} in a burst" if active else "the base"
        self._tell(f"{visit}, {of}: batch {shape.batch}, {shape.input_tokens} in")
        begun_s = self.clock()
        (reading,) = session.bursts(
            batch=shape.batch,
            input_tokens=shape.input_tokens,
            output_tokens=shape.output_tokens,
            repeat=visit.repeat,
            most=1,
            until_s=0.0,
            active=active,
        )
        self._done += 1
        return reading, self.clock() - begun_s

    def _refuse_overrun(self, seconds: float) -> None:
        """Raise NotMeasuredError if so many seconds more are too many."""
        end_s, limit_s = self.spent_s + seconds, _OVERRUN * self.plan.budget_s
        if end_s > limit_s:
            raise NotMeasuredError(
                f"they would take {end_s:.0f} s at least after the starts and the bursts that warm up, more than "
                f"the {limit_s:.0f} s that they may"
            )

    def _expected_s(self, bursts: Sequence[tuple[Shape, int]]) -> float:
        """Return what ``bursts`` take at least, in any engine; those that were not run yet, what the base took."""
        took_s = self._took_s
        return sum(took_s.get((shape, active), took_s.get((shape, 0), 0.0)) for shape, active in bursts)

    def _keep(
        self,
        visit: StepVisit,
        times: dict[_Composition, _Times],
        base: dict[_Composition, _Times],
        active: int,
    ) -> None:
        """Keep steps that the burst for the base has as well: a prompt may be divided otherwise."""
        if not active:
            for composition, own in base.items():
                self._base.setdefault((visit.layers, visit.slots, composition), []).append(own)
            return
        for composition in times.keys() & base.keys():
            key = visit, composition, min(active, composition.sequences)
            self._pairs.setdefault(key, []).append((times[composition], base[composition]))

    def _tell(self, running: str) -> None:
        of_all = (len(self.plan.bursts) * 2 + len(self.plan.base_bursts)) * (_FEWEST_ROUNDS + 1)
        self.progress(
            ProfileProgress(self._done, max(of_all, self._done), self.spent_s, self.plan.budget_s, running)
        )

    def steps(self) -> tuple[VariantSteps, ...]:
        """Return what was measured, the base in engines with slots next to those without first.

        Raises:
            NotMeasuredError: no step of variants had one of the base next to it.
        """
        if not self._pairs:
            raise NotMeasuredError("prompts were divided into other steps for variants than for the base")
        found = []
        for (layers, slots, composition), own in self._base.items():
            plain = self._base.get((layers, 0, composition), [])
            if slots and plain:
                repeat = max(1, self.spec.num_layers // len(layers))
                pairs = list(zip(own, plain, strict=False))
                found.append(_steps(StepVisit(layers, repeat, slots), composition, 0, pairs))
        found += [_steps(*key, pairs) for key, pairs in self._pairs.items()]
        return tuple(found)


def _without_slowed(pairs: Sequence[tuple[_Times, _Times]]) -> list[tuple[_Times, _Times]]:
    """Leave out pairs in which a forward took much longer than the shortest: its kernel was compiled."""
    most = [_SLOWED * min(pair[side][0] for pair in pairs) for side in (0, 1)]
    return [pair for pair in pairs if pair[0][0] <= most[0] and pair[1][0] <= most[1]] or list(pairs)


def _times(reading: RunReading, shape: Shape) -> dict[_Composition, _Times]:
    """Return the times of a burst's steps: each one of prompts, and the median one that decodes all requests."""
    found = {
        _Composition(True, step.tokens, step.sequences, number): (step.forward_s, step.lead_s + step.tail_s)
        for number, step in enumerate(step for step in reading.steps if step.prefill_tokens)
    }
    decoding = [step for step in reading.steps if not step.prefill_tokens and step.sequences == shape.batch]
    if settled := decoding[len(decoding) // 2 :]:
        found[_Composition(False, shape.batch, shape.batch, 0)] = (
            statistics.median(step.forward_s for step in settled),
            statistics.median(_rest_s(step) for step in settled),
        )
    return found


def _rest_s(step: StepReading) -> float:
    return step.cadence_s - step.forward_s


def _steps(
    visit: StepVisit, composition: _Composition, active: int, pairs: Sequence[tuple[_Times, _Times]]
) -> VariantSteps:
    pairs = _without_slowed(pairs)
    return VariantSteps(
        num_layers=len(visit.layers),
        repeat=visit.repeat,
        slots=visit.slots,
        active=active,
        tokens=composition.tokens,
        sequences=composition.sequences,
        is_prompt=composition.is_prompt,
        forwards_s=tuple(own[0] for own, _ in pairs),
        base_forwards_s=tuple(base[0] for _, base in pairs),
        rests_s=tuple(own[1] for own, _ in pairs),
        base_rests_s=tuple(base[1] for _, base in pairs),
    )
