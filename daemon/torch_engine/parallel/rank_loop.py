"""Rank beyond the first: ``python -m daemon.torch_engine.parallel.rank_main``, a child in rank 0's process group.

Does what rank 0 orders over the control socket; tensors go between ranks over torch.distributed. Adapters are
prepared in a second thread, by orders on a socket of their own, while steps go on in the first. Ends at once when
rank 0 is gone, however it went: the child holds the reading end of a pipe whose writing end only rank 0 has.
(A parent-death signal would follow the thread that started the child, not the process.)
"""

from __future__ import annotations

import argparse
import datetime
import os
import shutil
import signal
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from daemon.torch_engine.parallel.ipc import Answer, Order, Verb, failure, receive_order, send_answer
from daemon.torch_engine.parallel.parallel_state import RankPlace, make_groups
from daemon.torch_engine.parallel.rank_device import RankDevice, release_memory
from daemon.torch_engine.parallel.stage import Stage
from fingerprint.errors import EngineError

__all__ = ["STEP_TIMEOUT_S", "join", "main"]

STEP_TIMEOUT_S = 600.0  # longer than any single step; a rank that is alive but silent for so long is given up


def join(place: RankPlace, device: RankDevice, store_path: Path) -> None:
    """Enter the process group of all ranks; they meet at a file that only this user can reach.

    Raises:
        EngineError: the other ranks did not join.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # ranks are of one node: nothing listens beyond it
    world = place.tp * place.pp
    try:
        dist.init_process_group(
            device.backend,
            store=dist.FileStore(str(store_path), world),
            rank=place.rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=STEP_TIMEOUT_S),
            device_id=device.torch_device if device.is_cuda else None,
        )
    except (RuntimeError, ValueError) as error:
        raise EngineError(f"rank {place.rank} could not join the other {world - 1}: {error}") from error


@dataclass(slots=True)
class _Loaded:
    """Stage of this rank, if it has one; written by the thread of the steps alone."""

    stage: Stage | None = None


def main(argv: list[str]) -> int:
    arguments = _parse(argv)
    for number in (signal.SIGINT, signal.SIGTERM):  # both reach the whole process group: rank 0 drains and decides
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(
        target=_end_with_parent, args=(arguments.lifeline_fd, arguments.store.parent), daemon=True
    ).start()
    place = RankPlace(arguments.rank, arguments.tp, arguments.pp)
    adapters, loaded = socket.socket(fileno=arguments.adapters_fd), _Loaded()
    threading.Thread(target=_prepare_adapters, args=(adapters, loaded), daemon=True).start()
    with socket.socket(fileno=arguments.control_fd) as control:
        try:
            device = RankDevice(arguments.device, place.rank, arguments.threads)
            send_answer(control, Answer())  # imports are done: rank 0 may now wait in the rendezvous
            join(place, device, arguments.store)
            _serve(control, place, device, loaded)
        except EOFError:  # rank 0 is gone, and may have had no time to remove the rendezvous' folder
            shutil.rmtree(arguments.store.parent, ignore_errors=True)
            return 0
        except Exception as error:
            send_answer(control, failure(error))
            raise
    dist.destroy_process_group()
    return 0


def _serve(control: socket.socket, place: RankPlace, device: RankDevice, loaded: _Loaded) -> None:
    groups = make_groups(place)
    send_answer(control, Answer())
    while True:
        order: Order = receive_order(control)
        stage = loaded.stage
        if order.verb is Verb.STEP:
            assert stage is not None
            assert order.plan is not None
            logits, timing = stage.step(order.plan)
            shape = None if logits is None else (logits.shape[0], logits.shape[1])
            send_answer(control, Answer(timing=timing, logits_shape=shape), logits)
        elif order.verb is Verb.LOAD:
            assert order.load is not None
            try:
                loaded.stage = Stage(order.load, place, groups, device)
                answer = Answer()
            except Exception as error:  # noqa: BLE001 - a load that fails leaves the rank fit for the next one
                answer = failure(error)
            send_answer(control, answer)
        elif order.verb is Verb.SWITCH_ADAPTER:
            assert stage is not None
            assert order.adapter_id is not None
            stage.switch_adapter(order.adapter_id)
            send_answer(control, Answer())
        elif order.verb is Verb.UNLOAD_ADAPTER:
            assert stage is not None
            assert order.adapter_id is not None
            stage.unload_adapter(order.adapter_id)
            send_answer(control, Answer())
        elif order.verb is Verb.MEMORY:
            assert stage is not None
            send_answer(control, Answer(memory=stage.memory()))
        elif order.verb is Verb.UNLOAD:
            loaded.stage = stage = None
            release_memory()
            send_answer(control, Answer())
        else:
            return


def _prepare_adapters(adapters: socket.socket, loaded: _Loaded) -> None:
    """Prepare adapters as rank 0 orders, until it is gone."""
    while True:
        try:
            order = receive_order(adapters)
            send_answer(adapters, _prepare(order, loaded))
        except (OSError, EOFError):
            return


def _prepare(order: Order, loaded: _Loaded) -> Answer:
    try:
        stage = loaded.stage
        assert stage is not None
        if order.verb is Verb.PREPARE_ADAPTER:
            assert order.adapter is not None
            stage.prepare_adapter(order.adapter)
        else:
            assert order.verb is Verb.UNLOAD_ADAPTER
            assert order.adapter_id is not None
            stage.unload_adapter(order.adapter_id)
    except Exception as error:  # noqa: BLE001 - an adapter that is refused leaves the rank as it was
        return failure(error)
    return Answer()


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="daemon.torch_engine.parallel.rank_main", description=__doc__)
    for name in ("rank", "tp", "pp", "threads", "control-fd", "adapters-fd", "lifeline-fd"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--store", type=Path, required=True)
    return parser.parse_args(argv)


def _end_with_parent(lifeline_fd: int, folder: Path) -> None:
    os.read(lifeline_fd, 1)  # returns when the last writing end is closed; nothing is ever written
    time.sleep(0.2)  # a close that was ordered is done by now
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)
