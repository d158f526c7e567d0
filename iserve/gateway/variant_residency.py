"""Residency of LoRA variants at the workers of one deployment: what is loaded where, and the loads under way.

A request is admitted to a worker first (``placement.variant_routing`` chooses), which starts the load that it
needs; all requests of the same cold variant wait for one load. What a worker has loaded is asked of it once, and
again after any sign that it was restarted. A variant that has left the table, or was registered again with another
content, keeps its requests in flight and is unloaded after them. Folders of what is loaded are asked for again and
again: vLLM reads one once more when its copy was dropped, and ends where that fails (decision 42). An idle worker
loads variants before they are asked for (``placement.variant_preload``); those that failed there are left out.
A load that finds a worker's memory full has an idle variant unloaded and is tried again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from iserve.gateway.errors import ApiError
from iserve.gateway.variant_changes import VariantChanges, variant_places
from iserve.gateway.variant_loader import LoadFailedError, NoMemoryError, VariantLoader, keep_folders
from iserve.gateway.variant_worker import (
    NoPlaceError,
    Room,
    VariantObserver,
    VariantRequest,
    VariantWorker,
    chosen_preloads,
    loads_ahead,
    reload_s,
    runnable_variants,
    variants_of,
)
from iserve.gateway.worker_http import NotBegunError
from iserve.http_stream import NotReachedError
from iserve.route_table import Route, VariantPlace, VariantRoute, WorkerTarget
from placement.variant_routing import (
    BACKGROUND_LOADS,
    Admission,
    Candidate,
    VariantPolicy,
    WaitingRequest,
    WorkerVariants,
    admit_waiting,
    choose_prefetch,
    make_variant_policy,
    protected_pins,
)
from planner.pending_loads import LoadsAhead

__all__ = ["NoPlaceError", "Room", "VariantObserver", "VariantRequest", "VariantResidency"]

_KEEP_S = 120.0  # between two times that folders of loaded variants are asked for, well within the store's grace
_RETRY_AFTER_S = 1
_RETRY_S = 5.0  # after a failed load, until one begins that no request was admitted for

_log = logging.getLogger(__name__)
_W = TypeVar("_W", bound=WaitingRequest)


class VariantResidency:
    """Variants of one deployment.

    Args:
        changed: called when a waiting request may have become possible.
        busy: URLs of workers with a request of any kind, a live view; ``preload`` is called as one falls idle.
        record_load: called with the time of each load that a worker has made.
        keep_s: between two times that the folders of loaded variants are asked for.
    """

    def __init__(
        self,
        route: Route,
        changed: Callable[[], None],
        loader: VariantLoader,
        observer: VariantObserver,
        policy: VariantPolicy | None = None,
        busy: Collection[str] = (),
        record_load: Callable[[float], None] = lambda took_s: None,
        keep_s: float = _KEEP_S,
    ) -> None:
        self._policy = policy or make_variant_policy()
        self._changed, self._loader, self._observer, self._busy = changed, loader, observer, busy
        self._record_load = record_load
        self._loop = asyncio.get_running_loop()
        self._workers: dict[str, VariantWorker] = {}  # by URL
        self._variants: dict[str, VariantRoute] = {}  # by public name
        self._current: dict[str, VariantRoute] = {}  # by engine name
        self._served_s: dict[str, float] = {}  # by engine name
        self._wanted: dict[str, None] = {}  # engine names of waiting requests
        self._passes = False  # one of those before the request that is offered a worker goes on waiting
        self.changes = VariantChanges()
        self._going_on = False  # a round is due in this turn of the loop
        self._keeping = self._loop.create_task(self._keep_folders(keep_s))
        self.update(route)

    def close(self) -> None:
        """Ask for no folder any more: the deployment has left the table."""
        self._keeping.cancel()

    def update(self, route: Route) -> None:
        """Follow a new table."""
        self._variants = {variant.name: variant for variant in route.variants}
        self._loads_on_gpu = route.loads_on_gpu
        self._current = {one.engine_name: one for one in sorted(route.variants, key=lambda one: one.created)}
        self._served_s = {name: at_s for name, at_s in self._served_s.items() if name in self._current}
        pinned = [variant.engine_name for variant in route.variants if variant.pinned]
        for target in route.workers:
            worker = self._workers.get(target.url)
            if worker is None:
                places = max(1, route.adapter_slots), max(1, route.loaded_adapters)
                state = WorkerVariants(*places, lambda name: reload_s(self._current.get(name)), self._share)
                worker = self._workers[target.url] = VariantWorker(target, state)
            elif not target.ready or target.token != worker.target.token:
                worker.forget()
                worker.failed.restart()
            worker.target, worker.is_listed = target, True
            worker.failed.keep(self._current.keys())
            if route.adapter_slots:
                worker.state.slots, worker.state.max_loaded = route.adapter_slots, route.loaded_adapters
            worker.state.pinned = frozenset(protected_pins(pinned, worker.state.max_loaded, self._share))
        for url in self._workers.keys() - {target.url for target in route.workers}:
            self._workers[url].is_listed = False
            self._drop_unused(url)
        self._maintain()
        self.preload()

    def _share(self, name: str) -> float:
        return self._current[name].place_share if name in self._current else 1.0

    def resolve(self, request: VariantRequest) -> None:
        """Let a request that has no worker yet be for the variant's content of the table in force.

        Raises:
            ApiError: 404 the variant has left the table.
        """
        request.route = self.find(request.route.name)

    def find(self, name: str) -> VariantRoute:
        """Return the variant of that name, or raise ApiError: 404."""
        variant = self._variants.get(name)
        if variant is None:
            raise ApiError.model_not_found(name)
        return variant

    def has_slot(self, request: VariantRequest) -> bool:
        """Return whether any worker may run the request next to those in flight there."""
        return any(worker.state.has_slot(request.variant) for worker in self._workers.values())

    def loads_ahead(
        self, request: VariantRequest, urls: Sequence[str], before: Iterable[str | None] = ()
    ) -> LoadsAhead | None:
        """Return ``variant_worker.loads_ahead`` of ``request`` at the workers of ``urls``."""
        workers = [self._workers[url] for url in urls]
        return loads_ahead(request.variant, workers, before, self._loop.time())

    @property
    def places(self) -> tuple[VariantPlace, ...]:
        return variant_places(self._workers.values(), self._current, loads_on_gpu=self._loads_on_gpu)

    @property
    def num_pending_loads(self) -> int:
        return sum(len(worker.pending) for worker in self._workers.values())

    def choose(self, request: VariantRequest, rooms: Sequence[Room]) -> Admission | None:
        """Return which of ``rooms`` takes the request now; None: none can."""
        candidates = [
            Candidate(
                worker=self._workers[room.target.url].state,
                outstanding=room.outstanding,
                last_turn=room.last_turn,
                is_avoided=room.is_avoided,
            )
            for room in rooms
        ]
        now_s = self._loop.time()
        return self._policy.choose(request.variant, candidates, now_s, self._wanted, passes=self._passes)

    def admit(self, request: VariantRequest, target: WorkerTarget, admission: Admission) -> None:
        """Count the request in flight at ``target``, and start the load that it needs."""
        worker, now_s = self._workers[target.url], self._loop.time()
        request.admitted = request.route
        self._served_s[request.variant] = now_s
        request.is_parent = worker.state.admit(request.variant, now_s, passes=self._passes)
        if worker.is_known and request.variant not in worker.state.loaded:
            self._load(worker, request.route, admission.evicted)

    def release(self, request: VariantRequest, url: str) -> None:
        """Note that the request has left the worker."""
        assert request.admitted is not None
        worker = self._workers[url]
        worker.state.leave(request.admitted.engine_name, is_parent=request.is_parent)
        if request.admitted.engine_name not in self._current:
            self._unload_removed(worker)
        request.admitted = None
        self._drop_unused(url)

    async def ready(self, request: VariantRequest, url: str) -> int:
        """Wait until the variant of an admitted request is loaded; return the worker's epoch, for ``forget``.

        Raises:
            NoPlaceError: another worker, or a later turn, is needed, or the content has left the table meanwhile.
            NotReachedError, NotBegunError, ApiError: of the load.
        """
        assert request.admitted is not None
        worker, name = self._workers[url], request.admitted.engine_name
        if not worker.is_known:
            try:
                await asyncio.shield(self._ask(worker))
            except NotBegunError as error:  # asked for all variants, it names none
                answer = ApiError.no_ready_worker(request.admitted.name, _RETRY_AFTER_S)
                raise NotBegunError(error.reason, answer) from error
        if name not in worker.state.loaded:
            evicted = worker.state.evictions(name, self._loop.time(), self._wanted)
            if evicted is None:
                raise NoPlaceError
            self._load(worker, request.admitted, evicted)
        if (load := worker.loads.get(name)) is not None:
            await asyncio.wait((load,))
            if name not in self._current:  # its files may be gone; its variant may have another content
                raise NoPlaceError
            load.result()
        return worker.epoch

    def forget(self, url: str, epoch: int | None = None) -> None:
        """Note a sign that the worker was restarted; ``epoch``: nothing, if that was noted since."""
        worker = self._workers.get(url)
        if worker is not None and worker.is_known and epoch in (None, worker.epoch):
            worker.forget()
            self._loop.call_soon(self._changed)  # what was pinned there kept its place from a waiting request
            self._loop.call_later(_RETRY_S, self._maintain)  # it may lack a pinned one, and no request may follow

    def wait(self, request: VariantRequest) -> None:
        """Load ahead for one more request, the last of the queue, that no worker has a slot for."""
        self._wanted.setdefault(request.variant)
        self._prefetch(self._loop.time())

    @property
    def is_waited_for(self) -> bool:
        """Return whether a round has found, or ``wait`` has noted, variants of waiting requests."""
        return bool(self._wanted)

    def admit_waiting(self, waiting: Sequence[_W], admit: Callable[[_W], bool], newest: _W | None = None) -> None:
        """Offer all waiting requests a worker; load ahead for those that go on waiting, ``newest`` excepted."""
        now_s = self._loop.time()
        self._wanted = variants_of(waiting)
        admitted: set[int] = set()
        runnable = runnable_variants(self._workers.values())

        def note(request: _W, passes: bool) -> bool:
            nonlocal runnable
            if runnable is not None and (variant := request.variant) is not None and variant not in runnable:
                return False  # as most of a long queue while all slots are taken
            self._passes = passes
            if is_admitted := admit(request):
                admitted.add(id(request))
                runnable = runnable_variants(self._workers.values())
            return is_admitted

        try:
            admit_waiting(self._policy, waiting, self._served_s, now_s, note)
        finally:
            self._passes = False
        self._wanted = variants_of(
            request for request in waiting if id(request) not in admitted and request is not newest
        )
        self._prefetch(now_s)

    def _prefetch(self, now_s: float) -> None:
        workers = self._idle_workers(now_s)
        for name in self._wanted:
            if name not in self._current:
                continue
            workers = [worker for worker in workers if len(worker.loads) < BACKGROUND_LOADS]
            if not workers:
                return
            if any(name in worker.state.loaded for worker in self._workers.values()):
                continue
            found = choose_prefetch(name, [worker.state for worker in workers], now_s, self._wanted)
            if found is None:  # nor is there a place for any after it
                return
            self._load(workers[found.index], self._current[name], found.evicted)

    def preload(self) -> None:
        """Let idle workers load what no worker has, after what requests wait for and what is pinned."""
        now_s = self._loop.time()
        able = [] if self._wanted else self._idle_workers(now_s)
        workers = [one for one in able if one.may_preload and one.target.url not in self._busy]
        if not workers:
            return
        for worker, name in chosen_preloads(workers, self._workers.values(), self._current, self._served_s):
            worker.state.preload(name, self._served_s.get(name, float("-inf")))
            worker.ahead.add(self._begin_load(worker, self._current[name]))

    async def _keep_folders(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            loaded = set[str]().union(*(worker.state.loaded for worker in self._workers.values()))
            await keep_folders(self._loader, [self._current[name] for name in loaded if name in self._current])

    def _idle_workers(self, now_s: float) -> list[VariantWorker]:
        """Return workers at which variants may be loaded ahead of need."""
        workers = self._workers.values()
        return [one for one in workers if one.is_ready and one.is_known and now_s >= one.quiet_until_s]

    def _maintain(self) -> None:
        """Ask workers that are new, load what is pinned, unload what has left the table."""
        now_s = self._loop.time()
        for worker in self._workers.values():
            if worker.is_ready and not worker.is_known and now_s >= worker.quiet_until_s:
                self._ask(worker)
        for worker in self._idle_workers(now_s):
            self._unload_removed(worker)
            for name in self._pinned_now(worker, now_s):
                if name in worker.state.loaded or len(worker.loads) >= BACKGROUND_LOADS:
                    continue
                evicted = worker.state.evictions(name, now_s, self._wanted)
                if evicted is not None and name in self._current:
                    self._load(worker, self._current[name], evicted)

    def _pinned_now(self, worker: VariantWorker, now_s: float) -> list[str]:
        """Return what is pinned there without what failed a moment ago; first what has not failed."""
        retries_s = {name: worker.failed.retry_s(name, _RETRY_S) for name in worker.state.pinned}
        return [name for name in sorted(retries_s, key=lambda name: retries_s[name]) if retries_s[name] <= now_s]

    def _unload_removed(self, worker: VariantWorker) -> None:
        removed = worker.state.loaded - self._current.keys() - worker.state.in_flight.keys()
        for name in removed if worker.is_known else ():
            self._unload(worker, name)

    def _drop_unused(self, url: str) -> None:
        """Drop a worker that has left the table, after its last request."""
        worker = self._workers[url]
        if not worker.is_listed and not worker.state.in_flight:
            del self._workers[url]

    def _ask(self, worker: VariantWorker) -> asyncio.Task[None]:
        """Ask the worker what it has loaded; one question at a time."""
        if worker.asking is None:
            worker.asking = self._loop.create_task(self._learn(worker))
            worker.asking.add_done_callback(partial(self._after, worker, "list of models", is_asked=True))
        return worker.asking

    async def _learn(self, worker: VariantWorker) -> None:
        try:
            for name in await self._loader.loaded(worker.target) - worker.unloads.keys():
                if name not in worker.state.loaded:
                    worker.state.load(name, self._loop.time())
            worker.is_known = True
        finally:
            worker.asking = None

    def _load(self, worker: VariantWorker, variant: VariantRoute, evicted: Iterable[str]) -> None:
        self._evict(worker, evicted)
        worker.state.load(variant.engine_name, self._loop.time())
        self._begin_load(worker, variant)

    def _evict(self, worker: VariantWorker, names: Iterable[str]) -> None:
        for name in names:
            self._unload(worker, name)
            if name in self._current:
                self._observer.evicted(self._current[name].name)
                self.changes.add("evicted", self._current[name].name, worker.target.worker_id)

    def _begin_load(self, worker: VariantWorker, variant: VariantRoute) -> asyncio.Task[None]:
        task = self._loop.create_task(self._load_after(worker, variant, list(worker.unloads.values())))
        worker.loads[variant.engine_name] = task
        worker.pending.order(variant.engine_name, self._loop.time())
        task.add_done_callback(partial(self._after_load, worker, variant.engine_name))
        return task

    async def _load_after(
        self, worker: VariantWorker, variant: VariantRoute, unloads: Sequence[asyncio.Task[None]]
    ) -> None:
        """Load, once the unloads that make room for it are done."""
        if variant.base_directory is None:
            await self._load_from(await self._loader.folder(variant), worker, variant, unloads)
            return
        async with worker.reading:  # asked for another, it would drop the one that it has read
            folder = await self._loader.checked_folder(variant, Path(variant.base_directory))
            await self._load_from(folder, worker, variant, unloads)

    async def _load_from(
        self, folder: Path, worker: VariantWorker, variant: VariantRoute, unloads: Sequence[asyncio.Task[None]]
    ) -> None:
        began_s = self._loop.time()
        waits: Sequence[asyncio.Task[None]] | None = unloads
        try:
            while waits is not None:
                waits = await self._lacks_memory(folder, worker, variant, waits)
        except (NotReachedError, NotBegunError) as error:  # not ApiError: the worker has refused it
            if not isinstance(error, LoadFailedError) or variant.engine_name in worker.state.in_flight:
                worker.forget()  # whether it is loaded is unknown, and matters where a request waits for it
            raise
        took_s = self._loop.time() - began_s
        self._observer.loaded(variant.name, took_s)
        self.changes.add("loaded", variant.name, worker.target.worker_id, took_s)

    async def _lacks_memory(
        self, folder: Path, worker: VariantWorker, variant: VariantRoute, unloads: Sequence[asyncio.Task[None]]
    ) -> Sequence[asyncio.Task[None]] | None:
        """Load after ``unloads``; return those to wait for if memory is full. NoPlaceError: all is in flight."""
        try:
            await asyncio.gather(*unloads)
        except NotBegunError as error:  # names another variant, or the worker
            message = f"a worker failed to make room for the variant {variant.name!r}; try again"
            raise NotBegunError(error.reason, ApiError(503, message, "variant_load")) from error
        name, before = variant.engine_name, set(worker.state.loaded)
        try:
            await self._loader.load(worker.target, variant, folder)
        except NoMemoryError as error:
            is_current = worker.loads.get(name) is asyncio.current_task()  # else its unload waits for this load
            if not before - {name} or name not in worker.state.in_flight or not is_current:
                raise  # there is nothing to unload, or no request that it would be for
            if worker.state.loaded - {name}:
                bytes_of = {one: route.num_bytes for one, route in self._current.items()}
                evicted = worker.shrink(name, self._loop.time(), self._wanted, lambda one: bytes_of.get(one, 0))
                _log.warning("worker %s: %s; unloaded for it: %s", worker.target.worker_id, error, evicted)
                if evicted is None:
                    del worker.loads[name]  # at once: a request that found this task would ask without end
                    worker.state.unload(name)
                    raise NoPlaceError from error
                self._evict(worker, evicted)
            # Not for one that waits for its own load: that may wait for this one.
            return [task for name, task in worker.unloads.items() if name not in worker.loads]
        return None

    def _after_load(self, worker: VariantWorker, name: str, task: asyncio.Task[None]) -> None:
        took_s, is_ahead = worker.pending.end(name, self._loop.time()), task in worker.ahead
        worker.ahead.discard(task)
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is None and took_s is not None:
            self._record_load(took_s)
        if worker.loads.get(name) is task:
            del worker.loads[name]
            if error is None:
                for one in self._workers.values():  # loaded here, it is no danger there
                    one.failed.lost.discard(name)
                worker.failed.succeed(name)
            else:
                worker.state.unload(name)
                answered, now_s = isinstance(error, ApiError | LoadFailedError), self._loop.time()
                worker.failed.fail(name, answered=answered, ahead=is_ahead, now_s=now_s)
                if name in worker.state.pinned:
                    self._loop.call_at(worker.failed.retry_s(name, _RETRY_S) + 0.01, self._go_on)
        self._after(worker, f"load of {name}", task)

    def _unload(self, worker: VariantWorker, name: str) -> None:
        worker.state.unload(name)
        task = self._loop.create_task(self._unload_after(worker, name, worker.loads.pop(name, None)))
        worker.unloads[name] = task
        task.add_done_callback(partial(self._after_unload, worker, name))

    async def _unload_after(self, worker: VariantWorker, name: str, load: asyncio.Task[None] | None) -> None:
        if load is not None:
            await asyncio.wait((load,))
            if not load.cancelled() and isinstance(load.exception(), NoMemoryError | NoPlaceError):
                return  # it was not loaded
        try:
            await self._loader.unload(worker.target, name)
        except (NotReachedError, NotBegunError, ApiError):
            worker.forget()
            raise

    def _after_unload(self, worker: VariantWorker, name: str, task: asyncio.Task[None]) -> None:
        if worker.unloads.get(name) is task:
            del worker.unloads[name]
        self._after(worker, f"unload of {name}", task)

    def _after(
        self, worker: VariantWorker, what: str, task: asyncio.Task[None], *, is_asked: bool = False
    ) -> None:
        """Go on after a request to a worker that no client sent; ``is_asked``: for what it has loaded."""
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            reason = error.reason if isinstance(error, NotBegunError) else str(error)
            _log.warning("worker %s: %s failed: %s", worker.target.worker_id, what, reason)
            worker.quiet_until_s = self._loop.time() + _RETRY_S
            self._loop.call_later(_RETRY_S + 0.01, self._go_on)
        if error is not None or is_asked:
            self._go_on()
        else:  # its place and slot were counted since it began, so that no waiting request became possible
            self._maintain()
            self._prefetch(self._loop.time())
            self.preload()

    def _go_on(self) -> None:
        """Have one round in the next turn of the loop, however many tasks end in this one: a queue may be long."""
        if not self._going_on:
            self._going_on = True
            self._loop.call_soon(self._round)

    def _round(self) -> None:
        self._going_on = False
        self._maintain()
        self._changed()
        self.preload()
