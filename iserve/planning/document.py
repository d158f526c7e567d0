"""The plan as it leaves iServe: the JSON of ``iserve plan --json`` and of the REST API."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from fingerprint.config import DeploymentConfig, Workload
from fingerprint.estimates import Correction, Quantity
from fingerprint.load_waits import OneLoad
from fingerprint.measurements import Unreached
from fingerprint.service_model import ServiceModel, service_between
from iserve.api_documents import MergeAdviceDocument
from iserve.planning.verdict import VerdictDocument
from placement.fleet.types import FleetGoal
from planner.plan import LoadForecast, PassedOver, RefusedFor, WhyNot

__all__ = [
    "CacheSizesDocument",
    "CandidateDocument",
    "CapacityBound",
    "CapacityDocument",
    "EstimateDocument",
    "JointForecast",
    "JointPlanDocument",
    "PlanDocument",
    "ProfileDocument",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class EstimateDocument:
    """Predicted memory, times and cost of one configuration."""

    memory_bytes_per_gpu: int
    """Memory of the fullest GPU."""
    memory_bytes_total: int
    """Memory over all GPUs."""
    cost: float | None
    """Cost of one request, in the plan's `cost_unit`; None: not known."""
    ttft_s: Quantity
    """Time to first token of the batch, in seconds."""
    tpot_s: Quantity
    """Time per output token of the batch, in seconds."""
    e2e_s: Quantity
    """Time of a whole request of the batch, in seconds."""
    correction: Correction | None = None
    """Correction by a check, included in the figures; None: none."""
    measured_config: DeploymentConfig | None = None
    """Configuration whose measured times these figures come from; None: datasheets alone."""
    most_at_once: float | None = None
    """Requests that run at once on average; None: no slots for variants bound them."""
    one_load: OneLoad | None = None
    """Load of a variant; None: there are none, or its time is not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CandidateDocument:
    """Candidate of a plan: its predicted figures, and whether it is feasible."""

    config: DeploymentConfig
    """Configuration of this candidate."""
    estimate: EstimateDocument | None
    """Predicted figures; None: not estimated."""
    objective: float | None
    """Value of what the intent optimises, in the plan's `objective_unit`; None: not known."""
    feasible: bool
    """Whether the candidate keeps every limit and fits the hardware."""
    reason: str | None
    """Every reason of a refusal; None: feasible."""
    layers_per_stage: tuple[int, ...] | None = None
    """Hidden layers of each pipeline stage where the candidate fits; None: no place was found."""
    conditions: tuple[str, ...] = ()
    """Requirements other than GPUs, such as a prepared checkpoint."""
    miss_probability: float | None = None
    """Probability of missing the tightest limit of the SLO; None without a rate."""
    utilisation: float | None = None
    """Utilisation of the replica at the rate; None without a rate."""
    measured: bool = False
    """Whether this configuration was run; false: estimated from other configurations or from datasheets."""
    objective_low: float | None = None
    """Lower end of the objective's 90% interval; None: not feasible."""
    objective_high: float | None = None
    """Upper end of the objective's 90% interval; None: not feasible."""
    refused_for: RefusedFor | None = None
    """Kind of the first reason of a refusal; None: feasible."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileDocument:
    """The profile behind a plan. ``unreached``: what its budget, or memory that was free then, did not hold, whose
    estimates are scaled from what was run, or have wider intervals."""

    created_at: str
    """Time of the profile, ISO 8601 in UTC."""
    budget_s: float
    """Seconds that the profile was allowed."""
    spent_s: float
    """Seconds that the profile took."""
    unreached: tuple[Unreached, ...] = ()
    """Configurations that lack points, by what these lacked: the budget, memory."""

    @property
    def cut_short(self) -> bool:
        return bool(self.unreached)


class CapacityBound(StrEnum):
    """Reason why a worker is started for no more requests, or no longer ones."""

    GIVEN = "given"  # both sizes were given
    INTENT = "intent"  # min-memory
    RATE = "rate"  # requests at once are those that the rate was judged with
    MEMORY = "memory"
    LOAD = "load"  # of a joint plan: memory is reserved for the load that it was judged at
    NOT_MEASURED = "not-measured"  # nothing was measured that tells the memory of more
    LARGEST = "largest"  # the most that workers are started for


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheSizesDocument:
    """Bytes that a replica keeps of a request, over all its GPUs and layers."""

    kv_bytes_per_token: int
    """KV cache of one token; a sliding window keeps no more than its tokens; 0: no KV cache."""
    state_bytes_per_request: int
    """State of one request, whatever its length; 0: the model keeps no state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacityDocument:
    """Limits of each worker of the chosen configuration, and the memory that they take."""

    requests_at_once: int
    """Most requests that one worker runs at once."""
    context_tokens: int
    """Longest request, prompt and answer together."""
    kv_tokens: int
    """Tokens that the KV cache holds, over all requests."""
    memory_bytes_per_gpu: int
    """Memory promised on the fullest GPU."""
    bound: CapacityBound | None = None
    """Reason why the worker takes no more; None: a plan stored before this was recorded."""
    cache_sizes: CacheSizesDocument | None = None
    """Cache sizes of the model; None: a plan stored before this was recorded."""
    step_tokens: int | None = None
    """Most tokens of one step, prompts and answers together; None: a plan stored before this was recorded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JointForecast:
    """Forecast of a plan for one deployment, at the known rate or the mean of the prior."""

    config: DeploymentConfig
    """Configuration of each replica."""
    replicas: int
    """Number of replicas."""
    e2e_s: float | None
    """Mean time of a request at the mean rate, or over the prior's, in seconds; None: there is no place for it."""
    utilisation: float
    """Mean rate over capacity, of the busiest replica, likewise."""
    slowdown: float
    """Factor by which neighbours on its GPUs slow it down, of the slowest replica."""
    gpus_held: float
    """GPUs that it holds: of each the larger of its share of the memory and of the time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JointPlanDocument:
    """Joint choice of configuration, replicas, KV cache and devices, and what it was judged at."""

    goal: FleetGoal
    """Goal under load: `latency`, `cost`, or `gpus` (those that hold anything)."""
    rate_per_s: float | None
    """Requests per second of all replicas; None: not known, the prior is taken for it."""
    utilisations: tuple[float, ...]
    """Utilisations of its share of the cluster that the prior weighs equally; empty at a known rate."""
    neighbours: int
    """Deployments that run there and stay as they are."""
    neighbour_rates: int
    """Neighbours whose rate is known."""
    kv_tokens: tuple[int, ...]
    """Tokens of the KV cache of each replica."""
    forecast: JointForecast
    """Forecast of the chosen plan, the mean over the loads."""
    rule: JointForecast
    """Forecast of the rule's plan (fewest GPUs that hold it, one replica, spread out) at the same loads."""
    is_rule: bool
    """Whether the chosen plan is the rule's."""
    service: ServiceModel
    """Service model of one replica: times and memory at any concurrency."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanDocument:
    """Plan: every configuration, the chosen one, and the reasons."""

    model: str
    """Model that was planned for, as it was given."""
    intent: str
    """Intent that candidates are ranked by."""
    hardware: str
    """Devices that were planned for, in words."""
    workload: Workload
    """Workload of all times, costs and memory of the plan."""
    objective_unit: str
    """Unit of every objective."""
    cost_unit: str
    """Unit of every cost."""
    queueing: str | None
    """Queueing model that was used; None without a rate."""
    candidates: tuple[CandidateDocument, ...]
    """Every configuration, feasible ones first."""
    chosen: int | None
    """Index of the chosen candidate; None: none is feasible."""
    why_not: WhyNot
    """Refused configurations that would be better, and what would admit them."""
    notes: tuple[str, ...] = ()
    """Remarks on the plan as a whole."""
    load_forecast: LoadForecast | None = None
    """Times of the chosen candidate under the rate; None without a rate."""
    replicas: int = 1
    """Number of replicas; figures are of one, rates of the verdict are of all."""
    single_request: EstimateDocument | None = None
    """Figures of one request alone on the chosen candidate; None: not estimated, or the batch is 1."""
    passed_over: tuple[PassedOver, ...] = ()
    """Candidates that are better by their value and were not measured, best first."""
    indistinguishable: tuple[int, ...] = ()
    """Indices of candidates whose interval overlaps that of the chosen one."""
    profile: ProfileDocument | None = None
    """Profile behind the plan; None: nothing was measured."""
    verdict: VerdictDocument | None = None
    """First screen of the plan as fields; None: a plan stored before verdicts were made."""
    capacity: CapacityDocument | None = None
    """Limits of each worker of the chosen candidate; None: none is feasible."""
    joint: JointPlanDocument | None = None
    """Joint choice that the plan is; None: it was ranked by one batch, and placed by a policy."""
    merge_advice: MergeAdviceDocument | None = None
    """Advice to merge variants, where that is cheaper at the rate by a tenth or more; None: it is not."""

    def service_of(self, config: DeploymentConfig) -> ServiceModel | None:
        """Return the service model of ``config``; None: the plan has no times of it.

        Of a plan by one batch it is by the times of one request and of the batch, without a joint choice's memory.
        """
        if self.joint is not None:
            return self.joint.service if self.joint.service.config == config else None
        full = next((one.estimate for one in self.candidates if one.config == config), None)
        if full is None:
            return None
        alone = self.single_request or full
        times = ((alone.ttft_s.value, full.ttft_s.value), (alone.tpot_s.value, full.tpot_s.value))
        return service_between(config, self.workload, *times, full.most_at_once, full.one_load)
