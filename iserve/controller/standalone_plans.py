"""Plans and profiles that are asked for by themselves. Starts no deployment."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from daemon.client import DaemonClient
from daemon.engine_options import EngineOptions
from daemon.engines.base import Engine
from daemon.engines.registry import ENGINES, get_engine
from daemon.status import NodeStatus
from fingerprint.checkpoint import Checkpoint
from fingerprint.config import Workload
from fingerprint.errors import ConfigError, InfeasibleError, NotMeasuredError, UnsupportedModelError
from fingerprint.gpus import parse_gpus
from fingerprint.measurements import Profile
from fingerprint.model_use import ModelUse
from fingerprint.profile import ProfileProgress
from fingerprint.variant_measurements import VariantKind
from iserve.api_documents import ProfileJobDocument, ProgressDocument
from iserve.api_types import LaunchBody, PlanBody, check_name
from iserve.controller.daemon_workers import ask_daemon
from iserve.controller.deployer import Deployer
from iserve.controller.engine_selection import deployable_engine, engine_for
from iserve.controller.jobs import Jobs
from iserve.controller.profiling import Profiler
from iserve.controller.profiling_scope import measures_variants
from iserve.demo import DEMO_MODEL_NAME
from iserve.model_source import ModelSource
from iserve.planning.document import PlanDocument
from iserve.planning.engine_choice import nothing_feasible_on
from iserve.planning.model_use import check_code, check_use, used, with_expected_specs, with_images
from iserve.planning.offline import launch_for_gpus, plan_for_gpus
from iserve.planning.pipeline import PlanOptions
from iserve.planning.words import ELSEWHERE
from iserve.planning.worker_launch import LaunchDocument, PlannedDeployment
from iserve.rest_bodies import ProfileBody
from iserve.settings import Settings

__all__ = ["Plans", "progress_document"]


class Plans:
    """Plans and profile jobs of one controller. Thread-safe; every method raises only ``IserveError``.

    Args:
        resolve: finds a model by folder, hub id or registered name.
        registered: folders of models by their registered names.
    """

    def __init__(
        self,
        settings: Settings,
        profiler: Profiler,
        deployer: Deployer,
        daemon: Callable[[], DaemonClient],
        resolve: Callable[..., ModelSource],
        registered: Callable[[], Mapping[str, Path]],
    ) -> None:
        self._settings, self._profiler, self._deployer = settings, profiler, deployer
        self._daemon, self._resolve, self._registered = daemon, resolve, registered
        self._jobs: Jobs[ProfileJobDocument] = Jobs("profile")

    def plan(self, body: PlanBody) -> PlanDocument:
        options = body.options(default_policy=self._settings.policy, load_threshold=self._settings.load_threshold)
        if body.gpus is not None:
            gpu, count = parse_gpus(body.gpus)
            return plan_for_gpus(
                body.model or DEMO_MODEL_NAME,
                gpu,
                count,
                options,
                body.engine,
                registered=self._registered(),
                use=body.use,
            )
        return self._planned(body, options)[0].document

    def launch(self, body: LaunchBody) -> LaunchDocument:
        """Return what a deploy of the same request would start; nothing is started, measured or kept.

        Raises:
            InfeasibleError: a deploy would be refused.
            NotMeasuredError: a deploy would measure first.
        """
        options = body.options(default_policy=self._settings.policy, load_threshold=self._settings.load_threshold)
        if body.gpus is not None:
            gpu, count = parse_gpus(body.gpus)
            model = body.model or DEMO_MODEL_NAME
            return launch_for_gpus(
                model,
                gpu,
                count,
                options,
                body.engine,
                name=body.name,
                registered=self._registered(),
                engine_options=body.engine_options,
            )
        with _or_elsewhere():
            deployable_engine(body.engine)
        planned, source, profile = self._planned(body, options)
        Checkpoint.open(source.directory)
        engine = get_engine(profile.engine)
        engine.check_options(body.engine_options)
        check_code(source, engine.capabilities())
        name = check_name(body.name or source.name)
        workload = with_images(options.workload, source)
        return planned.launch(name, source, workload, profile, body.engine_options)

    def _planned(self, body: PlanBody, options: PlanOptions) -> tuple[PlannedDeployment, ModelSource, Profile]:
        """Return a plan for what is free here now, the model and the profile that it rests on.

        Raises:
            NotMeasuredError: no profile holds here.
        """
        source = used(self._resolve(body.model, need_weights=False), body.use)
        options = replace(options, workload=with_images(options.workload, source))
        options = with_expected_specs(options, lambda name: self._resolve(name, need_weights=False).spec)
        node, batch = self._daemon().node(), options.workload.batch

        def stored(engine: Engine, notes: tuple[str, ...]) -> Profile:
            engine.check_options(EngineOptions(use=source.use))
            check_use(source, engine.capabilities())
            return self._stored(source, engine, notes, node, batch)

        with _or_elsewhere():
            engine, profile, notes = self._deployer.select(source, body.engine, None, options, stored)
        notes += tuple(
            f"{config} was not measured, for the profile was taken for another request, and may change this plan: "
            "a deploy measures it first"
            for config in self._profiler.lacking(profile, engine, node, options)
            if config in profile.skipped  # the plan's notes have what lacked room
        )
        return self._deployer.plan(source, engine, profile, options, notes), source, profile

    def _stored(
        self, source: ModelSource, engine: Engine, notes: tuple[str, ...], node: NodeStatus, batch: int
    ) -> Profile:
        """Return the profile that holds on ``node``; ``notes`` are reported with the refusal where there is none.

        Raises:
            NotMeasuredError: there is none.
        """
        profile = self._profiler.stored(source, engine, node, batch=batch)
        if profile is None:
            notes += self._profiler.unused(source, engine, node, batch=batch)
            others = [e.name for e in ENGINES.values() if self._profiler.stored(source, e, node, batch=batch)]
            useful = (other for other in others if nothing_feasible_on(other) not in notes)
            notes += tuple(f"there is one on {other}: --engine {other}" for other in useful)
            asked = f"{source.argument} --engine {engine.name}" + (f" --batch {batch}" if batch > 1 else "")
            raise NotMeasuredError(
                f"{source.name} has no profile on {engine.name} that holds on this machine; run `iserve profile "
                f"{asked}` first, or plan for datasheet GPUs with --gpus NAME:COUNT"
                + "".join(f"; {note}" for note in notes)
            )
        return profile

    def start_profile(self, body: ProfileBody) -> ProfileJobDocument:
        """Begin a profile in the background; ask for it by its job id.

        Raises:
            UnavailableError: too many wait already.
        """
        use = ModelUse(trust_remote_code=body.trust_remote_code)
        source = self._resolve(body.model, need_weights=False, need_code=use.trust_remote_code)
        source = used(source, use)
        deployable_engine(body.engine)
        variants = body.variant_kind()
        workload = Workload(batch=body.batch, input_tokens=body.input_tokens, output_tokens=body.output_tokens)
        job = ProfileJobDocument(
            job_id=uuid.uuid4().hex, model=source.name, status="running", error=None, progress=None
        )

        def work(show: Callable[[ProfileJobDocument], None]) -> ProfileJobDocument:
            node = ask_daemon(self._daemon, DaemonClient.node)
            engine, notes = engine_for(body.engine, source.spec, node, body.quality)
            engine.check_options(EngineOptions(use=use))
            check_code(source, engine.capabilities())
            chosen = replace(job, engine=engine.name, notes=notes)
            show(chosen)
            self._profiler.take(
                source,
                engine,
                self._daemon,
                workload=workload,
                quality=body.quality,
                shards=body.shards,
                variants=_measured_on(engine, variants),
                expert_parallel=body.expert_parallel,
                max_seconds=body.max_seconds,
                progress=lambda p: show(replace(chosen, progress=progress_document(p))),
            )
            return chosen

        return self._jobs.start(job, work)

    def profile_job(self, job_id: str) -> ProfileJobDocument:
        return self._jobs.get(job_id)

    def close(self) -> None:
        self._jobs.close()


def _measured_on(engine: Engine, kind: VariantKind | None) -> VariantKind | None:
    """Return ``kind``; raise ConfigError where ``engine`` does not measure it."""
    if kind is not None and not measures_variants(engine.capabilities()):
        raise ConfigError(
            f"{kind} are not measured on {engine.name}, whose profiling worker here measures no variants: take "
            "--engine torch, or leave --rank and --delta-format out; docs/variants.md says how plans estimate them"
        )
    return kind


@contextlib.contextmanager
def _or_elsewhere() -> Iterator[None]:
    """Have a refusal for want of an engine here name the way to plan without this machine."""
    try:
        yield
    except (InfeasibleError, UnsupportedModelError) as error:
        raise type(error)(f"{error}; {ELSEWHERE}") from error


def progress_document(progress: ProfileProgress) -> ProgressDocument:
    return ProgressDocument(
        step=progress.running, done=progress.done, total=progress.total, elapsed_s=progress.elapsed_s
    )
