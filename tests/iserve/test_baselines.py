"""Baselines wired to iServe's models, estimators and simulator."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, count
from pathlib import Path

import numpy as np
import pytest

from fingerprint.config import Workload
from fingerprint.errors import BadInputError, ConfigError, InfeasibleError
from fingerprint.gpu_spec import GpuSpec
from fingerprint.gpus import gpu_spec
from fingerprint.model_spec import ModelSpec
from iserve.planning.pipeline import PlanOptions
from iserve.simulation.baselines import (
    MOST_REQUESTS,
    Baseline,
    World,
    alpaserve,
    knowledge_of,
    parse_planner,
    prepare,
    static_deployer,
)
from iserve.simulation.running import SimulatedModel, idle_cluster, roofline_model, simulate_cluster
from placement.routing import make_router
from planner.intent import Intent, IntentKind, Slo
from planner.space import shape_refusal
from tests.fingerprint.step_timed_machine import llama_7b
from tests.golden_words import Golden
from traces.request import Request
from traces.simulator.result import ChangeKind
from traces.simulator.scenario import (
    Deploy,
    Deployed,
    NodeFails,
    NodeReturns,
    NotDeployed,
    Scenario,
    Service,
)
from traces.summary import kept

A6000, H200 = gpu_spec("a6000"), gpu_spec("h200")
WORKLOAD = Workload(batch=8, input_tokens=512, output_tokens=128)
RECORDING = Path(__file__).parents[1] / "bench" / "results" / "aiconfigurator_h200.json.gz"
LATENCY = Intent(kind=IntentKind.MIN_LATENCY)


def model(
    name: str,
    spec: ModelSpec | None = None,
    gpu: GpuSpec = A6000,
    workload: Workload = WORKLOAD,
    **options: object,
) -> SimulatedModel:
    return roofline_model(name, spec or llama_7b(), gpu, PlanOptions(workload=workload, **options), "auto")  # type: ignore[arg-type]


def world(
    *models: SimulatedModel, gpus: int = 8, service: Service = Service.CONTINUOUS, gpu: GpuSpec = A6000
) -> World:
    deploys = tuple(Deploy(at_s=0.0, name=m.name, model=m.name) for m in models)
    scenario = Scenario(cluster=idle_cluster(gpu, gpus), actions=deploys, service=service, startup_s=0.0)
    return World(gpu, {m.name: m for m in models}, scenario)


def poisson(count: int, rate_per_s: float, names: Sequence[str], seed: int = 3) -> list[Request]:
    rng = np.random.default_rng(seed)
    times_s = np.cumsum(rng.exponential(1 / rate_per_s, count))
    return [
        Request(float(t), int(rng.integers(10, 500)), int(rng.integers(1, 128)), str(rng.choice(names)))
        for t in times_s
    ]


def decided(baseline: Baseline, of: World, name: str = "m") -> Deployed:
    answer = static_deployer(baseline, of)(name, of.scenario.cluster)
    assert isinstance(answer, Deployed), answer
    return answer


@pytest.mark.parametrize(
    ("baseline", "intent", "stages", "gpus"),
    [
        pytest.param(Baseline.MAX_TP, Intent(), 1, 8, id="max-tp"),
        pytest.param(Baseline.MAX_PP, Intent(), 8, 8, id="max-pp"),
        pytest.param(Baseline.RULE, Intent(), 1, 1, id="rule for cost"),
        pytest.param(Baseline.RULE, LATENCY, 1, 8, id="rule for latency"),
        pytest.param(Baseline.FSDP, Intent(), 1, 1, id="fsdp-offload"),
    ],
)
def test_what_each_does_with_eight_idle_gpus(baseline: Baseline, intent: Intent, stages: int, gpus: int) -> None:
    answer = decided(baseline, world(model("m", intent=intent)))
    assert (len(answer.placement.stages), len(answer.placement.device_ids)) == (stages, gpus)


def test_iserve_itself_is_one_of_them() -> None:
    asked = world(model("m"))
    chosen = static_deployer(Baseline.ISERVE, asked)
    assert chosen.name.startswith("planner with")


def test_batches_are_the_largest_that_all_leave_room_for_and_one_where_none_is_batched() -> None:
    alone = decided(Baseline.MAX_TP, world(model("m")))
    shared = decided(Baseline.MAX_TP, world(model("m"), *(model(f"m{i}") for i in range(9))))
    unbatched = decided(Baseline.MAX_TP, world(model("m"), service=Service.FCFS))
    assert alone.steps.limits.max_batch == 256 > shared.steps.limits.max_batch > 8
    assert unbatched.steps.limits.max_batch == 1


def test_all_that_was_counted_on_is_then_deployed() -> None:
    """The common batch is not wishful: one after the other, every model finds its place with it."""
    names = [f"m{i}" for i in range(10)]
    asked = world(*(model(name) for name in names))
    deployer = static_deployer(Baseline.MAX_TP, asked)
    result = simulate_cluster(
        poisson(100, 2.0, names), asked.scenario, A6000, asked.models, router=make_router(), deployer=deployer
    )
    assert int(result.outcomes.completed.sum()) == 100
    first = deployer("m0", asked.scenario.cluster)
    assert isinstance(first, Deployed)
    batches = {change.text.rpartition("batch ")[2] for change in result.changes}
    assert batches == {str(first.steps.limits.max_batch)}


@pytest.mark.parametrize(
    "baseline", [Baseline.ISERVE, Baseline.MAX_TP, Baseline.MAX_PP, Baseline.RULE, Baseline.FSDP]
)
def test_no_two_replicas_share_a_gpu(baseline: Baseline) -> None:
    """Three replicas on GPUs of two nodes share none, neither at first nor when one returns with its node."""
    asked = world(model("m", intent=LATENCY))
    actions = (
        Deploy(at_s=0.0, name="m", model="m", replicas=3),
        NodeFails(at_s=3.0, node_id="node1"),
        NodeReturns(at_s=6.0, node_id="node1"),
    )
    cluster = idle_cluster(A6000, 8, per_node=4)
    asked = replace(asked, scenario=replace(asked.scenario, cluster=cluster, actions=actions))
    result = simulate_cluster(
        poisson(100, 10.0, ["m"]),
        asked.scenario,
        A6000,
        asked.models,
        router=make_router(),
        deployer=static_deployer(baseline, asked),
    )
    standing: dict[str, tuple[str, ...]] = {}
    numbers = count(1)
    for change in result.changes:
        if change.kind is ChangeKind.DEPLOYED:
            standing[f"m#{next(numbers)}"] = change.device_ids
            devices = list(chain.from_iterable(standing.values()))
            assert len(set(devices)) == len(devices)
        elif change.kind is ChangeKind.LOST:
            del standing[change.text.rpartition(" ")[2]]
    assert len(standing) == 3
    (deployment,) = result.deployments
    assert deployment.replicas == 3
    assert int(result.outcomes.completed.sum()) > 90


def test_baselines_know_what_the_planner_could_choose_from() -> None:
    """A model of one KV head group of 71 heads, as Falcon-7B: no TP, whatever the rule says."""
    uneven = replace(llama_7b(), num_heads=71, num_kv_heads=1)
    asked = model("m", uneven)
    known = knowledge_of(asked, A6000, idle_cluster(A6000, 8))
    assert {config.tp for config in known.configs} == {1}
    assert all(shape_refusal(uneven, config, 8) is None for config in known.configs)
    assert len(decided(Baseline.MAX_TP, world(asked)).placement.device_ids) == 1


@pytest.mark.parametrize("service", [Service.FCFS, Service.CONTINUOUS])
@pytest.mark.parametrize("keep_all", [False, True])
@pytest.mark.parametrize("refuses_late", [False, True])
def test_alpaserve_gets_what_it_expects(service: Service, keep_all: bool, refuses_late: bool) -> None:
    """The plan is judged by the simulator that it searched with."""
    names, slo = ["a", "b"], Slo(e2e_s=6.0)
    asked = world(model("a"), model("b", llama_7b(64)), gpus=2, service=service)
    if refuses_late:
        asked = replace(asked, scenario=replace(asked.scenario, reject_late=dict.fromkeys(names, slo)))
    requests = poisson(60, 1.0, names)
    prepared = alpaserve(asked, requests, dict.fromkeys(names, slo), router=make_router(), keep_all=keep_all)
    result = simulate_cluster(
        requests, prepared.scenario, A6000, asked.models, router=make_router(), deployer=prepared.deployer
    )
    met = int(kept(result.outcomes, slo).sum())
    assert f"expects {met} of 60 requests" in prepared.notes[0]
    assert all(gpu.peak_bytes <= A6000.memory_bytes for gpu in result.gpus)
    if keep_all:
        assert all(deployment.replicas for deployment in result.deployments)
        assert len(prepared.notes) == 1


def test_alpaserve_drops_what_the_variant_may_not(golden: Golden) -> None:
    """Two GPUs hold one copy of a model of 52 GB and little else."""
    names = ["small", "large"]
    asked = world(model("small", intent=LATENCY), model("large", llama_7b(200)), gpus=1)
    requests = poisson(40, 1.0, names)
    slos = dict.fromkeys(names, Slo(e2e_s=30.0))
    prepared = alpaserve(asked, requests, slos, router=make_router())
    golden("cli", prepared.notes[1:])
    refused = prepared.deployer("large", asked.scenario.cluster)
    assert isinstance(refused, NotDeployed)
    golden("cli", refused.reason)
    with golden.raises("cli", InfeasibleError):
        alpaserve(asked, requests, slos, router=make_router(), keep_all=True)


def test_two_deployments_of_one_model_are_placed_as_two() -> None:
    asked = world(model("m"), gpus=2)
    twice = tuple(Deploy(at_s=0.0, name=name, model="m") for name in ("first", "second"))
    asked = replace(asked, scenario=replace(asked.scenario, actions=twice))
    requests = poisson(20, 1.0, ["first", "second"])
    slos = {"first": Slo(e2e_s=20.0), "second": Slo(e2e_s=20.0)}
    prepared = alpaserve(asked, requests, slos, router=make_router(), keep_all=True)
    result = simulate_cluster(
        requests, prepared.scenario, A6000, asked.models, router=make_router(), deployer=prepared.deployer
    )
    assert [deployment.name for deployment in result.deployments] == ["first", "second"]
    assert int(result.outcomes.completed.sum()) == 20


def test_what_alpaserve_cannot_be_asked(golden: Golden) -> None:
    asked = world(model("m"), gpus=1)
    request = Request(0.0, 10, 10, "m")
    for requests, slo in (
        ([request], None),
        ([request] * (MOST_REQUESTS + 1), Slo(e2e_s=1.0)),
    ):
        with golden.raises("cli", ConfigError):
            prepare(Baseline.ALPASERVE, asked, requests, slo=slo, router=make_router())
    three = (Deploy(at_s=0.0, name="m", model="m", replicas=3),)
    asked = replace(asked, scenario=replace(asked.scenario, actions=three))
    with golden.raises("cli", ConfigError):
        prepare(Baseline.ALPASERVE, asked, [request], slo=Slo(e2e_s=1.0), router=make_router())


def recorded(
    workload: Workload, label: str, intent: Intent, gpu: GpuSpec = H200, answers: Path = RECORDING
) -> Deployed | NotDeployed:
    asked = world(model("m", gpu=gpu, workload=workload, intent=intent), gpus=2, gpu=gpu)
    prepared, _ = prepare(
        Baseline.AICONFIGURATOR,
        asked,
        [],
        slo=None,
        router=make_router(),
        answers=answers,
        labels={"m": label},
    )
    assert prepared.notes == ("AIConfigurator 0.12.0",)
    return prepared.deployer("m", asked.scenario.cluster)


def test_aiconfigurator_chooses_by_its_recorded_answers() -> None:
    """Llama-2-7B, 8 prompts of 512: of the recorded points fp8 weights have the lower TTFT and TPOT."""
    answer = recorded(Workload(8, 512, 65), "folder/Llama-2-7b-hf", LATENCY)
    assert isinstance(answer, Deployed), answer
    assert "tp=1,pp=1,weights=fp8,kv=16bit" in answer.what
    tight = Intent(kind=IntentKind.LATENCY_SLO, slo=Slo(tpot_s=1e-4))
    assert isinstance(recorded(Workload(8, 512, 65), "Llama-2-7b-hf", tight), NotDeployed)


def test_what_aiconfigurator_says_does_not_fit_is_not_its_choice(tmp_path: Path) -> None:
    document = json.loads(gzip.decompress(RECORDING.read_bytes()))
    for answer in document["answers"]:
        answer["fits"] = answer.get("fits", False) and answer["point"]["weights"] != "fp8"
    misfits = tmp_path / "answers.json"
    misfits.write_text(json.dumps(document))
    chosen = recorded(Workload(8, 512, 65), "Llama-2-7b-hf", LATENCY, answers=misfits)
    assert isinstance(chosen, Deployed)
    assert "weights=16bit" in chosen.what


@pytest.mark.parametrize(
    ("workload", "label", "gpu"),
    [
        pytest.param(Workload(8, 512, 128), "Llama-2-7b-hf", H200, id="another answer's length"),
        pytest.param(Workload(9, 512, 65), "Llama-2-7b-hf", H200, id="another batch"),
        pytest.param(Workload(8, 512, 65), "my-own-model", H200, id="another model"),
        pytest.param(Workload(8, 512, 65), "Llama-2-7b-hf", A6000, id="another GPU"),
    ],
)
def test_where_aiconfigurator_was_not_asked_it_has_no_answer(
    workload: Workload, label: str, gpu: GpuSpec, golden: Golden
) -> None:
    answer = recorded(workload, label, LATENCY, gpu)
    assert isinstance(answer, NotDeployed)
    golden("cli", answer.reason)


def test_planners_by_name(tmp_path: Path, golden: Golden) -> None:
    assert parse_planner("max-tp") == (Baseline.MAX_TP, None)
    assert parse_planner("aiconfigurator:a:b.json") == (Baseline.AICONFIGURATOR, Path("a:b.json"))
    for text in ("best", "aiconfigurator", "aiconfigurator:", "max-tp:x.json"):
        with golden.raises("cli", ConfigError):
            parse_planner(text)
    torn = tmp_path / "torn.json"
    for text in (None, "{"):
        if text is not None:
            torn.write_text(text)
        with golden.raises("cli", BadInputError):
            prepare(Baseline.AICONFIGURATOR, world(model("m")), [], slo=None, router=make_router(), answers=torn)
    whole = RECORDING.read_bytes()
    for content in (b"{}", whole[: len(whole) // 2]):
        torn = tmp_path / "torn.json.gz"
        torn.write_bytes(content)
        with golden.raises("cli", BadInputError):
            prepare(Baseline.AICONFIGURATOR, world(model("m")), [], slo=None, router=make_router(), answers=torn)
