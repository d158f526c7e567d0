"""Harvesting, the paper's figure 20: SLO attainment while Llama-2-70B is profiled on GPUs that serve.

What a GPU does for a profile within a run is not modelled, so it is bounded: a fingerprint that keeps one GPU
busy for the whole trace, and one that keeps all eight busy (tp=8), against none. The real harvest policy says
which GPUs; profile and requests share their time evenly. Decided before the first result: two models on every
GPU in 16 bits, the conversation trace at the rate factors of figure 11, the SLO of figure 11.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from statistics import fmean

from fingerprint.config import WeightFormat
from iserve.simulation.running import PlannedDeployer
from notebooks.figures.contest import SLO_FACTOR, slos_of
from notebooks.figures.figure import Chart, Figure, Finding, Table
from notebooks.figures.launches import Launch, cost_of
from notebooks.figures.load import PAPER_SITE, SEEDS, compressed, trace_source, world_of
from placement.harvesting import spare_gpu
from placement.routing import LeastOutstanding
from planner.intent import Intent, IntentKind, Quality
from traces.simulator.result import ChangeKind
from traces.simulator.scenario import Policies, Profile
from traces.simulator.simulation import simulate
from traces.summary import kept

__all__ = ["attained", "figure_20"]

FACTORS = (0.1, 0.2, 0.3, 0.4)
PROFILED_GPUS = (0, 1, 8)
_MODELS = ("Llama-2-7b-hf", "gpt-j-6b") * PAPER_SITE.num_gpus
_INTENT = Intent(kind=IntentKind.MIN_MEMORY, quality=Quality.EXACT)
_FINGERPRINT = Launch(tp=1, pp=1, weights=WeightFormat.BITS16, num_layers=2)  # the largest on one GPU
_PROFILED = "Llama-2-70b-hf"


@cache
def attained(factor: float, profiled_gpus: int, seed: int) -> tuple[float, float, int]:
    """Share of the requests that keep their SLO, mean busy fraction of the GPUs, and profiles that found a GPU."""
    world = world_of(PAPER_SITE, _MODELS, compressed("conv", factor, seed), deploy_every_s=0.0, seed=seed)
    models = world.models(lambda model: _INTENT, "least-loaded")
    by_model = slos_of(world, SLO_FACTOR, world.mean_request)
    memory_bytes = int(cost_of(_PROFILED, [_FINGERPRINT], None).most_gib * 2**30)
    whole_trace_s = world.requests[-1].arrival_s
    profiles = tuple(
        Profile(at_s=0.0, name=f"profile {number}", memory_bytes=memory_bytes, work_s=whole_trace_s)
        for number in range(profiled_gpus)
    )
    policies = Policies(
        deployer=PlannedDeployer(PAPER_SITE.gpu, models.values()), router=LeastOutstanding(), harvest=spare_gpu
    )
    scenario = replace(world.scenario, actions=(*world.scenario.actions, *profiles))
    result = simulate(world.requests, scenario, policies)
    met = sum(
        int(kept(own, by_model[world.deployments[name]]).sum()) for name, own in result.outcomes.by_deployment()
    )
    taken = sum(change.kind is ChangeKind.PROFILING for change in result.changes)
    return met / len(result.outcomes), fmean(gpu.busy_fraction for gpu in result.gpus), taken


def figure_20(factors: Sequence[float] = FACTORS, seeds: Sequence[int] = SEEDS) -> Figure:
    """Attainment without, with one and with eight GPUs profiling."""
    shares: dict[float, list[float]] = {}  # by factor, in the order of PROFILED_GPUS
    loads: dict[float, float] = {}
    for factor in factors:
        found = [[attained(factor, gpus, seed) for seed in seeds] for gpus in PROFILED_GPUS]
        shares[factor] = [round(fmean(met for met, _, _ in some), 4) for some in found]
        loads[factor] = round(fmean(busy for _, busy, _ in found[0]), 4)
    return Figure(
        number="20",
        title="SLO attainment while Llama-2-70B's fingerprints are profiled",
        source=f"simulated, roofline, 8 A6000 with two models each, 16 bits, no batching, {trace_source()}, "
        f"means of {len(seeds)} seeds",
        tables=(
            Table(
                f"share of all requests that keep {SLO_FACTOR:g} times the mean request's time alone",
                (
                    "trace, rate factor",
                    "GPUs busy with requests",
                    *(f"{gpus} GPUs profile" for gpus in PROFILED_GPUS),
                ),
                tuple((f"conv {factor:g}", loads[factor], *some) for factor, some in shares.items()),
            ),
        ),
        findings=tuple(
            Finding(
                f"attainment with {gpus} profiling, at {', '.join(f'{load:.0%}' for load in loads.values())} load",
                "-4.00% up to 30% load; below 90% beyond",
                ", ".join(f"{some[column] - some[0]:+.1%}" for some in shares.values()),
            )
            for column, gpus in enumerate(PROFILED_GPUS)
            if gpus
        ),
        charts=(
            Chart(
                "SLO attainment",
                "share kept",
                tuple(f"conv {factor:g}\nload {load:.0%}" for factor, load in loads.items()),
                tuple(
                    (f"{gpus} GPUs profile", tuple(some[column] for some in shares.values()))
                    for column, gpus in enumerate(PROFILED_GPUS)
                ),
            ),
        ),
    )
