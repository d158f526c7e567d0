"""A worker that is to run for a while only is ended by its daemon, unless it has ended before."""

from __future__ import annotations

import signal
import time

from daemon.status import WorkerState
from tests.golden_words import Golden


def test_a_worker_whose_time_is_up_is_ended_and_not_started_again(node, alive, until, golden: Golden):
    node.start()
    other = node.ready("w2")
    launched = node.client.launch(node.spec(ends_at=time.time() - 1.0))
    ended = node.wait("w1", WorkerState.FAILED)
    golden("daemon", ended.error)
    assert (ended.restarts, ended.pid) == (0, None)
    assert launched.pid is None or not alive(launched.pid)
    assert alive(other.pid)
    assert node.client.worker("w2").state is WorkerState.READY


def test_until_then_it_is_like_any_other_and_the_next_daemon_knows_when(node, alive):
    node.start()
    ends_at = time.time() + 3600.0
    before = node.ready(ends_at=ends_at)
    node.signal_daemon(signal.SIGKILL)
    node.start()
    after = node.wait("w1", WorkerState.READY)
    assert (after.pid, after.spec.ends_at) == (before.pid, ends_at)
    assert alive(after.pid)
