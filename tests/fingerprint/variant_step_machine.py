"""A machine with a step timer on which variants take known times, behind a strict ``StepTimedVariantSession``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fingerprint.config import DeploymentConfig, SlotFormat, Workload
from fingerprint.engines import GRAPH_TOKENS
from fingerprint.errors import IserveError
from fingerprint.estimators.measured_variants import MeasuredVariantCost, measured_cost
from fingerprint.measurements import RunReading, StepReading
from fingerprint.model_spec import ModelSpec
from fingerprint.profile import ProfileProgress
from fingerprint.variant_measurements import VariantKind, VariantMeasurement
from fingerprint.variant_step_plan import step_plan
from fingerprint.variant_steps import measure_variant_steps
from tests.fingerprint.synthetic_machine import FakeClock, llama

RANK_16, INT2 = VariantKind(16), VariantKind(delta_format=SlotFormat.INT2)
WORK = Workload(batch=32, input_tokens=2048, output_tokens=129)
LAYERS, START_S = 32, 60.0
LENGTHS = (512, 640, 2048, 4096, 8192)  # of prompts of one request, in tokens


@dataclass(frozen=True, kw_only=True)
class StepTruth:
    """True seconds.

    Of a layer of a forward: per variant, per row, per row and slot, once. Of a forward: once, per variant. Of a
    step outside of its forward: once, per variant, per sequence, per sequence and slot. Of rows of the base in an
    engine with slots: of a layer, of a layer and row, of a step, of a step and sequence.
    """

    base_s: tuple[float, float, float] = (1e-4, 1.2e-6, 5e-5)  # of a layer, of its row, of a forward
    rest_s: tuple[float, float] = (2e-5, 1e-4)  # before a forward and after it
    step_layer: tuple[float, float, float, float] = (1.3e-5, 9e-7, 5e-8, 1e-5)
    prompt_layer: tuple[float, float, float, float] = (2e-5, 5e-7, 1e-8, 1.2e-5)
    forward: tuple[float, float] = (6e-6, 2e-6)
    forward_row_s: float = 0.0  # of a forward's row: of embeddings, which deltas change
    rest: tuple[float, float, float, float] = (3e-5, 4e-6, 1e-6, 2e-7)
    slots: tuple[float, float, float, float] = (2e-6, 1e-8, 8e-5, 1e-7)
    load: tuple[float, float] = (4e-3, 5e-2)  # of a layer, all else
    host_s: tuple[float, float, float] = (0.0, 0.0, 0.0)  # least of a prompt's layer: no slots, slots, variants
    layer_bytes: int = 1000

    def added_step_s(self, layers: int, rows: float, active: float, slots: int) -> float:
        return self.added_s(self.step_layer, layers, rows, rows, active, slots)

    def added_prompts_s(self, layers: int, tokens: float, batch: int, active: float, slots: int) -> float:
        """Return what is added to a step of prompts: host and device wait for the slower of the two."""
        _, rest_s = self.parts(self.prompt_layer, layers, tokens, batch, active, slots)
        with_s, without_s = (
            self.forward_s(True, layers, tokens, batch, *one) for one in ((active, slots), (0, 0))
        )
        return with_s - without_s + rest_s

    def forward_s(
        self, is_prompt: bool, layers: int, tokens: float, batch: float, active: float, slots: int
    ) -> float:
        """Return the time of one forward."""
        base_s, token_s, once_s = self.base_s
        layer = self.prompt_layer if is_prompt else self.step_layer
        added_s, _ = self.parts(layer, layers, tokens, batch, active, slots)
        is_launched = is_prompt and tokens > GRAPH_TOKENS
        host_s = self.host_s[2 if active else 1 if slots else 0] if is_launched else 0.0
        return max(layers * host_s, layers * (base_s + token_s * tokens) + once_s + added_s)

    def added_s(
        self,
        layer: tuple[float, float, float, float],
        layers: int,
        rows: float,
        batch: float,
        active: float,
        slots: int,
    ) -> float:
        """Return what is added to a step of the whole model, over an engine without slots."""
        forward_s, rest_s = self.parts(layer, layers, rows, batch, active, slots)
        return forward_s + rest_s

    def parts(
        self,
        layer: tuple[float, float, float, float],
        layers: int,
        rows: float,
        batch: float,
        active: float,
        slots: int,
    ) -> tuple[float, float]:
        """Return what is added to one forward, and outside of it."""
        forward_s = rest_s = 0.0
        if slots:
            forward_s += layers * (self.slots[0] + self.slots[1] * rows)
            rest_s += self.slots[2] + self.slots[3] * batch
        if active:
            forward_s += layers * (layer[0] * active + rows * (layer[1] + layer[2] * slots) + layer[3])
            forward_s += self.forward[0] + self.forward[1] * active + self.forward_row_s * rows
            rest_s += self.rest[0] + self.rest[1] * active + batch * (self.rest[2] + self.rest[3] * slots)
        return forward_s, rest_s


# All launches of a prompt take 29 ms without slots, 38 with them, and 109 with variants.
HOSTED = StepTruth(base_s=(1e-5, 7e-7, 5e-5), host_s=(9e-4, 1.2e-3, 3.4e-3))


@dataclass
class StepMachine:
    """Opens sessions; remembers all that they were asked for.

    Args:
        alone_first: requests of a burst whose prompts are computed before the rest, as where they arrive one by
            one; by the number of the burst.
        compile_s: what the first burst for so many variants takes longer, in each engine.
        step_tokens: that one step takes at most.
        host_scatter: by which the host's pace is slower or quicker in a step, as a share of it.
    """

    spec: ModelSpec = field(default_factory=lambda: llama(LAYERS, max_context_tokens=16384))
    truth: StepTruth = StepTruth()
    noise: float = 0.0
    seed: int = 0
    failing: IserveError | None = None
    alone_first: Callable[[int], int] = lambda burst: 1
    compile_s: float = 0.0
    step_tokens: int = 1 << 20
    host_scatter: float = 0.0

    def __post_init__(self) -> None:
        self.clock, self.random = FakeClock(), np.random.default_rng(self.seed)
        self.log: list[tuple[object, ...]] = []
        self.progress: list[ProfileProgress] = []
        self.slowed: set[int] = set()  # bursts by their number, in whose prompts and steps kernels are compiled
        self.session: StepMachineSession | None = None

    def open(self) -> StepMachineSession:
        assert self.session is None or self.session.closed
        self.session = StepMachineSession(self)
        return self.session

    def fingerprint(self, layers: Sequence[int]) -> Path:
        return Path("/fingerprints") / str(len(layers))

    def variant(self, layers: Sequence[int], kind: VariantKind, number: int) -> tuple[Path, int]:
        return self.fingerprint(layers) / f"{kind}-{number}", self.truth.layer_bytes * len(layers)

    def measure(
        self, kind: VariantKind = RANK_16, budget_s: float = 30.0, work: Workload = WORK
    ) -> VariantMeasurement:
        return measure_variant_steps(
            self.spec,
            self.open,
            self.fingerprint,
            self.variant,
            step_plan(self.spec, work, kind, budget_s=budget_s),
            forget=lambda layers: self.log.append(("forget", len(layers))),
            clock=self.clock,
            progress=self.progress.append,
        )


class StepMachineSession:
    num_devices = 1

    def __init__(self, machine: StepMachine) -> None:
        self.machine, self.closed = machine, False
        self.layers = self.slots = self.loaded = self.number = 0

    def load_with_slots(
        self,
        checkpoint: Path,
        *,
        num_layers: int,
        max_batch: int,
        max_context_tokens: int,
        slots: int,
        rank: int,
        delta_mib: int = 0,
        delta_format: SlotFormat = SlotFormat.NONE,
        kv_tokens: int = 0,
    ) -> None:
        assert not self.closed
        assert checkpoint.name == str(num_layers)
        assert not delta_mib, "slots by size"
        has_deltas = delta_format is not SlotFormat.NONE
        assert bool(slots) == (rank in (8, 16, 32, 64) or has_deltas)
        self.layers, self.slots, self.loaded = num_layers, slots, 0
        self.compiled: set[tuple[int, int]] = set()
        self.max_batch, self.max_context_tokens = max_batch, max_context_tokens
        self.kv_tokens = kv_tokens or max_batch * max_context_tokens
        self.machine.clock.now += START_S
        self.machine.log.append(("start", num_layers, slots, rank, str(delta_format)))

    def load_variants(self, folders: Sequence[Path]) -> tuple[float, ...]:
        assert not self.closed
        assert self.slots, "variants in an engine without slots"
        assert not self.loaded
        assert len(folders) <= self.slots, "a step would copy a variant into a slot"
        if self.machine.failing:
            raise self.machine.failing
        self.loaded = len(folders)
        truth = self.machine.truth
        each_s = self.layers * truth.load[0] + truth.load[1]
        loads_s = (each_s * 10, *(each_s for _ in folders[1:]))  # the first compiles and reads
        self.machine.clock.now += sum(loads_s)
        self.machine.log.append(("variants", *(folder.name for folder in folders)))
        return loads_s

    def bursts(
        self,
        *,
        batch: int,
        input_tokens: int,
        output_tokens: int,
        repeat: int = 1,
        most: int,
        until_s: float,
        steps: bool = True,
        agree_within: float | None = None,
        agree_limit_s: float = 0.0,
        active: int = 0,
    ) -> tuple[RunReading, ...]:
        assert not self.closed
        assert steps
        assert 1 <= batch <= self.max_batch
        assert input_tokens + output_tokens <= self.max_context_tokens
        assert batch * (input_tokens + output_tokens) <= self.kv_tokens
        assert active <= min(self.loaded, batch)
        assert (most, until_s) == (1, 0.0)
        self.number += 1
        first = min(batch, self.machine.alone_first(self.number))
        found, left = [], first * input_tokens
        while left:
            tokens = min(left, self.machine.step_tokens)
            found.append(self._step(tokens, first, tokens, active, repeat))
            left -= tokens
        if first < batch:  # those whose prompts are done decode in the next step
            prompts = (batch - first) * input_tokens
            found.append(self._step(prompts + first, batch, prompts, active, repeat))
        found += [self._step(batch, batch, 0, active, repeat) for _ in range(output_tokens - 1)]
        e2e_s = sum(step.cadence_s for step in found)
        e2e_s += 0.0 if (batch, active) in self.compiled else self.machine.compile_s
        self.compiled.add((batch, active))
        self.machine.clock.now += e2e_s
        self.machine.log.append(("burst", self.layers, self.slots, batch, active, repeat))
        return (RunReading(e2e_s=e2e_s, device_s=e2e_s, host_s=0.0, steps=tuple(found)),)

    def _step(self, tokens: int, sequences: int, prefill: int, active: int, repeat: int) -> StepReading:
        truth, k, active = self._paced(), self.layers, min(active, sequences)
        _, rest_s = truth.parts(truth.step_layer, k, tokens, sequences, active, self.slots)
        forward_s = repeat * truth.forward_s(prefill > 0, k, tokens, sequences, active, self.slots)
        forward_s *= 20.0 if self.number in self.machine.slowed else 1.0
        return StepReading(
            tokens=tokens,
            sequences=sequences,
            prefill_tokens=prefill,
            context_tokens=0,
            attention_pairs=0,
            gap_s=5e-3 if prefill else 1e-6,  # requests arrive
            lead_s=(truth.rest_s[0] + rest_s) * self._jitter(),
            forward_s=forward_s * self._jitter(),
            tail_s=truth.rest_s[1] * self._jitter(),
        )

    def _paced(self) -> StepTruth:
        """Return the truth with the host's pace of one step."""
        truth, scatter = self.machine.truth, self.machine.host_scatter
        if not scatter:
            return truth
        paced = 1.0 + scatter * float(self.machine.random.uniform(-1, 1))
        none, slots, variants = truth.host_s
        return replace(truth, host_s=(paced * none, paced * slots, paced * variants))

    def _jitter(self) -> float:
        return max(0.1, 1.0 + self.machine.noise * float(self.machine.random.standard_normal()))

    def load(self, *_: object, **__: object) -> None:
        raise AssertionError("a load without slots is one with 0 of them")

    def run_variants(self, **_: int) -> RunReading:
        raise AssertionError("bursts by the wall clock hide what kernels add")

    def memory(self) -> tuple[Any, ...]:
        return ()

    def close(self) -> None:
        self.closed = True


def slots_of(count: int) -> DeploymentConfig:
    return DeploymentConfig(engine="vllm", adapter_slots=count, adapter_rank=16)


def delta_slots_of(count: int) -> DeploymentConfig:
    return DeploymentConfig(engine="vllm", adapter_slots=count, delta_format=SlotFormat.INT2)


def cost_of(measured: VariantMeasurement, config: DeploymentConfig) -> MeasuredVariantCost:
    found = measured_cost([measured], LAYERS, config)
    assert found is not None
    return found
