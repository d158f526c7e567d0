"""Bursts of dummy requests to a worker's OpenAI API, timed from the first byte sent to the last one read.

Standard library only, from any plain thread. Prompts are random token ids, which every engine takes; decoding is
greedy and past every end of sequence, so that an answer has exactly the tokens asked for.
"""

from __future__ import annotations

import http.client
import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from daemon.worker_token import authorization
from fingerprint.config import Workload
from fingerprint.errors import EngineError

__all__ = ["BurstClient"]

_PROMPTS_PER_REQUEST = 128  # what one request to the embedded engine may hold
_MAX_ANSWER_BYTES = 256 << 20


class BurstClient:
    """The worker at ``url`` that serves ``model``.

    Args:
        vocab_size: token ids of the prompts are below it.
        timeout_s: longest wait for one burst.
        token: the worker's.
        seed: of the prompts. No two of them are alike, so that nothing is served from a cache of prefixes.
    """

    def __init__(
        self, url: str, model: str, vocab_size: int, *, timeout_s: float, seed: int, token: str | None = None
    ) -> None:
        where = urlsplit(url)
        self._host, self._port = where.hostname or "127.0.0.1", where.port
        self._model, self._vocab_size, self._timeout_s = model, vocab_size, timeout_s
        self._headers = {"Content-Type": "application/json"} | authorization(token)
        self._random = random.Random(seed)

    def burst(self, work: Workload) -> float:
        """Return the seconds until the whole batch, handed over at once, has all its tokens.

        Raises:
            EngineError: no answer, a refusal, or an answer of other lengths than asked for.
        """
        sizes = [
            min(_PROMPTS_PER_REQUEST, work.batch - first) for first in range(0, work.batch, _PROMPTS_PER_REQUEST)
        ]
        bodies = [self._body(size, work) for size in sizes]
        connections = [http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s) for _ in sizes]
        try:
            for connection in connections:
                connection.connect()
            with ThreadPoolExecutor(len(sizes)) as pool:
                started_s = time.perf_counter()
                answers = list(pool.map(self._exchange, connections, bodies))
                elapsed_s = time.perf_counter() - started_s
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(f"the worker did not answer a burst of {work.batch} requests: {error!r}") from error
        finally:
            for connection in connections:
                connection.close()
        for size, (status, answer) in zip(sizes, answers, strict=True):
            _check(status, answer, size, work)
        return elapsed_s

    def _body(self, size: int, work: Workload) -> bytes:
        prompts = [self._random.choices(range(self._vocab_size), k=work.input_tokens) for _ in range(size)]
        return json.dumps(
            {
                "model": self._model,
                "prompt": prompts[0] if size == 1 else prompts,
                "max_tokens": work.output_tokens,
                "temperature": 0,
                "ignore_eos": True,
            }
        ).encode()

    def _exchange(self, connection: http.client.HTTPConnection, body: bytes) -> tuple[int, bytes]:
        connection.request("POST", "/v1/completions", body, self._headers)
        response = connection.getresponse()
        return response.status, response.read(_MAX_ANSWER_BYTES)


def _check(status: int, answer: bytes, size: int, work: Workload) -> None:
    try:
        body: Any = json.loads(answer)
        if status != 200:
            raise EngineError(f"the worker refused a burst ({status}): {body['error']['message']}")
        found = (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"])
    except (ValueError, KeyError, TypeError) as error:
        raise EngineError(f"the worker answered a burst with {status} and {answer[:200]!r}") from error
    asked = (size * work.input_tokens, size * work.output_tokens)
    if found != asked:
        raise EngineError(
            f"a burst of {asked[0]} prompt and {asked[1]} output tokens was taken for {found[0]} and {found[1]}: "
            "its time is that of another workload"
        )
