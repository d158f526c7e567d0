"""The open loop: each request leaves at its scheduled time, however many are still being answered.

One asyncio process. The loop that sends never awaits an answer, so a slow server cannot slow it down; what a busy
client does to it is measured as lateness. What would exceed the bound on requests in flight is refused and
counted, never put off.
"""

from __future__ import annotations

import asyncio
import gc
import math
import resource
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from fingerprint.errors import ConfigError
from iserve.http_stream import AnswerLostError, MalformedAnswerError, NotReachedError, StreamAnswer, StreamClient
from iserve.replay.endpoint import Endpoint
from iserve.replay.inflight_request import InflightRequest
from iserve.replay.prompts import PromptOptions, Prompts
from iserve.replay.schedule import Schedule
from traces.outcomes import Failure, Floats, Outcomes

__all__ = ["Progress", "Replay", "ReplayOptions"]

_BURST = 16  # requests sent without a look at the answers
_SPARE_FILES = 64
_LINGER_S = 1.0  # for the end of an answer whose outcome is known, so that its connection can be used again
_GC_THRESHOLDS = (50_000, 50, 50)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayOptions:
    """Options of sending.

    Raises:
        ConfigError: a value that cannot be used.
    """

    timeout_s: float = 600.0  # of a request, from its send to its last token
    max_in_flight: int = 2000
    key: str | None = field(default=None, repr=False)
    prompts: PromptOptions = field(default_factory=PromptOptions)

    def __post_init__(self) -> None:
        if not 0 < self.timeout_s < math.inf:
            raise ConfigError(f"the timeout must be above 0 s and finite, got {self.timeout_s}")
        if self.max_in_flight < 1:
            raise ConfigError(f"at least 1 request must be allowed in flight, got {self.max_in_flight}")
        if self.key is not None and not (self.key.isascii() and self.key.isprintable()):
            raise ConfigError("the API key holds characters that no key has")


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Progress of a run."""

    elapsed_s: float
    scheduled_end_s: float  # when the last request is due
    total: int
    begun: int  # sent or refused
    in_flight: int
    completed: int
    failed: int
    lateness_max_s: float
    output_tokens: int


class Replay:
    """Replay run; ``run`` once. ``examples`` has the server's words for the first failure of each kind."""

    def __init__(self, schedule: Schedule, endpoint: Endpoint, options: ReplayOptions) -> None:
        self._schedule, self._endpoint, self._options = schedule, endpoint, options
        self.examples: dict[Failure, str] = {}
        self.interrupted = False
        self.elapsed_s = 0.0
        n = len(schedule)
        key = f"Authorization: Bearer {options.key}\r\n" if options.key else ""
        self._headers = f"User-Agent: iserve-replay\r\nAccept: text/event-stream\r\n{key}".encode()
        self._path = endpoint.base_path + options.prompts.path
        self._sent_s, self._first_s, self._last_s = (np.full(n, np.nan) for _ in range(3))
        self._prompt_tokens, self._output_tokens = np.zeros(n, np.int64), np.zeros(n, np.int64)
        self._failure = np.zeros(n, np.int8)
        self._gaps: list[array[float]] = [_NO_GAPS] * n
        self._begun = self._completed = self._failed = self._tokens = 0
        self._late_s = 0.0
        self._in_flight: set[InflightRequest] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._work: asyncio.Task[None] | None = None

    def stop(self) -> None:
        """Send nothing more and end what is in flight; ``run`` returns with what there is."""
        self.interrupted = True
        if self._work is not None:
            self._work.cancel()

    async def run(
        self, on_progress: Callable[[Progress], None] | None = None, *, every_s: float = 0.5
    ) -> Outcomes:
        """Send everything and wait for the answers, each for ``timeout_s`` at most.

        Raises:
            ConfigError: this process may not hold as many connections.
        """
        _allow_files(self._options.max_in_flight + _SPARE_FILES)
        self._loop = asyncio.get_running_loop()
        self._client = StreamClient()
        ticker = None if on_progress is None else self._loop.create_task(self._tell(on_progress, every_s))
        with _calm_collector():
            self._start_s = self._loop.time()
            self._work = self._loop.create_task(self._send_all())
            try:
                if not self.interrupted:
                    await asyncio.wait((self._work,))
            finally:
                await self._end(self._work, ticker)
            if not self._work.cancelled():
                self._work.result()  # raises what went wrong
        if on_progress is not None:
            on_progress(self.progress())
        return self._outcomes()

    def progress(self) -> Progress:
        return Progress(
            elapsed_s=self._loop.time() - self._start_s,
            scheduled_end_s=float(self._schedule.scheduled_s[-1]),
            total=len(self._schedule),
            begun=self._begun,
            in_flight=len(self._in_flight),
            completed=self._completed,
            failed=self._failed,
            lateness_max_s=self._late_s,
            output_tokens=self._tokens,
        )

    async def _send_all(self) -> None:
        """Send everything, and wait until no request is in flight: each has its own timer, so this ends."""
        schedule, prompts = self._schedule, Prompts(self._schedule.deployments, self._options.prompts)
        since_look = 0
        for row in range(len(schedule)):
            body = prompts.body(
                int(schedule.deployment[row]),
                int(schedule.input_tokens[row]),
                int(schedule.output_tokens[row]),
                schedule.prefix_blocks[row] if schedule.prefix_blocks else (),
            )
            due_s = self._start_s + float(schedule.scheduled_s[row])
            since_look += 1
            while (left_s := due_s - self._loop.time()) > 0 or since_look >= _BURST:
                await asyncio.sleep(max(0.0, left_s))
                since_look = 0
            self._begin(row, body, due_s)
        if self._in_flight:
            await self._idle.wait()

    def _begin(self, row: int, body: bytes, due_s: float) -> None:
        self._begun = row + 1
        if len(self._in_flight) >= self._options.max_in_flight:
            self._failure[row] = Failure.REFUSED_BY_CLIENT
            self.examples.setdefault(
                Failure.REFUSED_BY_CLIENT, f"{self._options.max_in_flight} requests were in flight already"
            )
            self._failed += 1
            return
        request = InflightRequest(row, int(self._schedule.output_tokens[row]), self._record)
        self._in_flight.add(request)
        self._idle.clear()
        task = self._loop.create_task(self._exchange(request, body, due_s))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _exchange(self, request: InflightRequest, body: bytes, due_s: float) -> None:
        """Send a request and follow its answer to its outcome; a failure ends the server's side at once."""
        now_s, timeout_s = self._loop.time(), self._options.timeout_s
        self._late_s = max(self._late_s, now_s - due_s)
        self._sent_s[request.row] = now_s - self._start_s
        answer: StreamAnswer | None = None
        try:
            async with asyncio.timeout_at(now_s + timeout_s):
                answer = await self._client.post(
                    self._endpoint.origin, self._path, self._headers, body, silence_s=timeout_s
                )
                request.started(answer.status, answer.content_type)
                await _follow(request, answer, timeout_s)
        except NotReachedError as error:
            request.fail(Failure.NO_CONNECTION, f"{self._endpoint.origin.authority}: {error}")
        except MalformedAnswerError as error:
            request.fail(Failure.MALFORMED, str(error))
        except AnswerLostError as error:
            request.lost(error)
        except TimeoutError:
            where = f"after {request.pieces} pieces" if request.pieces else "before the first token"
            request.fail(Failure.TIMEOUT, f"not complete within {timeout_s:g} s, {where}")
        finally:
            if answer is not None and not request.done:
                answer.close()
        if answer is not None and request.done:
            await answer.finish(_LINGER_S)

    def _record(self, request: InflightRequest) -> None:
        """Record the outcome of a request."""
        self._in_flight.remove(request)
        row = request.row
        if request.pieces:
            self._first_s[row] = request.first_s - self._start_s
            self._last_s[row] = request.last_s - self._start_s
            self._gaps[row] = request.gaps
        self._prompt_tokens[row] = request.prompt_tokens
        self._output_tokens[row] = request.completion_tokens or request.pieces
        self._failure[row] = request.failure
        if request.failure is Failure.NONE:
            self._completed += 1
            self._tokens += int(self._output_tokens[row])
        else:
            self._failed += 1
            self.examples.setdefault(request.failure, request.message)
        if not self._in_flight:
            self._idle.set()

    async def _end(self, *others: asyncio.Task[None] | None) -> None:
        for request in list(self._in_flight):
            request.fail(Failure.INTERRUPTED, "the run was ended")
        tasks = [task for task in (*others, *self._tasks) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._client.close()
        await self._client.wait_closed()
        self.elapsed_s = self._loop.time() - self._start_s

    async def _tell(self, on_progress: Callable[[Progress], None], every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            on_progress(self.progress())

    def _outcomes(self) -> Outcomes:
        """Return the outcomes of the requests that were begun."""
        schedule, begun = self._schedule, slice(self._begun)
        gaps = self._gaps[begun]
        flat: Floats = np.concatenate([np.frombuffer(g, np.float32) for g in gaps] or [np.zeros(0, np.float32)])
        return Outcomes(
            deployments=schedule.deployments,
            deployment=schedule.deployment[begun],
            arrival_s=schedule.arrival_s[begun],
            scheduled_s=schedule.scheduled_s[begun],
            sent_s=self._sent_s[begun],
            first_token_s=self._first_s[begun],
            last_token_s=self._last_s[begun],
            asked_input_tokens=schedule.input_tokens[begun],
            asked_output_tokens=schedule.output_tokens[begun],
            input_tokens=self._prompt_tokens[begun],
            output_tokens=self._output_tokens[begun],
            failure=self._failure[begun],
            gaps_s=flat,
            num_gaps=np.array([len(g) for g in gaps], np.int64),
        )


async def _follow(request: InflightRequest, answer: StreamAnswer, timeout_s: float) -> None:
    """Feed ``request`` with its answer, mostly in the callback that read it, until the outcome is known."""

    def take(part: bytes) -> bool:
        request.feed(part, answer.arrived_s)
        return not request.over

    while not request.over:
        part = await answer.read(timeout_s, take)
        if part:  # of a request that is over it was taken
            request.feed(part, answer.arrived_s)
        elif not request.over:
            request.ended()


_NO_GAPS: array[float] = array("f")


@contextmanager
def _calm_collector() -> Iterator[None]:
    """Freeze the objects that are alive: a full collection would stop every stream, and the sender, for
    milliseconds.

    The stop would be tens of milliseconds. If objects were frozen before, they stay so and no more are: the
    collector cannot thaw a part.
    """
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    if not frozen:
        gc.collect()
        gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if not frozen:
            gc.unfreeze()


def _allow_files(wanted: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        if hard != resource.RLIM_INFINITY and hard < wanted:
            raise ConfigError(
                f"{wanted} open files are needed and this process may have {hard}; lower --max-inflight or raise "
                "the limit (ulimit -n)"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
