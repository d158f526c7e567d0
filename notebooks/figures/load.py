"""World of the evaluation under load: a cluster, models deployed one after the other, and requests.

A world is a cluster, models that are deployed one after the other, and requests. Every contestant gets
the same one: same GPUs, same times of deployment, same requests to the same deployments, same step times,
placer, router and service. Only what is deployed where differs. All of it was decided before the first result
but for two things. Each request is for one of all models, and those for a model that is not deployed yet are
left out, as in figure 10; at first they went to the models that were there, and one cell showed half an hour of
queue from the five minutes in which the first model had the whole trace. And an SLO is given to the planner for
the longest request, which it plans for, not in the seconds of the mean request by which it is judged.

The paper's requests are Azure's of 2023, compressed (``traces.rate_scaling``). It gives no interval and no number
of neighbours that are added up. In its figure 11 a GPU's throughput with the code trace is 0.23 at 0.4 on eight
GPUs and 0.34 at 0.3 on four: 1.84 and 1.36 requests a second, 1.8 times the trace's rate times the factor, or
2.4 where early ones are left out. So two neighbours are added up. For the conversation trace it is one: the
fastest configurations that iServe knows are then offered 0.7 to 2.8 times what they serve, and any more is
further from the 30 to 100% that the paper reports (code: 0.26 to 1.0). Prompts are cut at the paper's 1K tokens,
answers at the 100 of its single queries; without that, conversations are offered at twice those rates.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fingerprint.config import Workload
from fingerprint.gpu_spec import GpuSpec
from iserve.planning.pipeline import JOINT, PlanOptions
from iserve.simulation.running import SimulatedModel, idle_cluster
from notebooks.figures.setting import GPU, NUM_GPUS, PAPER_ENGINE, estimator_of, spec_of
from planner.intent import Intent, Quality, Traffic
from traces.popularity import Uniform
from traces.rate_scaling import compress
from traces.reading import open_trace
from traces.request import Request
from traces.simulator.scenario import Deploy, Scenario, Service
from traces.synthetic import standin
from traces.traffic import traffic_of
from traces.transforms import assign_models, cap_lengths

__all__ = [
    "PAPER_SITE",
    "SEEDS",
    "SERVICE",
    "Site",
    "World",
    "azure",
    "compressed",
    "real_traces",
    "trace_source",
    "world_of",
]

SEED = 20261121
SEEDS = (SEED, SEED + 1, SEED + 2)
AGGREGATE = {"code": 2, "conv": 1}
INTERVAL_S = 1.0
_LONGEST = Workload(batch=1, input_tokens=1024, output_tokens=100)
_NEVER_STOP = 2**62  # however many wait, all requests are followed to their end


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """A cluster, and what is known of models on it. ``quality``: what iServe may do to answers."""

    gpu: GpuSpec
    num_gpus: int
    workload: Workload  # what models are planned for: no request is longer
    service: Service
    quality: Quality
    model: Callable[[str, PlanOptions], SimulatedModel]


def _by_roofline(name: str, options: PlanOptions) -> SimulatedModel:
    """On the paper's engine."""
    return SimulatedModel(
        name=name, spec=spec_of(name), estimator=estimator_of(name), engines=(PAPER_ENGINE,), options=options
    )


# A pipeline that does not batch holds one request in what is recorded; with "fcfs-pipelined" one in each stage.
SERVICE = Service(os.environ.get("EVALUATION_SERVICE", Service.FCFS))

PAPER_SITE = Site(
    gpu=GPU,
    num_gpus=NUM_GPUS,
    workload=_LONGEST,
    service=SERVICE,
    quality=Quality.ANY,
    model=_by_roofline,
)


@dataclass(frozen=True, kw_only=True)
class World:
    """World that every contestant is given."""

    site: Site
    deployments: Mapping[str, str]  # name: model
    scenario: Scenario
    requests: tuple[Request, ...]

    def models(
        self,
        intent_of: Callable[[str], Intent],
        policy: str = JOINT,
        *,
        workload: Workload | None = None,
        expect: int = 0,
    ) -> dict[str, SimulatedModel]:
        """Return the models as each is asked for; ``workload``: planned for, the site's by default."""
        workload = workload or self.site.workload

        def options(model: str) -> PlanOptions:
            # Sharing is simulated without the losses that were measured later, as recorded.
            return PlanOptions(
                intent=intent_of(model), workload=workload, policy=policy, expect=expect, group_loss=1.0
            )

        return {m: self.site.model(m, options(m)) for m in dict.fromkeys(self.deployments.values())}

    @property
    def mean_request(self) -> Workload:
        """Request of the mean lengths."""
        inputs, outputs = (
            round(sum(getattr(r, side) for r in self.requests) / len(self.requests))
            for side in ("input_tokens", "output_tokens")
        )
        return Workload(batch=1, input_tokens=inputs, output_tokens=outputs)

    def demand_of(self, model: str) -> tuple[float, Traffic]:
        """Return rate and traffic of its first deployment: what ``--rate`` and ``--traffic-trace`` give.

        Raises:
            BadInputError: its requests span less than 80 s.
        """
        name, at_s = next(
            (action.name, action.at_s)
            for action in self.scenario.actions
            if isinstance(action, Deploy) and action.model == model
        )
        own = [request for request in self.requests if request.model == name]
        return len(own) / (self.requests[-1].arrival_s - at_s), traffic_of(own)


def real_traces() -> Path | None:
    """The folder of the Azure traces, where it is known."""
    folder = os.environ.get("ISERVE_REFERENCE_DATA")
    return Path(folder) / "traces" if folder else None


def trace_source() -> str:
    """For a figure's source line."""
    full = ", a request in each stage of a pipeline" if SERVICE is Service.FCFS_PIPELINED else ""
    return ("Azure 2023" if real_traces() else "synthetic stand-ins for Azure 2023") + full


@cache
def azure(name: str) -> tuple[Request, ...]:
    """The trace of 2023, "conv" or "code"; where the data are absent, its stand-in."""
    folder = real_traces()
    if folder is None:
        return tuple(standin(f"azure-{name}").requests(seed=SEED))
    with open_trace(folder / f"azure_llm_2023_{name}.csv.gz") as trace:
        return tuple(trace)


def world_of(
    site: Site, models: Iterable[str], trace: Iterable[Request], *, deploy_every_s: float, seed: int = SEED
) -> World:
    """``models`` deployed in their order, the first at 0.

    Each request is for one of them by chance, all alike, and left out where that one is not deployed yet.
    """
    deployments = {f"{number} {model}": model for number, model in enumerate(models)}
    actions = tuple(
        Deploy(at_s=number * deploy_every_s, name=name, model=model)
        for number, (name, model) in enumerate(deployments.items())
    )
    longest = site.workload
    capped = cap_lengths(trace, max_input_tokens=longest.input_tokens, max_output_tokens=longest.output_tokens)
    assigned = assign_models(capped, tuple(deployments), Uniform(), seed=seed)
    since = {deploy.name: deploy.at_s for deploy in actions}
    return World(
        site=site,
        deployments=deployments,
        scenario=Scenario(
            cluster=idle_cluster(site.gpu, site.num_gpus),
            actions=actions,
            service=site.service,
            startup_s=0.0,  # as recorded
            most_waiting=_NEVER_STOP,
        ),
        requests=tuple(r for r in assigned if r.arrival_s >= since[r.model]),
    )


@cache
def compressed(name: str, factor: float, seed: int = SEED) -> tuple[Request, ...]:
    """An Azure trace in the paper's form (module docstring)."""
    aggregate = AGGREGATE[name]
    return tuple(compress(azure(name), rate_factor=factor, interval_s=INTERVAL_S, aggregate=aggregate, seed=seed))
