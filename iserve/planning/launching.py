"""From the best of a plan to the worker that enforces what it was estimated and placed with. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from daemon.devices import Device
from daemon.engines.base import StageAssignment, WorkerLimits, WorkerSpec
from fingerprint.config import Workload
from fingerprint.errors import InfeasibleError
from fingerprint.estimators.roofline import DEFAULT_MAX_BATCHED_TOKENS
from fingerprint.measurements import Profile
from iserve.controller.estimating import step_tokens_of
from iserve.model_source import ModelSource
from iserve.planning.document import PlanDocument
from placement.types import Placement, StagePlacement
from planner.plan import Ranked

__all__ = ["LaunchDocument", "PlannedDeployment", "worker_slug", "worker_spec"]

_MEMORY_HEADROOM = 1.02  # a worker's limit over the placed upper bound, where there is room: allocator rounding


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchDocument:
    """What a deploy would start, and on what; nothing is started by asking."""

    plan: PlanDocument
    worker: WorkerSpec
    devices: tuple[Device, ...]  # of the worker
    release: str | None  # of the engine that was measured; None: nothing was
    has_weights: bool  # beside the config.json that was planned with


@dataclass(frozen=True, slots=True)
class PlannedDeployment:
    """A plan with where its best candidate goes."""

    document: PlanDocument
    best: Ranked | None
    devices: tuple[Device, ...]
    free_bytes: Mapping[str, int]  # by device: what was free when it was made

    def worker(
        self, name: str, source: ModelSource, worker_id: str, workload: Workload, profile: Profile | None
    ) -> WorkerSpec:
        """The launch of the best. Raises InfeasibleError: there is none; the message says what comes nearest.

        Args:
            profile: that it was planned with; None: with datasheets.
        """
        if self.best is None:
            raise InfeasibleError(_why_nothing(self.document))
        steps = None if profile is None else step_tokens_of(profile)
        return worker_spec(name, source, worker_id, self.best, workload, self.free_bytes, steps)

    def launch(
        self, name: str, source: ModelSource, workload: Workload, profile: Profile | None
    ) -> LaunchDocument:
        """What a deploy of ``name`` would start. Raises as :meth:`worker`."""
        worker = self.worker(name, source, worker_slug(name), workload, profile)
        used = {device_id for stage in worker.stages for device_id in stage.device_ids}
        return LaunchDocument(
            plan=self.document,
            worker=worker,
            devices=tuple(device for device in self.devices if device.device_id in used),
            release=None if profile is None else _engine_release(profile),
            has_weights=source.has_weights,
        )


def worker_spec(
    name: str,
    source: ModelSource,
    worker_id: str,
    best: Ranked,
    workload: Workload,
    free_bytes: Mapping[str, int],
    step_tokens: int | None = None,
) -> WorkerSpec:
    """The launch that enforces what ``best`` was estimated and placed with on devices with ``free_bytes``.

    Args:
        step_tokens: tokens of the largest step that the engine was measured with, whose activations and chunks of
            prompts the estimate therefore has; None: the estimate has those of this workload's own largest step.
    """
    placement = best.layout
    assert isinstance(placement, Placement), "a feasible candidate of make_plan carries its placement"
    context = min(workload.context_tokens, source.spec.max_context_tokens)

    def limit_bytes(stage: StagePlacement) -> int:
        room_bytes = min(free_bytes[device_id] for device_id in stage.device_ids)
        return max(stage.bytes_per_gpu, min(int(stage.bytes_per_gpu * _MEMORY_HEADROOM), room_bytes))

    return WorkerSpec(
        worker_id=worker_id,
        served_model=name,
        checkpoint=str(source.directory),
        config=best.config,
        stages=tuple(
            StageAssignment(
                device_ids=stage.device_ids,
                num_layers=stage.num_layers,
                memory_bytes_per_device=limit_bytes(stage),
            )
            for stage in placement.stages
        ),
        limits=WorkerLimits(
            max_batch=workload.batch,
            max_batched_tokens=step_tokens
            or min(DEFAULT_MAX_BATCHED_TOKENS, max(workload.batch * workload.input_tokens, context)),
            max_context_tokens=context,
            kv_tokens=workload.batch * context,
            memory_bytes_per_device=max(limit_bytes(stage) for stage in placement.stages),
        ),
    )


def worker_slug(name: str) -> str:
    """``name`` in letters, digits and '-', as worker ids are made of."""
    return "".join(c if c.isalnum() else "-" for c in name.lower())[:40] or "worker"


def _engine_release(profile: Profile) -> str | None:
    """``0.24.0`` of a profile taken with ``vllm 0.24.0``."""
    return dict(profile.machine.versions).get("engine", "").rpartition(" ")[2] or None


def _why_nothing(document: PlanDocument) -> str:
    """Of a plan in which nothing is feasible: what comes nearest, and what would help."""
    why = document.why_not
    parts = ["no configuration is feasible"]
    if why.nearest is not None:
        parts.append(why.nearest.text)
    parts += why.advice[:3]
    return "; ".join(parts)
