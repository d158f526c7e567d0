"""Driver that measures what variants take: fingerprints of one and two layers with slots filled.

In every round each burst for variants runs next to the same burst for the base alone, on the same loaded
fingerprint, so that what they differ by is neither a load's nor a slow drift of the machine. Visits go over the
fingerprints forth and back. In each, the base runs before any variant is loaded as well: with slots filled, an
engine may take longer for it. Bursts differ in batch, in answer and in distinct variants, by which the parts are
told apart (``fingerprint.estimators.measured_variants``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from fingerprint.config import ADAPTER_RANKS, Workload
from fingerprint.errors import BadInputError, ConfigError, TooLittleTimeError
from fingerprint.measurements import RankMemory
from fingerprint.model_spec import ModelSpec
from fingerprint.profile import ProfileProgress
from fingerprint.profile_plan import fingerprint_cuts
from fingerprint.profile_points import Shape
from fingerprint.profile_sessions import VariantSession
from fingerprint.variant_measurements import VariantKind, VariantLoads, VariantMeasurement, VariantRuns

__all__ = ["VariantPlan", "measure_variants", "variant_plan"]

MOST_ACTIVE = 4  # distinct variants of a burst: loads and files of more would take longer than the bursts
_MOST_TOKENS = 2048  # of the prompts of a burst
_LONGEST_OUTPUT = 17
_ROUNDS, _FEWEST_ROUNDS, _MOST_ROUNDS = 3, 2, 40  # of a visit: at least, at least where time is short, at most
_OVERRUN = 2.0  # no burst begins that is expected to end after so many times the budget
_LEAST_BUDGET_S = 5.0  # in less, not even a small model is measured
_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class VariantPlan:
    """Bursts of a measurement, and its time budget."""

    kind: VariantKind
    batches: tuple[int, ...]  # 1, and the largest
    input_tokens: int
    output_tokens: tuple[int, int]  # the shorter first
    active: int  # distinct variants at most
    budget_s: float  # a visit of each fingerprint may take twice as long, or 10 s

    def __post_init__(self) -> None:
        if not 1 <= self.active <= max(self.batches):
            raise ConfigError(f"bursts of {max(self.batches)} ask for as many variants at most, got {self.active}")

    @property
    def bursts(self) -> tuple[tuple[Shape, int], ...]:
        """Shapes of the bursts, each with the distinct variants that it asks for; those of the base first."""
        most = max(self.batches)
        actives = [(batch, 0) for batch in self.batches] + [(batch, 1) for batch in self.batches]
        if self.active > 1:
            actives.append((most, self.active))
        return tuple(
            (Shape(batch, self.input_tokens, outputs), active)
            for batch, active in actives
            for outputs in self.output_tokens
        )


def variant_plan(spec: ModelSpec, workload: Workload, kind: VariantKind, *, budget_s: float) -> VariantPlan:
    """Return the plan for ``workload``: one request and its batch (4 where that is 1), its prompt within bounds.

    Raises:
        ConfigError: a context too short to generate in.
    """
    if spec.max_context_tokens < 3:
        raise ConfigError(f"a context of {spec.max_context_tokens} tokens is too short to profile; it needs 3")
    batch = workload.batch if workload.batch > 1 else 4
    output = max(2, min(_LONGEST_OUTPUT, workload.output_tokens, spec.max_context_tokens // 2))
    tokens = max(1, min(workload.input_tokens, spec.max_context_tokens - output, _MOST_TOKENS // batch))
    return VariantPlan(
        kind=kind,
        batches=(1, batch),
        input_tokens=tokens,
        output_tokens=(1, output),
        active=min(MOST_ACTIVE, batch),
        budget_s=budget_s,
    )


def measure_variants(
    spec: ModelSpec,
    open_session: Callable[[], VariantSession],
    fingerprints: Callable[[Sequence[int]], Path],
    variants: Callable[[Sequence[int], VariantKind, int], tuple[Path, int]],
    plan: VariantPlan,
    *,
    forget: Callable[[Sequence[int]], None] = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
    progress: Callable[[ProfileProgress], None] = lambda _: None,
) -> VariantMeasurement:
    """Measure variants of ``plan.kind`` in fingerprints of ``spec``. The session is closed whatever happens.

    What an engine refuses as wrong is a measurement with its failure, so that it is not tried at each plan anew.
    Any other failure may be gone the next time and is raised.

    Args:
        open_session: launches a worker at tp = pp = 1.
        fingerprints: the checkpoint directory that holds these layers of the model.
        variants: the folder of a variant of these layers by its number, and the bytes of its tensors.
        forget: called with the layers whose variants are not needed any more.
        clock: seconds that only grow.
        progress: called before every load and burst; what it raises ends the measurement.

    Raises:
        TooLittleTimeError: one visit of each fingerprint would take more than twice the budget (or 10 s).
        IserveError: a failure that need not happen again.
    """
    driver = _Driver(spec, fingerprints, variants, plan, forget, clock, progress)
    failure = ""
    try:
        session = open_session()
        try:
            driver.run_all(session)
        finally:
            session.close()
    except BadInputError as error:
        failure = str(error)
    return VariantMeasurement(
        kind=plan.kind,
        slots=plan.active,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        spent_s=clock() - driver.started_s,
        runs=() if failure else driver.runs(),
        loads=() if failure else driver.loads(),
        failure=failure,
    )


@dataclass
class _Driver:
    spec: ModelSpec
    fingerprints: Callable[[Sequence[int]], Path]
    variants: Callable[[Sequence[int], VariantKind, int], tuple[Path, int]]
    plan: VariantPlan
    forget: Callable[[Sequence[int]], None]
    clock: Callable[[], float]
    progress: Callable[[ProfileProgress], None]
    done: int = 0
    # by layers, shape and distinct variants: seconds next to those of the base
    _pairs: dict[tuple[int, Shape, int], list[tuple[float, float]]] = field(default_factory=dict)
    _loads_s: dict[int, list[float]] = field(default_factory=dict)
    _bytes: dict[int, tuple[int, int]] = field(default_factory=dict)  # of a variant's file, and held
    _last_s: dict[tuple[int, Shape, int], float] = field(default_factory=dict)  # the first of a kind may compile
    _visit_s: dict[int, float] = field(default_factory=dict)  # of the fewest rounds, by layers

    def __post_init__(self) -> None:
        self.started_s = self.clock()
        self.cuts = fingerprint_cuts(self.spec, 1)[:2]  # of further kinds, linears are as large

    def run_all(self, session: VariantSession) -> None:
        """Visit each fingerprint once, and on the way back again where there is time."""
        for number, cut in enumerate(self.cuts):
            left_s = self.plan.budget_s - self._elapsed_s
            self._visit(session, cut, self._elapsed_s + left_s / (2 * len(self.cuts) - number))
        for number, cut in enumerate(reversed(self.cuts)):
            left_s = self.plan.budget_s - self._elapsed_s
            if self._visit_s[len(cut)] < left_s:
                with suppress(TooLittleTimeError):  # it took longer than the first one: what was read counts
                    self._visit(session, cut, self._elapsed_s + left_s / (len(self.cuts) - number))
            self.forget(cut)

    @property
    def _elapsed_s(self) -> float:
        return self.clock() - self.started_s

    def _visit(self, session: VariantSession, cut: Sequence[int], until_s: float) -> None:
        bursts, k, started_s = self.plan.bursts, len(cut), self._elapsed_s
        base = [shape for shape, active in bursts if not active]
        self._tell(f"{k} layers: writing {self.plan.active} {self.plan.kind}")
        folders = [self.variants(cut, self.plan.kind, number) for number in range(self.plan.active)]
        file_bytes = max(num_bytes for _, num_bytes in folders)
        self._tell(f"{k} layers: loading")
        session.load_with_slots(
            self.fingerprints(cut),
            num_layers=k,
            max_batch=max(self.plan.batches),
            max_context_tokens=self.plan.input_tokens + self.plan.output_tokens[1],
            slots=self.plan.active,
            rank=self.plan.kind.rank or ADAPTER_RANKS[0],
            delta_mib=file_bytes * 5 // 4 // _MIB + 1 if self.plan.kind.is_delta else 0,
        )
        for shape in base:
            self._run(session, k, shape, 0)  # warms up
        before = [[self._run(session, k, shape, 0) for shape in base]]
        rounds = self._rounds_that_fit(cut)
        before += [[self._run(session, k, shape, 0) for shape in base] for _ in range(rounds - 1)]
        held = _held_bytes(session.memory())
        self._tell(f"{k} layers: loading {self.plan.active} {self.plan.kind}")
        loads_s = session.load_variants([folder for folder, _ in folders])
        self._loads_s.setdefault(k, []).extend(loads_s[1:] or loads_s)  # the first may read the base as well
        self._bytes[k] = file_bytes, (_held_bytes(session.memory()) - held) // self.plan.active
        for shape, active in bursts:
            self._run(session, k, shape, active)
        for number in range(_MOST_ROUNDS):
            if number >= rounds and self._elapsed_s + self._expected_s(k, bursts) > until_s:
                break
            order = bursts if number % 2 == 0 else bursts[::-1]
            took_s = {(shape, active): self._run(session, k, shape, active) for shape, active in order}
            for (shape, active), run_s in took_s.items():
                if active:
                    self._keep(k, shape, active, run_s, took_s[shape, 0])
                elif number < len(before):
                    self._keep(k, shape, active, run_s, before[number][base.index(shape)])
            if number == rounds - 1:
                self._visit_s[k] = self._elapsed_s - started_s

    @property
    def _limit_s(self) -> float:
        return _OVERRUN * max(_LEAST_BUDGET_S, self.plan.budget_s)

    def _expected_s(self, num_layers: int, bursts: Sequence[tuple[Shape, int]]) -> float:
        """Return what ``bursts`` took last; those that were not run yet, what the base took."""
        last_s = self._last_s
        return sum(last_s.get((num_layers, s, a), last_s.get((num_layers, s, 0), 0.0)) for s, a in bursts)

    def _rounds_that_fit(self, cut: Sequence[int]) -> int:
        """Return the rounds that a visit of ``cut`` runs at least, from how long its bursts for the base took.

        Raises:
            TooLittleTimeError: not even the fewest fit, and the fingerprints after it, with as long bursts per
                layer.
        """
        bursts, left_s = self.plan.bursts, self._limit_s - self._elapsed_s
        base_s = self._expected_s(len(cut), [(shape, active) for shape, active in bursts if not active])
        all_s = self._expected_s(len(cut), bursts)
        later = sum(len(one) for one in self.cuts if len(one) not in self._bytes and one != cut) / len(cut)
        needed_s = 0.0
        for rounds in range(_ROUNDS, _FEWEST_ROUNDS - 1, -1):
            whole_s = (rounds + 1) * (base_s + all_s)
            needed_s = whole_s - 2 * base_s + later * whole_s
            if needed_s <= left_s:
                return rounds
        raise self._out_of_time(self._elapsed_s + needed_s)

    def _out_of_time(self, needed_s: float) -> TooLittleTimeError:
        return TooLittleTimeError(
            f"they would take {needed_s:.0f} s at least, more than the {self._limit_s:g} s that they may; "
            "give more: `iserve profile --max-seconds`, or ISERVE_PROFILE_SECONDS for a deploy"
        )

    def _keep(self, num_layers: int, shape: Shape, active: int, run_s: float, base_s: float) -> None:
        self._pairs.setdefault((num_layers, shape, active), []).append((run_s, base_s))

    def _run(self, session: VariantSession, num_layers: int, shape: Shape, active: int) -> float:
        end_s = self._elapsed_s + self._expected_s(num_layers, [(shape, active)])
        if end_s > self._limit_s:
            raise self._out_of_time(end_s)
        of = f"{self.plan.kind}, {active} in a burst" if active else "the base"
        self._tell(f"{num_layers} layers, {of}: batch {shape.batch}, {shape.output_tokens} out")
        started_s = self._elapsed_s
        reading = session.run_variants(
            batch=shape.batch,
            input_tokens=shape.input_tokens,
            output_tokens=shape.output_tokens,
            active=active,
        )
        self.done += 1
        self._last_s[num_layers, shape, active] = self._elapsed_s - started_s
        return reading.e2e_s

    def _tell(self, running: str) -> None:
        least = len(self.cuts) * len(self.plan.bursts) * (_ROUNDS + 2)
        total = max(least, self.done)
        self.progress(ProfileProgress(self.done, total, self._elapsed_s, self.plan.budget_s, running))

    def runs(self) -> tuple[VariantRuns, ...]:
        return tuple(
            VariantRuns(
                num_layers=k,
                active=active,
                batch=shape.batch,
                input_tokens=shape.input_tokens,
                output_tokens=shape.output_tokens,
                runs_s=tuple(run_s for run_s, _ in pairs),
                base_runs_s=tuple(base_s for _, base_s in pairs),
            )
            for (k, shape, active), pairs in self._pairs.items()
        )

    def loads(self) -> tuple[VariantLoads, ...]:
        return tuple(
            VariantLoads(num_layers=k, file_bytes=file_bytes, held_bytes=held, loads_s=tuple(self._loads_s[k]))
            for k, (file_bytes, held) in self._bytes.items()
        )


def _held_bytes(ranks: Sequence[RankMemory]) -> int:
    return sum(rank.weights_bytes for rank in ranks)
