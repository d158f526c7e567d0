"""All ranks of one model as rank 0 sees them: started together, ordered together, ended together.

A rank that dies or fails makes the order under way raise EngineError, and the whole group is ended: the survivors
wait for the dead one's tensors and cannot be used again.
"""

from __future__ import annotations

import os
import selectors
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from daemon.exit_codes import is_out_of_memory
from daemon.torch_engine.parallel.ipc import Answer, Order, Verb, encode, receive_answer
from daemon.torch_engine.parallel.parallel_state import AdapterOrder, Groups, LoadOrder, RankPlace, make_groups
from daemon.torch_engine.parallel.rank_device import RankDevice, release_memory
from daemon.torch_engine.parallel.rank_loop import STEP_TIMEOUT_S, join
from daemon.torch_engine.parallel.stage import RankTiming, Stage
from daemon.torch_engine.runner_types import StepPlan
from fingerprint.errors import EngineError, IserveError
from fingerprint.measurements import RankMemory

__all__ = ["RankGroup"]

T = TypeVar("T")

_START_TIMEOUT_S = 120.0  # imports of torch and transformers, on a busy machine
_END_TIMEOUT_S = 3.0
_LAST_WORDS_S = 0.2
_PACKAGE_ROOT = Path(__file__).resolve().parents[3]


class _Child:
    """Process of one further rank, the two sockets to it, and the pipe whose closing ends it."""

    def __init__(self, place: RankPlace, device_id: str, store: Path, threads: int) -> None:
        self.rank = place.rank
        self.control, theirs = socket.socketpair()
        self._adapters, their_adapters = socket.socketpair()
        self._using_adapters = threading.Lock()
        lifeline_read, self._lifeline = os.pipe()
        arguments = {
            "rank": place.rank,
            "tp": place.tp,
            "pp": place.pp,
            "device": device_id,
            "store": store,
            "threads": threads,
            "control-fd": theirs.fileno(),
            "adapters-fd": their_adapters.fileno(),
            "lifeline-fd": lifeline_read,
        }
        argv = [f"--{name}={value}" for name, value in arguments.items()]
        path = os.pathsep.join(filter(None, (str(_PACKAGE_ROOT), os.environ.get("PYTHONPATH"))))
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "daemon.torch_engine.parallel.rank_main", *argv],
                pass_fds=(theirs.fileno(), their_adapters.fileno(), lifeline_read),
                stdin=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": path},
            )
        finally:
            theirs.close()
            their_adapters.close()
            os.close(lifeline_read)
        self.control.settimeout(_START_TIMEOUT_S)
        self._adapters.settimeout(STEP_TIMEOUT_S)

    def tell_next_to_steps(self, order: Order) -> None:
        """Give an order about adapters, in any thread. Raises EngineError: the rank is gone."""
        try:
            with self._using_adapters:
                self._adapters.sendall(encode(order))
        except OSError as error:
            raise self.lost(error) from error

    def answer_next_to_steps(self) -> IserveError | None:
        """Wait for the answer to such an order: why it failed. Raises EngineError: the rank is gone."""
        try:
            with self._using_adapters:
                answer, _ = receive_answer(self._adapters)
        except (OSError, EOFError) as error:
            self.process.kill()  # one that is silent for so long; its answer would be taken for the next order's
            raise self.lost(error) from error
        return answer.exception(self.rank)

    def lost(self, error: Exception) -> EngineError:
        """Say how a child went that does not answer."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)  # its exit code says how it went
        code = self.process.poll()
        how = "is not answering" if code is None else f"ended with exit code {code}"
        return EngineError(f"rank {self.rank} (pid {self.process.pid}) {how}; see the worker's log: {error}")

    def last_words(self) -> IserveError | None:
        """Return why it gave up, where it could still say so; of a child that has ended or is about to."""
        self.control.settimeout(_LAST_WORDS_S)
        try:
            answer, _ = receive_answer(self.control)
        except (OSError, EOFError, IserveError):
            return None
        return answer.exception(self.rank)

    def end(self, *, ordered: bool) -> None:
        """End the child's process.

        Args:
            ordered: it was asked to close and gets a moment; otherwise it is killed.
        """
        if not ordered:
            self.process.kill()
        self.control.close()
        with suppress(OSError):
            self._adapters.shutdown(socket.SHUT_RDWR)  # a thread that waits for an answer goes on
        with self._using_adapters:
            self._adapters.close()
        os.close(self._lifeline)
        try:
            self.process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class RankGroup:
    """Group of ranks on ``device_ids``, rank 0 of them this process.

    Raises:
        EngineError: a rank did not start, or this process has another group of several ranks.
    """

    def __init__(self, place: RankPlace, device_ids: tuple[str, ...]) -> None:
        self.serves = (place.tp, place.pp, device_ids)
        self._place = place
        self._children: list[_Child] = []
        self._folder: Path | None = None
        self._groups: Groups | None = None
        self._joined = False
        self._closed = False
        world = len(device_ids)
        threads = max(1, torch.get_num_threads() // world)
        self._device = RankDevice(device_ids[0], 0, threads=None)
        if world > 1 and dist.is_initialized():
            raise EngineError("this process runs a model on several ranks already; close that one first")
        try:
            if world > 1:
                self._start(device_ids, threads)
            self._groups = make_groups(place)
            self._collect()
        except (OSError, RuntimeError) as error:  # no process to be had, or a rank went while they met
            self._end(ordered=False)
            raise EngineError(f"the {world} ranks did not come up: {error}") from error
        except BaseException:
            self._end(ordered=False)
            raise

    def _start(self, device_ids: tuple[str, ...], threads: int) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="iserve-ranks-"))
        store = self._folder / "store"
        for rank, device_id in enumerate(device_ids[1:], start=1):
            place = RankPlace(rank, self._place.tp, self._place.pp)
            self._children.append(_Child(place, device_id, store, threads))
        self._collect()
        join(self._place, self._device, store)
        self._joined = True
        if self._device.is_cuda:
            for child in self._children:
                threading.Thread(target=self._abort_when_gone, args=(child,), daemon=True).start()
        for child in self._children:
            child.control.settimeout(STEP_TIMEOUT_S)

    def load(self, order: LoadOrder) -> Stage:
        """Load every rank's part. A refused load leaves the ranks alive, and empty, for the next one."""
        groups = self._groups
        assert groups is not None
        stage, failed = self._on_all(
            Order(Verb.LOAD, load=order),
            lambda: Stage(order, self._place, groups, self._device),
            order.checkpoint,
        )
        if failed is not None:
            del stage
            with suppress(EngineError):  # a rank that is lost by now has nothing any more
                self.unload()
            release_memory()
            raise failed
        assert stage is not None
        return stage

    def prepare_adapter(self, stage: Stage, order: AdapterOrder) -> None:
        """Prepare an adapter on every rank, next to steps. One that any rank refuses is prepared on none.

        Called by one thread at a time, which may be another than that of the other methods. It ends nothing, so
        that a rank that is gone is found out by the next order.
        """
        children = tuple(self._children)
        failed = self._prepare_on(children, stage, order)
        if failed is None:
            return
        stage.unload_adapter(order.adapter_id)
        with suppress(IserveError):  # a rank that is lost by now has nothing any more
            for child in children:
                child.tell_next_to_steps(Order(Verb.UNLOAD_ADAPTER, adapter_id=order.adapter_id))
            for child in children:
                child.answer_next_to_steps()
        raise failed

    @staticmethod
    def _prepare_on(children: tuple[_Child, ...], stage: Stage, order: AdapterOrder) -> Exception | None:
        """Return the first failure of any rank, once all have ended; None: all have prepared it."""
        failed: Exception | None = None
        asked = []
        try:
            for child in children:
                child.tell_next_to_steps(Order(Verb.PREPARE_ADAPTER, adapter=order))
                asked.append(child)
            stage.prepare_adapter(order)
        except Exception as error:  # noqa: BLE001 - raised by the caller, once no rank is at work on it
            failed = error
            if is_out_of_memory(error):
                failed = EngineError(f"rank 0 has no memory for {order.folder}: {error}")
                failed.__cause__ = error.with_traceback(None)  # its frames hold what was read
        for child in asked:
            try:
                theirs: Exception | None = child.answer_next_to_steps()
            except EngineError as lost:
                theirs = lost
            failed = failed or theirs
        return failed

    def switch_adapter(self, stage: Stage, adapter_id: int) -> None:
        """Let steps name a prepared adapter, on every rank from the same step on."""
        self._tell(Order(Verb.SWITCH_ADAPTER, adapter_id=adapter_id))
        stage.switch_adapter(adapter_id)
        self._collect()

    def unload_adapter(self, stage: Stage, adapter_id: int) -> None:
        """Free an adapter on every rank."""
        self._tell(Order(Verb.UNLOAD_ADAPTER, adapter_id=adapter_id))
        stage.unload_adapter(adapter_id)
        self._collect()

    def _on_all(self, order: Order, own: Callable[[], T], what: str) -> tuple[T | None, IserveError | None]:
        """Order the other ranks to load, load ``own`` part; return it, and the first failure of any rank."""
        self._tell(order)
        loaded: T | None = None
        failed: IserveError | None = None
        try:
            loaded = own()
        except IserveError as error:
            failed = error
        except Exception as error:
            if not is_out_of_memory(error):  # a bug: further answers are never read, no rank can be used again
                self._end(ordered=False)
                raise
            failed = EngineError(f"rank 0 has no memory for {what}: {error}")
            failed.__cause__ = error.with_traceback(None)  # its frames hold what was loaded
        for child, (answer, _) in zip(self._children, self._collect(raise_errors=False), strict=True):
            failed = failed or answer.exception(child.rank)
        return loaded, failed

    def step(self, stage: Stage, plan: StepPlan) -> tuple[torch.Tensor, tuple[RankTiming, ...]]:
        """Return logits [items, vocab] and every rank's timing, by rank.

        Raises:
            EngineError: a rank is gone, failed, or out of memory; the group is then ended.
        """
        self._tell(Order(Verb.STEP, plan=plan))
        try:
            logits, timing = stage.step(plan)
        except (
            RuntimeError,
            MemoryError,
        ) as error:  # torch's out-of-memory and torch.distributed's are among them
            for child in self._children:  # a dead peer shows here first, as a broken connection
                told = child.last_words()
                if told is not None:
                    self._end(ordered=False)
                    raise told from told.__cause__
                with suppress(subprocess.TimeoutExpired):
                    child.process.wait(_LAST_WORDS_S)
                    raise self._lost(child, error) from error
            self._end(ordered=False)
            raise EngineError(f"a step failed on rank 0: {error}") from error
        except BaseException:  # a bug: as in ``load``
            self._end(ordered=False)
            raise
        timings = [timing]
        for answer, theirs in self._collect():
            assert answer.timing is not None
            timings.append(answer.timing)
            logits = theirs if theirs is not None else logits
        assert logits is not None
        return logits, tuple(timings)

    def memory(self, stage: Stage) -> tuple[RankMemory, ...]:
        self._tell(Order(Verb.MEMORY))
        others = [answer.memory for answer, _ in self._collect()]
        return (stage.memory(), *(memory for memory in others if memory is not None))

    @property
    def usable(self) -> bool:
        return not self._closed

    def unload(self) -> None:
        """Drop what is loaded on the other ranks."""
        self._tell(Order(Verb.UNLOAD))
        self._collect()

    def close(self) -> None:
        """End the other ranks. Safe to call twice."""
        if not self._closed:
            with suppress(EngineError):
                self._tell(Order(Verb.CLOSE))
            self._end(ordered=True)

    def _tell(self, order: Order) -> None:
        if self._closed:
            raise EngineError("the ranks of this model have ended; load it again")
        message = encode(order)
        try:
            for child in self._children:
                child.control.sendall(message)
        except OSError as error:
            raise self._lost(child, error) from error

    def _collect(self, *, raise_errors: bool = True) -> list[tuple[Answer, torch.Tensor | None]]:
        """Return one answer of each child, by rank. The first ready is read first: a death is seen at once."""
        answers: dict[int, tuple[Answer, torch.Tensor | None]] = {}
        with selectors.DefaultSelector() as selector:
            for child in self._children:
                selector.register(child.control, selectors.EVENT_READ, child)
            while len(answers) < len(self._children):
                ready = selector.select(STEP_TIMEOUT_S)
                if not ready:
                    self._end(ordered=False)
                    raise EngineError(f"a rank has not answered for {STEP_TIMEOUT_S:.0f} s")
                for key, _ in ready:
                    child = key.data
                    try:
                        answers[child.rank] = receive_answer(child.control)
                    except (OSError, EOFError) as error:
                        raise self._lost(child, error) from error
                    selector.unregister(child.control)
                    failed = answers[child.rank][0].exception(child.rank) if raise_errors else None
                    if failed is not None:
                        self._end(ordered=False)
                        raise failed
        return [answers[rank] for rank in sorted(answers)]

    def _lost(self, child: _Child, error: Exception) -> EngineError:
        """End the group, of which a child is gone, and say how it went."""
        lost = child.lost(error)
        self._end(ordered=False)
        return lost

    def _end(self, *, ordered: bool) -> None:
        self._closed = True
        for child in self._children:
            child.end(ordered=ordered)
        self._children = []
        if self._joined:
            self._joined = False
            dist.destroy_process_group()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _abort_when_gone(self, child: _Child) -> None:
        """Wait for the child's end, then abort every group's communicator: what hangs may be of any of them.

        A kernel that waits for a dead peer's data never ends by itself; gloo's calls do.
        """
        child.process.wait()
        if not self._closed:
            own = self._groups.tensor if self._groups is not None else None
            for group in dict.fromkeys((own, dist.group.WORLD)):
                if group is not None:
                    group._get_backend(self._device.torch_device).abort()
