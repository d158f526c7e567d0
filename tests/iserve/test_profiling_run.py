"""A profile on an engine that starts anew for each format measures no more than the request can use.

The engine is the synthetic machine of known step times, with the capability table of vLLM.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from daemon.engines.vllm.capabilities import TABLE
from daemon.status import DeviceStatus, NodeStatus
from fingerprint.codec import from_json, to_json
from fingerprint.config import DeploymentConfig, WeightFormat, Workload
from fingerprint.errors import ConfigError, EngineError, InfeasibleError, UnsupportedModelError
from fingerprint.estimates import Source
from fingerprint.estimators.calibration import Calibration
from fingerprint.families import load_spec
from fingerprint.measurements import Profile
from fingerprint.model_spec import Stored
from fingerprint.profile_plan import Shards
from iserve.controller.profiling_cuts import Fingerprints
from iserve.controller.profiling_devices import STEP_TOKENS
from iserve.controller.profiling_run import Order, take
from iserve.controller.profiling_scope import lacking
from iserve.controller.snapshot import hardware_of
from iserve.model_source import ModelSource
from iserve.planning.estimator_factory import estimator_for, profile_as, step_tokens_of
from iserve.planning.pipeline import PlanOptions, make_plan
from iserve.planning.worker_launch import worker_spec
from placement.types import DeploymentState, Placement, ReplicaState, StagePlacement
from planner.intent import Intent, IntentKind, Quality, Slo
from planner.plan import Plan
from tests.fingerprint.step_timed_machine import StepTimedMachine, llama_7b
from tests.fingerprint.test_shards import RankMachine
from tests.golden_words import Golden

GIB = 2**30
BITS16, FP8 = WeightFormat.BITS16, WeightFormat.FP8
SOURCE = ModelSource(name="m", directory=Path("/m"), has_weights=True, spec=llama_7b())
QWEN_2 = replace(SOURCE.spec, family="qwen2")
RUNS = TABLE.unprepared()
NODE = NodeStatus(
    node_id="n",
    observed_at=0.0,
    devices=tuple(
        DeviceStatus(
            device_id=f"GPU-{index}",
            index=index,
            kind="cuda",
            name="NVIDIA H200",
            total_bytes=140 * GIB,
            free_bytes=139 * GIB,
            load_fraction=0.0,
        )
        for index in range(2)
    ),
    workers=(),
)


@pytest.fixture(autouse=True)
def _nothing_known_of_other_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide errors of predictions on a real H200: they say nothing of the machine on paper, which is named one."""
    monkeypatch.setattr("fingerprint.estimators.depth_tied.shipped_calibration", Calibration)


def profiled(
    machine: StepTimedMachine,
    *,
    plan_options: PlanOptions | None = None,
    quality: Quality = Quality.NEAR,
    table: Any = RUNS,
    batch: int = 4,
    node: NodeStatus = NODE,
    shards: Shards = Shards.AUTO,
    source: ModelSource = SOURCE,
    known: Profile | None = None,
    serving: tuple[DeploymentState, ...] = (),
    expert_parallel: bool = False,
) -> Profile:
    order = Order(
        source=source,
        table=table,
        node=node,
        workload=Workload(batch, 512, 128) if plan_options is None else plan_options.workload,
        plan_options=plan_options,
        quality=quality if plan_options is None else plan_options.intent.quality,
        shards=shards,
        max_seconds=1e6,
        progress=lambda _: None,
        known=known,
        serving=serving,
        expert_parallel=expert_parallel,
    )
    target: Any = machine

    def shape(layers: int, tp: int = 1) -> Path:
        if isinstance(machine, RankMachine):
            return machine.shape(layers, tp)
        assert tp == 1, "a rank's shape, on a machine that knows none"
        return machine.fingerprint(layers)

    fingerprints: Any = shape
    return take(order, target, fingerprints)


def started(machine: StepTimedMachine) -> list[tuple[int, int, WeightFormat]]:
    """(tp, pp, weights) of each engine start, of which every configuration takes two."""
    loads = [(e[1].tp, e[1].pp, e[2]) for e in machine.log if e[0] == "load"]  # type: ignore[attr-defined]
    assert all(loads.count(one) == 2 for one in loads)
    return list(dict.fromkeys(loads))


@cache
def everything(quality: Quality) -> tuple[Profile, int]:
    """Return what is measured where nothing is skipped, and in how many starts; the same for every request."""
    machine = StepTimedMachine()
    return profiled(machine, quality=quality), len(started(machine))


@cache
def measured_for(plan_options: PlanOptions) -> tuple[Profile, StepTimedMachine]:
    """Return the profile that a request has a machine measured for, and that machine."""
    machine = StepTimedMachine()
    return profiled(machine, plan_options=plan_options), machine


estimator_of = cache(estimator_for)  # of a profile, whose regressions take most of a test


def plan_of(profile: Profile, plan_options: PlanOptions) -> Plan:
    return make_plan(
        SOURCE.spec, hardware_of(NODE, profile.machine.device), estimator_of(profile), [RUNS], plan_options
    )


def options_of(kind: IntentKind = IntentKind.MIN_COST, **limits: Any) -> PlanOptions:
    return PlanOptions(intent=Intent(kind=kind, **limits), workload=Workload(4, 512, 128))


def test_without_a_wish_every_format_of_the_quality_is_measured_under_every_degree() -> None:
    machine = StepTimedMachine()
    profile = profiled(machine)
    assert started(machine) == [(tp, pp, w) for tp, pp in ((1, 1), (2, 1), (1, 2)) for w in (BITS16, FP8)]
    assert profile.notes == ()


def test_a_quantized_checkpoint_is_measured_as_it_is_stored_and_planned_by_that() -> None:
    whole = llama_7b()
    stored = Stored(
        method="awq",
        form="4-bit, groups of 128",
        bits=4,
        group_inputs=128,
        layer_linear_bytes=0.52 * whole.layer_linear_params,
        layer_expert_bytes=0.0,
    )
    machine = StepTimedMachine(spec=replace(whole, stored=stored))
    source = replace(SOURCE, spec=machine.spec)
    profile = profiled(machine, quality=Quality.EXACT, source=source)  # which changes no answer
    assert {weights for *_, weights in started(machine)} == {WeightFormat.STORED}
    assert profile.notes == ()
    hardware = hardware_of(NODE, profile.machine.device)
    plan = make_plan(source.spec, hardware, estimator_of(profile), [RUNS], options_of())
    chosen = plan.candidates[0]
    assert chosen.feasible
    assert (chosen.config.weights, chosen.is_measured) == (WeightFormat.STORED, True)
    assert chosen.estimate is not None
    assert {chosen.estimate.ttft_s.source, chosen.estimate.tpot_s.source} == {Source.EXTRAPOLATED}


def test_exact_quality_measures_16_bits_only(golden: Golden) -> None:
    machine = StepTimedMachine()
    profile = profiled(machine, quality=Quality.EXACT)
    assert {weights for *_, weights in started(machine)} == {BITS16}
    golden("controller", profile.notes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan_options",
    [
        options_of(),
        options_of(IntentKind.MIN_LATENCY),
        options_of(IntentKind.MIN_MEMORY),
        options_of(IntentKind.MIN_GPU_HOURS),
        options_of(IntentKind.MAX_THROUGHPUT),
        options_of(IntentKind.LATENCY_SLO, slo=Slo(tpot_s=0.02)),
        options_of(IntentKind.LATENCY_SLO, slo=Slo(tpot_s=1e-5)),
        options_of(quality=Quality.EXACT),
    ],
    ids=lambda options: (
        f"{options.intent.kind}-{slo.tpot_s if (slo := options.intent.slo) else None}-{options.intent.quality}"
    ),
)
def test_what_is_skipped_does_not_change_what_is_chosen(plan_options: PlanOptions) -> None:
    """Skipping is reported, costs no start, and ends where measuring everything ends."""
    profile, thrifty = measured_for(plan_options)
    whole, starts = everything(plan_options.intent.quality)
    skipped = [note for note in profile.notes if " not measured: " in note and "quality=" not in note]
    assert len(started(thrifty)) + len(skipped) == starts
    chosen, best = plan_of(profile, plan_options).best, plan_of(whole, plan_options).best
    assert (chosen and chosen.config) == (best and best.config)


def test_a_split_is_not_measured_for_least_memory_and_is_for_least_latency() -> None:
    """Two GPUs hold more than one, whatever is measured of them; and may well be faster."""
    small, fast = StepTimedMachine(), StepTimedMachine()
    profile = profiled(small, plan_options=options_of(IntentKind.MIN_MEMORY, quality=Quality.EXACT))
    assert started(small) == [(1, 1, BITS16)]
    assert [note.partition(":")[0] for note in profile.notes] == [
        "tp=2 pp=1 16bit not measured",
        "tp=1 pp=2 16bit not measured",
        "fp8 not measured",
    ]
    assert "min-memory of tp=2" in profile.notes[0]
    assert not any(entry[0] == "open" and entry[1:] != (1, 1) for entry in small.log), "a worker was started"
    profiled(fast, plan_options=options_of(IntentKind.MIN_LATENCY, quality=Quality.EXACT))
    assert (2, 1, BITS16) in started(fast)


def with_free(*gib: float) -> NodeStatus:
    devices = (replace(d, free_bytes=int(g * GIB)) for d, g in zip(NODE.devices, gib, strict=True))
    return replace(NODE, devices=tuple(devices))


def points(profile: Profile) -> set[tuple[int, int]]:
    return {(point.batch, point.input_tokens) for point in profile.timing}


def test_a_busy_gpu_changes_nothing_of_what_is_measured() -> None:
    """A split over a GPU that a worker kept busy is measured as on idle GPUs."""
    plan_options = options_of(IntentKind.MIN_LATENCY, quality=Quality.EXACT)
    idle, started_on = NODE.devices
    beside = replace(started_on, free_bytes=started_on.free_bytes - 30 * GIB, load_fraction=0.9)
    node = replace(NODE, devices=(idle, beside))
    replica = ReplicaState(
        replica_id="a", placement=Placement((_alone_on(beside),)), ready=True, outstanding=0, max_batch=32
    )
    uncalled = DeploymentState(
        name="a", model="a", wanted=1, replicas=(replica,), moving=False, waiting=0, requests_per_s=0.0,
        service_s=1.0, idle_s=60.0, steady_s=60.0,
    )  # fmt: skip
    on_idle, known, unknown = StepTimedMachine(), StepTimedMachine(), StepTimedMachine()
    skipped = profiled(on_idle, plan_options=plan_options).skipped
    assert profiled(known, plan_options=plan_options, node=node, serving=(uncalled,)).skipped == skipped
    assert (2, 1, BITS16) in started(on_idle)
    profile = profiled(unknown, plan_options=plan_options, node=node)
    assert started(known) == started(unknown) == started(on_idle)
    assert lacking(profile, node, RUNS, plan_options, (uncalled,)) == ()


def _alone_on(device: DeviceStatus) -> StagePlacement:
    return StagePlacement(
        node_id="n", device_ids=(device.device_id,), first_layer=0, num_layers=32, bytes_per_gpu=30 * GIB
    )


def test_points_that_what_is_free_does_not_hold_are_left_out() -> None:
    """Points that do not fit the free memory are left out, for the engine makes as many KV blocks as it is given.

    Of Llama-2-7B in two layers that is 32 KiB for each token, 4.3 GiB for 256 sequences of 545.
    """
    whole = profiled(StepTimedMachine(), batch=256, quality=Quality.EXACT)
    some = profiled(StepTimedMachine(), batch=256, quality=Quality.EXACT, node=with_free(6, 6))
    assert (256, 512) in points(whole) - points(some)
    assert (1, 512) in points(some) < points(whole)
    left_out = [note for note in some.notes if "GiB of a GPU, a profile may use 5.4 GiB now" in note]
    assert len(left_out) == len(points(whole) - points(some))
    assert max(p.kv_tokens for p in some.memory) * 32 * 1024 < 4 * GIB


def test_a_gpu_that_is_full_stands_in_the_way_of_splits_alone() -> None:
    machine = StepTimedMachine()
    profile = profiled(machine, quality=Quality.EXACT, node=with_free(2, 139), shards=Shards.NEVER)
    assert started(machine) == [(1, 1, BITS16)]
    assert [note.partition(":")[0] for note in profile.notes[:2]] == ["tp=2 pp=1 left out", "tp=1 pp=2 left out"]
    assert points(profile) == points(profiled(StepTimedMachine(), quality=Quality.EXACT))


def runs_of(profile: Profile) -> set[tuple[int, int, WeightFormat, bool]]:
    return {(point.tp, point.pp, point.weights, point.shard) for point in profile.timing}


def test_a_degree_whose_second_gpu_is_full_is_taken_as_one_rank_on_the_first(golden: Golden) -> None:
    machine = RankMachine()
    profile = profiled(machine, quality=Quality.EXACT, node=with_free(2, 139))
    assert runs_of(profile) == {(1, 1, BITS16, False), (2, 1, BITS16, True)}
    assert {entry[1:] for entry in machine.log if entry[0] == "open"} == {(1, 1)}
    told = [note.partition(":")[0] for note in profile.notes]
    golden("controller", told)
    golden("controller", profile.notes)
    estimate = estimator_of(profile).estimate(DeploymentConfig(tp=2, engine="vllm"), Workload(4, 512, 128))
    assert {estimate.ttft_s.source, estimate.tpot_s.source, estimate.memory.source} == {Source.SHARDED}


ONE_GPU = replace(NODE, devices=NODE.devices[:1])


@pytest.mark.parametrize(
    ("shards", "source"), [(Shards.NEVER, "scaled"), (Shards.AUTO, "scaled"), (Shards.ALWAYS, "sharded")]
)
def test_what_the_node_never_has_the_gpus_for_is_taken_when_it_is_asked_for(shards: Shards, source: str) -> None:
    """Two ranks on one GPU are measured only when asked for."""
    profile = profiled(RankMachine(num_devices=1), quality=Quality.EXACT, node=ONE_GPU, shards=shards)
    estimate = estimator_of(profile).estimate(DeploymentConfig(tp=2, engine="vllm"), Workload(4, 512, 128))
    assert estimate.tpot_s.source == source
    assert profile.complete


def test_a_wish_takes_no_rank_that_cannot_change_its_plan() -> None:
    """A plan with tp=2 cannot be launched next to the full GPU, so nothing of it is worth an engine start."""
    machine = RankMachine()
    profile = profiled(machine, plan_options=options_of(), node=with_free(2, 139))
    assert {(tp, pp) for tp, pp, _, _ in runs_of(profile)} == {(1, 1)}
    assert any(note.startswith("tp=2 pp=1 16bit not measured: ") for note in profile.notes)
    assert profile.complete


def test_a_family_whose_ranks_cannot_be_written_says_so() -> None:
    node, quality = with_free(2, 139), Quality.EXACT
    profile = profiled(RankMachine(), quality=quality, node=node, source=replace(SOURCE, spec=QWEN_2))
    assert {(tp, shard) for tp, _, _, shard in runs_of(profile)} == {(1, False)}
    assert any("qwen2 take head_dim" in note for note in profile.notes)
    assert not profile.complete


def test_an_engine_without_step_timer_refuses_ranks_alone_before_it_starts(golden: Golden) -> None:
    machine = RankMachine()
    with golden.raises("controller", ConfigError):
        profiled(machine, shards=Shards.ALWAYS, table=replace(RUNS, step_timed=False))
    assert machine.log == []


def test_a_profile_that_has_room_for_nothing_says_what_it_needs(golden: Golden) -> None:
    machine = StepTimedMachine()
    with golden.raises("controller", InfeasibleError):
        profiled(machine, quality=Quality.EXACT, node=with_free(1, 1))
    assert started(machine) == []


@pytest.mark.parametrize("batch", [1, 16])
def test_a_deployment_is_started_with_the_limits_that_were_measured(batch: int, tmp_path: Path) -> None:
    profile = measured_for(replace(options_of(), workload=Workload(batch, 512, 128)))[0]
    assert {point.max_batched_tokens for point in profile.memory} == {STEP_TOKENS}
    assert all(point.max_batch >= batch for point in profile.memory)
    plan_options = replace(options_of(), workload=Workload(batch, 512, 128))
    best = plan_of(profile, plan_options).best
    assert best is not None
    free = {device.device_id: device.free_bytes for device in NODE.devices}
    spec = worker_spec(
        "m", SOURCE, "m-1", best.config, best.layout, plan_options.workload, free, step_tokens_of(profile)
    )
    assert spec.limits.max_batched_tokens == STEP_TOKENS
    assert spec.limits.max_batch == batch


def test_where_no_step_was_fixed_a_launch_follows_from_the_workload() -> None:
    profile = profiled(StepTimedMachine())
    plain = replace(profile, timing=tuple(replace(point, repeat=1) for point in profile.timing))
    assert step_tokens_of(plain) == STEP_TOKENS, "its engine was started for that step, whatever it ran"
    extrapolated = replace(plain, memory=tuple(replace(point, max_batch=0) for point in plain.memory))
    assert step_tokens_of(extrapolated) is None
    unrecorded = replace(profile, memory=tuple(replace(p, max_batched_tokens=0) for p in profile.memory))
    assert step_tokens_of(unrecorded) == STEP_TOKENS


def test_what_is_estimated_from_the_skipped_stays_scaled() -> None:
    profile = measured_for(options_of(IntentKind.MIN_MEMORY, quality=Quality.EXACT))[0]
    estimate = estimator_of(profile).estimate(DeploymentConfig(tp=2, engine="vllm"), Workload(4, 512, 128))
    assert estimate.tpot_s.source == "scaled"


# --- a profile that another request was answered by -------------------------------------------------------------


AT = Workload(4, 512, 128)
EXACT, NEAR = options_of(quality=Quality.EXACT), options_of(quality=Quality.NEAR)


def source_of(profile: Profile, **config: Any) -> Source:
    return estimator_of(profile).estimate(DeploymentConfig(engine="vllm", **config), AT).tpot_s.source


def test_what_an_exact_wish_left_out_is_what_a_near_one_lacks() -> None:
    """The fp8 times would be scaled from 16 bits by datasheets, though measuring them could change the choice."""
    exact = measured_for(EXACT)[0]
    assert source_of(exact, weights=FP8) is Source.SCALED
    assert lacking(exact, NODE, RUNS, EXACT) == ()
    assert DeploymentConfig(weights=FP8, engine="vllm") in lacking(exact, NODE, RUNS, NEAR)


@pytest.mark.slow
@pytest.mark.parametrize(
    "second", [NEAR, options_of(IntentKind.MIN_LATENCY), options_of(IntentKind.MAX_THROUGHPUT)]
)
def test_what_is_lacking_is_measured_beside_what_is_there(second: PlanOptions) -> None:
    """The second profile measures nothing twice, loses nothing, and answers as if it had been the first."""
    exact, machine = measured_for(EXACT)[0], StepTimedMachine()
    both = profiled(machine, plan_options=second, known=exact)
    assert (1, 1, FP8) in started(machine)
    assert (1, 1, BITS16) not in started(machine)
    assert source_of(both, weights=FP8) is Source.EXTRAPOLATED
    estimated = [estimator_of(p).estimate(DeploymentConfig(engine="vllm"), AT) for p in (exact, both)]
    assert estimated[0] == estimated[1]
    assert lacking(both, NODE, RUNS, second) == ()
    chosen, first = (
        plan_of(both, second).best,
        plan_of(measured_for(second)[0], second).best,
    )
    assert (chosen and chosen.config) == (first and first.config)
    assert both.spent_s > exact.spent_s


def test_a_degree_that_one_wish_did_not_need_is_measured_for_one_that_does() -> None:
    small = measured_for(options_of(IntentKind.MIN_MEMORY, quality=Quality.EXACT))[0]
    fast = options_of(IntentKind.MIN_LATENCY, quality=Quality.EXACT)
    assert source_of(small, tp=2) is Source.SCALED
    both = profiled(StepTimedMachine(), plan_options=fast, known=small)
    assert source_of(both, tp=2) is Source.EXTRAPOLATED
    assert lacking(both, NODE, RUNS, fast) == ()


def with_towers(gib: int) -> ModelSource:
    """The model with towers of so many GiB."""
    params, text = gib * GIB // 2, SOURCE.spec
    spec = replace(text, embedding_params=text.embedding_params + params, tower_params=params)
    return replace(SOURCE, spec=spec)


def test_towers_that_leave_one_gpu_too_small_have_the_split_measured() -> None:
    """Text alone, 13 GiB, fits one H200 and takes least memory there; with 130 GiB of towers it takes two."""
    small = options_of(IntentKind.MIN_MEMORY, quality=Quality.EXACT)
    whole, source = StepTimedMachine(), with_towers(130)
    profile = profiled(whole, plan_options=small, source=source)
    assert (2, 1, BITS16) in started(whole)
    assert profile.spec == SOURCE.spec, "measured is the text alone"
    text, added = measured_for(small)[0], StepTimedMachine()
    assert lacking(text, NODE, RUNS, small) == ()
    assert lacking(profile_as(source.spec, text), NODE, RUNS, small) != ()
    both = profiled(added, plan_options=small, known=text, source=source)
    assert (2, 1, BITS16) in started(added)
    assert lacking(profile_as(source.spec, both), NODE, RUNS, small) == ()


def test_what_fails_when_it_is_added_costs_nothing_of_what_is_there_and_is_not_tried_again() -> None:
    exact = measured_for(EXACT)[0]
    broken = StepTimedMachine(broken=lambda *_: EngineError("no fp8 kernel"))
    both = profiled(broken, plan_options=NEAR, known=exact)
    assert (both.timing, both.memory) == (exact.timing, exact.memory)
    assert any("weights=fp8" in note and "no fp8 kernel" in note for note in both.notes)
    assert lacking(both, NODE, RUNS, NEAR) == ()


def test_what_there_is_no_room_for_now_is_lacking_still() -> None:
    exact = measured_for(EXACT)[0]
    taken = StepTimedMachine(refuses_to_open=lambda *_: InfeasibleError("promised to others meanwhile"))
    assert profiled(taken, plan_options=NEAR, known=exact) == exact
    assert [entry[0] for entry in taken.log] == ["open"]


def test_every_format_and_degree_that_is_left_out_for_a_wish_is_recorded() -> None:
    exact = measured_for(options_of(IntentKind.MIN_MEMORY, quality=Quality.EXACT))[0]
    measured = {(p.tp, p.pp, p.weights) for p in exact.timing}
    skipped = {(c.tp, c.pp, c.weights) for c in exact.skipped}
    assert measured | skipped == {(tp, pp, w) for tp, pp in ((1, 1), (2, 1), (1, 2)) for w in (BITS16, FP8)}
    assert not measured & skipped
    assert profiled(StepTimedMachine()).skipped == ()
    assert from_json(to_json(exact), Profile) == exact


def of_kinds(*windows: int | None) -> ModelSource:
    return replace(SOURCE, spec=replace(SOURCE.spec, layer_windows=windows))


def test_layers_of_several_kinds_are_measured_in_their_pattern() -> None:
    """A sliding and a full layer by turns, 16 times: two of each, and one."""
    source = of_kinds(*(128, None) * 16)
    machine = StepTimedMachine(spec=source.spec)
    profile = profiled(machine, source=source, quality=Quality.EXACT)
    assert [note for note in profile.notes if "quality" not in note] == []
    assert {(e[1].layers, e[1].pp) for e in machine.log if e[0] == "load"} == {(4, 1), (2, 1), (8, 2), (4, 2)}  # type: ignore[attr-defined]
    workload = Workload(4, 512, 33)
    found = estimator_of(profile).estimate(DeploymentConfig(engine="vllm"), workload)
    assert found.ttft_s.source is Source.EXTRAPOLATED
    assert found.ttft_s.value == pytest.approx(machine.ttft_s(4, 512), rel=0.01)  # of points apart: smoothed
    assert found.tpot_s.value == pytest.approx(machine.tpot_s(4, 512, 33), rel=0.01)


def test_the_room_a_profile_needs_is_that_of_its_deepest_cut() -> None:
    """12 layers of KV cache where the pattern is six layers long, two where all are alike."""
    source = of_kinds(*((128,) * 5 + (None,)) * 5, 128, 128)
    machine = StepTimedMachine(spec=source.spec)
    profile = profiled(machine, source=source, batch=256, quality=Quality.EXACT, node=with_free(6, 6))
    alike = profiled(StepTimedMachine(), batch=256, quality=Quality.EXACT, node=with_free(6, 6))
    assert points(profile) < points(alike)


def test_layers_in_no_order_that_repeats_are_refused_before_anything_is_launched(golden: Golden) -> None:
    machine = StepTimedMachine()
    with pytest.raises(UnsupportedModelError) as refused:
        profiled(machine, source=of_kinds(*(None,) * 9, *(512,) * 23))
    golden("controller", str(refused.value))
    assert machine.log == []


def test_more_requests_than_fit_a_step_are_refused_before_anything_is_launched(golden: Golden) -> None:
    """vLLM ends at its start on them, with a sentence about options of its own."""
    machine = StepTimedMachine()
    with golden.raises("controller", ConfigError):
        profiled(machine, batch=STEP_TOKENS + 1)
    assert machine.log == []


def test_fingerprints_of_layers_of_several_kinds_hold_those_that_were_asked_for(tmp_path: Path) -> None:
    config = {"model_type": "gemma3_text", "hidden_size": 64, "num_hidden_layers": 12, "num_attention_heads": 4}
    config |= {"intermediate_size": 96, "vocab_size": 128, "sliding_window": 512, "head_dim": 16}
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = ModelSource("gemma", tmp_path, False, load_spec(tmp_path))
    fingerprints = Fingerprints(source, tmp_path / "cuts", weights=True)
    assert load_spec(fingerprints((0, 1, 5))).windows == (512, 512, None)
    assert load_spec(fingerprints((0, 1))).windows == (512, 512)
    assert fingerprints((0, 1)) == fingerprints(2)
