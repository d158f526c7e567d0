"""A launch reserves the caches that the engine itself specified at profiling, as the estimate of it does."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from daemon.devices import Device
from daemon.engines.registry import capabilities_for
from daemon.engines.vllm import launch
from daemon.worker_spec import WorkerSpec
from fingerprint.cache_blocks import CacheRoom, cache_bytes
from fingerprint.codec import from_json, to_json
from fingerprint.config import Workload
from fingerprint.engine_caches import with_engine_caches
from fingerprint.measurements import Profile
from iserve.model_source import resolve
from iserve.planning.deployability import deployable_now
from iserve.planning.deployment_choice import planned_deployment
from iserve.planning.estimator_factory import estimator_for
from iserve.planning.pipeline import PlanOptions, hypothetical_hardware
from iserve.planning.worker_launch import PlannedDeployment
from tests.bench.test_family_runs import runs
from tests.fingerprint.test_engine_caches import profile_of, with_caches

STATES, ALIKE = "granite-4.0-h-small", "MiniMax-M2.7"
OPTIONS = PlanOptions(workload=Workload(batch=8, input_tokens=512, output_tokens=128), policy="hybrid")


def planned(folder: Path, profile: Profile) -> tuple[PlannedDeployment, WorkerSpec]:
    """Return the plan by ``profile`` for eight of its GPUs, and its worker as a daemon reads it."""
    (folder / "config.json").write_text(runs()[profile.model].config)
    source = resolve(str(folder), need_weights=False)
    hardware = hypothetical_hardware(profile.machine.device, 8)
    devices = tuple(
        Device(device_id=gpu.device_id, index=gpu.gpu_index, kind="cuda", name="H200", total_bytes=gpu.total_bytes)
        for gpu in hardware.snapshot.gpus
    )
    (table,) = capabilities_for("vllm")
    found = planned_deployment(
        source,
        hardware,
        estimator_for(profile),
        replace(table, unavailable=None),
        OPTIONS,
        devices=devices,
        deployable_of=lambda *_: deployable_now(has_weights=False),
        profile=profile,
    )
    (worker,) = found.workers("m", source, "m-1", OPTIONS.workload, profile)
    return found, from_json(to_json(replace(worker, dummy_weights=True)), WorkerSpec, what="the worker")


def reserved_bytes(found: PlannedDeployment, worker: WorkerSpec) -> int:
    words = launch.arguments(worker, launch.read_model(worker), {d.device_id: d for d in found.devices})
    (given,) = (word.partition("=")[2] for word in words if word.startswith("--kv-cache-memory-bytes="))
    return int(given)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes"), [(STATES, {"state_bytes": 80_000_000}), (ALIKE, {"token_bytes": 8192.0})]
)
def test_a_launch_reserves_what_the_engine_specified(name, changes, tmp_path: Path) -> None:
    profile = profile_of(name)
    differing = replace(profile, memory=tuple(with_caches(point, **changes) for point in profile.memory))
    kept = with_engine_caches(profile.spec, differing.memory)
    assert kept != profile.spec
    found, worker = planned(tmp_path, differing)
    room = CacheRoom(
        sequences=worker.limits.max_batch,
        kv_tokens=worker.limits.kv_tokens,
        step_tokens=launch.step_tokens(worker.limits),
    )
    stages = [stage.num_layers for stage in worker.stages]
    given = reserved_bytes(found, worker)
    assert given == cache_bytes(kept, worker.config, stages, room)
    assert given > cache_bytes(profile.spec, worker.config, stages, room)
    shown = found.document.capacity.cache_sizes
    assert (
        shown.kv_bytes_per_token,
        shown.state_bytes_per_request,
    ) != kept_by_config(tmp_path, profile)


def kept_by_config(folder: Path, profile: Profile) -> tuple[int, int]:
    found, worker = planned(folder, profile)
    assert worker.layer_caches == ()  # so that the worker of a profile without differences stays as it was
    kept = found.document.capacity.cache_sizes
    return kept.kv_bytes_per_token, kept.state_bytes_per_request


@pytest.mark.slow
def test_a_launch_keeps_the_largest_graph_of_its_mixture(tmp_path: Path) -> None:
    """A check of this worker is of these graphs, whatever a later release of iServe launches."""
    profile = profile_of(STATES)
    _, worker = planned(tmp_path, profile)
    assert worker.limits.graph_tokens == 4096
    before = json.loads(to_json(worker))
    del before["limits"]["graph_tokens"]
    assert from_json(json.dumps(before), WorkerSpec, what="the worker").limits.graph_tokens == 512
