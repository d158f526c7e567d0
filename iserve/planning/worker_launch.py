"""From the best of a plan to the worker that enforces what it was estimated and placed with. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from daemon.devices import Device
from daemon.engine_options import NO_OPTIONS, EngineOptions
from daemon.worker_spec import StageAssignment, WorkerLimits, WorkerSpec
from fingerprint.config import DeploymentConfig, Workload
from fingerprint.engine_caches import engine_caches
from fingerprint.engines import largest_graph
from fingerprint.errors import InfeasibleError
from fingerprint.measurements import Profile
from iserve.model_source import ModelSource
from iserve.planning.document import PlanDocument
from iserve.planning.launch_limits import launch_limits
from iserve.planning.serving_capacity import ServingCapacity, promised_bytes
from placement.types import Placement
from planner.plan import Ranked

__all__ = ["LaunchDocument", "PlannedDeployment", "worker_slug", "worker_spec"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchDocument:
    """Workers and devices that a deploy would start; nothing is started by asking."""

    plan: PlanDocument
    """Plan that the launch follows."""
    worker: WorkerSpec
    """Worker that would start; the first of several replicas."""
    devices: tuple[Device, ...]
    """Devices of that worker."""
    release: str | None
    """Engine release that was measured; None: nothing was measured."""
    has_weights: bool
    """Whether the model's weights are here, not its config.json alone."""


@dataclass(frozen=True, slots=True)
class PlannedDeployment:
    """A plan with where its best candidate goes."""

    document: PlanDocument
    best: Ranked | None
    devices: tuple[Device, ...]
    free_bytes: Mapping[str, int]  # by device: what was free when it was made
    capacity: ServingCapacity | None  # of the best

    def workers(
        self,
        name: str,
        source: ModelSource,
        worker_id: str,
        workload: Workload,
        profile: Profile | None,
        options: EngineOptions = NO_OPTIONS,
    ) -> tuple[WorkerSpec, ...]:
        """Return the launch of the best configuration, of each replica.

        Args:
            worker_id: of one; of several with ``-r1`` and so on, which no id that ends in a number looks like.
            profile: that it was planned with; None: with datasheets.
            options: for the engine itself.

        Raises:
            InfeasibleError: there is none; the message says what is nearest.
        """
        best, capacity = self.best, self.capacity
        if best is None or capacity is None:
            raise InfeasibleError(_why_nothing(self.document))
        placements, served = capacity.placements, capacity.workload
        kv_tokens = capacity.kv_tokens or (None,) * len(placements)
        ids = [worker_id] if len(placements) == 1 else [f"{worker_id}-r{i + 1}" for i in range(len(placements))]
        specs = (
            worker_spec(
                name,
                source,
                one_id,
                best.config,
                placement,
                workload,
                self.free_bytes,
                capacity.step_tokens,
                served,
                tokens,
            )
            for one_id, placement, tokens in zip(ids, placements, kv_tokens, strict=True)
        )
        caches = () if profile is None else engine_caches(source.spec, profile.memory)
        return tuple(replace(spec, options=options, layer_caches=caches) for spec in specs)

    def launch(
        self,
        name: str,
        source: ModelSource,
        workload: Workload,
        profile: Profile | None,
        options: EngineOptions = NO_OPTIONS,
    ) -> LaunchDocument:
        """Return what a deploy of ``name`` would start. Raises as :meth:`workers`."""
        worker = replace(
            self.workers(name, source, worker_slug(name), workload, profile, options)[0],
            worker_id=worker_slug(name),
        )
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
    config: DeploymentConfig,
    placement: Placement,
    workload: Workload,
    free_bytes: Mapping[str, int],
    step_tokens: int | None = None,
    served: Workload | None = None,
    kv_tokens: int | None = None,
) -> WorkerSpec:
    """Return the launch that enforces what ``config`` was estimated and placed with on devices with
    ``free_bytes``.

    Args:
        step_tokens, served: as for :func:`iserve.planning.launch_limits.launch_limits`.
        kv_tokens: of the KV cache; None: those of ``served``.
    """
    sizes = launch_limits(workload, config.engine, step_tokens, served=served)
    return WorkerSpec(
        worker_id=worker_id,
        served_model=name,
        checkpoint=str(source.directory),
        config=config,
        stages=tuple(
            StageAssignment(
                device_ids=stage.device_ids,
                num_layers=stage.num_layers,
                memory_bytes_per_device=promised_bytes(stage, free_bytes),
            )
            for stage in placement.stages
        ),
        limits=WorkerLimits(
            max_batch=sizes.max_batch,
            max_batched_tokens=sizes.max_batched_tokens,
            max_context_tokens=sizes.max_context_tokens,
            kv_tokens=kv_tokens or sizes.kv_tokens,
            memory_bytes_per_device=max(promised_bytes(stage, free_bytes) for stage in placement.stages),
            graph_tokens=largest_graph(config.engine, is_mixture=source.spec.is_mixture),
        ),
    )


def worker_slug(name: str) -> str:
    """``name`` in letters, digits and '-', as worker ids are made of."""
    return "".join(c if c.isalnum() else "-" for c in name.lower())[:40] or "worker"


def _engine_release(profile: Profile) -> str | None:
    """Return ``0.24.0`` of a profile taken with ``vllm 0.24.0``."""
    return dict(profile.machine.versions).get("engine", "").rpartition(" ")[2] or None


def _why_nothing(document: PlanDocument) -> str:
    """Return the reason of a plan in which nothing is feasible: what is nearest, and what would help.

    Where no engine runs any configuration, that is the reason of most of them.
    """
    why = document.why_not
    parts = ["no configuration is feasible"]
    if why.nearest is not None:
        parts.append(why.nearest.text)
    parts += why.advice[:3]
    reasons = Counter(one.reason for one in document.candidates if one.reason)
    if len(parts) == 1 and reasons:
        parts.append(reasons.most_common(1)[0][0])
    return "; ".join(parts)
