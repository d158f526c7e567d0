"""Accelerate's fully sharded data parallelism (FSDP), with weights that do not fit kept in the host's memory.

Every GPU of a node holds 1/n of every layer's 16-bit weights. To run a layer all n gather it whole and throw it
away again; each computes its own sequences (data parallel), so of a batch of b a GPU runs b/n, alone as at
tp=1,pp=1. With W bytes of weights in a layer, of which the share f is offloaded:

*   gather: each GPU receives W (n-1)/n from the others, at the slowest link among n neighbours. Source: the ring
    all-gather of NCCL (its tests' PERFORMANCE.md: time = size (n-1)/n / bus bandwidth).
*   fetch: each GPU first reads f W/n of its own shard from the host, over its own PCIe lanes. Where the gather
    goes over PCIe too they share the lanes, so the times add; else they overlap and the longer counts.
*   the next layer is gathered while one is computed (FSDP's forward prefetch), so a pass over L layers takes
    c + (L-1) max(c, k) + k, with c the transfer and k the computation of one. Embedding and head are spread over
    the layers. Source: Zhao et al., "PyTorch FSDP", arXiv 2304.11277, sections 3.3 and 4.

In its favour: links and lanes at their datasheet's peak (``fingerprint/data/gpus.json``), no latency per message,
perfect overlap, a host with memory for everything and lanes for every GPU at once, all n GPUs at work in a batch.
Memory of a GPU: its shard of what is not offloaded, two whole layers (one computed, one prefetched) or the
embedding where that is larger, the KV cache of its own sequences, and the activations and runtime of tp=1,pp=1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from fingerprint.config import DeploymentConfig, Workload
from fingerprint.engines import traits_of
from fingerprint.estimates import Estimate, Estimator, Quantity
from fingerprint.gpu_spec import GpuSpec
from fingerprint.model_spec import ModelSpec
from fingerprint.weight_bytes import WEIGHT_16BIT_BYTES, embedding_bytes, head_bytes
from placement.types import ClusterSnapshot, GpuState, Placement, StagePlacement
from traces.baselines.model_info import Knowledge, halvings, largest, sixteen_bit
from traces.simulator.scenario import Deployed, NotDeployed
from traces.simulator.step_model import StepModel, tabulate

__all__ = ["FsdpDeployer", "FsdpEstimator", "Sharding", "pass_s", "sharded_bytes", "transfer_s"]


@dataclass(frozen=True, slots=True)
class Sharding:
    """Over ``num_gpus`` of one node, ``layers_on_host`` of the layers offloaded (each GPU its share of them)."""

    num_gpus: int
    layers_on_host: int = 0


def transfer_s(spec: ModelSpec, gpu: GpuSpec, sharding: Sharding) -> float:
    """Return the seconds to have one layer whole on every GPU, its part of embedding and head with it."""
    n = sharding.num_gpus
    layer_bytes = _weight_bytes(spec) / spec.num_layers
    link = gpu.collective_bytes_per_s(n)
    gather_s = layer_bytes * (n - 1) / n / link
    fetch_s = layer_bytes / n * (sharding.layers_on_host / spec.num_layers) / gpu.pcie_bytes_per_s
    shared = n > gpu.link_group_size
    return gather_s + fetch_s if shared else max(gather_s, fetch_s)


def pass_s(num_layers: int, transfer_s: float, compute_s: float) -> float:
    """Return the time of one pass over all layers: ``compute_s`` is of all of them, ``transfer_s`` of one."""
    layer_s = compute_s / num_layers
    return transfer_s + (num_layers - 1) * max(transfer_s, layer_s) + layer_s


class FsdpEstimator:
    """Times of a sharded model from those of the same model on one GPU (implements ``Estimator``).

    Memory is one GPU's as if the whole model lay there: what sharding makes of it is ``FsdpDeployer``'s.
    """

    name = "fsdp"

    def __init__(self, alone: Estimator, spec: ModelSpec, gpu: GpuSpec, sharding: Sharding) -> None:
        self._alone, self._spec, self._sharding = alone, spec, sharding
        self._transfer_s = transfer_s(spec, gpu, sharding)

    def estimate(self, config: DeploymentConfig, workload: Workload) -> Estimate:
        """Return the estimate. Raises NotMeasuredError: as the estimator of one GPU does."""
        own = replace(workload, batch=-(-workload.batch // self._sharding.num_gpus))
        alone = self._alone.estimate(config, own)
        return replace(
            alone,
            workload=workload,
            ttft_s=self._with_transfers(alone.ttft_s),
            tpot_s=self._with_transfers(alone.tpot_s),
        )

    def _with_transfers(self, compute: Quantity) -> Quantity:
        layers = self._spec.num_layers
        value, low, high = (
            pass_s(layers, self._transfer_s, s) for s in (compute.value, compute.low, compute.high)
        )
        return Quantity(value, low, high, compute.source)


class FsdpDeployer:
    """Each model over the GPUs on which its requests are answered soonest (implements ``Deployer``).

    Widths are powers of two and the whole node; of one width the least loaded neighbours, then those with most
    room. What is offloaded is as little as the memory that is free now makes necessary; the batch is halved where
    not even everything on the host leaves it room. Of several replicas each has GPUs of its own, and the slowest
    of them counts.

    Args:
        batch_of: what each model is launched for.
        whole_node: always over all GPUs of a node, as the iServe paper has it.
    """

    name = "fsdp-offload"

    def __init__(
        self, gpu: GpuSpec, models: Iterable[Knowledge], batch_of: Mapping[str, int], *, whole_node: bool = False
    ) -> None:
        self._gpu, self._whole_node = gpu, whole_node
        self._models = {model.name: model for model in models}
        self._batch_of = batch_of
        self._made: dict[tuple[str, Sharding, int], StepModel] = {}

    def __call__(self, model: str, snapshot: ClusterSnapshot) -> Deployed | NotDeployed:
        found = self.several(model, snapshot, 1)
        return found if isinstance(found, NotDeployed) else found[0]

    def another(self, like: Deployed, model: str, snapshot: ClusterSnapshot) -> Deployed | NotDeployed:
        """Return a replica over as many GPUs as answer soonest now."""
        return self(model, snapshot)

    def several(self, model: str, snapshot: ClusterSnapshot, count: int) -> Sequence[Deployed] | NotDeployed:
        asked = self._models[model]
        config = next((config for config in sixteen_bit(asked.configs) if config.num_gpus == 1), None)
        if config is None:
            return NotDeployed(reason="no engine runs it on one GPU in 16 bits, as every rank of FSDP does")
        by_width = [
            windows for windows in _windows(snapshot, count, whole_node=self._whole_node) if len(windows) == count
        ]
        if not by_width:
            return NotDeployed(reason=f"{len(snapshot.gpus)} GPUs have no {count} groups of one width")
        for batch in halvings(self._batch_of[model]):
            fitting = [
                (shardings, windows)
                for windows in by_width
                if (shardings := _fewest_on_hosts(asked, config, batch, windows)) is not None
            ]
            if fitting:
                chosen = min(fitting, key=lambda option: self._e2e_s(asked, config, batch, option[0]))
                return [self._deployed(asked, config, batch, *one) for one in zip(*chosen, strict=True)]
        widest = max(by_width, key=lambda windows: len(windows[0]))
        width, room_bytes = len(widest[0]), min(_room(window) for window in widest)
        least = sharded_bytes(asked, config, Sharding(width, asked.spec.num_layers), 1)
        return NotDeployed(
            reason=f"with all layers on the host it needs {least / 2**30:.2f} GiB on each of {count * width} "
            f"GPUs, {room_bytes / 2**30:.2f} GiB are free"
        )

    def _e2e_s(
        self, model: Knowledge, config: DeploymentConfig, batch: int, shardings: Iterable[Sharding]
    ) -> float:
        """Return the E2E latency of the slowest sharding."""
        workload = replace(model.workload, batch=batch)
        return max(
            FsdpEstimator(model.estimator, model.spec, self._gpu, sharding).estimate(config, workload).e2e_s.value
            for sharding in shardings
        )

    def _deployed(
        self,
        model: Knowledge,
        config: DeploymentConfig,
        batch: int,
        sharding: Sharding,
        window: tuple[GpuState, ...],
    ) -> Deployed:
        layers = model.spec.num_layers
        stage = StagePlacement(
            node_id=window[0].node_id,
            device_ids=tuple(gpu.device_id for gpu in window),
            first_layer=0,
            num_layers=layers,
            bytes_per_gpu=sharded_bytes(model, config, sharding, batch),
        )
        key = (model.name, sharding, batch)
        if key not in self._made:
            estimator = FsdpEstimator(model.estimator, model.spec, self._gpu, sharding)
            limits = model.limits(replace(model.workload, batch=batch), config.engine)
            self._made[key] = tabulate(estimator, config, limits)
        return Deployed(
            placement=Placement((stage,)),
            steps=self._made[key],
            what=f"FSDP over {len(window)} GPUs, {sharding.layers_on_host} of {layers} layers on the host, "
            f"batch {batch}",
            startup_s=traits_of(config.engine).startup_s,
        )


def sharded_bytes(model: Knowledge, config: DeploymentConfig, sharding: Sharding, batch: int) -> int:
    """Return bytes on each GPU (module docstring), at the upper end of the estimate's interval.

    Args:
        batch: of all GPUs together.
    """
    n, spec = sharding.num_gpus, model.spec
    own = replace(model.workload, batch=-(-batch // n))
    memory = model.estimator.estimate(config, own).memory
    kept = 1 - sharding.layers_on_host / spec.num_layers
    gathered = max(2 * memory.layer_weight_bytes, embedding_bytes(spec), head_bytes(spec))
    kv_bytes = spec.num_layers * memory.layer_kv_bytes
    total = _weight_bytes(spec) * kept / n + gathered + kv_bytes + memory.activation_bytes + memory.runtime_bytes
    return math.ceil(total * (1 + memory.relative_error))


def _weight_bytes(spec: ModelSpec) -> float:
    return spec.num_params * WEIGHT_16BIT_BYTES


def _fewest_on_host(
    model: Knowledge, config: DeploymentConfig, batch: int, window: tuple[GpuState, ...]
) -> Sharding | None:
    layers, room_bytes = model.spec.num_layers, _room(window)

    def kept_fit(kept: int) -> bool:
        return sharded_bytes(model, config, Sharding(len(window), layers - kept), batch) <= room_bytes

    kept = largest(kept_fit, layers)
    return Sharding(len(window), layers - kept) if kept or kept_fit(0) else None


def _fewest_on_hosts(
    model: Knowledge, config: DeploymentConfig, batch: int, windows: Iterable[tuple[GpuState, ...]]
) -> list[Sharding] | None:
    """Return the sharding of each window; None: one window has no room."""
    shardings = [_fewest_on_host(model, config, batch, window) for window in windows]
    found = [sharding for sharding in shardings if sharding is not None]
    return found if len(found) == len(shardings) else None


def _windows(snapshot: ClusterSnapshot, count: int, *, whole_node: bool) -> Iterable[list[tuple[GpuState, ...]]]:
    """Yield, for each width, the ``count`` preferred groups of neighbouring GPUs of one node, or as many as there
    are.

    The groups of one width share no GPU. Full ones are last.
    """
    ordered = sorted(snapshot.gpus, key=lambda gpu: (gpu.node_id, gpu.gpu_index, gpu.device_id))
    nodes = [tuple(gpus) for _, gpus in groupby(ordered, key=lambda gpu: gpu.node_id)]
    by_width: dict[int, list[tuple[GpuState, ...]]] = {}
    for gpus in nodes:
        narrower = [] if whole_node else [2**i for i in range(len(gpus).bit_length())]
        for width in dict.fromkeys((*narrower, len(gpus))):
            for i in range(0, len(gpus) - width + 1, width):
                by_width.setdefault(width, []).append(gpus[i : i + width])
    for windows in by_width.values():
        load = {window: sum(gpu.load_fraction for gpu in window) for window in windows}
        yield sorted(windows, key=lambda window: (not _room(window), load[window], -_room(window)))[:count]


def _room(window: Iterable[GpuState]) -> int:
    return min(gpu.free_bytes for gpu in window)
