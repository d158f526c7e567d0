"""A profiling worker whose GPU another process takes, or whose engine compiles for minutes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from daemon import profile_client
from fingerprint.errors import TooLittleTimeError
from fingerprint.measurements import OtherProcess
from fingerprint.profile_sessions import CallState
from tests.daemon.profiling_house import GIB, GPUS, House, bursts, house, session

pytestmark = pytest.mark.process

__all__ = ["house", "session"]  # fixtures


@pytest.fixture
def processes(house: House) -> Iterator[Path]:
    """File in which the engine's driver finds the processes on the GPUs."""
    (fake,) = (house.folder.parent / "env").rglob("third_party/pynvml.py")
    path = fake.with_name("processes.json")
    yield path
    path.unlink(missing_ok=True)


def test_a_process_that_takes_the_gpu_is_in_the_readings_with_its_memory(house, session, processes) -> None:
    processes.write_text(json.dumps({GPUS[0]: [[7, GIB]]}))  # before the engine
    house.load(session)
    assert [run.others for run in bursts(session)] == [(), ()]
    processes.write_text(json.dumps({GPUS[0]: [[7, GIB], [4711, 3 * GIB]]}))
    other = OtherProcess(pid=4711, used_bytes=3 * GIB)
    assert [run.others for run in bursts(session)] == [(other,), (other,)]
    processes.write_text("{}")
    assert [run.others for run in bursts(session)] == [(), ()]


def test_a_call_that_compiles_is_cut_at_its_limit_and_the_worker_ends_with_its_session(house, session) -> None:
    house.load(session, behaviour={"kernels_s": 3600.0})
    assert house.processes(session)
    with pytest.raises(TooLittleTimeError):
        bursts(session, limit_s=0.5)
    session.close()
    assert not house.processes(session)


def test_calls_are_told_of_while_they_run_and_when_they_have_ended(house, session, monkeypatch) -> None:
    monkeypatch.setattr(profile_client, "_TELL_S", 0.05)
    house.load(session, behaviour={"kernels_s": 0.7})
    states: list[CallState] = []
    assert bursts(session, tell=states.append)
    assert [state.ended for state in states] == [False] * (len(states) - 1) + [True]
    assert len(states) > 1
    assert sorted(states, key=lambda state: state.elapsed_s) == states


def test_who_is_told_may_end_the_profile_within_a_call(house, session, monkeypatch) -> None:
    """A model that is removed meanwhile: nothing waits for the kernels."""
    monkeypatch.setattr(profile_client, "_TELL_S", 0.05)
    house.load(session, behaviour={"kernels_s": 3600.0})

    class RemovedError(Exception):
        pass

    def removed(_state: CallState) -> None:
        raise RemovedError

    with pytest.raises(RemovedError):
        bursts(session, tell=removed)
    session.close()
    assert not house.processes(session)
