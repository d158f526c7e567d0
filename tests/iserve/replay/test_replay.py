"""Open-loop replay against a real HTTP server with known delays and chosen faults.

Delays are asserted from below only: a busy machine makes everything later, never earlier.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import Iterator

import numpy as np
import pytest

from fingerprint.errors import ConfigError
from iserve.replay.endpoint import resolve_endpoint
from iserve.replay.prompts import PromptOptions
from iserve.replay.runner import Progress, Replay, ReplayOptions
from iserve.replay.schedule import ScheduleOptions, make_schedule
from tests.golden_words import Golden
from tests.iserve.replay.stand_in import GAP_S, TTFT_S, StandIn, stand_in
from tests.waiting import PATIENCE_S
from traces.outcomes import Failure, Outcomes
from traces.request import Request
from traces.summary import summarize

EARLY_S = 0.002  # the resolution of the server's timers


@pytest.fixture(scope="module")
def server() -> Iterator[StandIn]:
    with stand_in() as found:
        yield found


def requests(count: int, *, every_s: float = 0.01, tokens: int = 3, model: str = "") -> list[Request]:
    return [Request(i * every_s, 20 + i, tokens, model) for i in range(count)]


def replay(
    url: str,
    trace: list[Request],
    deployments: tuple[str, ...] = ("fine",),
    options: ReplayOptions = ReplayOptions(timeout_s=30),  # noqa: B008 frozen
) -> tuple[Outcomes, Replay]:
    """The outcomes; whatever the run leaves in its event loop is a failure."""

    async def run() -> tuple[Outcomes, Replay]:
        run = Replay(make_schedule(trace, deployments, ScheduleOptions()), resolve_endpoint(url), options)
        outcomes = await run.run()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"tasks are left: {left}"
        return outcomes, run

    return asyncio.run(run())


def test_the_servers_delays_are_found(server: StandIn) -> None:
    outcomes, _ = replay(server.url, requests(20, tokens=5))
    assert (outcomes.failure == Failure.NONE).all()
    assert outcomes.output_tokens.tolist() == [5] * 20
    assert outcomes.input_tokens.tolist() == [20 + i for i in range(20)]
    assert (outcomes.ttft_from_send_s >= TTFT_S - EARLY_S).all()
    assert (outcomes.tpot_s >= GAP_S - EARLY_S).all()
    assert (outcomes.e2e_from_send_s >= TTFT_S + 4 * GAP_S - EARLY_S).all()
    assert outcomes.num_gaps is not None
    assert outcomes.num_gaps.tolist() == [4] * 20
    span_s = outcomes.last_token_s - outcomes.first_token_s
    sums_s = np.add.reduceat(outcomes.gaps_s.astype(float), np.arange(0, 80, 4))
    assert sums_s == pytest.approx(span_s, abs=1e-5), "the gaps of an answer are its time after the first token"


def test_sends_are_never_before_their_time_and_latencies_count_from_it(server: StandIn) -> None:
    outcomes, _ = replay(server.url, requests(30))
    assert outcomes.scheduled_s.tolist() == pytest.approx([0.01 * i for i in range(30)])
    assert (outcomes.lateness_s >= 0).all()
    assert outcomes.ttft_s == pytest.approx(outcomes.ttft_from_send_s + outcomes.lateness_s)


@pytest.mark.slow
def test_a_slow_server_does_not_slow_the_sender(server: StandIn) -> None:
    """The last request leaves before any answer has begun: a closed loop would have sent one."""
    options = ReplayOptions(timeout_s=2.0)
    outcomes, _ = replay(server.url, requests(40, every_s=0.005), ("silent",), options)
    assert (outcomes.failure == Failure.TIMEOUT).all()
    assert not np.isnan(outcomes.sent_s).any()
    assert outcomes.sent_s.max() < 2.0 + outcomes.sent_s[0], "all left before the first was given up"


def test_a_late_sender_is_seen_in_the_latency_from_the_schedule(server: StandIn) -> None:
    """Requests are due while the loop is held for 0.3 s: the wait is not the server's, and is not lost."""

    async def run() -> Outcomes:
        schedule = make_schedule(requests(30, every_s=0.02), ("fine",), ScheduleOptions())
        run = Replay(schedule, resolve_endpoint(server.url), ReplayOptions(timeout_s=30))
        asyncio.get_running_loop().call_later(0.05, _hold_the_loop)
        return await run.run()

    found = summarize(asyncio.run(run()))
    assert found.lateness is not None
    assert found.ttft is not None
    assert found.ttft_from_send is not None
    assert found.lateness.max_s >= 0.25
    assert found.ttft.max_s >= 0.25 + TTFT_S - EARLY_S
    assert found.ttft.mean_s > found.ttft_from_send.mean_s


def _hold_the_loop() -> None:
    time.sleep(0.3)


@pytest.mark.parametrize(
    ("model", "failure"),
    [
        pytest.param("429", Failure.RATE_LIMITED, id="429"),
        pytest.param("400", Failure.BAD_REQUEST, id="400"),
        pytest.param("500", Failure.SERVER_ERROR, id="500"),
        pytest.param("503", Failure.SERVER_ERROR, id="503"),
        pytest.param("late", Failure.TOO_LATE, id="refused for being late"),
        pytest.param("silent", Failure.TIMEOUT, id="silent"),
        pytest.param("hangs-in-the-middle", Failure.TIMEOUT, id="hangs"),
        pytest.param("slow-loris", Failure.TIMEOUT, id="slow-loris"),
        pytest.param("endless-line", Failure.MALFORMED, id="line-without-end"),
        pytest.param("endless-answer", Failure.MALFORMED, id="answer-without-end"),
        pytest.param("garbage", Failure.MALFORMED, id="no-json"),
        pytest.param("not-a-stream", Failure.MALFORMED, id="no-stream"),
        pytest.param("cut", Failure.CONNECTION_LOST, id="cut"),
        pytest.param("no-done", Failure.CONNECTION_LOST, id="no-done"),
        pytest.param("error-frame", Failure.ERROR_FRAME, id="error-frame"),
        pytest.param("nothing", Failure.NO_TOKENS, id="no-tokens"),
    ],
)
def test_every_fault_is_counted_by_its_kind_and_the_run_goes_on(
    server: StandIn, model: str, failure: Failure, golden: Golden
) -> None:
    """A deployment that fails and one that works do not disturb each other."""
    trace = [Request(0.01 * i, 10, 2, ("fine", model)[i % 2]) for i in range(8)]
    options = ReplayOptions(timeout_s=1.2)
    outcomes, run = replay(server.url, trace, ("fine", model), options)
    assert outcomes.failure.tolist() == [Failure.NONE, failure] * 4
    golden("controller", run.examples[failure])
    assert run.elapsed_s < 30, "nothing is waited for beyond the timeout"


def test_an_endpoint_that_is_not_there(server: StandIn) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    outcomes, run = replay(f"http://127.0.0.1:{port}", requests(5))
    assert (outcomes.failure == Failure.NO_CONNECTION).all()
    assert str(port) in run.examples[Failure.NO_CONNECTION]


def test_a_server_that_dies_in_the_middle_of_a_run() -> None:
    """The answers before its death are kept; the rest is lost or finds no connection, and the run ends."""

    async def run() -> Outcomes:
        with stand_in() as dying:
            schedule = make_schedule(requests(40, every_s=0.02, tokens=2), ("fine",), ScheduleOptions())
            run = Replay(schedule, resolve_endpoint(dying.url), ReplayOptions(timeout_s=PATIENCE_S))
            task = asyncio.create_task(run.run())
            await asyncio.sleep(0.01)
            while run.progress().completed < 3:
                await asyncio.sleep(0.01)
        return await task

    outcomes = asyncio.run(run())
    kinds = {Failure(int(kind)) for kind in np.unique(outcomes.failure)}
    assert Failure.NONE in kinds
    assert Failure.NO_CONNECTION in kinds
    assert kinds <= {Failure.NONE, Failure.NO_CONNECTION, Failure.CONNECTION_LOST}
    assert len(outcomes) == 40


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(b"220 smtp.example ESMTP\r\n\r\n", id="not-http"),
        pytest.param(b"HTTP/1.1 200 OK\r\n" + b"a" * 100_000, id="head-without-end"),
        pytest.param(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n-5\r\nhello",
            id="chunk-size",
        ),
    ],
)
def test_answers_that_are_no_http(answer: bytes, golden: Golden) -> None:
    async def run() -> tuple[Outcomes, Replay]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            await reader.read()  # until the client has left
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as broken:
            port = broken.sockets[0].getsockname()[1]
            schedule = make_schedule(requests(3), ("m",), ScheduleOptions())
            run = Replay(
                schedule, resolve_endpoint(f"http://127.0.0.1:{port}"), ReplayOptions(timeout_s=PATIENCE_S)
            )
            return await run.run(), run

    outcomes, run = asyncio.run(run())
    assert (outcomes.failure == Failure.MALFORMED).all()
    golden("controller", run.examples[Failure.MALFORMED])


def test_a_reset_before_an_answer_is_a_lost_connection() -> None:
    async def run() -> Outcomes:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )
            writer.transport.abort()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as broken:
            port = broken.sockets[0].getsockname()[1]
            schedule = make_schedule(requests(3), ("m",), ScheduleOptions())
            run = Replay(
                schedule, resolve_endpoint(f"http://127.0.0.1:{port}"), ReplayOptions(timeout_s=PATIENCE_S)
            )
            return await run.run()

    assert (asyncio.run(run()).failure == Failure.CONNECTION_LOST).all()


def test_beyond_the_bound_requests_are_refused_and_not_put_off() -> None:
    options = ReplayOptions(timeout_s=0.5, max_in_flight=7)
    with stand_in() as own:
        outcomes, run = replay(own.url, requests(20, every_s=0), ("silent",), options)
    assert outcomes.failure.tolist() == [Failure.TIMEOUT] * 7 + [Failure.REFUSED_BY_CLIENT] * 13
    assert np.isnan(outcomes.sent_s[7:]).all()
    assert len(own.bodies) == 7
    assert "7 requests" in run.examples[Failure.REFUSED_BY_CLIENT]


def test_what_is_given_up_is_taken_off_the_server() -> None:
    with stand_in() as own:
        outcomes, _ = replay(own.url, requests(3), ("hangs-in-the-middle",), ReplayOptions(timeout_s=1))
        deadline = time.monotonic() + PATIENCE_S
        while own.left < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert own.left == 3, "the server saw every one of them leave"
    assert (outcomes.failure == Failure.TIMEOUT).all()


def test_stopping_ends_the_run_at_once_with_what_there_is(server: StandIn) -> None:
    async def run() -> tuple[Outcomes, Replay]:
        schedule = make_schedule(requests(1000, every_s=0.02), ("fine",), ScheduleOptions())
        run = Replay(schedule, resolve_endpoint(server.url), ReplayOptions())
        task = asyncio.create_task(run.run())
        await asyncio.sleep(0.01)
        while run.progress().completed < 3:
            await asyncio.sleep(0.01)
        run.stop()
        outcomes = await task
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return outcomes, run

    outcomes, run_ = asyncio.run(run())
    assert run_.interrupted
    assert 3 <= len(outcomes) < 1000, "what was never due is not counted"
    assert set(outcomes.failure.tolist()) == {Failure.NONE, Failure.INTERRUPTED}


def test_connections_are_used_again() -> None:
    """Requests that each follow the answer to the one before do not need a connection each."""
    with stand_in() as own:
        replay(own.url, requests(5, every_s=0.3, tokens=1))
    assert len(own.clients) < 5


def test_a_shorter_answer_than_the_traces_is_told(server: StandIn) -> None:
    outcomes, _ = replay(server.url, requests(4, tokens=6), ("short",))
    found = summarize(outcomes).lengths
    assert (found.requests_of_other_output, found.output_tokens, found.asked_output_tokens) == (4, 8, 24)


@pytest.mark.parametrize(
    "prompts", [PromptOptions(kind="text"), PromptOptions(kind="text", chat=True)], ids=["text", "chat"]
)
def test_text_prompts(server: StandIn, prompts: PromptOptions) -> None:
    """The stand-in answers a chat with completion pieces and counts words."""
    outcomes, _ = replay(server.url, requests(3), options=ReplayOptions(timeout_s=30, prompts=prompts))
    assert (outcomes.failure == Failure.NONE).all()
    assert outcomes.input_tokens.tolist() == outcomes.asked_input_tokens.tolist()


def test_progress_is_told_while_it_runs(server: StandIn) -> None:
    told: list[Progress] = []

    async def run() -> None:
        schedule = make_schedule(requests(20, every_s=0.02), ("fine",), ScheduleOptions())
        await Replay(schedule, resolve_endpoint(server.url), ReplayOptions()).run(told.append, every_s=0.05)

    asyncio.run(run())
    assert len(told) > 2
    assert [p.begun for p in told] == sorted(p.begun for p in told)
    assert (told[-1].begun, told[-1].completed, told[-1].in_flight) == (20, 20, 0)


@pytest.mark.parametrize(
    "options", [{"timeout_s": 0}, {"timeout_s": float("nan")}, {"max_in_flight": 0}, {"key": "a\r\nHost: evil"}]
)
def test_options_that_cannot_be_used(options: dict) -> None:
    with pytest.raises(ConfigError):
        ReplayOptions(**options)


def test_more_connections_than_the_process_may_hold(server: StandIn) -> None:
    with pytest.raises(ConfigError, match="ulimit"):
        replay(server.url, requests(1), options=ReplayOptions(max_in_flight=2_000_000_000))
