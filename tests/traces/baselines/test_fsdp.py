"""FSDP with offload: transfers worked out by hand, the overlap against a schedule, what is offloaded and where."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fingerprint.config import Workload
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.gpu_spec import GpuSpec
from fingerprint.gpus import gpu_spec
from placement.types import ClusterSnapshot
from tests.fingerprint.step_timed_machine import llama_7b
from tests.golden_words import Golden
from tests.traces.baselines.small_models import batched, bytes_on, cluster, known
from traces.baselines.fsdp import FsdpDeployer, FsdpEstimator, Sharding, pass_s, sharded_bytes, transfer_s
from traces.baselines.model_info import Knowledge, without
from traces.simulator.scenario import Deployed, NotDeployed

A6000 = gpu_spec("a6000")
GIB = 2**30
SPEC = llama_7b()
LAYER_BYTES = 2 * SPEC.num_params / 32  # with its part of embedding and head


def real(name: str = "m", *, layers: int = 32, batch: int = 1) -> Knowledge:
    spec = llama_7b(layers)
    return replace(
        known(name),
        spec=spec,
        estimator=RooflineEstimator(spec, A6000),
        workload=Workload(batch=batch, input_tokens=512, output_tokens=128),
    )


def gpus(count: int, gib: float = 48) -> ClusterSnapshot:
    return cluster(count, size_bytes=int(gib * GIB))


@pytest.mark.parametrize(
    ("num_gpus", "on_host", "expected_s"),
    [
        pytest.param(1, 0, 0.0, id="one GPU has all it needs"),
        pytest.param(2, 0, LAYER_BYTES / 2 / 56.25e9, id="half a layer over the bridge"),
        pytest.param(4, 0, LAYER_BYTES * 3 / 4 / 32e9, id="three quarters over PCIe"),
        pytest.param(1, 32, LAYER_BYTES / 32e9, id="all from the host"),
        pytest.param(2, 32, LAYER_BYTES / 2 / 32e9, id="the slower of bridge and PCIe"),
        pytest.param(4, 16, LAYER_BYTES * (3 / 4 + 1 / 8) / 32e9, id="both over PCIe add up"),
    ],
)
def test_transfers(num_gpus: int, on_host: int, expected_s: float) -> None:
    """The A6000's bridge: 56.25 GB/s between two; PCIe: 32 GB/s."""
    assert transfer_s(SPEC, A6000, Sharding(num_gpus, on_host)) == pytest.approx(expected_s)


@given(st.integers(1, 12), st.floats(0, 10), st.floats(0.01, 10))
def test_a_pass_takes_as_long_as_its_schedule(layers: int, gather_s: float, compute_s: float) -> None:
    """Layer i is computed once it is gathered and i - 1 is computed; i + 1 is gathered while i is computed."""
    gathered = begun = computed = 0.0
    for _ in range(layers):
        gathered = max(gathered, begun) + gather_s
        begun = max(gathered, computed)
        computed = begun + compute_s / layers
    assert pass_s(layers, gather_s, compute_s) == pytest.approx(computed)


def test_times_are_one_gpus_with_the_transfers_that_it_cannot_hide() -> None:
    model = real(batch=8)
    config = model.configs[0]
    alone = model.estimator.estimate(config, replace(model.workload, batch=2))
    sharding = Sharding(4)
    seen = FsdpEstimator(model.estimator, SPEC, A6000, sharding).estimate(config, model.workload)
    gather_s = transfer_s(SPEC, A6000, sharding)
    assert seen.workload.batch == 8
    # A decode step of two sequences hides nothing of consequence: the gathers of all layers are what it takes.
    assert seen.tpot_s.value == pytest.approx(32 * gather_s + alone.tpot_s.value / 32)
    assert FsdpEstimator(model.estimator, SPEC, A6000, Sharding(1)).estimate(
        config, replace(model.workload, batch=2)
    ).ttft_s.value == pytest.approx(alone.ttft_s.value)


def test_a_long_prompt_hides_the_transfers() -> None:
    model = real()
    workload = Workload(batch=1, input_tokens=3000, output_tokens=2)
    config = model.configs[0]
    alone = model.estimator.estimate(config, workload)
    wide_link = replace(A6000, link_group_size=8, link_bytes_per_s=450e9)
    seen = FsdpEstimator(model.estimator, SPEC, wide_link, Sharding(8)).estimate(config, workload)
    assert seen.ttft_s.value == pytest.approx(alone.ttft_s.value, rel=0.05)


def deploy(model: Knowledge, on: ClusterSnapshot, gpu: GpuSpec = A6000, **options: bool) -> Deployed:
    decided = FsdpDeployer(gpu, [model], {model.name: model.workload.batch}, **options)(model.name, on)
    assert isinstance(decided, Deployed), decided
    return decided


def test_a_model_that_fits_one_gpu_is_not_sharded_unless_told_to(golden: Golden) -> None:
    golden("traces", deploy(real(), gpus(8)).what)
    wide = deploy(real(), gpus(8), whole_node=True)
    golden("traces", wide.what)
    assert len(wide.placement.device_ids) == 8


def test_what_does_not_fit_is_sharded_before_it_is_offloaded(golden: Golden) -> None:
    big = real(layers=320)  # 130 GB: four of 48 GiB hold it
    linked = replace(A6000, link_group_size=8, link_bytes_per_s=450e9)
    golden("traces", deploy(big, gpus(8), linked).what)
    golden("traces", deploy(big, gpus(2)).what)
    assert "0 of 320" not in deploy(big, gpus(2)).what


@given(st.floats(2.5, 40))
def test_as_few_layers_as_needed_go_to_the_host(gib: float) -> None:
    model, config = real(), real().configs[0]
    decided = FsdpDeployer(A6000, [model], {"m": 1})("m", gpus(1, gib))
    most = sharded_bytes(model, config, Sharding(1, 32), 1)
    if most > int(gib * GIB):
        assert isinstance(decided, NotDeployed)
        assert "all layers" in decided.reason
        return
    assert isinstance(decided, Deployed)
    on_host = int(decided.what.split(", ")[1].split()[0])
    used = bytes_on(decided.placement)["gpu0"]
    assert used == sharded_bytes(model, config, Sharding(1, on_host), 1) <= int(gib * GIB)
    if on_host:
        assert sharded_bytes(model, config, Sharding(1, on_host - 1), 1) > int(gib * GIB)


def test_offloading_costs_time() -> None:
    fast, slow = deploy(real(), gpus(1)), deploy(real(), gpus(1, 10))
    assert slow.steps.decode_s(1, 512) > 5 * fast.steps.decode_s(1, 512)


def test_the_least_loaded_neighbours_are_taken() -> None:
    first = deploy(real(), gpus(4))
    second = deploy(real(), without(gpus(4), first.placement))
    assert set(first.placement.device_ids).isdisjoint(second.placement.device_ids)
    busy = ClusterSnapshot(tuple(replace(g, load_fraction=0.9 if g.gpu_index < 3 else 0.1) for g in gpus(4).gpus))
    assert deploy(real(), busy).placement.device_ids == ("gpu3",)


@pytest.mark.parametrize(("replicas", "width"), [(2, 4), (3, 2), (8, 1)])
def test_replicas_have_gpus_of_their_own(replicas: int, width: int) -> None:
    """Links are so wide that more GPUs are always faster: the width is the largest that goes so often."""
    wide = replace(A6000, link_group_size=8, link_bytes_per_s=1e15)
    deployer = FsdpDeployer(wide, [batched(real(), 64)], {"m": 64})
    assert len(deploy(batched(real(), 64), gpus(8), wide).placement.device_ids) == 8
    decided = deployer.several("m", gpus(8), replicas)
    assert not isinstance(decided, NotDeployed), decided
    taken = [device for one in decided for device in one.placement.device_ids]
    assert (len(taken), len(set(taken))) == (replicas * width, replicas * width)
    assert isinstance(deployer.several("m", gpus(8), 9), NotDeployed)


def test_one_more_replica_goes_where_there_is_room_though_others_are_less_loaded() -> None:
    full = [replace(gpu, free_bytes=0) for gpu in gpus(4).gpus[:2]]
    loaded = [replace(gpu, load_fraction=0.9) for gpu in gpus(4).gpus[2:]]
    deployer = FsdpDeployer(A6000, [real()], {"m": 1})
    decided = deployer.another(deploy(real(), gpus(4)), "m", ClusterSnapshot((*full, *loaded)))
    assert isinstance(decided, Deployed), decided
    assert set(decided.placement.device_ids) <= {"gpu2", "gpu3"}


def test_a_batch_that_leaves_no_room_is_halved() -> None:
    model = batched(real(), 256)
    decided = deploy(model, gpus(1))
    assert decided.steps.limits.max_batch in (64, 128)


def test_what_no_engine_runs_on_one_gpu_is_refused(golden: Golden) -> None:
    model = replace(real(), configs=real().configs[1:])
    decided = FsdpDeployer(A6000, [model], {"m": 1})("m", gpus(8))
    assert isinstance(decided, NotDeployed)
    golden("traces", decided.reason)
