"""Deadline for a worker to become ready again. Carried out: test_replicas.py."""

from __future__ import annotations

from daemon.status import WorkerState, WorkerStatus
from daemon.worker_spec import WorkerSpec
from iserve.controller.reconcile import Patience
from tests.iserve.test_snapshot import WORKER


class Watch:
    """Worker that is seen now and then."""

    def __init__(self) -> None:
        self.now_s = 50.0
        self.patience = Patience(100.0, lambda: self.now_s)

    def given_up(self, after_s: float, *states: WorkerState) -> bool:
        self.now_s += after_s
        return self.patience.given_up([seen(state) for state in states]) == (WORKER.worker_id,)


def seen(state: WorkerState, spec: WorkerSpec = WORKER) -> WorkerStatus:
    return WorkerStatus(spec=spec, state=state, url="", pid=None, restarts=0, started_at="")


def test_one_that_starts_again_and_again_is_given_up_once_and_rests_as_long() -> None:
    watch = Watch()
    assert not watch.given_up(0, WorkerState.STARTING)
    assert not watch.given_up(60, WorkerState.RESTARTING)
    assert not watch.given_up(40, WorkerState.STARTING)
    assert not watch.patience.rests(WORKER.worker_id)
    assert watch.given_up(1, WorkerState.STARTING)
    assert not watch.given_up(1, WorkerState.STOPPING)
    assert not watch.given_up(98)
    assert watch.patience.rests(WORKER.worker_id)
    assert not watch.given_up(2)
    assert not watch.patience.rests(WORKER.worker_id)
    assert not watch.given_up(0, WorkerState.STARTING)
    assert not watch.given_up(100, WorkerState.STARTING)
    assert watch.given_up(1, WorkerState.STARTING)


def test_who_served_or_was_gone_meanwhile_is_waited_for_anew() -> None:
    for meanwhile in (WorkerState.READY,), (), (WorkerState.FAILED,):
        watch = Watch()
        assert not watch.given_up(0, WorkerState.STARTING)
        assert not watch.given_up(90, *meanwhile)
        assert not watch.given_up(90, WorkerState.STARTING)
        assert not watch.given_up(90, WorkerState.STARTING)
        assert watch.given_up(20, WorkerState.STARTING)
