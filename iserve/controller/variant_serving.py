"""Deployments that serve a base model's variants: those of the base whose workers have adapter slots.

A variant is served by the oldest of them that holds its rank, and by that one alone: a name leads to one
deployment.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache

from daemon.engines.registry import get_engine
from daemon.worker_spec import WorkerSpec
from fingerprint.config import DeploymentConfig, SlotFormat
from fingerprint.engines import traits_of
from iserve.controller.stored_values import is_routed, recorded_workers
from iserve.route_table import VariantRoute
from iserve.state.store import DeploymentRow, VariantRow

__all__ = [
    "Misfit",
    "VariantServer",
    "adapter_slots",
    "every_delta_fits",
    "has_served",
    "loaded_adapters",
    "routes_by_server",
    "servers_of",
    "variant_servers",
    "why_not_served",
]


Misfit = Callable[[VariantRow, SlotFormat], str | None]
"""Returns what slots of a format do not hold of a delta, with the reason; None: they hold all."""


def every_delta_fits(variant: VariantRow, format_: SlotFormat) -> None:
    """Find nothing: for variants of which no content is asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VariantServer:
    """Deployment whose workers have adapter slots."""

    deployment: str
    base_directory: str
    config: DeploymentConfig  # of its workers
    shares_places: bool = False  # whether adapters of small ranks share places there

    @property
    def engine(self) -> str:
        return self.config.engine

    @property
    def max_rank(self) -> int:
        """Largest rank that a slot holds."""
        return self.config.adapter_rank

    @property
    def max_delta_bytes(self) -> int:
        """Bytes of the largest delta that a slot holds."""
        return self.config.delta_mib << 20

    @property
    def delta_format(self) -> SlotFormat:
        """Format of the deltas that a slot holds, where slots have one."""
        return self.config.delta_format

    @property
    def has_delta_slots(self) -> bool:
        return self.config.has_delta_slots

    def place_share(self, variant: VariantRow) -> float:
        """Return the share that a variant takes of a place at a worker."""
        if variant.is_delta or not self.shares_places:
            return 1.0
        return self.config.place_share(variant.max_rank)

    def serves(self, variant: VariantRow, misfit: Misfit) -> bool:
        if self.base_directory != variant.base_directory:
            return False
        if variant.is_delta and self.has_delta_slots:
            return misfit(variant, self.delta_format) is None
        if variant.is_delta:
            return traits_of(self.engine).holds_deltas_by_size and variant.num_bytes <= self.max_delta_bytes
        return variant.max_rank <= self.max_rank


def has_served(row: DeploymentRow) -> bool:
    """Return whether a deployment takes requests and has served before, so that a variant of its name is its own.

    Until then slots of the base go on to serve such a variant: the deployment may yet be refused.
    """
    return is_routed(row) and row.phase != "launching" and row.workers is not None


def adapter_slots(workers: Collection[WorkerSpec]) -> int:
    """Return the slots of each worker; 0 where they differ."""
    configs = [spec.config for spec in workers]
    slots = {(one.adapter_slots, one.adapter_rank, one.delta_mib, one.delta_format) for one in configs}
    return slots.pop()[0] if len(slots) == 1 else 0


def loaded_adapters(workers: Collection[WorkerSpec]) -> int:
    """Return the places of loaded adapters at each worker; 0 where they differ."""
    return next(iter(workers)).config.loaded_adapters if adapter_slots(workers) else 0


def variant_servers(rows: Iterable[DeploymentRow]) -> tuple[VariantServer, ...]:
    """Return the deployments of ``rows`` that serve variants, the oldest first."""
    found = []
    for row in sorted(rows, key=lambda row: row.id):
        workers = recorded_workers(row) if is_routed(row) else ()
        folders = {_resolved(spec.checkpoint) for spec in workers}
        if adapter_slots(workers) and len(folders) == 1:
            found.append(
                VariantServer(
                    deployment=row.name,
                    base_directory=folders.pop(),
                    config=workers[0].config,
                    shares_places=all(spec.shares_places for spec in workers),
                )
            )
    return tuple(found)


def servers_of(
    variant: VariantRow, servers: Iterable[VariantServer], misfit: Misfit = every_delta_fits
) -> tuple[str, ...]:
    """Return the deployments that can serve ``variant``; the first one does."""
    return tuple(server.deployment for server in servers if server.serves(variant, misfit))


def why_not_served(
    variant: VariantRow,
    servers: Iterable[VariantServer],
    misfit: Misfit = every_delta_fits,
    *,
    is_stored: bool,
) -> str | None:
    """Return the reason why no deployment serves ``variant``, with the way out; None: one does."""
    servers, base = tuple(servers), shlex.quote(variant.base)
    if not is_stored:
        return (
            "its tensors are not in this home; add its adapter again: "
            f"iserve variant add {variant.name} --base {base} PATH"
        )
    if servers_of(variant, servers, misfit):
        return None
    if variant.is_delta:
        return _why_no_delta(variant, servers, misfit)
    ranks = [server.max_rank for server in servers if server.base_directory == variant.base_directory]
    if ranks:
        return (
            f"its rank is {variant.max_rank}, and deployments of {variant.base} hold ranks up to {max(ranks)}: "
            f"iserve update DEPLOYMENT --rank {variant.max_rank}"
        )
    return (
        f"no deployment of {variant.base} has adapter slots: iserve update DEPLOYMENT --variants N, or "
        f"iserve deploy {base} --variants N"
    )


def _why_no_delta(variant: VariantRow, servers: Iterable[VariantServer], misfit: Misfit) -> str:
    """Return the reason why none of ``servers`` serves a delta, with the way out."""
    need, base = -(-variant.num_bytes // 2**20), shlex.quote(variant.base)
    of_base = [server for server in servers if server.base_directory == variant.base_directory]
    able = [server for server in of_base if traits_of(server.engine).holds_deltas_by_size]
    alone = f"or merge it into a deployment of its own: iserve variant deploy {variant.name}"
    with_format = [server.delta_format for server in of_base if server.has_delta_slots]
    if with_format:
        return (
            f"slots of deployments of {variant.base} hold deltas in {with_format[0]}, and "
            f"{misfit(variant, with_format[0])}; {alone}"
        )
    if able:
        return (
            f"it is a delta of {need:,} MiB, and slots of deployments of {variant.base} hold deltas of up to "
            f"{max(server.max_delta_bytes for server in able) >> 20:,} MiB: iserve update DEPLOYMENT --delta-mib "
            f"{need}; {alone}"
        )
    if unused := next((server for server in of_base if _could_hold(server.engine)), None):
        return (
            f"it is a delta, and slots of {unused.deployment} hold none: iserve update {unused.deployment} "
            f"--delta-format FORMAT, that of its matrices; {alone}"
        )
    if of_base:
        engines = ", ".join(sorted({traits_of(server.engine).title or server.engine for server in of_base}))
        return (
            f"it is a delta of a full fine-tune, and {variant.base} is deployed on {engines}, which serves none: "
            f"iserve deploy {base} --engine torch --variants N --delta-mib {need}; {alone}"
        )
    return (
        f"it is a delta of {need:,} MiB, and no deployment of {variant.base} has slots for one: "
        f"iserve deploy {base} --engine torch --variants N --delta-mib {need}; {alone}"
    )


def _could_hold(engine: str) -> bool:
    """Return whether slots of an engine, as it is installed, could have a format for deltas."""
    return bool(get_engine(engine).capabilities().deltas)


def routes_by_server(
    variants: Iterable[VariantRow],
    servers: Collection[VariantServer],
    stored: Collection[str],
    misfit: Misfit = every_delta_fits,
) -> dict[str, tuple[VariantRoute, ...]]:
    """Return the routes of the variants whose content is among ``stored``, by the deployment that serves each."""
    found: dict[str, list[VariantRoute]] = {}
    for variant in variants:
        if variant.content_hash not in stored:
            continue
        server = next((server for server in servers if server.serves(variant, misfit)), None)
        if server is not None:
            found.setdefault(server.deployment, []).append(_route(variant, server))
    return {name: tuple(routes) for name, routes in found.items()}


def _route(variant: VariantRow, server: VariantServer) -> VariantRoute:
    is_unchecked = variant.is_delta and server.has_delta_slots
    return VariantRoute(
        name=variant.name,
        engine_name=variant.engine_name,
        content_hash=variant.content_hash,
        created=int(variant.created_at),
        num_bytes=variant.num_bytes,
        num_tensors=None if variant.is_delta else 2 * variant.num_modules,
        pinned=variant.pinned,
        base_directory=server.base_directory if is_unchecked else None,
        place_share=server.place_share(variant),
    )


@lru_cache(maxsize=256)
def _resolved(folder: str) -> str:
    return os.path.realpath(folder)
