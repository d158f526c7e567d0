"""Shares of places that routes name: of adapters where workers count so, whole places of all else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from daemon.engines.registry import get_engine
from daemon.worker_spec import WorkerSpec
from fingerprint.codec import to_json
from fingerprint.config import DeploymentConfig, SlotFormat
from iserve.controller.variant_serving import VariantServer, routes_by_server, variant_servers
from iserve.state.store import DeploymentRow, VariantRow
from tests.daemon.engines.standin import make_vllm
from tests.daemon.engines.vllm_worker_spec import worker

ROW = VariantRow(
    name="small",
    base="org/base",
    base_directory="/base",
    content_hash="ab" * 32,
    max_rank=8,
    num_modules=2,
    num_bytes=1000,
    disk_bytes=1000,
    trained_on=None,
    pinned=False,
    created_at=1.0,
)


def deployment(*workers: WorkerSpec) -> DeploymentRow:
    return DeploymentRow(
        id=1,
        name="d",
        created_at=1.0,
        request="{}",
        desired="running",
        phase="ready",
        error=None,
        plan=None,
        workers=to_json(workers).decode(),
    )


@pytest.mark.parametrize(("version", "shares"), [("0.33.0", True), ("0.28.0", False), (None, False)])
def test_workers_with_our_plug_in_share_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str | None, *, shares: bool
) -> None:
    python = make_vllm(tmp_path / "env", version) if version else tmp_path / "none"
    monkeypatch.setenv("ISERVE_VLLM_PYTHON", str(python))
    engine = get_engine("vllm")
    assert engine.shares_places(worker(tmp_path, adapter_slots=4, adapter_rank=64)) == shares
    assert not engine.shares_places(worker(tmp_path))


@pytest.mark.parametrize("shares", [True, False])
def test_shares_are_those_of_the_release_that_a_worker_was_started_with(tmp_path: Path, *, shares: bool) -> None:
    """Leave one that was started before places were shared as it is."""
    spec = replace(worker(tmp_path, adapter_slots=4, adapter_rank=64), shares_places=shares)
    (server,) = variant_servers([deployment(spec)])
    for rank, shared in ((8, 1 / 8), (33, 33 / 64), (64, 1.0)):
        row = replace(ROW, max_rank=rank, base_directory=str(tmp_path.resolve()))
        (found,) = routes_by_server([row], [server], [ROW.content_hash])["d"]
        assert found.place_share == (shared if shares else 1.0)
    assert variant_servers([deployment(spec, replace(spec, shares_places=False))])[0].shares_places is False


def test_the_embedded_engine_has_a_place_for_each(tmp_path: Path) -> None:
    spec = worker(tmp_path, adapter_slots=4, adapter_rank=64)
    own = replace(spec, config=DeploymentConfig(engine="torch", adapter_slots=4, adapter_rank=64))
    assert not get_engine("torch").shares_places(own)
    (server,) = variant_servers([deployment(own)])
    assert server.place_share(ROW) == 1.0


def test_deltas_and_what_shares_their_slots_take_whole_places(tmp_path: Path) -> None:
    config = DeploymentConfig(engine="vllm", adapter_slots=4, adapter_rank=64)
    server = VariantServer(deployment="d", base_directory="/base", config=config, shares_places=True)
    assert server.place_share(ROW) == 1 / 8
    assert server.place_share(replace(ROW, max_rank=0)) == 1.0
    assert replace(config, delta_format=SlotFormat.INT2).place_share(8) == 1.0
