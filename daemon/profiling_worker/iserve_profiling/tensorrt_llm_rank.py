"""Rank of a TensorRT-LLM engine, as its step timer answers (``iserve_profiling.tensorrt_llm_step_timer``)."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from pathlib import Path
from typing import Any

_TIMEOUT_S = 60.0  # reading waits for the GPU
_THERE_S, _POLL_S = 15.0, 0.05  # the engine answers when its first rank is ready; the rest may follow later


class Rank:
    """Raises RuntimeError: its timer is not there, does not answer, or answers with an error."""

    def __init__(self, timer: str, number: int) -> None:
        from iserve_profiling.tensorrt_llm_step_timer import address

        self.number, self.pid = number, 0
        self._socket = _connected(address(timer, number), number)
        self._socket.settimeout(_TIMEOUT_S)
        self._stream = self._socket.makefile("rw")

    def call(self, call: str, **given: Any) -> Any:
        try:
            self._stream.write(json.dumps({"call": call, **given}) + "\n")
            self._stream.flush()
            line = self._stream.readline()
        except OSError as error:
            raise RuntimeError(f"the step timer of rank {self.number} does not answer: {error}") from None
        if not line:
            raise RuntimeError(f"the step timer of rank {self.number} ended")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"the step timer of rank {self.number}: {answer['error']}")
        return answer["value"]

    def lives(self) -> bool:
        """Return whether a process lives; one that ended and was not waited for is gone as well."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] not in ("Z", "X")

    def close(self) -> None:
        with contextlib.suppress(OSError):  # of a rank that is gone
            self._stream.close()
        self._socket.close()


def _connected(where: str, number: int) -> socket.socket:
    end = time.monotonic() + _THERE_S
    while True:
        found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            found.connect(where)
        except OSError as error:
            found.close()
            if time.monotonic() > end:
                raise RuntimeError(
                    f"the step timer of rank {number} is not there ({error}): TensorRT-LLM did not take its "
                    "module along"
                ) from None
        else:
            return found
        time.sleep(_POLL_S)
