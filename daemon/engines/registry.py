"""The engines by name. A new engine is one file and one line here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from daemon.engines.base import Engine
from daemon.engines.tensorrt_llm.adapter import TensorRtLlmEngine
from daemon.engines.torch import TorchEngine
from daemon.engines.vllm.adapter import VllmEngine
from fingerprint.capability import EngineCapabilities
from fingerprint.errors import ConfigError

__all__ = ["ENGINES", "capabilities_for", "get_engine"]

# Which is preferred where several run a configuration is said in fingerprint.engines.
_ALL: tuple[Engine, ...] = (TorchEngine(), VllmEngine(), TensorRtLlmEngine())
ENGINES: Mapping[str, Engine] = MappingProxyType({engine.name: engine for engine in _ALL})


def get_engine(name: str) -> Engine:
    """Return the engine called ``name``. Raises ConfigError: there is no such engine."""
    try:
        return ENGINES[name]
    except KeyError:
        raise ConfigError(f"there is no engine {name!r}; there are {', '.join(ENGINES)}") from None


def capabilities_for(name: str) -> tuple[EngineCapabilities, ...]:
    """Return the tables to plan with: one engine's, or every engine's for ``"auto"``.

    Raises:
        ConfigError: there is no such engine.
    """
    if name == "auto":
        return tuple(engine.capabilities() for engine in ENGINES.values())
    return (get_engine(name).capabilities(),)
