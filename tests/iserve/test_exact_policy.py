"""``--policy ilp`` from a plan's options to the GPUs, and where a policy's name is checked."""

from __future__ import annotations

from dataclasses import replace

from daemon.engines.registry import capabilities_for
from fingerprint.config import Workload
from fingerprint.errors import ConfigError
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.gpus import gpu_spec
from iserve.api_types import DeployBody
from iserve.planning.pipeline import Hardware, PlanOptions, make_plan
from iserve.settings import Settings
from iserve.simulation.running import idle_cluster
from placement.types import ClusterSnapshot, Placement
from planner.intent import Intent, IntentKind
from tests.fingerprint.step_timed_machine import llama_7b
from tests.golden_words import Golden

A6000 = gpu_spec("a6000")


def test_a_plan_by_it_is_the_same_but_for_the_place() -> None:
    """Loads of 0.1 are none to hybrid, which packs there; the exact place is on the idle GPU."""
    spec = llama_7b()
    gpus = [replace(g, load_fraction=0.0 if g.gpu_index == 2 else 0.1) for g in idle_cluster(A6000, 4).gpus]
    hardware = Hardware(label="4 x a6000", gpu=A6000, snapshot=ClusterSnapshot(tuple(gpus)))
    places, feasible = {}, {}
    for policy in ("hybrid", "ilp"):
        options = PlanOptions(
            intent=Intent(kind=IntentKind.MIN_MEMORY), workload=Workload(1, 512, 128), policy=policy
        )
        plan = make_plan(spec, hardware, RooflineEstimator(spec, A6000), tuple(capabilities_for("auto")), options)
        assert plan.best is not None
        assert isinstance(plan.best.layout, Placement)
        places[policy] = (plan.best.config, plan.best.layout.device_ids)
        feasible[policy] = {one.config for one in plan.candidates if one.feasible}
    assert feasible["hybrid"] == feasible["ilp"]
    assert places["hybrid"][0] == places["ilp"][0]
    assert (places["hybrid"][1], places["ilp"][1]) == (("a6000:0",), ("a6000:2",))


def test_the_installation_and_the_api_take_it_but_not_look_ahead(golden: Golden) -> None:
    assert Settings(policy="ilp").policy == "ilp"
    assert DeployBody(policy="ilp").options(default_policy="hybrid", load_threshold=0.5).policy == "ilp"
    with golden.raises("controller", ConfigError):
        Settings(policy="look-ahead")
    with golden.raises("controller", ConfigError):
        DeployBody(policy="look-ahead").options(default_policy="hybrid", load_threshold=0.5)
