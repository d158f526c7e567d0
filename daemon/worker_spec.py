"""The one value that says all a worker must know before it starts."""

from __future__ import annotations

from dataclasses import dataclass

from daemon.engine_options import NO_OPTIONS, EngineOptions
from fingerprint.config import DeploymentConfig
from fingerprint.engines import GRAPH_TOKENS
from fingerprint.errors import ConfigError
from fingerprint.measurements import LayerCache

__all__ = ["StageAssignment", "WorkerLimits", "WorkerSpec"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StageAssignment:
    """Pipeline stage on this node: the devices of its TP group and how many layers it holds."""

    device_ids: tuple[str, ...]
    """Devices of the stage's tensor-parallel group, one per rank."""
    num_layers: int
    """Number of hidden layers that the stage holds."""
    memory_bytes_per_device: int | None = None
    """Memory promised on each device of this stage; None: that of the worker's limits."""

    def room_bytes(self, limits: WorkerLimits) -> int:
        """Return the bytes that each of its ranks may take."""
        given = self.memory_bytes_per_device
        return limits.memory_bytes_per_device if given is None else given


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerLimits:
    """Limits that the estimate assumed, enforced at launch."""

    max_batch: int
    """Most requests that run at once."""
    max_batched_tokens: int
    """Most tokens that one engine step computes."""
    max_context_tokens: int
    """Longest request, prompt and output tokens together."""
    kv_tokens: int
    """Tokens that the KV cache holds, over all requests."""
    memory_bytes_per_device: int
    """Memory promised on each device of the stage that takes most."""
    graph_tokens: int = GRAPH_TOKENS
    """Tokens of the largest CUDA graph, where the engine has such; what all had before it was kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSpec:
    """Everything a worker needs; nothing is filled in later."""

    worker_id: str
    """Worker's identifier in letters, digits and `-`; names its folder."""
    served_model: str
    """Model name that OpenAI clients use."""
    checkpoint: str
    """Local folder of the model's checkpoint."""
    config: DeploymentConfig
    """Configuration that the worker runs."""
    stages: tuple[StageAssignment, ...]
    """Pipeline stages in order, each with its devices."""
    limits: WorkerLimits
    """Sizes that the estimate assumed, enforced at launch."""
    port: int = 0
    """Port that the worker listens on; 0: the daemon chooses a free one before launch."""
    host: str = "127.0.0.1"
    """Address that the worker listens on."""
    lease_ttl_s: float = 600.0
    """Seconds after which the worker ends without a sign of life from the daemon."""
    profiling: bool = False
    """Whether the worker serves the profiling routes and loads nothing at start."""
    options: EngineOptions = NO_OPTIONS
    """Options that the deployment gives to the engine itself."""
    dummy_weights: bool = False
    """Whether weights are random, in the checkpoint's shapes; a config.json is then enough."""
    engine_version: str | None = None
    """Engine release that was planned with; None: the first installation that is found."""
    shares_places: bool = False
    """Whether adapters of small ranks share places of loaded ones there, which is settled before it starts."""
    layer_caches: tuple[LayerCache, ...] = ()
    """One layer's cache of each kind of layers that the engine was seen to specify otherwise than config.json."""
    ends_at: float | None = None
    """Time, in seconds since the epoch, at which the daemon ends the worker if nothing did before; None: never."""

    def __post_init__(self) -> None:
        if not self.worker_id or not all(c.isalnum() or c == "-" for c in self.worker_id):
            raise ConfigError(f"worker_id must be letters, digits and '-', got {self.worker_id!r}")
        if len(self.stages) != self.config.pp:
            raise ConfigError(f"{len(self.stages)} stages for pp={self.config.pp}")
        for stage in self.stages:
            if len(stage.device_ids) != self.config.tp:
                raise ConfigError(f"{len(stage.device_ids)} devices in a stage for tp={self.config.tp}")

    def promised_bytes(self) -> dict[str, int]:
        """Return, by device, what the ranks on it may take together. With an uneven split the stages differ."""
        promised: dict[str, int] = {}
        for stage in self.stages:
            for device_id in stage.device_ids:
                promised[device_id] = promised.get(device_id, 0) + stage.room_bytes(self.limits)
        return promised
