"""Checks of ``iserve doctor``: the home, its state and processes, the engines and the links of the GPUs."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from daemon.engines.external import ExternalEngine
from daemon.engines.registry import ENGINES
from daemon.interconnect import has_links, kept_links, links_source
from fingerprint.errors import IserveError, UnavailableError
from iserve.cli.home_processes import daemon_client, living_workers, process_states
from iserve.gateway.event_loop import event_loop
from iserve.planning.words import links_times
from iserve.settings import Settings

__all__ = ["Finding", "examine"]

_LOW_DISK_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of a check: in order, a problem, or the absence of something optional (which is in order)."""

    ok: bool
    text: str
    absent: bool = False

    @property
    def verdict(self) -> str:
        return "absent" if self.absent and self.ok else "ok" if self.ok else "PROBLEM"


def examine(settings: Settings, *, fix: bool) -> tuple[Finding, ...]:
    """Return what is right and wrong with this installation."""
    findings = [_home(settings.home), *_state(settings)]
    for state in process_states(settings)[:3]:
        ok = state.pid is not None
        findings.append(
            Finding(ok, f"{state.name}: {f'pid {state.pid}, {state.url}' if ok else 'not running; `iserve up`'}")
        )
    findings.append(Finding(True, f"gateway's event loop: {event_loop().text}"))
    findings += _leftovers(settings, fix=fix)
    findings += _engines(settings)
    findings += _links(settings)
    return tuple(findings)


def _engines(settings: Settings) -> Iterator[Finding]:
    """Yield each engine's versions and Python; an absent engine is a problem where a setting names its Python."""
    for engine in ENGINES.values():
        named = getattr(settings, f"{engine.name.replace('-', '_')}_python", None)
        table = engine.capabilities()
        if table.unavailable is not None:
            yield Finding(named is None, f"engine {engine.name}: {table.unavailable}", absent=True)
            continue
        versions = ", ".join(v if name == "engine" else f"{name} {v}" for name, v in engine.versions())
        limits = "" if table.unprofiled is None else f"; {table.unprofiled}"
        unseen = "" if table.verified else "; contract-tested against its documentation, never run"
        python, unknown = sys.executable, ""
        if isinstance(engine, ExternalEngine):
            found = engine.installed()
            python = found.python
            if engine.standing(found) == "unknown":
                unknown = "; no release that iServe knows: it has every option, nothing else is verified"
        yield Finding(True, f"engine {engine.name}: {versions}, for {python}{limits}{unseen}{unknown}")


def _links(settings: Settings) -> Iterator[Finding]:
    """Yield the measured times of the links between the GPUs, or that plans count with the datasheet's.

    The daemon knows the GPUs; without one, as on a machine with fewer than two, there is nothing to say.
    """
    daemon = daemon_client(settings)
    if daemon is None:
        return
    try:
        node = daemon.node()
    except UnavailableError:
        return
    links = kept_links(node)
    for group in links:
        how = f"measured with {links_source(node)}"
        yield Finding(True, f"links of {group.gpus} GPUs: {links_times(group)}; {how}")
    if has_links(node) and not links:
        yield Finding(
            True,
            f"links between {len(node.devices)} GPUs: not measured, the datasheet's are planned with; they "
            "are measured at the first profile or deploy that finds all GPUs idle (a failed one is logged)",
            absent=True,
        )


def _home(home: Path) -> Finding:
    """Check the home, which is not made here: looking changes nothing."""
    there = next(folder for folder in (home, *home.parents) if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return Finding(False, f"home {home} cannot be used: {there} cannot be written to; set ISERVE_HOME")
    free = shutil.disk_usage(there).free
    return Finding(free > _LOW_DISK_BYTES, f"home {home}: {free / 2**30:.1f} GiB of disk free")


def _state(settings: Settings) -> Iterator[Finding]:
    """Check the database, where it is not a file of the home. Its URL is not shown: it may hold a password."""
    if settings.database_url is None:
        return
    from iserve.state.store import Store

    try:
        store = Store.read_only(settings.database_url)
        try:
            new = store.is_new()
        finally:
            store.close()
    except IserveError as error:
        yield Finding(False, str(error))
        return
    yield Finding(True, f"state: PostgreSQL answers{', nothing was ever kept there' if new else ''}")


def _leftovers(settings: Settings, *, fix: bool) -> Iterator[Finding]:
    """Check for workers that live although no daemon watches them."""
    if daemon_client(settings) is not None:
        yield Finding(True, "workers: watched by the daemon")
        return
    found = False
    for worker in living_workers(settings):
        found = True
        gone = fix and worker.end(grace_s=10)
        pid = "" if worker.lease is None else f" (pid {worker.lease.pid})"
        yield Finding(gone, f"worker {worker.folder.name}{pid}: {'ended' if gone else 'unwatched; --fix ends it'}")
    if not found:
        yield Finding(True, "workers: none left over")
