"""The options of ``simulate`` in groups, and what each group is in the simulator's types.

Like ``options``, imported for every ``--help``: what is heavy is imported only when it runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fingerprint.errors import ConfigError
from iserve.cli.gpu_options import GpuFile, named_gpus
from iserve.cli.options import usage_errors
from placement.routing import DEFAULT_ROUTER
from planner.intent import Slo, check_replicas, parse_slo

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fingerprint.gpu_spec import GpuSpec
    from placement.rebalancer import Elastic
    from placement.types import ClusterSnapshot
    from traces.request import Request
    from traces.simulator.scenario import Action, Scenario, Service

__all__ = [
    "ClusterOptions",
    "DecisionOptions",
    "LoadOptions",
    "ScalingOptions",
    "ServiceOptions",
    "scenario_of",
]

_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Options on the cluster, what is deployed on it, and what happens to it."""

    models: Annotated[
        str, typer.Option("--models", help="[NAME=]MODEL,...: what is deployed, under which names requests call.")
    ]
    gpus: Annotated[str | None, typer.Option("--gpus", help="The cluster, such as a6000:8. Needs no GPU.")] = None
    gpu_file: GpuFile = None
    gpus_per_node: Annotated[int, typer.Option("--gpus-per-node", help="GPUs of one node.")] = 8
    deploy_every: Annotated[
        float, typer.Option("--deploy-interval", help="Seconds from one model's deployment to the next.")
    ] = 0.0
    startup: Annotated[
        float | None,
        typer.Option(
            "--startup",
            help="Seconds until a deployed worker serves. Default: 60 for vLLM, 0 for engines whose start was not "
            "measured.",
        ),
    ] = None
    fail: Annotated[
        list[str] | None,
        typer.Option("--fail", help="NODE:AT[:BACK]: node0 fails at AT, is back at BACK seconds."),
    ] = None
    harvest: Annotated[
        list[str] | None,
        typer.Option("--background-profile", help="AT:SECONDS:GIB: a profile of so much work and spare memory."),
    ] = None

    def hardware(self) -> tuple[GpuSpec, ClusterSnapshot]:
        """Return the hardware. Raises typer.BadParameter: GPUs of several kinds, none, or none in a node."""
        with usage_errors("--gpus"):
            return self._hardware()

    def _hardware(self) -> tuple[GpuSpec, ClusterSnapshot]:
        from iserve.simulation.running import idle_cluster

        if self.gpus is not None and "," in self.gpus:
            raise ConfigError(
                f"{self.gpus!r} has GPUs of several kinds; a plan is for one kind: simulate each kind by itself, "
                "with the models that go there"
            )
        there = named_gpus(self.gpus, self.gpu_file)
        if there is None:
            raise ConfigError("give a cluster, such as a6000:8, or one GPU with --gpu-file")
        gpu, count = there
        return gpu, idle_cluster(gpu, count, per_node=self.gpus_per_node)

    def named_models(self) -> dict[str, str]:
        """Return deployment name to MODEL. A model without a name has its own last part."""
        named: dict[str, str] = {}
        for part in filter(None, (piece.strip() for piece in self.models.split(","))):
            name, separator, model = part.partition("=")
            if not separator:
                name, model = Path(part).name, part
            if not name or not model or name in named:
                raise typer.BadParameter(f"{part!r}: every model needs a name of its own", param_hint="'--models'")
            named[name] = model
        if not named:
            raise typer.BadParameter("names no model", param_hint="'--models'")
        return named

    def actions(self, replicas: int, *, variants: bool = False) -> tuple[Action, ...]:
        from traces.simulator.scenario import Deploy

        deploys = (
            Deploy(at_s=self.deploy_every * number, name=name, model=name, replicas=replicas, variants=variants)
            for number, name in enumerate(self.named_models())
        )
        return (*deploys, *_faults(self.fail or []), *_harvests(self.harvest or []))


@dataclass(frozen=True, kw_only=True)
class DecisionOptions:
    """Options on the planner, its step times, and how its decisions are judged."""

    planner: Annotated[
        str,
        typer.Option(
            "--planner",
            help="Planner that decides what is deployed: iserve, max-tp, max-pp, rule, fsdp-offload, alpaserve, "
            "alpaserve-all or aiconfigurator:ANSWERS.json (docs/baselines.md).",
        ),
    ] = "iserve"
    profile: Annotated[
        list[Path] | None,
        typer.Option(
            "--profile", help="What `iserve profile --json` printed: step times from it, not the roofline."
        ),
    ] = None
    judge: Annotated[
        str | None, typer.Option("--eval-slo", help="The SLO that requests are judged by; else that of --slo.")
    ] = None

    def slo(self, planned: Slo | None) -> Slo | None:
        """Return the SLO that requests are judged by."""
        with usage_errors("--eval-slo"):
            return planned if self.judge is None else parse_slo(self.judge)


@dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """Options on how requests are served, and how many may wait."""

    overhead: Annotated[
        float, typer.Option("--overhead", help="Seconds of each request outside its steps, such as HTTP.")
    ] = 0.0
    service: Annotated[
        str,
        typer.Option(
            "--service",
            metavar="<fcfs|fcfs-pipelined|continuous|stepped>",  # the simulator's, whose import takes numpy
            help="fcfs: one request at a time; fcfs-pipelined: one in each pipeline stage; continuous; stepped: "
            "the same, slowly.",
        ),
    ] = "continuous"
    router: Annotated[
        str, typer.Option("--router", help="Of replicas: least-outstanding, round-robin or busiest.")
    ] = DEFAULT_ROUTER
    max_waiting: Annotated[
        int | None, typer.Option("--queue-limit", help="Of one deployment; more are refused. Else they wait.")
    ] = None
    most_waiting: Annotated[
        int,
        typer.Option(
            "--abort-at-queue", help="Of one deployment: beyond, it is overloaded and the simulation stops."
        ),
    ] = 10_000
    reject_late: Annotated[
        bool,
        typer.Option(
            "--reject-late", help="Refuse a request that could not keep its SLO any more, as AlpaServe does."
        ),
    ] = False
    forecast_late: Annotated[
        bool,
        typer.Option(
            "--forecast-late",
            help="With --reject-late: at arrival, by the gateway's forecast, in place of exact times.",
        ),
    ] = False

    def kind(self) -> Service:
        from traces.simulator.scenario import Service

        try:
            return Service(self.service)
        except ValueError:
            raise ConfigError(f"--service is one of {', '.join(Service)}, got {self.service!r}") from None


@dataclass(frozen=True, kw_only=True)
class ScalingOptions:
    """Options on what may change once it runs."""

    replicas: Annotated[
        str, typer.Option("--replicas", help="Of every model: N, or MIN:MAX, scaled between by the load.")
    ] = "1"
    scale_to_zero: Annotated[
        float | None,
        typer.Option("--scale-to-zero", help="Seconds without a request, after which a model ends until called."),
    ] = None
    consolidate: Annotated[
        bool,
        typer.Option("--consolidate", help="Of replicas too many, end one that frees GPUs; its requests move."),
    ] = False
    migrate: Annotated[
        bool, typer.Option("--migrate", help="Move a replica to other GPUs where that pays for the move.")
    ] = False

    def range(self) -> tuple[int, int]:
        """Return the fewest and most replicas. Raises ConfigError: no such numbers."""
        least, separator, most = self.replicas.partition(":")
        try:
            numbers = (int(least), int(most if separator else least))
        except ValueError:
            numbers = (0, 0)
        if not 1 <= numbers[0] <= numbers[1]:
            raise ConfigError(
                f"--replicas is N or MIN:MAX, each at least one replica, got {self.replicas!r}; to none and back: "
                "--scale-to-zero"
            )
        return numbers

    @property
    def least(self) -> int:
        """Fewest replicas. Raises typer.BadParameter: no such number."""
        with usage_errors():
            least, _ = self.range()
        with usage_errors("--replicas"):
            return check_replicas(least)

    def policy(self, gpu: GpuSpec, startup_s: float) -> Elastic | None:
        """Return the policy; None: what was deployed stays as it is.

        Args:
            startup_s: of a worker; a move takes as long and loads its memory, and where it is 0, migration's own.
        """
        from placement.migration import Migration
        from placement.rebalancer import Elastic
        from placement.scaling import Scaling

        least, most = self.range()
        scales = least < most
        if self.consolidate and not scales:
            raise ConfigError("--consolidate chooses among replicas too many; it goes with --replicas MIN:MAX")
        if not (scales or self.migrate or self.scale_to_zero is not None):
            return None
        scaling = None
        if scales or self.scale_to_zero is not None:
            scaling = Scaling(min_replicas=least, max_replicas=most, idle_s=self.scale_to_zero)
        migration = None
        if self.migrate:
            migration = Migration(start_s=startup_s) if startup_s else Migration()
        return Elastic(
            scaling=scaling,
            consolidates=self.consolidate,
            migration=migration,
            link_group_size=gpu.link_group_size,
        )


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Options on which of the trace's requests arrive, and for which models."""

    popularity: Annotated[
        str | None,
        typer.Option(
            "--popularity",
            help="Assign requests to models, with --variants to variants: uniform, zipf[:ALPHA], ... "
            "(traces/popularity).",
        ),
    ] = None
    cap_lengths: Annotated[bool, typer.Option("--cap-lengths", help="Cut requests to what deployments serve.")] = (
        False
    )
    limit: Annotated[int | None, typer.Option("--limit", help="Stop after so many requests.", min=1)] = None
    trace_format: Annotated[str | None, typer.Option("--format", help="Of the trace; else it is recognised.")] = (
        None
    )
    seed: Annotated[int, typer.Option("--seed", help="Of synthetic traces and --popularity.", min=0)] = 0

    def requests(
        self, trace: str, names: tuple[str, ...], variants: int = 0, base_share: float = 0.0
    ) -> Iterator[Request]:
        """Return the trace, with models assigned where it is asked for or where there is one model only.

        Args:
            variants: of that model, among which requests without a name are drawn.
            base_share: of those, the requests for the model itself.
        """
        from itertools import islice

        from iserve.cli.simulation_variants import of_variants
        from traces.popularity import popularity_named
        from traces.trace_argument import requests_of
        from traces.transforms import assign_models

        requests: Iterator[Request] = requests_of(trace, format=self.trace_format, seed=self.seed)
        if variants:
            requests = of_variants(requests, variants, self.popularity, self.seed, names[0], base_share)
        elif self.popularity is not None:
            requests = assign_models(requests, names, popularity_named(self.popularity), seed=self.seed)
        else:
            requests = _told_models(requests, names)
        return requests if self.limit is None else islice(requests, self.limit)


def scenario_of(
    cluster: ClusterOptions,
    snapshot: ClusterSnapshot,
    service: ServiceOptions,
    replicas: int,
    slo: Slo | None,
    *,
    variants: bool = False,
) -> Scenario:
    """Return the scenario. Raises ConfigError: an invalid value, or late requests rejected without an SLO."""
    from traces.simulator.scenario import Scenario

    if not 0 <= cluster.deploy_every < float("inf"):
        raise ConfigError(
            "deployments are requested at finite times: --deploy-interval is 0 s or more, got "
            f"{cluster.deploy_every:g}"
        )
    if service.reject_late and slo is None:
        raise ConfigError("--reject-late needs to know what is late; give the SLO with --eval-slo")
    if service.forecast_late and not service.reject_late:
        raise ConfigError("--forecast-late says how --reject-late judges; give that too")
    return Scenario(
        cluster=snapshot,
        actions=cluster.actions(replicas, variants=variants),
        service=service.kind(),
        startup_s=cluster.startup,
        overhead_s=service.overhead,
        max_waiting=service.max_waiting,
        most_waiting=service.most_waiting,
        reject_late=dict.fromkeys(cluster.named_models(), slo) if service.reject_late and slo else {},
        rejects_by_forecast=service.forecast_late,
    )


def _faults(texts: list[str]) -> Iterator[Action]:
    from traces.simulator.scenario import NodeFails, NodeReturns

    for text in texts:
        node, *times = text.split(":")
        values = _numbers(times, text, "--fail", "NODE:AT[:BACK]", (1, 2))
        yield NodeFails(at_s=values[0], node_id=node)
        if len(values) == 2:
            if values[1] <= values[0]:
                raise ConfigError(f"--fail {text}: a node is back after it failed")
            yield NodeReturns(at_s=values[1], node_id=node)


def _harvests(texts: list[str]) -> Iterator[Action]:
    from traces.simulator.scenario import Profile

    for number, text in enumerate(texts, start=1):
        at_s, work_s, gib = _numbers(text.split(":"), text, "--background-profile", "AT:SECONDS:GIB", (3,))
        yield Profile(at_s=at_s, name=f"profile {number}", memory_bytes=int(gib * _GIB), work_s=work_s)


def _numbers(parts: list[str], text: str, option: str, form: str, counts: tuple[int, ...]) -> list[float]:
    try:
        values = [float(part) for part in parts]
    except ValueError:
        values = []
    if len(values) not in counts or not all(abs(value) < float("inf") for value in values):
        raise ConfigError(f"{option} is {form}, in seconds, got {text!r}")
    return values


def _told_models(requests: Iterator[Request], names: tuple[str, ...]) -> Iterator[Request]:
    """Yield the requests; one that names no model is assigned to the only one there is."""
    from dataclasses import replace

    for request in requests:
        if request.model:
            yield request
        elif len(names) == 1:
            yield replace(request, model=names[0])
        else:
            raise ConfigError(
                f"the trace names no models and {len(names)} are deployed; say how requests are spread over them: "
                "--popularity uniform"
            )
