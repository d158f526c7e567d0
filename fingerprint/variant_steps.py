"""Driver that measures what variants take on an engine with our step timer: steps of repeated fingerprints.

An engine step of one or two layers is bound by its host, which hides what the kernels of variants add. So each
forward runs as often as the model is deep (``depth_tied_profile``), and what is compared are single steps by their
composition, of variants and of the base in one round on one engine. Three engines are started: the deeper
fingerprint without slots, the same with slots, and the shallower one with fewer slots, by which the parts of a
layer, of a forward and of a slot are told apart (``estimators.measured_variants``). Prompts of one request run at
several lengths, since short ones are at their host's pace (``estimators.prompt_curve``). Lengths for which there
is no time are left out, the longest first; what is left of the budget goes to prompts, which scatter more than
steps. The budget counts the seconds after the starts and without each engine's first round, in which kernels are
compiled.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from fingerprint.config import SlotFormat
from fingerprint.errors import BadInputError, NotMeasuredError, TooLittleTimeError
from fingerprint.measurements import RunReading, StepReading
from fingerprint.model_spec import ModelSpec
from fingerprint.profile import ProfileProgress
from fingerprint.profile_points import Shape
from fingerprint.profile_sessions import StepTimedVariantSession
from fingerprint.variant_measurements import VariantKind, VariantLoads, VariantMeasurement, VariantSteps
from fingerprint.variant_step_plan import BUDGET_S, StepPlan, StepVisit, are_enough

__all__ = ["measure_variant_steps"]

_LONGER = 2.0  # a burst of variants than the base's, until it was run
_SLOWED = 2.0  # a forward of so many times the shortest compiled a kernel
_FEWEST_ROUNDS, _MOST_ROUNDS = 2, 8
# No burst begins that is expected to end after so many times the budget. Where nothing is compiled, warming up is
# half as long as the fewest rounds after it, which is twice the budget in all.
_OVERRUN = 4 / 3
_MOST_WARM_UP_S = 120.0  # of all engines: no burst that warms up begins after it


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
        UnmeasurableError: no fingerprint can be repeated.
        TooLittleTimeError: engines compile for too long, or the fewest rounds take more than 4/3 of the budget.
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
    begun_s: float = field(init=False)
    loads: list[VariantLoads] = field(default_factory=list)
    _done: int = 0
    _left_out: frozenset[Shape] = frozenset()  # prompts
    _took_s: dict[tuple[Shape, int], float] = field(default_factory=dict)  # shortest burst after warming up
    _pairs: dict[_Key, list[tuple[_Times, _Times]]] = field(default_factory=dict)
    # of the base's steps: by fingerprint, whether there were slots, and composition
    _base: dict[tuple[tuple[int, ...], int, _Composition], list[_Times]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.begun_s = self.clock()

    def run_all(self, session: StepTimedVariantSession, visits: Sequence[StepVisit]) -> None:
        """Start each engine and run its bursts; the later ones have what the former left of the budget.

        Raises:
            TooLittleTimeError: the bursts take too long.
        """
        for number, visit in enumerate(visits):
            self._refuse_overrun(self._all_expected_s(visits[number:], longer=1.0))
            self._visit(session, visit, visits[number + 1 :])
            if not any(later.layers == visit.layers for later in visits[number + 1 :]):
                self.forget(visit.layers)

    def _visit(self, session: StepTimedVariantSession, visit: StepVisit, later: Sequence[StepVisit]) -> None:
        folders = self._written(visit)
        self._start(session, visit)
        if folders:
            self._load(session, visit, folders)
        if visit.slots:
            self._warm_up(session, visit, self._bursts(visit))
        else:
            self._choose_lengths(session, visit, (visit, *later))
        until_s = self._until_s(visit, later)
        for number in range(_MOST_ROUNDS):
            bursts = self._bursts(visit) if number < _FEWEST_ROUNDS else self._more_bursts(visit)
            if number >= _FEWEST_ROUNDS and self.spent_s + self._expected_s(bursts) > until_s:
                break
            order = bursts if number % 2 == 0 else bursts[::-1]
            found = self._round(session, visit, order)
            for (shape, active), reading in found.items():
                base = found[shape, 0]
                self._keep(visit, _times(reading, shape), _times(base, shape), active)

    def _bursts(self, visit: StepVisit) -> tuple[tuple[Shape, int], ...]:
        bursts = self.plan.bursts if visit.slots else self.plan.base_bursts
        return tuple((shape, active) for shape, active in bursts if shape not in self._left_out)

    def _more_bursts(self, visit: StepVisit) -> tuple[tuple[Shape, int], ...]:
        """Return the bursts of prompts alone, of which there are more rounds; all, where there are none."""
        bursts = self._bursts(visit)
        return tuple((shape, active) for shape, active in bursts if shape in self.plan.prompts) or bursts

    def _until_s(self, visit: StepVisit, later: Sequence[StepVisit]) -> float:
        """Return when the rounds of ``visit`` end, once it has warmed up: all visits have the fewest rounds, and
        share what is left by what one more round takes.
        """
        own_s = _FEWEST_ROUNDS * self._expected_s(self._bursts(visit))
        spare_s = self.plan.budget_s - self.spent_s - own_s - self._all_expected_s(later)
        more_s = [self._expected_s(self._more_bursts(one)) for one in (visit, *later)]
        return self.spent_s + own_s + max(0.0, spare_s) * more_s[0] / sum(more_s)

    def _choose_lengths(
        self, session: StepTimedVariantSession, visit: StepVisit, visits: Sequence[StepVisit]
    ) -> None:
        """Warm up the engine without slots, and leave out the prompts for which the budget has no time.

        What a burst takes is known of its second run.
        """
        prompts = self.plan.prompts
        self._left_out = frozenset(prompts)
        self._settle(session, visit, self._bursts(visit))
        for number, shape in enumerate(prompts):
            fewer = self._left_out
            self._left_out = frozenset(prompts[number + 1 :])
            if number:  # as long for a token as the shorter one
                shorter = prompts[number - 1]
                expected_s = self._took_s[shorter, 0] * shape.input_tokens / shorter.input_tokens
                self._took_s[shape, 0] = expected_s
            if self._all_expected_s(visits) <= self.plan.budget_s:
                self._took_s.pop((shape, 0), None)
                self._settle(session, visit, [(shape, 0)])
            if self._all_expected_s(visits) > self.plan.budget_s:
                self._left_out = fewer
                break
        if not are_enough([shape.input_tokens for shape in prompts if shape not in self._left_out]):
            self._left_out = frozenset(prompts)

    def _all_expected_s(self, visits: Sequence[StepVisit], longer: float = _LONGER) -> float:
        """Return what the fewest rounds of all visits take."""
        return _FEWEST_ROUNDS * sum(self._expected_s(self._bursts(visit), longer) for visit in visits)

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
            kv_tokens=self.plan.kv_tokens,
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

    def _settle(
        self, session: StepTimedVariantSession, visit: StepVisit, bursts: Sequence[tuple[Shape, int]]
    ) -> None:
        """Warm up ``bursts``, and run each once more to know what it takes."""
        self._warm_up(session, visit, bursts)
        self._round(session, visit, bursts)

    def _warm_up(
        self, session: StepTimedVariantSession, visit: StepVisit, bursts: Sequence[tuple[Shape, int]]
    ) -> None:
        """Run each burst once, so that all is compiled that is compiled once.

        Raises:
            TooLittleTimeError: the engines compile for too long.
        """
        for shape, active in bursts:
            if self.warm_up_s > _MOST_WARM_UP_S:
                raise TooLittleTimeError(
                    f"bursts that warm up took {self.warm_up_s:.0f} s, more than the {_MOST_WARM_UP_S:g} s that "
                    "they may: the engine compiles kernels for minutes, or is too slow; try again, for kernels "
                    "that were compiled are kept"
                )
            self.warm_up_s += self._burst(session, visit, shape, active, "warming up, ")[1]

    def _round(
        self, session: StepTimedVariantSession, visit: StepVisit, bursts: Sequence[tuple[Shape, int]]
    ) -> dict[tuple[Shape, int], RunReading]:
        """Run each burst once.

        Raises:
            TooLittleTimeError: one is expected to end too late.
        """
        found = {}
        for burst in bursts:
            self._refuse_overrun(self._expected_s([burst]))
            found[burst], took_s = self._burst(session, visit, *burst)
            self._took_s[burst] = min(took_s, self._took_s.get(burst, took_s))
            self.spent_s += took_s
        return found

    def _burst(
        self, session: StepTimedVariantSession, visit: StepVisit, shape: Shape, active: int, why: str = ""
    ) -> tuple[RunReading, float]:
        """Run one burst; return its reading and the seconds that it took."""
        of = f"{self.plan.kind}, {active} in a burst" if active else "the base"
        self._tell(f"{visit}, {why}{of}: batch {shape.batch}, {shape.input_tokens} in")
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
        """Raise TooLittleTimeError if so many seconds more are too many."""
        end_s, limit_s = self.spent_s + seconds, _OVERRUN * self.plan.budget_s
        if end_s > limit_s:
            raise TooLittleTimeError(
                f"they would take {end_s:.0f} s at least after the starts and the bursts that warm up, more than "
                f"the {limit_s:.0f} s that they may; {_how_to_fit(end_s)}"
            )

    def _expected_s(self, bursts: Sequence[tuple[Shape, int]], longer: float = _LONGER) -> float:
        """Return what ``bursts`` take at least, in any engine; those not run yet, ``longer`` times the base's."""
        took_s = self._took_s
        return sum(took_s.get((shape, active), longer * took_s.get((shape, 0), 0.0)) for shape, active in bursts)

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
        elapsed_s = self.clock() - self.begun_s
        self.progress(ProfileProgress(self._done, max(of_all, self._done), elapsed_s, self.plan.budget_s, running))

    def steps(self) -> tuple[VariantSteps, ...]:
        """Return what was measured, the base in engines with slots next to those without first.

        Raises:
            NotMeasuredError: no step of variants had one of the base next to it.
        """
        if not self._pairs:
            raise NotMeasuredError(
                "prompts were divided into other steps for variants than for the base, so that no step can be "
                "compared; how they are divided is the host's pace: try again"
            )
        found = []
        for (layers, slots, composition), own in self._base.items():
            plain = self._base.get((layers, 0, composition), [])
            if slots and plain:
                repeat = max(1, self.spec.num_layers // len(layers))
                pairs = list(zip(own, plain, strict=False))
                found.append(_steps(StepVisit(layers, repeat, slots), composition, 0, pairs))
        found += [_steps(*key, pairs) for key, pairs in self._pairs.items()]
        return tuple(found)


def _how_to_fit(seconds: float) -> str:
    """Return what to change where so many seconds are too many."""
    most_s = _OVERRUN * BUDGET_S
    if seconds <= most_s:
        return "give more: `iserve profile --max-seconds`, or ISERVE_PROFILE_SECONDS for a deploy"
    return (
        f"no profile gives them more than {most_s:.0f} s: ask for a smaller --batch or --input-tokens, or try "
        "again when the machine has less other work"
    )


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
