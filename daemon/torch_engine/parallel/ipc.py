"""Messages between rank 0 and the other ranks: length-prefixed JSON on two socket pairs.

Orders on one are carried out between steps, those on the other next to them: ``Verb.PREPARE_ADAPTER``, and
``UNLOAD_ADAPTER`` of what was prepared.

Never pickle. An answer may be followed by raw float32 logits, whose shape it gives.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from enum import StrEnum

import torch

from daemon.exit_codes import is_out_of_memory
from daemon.torch_engine.parallel.parallel_state import AdapterOrder, LoadOrder
from daemon.torch_engine.parallel.stage import RankTiming
from daemon.torch_engine.runner_types import StepPlan
from fingerprint.codec import from_json, to_json
from fingerprint.errors import EngineError, IserveError, error_class
from fingerprint.measurements import RankMemory

__all__ = ["Answer", "Order", "Verb", "encode", "failure", "receive_answer", "receive_order", "send_answer"]

_LENGTH = struct.Struct("!I")
_MAX_FRAME_BYTES = 256 * 2**20


class Verb(StrEnum):
    LOAD = "load"
    STEP = "step"
    MEMORY = "memory"
    UNLOAD = "unload"
    PREPARE_ADAPTER = "prepare-adapter"
    SWITCH_ADAPTER = "switch-adapter"
    UNLOAD_ADAPTER = "unload-adapter"
    CLOSE = "close"


@dataclass(frozen=True, slots=True)
class Order:
    verb: Verb
    load: LoadOrder | None = None
    plan: StepPlan | None = None
    adapter: AdapterOrder | None = None
    adapter_id: int | None = None  # that is switched to or unloaded


@dataclass(frozen=True, slots=True)
class Answer:
    """``error`` is a message, ``error_class`` one of ``fingerprint.errors``; the rest is for the verb asked."""

    error: str | None = None
    error_class: str | None = None
    out_of_memory: bool = False
    timing: RankTiming | None = None
    memory: RankMemory | None = None
    logits_shape: tuple[int, int] | None = None

    def exception(self, rank: int) -> IserveError | None:
        """Return the error to raise at rank 0, from a MemoryError where the rank had no room; None: none."""
        if self.error is None:
            return None
        cls = error_class(self.error_class, EngineError)
        found: IserveError = (
            cls(self.error) if cls is not EngineError else EngineError(f"rank {rank}: {self.error}")
        )
        if self.out_of_memory:
            found.__cause__ = MemoryError(self.error)
        return found


def failure(error: Exception) -> Answer:
    """Return the failure to send: the project's errors keep their class; any other is this engine's."""
    own = isinstance(error, IserveError)
    message = str(error) if own else f"{type(error).__name__}: {error}"
    error_class = type(error).__name__ if own else "EngineError"
    return Answer(error=message, error_class=error_class, out_of_memory=is_out_of_memory(error))


def encode(value: Order | Answer) -> bytes:
    body = to_json(value)
    return _LENGTH.pack(len(body)) + body


def send_answer(connection: socket.socket, answer: Answer, logits: torch.Tensor | None = None) -> None:
    connection.sendall(encode(answer))
    if logits is not None:
        connection.sendall(logits.contiguous().numpy().data)


def receive_order(connection: socket.socket) -> Order:
    return from_json(_receive_frame(connection), Order, what="an order from rank 0")


def receive_answer(connection: socket.socket) -> tuple[Answer, torch.Tensor | None]:
    answer = from_json(_receive_frame(connection), Answer, what="an answer of a rank")
    if answer.logits_shape is None:
        return answer, None
    logits = torch.empty(answer.logits_shape, dtype=torch.float32)
    _receive_into(connection, memoryview(logits.numpy()).cast("B"))
    return answer, logits


def _receive_frame(connection: socket.socket) -> bytes:
    header = bytearray(_LENGTH.size)
    _receive_into(connection, memoryview(header))
    (length,) = _LENGTH.unpack(header)
    if length > _MAX_FRAME_BYTES:
        raise EngineError(f"a message of {length:,} bytes between ranks, at most {_MAX_FRAME_BYTES:,} are allowed")
    body = bytearray(length)
    _receive_into(connection, memoryview(body))
    return bytes(body)


def _receive_into(connection: socket.socket, view: memoryview) -> None:
    while view:
        count = connection.recv_into(view)
        if not count:
            raise EOFError("the other rank is gone")
        view = view[count:]
