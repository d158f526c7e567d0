"""Variants of base models: adapters and deltas are checked and stored by a few threads, and named in the register.

Content is stored before its row and removed after it: a controller that is killed between leaves content without a
row, which the next one collects.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from daemon.variants.store import StoredVariant, VariantStore
from fingerprint.config import SlotFormat
from fingerprint.config_json import read_config
from fingerprint.delta import Delta
from fingerprint.delta.slots import misfit
from fingerprint.errors import BusyError, IserveError, NotFoundError
from fingerprint.lora import LoraAdapter
from fingerprint.sanitize import printable
from iserve.api_documents import ProgressDocument, VariantDocument
from iserve.api_types import check_name
from iserve.base_names import other_base_warning
from iserve.controller.folder_access import Reach
from iserve.controller.stored_values import recorded_request
from iserve.controller.variant_serving import (
    VariantServer,
    has_served,
    routes_by_server,
    servers_of,
    variant_servers,
    why_not_served,
)
from iserve.demo import DEMO_MODEL_NAME
from iserve.merged_variants import drop_merged
from iserve.model_source import ModelSource
from iserve.rest_bodies import VariantBody
from iserve.route_table import VariantRoute
from iserve.settings import Settings
from iserve.state.store import Store, VariantRow
from iserve.variants import variant_for_serving

__all__ = ["Variants"]

log = logging.getLogger(__name__)

_ADDED_AT_ONCE = 2  # they read and write disks, and hash
_MOST_MISFITS = 50_000  # answers that are remembered
_MAX_WAITING = 256  # additions
_GRACE_S = 600.0  # for content without a row: another controller may be about to write it
_TRAINED_ON_CHARS = 500
_ROUTES_KEPT_S = 30.0  # content may be lost otherwise than by this process
_DROP_AFTER_S = 5.0  # for the gateway to have the routes that no longer lead to a content


@dataclass(frozen=True, kw_only=True, slots=True)
class _KeptRoutes:
    """Routes of variants, and what they were made of."""

    key: tuple[int, tuple[VariantServer, ...]]
    made_s: float
    routes: Mapping[str, tuple[VariantRoute, ...]]


class _Deployed(NamedTuple):
    """Deployments as variants see them."""

    servers: tuple[VariantServer, ...]
    names: frozenset[str]  # a variant of that name is served by that one alone
    phases: Mapping[str, str]  # by name


class Variants:
    """Register and content of this home's variants. Thread-safe.

    Args:
        resolve: the model that a name leads to, its weights on the hub included.
        registered: names of registered models.
    """

    def __init__(
        self,
        settings: Settings,
        store: Store,
        resolve: Callable[[str], ModelSource],
        registered: Callable[[], Collection[str]],
    ) -> None:
        self._settings = settings
        self._store, self._resolve, self._registered = store, resolve, registered
        self._content = VariantStore(settings.variant_folder)
        self._pool = ThreadPoolExecutor(_ADDED_AT_ONCE, thread_name_prefix="variants")
        self._drops = ThreadPoolExecutor(1, thread_name_prefix="variants-drop")
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._waiting = 0
        self._adding: dict[str, ProgressDocument] = {}
        self._version = 0  # of register and content
        self._routes: _KeptRoutes | None = None
        self._misfits: dict[tuple[str, str, SlotFormat], str | None] = {}  # by content, base and format
        self._naming = threading.Lock()  # content is removed while no row is about to name it

    def add_soon(self, body: VariantBody, caller: Reach) -> Future[VariantDocument]:
        """Have an adapter added by one of a few threads.

        Raises:
            BusyError: too many wait already.
        """
        with self._lock:
            if self._waiting >= _MAX_WAITING:
                raise BusyError(f"{self._waiting} adapters are being added already; try again later")
            self._waiting += 1

        def work() -> VariantDocument:
            of_model = self._of_model(body)
            caller.check(body.path)
            if of_model.base == body.base:  # else it is a deployment's, which this caller may use
                caller.check(body.base, self._registered())
            return self.add(of_model)

        future = self._pool.submit(work)
        future.add_done_callback(lambda _: self._leave())
        return future

    def _of_model(self, body: VariantBody) -> VariantBody:
        """Return ``body`` with the model of the deployment that it names as its base, if it names one."""
        if body.base in self._registered():
            return body
        named = (row for row in self._store.deployments() if row.name == body.base)
        model = next((recorded_request(row).model or DEMO_MODEL_NAME for row in named), body.base)
        return body.model_copy(update={"base": model})

    def _leave(self) -> None:
        with self._lock:
            self._waiting -= 1

    def add(self, body: VariantBody) -> VariantDocument:
        """Check an adapter or a delta and its fit to the base, store it and name it.

        Raises:
            ConflictError: the name is in use, or there are too many variants.
            BadInputError: it cannot be served, or not on this base.
        """
        name, started_s = check_name(body.name), time.monotonic()
        self._store.variants.check_free(name)

        def show(done: int, total: int, step: str = "MiB stored") -> None:
            elapsed_s = time.monotonic() - started_s
            with self._lock:
                self._adding[name] = ProgressDocument(
                    step=step, done=done >> 20, total=total >> 20, elapsed_s=elapsed_s
                )

        try:
            show(0, 0, "checking")
            source = self._resolve(body.base)
            variant = variant_for_serving(body.path, source)
            stored = self._content.add(variant, show)
            row = self._name(_row(body, source, variant, stored), variant, replace=body.replace)
        finally:
            with self._lock:
                self._adding.pop(name, None)
        return self._whole_document(row, new_bytes=stored.new_bytes)

    def _name(self, row: VariantRow, variant: LoraAdapter | Delta, *, replace: bool) -> VariantRow:
        """Register ``row``, whose content is in the store; return what is registered."""
        try:
            with self._naming:
                if not self._content.has(row.content_hash):  # removed with its last name since it was stored
                    self._content.add(variant)
                kept, former = self._store.variants.put(row, replace=replace)
                self._changed()
        except IserveError:
            self._drop(row.content_hash)
            raise
        if former is None or former.created_at != kept.created_at:
            kind = "variant-added" if former is None else "variant-replaced"
            self._store.add_event(None, kind, f"{row.name}: {kept.engine_name} of {kept.base}")
        if former is not None and former.content_hash != kept.content_hash:
            self._drop_soon(former.content_hash)
        return kept

    def progress(self, name: str) -> ProgressDocument:
        """Return the progress of an addition. Raises NotFoundError: none of that name is under way."""
        with self._lock:
            found = self._adding.get(name)
        if found is None:
            raise NotFoundError(f"no variant named {name[:80]!r} is being added")
        return found

    def all(self) -> tuple[VariantDocument, ...]:
        deployed = self._deployed()
        return tuple(self._document(row, deployed) for row in self._store.variants.all())

    def get(self, name: str) -> VariantDocument:
        return self._whole_document(self._store.variants.get(name))

    def pin(self, name: str, *, pinned: bool) -> VariantDocument:
        was_pinned = self._store.variants.get(name).pinned
        self._store.variants.pin(name, pinned=pinned)
        self._changed()
        if pinned != was_pinned:
            done = "pinned" if pinned else "unpinned"
            self._store.add_event(None, f"variant-{done}", f"{name}: {done}")
        return self.get(name)

    def remove(self, name: str) -> VariantDocument:
        """Forget a variant and return what it was; content that no other has is removed in the background.

        A deployment of its own ends first, in the background too, and its merged checkpoint with it.
        """
        removed = self.get(name)
        row, own = self._store.variants.remove(name)
        self._changed()
        if own is not None:
            self._store.add_event(own, "removing", f"{name}: removal asked for, with its variant")
        self._store.add_event(None, "variant-removed", f"{name}: {row.engine_name} of {row.base}")
        self._drop_soon(row.content_hash)
        return removed

    def servers_of(self, row: VariantRow, servers: Iterable[VariantServer]) -> tuple[str, ...]:
        """Return the deployments that can serve a variant; the first one does."""
        return servers_of(row, servers, self._misfit)

    def _misfit(self, row: VariantRow, format_: SlotFormat) -> str | None:
        """Return what slots of ``format_`` do not hold of a delta, as ``fingerprint.delta.slots.misfit``."""
        key, known = (row.content_hash, row.base_directory, format_), self._misfits
        if key not in known:
            try:
                manifest = self._content.delta(row.content_hash)
                config = read_config(Path(row.base_directory))
            except IserveError as error:  # not remembered: it may be mended
                return str(error)
            if len(known) >= _MOST_MISFITS:
                known = self._misfits = {}  # not emptied: another thread may be about to look up what it found
            family, is_tied = str(config.get("model_type", "")), bool(config.get("tie_word_embeddings"))
            known[key] = None if manifest is None else misfit(manifest, format_, family, is_tied=is_tied)
        return known[key]

    def routes(self, servers: tuple[VariantServer, ...]) -> Mapping[str, tuple[VariantRoute, ...]]:
        """Return the routes of variants by the deployment that serves each; nothing is read without one that can.

        They are kept until something changes, for they are asked for several times a second.
        """
        if not servers:
            return {}
        with self._lock:
            key, kept = (self._version, servers), self._routes
        now_s = time.monotonic()
        if kept is None or kept.key != key or now_s - kept.made_s > _ROUTES_KEPT_S:
            found = routes_by_server(self._store.variants.all(), servers, self._stored(), self._misfit)
            kept = _KeptRoutes(key=key, made_s=now_s, routes=found)
            with self._lock:
                self._routes = kept
        return kept.routes

    def _changed(self) -> None:
        with self._lock:
            self._version += 1

    def drop_merged(self) -> None:
        """Remove the merged checkpoints that no deployment serves any longer."""
        try:
            drop_merged(self._settings, self._requests)
        except IserveError as error:
            log.warning("%s; the next start of the controller does", error)

    def _requests(self) -> tuple[str, ...]:
        """Return what deployments are asked for, updates that are under way included."""
        rows = self._store.deployments()
        return tuple(text for row in rows for text in (row.request, row.update_request) if text is not None)

    def collect_soon(self) -> None:
        """Have a thread remove what killed controllers left, and report variants without content."""
        self._pool.submit(self._collect)

    def close(self) -> None:
        self._closing.set()
        for pool in (self._pool, self._drops):
            pool.shutdown(wait=False, cancel_futures=True)

    def _collect(self) -> None:
        try:
            for content in self._content.contents():
                if content.added_at < time.time() - _GRACE_S:
                    self._drop(content.content_hash)
            if self._content.root.exists():
                self._content.collect()
            self.drop_merged()
            stored = self._stored()
            for row in self._store.variants.all():
                if row.content_hash not in stored:
                    log.warning("variant %s: %s", row.name, why_not_served(row, (), is_stored=False))
        except IserveError as error:
            log.warning("collecting variants: %s", error)
        except Exception:
            log.exception("collecting variants")

    def _drop_soon(self, content_hash: str) -> None:
        """Remove a content that no variant has, once the gateway asks for it no more."""
        due_s = time.monotonic() + _DROP_AFTER_S

        def work() -> None:
            if not self._closing.wait(due_s - time.monotonic()):  # else the next start collects it
                self._drop(content_hash)

        self._drops.submit(work)

    def _drop(self, content_hash: str) -> None:
        """Remove a content that no variant has."""
        try:
            with self._naming:
                if not self._store.variants.has_content(content_hash):
                    self._content.remove(content_hash)
                    self._changed()
        except IserveError as error:
            log.warning("removing the content of a variant: %s; the next start of the controller does", error)

    def _deployed(self) -> _Deployed:
        rows = self._store.deployments()
        return _Deployed(
            variant_servers(rows),
            frozenset(row.name for row in rows if has_served(row)),
            {row.name: row.phase for row in rows if row.desired == "running"},
        )

    def _stored(self) -> frozenset[str]:
        return frozenset(content.content_hash for content in self._content.contents())

    def _whole_document(self, row: VariantRow, new_bytes: int | None = None) -> VariantDocument:
        """Return the document of a variant, with what its manifest says; one that cannot be read says nothing."""
        found = self._document(row, self._deployed(), new_bytes)
        if row.max_rank:  # a delta has the hashes of its base
            warning = other_base_warning(row.trained_on, row.base, Path(row.base_directory))
            found = replace(found, base_warning=warning)
        with suppress(IserveError):
            manifest = None if row.max_rank else self._content.delta(row.content_hash)
            if manifest is not None and manifest.adapter is not None:
                adapter = manifest.adapter
                return replace(
                    found, made_of=printable(f"{adapter.method}: {', '.join(adapter.kinds) or 'plain'}")
                )
        return found

    def _document(self, row: VariantRow, deployed: _Deployed, new_bytes: int | None = None) -> VariantDocument:
        is_stored, servers, is_own = (
            self._content.has(row.content_hash),
            deployed.servers,
            row.name in deployed.names,
        )
        served_by = (row.name,) if is_own else self.servers_of(row, servers) if is_stored else ()
        why = None if is_own else why_not_served(row, servers, self._misfit, is_stored=is_stored)
        if why is not None and row.name in deployed.phases:
            why = f"its own deployment is {deployed.phases[row.name]}: `iserve show {row.name}` says more"
        return VariantDocument(
            name=row.name,
            base=row.base,
            base_directory=row.base_directory,
            content_hash=row.content_hash,
            engine_name=row.engine_name,
            rank=row.max_rank,
            num_modules=row.num_modules,
            size_bytes=row.num_bytes,
            new_bytes=new_bytes,
            disk_bytes=row.disk_bytes,
            trained_on=row.trained_on,
            pinned=row.pinned,
            created_at=row.created_at,
            deployments=served_by,
            why_not_served=why,
            on_disk=is_stored,
        )


def _row(
    body: VariantBody, source: ModelSource, variant: LoraAdapter | Delta, stored: StoredVariant
) -> VariantRow:
    trained_on: str | None
    if isinstance(variant, Delta):
        trained_on, rank, changed = variant.manifest.base_name, 0, len(variant.manifest.changed)
    else:
        trained_on, rank, changed = variant.config.base_model, variant.max_rank, len(variant.modules)
    return VariantRow(
        name=body.name,
        base=body.base,
        base_directory=os.path.realpath(source.directory),
        content_hash=stored.content_hash,
        max_rank=rank,
        num_modules=changed,
        num_bytes=stored.num_bytes,
        disk_bytes=stored.disk_bytes,
        trained_on=None if trained_on is None else printable(trained_on[:_TRAINED_ON_CHARS]),
        pinned=body.pinned,
        created_at=time.time(),
    )
