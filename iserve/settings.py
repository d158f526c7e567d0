"""Everything about this installation that can be set, read from the environment in this one place.

Precedence: a command-line option, then ``ISERVE_*``, then the default here. An unknown ``ISERVE_*`` variable or
one that cannot be read is an error, not a silence.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, NamedTuple, get_args, get_type_hints
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from daemon.home import default_home
from daemon.settings import DaemonSettings
from fingerprint.errors import ConfigError
from placement.placer_registry import check_placement
from placement.policies import DEFAULT_LOAD_THRESHOLD, JOINT, policy_names
from placement.variant_routing import DEFAULT_VARIANT_POLICY, VARIANT_POLICIES, make_variant_policy

__all__ = ["SettingRow", "Settings", "load_settings", "setting_rows"]

_WHAT = {
    "bool": "one of 1, 0, true, false, yes, no",
    "Path": "a path",
    "PathList": "absolute paths with `:` between them",
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
}
# Read by other parts of the project, not settings: the test suite's data, a worker's cores.
_NOT_SETTINGS = frozenset({"ISERVE_REFERENCE_DATA", "ISERVE_DEVICE_CORES", "ISERVE_WORKER_FOLDER"})

_TELLING_OPTIONS = frozenset({"host", "port", "dbname", "user", "service"})  # of PostgreSQL's URL, none a secret

*_FIRST_POLICIES, _LAST_POLICY = (f"`{name}`" for name in policy_names())
_POLICY = f"placement: {', '.join(_FIRST_POLICIES)} or {_LAST_POLICY}"
*_FIRST_ROUTINGS, _LAST_ROUTING = (f"`{name}`" for name in VARIANT_POLICIES)
_ROUTING = f"choice of the replica for a variant's request: {', '.join(_FIRST_ROUTINGS)} or {_LAST_ROUTING}"


class PathList(tuple[Path, ...]):
    """Folders, written as PATH is."""

    __slots__ = ()

    def __str__(self) -> str:
        return os.pathsep.join(map(str, self))


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of one installation. The variable of a field is ``ISERVE_`` and its name in capitals."""

    home: Annotated[Path, "state, logs, records; mode 0700"] = field(default_factory=default_home)
    database_url: Annotated[
        str | None, "state in PostgreSQL: `postgresql://USER@HOST:PORT/DATABASE`; unset: in SQLite in the home"
    ] = field(default=None, repr=False)  # may hold a password
    host: Annotated[str, "address of the OpenAI and REST APIs; beyond loopback, API keys are required"] = (
        "127.0.0.1"
    )
    port: Annotated[int, "the gateway's: the OpenAI API; 0 takes any free port"] = 8080
    api_port: Annotated[int, "the controller's: the REST API; 0 takes any free port"] = 8081
    cpu_devices: Annotated[
        int | None,
        "offer the CPU as so many devices (1 to 64); unset: the GPUs, or two shares of the CPU without any",
    ] = None
    policy: Annotated[str, _POLICY] = JOINT
    load_threshold: Annotated[float, "load below which `hybrid` packs, 0 to 1"] = DEFAULT_LOAD_THRESHOLD
    variant_policy: Annotated[str, _ROUTING] = DEFAULT_VARIANT_POLICY
    profile_seconds: Annotated[
        float, "budget of the profile that a first deployment takes; on vllm of all its GPUs together"
    ] = 60.0
    start_timeout_s: Annotated[
        float, "seconds for a worker to become healthy; a warm-up may follow. The daemon reads it when it starts"
    ] = 900.0
    require_keys: Annotated[
        bool | None, "whether the OpenAI API wants API keys; unset: when the host is not loopback"
    ] = None
    model_folders: Annotated[
        PathList | None,
        "folders in which API keys may name models; unset: none, only registered models and Hugging Face ids. "
        "The command line of this home names any folder",
    ] = None
    vllm_python: Annotated[
        Path | None,
        "the Python of the environment that has vLLM; unset: the newest that `iserve engines install` made, else "
        "iServe's own, if vLLM is installed there",
    ] = None
    vllm_adapter_kernels: Annotated[
        bool | None,
        "whether vLLM computes LoRA adapters in steps of up to 1,024 rows by iServe's kernels; unset: by its own. "
        "vLLM 0.33.0 alone, other releases take no adapters then; the controller and the daemon read it when they "
        "start, and profiles with other kernels are not used",
    ] = None
    vllm_background_loads: Annotated[
        bool | None,
        "whether a thread of vLLM's worker reads LoRA adapters and copies them into slots while steps go on; "
        "unset: a load stops them. On one GPU with vLLM 0.33.0 alone, other releases take no adapters then; read "
        "as the one above",
    ] = None
    vllm_delta_arena_mib: Annotated[
        int | None,
        "the host's memory, in MiB, in which each worker (replica) with deltas on vLLM keeps those that it read, "
        "page-locked, all its GPUs together; 0: none; unset: all workers of a machine together take an eighth of "
        "its memory at most, each the part that it was promised of the GPUs' memory, at most 16,384. Each GPU has "
        "a power of two of at most its share. The daemon reads it when it starts",
    ] = None
    tensorrt_llm_python: Annotated[Path | None, "the same for TensorRT-LLM"] = None

    def __post_init__(self) -> None:
        for name in ("port", "api_port"):
            if not 0 <= getattr(self, name) <= 65535:
                raise ConfigError(f"{name} must be in 0..65535, got {getattr(self, name)}")
        if self.port == self.api_port != 0:
            raise ConfigError(f"port and api_port are both {self.port}; give them different ports")
        if self.cpu_devices is not None and not 1 <= self.cpu_devices <= 64:
            raise ConfigError(f"cpu_devices must be in 1..64, got {self.cpu_devices}")
        if self.vllm_delta_arena_mib is not None and not 0 <= self.vllm_delta_arena_mib <= 2**22:
            raise ConfigError(f"vllm_delta_arena_mib must be in 0..{2**22}, got {self.vllm_delta_arena_mib}")
        if self.database_url is not None and not self.database_url.startswith("postgresql://"):
            raise ConfigError(
                "database_url must begin with postgresql:// (it is not shown: it may hold a password)"
            )
        check_placement(self.policy, sees_load=False)
        if not 0 <= self.load_threshold <= 1:
            raise ConfigError(f"load_threshold must be in 0..1, got {self.load_threshold}")
        make_variant_policy(self.variant_policy)
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
    def ready_timeout_s(self) -> float:
        """Longest time from a worker's launch until it is ready: that of its start and that of its warm-up."""
        return self.start_timeout_s + DaemonSettings.warm_up_s

    @property
    def state(self) -> Path | str:
        """Location of the state: the path of a SQLite file, or PostgreSQL's URL."""
        return self.home / "state.db" if self.database_url is None else self.database_url

    @property
    def run_folder(self) -> Path:
        return self.home / "run"

    @property
    def log_folder(self) -> Path:
        return self.home / "logs"

    @property
    def fingerprint_folder(self) -> Path:
        return self.home / "fingerprints"

    @property
    def variant_folder(self) -> Path:
        return self.home / "variants"

    @property
    def compressing_folder(self) -> Path:
        """Folder of deltas while they are made by ``variant add``."""
        return self.home / "compressing"

    @property
    def merged_folder(self) -> Path:
        """Folder of the merged checkpoints of variants that are deployments of their own."""
        return self.home / "merged"

    def environment(self) -> dict[str, str]:
        """Return the variables that make a child process read these very settings."""
        values = {f"ISERVE_{f.name.upper()}": getattr(self, f.name) for f in fields(self)}
        return {name: str(value) for name, value in values.items() if value is not None}

    def recorded(self) -> dict[str, str | None]:
        """Return the settings, None for unset, by variable: not the home, and the state's URL without a secret."""
        known = self.environment()
        if self.database_url is not None:
            known["ISERVE_DATABASE_URL"] = _without_secrets(self.database_url)
        names = (f"ISERVE_{f.name.upper()}" for f in fields(self) if f.name != "home")
        return {name: known.get(name) for name in names}


def _without_secrets(url: str) -> str:
    """Return what tells a database from another: user, host and name, without the password and other options."""
    try:
        parts = urlsplit(url)
    except ValueError:  # not one that connects
        return "a URL that cannot be read"
    login, at, host = parts.netloc.rpartition("@")
    netloc = f"{login.partition(':')[0]}{at}{host}"
    query = urlencode([(name, value) for name, value in parse_qsl(parts.query) if name in _TELLING_OPTIONS])
    return urlunsplit(parts._replace(netloc=netloc, query=query, fragment=""))


def load_settings(environment: Mapping[str, str] = os.environ) -> Settings:
    """Return the settings of this process.

    Raises:
        ConfigError: an unknown variable, or a value that cannot be read; all faults are named at once.
    """
    known = {f"ISERVE_{f.name.upper()}": f.name for f in fields(Settings)}
    faults = []
    values: dict[str, object] = {}
    for name, text in environment.items():
        if not name.startswith("ISERVE_") or name in _NOT_SETTINGS:
            continue
        if name not in known:
            faults.append(f"{name} is not a setting (known: {', '.join(sorted(known))})")
            continue
        kind, _ = _kind_and_meaning(known[name])
        try:
            values[known[name]] = _read(kind, text)
        except ValueError:
            faults.append(f"{name}={text!r} is not {_WHAT[kind]}")
    if faults:
        raise ConfigError("; ".join(faults))
    return Settings(**values)  # type: ignore[arg-type]


class SettingRow(NamedTuple):
    """A setting as the reference shows it."""

    variable: str
    default: str
    takes: str
    meaning: str


def setting_rows() -> tuple[SettingRow, ...]:
    """Return all settings, for docs/configuration.md."""
    rows = []
    for setting in fields(Settings):
        kind, meaning = _kind_and_meaning(setting.name)
        default = "unset" if setting.default is None else f"`{setting.default}`"
        if setting.name == "home":
            default = "`~/.local/share/iserve`"  # where XDG_DATA_HOME is not set
        rows.append(SettingRow(f"ISERVE_{setting.name.upper()}", default, _WHAT[kind], meaning))
    return tuple(rows)


def _kind_and_meaning(name: str) -> tuple[str, str]:
    """Return the name of the type that the setting has when it is set, and what it means."""
    hint = get_type_hints(Settings, include_extras=True)[name]
    kind, meaning = get_args(hint)
    return (get_args(kind) or (kind,))[0].__name__, meaning


def _read(kind: str, text: str) -> object:
    """Read a value. Raises ValueError. An empty text is none: it would be the current folder, or every address."""
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
    if kind == "PathList":
        folders = PathList(Path(part) for part in text.split(os.pathsep) if part.strip())
        if not folders or not all(folder.is_absolute() for folder in folders):
            raise ValueError(text)
        return folders
    return {"int": int, "float": float, "str": str}[kind](text)
