"""Controller: the questions of the REST API, answered from the state and from what the daemon observes now."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from daemon.client import DaemonClient
from daemon.engines.registry import capabilities_for
from daemon.interconnect import kept_links
from daemon.json_http import JsonHttp
from daemon.status import NodeStatus, WorkerState
from fingerprint.checkpoint import Checkpoint
from fingerprint.codec import from_json, to_json
from fingerprint.errors import (
    ConflictError,
    IserveError,
    NotFoundError,
    UnavailableError,
)
from fingerprint.measurements import Profile
from fingerprint.profile import ProfileProgress
from iserve.api_documents import (
    DeploymentDocument,
    EngineDocument,
    KeyDocument,
    LogDocument,
    ModelDocument,
    NewKeyDocument,
    NodeDocument,
)
from iserve.api_types import DeployBody, check_name
from iserve.controller import worker_log
from iserve.controller.check_targets import Targets
from iserve.controller.child_processes import ChildProcess, daemon_process, gateway_process
from iserve.controller.daemon_workers import end_workers
from iserve.controller.deployer import Deployer
from iserve.controller.deployment_status import replicas_seen, status_of
from iserve.controller.engine_selection import deployable_engine
from iserve.controller.followed_routes import FollowedRoutes
from iserve.controller.idempotency import KEPT_S, answer_to_keep, answered_before, deployed_before
from iserve.controller.named_models import merged_variant, model_document, with_variant_name
from iserve.controller.profiling import Profiler
from iserve.controller.quality import QualityResults
from iserve.controller.snapshot import serving_on
from iserve.controller.standalone_plans import Plans, progress_document
from iserve.controller.stored_values import draining_workers, recorded_request, recorded_workers, update_workers
from iserve.controller.updating import Updater
from iserve.controller.variant_advice import VariantAdvisor
from iserve.controller.variant_serving import variant_servers
from iserve.controller.variants import Variants
from iserve.controller.verifying import Verifier
from iserve.demo import DEMO_MODEL_NAME, demo_model_path
from iserve.engine_inventory import engine_documents, releases
from iserve.keys import new_key
from iserve.model_source import ModelSource, resolve
from iserve.planning.document import PlanDocument
from iserve.planning.model_use import check_code_of_each, check_same_code, used, with_images
from iserve.rest_bodies import UpdateBody
from iserve.route_table import DEMAND_PATH, VARIANT_DEMAND_PATH, Demand, VariantDemand
from iserve.settings import Settings
from iserve.state.store import DeploymentRow, EventRow, Store
from placement.types import DeploymentState

__all__ = ["Controller"]

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

_WEIGHT_FILES = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth", ".ckpt", ".pkl")
_MAX_DEPLOYMENTS = 200
_MAX_ENDINGS = 16
_GATEWAY_TIMEOUT_S = 2.0


class Controller:
    """The controller's verbs. Thread-safe; every method raises only :class:`IserveError`."""

    def __init__(self, settings: Settings, store: Store) -> None:
        self.settings, self.store = settings, store
        self.daemon_process: ChildProcess = daemon_process(settings)
        self.gateway_process: ChildProcess = gateway_process(settings)
        self.followed_routes = FollowedRoutes(self._routes_version)
        self.profiler = Profiler(
            store, settings.fingerprint_folder, start_timeout_s=settings.start_timeout_s, serving=self._serving_on
        )
        self._deployer = Deployer(
            settings, store, self.profiler, self.daemon, self.resolve, self._on_progress, self._serving_on
        )
        self._updater = Updater(settings, store, self.profiler, self._deployer)
        targets = Targets(settings, store, self.profiler, self._deployer, self.daemon, self.resolve)
        self.verifier = Verifier(store, self.profiler, targets, self.daemon, self.resolve)
        self.plans = Plans(settings, self.profiler, self._deployer, self.daemon, self.resolve, self.registered)
        self.variants = Variants(
            settings, store, lambda base: self.resolve(base, need_weights=False), self.registered
        )
        self.quality = QualityResults(
            store, self.resolve, lambda engine: releases(settings.home, engine), self.variants.servers_of
        )
        self.variant_advice = VariantAdvisor(
            store, self.profiler, self._deployer, self.observe, self.resolve, self.variant_demand
        )
        # As many threads as can have something to do, so that a removal never waits behind those who wait.
        self._pool = ThreadPoolExecutor(max_workers=_MAX_DEPLOYMENTS + _MAX_ENDINGS, thread_name_prefix="deploy")
        self._lock = threading.Lock()
        self._progress: dict[str, ProfileProgress] = {}
        self._active: set[int] = set()  # deployments with a job under way
        self._updating: set[int] = set()  # likewise with an update
        self._ending: set[str] = set()  # orphaned workers that are being stopped

    # the running world

    def daemon(self) -> DaemonClient:
        """Return the daemon of this node, or UnavailableError while it is away."""
        record = self.daemon_process.record()
        if record is None:
            raise UnavailableError("this node's daemon is away; it is being started again")
        return DaemonClient(record.url, record.token)

    def observe(self) -> NodeStatus | None:
        """Return the node now; None while the daemon is away."""
        try:
            return self.daemon().node()
        except UnavailableError:
            return None

    def demand(self) -> Demand | None:
        """Return the demand of every deployment, as the gateway sees it; None while it is away."""
        return self._ask_gateway(DEMAND_PATH, Demand)

    def variant_demand(self) -> tuple[VariantDemand, ...]:
        """Return the demand of the deployments and their variants; none while the gateway is away."""
        return self._ask_gateway(VARIANT_DEMAND_PATH, tuple[VariantDemand, ...]) or ()

    def _ask_gateway(self, path: str, kind: type[Answer]) -> Answer | None:
        try:
            record = self.gateway_process.record()
            if record is None:
                return None
            gateway = JsonHttp(record.url, record.token, server="the gateway")
            return gateway.ask("GET", path, kind, timeout_s=_GATEWAY_TIMEOUT_S)
        except IserveError as error:
            log.debug("%s", error)
            return None

    def _routes_version(self) -> int | None:
        demand = self.demand()
        return None if demand is None else demand.routes_version

    def follow_variants(self) -> Future[bool] | None:
        """Return whether the gateway has the variants as they are now; None: no deployment could serve any."""
        return self.followed_routes.follow() if variant_servers(self.store.deployments()) else None

    def _serving_on(self, node: NodeStatus) -> tuple[DeploymentState, ...]:
        return serving_on(node, self.store.deployments(), self.demand()) if node.workers else ()

    def serving(self) -> tuple[DeploymentState, ...]:
        """Return what serves on this node and its request rates, as plans see it; nothing while unknown."""
        node = self.observe()
        return () if node is None else self._serving_on(node)

    def nodes(self) -> tuple[NodeDocument, ...]:
        node = self.observe()
        if node is None:
            return (NodeDocument(node_id="local", reachable=False, observed_at=0.0, devices=(), num_workers=0),)
        return (
            NodeDocument(
                node_id=node.node_id,
                reachable=True,
                observed_at=node.observed_at,
                devices=node.devices,
                num_workers=len(node.workers),
                driver=node.driver,
                interconnect=kept_links(node),
            ),
        )

    def engines(self) -> tuple[EngineDocument, ...]:
        """Return the engines of this machine, installed or not."""
        return engine_documents(self.settings.home)

    # models

    def registered(self) -> dict[str, Path]:
        """Return registered names and their folders, the bundled demo model among them."""
        return {DEMO_MODEL_NAME: demo_model_path()} | {m.name: Path(m.directory) for m in self.store.models()}

    def resolve(self, model: str | None, *, need_weights: bool = True, need_code: bool = False) -> ModelSource:
        name = model or DEMO_MODEL_NAME
        source = resolve(name, self.registered(), need_weights=need_weights, need_code=need_code)
        return with_variant_name(source, self.store.variants)

    def _is_here(self, model: str | None) -> bool:
        """Return whether ``model`` is a folder of this machine, not a Hugging Face id."""
        return model is None or model in self.registered() or Path(model).expanduser().exists()

    def register(self, name: str, directory: str) -> ModelDocument:
        """Name a checkpoint, or a config alone; one whose weights are damaged or pickled is refused."""
        source = resolve(directory, {}, need_weights=False)
        if any(path.name.endswith(_WEIGHT_FILES) for path in source.directory.iterdir()):
            Checkpoint.open(source.directory)
        self.store.put_model(check_name(name), str(source.directory.resolve()))
        return model_document(name, source)

    def models(self) -> tuple[ModelDocument, ...]:
        documents = []
        for name, directory in self.registered().items():
            try:
                documents.append(model_document(name, resolve(str(directory), {})))
            except IserveError as error:
                log.warning("registered model %s: %s", name, error)
        return tuple(documents)

    # profiles

    def profiles(self) -> tuple[Profile, ...]:
        return self.store.profiles()

    # deployments

    def deploy(self, body: DeployBody, key: str | None = None, *, attach: bool = False) -> DeploymentDocument:
        """Accept an intent: checked, recorded, then carried out in the background.

        Args:
            key: identifies a repeat of the same request, which is answered as the first time.
            attach: answer with the deployment that the same request made before, as it is now.
        """
        if key is not None and (answer := answered_before(self.store, key, body)) is not None:
            return answer
        source = self._checked(body)
        name = check_name(body.name or source.name)
        if attach and (row := deployed_before(self.store, name, body)) is not None:
            return self._document(row, self.observe())
        if len(self.store.deployments()) >= _MAX_DEPLOYMENTS:
            raise ConflictError(f"there are {_MAX_DEPLOYMENTS} deployments already; remove one first")
        answer = self._accepted(name, body)
        try:
            row = self.store.add_deployment(
                name,
                to_json(body),
                created_at=answer.created_at,
                message=f"{name}: {body.intent} of {source.title}",
                kept=None if key is None else answer_to_keep(key, body, answer),
                forget_before=answer.created_at - KEPT_S,
            )
        except ConflictError:
            # The same request, twice at once: the other was first.
            if key is not None and (former := answered_before(self.store, key, body)) is not None:
                return former
            if attach and (row := deployed_before(self.store, name, body)) is not None:
                return self._document(row, self.observe())
            raise
        self.work_on(row)
        return answer

    def _checked(self, body: DeployBody) -> ModelSource:
        """Return the model of a request that can be accepted. Raises IserveError: it cannot."""
        self._deployer.options(body)
        engine = deployable_engine(body.engine, body.engine_version)  # for auto the model decides which it will be
        if body.engine == "auto":
            body.engine_options  # noqa: B018 - what no engine takes is refused now
        else:
            engine.check_options(body.engine_options)
        source = used(self.resolve(body.model, need_weights=False), body.use)
        with_images(self._deployer.options(body).workload, source)
        check_code_of_each(source, capabilities_for(body.engine))
        if source.has_weights or self._is_here(body.model):
            Checkpoint.open(source.directory)  # what a hub id lacks is fetched in the background, and checked then
        return source

    def update(self, name: str, body: UpdateBody) -> DeploymentDocument:
        """Accept changes of a deployment that serves; they are carried out in the background, request by request.

        Raises:
            ConflictError: it does not serve now, or an update is under way.
            BadInputError, InfeasibleError: nothing is given, or what is given cannot be.
        """
        row = self.store.deployment(name)
        updated, changes = body.applied_to(recorded_request(row))
        source = self._checked(updated)
        if "trust_remote_code" not in changes and "model" not in changes:
            check_same_code(source, (spec.checkpoint for spec in recorded_workers(row)))
        request = to_json(updated)
        message, former = f"{name}: update of {', '.join(changes)} asked for", row.request
        if not self.store.begin_update(row.id, request, message, former=former, stop_first=body.stop_first):
            row = self.store.deployment(name)
            if row.request != former:  # another update has ended meanwhile: this one changes its result
                return self.update(name, body)
            state = "being updated" if row.update_request is not None else row.phase
            if row.desired == "removed":
                state = "being removed"
            raise ConflictError(f"the deployment {name!r} is {state}; update it when it is ready (`iserve ps`)")
        row = self.store.deployment(name)
        self.work_on_update(row)
        return self._document(row, self.observe())

    def work_on_update(self, row: DeploymentRow) -> None:
        """Carry the update of ``row`` out in the background unless that is under way."""
        with self._lock:
            if row.id in self._updating:
                return
            self._updating.add(row.id)

        def work() -> None:
            try:
                now = self.store.deployment_by_id(row.id)
                if now is not None and now.update_request is not None and now.desired == "running":
                    self._updater.run(now)
            except IserveError as error:
                log.warning("updating %s: %s", row.name, error)
            except Exception:
                log.exception("updating %s", row.name)
            finally:
                with self._lock:
                    self._updating.discard(row.id)
                self._on_progress(row.name, None)

        self._pool.submit(work)

    def work_on(self, row: DeploymentRow) -> None:
        """Carry ``row`` out in the background unless that is under way."""
        with self._lock:
            if row.id in self._active:
                return
            self._active.add(row.id)

        def work() -> None:
            try:
                # What was seen may be old by now: then the next look decides.
                if self.store.deployment_by_id(row.id) == row:
                    work_of = self._remove if row.desired == "removed" else self._deployer.run
                    work_of(row)
            except IserveError as error:
                log.warning("%s: %s", row.name, error)
            except Exception:
                log.exception("working on %s", row.name)
            finally:
                with self._lock:
                    self._active.discard(row.id)

        self._pool.submit(work)

    def _remove(self, row: DeploymentRow) -> None:
        if workers := (
            *recorded_workers(row),
            *update_workers(row),
            *draining_workers(row),
        ):  # those that cannot be read have no owner without the row
            end_workers(self.daemon(), workers)
        self.store.delete_deployment(row.id)
        self.store.add_event(None, "removed", f"{row.name}: removed")
        self.variants.drop_merged()

    def is_ending(self, worker_id: str) -> bool:
        """Return whether it is being stopped by :meth:`end_worker`."""
        with self._lock:
            return worker_id in self._ending

    def end_worker(self, worker_id: str, why: str = "no deployment owns it") -> None:
        """Stop, in the background, a worker that has to go."""
        with self._lock:
            if worker_id in self._ending:
                return
            self._ending.add(worker_id)

        def work() -> None:
            log.info("ending worker %s: %s", worker_id, why)
            try:
                self.daemon().stop(worker_id)
            except IserveError as error:
                log.warning("ending worker %s: %s", worker_id, error)
            finally:
                with self._lock:
                    self._ending.discard(worker_id)

        self._pool.submit(work)

    def remove(self, name: str, created_at: float | None = None) -> DeploymentDocument:
        """Ask for a deployment's end, if it is the one made then; its worker is stopped in the background."""
        row = self.store.deployment(name)
        if created_at is not None and row.created_at != created_at:
            raise NotFoundError(f"the deployment {name!r} is not the one made at {created_at!r}")
        self.store.add_event(row.id, "removing", f"{name}: removal asked for")
        self.store.update_deployment(row.id, desired="removed")
        return self._document(replace(row, desired="removed"), self.observe())  # it may be gone already

    def deployments(self) -> tuple[DeploymentDocument, ...]:
        node = self.observe()
        return tuple(self._document(row, node) for row in self.store.deployments())

    def deployment(self, name: str) -> DeploymentDocument:
        return self._document(self.store.deployment(name), self.observe())

    def deployment_plan(self, name: str) -> PlanDocument:
        row = self.store.deployment(name)
        if row.plan is None:
            raise NotFoundError(f"the deployment {name!r} has no plan yet (it is {row.phase})")
        return from_json(row.plan, PlanDocument, what="the stored plan")

    def logs(self, name: str, lines: int, replica: int = 1) -> str:
        """Return the end of the log of one replica, counted from 1."""
        return worker_log.end_of(self.daemon(), self.store.deployment(name), lines, replica)

    def log_part(self, name: str, lines: int, replica: int, position: str | None) -> LogDocument:
        """Return what one replica printed behind ``position``; without one, the end of its log."""
        return worker_log.part_of(self.daemon, self.store.deployment(name), lines, replica, position)

    def events(self, *, after: int, name: str | None, limit: int) -> tuple[EventRow, ...]:
        deployment_id = None if name is None else self.store.deployment(name).id
        return self.store.events(after=after, deployment_id=deployment_id, limit=limit)

    def _on_progress(self, name: str, progress: ProfileProgress | None) -> None:
        with self._lock:
            if progress is None:
                self._progress.pop(name, None)
            else:
                self._progress[name] = progress

    def _accepted(self, name: str, body: DeployBody) -> DeploymentDocument:
        """Return the answer to a deploy, known before it is recorded: it is stored in the same transaction."""
        row = DeploymentRow(
            id=0,
            name=name,
            created_at=time.time(),
            request=to_json(body).decode(),
            desired="running",
            phase="accepted",
            error=None,
            plan=None,
            workers=None,
        )
        return replace(self._document(row, None), progress=None)  # not that of a removed one of this name

    def _document(self, row: DeploymentRow, node: NodeStatus | None) -> DeploymentDocument:
        request, error = DeployBody(model="?"), row.error
        try:
            request = recorded_request(row)
        except IserveError as unreadable:
            error = str(unreadable)
        workers = recorded_workers(row)
        replicas = replicas_seen(workers, node)
        with self._lock:
            progress = self._progress.get(row.name)
        gateway = self.gateway_process.record()
        variant, base = merged_variant(row, self.store.variants, self.settings.merged_folder)
        return DeploymentDocument(
            name=row.name,
            model=request.model or DEMO_MODEL_NAME,
            intent=str(request.intent),
            status=status_of(row, node, replicas),
            error=error or next((replica.error for replica in replicas if replica.error is not None), None),
            base_url=None if gateway is None else f"{gateway.url}/v1",
            config=workers[0].config if workers else None,
            layers_per_stage=replicas[0].layers_per_stage if replicas else (),
            device_ids=tuple(device for replica in replicas for device in replica.device_ids),
            worker_url=replicas[0].url if replicas else None,
            restarts=sum(replica.restarts for replica in replicas),
            created_at=row.created_at,
            progress=None if progress is None else progress_document(progress),
            scale_to_zero_s=request.scale_to_zero_s,
            num_replicas=request.replicas or len(workers) or 1,
            rejects_late=request.reject_late,
            num_ready=sum(replica.status == WorkerState.READY for replica in replicas),
            replicas=replicas,
            updating=row.update_request is not None,
            variant=variant,
            base=base,
        )

    # keys

    def create_key(self, label: str, scope: str) -> NewKeyDocument:
        key, record = new_key(scope)
        self.store.add_key(record, label)
        return NewKeyDocument(key_id=record.key_id, key=key)

    def keys(self) -> tuple[KeyDocument, ...]:
        return tuple(
            KeyDocument(key_id=k.key_id, label=k.label, scope=k.scope, created_at=k.created_at, revoked=k.revoked)
            for k in self.store.api_keys()
        )

    def close(self) -> None:
        self.followed_routes.close()
        self.verifier.close()
        self.plans.close()
        self.variants.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
