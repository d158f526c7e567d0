"""A machine on which variants take known times, behind a strict ``VariantSession``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from fingerprint.config import SlotFormat, Workload
from fingerprint.errors import IserveError
from fingerprint.measurements import RankMemory, RunReading
from fingerprint.model_spec import ModelSpec
from fingerprint.variant_measurements import VariantKind, VariantMeasurement
from fingerprint.variant_profile import measure_variants, variant_plan
from tests.fingerprint.synthetic_machine import FakeClock, llama

RANK_8, INT2 = VariantKind(8), VariantKind(delta_format=SlotFormat.INT2)
WORK = Workload(batch=8, input_tokens=64, output_tokens=33)


@dataclass(frozen=True, kw_only=True)
class VariantTruth:
    """True seconds. Of a layer: per variant, per row. Outside the layers: once, and per variant."""

    base_s: tuple[float, float, float] = (1e-3, 2e-5, 3e-3)  # a layer's step, its prompt token, all else
    step: tuple[float, float, float, float] = (2e-4, 3e-5, 1e-4, 4e-4)
    prompt: tuple[float, float, float, float] = (3e-4, 2e-6, 2e-4, 5e-4)
    loaded: tuple[float, float] = (1e-5, 2e-5)  # of a step with variants loaded: a layer, all else
    load: tuple[float, float] = (4e-3, 1e-2)  # a layer, all else
    layer_bytes: int = 1000
    other_bytes: int = 300
    file_layer_bytes: int | None = None  # of a file; None: as a variant holds

    def file_bytes(self, layers: int) -> int:
        if self.file_layer_bytes is not None:
            return layers * self.file_layer_bytes
        return layers * self.layer_bytes + self.other_bytes

    def added_step_s(self, layers: int, rows: float, active: float) -> float:
        return self._added(self.step, layers, rows, active) + self.loaded_s(layers)

    def added_prompts_s(self, layers: int, tokens: float, active: float) -> float:
        return self._added(self.prompt, layers, tokens, active) + self.loaded_s(layers)

    def loaded_s(self, layers: int) -> float:
        return layers * self.loaded[0] + self.loaded[1]

    @staticmethod
    def _added(parts: tuple[float, float, float, float], layers: int, rows: float, active: float) -> float:
        variant, row, once, each = parts
        return layers * (variant * active + row * rows) + once + each * active if active else 0.0


@dataclass
class VariantMachine:
    """Opens sessions; remembers all that they were asked for."""

    spec: ModelSpec = field(default_factory=llama)
    truth: VariantTruth = VariantTruth()
    noise: float = 0.0
    seed: int = 0
    failing: IserveError | None = None

    def __post_init__(self) -> None:
        self.clock, self.random = FakeClock(), np.random.default_rng(self.seed)
        self.log: list[tuple[object, ...]] = []
        self.session: VariantMachineSession | None = None

    def open(self) -> VariantMachineSession:
        assert self.session is None or self.session.closed
        self.session = VariantMachineSession(self)
        return self.session

    def fingerprint(self, layers: Sequence[int]) -> Path:
        return Path("/fingerprints") / str(len(layers))

    def variant(self, layers: Sequence[int], kind: VariantKind, number: int) -> tuple[Path, int]:
        return self.fingerprint(layers) / f"{kind}-{number}", self.truth.file_bytes(len(layers))

    def measure(self, kind: VariantKind = RANK_8, budget_s: float = 60.0) -> VariantMeasurement:
        plan = variant_plan(self.spec, WORK, kind, budget_s=budget_s)
        return measure_variants(
            self.spec,
            self.open,
            self.fingerprint,
            self.variant,
            plan,
            forget=lambda layers: self.log.append(("forget", len(layers))),
            clock=self.clock,
        )


class VariantMachineSession:
    def __init__(self, machine: VariantMachine) -> None:
        self.machine, self.closed = machine, False
        self.layers = self.slots = self.loaded = 0

    def load_with_slots(
        self,
        checkpoint: Path,
        *,
        num_layers: int,
        max_batch: int,
        max_context_tokens: int,
        slots: int,
        rank: int,
        delta_mib: int,
        kv_tokens: int = 0,
    ) -> None:
        assert not self.closed
        assert not kv_tokens, "room for less than each sequence's context"
        assert checkpoint.name == str(num_layers)
        assert slots
        assert rank in (8, 16, 32, 64)
        self.layers, self.slots, self.loaded = num_layers, slots, 0
        self.max_batch, self.max_context_tokens = max_batch, max_context_tokens
        self.machine.clock.now += 0.1
        self.machine.log.append(("load", num_layers, rank, delta_mib))

    def load_variants(self, folders: Sequence[Path]) -> tuple[float, ...]:
        assert not self.closed
        assert self.layers, "variants before a fingerprint"
        assert not self.loaded
        if self.machine.failing:
            raise self.machine.failing
        truth = self.machine.truth
        self.loaded = len(folders)
        self.machine.clock.now += 0.01 * len(folders)
        self.machine.log.append(("variants", *(folder.name for folder in folders)))
        each_s = self.layers * truth.load[0] + truth.load[1]
        return (each_s * 10, *(each_s * self._jitter() for _ in folders[1:]))  # the first reads the base as well

    def run_variants(self, *, batch: int, input_tokens: int, output_tokens: int, active: int) -> RunReading:
        assert not self.closed
        assert 1 <= batch <= self.max_batch
        assert input_tokens + output_tokens <= self.max_context_tokens
        assert active <= min(self.loaded, self.slots, batch)
        truth, k, steps = self.machine.truth, self.layers, output_tokens - 1
        step_s, token_s, rest_s = truth.base_s
        e2e_s = k * token_s * batch * input_tokens + rest_s + steps * (k * step_s + rest_s)
        if self.loaded:
            e2e_s += truth.loaded_s(k) * output_tokens
        if active:
            e2e_s += truth.added_prompts_s(k, batch * input_tokens, active) - truth.loaded_s(k)
            e2e_s += steps * (truth.added_step_s(k, batch, active) - truth.loaded_s(k))
        e2e_s *= self._jitter()
        self.machine.clock.now += e2e_s
        self.machine.log.append(("run", k, batch, output_tokens, active, self.loaded))
        return RunReading(e2e_s=e2e_s, device_s=e2e_s, host_s=0.0)

    def _jitter(self) -> float:
        return max(0.1, 1.0 + self.machine.noise * float(self.machine.random.standard_normal()))

    def memory(self) -> tuple[RankMemory, ...]:
        truth = self.machine.truth
        held = self.loaded * (self.layers * truth.layer_bytes + truth.other_bytes)
        return (
            RankMemory(
                rank=0,
                stage=0,
                weights_bytes=50_000 * self.layers + held,
                kv_bytes=0,
                activation_peak_bytes=0,
                pp_buffer_bytes=0,
                runtime_bytes=0,
            ),
        )

    def close(self) -> None:
        self.closed = True
