"""Everything about this installation that can be set, read from the environment in this one place.

Precedence: a command-line option, then ``ISERVE_*``, then the default here. An unknown ``ISERVE_*`` variable or
one that cannot be read is an error, not a silence.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from fingerprint.errors import ConfigError
from placement.policies import make_policy

__all__ = ["Settings", "load_settings"]

_WHAT = {
    "bool": "one of 1, 0, true, false, yes, no",
    "Path": "a path",
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
}
# Read by other parts of the project, not settings: the test suite's data, a worker's cores.
_NOT_SETTINGS = frozenset({"ISERVE_REFERENCE_DATA", "ISERVE_DEVICE_CORES", "ISERVE_WORKER_FOLDER"})


def _default_home() -> Path:
    data = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(data).absolute() / "iserve"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One installation. The variable of a field is ``ISERVE_`` and its name in capitals."""

    home: Path = field(default_factory=_default_home)
    host: str = "127.0.0.1"  # of the gateway and the REST API; beyond loopback, API keys are required
    port: int = 8080  # of the gateway: the OpenAI API
    api_port: int = 8081  # of the controller: the REST API
    cpu_devices: int | None = None  # None: the GPUs, or two shares of the CPU where there is none
    policy: str = "hybrid"
    load_threshold: float = 0.5  # L of the hybrid policy
    profile_seconds: float = 60.0  # budget of a profile that a deploy takes
    start_timeout_s: float = 900.0  # for a worker to become ready
    require_keys: bool | None = None  # None: when host is not loopback
    # The Python an engine is installed for, read by daemon/engines; None: the running interpreter.
    vllm_python: Path | None = None
    tensorrt_llm_python: Path | None = None

    def __post_init__(self) -> None:
        for name in ("port", "api_port"):
            if not 0 <= getattr(self, name) <= 65535:
                raise ConfigError(f"{name} must be in 0..65535, got {getattr(self, name)}")
        if self.port == self.api_port != 0:
            raise ConfigError(f"port and api_port are both {self.port}; give them different ports")
        if self.cpu_devices is not None and not 1 <= self.cpu_devices <= 64:
            raise ConfigError(f"cpu_devices must be in 1..64, got {self.cpu_devices}")
        make_policy(self.policy)
        if not 0 <= self.load_threshold <= 1:
            raise ConfigError(f"load_threshold must be in 0..1, got {self.load_threshold}")
        if not 0 < self.profile_seconds < 1e6:
            raise ConfigError(f"profile_seconds must be above 0, got {self.profile_seconds}")
        if not 0 < self.start_timeout_s < 1e6:
            raise ConfigError(f"start_timeout_s must be above 0, got {self.start_timeout_s}")

    @property
    def keys_required(self) -> bool:
        """API keys are on by default when listening beyond loopback."""
        if self.require_keys is not None:
            return self.require_keys
        return self.host not in {"127.0.0.1", "::1", "localhost"}

    @property
    def run_folder(self) -> Path:
        return self.home / "run"

    @property
    def log_folder(self) -> Path:
        return self.home / "logs"

    @property
    def fingerprint_folder(self) -> Path:
        return self.home / "fingerprints"

    def environment(self) -> dict[str, str]:
        """The variables that make a child process read these very settings."""
        values = {f"ISERVE_{f.name.upper()}": getattr(self, f.name) for f in fields(self)}
        return {name: str(value) for name, value in values.items() if value is not None}


def load_settings(environment: Mapping[str, str] = os.environ) -> Settings:
    """Settings of this process.

    Raises:
        ConfigError: an unknown variable, or a value that cannot be read; all faults are named at once.
    """
    known = {f"ISERVE_{f.name.upper()}": f for f in fields(Settings)}
    faults = []
    values: dict[str, object] = {}
    for name, text in environment.items():
        if not name.startswith("ISERVE_") or name in _NOT_SETTINGS:
            continue
        if name not in known:
            faults.append(f"{name} is not a setting (known: {', '.join(sorted(known))})")
            continue
        try:
            values[known[name].name] = _read(_kind(known[name]), text)
        except ValueError:
            faults.append(f"{name}={text!r} is not {_WHAT[_kind(known[name])]}")
    if faults:
        raise ConfigError("; ".join(faults))
    return Settings(**values)  # type: ignore[arg-type]


def _kind(setting: Field[Any]) -> str:
    return str(setting.type).partition(" ")[0]


def _read(kind: str, text: str) -> object:
    """Raises ValueError. An empty text is no value: it would be the current folder, or every address."""
    if not text.strip():
        raise ValueError(text)
    if kind == "bool":
        if text.lower() not in {"1", "0", "true", "false", "yes", "no"}:
            raise ValueError(text)
        return text.lower() in {"1", "true", "yes"}
    if kind == "Path":
        try:
            return Path(text).expanduser().absolute()  # every process of a home means the same one
        except RuntimeError as error:  # no such user
            raise ValueError(text) from error
    return {"int": int, "float": float, "str": str}[kind](text)
