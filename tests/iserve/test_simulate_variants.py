"""``iserve simulate --variants``: documents, text, page, and one line for what is not simulated with variants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from daemon.engines.registry import capabilities_for
from fingerprint.config import DeploymentConfig, Workload
from fingerprint.engines import traits_of
from fingerprint.errors import ConfigError
from fingerprint.estimators.adapter_slots import added_prompt_share, added_step_s, load_s, requests_within
from fingerprint.estimators.delta_slots import added_delta_step_s, delta_prompt_s
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.gpu_spec import GpuSpec
from fingerprint.gpus import gpu_spec
from fingerprint.lora.slot_bytes import adapter_bytes, slot_bytes
from iserve.cli.simulation_variants import of_variants
from iserve.planning.pipeline import PlanOptions, with_traffic
from iserve.simulation.delta_choice import with_delta_slots
from iserve.simulation.running import (
    PlannedDeployer,
    SimulatedModel,
    adapter_cost,
    idle_cluster,
    roofline_model,
)
from planner.adapter_slots import VariantLoad
from planner.intent import Intent, IntentKind, Quality, Traffic
from tests.fingerprint.step_timed_machine import llama_7b
from tests.golden_words import Golden
from tests.iserve.test_simulate import Done, model, simulate
from traces.request import Request
from traces.simulator.scenario import Deployed, NotDeployed
from traces.simulator.step_model import tabulate
from traces.writing import write_trace

__all__ = ["model", "simulate"]  # fixtures

H200 = gpu_spec("h200")
SPEC = llama_7b()


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    write_trace(path, [Request(0.2 * i, 100 + i, 20) for i in range(60)])
    return path


def variants_of(done: Done) -> dict[str, object]:
    (deployment,) = done.document["deployments"]
    return deployment["variants"]


def with_slots(gpu: GpuSpec, options: PlanOptions) -> SimulatedModel:
    """Return a model on vLLM as the command line has it."""
    found = roofline_model("m", SPEC, gpu, options, "vllm")
    engines = tuple(table.unprepared() for table in found.engines)
    return replace(found, estimator=with_traffic(found.estimator, SPEC, options), engines=engines)


class TestDocument:
    def test_slots_loads_and_times_are_there(
        self, simulate: Callable[..., Done], trace: Path, model: Path, tmp_path: Path
    ) -> None:
        page = tmp_path / "page.html"
        given = (trace, "--gpus", "h200:1", "--models", f"chat={model}", "--startup", 0, "--variants", 12)
        done = simulate(*given, "--rank", 8, "--adapter-slots", 2, "--json", "--report", page)
        assert done.document["summary"]["completed"] == 60
        assert done.document["intent"]["traffic"]["variants"] == 12
        found = variants_of(done)
        assert (found["slots"], found["max_loaded"], found["requests"]) == (2, 8, 60)
        assert found["load_s"] == pytest.approx(load_s(adapter_bytes(SPEC, 8)))
        assert 2 < found["asked_for"] <= found["loads"]  # type: ignore[operator]
        assert found["evictions"] == found["loads"] - 8  # type: ignore[operator]
        counted = found["ttft_warm"]["count"] + found["ttft_cold"]["count"]  # type: ignore[index]
        assert counted == 60
        text = " ".join(simulate(*given, "--rank", 8, "--adapter-slots", 2).out.split())
        for word in ("evictions", "warm", "cold", f"{found['loads']} "):
            assert word in text
        assert "waiting P99" in page.read_text()

    def test_the_same_again_is_the_same_and_another_law_is_not(
        self, simulate: Callable[..., Done], trace: Path, model: Path
    ) -> None:
        given = (trace, "--gpus", "h200:1", "--models", model, "--startup", 0, "--variants", 30, "--json")
        usual, again, even, zipf = (
            variants_of(simulate(*given, "--popularity", law)) for law in ("zipf:1", "zipf:1", "uniform", "zipf:3")
        )
        assert usual == again == variants_of(simulate(*given))
        assert zipf["asked_for"] < usual["asked_for"] < even["asked_for"]  # type: ignore[operator]

    def test_names_of_the_trace_are_variants_but_for_the_deployments(
        self, simulate: Callable[..., Done], model: Path, tmp_path: Path
    ) -> None:
        path = tmp_path / "named.csv"
        names = ["chat", "mine", "yours", "chat", "mine"]
        write_trace(path, [Request(float(i), 50, 5, name) for i, name in enumerate(names)])
        found = variants_of(
            simulate(
                path, "--gpus", "h200:1", "--models", f"chat={model}", "--startup", 0, "--variants", 2, "--json"
            )
        )
        assert (found["asked_for"], found["requests"], found["loads"]) == (2, 3, 2)

    @pytest.mark.parametrize("law", [None, "zipf:1"])
    def test_a_share_of_the_requests_is_for_the_base(
        self, simulate: Callable[..., Done], model: Path, tmp_path: Path, law: str | None
    ) -> None:
        path = tmp_path / "trace.csv"
        write_trace(path, [Request(0.05 * i, 100, 5) for i in range(400)])
        given = (path, "--gpus", "h200:1", "--models", f"chat={model}", "--startup", 0, "--variants", 12)
        by_law = () if law is None else ("--popularity", law)
        done = simulate(*given, *by_law, "--base-share", 0.75, "--json")
        assert done.document["summary"]["completed"] == 400
        assert done.document["intent"]["traffic"]["base_share"] == 0.75
        assert variants_of(done)["requests"] == pytest.approx(100, abs=35)  # four standard deviations

    @pytest.mark.parametrize("policy", ["busiest-loaded", "fcfs"])
    def test_policies_on_two_replicas(
        self, simulate: Callable[..., Done], trace: Path, model: Path, policy: str
    ) -> None:
        given = ("--gpus", "h200:2", "--models", model, "--startup", 0, "--replicas", 2, "--variants", 20)
        document = simulate(trace, *given, "--variant-policy", policy, "--json").document
        assert document["summary"]["completed"] == 60

    def test_on_the_embedded_engine_the_times_are_said_to_be_unknown(
        self, simulate: Callable[..., Done], trace: Path, model: Path, golden: Golden
    ) -> None:
        given = ("--gpus", "h200:1", "--models", model, "--engine", "torch", "--batch", 4, "--variants", 5)
        done = simulate(trace, *given, "--json")
        assert variants_of(done)["load_s"] == 0.0
        golden("cli", [note for note in done.document["notes"] if "adapters" in note])

    def test_on_vllm_it_is_said_where_the_times_are_from(
        self, simulate: Callable[..., Done], trace: Path, model: Path, golden: Golden
    ) -> None:
        done = simulate(trace, "--gpus", "h200:1", "--models", model, "--variants", 5, "--json")
        golden("cli", [note for note in done.document["notes"] if "adapters" in note])

    def test_deltas_have_the_slots_that_decode_most_and_the_times_of_their_kernels(
        self, simulate: Callable[..., Done], trace: Path, model: Path, golden: Golden
    ) -> None:
        given = (trace, "--gpus", "h200:1", "--models", model, "--startup", 0, "--variants", 12, "--json")
        done = simulate(*given, "--delta-mib", 2000, "--popularity", "zipf:1.5")
        assert done.document["summary"]["completed"] == 60
        assert done.document["intent"]["traffic"]["delta_mib"] == 2000
        found = variants_of(done)
        assert found["load_s"] == pytest.approx(load_s(2000 << 20))
        assert found["slots"] in (4, 8, 16)
        golden("cli", [note for note in done.document["notes"] if "deltas" in note])
        fixed = variants_of(simulate(*given, "--delta-mib", 2000, "--adapter-slots", 3))
        assert fixed["slots"] == 3

    def test_without_variants_there_are_no_figures(
        self, simulate: Callable[..., Done], trace: Path, model: Path
    ) -> None:
        assert variants_of(simulate(trace, "--gpus", "h200:1", "--models", model, "--json")) is None


class TestRefused:
    @pytest.mark.parametrize(
        "arguments",
        [
            pytest.param(("--reject-late", "--eval-slo", "ttft=1"), id="late ones rejected"),
            pytest.param(("--planner", "max-tp"), id="a baseline"),
            pytest.param(("--service", "fcfs"), id="one at a time"),
            pytest.param(("--popularity", "geometric"), id="a law that is not planned by"),
            pytest.param(("--adapter-slots", "65"), id="too many slots"),
            pytest.param(("--rank", "300"), id="too high a rank"),
            pytest.param(("--variant-policy", "x"), id="unknown policy"),
            pytest.param(("--delta-mib", "2000", "--rank", "8"), id="deltas and a rank"),
            pytest.param(("--base-share", "1"), id="the base alone"),
        ],
    )
    def test_next_to_variants(
        self, simulate: Callable[..., Done], trace: Path, model: Path, golden: Golden, arguments: tuple[str, ...]
    ) -> None:
        done = simulate(trace, "--gpus", "h200:1", "--models", model, "--variants", 5, *arguments)
        golden("cli-errors", done.refused(code=2))

    @pytest.mark.parametrize("option", ["--rank", "--adapter-slots", "--variant-policy", "--base-share"])
    def test_without_variants(
        self, simulate: Callable[..., Done], trace: Path, model: Path, golden: Golden, option: str
    ) -> None:
        value = "fcfs" if option == "--variant-policy" else "8"
        golden("cli-errors", simulate(trace, "--gpus", "h200:1", "--models", model, option, value).refused(code=2))

    def test_of_two_models(self, simulate: Callable[..., Done], trace: Path, model: Path, golden: Golden) -> None:
        done = simulate(trace, "--gpus", "h200:1", "--models", f"a={model},b={model}", "--variants", 5)
        golden("cli-errors", done.refused(code=2))


def test_late_requests_are_rejected_by_a_forecast_that_knows_loads(
    simulate: Callable[..., Done], trace: Path, model: Path
) -> None:
    """A load takes 0.12 s: next to another request a variant that is not loaded is late for the shorter limit."""
    kept = []
    for limit in ("ttft=0.05", "ttft=60"):
        given = ("--variants", 20, "--batch", 8, "--startup", 0, "--eval-slo", limit)
        rejecting = ("--reject-late", "--forecast-late", "--json")
        found = simulate(trace, "--gpus", "h200:1", "--models", model, *given, *rejecting).document
        assert found["rejects_by_forecast"]
        kept.append({one["kind"]: one["count"] for one in found["summary"]["failures"]}.get("too late", 0))
    assert kept[0] > kept[1] == 0


class TestDrawing:
    def test_requests_without_a_name_are_drawn_and_the_rest_keeps_its_own(self) -> None:
        asked = [Request(float(i), 1, 1, "mine" if i % 3 == 0 else "") for i in range(300)]
        found = list(of_variants(iter(asked), 4, None, seed=1))
        assert [one.model for one in found[::3]] == ["mine"] * 100
        counts = Counter(one.model for one in found if one.model != "mine")
        assert set(counts) == {f"variant-{number}" for number in range(4)}
        assert counts["variant-0"] == max(counts.values())
        assert [replace(one, model="") for one in found] == [replace(one, model="") for one in asked]

    @pytest.mark.parametrize("law", [None, "zipf:1"])
    def test_requests_of_the_base_leave_the_rest_its_variants(self, law: str | None) -> None:
        asked = [Request(float(i), 1, 1, "mine" if i % 3 == 0 else "") for i in range(900)]
        without, found = (
            [one.model for one in of_variants(iter(asked), 4, law, 1, "chat", share)] for share in (0.0, 0.5)
        )
        drawn = [(was, now) for was, now in zip(without, found, strict=True) if was != "mine"]
        assert sum(now == "chat" for _, now in drawn) == pytest.approx(len(drawn) / 2, rel=0.2)
        assert all(now in (was, "chat") for was, now in zip(without, found, strict=True))
        assert law is not None or found.count("mine") == 300

    def test_a_law_draws_all(self) -> None:
        asked = [Request(float(i), 1, 1, "mine") for i in range(20)]
        assert {one.model for one in of_variants(iter(asked), 1, "uniform", seed=1)} == {"variant-0"}


class TestCosts:
    def test_what_slots_cost_prompts_of_the_base_is_left_out_and_said_so(self) -> None:
        share = added_prompt_share(8, base_share=1.0)
        text = " ".join((Path(__file__).parents[2] / "docs" / "simulation.md").read_text().split())
        assert f"{share:.1%} of its prompts' time" in text

    def test_they_are_those_of_the_estimate(self) -> None:
        config = DeploymentConfig(engine="vllm", adapter_slots=8, adapter_rank=16)
        cost = adapter_cost(config, SPEC, 12)
        assert cost is not None
        assert cost.load_s == load_s(adapter_bytes(SPEC, 12))
        assert cost.step_s(20, 3) == added_step_s(SPEC.num_layers, 20, 3, 8)
        assert cost.step_s(20, 0) == cost.step_s(0, 3) == 0.0
        assert cost.prompt_share == added_prompt_share(8)

    def test_of_deltas_they_are_those_of_the_kernels(self) -> None:
        config = DeploymentConfig(engine="vllm", adapter_slots=8, adapter_rank=16, delta_mib=2000)
        cost = adapter_cost(config, SPEC, 16)
        assert cost is not None
        assert cost.prompt_s is not None
        size = 2000 << 20
        assert cost.load_s == load_s(size)
        assert cost.step_s(20, 3) == added_delta_step_s(size, 20, 3)
        assert cost.prompt_s(700) == delta_prompt_s(size, 700)
        assert cost.prompt_share == 0.0

    def test_a_simulation_assumes_deltas_where_plans_refuse_them(self) -> None:
        (table,) = capabilities_for("vllm")
        config = DeploymentConfig(engine="vllm", adapter_slots=8, adapter_rank=16, delta_mib=2000)
        assert (table.refusal(SPEC, config, H200) is None) == traits_of("vllm").holds_deltas_by_size
        assert replace(table, assumes_deltas=True).refusal(SPEC, config, H200) is None

    @pytest.mark.parametrize(("gib", "slots"), [(141, 32), (48, 8), (9, 2), (2, 1)])
    def test_deltas_take_half_of_a_gpu_at_most(self, gib: int, slots: int) -> None:
        """32 equally popular ones of 2 GiB each, and 32 requests."""
        traffic = Traffic(variants=32, variant_skew=0.0, delta_mib=2048)
        options = PlanOptions(intent=Intent(traffic=traffic), workload=Workload(batch=32))
        gpu = replace(H200, memory_bytes=gib << 30)
        found = with_delta_slots(with_slots(gpu, options), gpu)
        assert found.options.adapter_slots == slots
        asked = replace(options, adapter_slots=5)
        assert with_delta_slots(with_slots(gpu, asked), gpu).options == asked

    def test_an_adapter_is_a_slot_of_its_rank_without_the_vocabulary(self) -> None:
        config = DeploymentConfig(engine="torch", adapter_slots=1, adapter_rank=16)
        assert adapter_bytes(SPEC, 16) == slot_bytes(SPEC, config, SPEC.num_layers)

    def test_a_worker_without_slots_has_none(self) -> None:
        assert adapter_cost(DeploymentConfig(engine="vllm"), SPEC, 16) is None

    def test_steps_are_the_bases_and_scaling_sees_those_with_adapters(self) -> None:
        options = PlanOptions(intent=Intent(traffic=Traffic(variants=20)), adapter_slots=4)
        found = PlannedDeployer(H200, [with_slots(H200, options)])("m", idle_cluster(H200, 1))
        assert isinstance(found, Deployed)
        assert found.config is not None
        assert found.adapters is not None
        assert found.mean_steps is not None
        assert found.config.adapter_slots == found.adapters.slots == 4
        plain = tabulate(RooflineEstimator(SPEC, H200), found.config.without_slots, found.steps.limits)
        assert found.steps.decode_s(1, 100.0) == plain.decode_s(1, 100.0)
        assert found.mean_steps.decode_s(1, 100.0) == pytest.approx(
            plain.decode_s(1, 100.0) + found.adapters.step_s(1, 1)
        )

    @pytest.mark.parametrize("kind", [IntentKind.MIN_COST, IntentKind.MIN_LATENCY])
    def test_forecasts_run_no_more_at_once_than_find_slots(self, kind: IntentKind) -> None:
        """Forecasts of a joint plan and of one by a batch."""
        options = PlanOptions(intent=Intent(kind=kind, traffic=Traffic(variants=20)), adapter_slots=4)
        found = PlannedDeployer(H200, [with_slots(H200, options)])("m", idle_cluster(H200, 1))
        assert isinstance(found, Deployed)
        assert found.forecast_service is not None
        within = requests_within(VariantLoad(20, options.intent.traffic.variant_skew).distinct, 4)
        assert within is not None
        assert found.forecast_service.most_at_once == pytest.approx(within)

    @pytest.mark.parametrize("slots", [-1, 65])
    def test_impossible_slots(self, slots: int) -> None:
        with pytest.raises(ConfigError, match="adapter slots"):
            PlanOptions(adapter_slots=slots)


def test_a_pipeline_is_refused_with_what_to_change(golden: Golden) -> None:
    """A model for which one GPU is too small, by an intent that cuts it between layers."""
    gpu = replace(gpu_spec("a6000"), memory_bytes=12 * 2**30)
    intent = Intent(kind=IntentKind.MIN_MEMORY, quality=Quality.EXACT, traffic=Traffic(variants=20))
    found = PlannedDeployer(gpu, [with_slots(gpu, PlanOptions(intent=intent, adapter_slots=2))])(
        "m", idle_cluster(gpu, 2)
    )
    assert isinstance(found, NotDeployed)
    golden("cli-errors", found.reason)
