"""Expert parallelism in profiles that are asked for it, and in the plans of those that have it alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from daemon.engines.registry import capabilities_for
from fingerprint.codec import from_json, to_json
from fingerprint.config import DeploymentConfig, Workload
from fingerprint.errors import ConfigError, EngineError, TooLittleTimeError
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.gpus import gpu_spec
from fingerprint.measurements import Profile
from fingerprint.profile_checks import routing_caveat
from fingerprint.profile_plan import Shards
from iserve.cli.profile_text import print_profile
from iserve.cli.render import print_plan
from iserve.controller.profiling_scope import refuse_without_experts
from iserve.controller.snapshot import hardware_of
from iserve.planning.estimator_factory import estimator_for
from iserve.planning.pipeline import PlanOptions, make_plan
from iserve.planning.plan_document import plan_document
from iserve.planning.words import differences, short, spoken
from iserve.report.text import label
from planner.intent import Intent, IntentKind, Quality
from planner.plan import Plan
from planner.space import shape_refusal
from tests.fingerprint.mixture_machine import CONFIG, MixtureMachine, mixture
from tests.fingerprint.step_timed_machine import llama_7b
from tests.fingerprint.test_shards import RankMachine
from tests.golden_words import Golden
from tests.iserve.command_line import Done, iserve
from tests.iserve.test_profiling_run import (
    NODE,
    RUNS,
    SOURCE,
    _nothing_known_of_other_models,  # noqa: F401
    profiled,
    with_free,
)

__all__ = ["iserve"]  # a fixture
MIXTURE = replace(SOURCE, spec=mixture())
TP2 = DeploymentConfig(tp=2, engine="vllm")
EP2 = replace(TP2, expert_parallel=True)
FASTEST = PlanOptions(
    intent=Intent(kind=IntentKind.MIN_LATENCY, quality=Quality.EXACT), workload=Workload(4, 512, 128)
)


@cache
def taken(experts_time: float = 0.7, *, expert_parallel: bool = True) -> Profile:
    """Return a profile of the mixture, whose layers take so many times as long with it."""
    machine = MixtureMachine(experts_time=experts_time)
    return profiled(machine, quality=Quality.EXACT, source=MIXTURE, expert_parallel=expert_parallel)


def plan_of(profile: Profile, options: PlanOptions = FASTEST) -> Plan:
    hardware = hardware_of(NODE, profile.machine.device)
    return make_plan(profile.spec, hardware, estimator_for(profile), [RUNS], options)


def with_experts(plan: Plan) -> set[DeploymentConfig]:
    return {one.config for one in plan.candidates if one.config.expert_parallel}


class TestProfiles:
    def test_where_it_is_asked_for_it_is_measured_after_the_rest(self) -> None:
        profile, without = taken(), taken(expert_parallel=False)
        rest = tuple(point for point in profile.timing if not point.expert_parallel)
        assert rest == without.timing
        assert profile.timing[: len(rest)] == rest
        found = {point.key.config("vllm") for point in profile.timing if point.expert_parallel}
        assert found == {EP2}
        assert {point.key for point in profile.memory} == {point.key for point in profile.timing}

    def test_each_format_that_is_measured_at_two_gpus_is_measured_so(self) -> None:
        machine = MixtureMachine()
        profile = profiled(machine, quality=Quality.NEAR, source=MIXTURE, expert_parallel=True)
        formats = {
            kind: {p.weights for p in profile.timing if p.tp == 2 and p.expert_parallel is kind}
            for kind in (False, True)
        }
        assert len(formats[True]) == 2
        assert formats[True] == formats[False]

    @pytest.mark.parametrize("shards", [Shards.NEVER, Shards.AUTO])
    def test_without_two_free_gpus_the_rest_is_measured_and_it_says_so(
        self, shards: Shards, golden: Golden
    ) -> None:
        """A rank alone tells of divided matrices, and of nothing else."""
        profile = profiled(
            RankMachine(spec=MIXTURE.spec),
            quality=Quality.EXACT,
            source=MIXTURE,
            node=with_free(139, 1),
            shards=shards,
            expert_parallel=True,
        )
        assert any(point.shard for point in profile.timing) is (shards is Shards.AUTO)
        assert not any(point.expert_parallel for point in profile.timing)
        golden("controller", profile.notes[-1])

    def test_what_fails_leaves_the_rest(self, golden: Golden) -> None:
        machine = MixtureMachine()

        def refuses(tp: int, pp: int) -> EngineError | None:
            opened = [entry for entry in machine.log if entry[0] == "open"]
            return EngineError("no kernel for these experts") if "experts" in opened[-1] else None

        machine.refuses_to_open = refuses
        profile = profiled(machine, quality=Quality.EXACT, source=MIXTURE, expert_parallel=True)
        assert profile.timing == taken(expert_parallel=False).timing
        golden("controller", profile.notes)
        assert with_experts(plan_of(profile)) == set()

    @pytest.mark.parametrize(
        ("spec", "engine", "num_gpus"),
        [
            pytest.param(llama_7b(), "vllm", 2, id="dense"),
            pytest.param(mixture(7), "vllm", 2, id="seven-experts"),
            pytest.param(mixture(), "vllm", 1, id="one-gpu"),
            pytest.param(mixture(), "torch", 2, id="embedded"),
            pytest.param(mixture(), "tensorrt-llm", 2, id="tensorrt-llm"),
        ],
    )
    def test_where_there_is_none_it_is_refused_at_once(
        self, spec: Any, engine: str, num_gpus: int, golden: Golden
    ) -> None:
        (table,) = capabilities_for(engine)
        with pytest.raises(ConfigError) as refused:
            refuse_without_experts(spec, table, gpu_spec("h200"), num_gpus=num_gpus)
        golden("controller", str(refused.value))

    def test_an_order_that_cannot_be_measured_starts_no_engine(self) -> None:
        machine = MixtureMachine(spec=llama_7b())
        with pytest.raises(ConfigError):
            profiled(machine, expert_parallel=True)
        assert not [entry for entry in machine.log if entry[0] == "load"]

    def test_the_terminal_names_it(self, capsys: pytest.CaptureFixture[str]) -> None:
        print_profile(taken(), estimator_for(taken()), FASTEST.workload)
        shown = [line for line in capsys.readouterr().out.splitlines() if "experts=parallel" in line]
        assert len(shown) == 1
        print_profile(taken(expert_parallel=False), estimator_for(taken(expert_parallel=False)), FASTEST.workload)
        assert "expert" not in capsys.readouterr().out

    def test_too_little_time_is_not_called_a_lack_of_gpus(self) -> None:
        machine = MixtureMachine()

        def refuses(tp: int, pp: int) -> Exception | None:
            last = [event for event in machine.log if event[0] == "open"][-1]
            return TooLittleTimeError("90 s end before one point") if "experts" in last else None

        machine.refuses_to_open = refuses
        found = profiled(machine, quality=Quality.EXACT, source=MIXTURE, expert_parallel=True)
        assert any("too little time" in note for note in found.notes)
        assert not any("free GPUs" in note for note in found.notes)

    def test_times_that_the_gpu_cannot_keep_are_those_of_its_peaks(self) -> None:
        profile, work = taken(0.3), Workload(256, 4000, 16)
        by_peaks = RooflineEstimator(profile.spec, profile.machine.device).estimate(TP2, work)
        found = estimator_for(profile).estimate(EP2, work)
        assert (found.ttft_s.value, found.tpot_s.value) == (by_peaks.ttft_s.value, by_peaks.tpot_s.value)
        assert found.measured_config is None


class TestPlans:
    def test_it_is_in_the_space_where_it_was_measured_alone(self) -> None:
        assert with_experts(plan_of(taken())) == {EP2}
        assert with_experts(plan_of(taken(expert_parallel=False))) == set()

    def test_the_rest_of_a_plan_is_as_without_it(self) -> None:
        found, without = ({one.config: one.estimate for one in plan_of(one).candidates} for one in
                          (taken(), taken(expert_parallel=False)))  # fmt: skip
        del found[EP2]
        assert found == without

    @pytest.mark.parametrize(("experts_time", "chosen"), [(0.7, EP2), (1.4, TP2)])
    def test_it_is_chosen_where_it_is_faster(self, experts_time: float, chosen: DeploymentConfig) -> None:
        assert plan_of(taken(experts_time)).candidates[0].config == chosen

    def test_datasheets_offer_none(self) -> None:
        gpu = gpu_spec("h200")
        hardware = hardware_of(NODE, gpu)
        plan = make_plan(mixture(), hardware, RooflineEstimator(mixture(), gpu), [RUNS], FASTEST)
        assert any(one.config.tp == 2 for one in plan.candidates)
        assert with_experts(plan) == set()

    def test_deployments_with_adapter_slots_have_none(self) -> None:
        traffic = replace(FASTEST.intent.traffic, variants=4, variant_rank=16)
        options = replace(FASTEST, intent=replace(FASTEST.intent, traffic=traffic))
        plan = plan_of(taken(), options)
        assert any(one.config.adapter_slots for one in plan.candidates)
        assert with_experts(plan) == set()

    def test_a_table_has_a_column_where_one_has_it(self, capsys: pytest.CaptureFixture[str]) -> None:
        for profile, shown in ((taken(), True), (taken(expert_parallel=False), False)):
            document = plan_document(plan_of(profile), model="m", hardware="2 x h200", workload=FASTEST.workload)
            print_plan(document, rows=50)
            head = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("#"))
            assert ("experts" in head) is shown

    def test_every_way_to_name_a_configuration_names_it(self, golden: Golden) -> None:
        golden(
            "planning",
            (
                short(EP2),
                differences(EP2, TP2),
                differences(TP2, EP2),
                spoken("Mixtral", EP2, gpu="h200", num_gpus=2),
                label(EP2).replace("\u00a0", " "),
            ),
        )
        for words in (short, label):
            assert "expert" not in words(TP2)


@pytest.mark.parametrize(("num_experts", "tp"), [(8, 2), (7, 2), (12, 8), (0, 2)])
def test_experts_are_divided_evenly_or_not_at_all(num_experts: int, tp: int, golden: Golden) -> None:
    """vLLM 0.33 gives some GPUs one expert more, which no estimate counts."""
    spec = mixture(num_experts) if num_experts else llama_7b()
    found = shape_refusal(spec, replace(EP2, tp=tp), 8)
    assert (found is None) is (num_experts == 8)
    golden("planning", str(found))
    assert shape_refusal(spec, replace(TP2, tp=tp), 8) is None


@pytest.mark.parametrize("chosen", [EP2, TP2], ids=["experts=parallel", "experts=tensor"])
def test_an_estimate_from_a_profile_is_that_of_its_estimator(
    iserve: Callable[..., Done], tmp_path: Path, chosen: DeploymentConfig
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "profile.json").write_bytes(to_json(taken()))
    words = ("--gpu", "h200", "--config", f"tp=2,experts={'parallel' if chosen.expert_parallel else 'tensor'}")
    words = ("estimate", tmp_path, *words, "--batch", 4, "--profile", tmp_path / "profile.json")
    document = json.loads(iserve(*words, "--json").out)
    expected = estimator_for(taken()).estimate(chosen, FASTEST.workload)
    found = document["estimate"]
    assert found["tpot_s"]["value"] == pytest.approx(expected.tpot_s.value)
    assert found["tpot_s"]["source"] == str(expected.tpot_s.source) != "roofline"
    assert from_json(to_json(found["measured_config"]), DeploymentConfig) == chosen
    assert document["runnable"]
    assert document["notes"] == [routing_caveat(taken())]
    assert document["notes"][0] in " ".join(iserve(*words).out.split())


def test_an_estimate_without_what_says_it_is_refused(
    iserve: Callable[..., Done], tmp_path: Path, golden: Golden
) -> None:
    """Refuse with no profile, one without it, of another model, another device or another engine."""
    profile, model = tmp_path / "profile.json", tmp_path / "mix"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))

    def refusal(*words: object, of: Profile | None = None) -> None:
        profile.write_bytes(to_json(taken() if of is None else of))
        done = iserve("estimate", model, "--config", "tp=2,experts=parallel", *words)
        assert done.code == 1
        golden("planning", done.err.strip(), " ".join(map(str, words)).replace(str(profile), "FILE"))

    refusal("--gpu", "h200", "--engine", "vllm")
    refusal("--gpu", "h200", "--profile", profile, of=taken(expert_parallel=False))
    refusal("--gpu", "a6000", "--profile", profile)
    refusal("--gpu", "h200", "--engine", "torch", "--profile", profile)
    (model / "config.json").write_text(json.dumps(CONFIG | {"num_local_experts": 4}))
    refusal("--gpu", "h200", "--batch", "4", "--profile", profile)
