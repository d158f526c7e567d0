"""Profiles by the wall clock of an engine that starts anew with each load: an unknown release of vLLM.

The engine is the synthetic machine, which takes minutes of its own clock to start, with the table of vLLM.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from daemon.engines.vllm.capabilities import TABLE
from daemon.status import DeviceStatus, NodeStatus
from fingerprint.config import DeploymentConfig, WeightFormat, Workload
from fingerprint.errors import ConfigError
from fingerprint.estimates import Source
from fingerprint.gpus import gpu_spec
from fingerprint.measurements import MachineInfo, Profile
from fingerprint.profile import profile as driven
from fingerprint.profile_plan import Shards
from iserve.controller import profiling_run
from iserve.controller.profiling_devices import STEP_TOKENS
from iserve.controller.profiling_run import Order, take
from iserve.controller.profiling_validity import covers, has_todays_graphs, why_unused
from iserve.model_source import ModelSource
from iserve.planning.estimator_factory import estimator_for, step_tokens_of
from planner.intent import Quality
from tests.fingerprint.synthetic_machine import SyntheticMachine, SyntheticSession
from tests.golden_words import Golden

GIB = 2**30
UNKNOWN = replace(TABLE.unprepared(), step_timed=False)
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
STARTS_S = 60.0


class Machine(SyntheticMachine):
    """The synthetic machine as a GPU whose engine takes a minute to launch and another one for each load."""

    def machine(self) -> MachineInfo:
        return replace(super().machine(), device=gpu_spec("h200"))


def machine(**changes: Any) -> Machine:
    return Machine(engine="vllm", launch_s=STARTS_S, load_s=STARTS_S, close_s=STARTS_S / 3, **changes)


def taken(
    on: Machine, monkeypatch: pytest.MonkeyPatch, *, workload: Workload, max_seconds: float = 60.0
) -> Profile:
    """Take a profile of the default budget, on the machine's own clock."""
    monkeypatch.setattr(profiling_run, "profile", partial(driven, clock=on.clock))
    order = Order(
        source=ModelSource(name="m", directory=Path("/m"), has_weights=True, spec=on.spec),
        table=UNKNOWN,
        node=NODE,
        workload=workload,
        plan_options=None,
        quality=Quality.NEAR,
        shards=Shards.AUTO,
        max_seconds=max_seconds,
        progress=lambda _: None,
    )
    target: Any = on
    fingerprints: Any = on.fingerprint
    return take(order, target, fingerprints)


WORK = Workload(batch=4, input_tokens=512, output_tokens=128)


def test_the_default_budget_holds_every_format_and_degree_whatever_starts_take(monkeypatch) -> None:
    on = machine()
    found = taken(on, monkeypatch, workload=WORK)
    measured = {(p.tp, p.pp, p.weights) for p in found.timing}
    assert measured == {
        (tp, pp, w) for tp, pp in ((1, 1), (2, 1), (1, 2)) for w in (WeightFormat.BITS16, WeightFormat.FP8)
    }
    assert found.unreached == ()
    assert found.notes == ()
    assert found.spent_s <= found.budget_s == 60.0
    loads = Counter(entry[1:] for entry in on.log if entry[0] == "load")
    assert set(loads.values()) == {1}, "a fingerprint is started once"
    assert on.clock() > 12 * STARTS_S


def test_what_the_budget_cuts_is_told(monkeypatch, golden: Golden) -> None:
    slow = machine(run_cost=20.0)
    found = taken(slow, monkeypatch, workload=WORK)
    assert not found.complete
    assert found.unreached
    golden("controller", found.notes)
    assert estimator_for(found).estimate(DeploymentConfig(engine="vllm"), WORK).tpot_s.value > 0
    overrun_s = max(run.e2e_s for point in found.timing for run in point.runs) * 20
    assert found.spent_s <= found.budget_s + overrun_s


@pytest.mark.parametrize("batch", [1, 4, 64])
def test_the_engine_is_started_as_large_as_the_deployment_will_be(batch: int, monkeypatch, golden: Golden) -> None:
    workload = replace(WORK, batch=batch, input_tokens=2048)
    found = taken(machine(), monkeypatch, workload=workload)
    assert {point.max_batched_tokens for point in found.memory} == {STEP_TOKENS} == {step_tokens_of(found)}
    started_for = {point.max_batch for point in found.memory}
    assert min(started_for) >= batch
    assert covers(found, batch)
    assert not covers(found, max(started_for) + 1)
    why = why_unused(found, NODE, found.machine.versions, 65)
    assert f" {max(started_for)} requests" in why
    golden("controller", why)


def test_a_profile_with_other_graphs_than_a_deployment_has_is_not_used(monkeypatch, golden: Golden) -> None:
    found = taken(machine(), monkeypatch, workload=WORK)
    assert has_todays_graphs(found)
    earlier = replace(found, spec=replace(found.spec, num_experts=8, experts_per_token=2))
    assert not has_todays_graphs(earlier)
    assert has_todays_graphs(replace(earlier, graph_tokens=4096))
    golden("controller", why_unused(earlier, NODE, found.machine.versions, 1))
    on = machine()
    on.spec = earlier.spec
    assert has_todays_graphs(taken(on, monkeypatch, workload=WORK))


def test_an_earlier_profile_covers_what_its_engine_was_started_for(monkeypatch) -> None:
    """Points of earlier profiles say only how many sequences shared the KV cache."""
    found = taken(machine(), monkeypatch, workload=WORK)
    earlier = replace(found, memory=tuple(replace(point, max_batch=0, kv_sequences=4) for point in found.memory))
    assert [covers(earlier, batch) for batch in (1, 4, 5)] == [True, True, False]
    extrapolated = replace(earlier, engine="torch")
    assert covers(extrapolated, 256)


class Captures(SyntheticSession):
    """An engine that captures graphs, and whose activations are those of the step that it is started for."""

    def memory(self):
        return tuple(replace(rank, graph_bytes=GIB, activation_peak_bytes=2 * GIB) for rank in super().memory())


class Capturing(Machine):
    def open(self, *, tp: int, pp: int, expert_parallel: bool = False) -> SyntheticSession:
        super().open(tp=tp, pp=pp)
        self.sessions[-1] = Captures(self, tp, pp)
        return self.sessions[-1]


def test_memory_is_what_the_engine_counted_for_the_step_it_is_started_for(monkeypatch) -> None:
    found = taken(Capturing(engine="vllm", load_s=STARTS_S), monkeypatch, workload=WORK)
    estimator = estimator_for(found)
    for config in (DeploymentConfig(engine="vllm"), DeploymentConfig(engine="vllm", tp=2)):
        memory = estimator.estimate(config, Workload(1, 128, 16)).memory
        assert memory.source is Source.EXTRAPOLATED
        assert memory.activation_bytes >= 2 * GIB
        assert memory.runtime_bytes > GIB
    unloaded = DeploymentConfig(engine="vllm", tp=4, weights=WeightFormat.INT8)
    assert estimator.estimate(unloaded, WORK).memory.source is Source.SCALED


def test_more_requests_than_fit_a_step_are_no_wall_clock_profile(monkeypatch, golden: Golden) -> None:
    on = machine()
    with golden.raises("controller", ConfigError):
        taken(on, monkeypatch, workload=replace(WORK, batch=STEP_TOKENS + 1))
    assert on.log == []
