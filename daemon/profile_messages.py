"""Bodies of the profiling routes, for both ends; imports neither torch nor a web library."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fingerprint.config import DeploymentConfig, KvFormat, SlotFormat, WeightFormat
from fingerprint.errors import ConfigError

__all__ = ["ProfileBursts", "ProfileError", "ProfileLoad", "ProfileRun", "ProfileVariants"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileLoad:
    """``POST /profile/load``: replace what is loaded. Answers ``{}``."""

    checkpoint: str
    weights: WeightFormat
    kv: KvFormat
    layers_per_stage: tuple[int, ...]
    max_batch: int
    max_context_tokens: int
    kv_tokens: int = 0  # room of the KV cache; 0: max_batch * max_context_tokens
    kv_blocks: int = 0  # that hold it, for an engine that is given blocks
    kv_block_tokens: int = 0  # of one block in an attention layer
    kv_dtype: str = ""  # the engine's own name of ``kv``, for an engine that is given it
    graphs: str = ""  # JSON of settings of its CUDA graphs, for an engine that is given them
    text_only: bool = False  # leave out the towers of a model for images or sound
    adapter_slots: int = 0  # for variants, as ``DeploymentConfig`` has them
    adapter_rank: int = 0
    delta_mib: int = 0
    delta_format: SlotFormat = SlotFormat.NONE  # of slots on an engine whose slots have one
    additional_config: str = ""  # JSON of settings of our plug-in for such slots; empty: there are none

    def __post_init__(self) -> None:
        for name in ("max_batch", "max_context_tokens"):
            if not 1 <= getattr(self, name) <= 100_000_000:
                raise ConfigError(f"{name} must be between 1 and 100,000,000, got {getattr(self, name)}")
        self.in_slots(DeploymentConfig())

    def in_slots(self, config: DeploymentConfig) -> DeploymentConfig:
        """Return ``config`` with the slots of this load."""
        return replace(
            config,
            adapter_slots=self.adapter_slots,
            adapter_rank=self.adapter_rank,
            delta_mib=self.delta_mib,
            delta_format=self.delta_format,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileRun:
    """``POST /profile/run``: one burst of dummy requests. Answers a ``RunReading``."""

    batch: int
    input_tokens: int
    output_tokens: int
    active: int = 0  # distinct variants that the requests ask for in turn; 0: all are for the base

    def __post_init__(self) -> None:
        for name in ("batch", "input_tokens", "output_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        _check_active(self.active, self.batch)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileVariants:
    """``POST /profile/variants``: load variants one after the other. Answers the seconds of each load."""

    folders: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileBursts:
    """``POST /profile/bursts``, of an engine with our step timer. Answers a list of ``RunReading``.

    Bursts agree when the medians of their earlier and their later half differ by at most ``agree_within`` of the
    smaller one. Where that is asked for and they do not, further bursts run for ``agree_limit_s``; the answer is a
    NotMeasuredError when they never do.
    """

    batch: int
    input_tokens: int
    output_tokens: int
    repeat: int
    most: int
    until_s: float
    steps: bool = True
    agree_within: float | None = None  # None: whatever they take
    agree_limit_s: float = 0.0
    active: int = 0  # distinct variants that the requests ask for in turn; 0: all are for the base

    def __post_init__(self) -> None:
        for name in ("batch", "input_tokens", "output_tokens", "repeat", "most"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.agree_within is not None and not 0 < self.agree_within < 1:
            raise ConfigError(f"agree_within must be between 0 and 1, got {self.agree_within}")
        _check_active(self.active, self.batch)


def _check_active(active: int, batch: int) -> None:
    if not 0 <= active <= batch:
        raise ConfigError(f"a burst of {batch} asks for 0 to {batch} variants, got {active}")


@dataclass(frozen=True, slots=True)
class ProfileError:
    """The body of every answer that is not 200: a class of ``fingerprint.errors`` by name."""

    error: str
    message: str
