"""For what a profile holds: the devices, driver, engine and number of requests at once that it was taken with."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from daemon.engines.base import Engine
from daemon.status import NodeStatus
from fingerprint.codec import to_json
from fingerprint.engines import traits_of
from fingerprint.gpus import match_device
from fingerprint.measurements import Profile
from fingerprint.profile_checks import deployed_graph_tokens
from iserve.api_documents import NodeDocument

__all__ = [
    "covers",
    "described",
    "differences",
    "has_todays_graphs",
    "key_without_driver",
    "machine_key",
    "release_to_start",
    "why_unused",
]

Versions = Sequence[tuple[str, str]]

_UNWATCHED = frozenset({"python"})  # recorded with an engine's packages; a profile holds whichever it is


def machine_key(node: NodeStatus, engine: Engine) -> str:
    """Return a key that is equal while a profile stays valid: the same devices, driver and engine versions.

    Memory is counted in whole GiB, because a CPU share's changes a little from boot to boot.
    """
    if node.driver is None:
        return key_without_driver(node, engine)
    return _hashed((*_identity(node, engine), node.driver))


def key_without_driver(node: NodeStatus, engine: Engine) -> str:
    """Return the key where there is no driver; and, on GPUs, the one by which older profiles are stored."""
    return _hashed(_identity(node, engine))


def _identity(node: NodeStatus, engine: Engine) -> tuple[object, ...]:
    devices = sorted((d.kind, d.name, d.total_bytes >> 30, len(d.cores)) for d in node.devices)
    return devices, engine.versions()


def _hashed(identity: tuple[object, ...]) -> str:
    return hashlib.sha256(to_json(identity)).hexdigest()[:16]


def release_to_start(engine: Engine) -> str | None:
    """Return the installed version that workers of ``engine`` are to be started with.

    None where there is one at most: the embedded engine's, or nothing is installed.
    """
    if not engine.capabilities().own_environment:
        return None
    return dict(engine.versions()).get("engine", "").rpartition(" ")[2] or None


def described(versions: Versions) -> str:
    """Return versions as text: ``vllm 0.24.0, torch 2.11.0``."""
    named = (version if name == "engine" else f"{name} {version}" for name, version in versions)
    return ", ".join(named) or "not installed"


def covers(profile: Profile, batch: int) -> bool:
    """Return whether the engine that was measured was started for ``batch`` sequences at least.

    An engine that is started for more sequences takes more memory than was counted. The memory of an engine with a
    slot for each sequence is extrapolated from the steps that were run.
    """
    started_for = _started_for(profile)
    return started_for == 0 or batch <= started_for


def has_todays_graphs(profile: Profile) -> bool:
    """Return whether the engine was launched with the CUDA graphs that a deployment of the model has."""
    return profile.graph_tokens == deployed_graph_tokens(profile)


def _started_for(profile: Profile) -> int:
    """Return the sequences that the measured engine was started for; 0: the profile holds for any number.

    Earlier profiles by the wall clock recorded only how many shared the KV cache, which is the same number.
    """
    if traits_of(profile.engine).has_slots:
        return 0
    return max((point.max_batch or point.kv_sequences for point in profile.memory), default=0)


def why_unused(profile: Profile, node: NodeStatus, versions: Versions, batch: int) -> str:
    """Return a sentence on a profile that is there and does not hold now.

    Args:
        versions: of the engine, now.
        batch: requests at once that are asked for.
    """
    found = differences(profile, node, versions)
    if not found and not covers(profile, batch):
        found = [f"an engine started for {_started_for(profile)} requests at once, {batch} are asked for"]
    how = ", ".join(found) or "other devices"
    return f"a profile on {profile.engine} of {profile.created_at} is not used: it was taken with {how}"


def differences(profile: Profile, node: NodeStatus | NodeDocument, versions: Versions) -> list[str]:
    """Return what is different now from when the profile was taken: versions, driver, devices, CUDA graphs."""
    then = profile.machine
    found = _other_versions(then.versions, versions)
    if then.driver != node.driver:
        found.append(f"driver {then.driver or 'unknown'} (now {node.driver or 'none'})")
    names = sorted({_name(device.kind, device.name) for device in node.devices})
    was = then.cpu_model if then.device.is_cpu else then.device.name
    if names != [was]:
        found.append(f"{was} (now {' and '.join(names) or 'no device'})")
    if not has_todays_graphs(profile):
        found.append(
            f"CUDA graphs of up to {profile.graph_tokens:,} tokens (now {deployed_graph_tokens(profile):,})"
        )
    if then.num_devices != len(node.devices):
        found.append(f"{then.num_devices} devices (now {len(node.devices)})")
    return found


def _other_versions(then: Versions, now: Versions) -> list[str]:
    """Return packages of another version, removed, or added; of an engine that is gone only itself."""
    before, after = {name: version for name, version in then if name not in _UNWATCHED}, dict(now)
    if not after:
        before = {name: version for name, version in before.items() if name == "engine"}
    found = [
        f"{described([(name, version)])} (now {after.get(name, 'not installed')})"
        for name, version in before.items()
        if after.get(name) != version
    ]
    come = [(name, version) for name, version in now if name not in before]
    return [*found, *(f"no {name} (now {version})" for name, version in come)]


def _name(kind: str, name: str) -> str:
    known = match_device(name) if kind == "cuda" else None
    return name if known is None else known.name
