"""One rank of a TensorRT-LLM engine, as its step timer answers (``iserve_step_timer_tensorrt_llm``)."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

_TIMEOUT_S = 60.0  # reading waits for the GPU


class Rank:
    """Raises RuntimeError: its timer is not there, does not answer, or answers with an error."""

    def __init__(self, timer: str, number: int) -> None:
        from iserve_step_timer_tensorrt_llm import address

        self.number, self.pid = number, 0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(_TIMEOUT_S)
        try:
            self._socket.connect(address(timer, number))
        except OSError as error:
            self._socket.close()
            raise RuntimeError(
                f"the step timer of rank {number} is not there ({error}): TensorRT-LLM did not take its module "
                "along"
            ) from error
        self._stream = self._socket.makefile("rw")

    def call(self, call: str, **given: Any) -> Any:
        try:
            self._stream.write(json.dumps({"call": call, **given}) + "\n")
            self._stream.flush()
            line = self._stream.readline()
        except OSError as error:
            raise RuntimeError(f"the step timer of rank {self.number} does not answer: {error}") from error
        if not line:
            raise RuntimeError(f"the step timer of rank {self.number} ended")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"the step timer of rank {self.number}: {answer['error']}")
        return answer["value"]

    def lives(self) -> bool:
        """A process that ended and was not waited for is gone as well."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] not in ("Z", "X")

    def close(self) -> None:
        self._socket.close()
