"""A checkpoint's chat template, rendered in a process that its loops and recursion cannot outlast.

Knows the process and its answers; how the template is bounded there is ``template_process``'s business.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from fingerprint.errors import BadInputError, EngineError, UnavailableError

__all__ = ["MAX_CPU_S", "ChatTemplate", "RenderedTooLongError"]

MAX_CPU_S = 5  # of one rendering; the kernel counts whole seconds, so up to one more

_PROGRAM = Path(__file__).with_name("template_process.py")
_INSTEAD = "send these messages as one prompt to /v1/completions, or mend the checkpoint's chat_template"


class RenderedTooLongError(BadInputError):
    """A conversation whose text has more characters than it may."""

    def __init__(self, chars: int) -> None:
        super().__init__(chars)
        self.chars = chars


class ChatTemplate:
    """Chat template and its process, which the first rendering starts, and the next after it has ended.

    Thread-safe; conversations are rendered one after the other.
    """

    def __init__(self, template: str, special_tokens: Mapping[str, str]) -> None:
        self._setup = _line({"template": template, "special_tokens": dict(special_tokens), "max_cpu_s": MAX_CPU_S})
        self._process: subprocess.Popen[bytes] | None = None
        self._one_at_a_time = threading.Lock()
        self._closed = False

    def render(self, messages: Sequence[Mapping[str, str]], max_chars: int) -> str:
        """Return the conversation's text, up to where the assistant's answer begins.

        Blocks: not for an event loop.

        Raises:
            BadInputError: the template refuses these messages, with its own words, or takes too long or too much
                memory over them.
            RenderedTooLongError: the text has more than ``max_chars``.
            EngineError: no process can be started.
            UnavailableError: closed.
        """
        question = _line({"messages": list(messages), "max_chars": max_chars})
        with self._one_at_a_time:
            said = self._ask(question)
        if not said:
            raise UnavailableError("the worker is ending")
        answer = json.loads(said)
        if "too_long" in answer:
            raise RenderedTooLongError(answer["too_long"])
        if "refused" in answer:
            raise BadInputError(f"the model's chat template refuses these messages: {answer['refused']}")
        return str(answer["text"])

    def _ask(self, question: bytes) -> bytes:
        process = self._process
        if process is not None and process.poll() is not None:  # ended from outside, and not over these messages
            _end(process)
            process = self._process = None
        if self._closed:
            return b""
        if process is None:
            process = self._process = self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended; its status says why
            process.stdin.write(question)
            process.stdin.flush()
        said = process.stdout.readline()
        if said or self._closed:
            return said
        self._process = None
        status = _end(process)
        why = f"takes more than {MAX_CPU_S} s" if status == -signal.SIGXCPU else f"ended its process ({status})"
        raise BadInputError(f"the model's chat template was given up on these messages: it {why}; {_INSTEAD}")

    def _start(self) -> subprocess.Popen[bytes]:
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", str(_PROGRAM)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        except OSError as error:
            raise EngineError(f"no process for the chat template: {error}") from error
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(self._setup)
        return process

    def close(self) -> None:
        """End the process, whatever it renders. Idempotent, from any thread."""
        self._closed = True
        if (process := self._process) is not None:
            process.kill()  # a caller that waits for its answer has an empty one now
        with self._one_at_a_time:
            process, self._process = self._process, None
            if process is not None:
                process.kill()
                _end(process)


def _line(document: object) -> bytes:
    return json.dumps(document).encode() + b"\n"


def _end(process: subprocess.Popen[bytes]) -> int:
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError):  # what could not be written any more
        process.stdin.close()
    process.stdout.close()
    return process.wait()
