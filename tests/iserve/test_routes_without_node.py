"""Routes while the node cannot be seen: keys and removals are published, workers stay as they were last seen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from daemon.process import own_record, write_record
from daemon.status import NodeStatus, WorkerState, WorkerStatus
from fingerprint.codec import from_json, to_json
from iserve.api_types import DeployBody
from iserve.controller.reconcile import ROUTES_FILE, Reconciler
from iserve.controller.service import Controller
from iserve.route_table import Demand, RouteTable
from iserve.settings import Settings
from iserve.state.store import Store
from tests.bad_input.conftest import NODE
from tests.daemon.test_worker_process import SPEC, no_file_left
from tests.waiting import PATIENCE_S

WORKER = replace(SPEC, worker_id="a-1", port=1)
READY = WorkerStatus(
    spec=WORKER,
    state=WorkerState.READY,
    url="http://127.0.0.1:2",  # it moved to another port
    pid=1,
    restarts=0,
    started_at="",
    token="its token",
)


class Home:
    """Controller with a deployment that serves; this process poses as its gateway."""

    def __init__(self, folder: Path) -> None:
        self.settings = Settings(home=folder / "home")
        self.gateway_record = self.settings.run_folder / "gateway.json"
        write_record(self.gateway_record, own_record(url="http://127.0.0.1:1", token=""))
        self.store = Store.open(self.settings.state)
        self.controller = Controller(self.settings, self.store)
        self.row = self.store.add_deployment("a", to_json(DeployBody(name="a")))
        self.store.update_deployment(self.row.id, phase="ready", workers=to_json((WORKER,)))

    def published(self, reconciler: Reconciler, node: NodeStatus | None = None) -> RouteTable:
        reconciler.publish(self.store.deployments(), node)
        return from_json((self.settings.run_folder / ROUTES_FILE).read_bytes(), RouteTable)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    home = Home(tmp_path)
    yield home
    home.controller.close()
    home.store.close()


def test_a_key_is_revoked_and_a_deployment_removed_while_the_node_cannot_be_seen(home: Home) -> None:
    kept, revoked = (home.controller.create_key("", "inference").key_id for _ in range(2))
    reconciler = Reconciler(home.controller)
    before = home.published(reconciler, replace(NODE, workers=(READY,)))
    home.store.revoke_key(revoked)
    after = home.published(reconciler)
    assert [key.key_id for key in after.keys] == [kept]
    assert after.routes == before.routes
    (target,) = after.routes[0].workers
    assert (target.ready, target.url, target.token) == (True, READY.url, READY.token)
    assert home.published(reconciler).version == after.version > before.version
    home.store.update_deployment(home.row.id, desired="removed")
    assert home.published(reconciler).routes == ()


def test_a_change_is_followed_while_the_node_cannot_be_seen(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    reconciler = Reconciler(home.controller)
    table = home.published(reconciler, replace(NODE, workers=(READY,)))
    monkeypatch.setattr(home.controller, "demand", lambda: Demand(routes_version=table.version, deployments=()))
    monkeypatch.setattr(home.controller.followed_routes, "_patience_s", PATIENCE_S)
    following = home.controller.followed_routes.follow()
    home.published(reconciler)
    assert following.result(PATIENCE_S)


def test_a_new_controller_takes_over_the_routes_of_the_gateway_that_runs(home: Home) -> None:
    before = home.published(Reconciler(home.controller), replace(NODE, workers=(READY,)))
    assert home.published(Reconciler(home.controller)).routes == before.routes
    home.gateway_record.unlink()  # its workers may have ended with it, and their ports be other programs'
    (target,) = home.published(Reconciler(home.controller)).routes[0].workers
    assert (target.ready, target.token) == (False, None)


def test_routes_that_cannot_be_read_are_none(home: Home) -> None:
    home.settings.run_folder.joinpath(ROUTES_FILE).write_text("{")
    (target,) = home.published(Reconciler(home.controller)).routes[0].workers
    assert not target.ready


def test_a_gateway_that_cannot_be_looked_for_has_no_demand(home: Home) -> None:
    assert home.controller.gateway_process.record() is not None
    with no_file_left():
        assert home.controller.demand() is None
