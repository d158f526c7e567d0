"""Inventory of engines: what is installed where, how far it is verified, and which deployments it serves."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from daemon.engines.environments import EngineEnvironment, environments
from daemon.engines.external import ExternalEngine
from daemon.engines.registry import ENGINES
from fingerprint.errors import EngineError
from iserve.api_documents import EngineDocument
from iserve.controller.stored_values import recorded_workers
from iserve.settings import Settings
from iserve.state.store import Store

__all__ = ["deployments_on", "engine_documents", "releases"]

_ENDED_PHASES = frozenset({"failed", "refused"})


def engine_documents(home: Path) -> tuple[EngineDocument, ...]:
    """Return every installation of each engine, the one that is used first, and the engines that have none."""
    documents: list[EngineDocument] = []
    for engine in ENGINES.values():
        if isinstance(engine, ExternalEngine):
            documents += _foreign(engine, home)
            continue
        problem = engine.capabilities().unavailable
        versions = dict(engine.versions())
        there = problem is None
        documents.append(
            EngineDocument(
                engine=engine.name,
                version=versions[engine.name] if there else None,
                python=sys.executable if there else None,
                source="here" if there else None,
                verified="run" if there else None,
                is_used=there,
                problem=problem,
            )
        )
    return tuple(documents)


def releases(home: Path, engine: str) -> frozenset[str]:
    """Return the releases of an engine that are installed on this machine."""
    found = (document for document in engine_documents(home) if document.engine == engine)
    return frozenset(document.version for document in found if document.version is not None)


def _foreign(engine: ExternalEngine, home: Path) -> Iterator[EngineDocument]:
    try:
        used, problem = engine.interpreter.find(), None
    except EngineError as error:
        used, problem = None, str(error)
        yield EngineDocument(engine=engine.name, problem=problem)
    installations, silent = engine.interpreter.survey()
    for reason in map(str, silent):
        if reason != problem:
            yield EngineDocument(engine=engine.name, problem=reason)
    for found in installations:
        version = found.version(engine.interpreter.distribution)
        document = EngineDocument(
            engine=engine.name,
            version=version,
            python=found.python,
            source=found.source,
            verified=engine.standing(found),
            is_used=found == used,
        )
        try:
            engine.check(found)
        except EngineError as error:
            document = replace(document, problem=str(error))
        yield document
    for one in environments(home, engine.name):
        if not one.complete:
            yield EngineDocument(
                engine=engine.name,
                version=one.version,
                source="environment",
                problem=f"unfinished; `iserve engines install {one.engine} --version {one.version}` begins it "
                f"anew, `iserve engines rm {one.engine} {one.version}` removes it",
            )


def deployments_on(environment: EngineEnvironment, engine: ExternalEngine, settings: Settings) -> tuple[str, ...]:
    """Return the names of deployments whose workers are started with the Python of ``environment``."""
    if settings.database_url is None and not (settings.home / "state.db").exists():
        return ()
    store = Store.read_only(settings.state)
    try:
        rows = () if store.is_new() else store.deployments()
    finally:
        store.close()
    names = []
    for row in rows:
        if row.desired != "running" or row.phase in _ENDED_PHASES:
            continue
        workers = [worker for worker in recorded_workers(row) if worker.config.engine == engine.name]
        if any(_starts_with(engine, worker.engine_version, environment) for worker in workers):
            names.append(row.name)
    return tuple(names)


def _starts_with(engine: ExternalEngine, version: str | None, environment: EngineEnvironment) -> bool:
    try:
        return engine.interpreter.find(version).python == str(environment.python)
    except EngineError:
        return False
