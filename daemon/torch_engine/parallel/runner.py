"""Runner: the executing half of the engine, one model on tp * pp ranks, driven step by step from rank 0.

Rank 0 computes in this process; the other ranks are ``ranks.RankGroup``'s. Knows nothing of requests or schedules.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import torch

from daemon.torch_engine.model.batch import check_plan
from daemon.torch_engine.model.capabilities import KV, MAX_PP, MAX_TP, PRUNING, WEIGHTS
from daemon.torch_engine.model.formats import FORMATS
from daemon.torch_engine.parallel.parallel_state import AdapterOrder, LoadOrder, RankPlace
from daemon.torch_engine.parallel.rank_device import release_memory
from daemon.torch_engine.parallel.rank_group import RankGroup
from daemon.torch_engine.parallel.stage import RankTiming, Stage
from daemon.torch_engine.runner_types import StepPlan, StepResult
from daemon.worker_spec import StageAssignment, WorkerLimits
from fingerprint.config import DeploymentConfig
from fingerprint.errors import EngineError
from fingerprint.measurements import RankMemory

__all__ = ["LocalRunner"]


class LocalRunner:
    """The :class:`daemon.torch_engine.runner_types.Runner` of this engine.

    Ranks stay alive from one load to the next while (tp, pp) and the devices stay the same.

    Args:
        dtype: in place of the checkpoint's 16-bit type; for tests of token equality.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype
        self._group: RankGroup | None = None
        self._stage: Stage | None = None
        self._limits: WorkerLimits | None = None
        self._place = RankPlace(0, 1, 1)
        self._adapter_slots = 0
        self.vocab_size = 0

    def load(
        self,
        checkpoint: Path,
        config: DeploymentConfig,
        stages: tuple[StageAssignment, ...],
        limits: WorkerLimits,
    ) -> None:
        """Load as the protocol says; also raises UnsupportedModelError for a family this engine does not run."""
        _check_config(config)
        if any(stage.num_layers < 1 for stage in stages):
            layers = ", ".join(str(stage.num_layers) for stage in stages)
            raise EngineError(f"every stage needs at least one layer, asked for {layers}")
        device_ids = tuple(itertools.chain.from_iterable(stage.device_ids for stage in stages))
        if (
            self._group is not None
            and self._group.usable
            and self._group.serves == (config.tp, config.pp, device_ids)
        ):
            self._unload()
        else:
            self.close()
        self._place = RankPlace(0, config.tp, config.pp)
        if self._group is None:
            self._group = RankGroup(self._place, device_ids)
        order = LoadOrder(
            checkpoint=str(checkpoint),
            config=config,
            layers_per_stage=tuple(stage.num_layers for stage in stages),
            room_bytes_per_stage=tuple(stage.room_bytes(limits) for stage in stages),
            limits=limits,
            dtype=None if self._dtype is None else str(self._dtype).removeprefix("torch."),
        )
        self._stage = self._group.load(order)
        self._limits, self.vocab_size = limits, self._stage.vocab_size
        self._adapter_slots = config.adapter_slots

    def step(self, plan: StepPlan) -> StepResult:
        stage, group, limits = self._stage, self._group, self._limits
        if stage is None or group is None or limits is None:
            raise EngineError("no model is loaded")
        check_plan(plan, limits, self.vocab_size, self._adapter_slots)
        logits, timings = group.step(stage, plan)
        return _result(logits, timings, self._place.tp)

    def prepare_adapter(self, adapter_id: int, folder: Path) -> None:
        stage, group = self._stage, self._group
        if stage is None or group is None:
            raise EngineError("no model is loaded")
        group.prepare_adapter(stage, AdapterOrder(adapter_id, str(folder)))

    def switch_adapter(self, adapter_id: int) -> None:
        if self._stage is None or self._group is None:
            raise EngineError("no model is loaded")
        self._group.switch_adapter(self._stage, adapter_id)

    def unload_adapter(self, adapter_id: int) -> None:
        if self._stage is not None and self._group is not None:
            self._group.unload_adapter(self._stage, adapter_id)

    def memory(self) -> tuple[RankMemory, ...]:
        if self._stage is None or self._group is None:
            return ()
        return self._group.memory(self._stage)

    def _unload(self) -> None:
        if self._stage is not None and self._group is not None:
            self._stage = None
            self._group.unload()
            release_memory()

    def close(self) -> None:
        if self._group is not None:
            self._stage = None
            self._group.close()
            self._group = None
            release_memory()


def _check_config(config: DeploymentConfig) -> None:
    for axis, value, reasons in (
        ("weights", config.weights, WEIGHTS),
        ("kv", config.kv, KV),
        ("pruning", config.pruning, PRUNING),
    ):
        reason = reasons.get(value, "unknown")
        if reason is not None:
            raise EngineError(f"the embedded engine has no {axis}={value}: {reason}")
    if config.tp > MAX_TP or config.pp > MAX_PP:
        raise EngineError(f"the embedded engine runs tp up to {MAX_TP} and pp up to {MAX_PP}, asked for {config}")
    assert config.weights in FORMATS


def _result(logits: torch.Tensor, timings: tuple[RankTiming, ...], tp: int) -> StepResult:
    """Return the result by ranks' timings; ranks of one stage lie together."""
    stages = [timings[first : first + tp] for first in range(0, len(timings), tp)]
    handover_s = sum(
        max(after.input_ready_at for after in receivers) - max(before.output_begun_at for before in senders)
        for senders, receivers in itertools.pairwise(stages)
    )
    forward_s = sum(max(timing.forward_s for timing in stage) for stage in stages)
    return StepResult(
        logits=logits,
        device_s=forward_s + handover_s,
        handover_s=handover_s,
        busy_s=tuple(timing.forward_s for timing in timings),
    )
