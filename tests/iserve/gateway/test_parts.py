"""The gateway's parts by themselves: frames, the queue, the reading of routes."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from iserve.gateway.dispatch import Deployment
from iserve.gateway.errors import ApiError
from iserve.gateway.sse import FrameRelay, Usage, error_frame, usage_of
from iserve.route_table import Route, WorkerTarget

FRAME = st.text(alphabet="ab {}\"'é:", max_size=8).map(lambda text: b"data: " + text.encode())


def cut(data: bytes, at: list[int]) -> list[bytes]:
    places = [0, *sorted(place % (len(data) + 1) for place in at), len(data)]
    return [data[a:b] for a, b in pairwise(places)]


class TestFrames:
    @given(
        frames=st.lists(FRAME, max_size=6),
        end=st.sampled_from([b"\n\n", b"\r\n\r\n"]),
        rest=FRAME,
        at=st.lists(st.integers(0, 200), max_size=8),
    )
    def test_whole_frames_pass_in_order_and_a_part_never(self, frames, end, rest, at) -> None:
        whole = b"".join(frame + end for frame in frames)
        buffer = FrameRelay()
        passed = [buffer.feed(chunk) for chunk in cut(whole + rest, at)]
        assert b"".join(passed) == whole
        assert all(piece == b"" or piece.endswith(end) for piece in passed)

    @given(at=st.lists(st.integers(0, 400), max_size=8))
    def test_the_end_and_the_usage_are_seen_however_it_is_cut(self, at) -> None:
        usage = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
        chunks = [{"choices": [{"text": "a"}], "usage": None}, {"choices": [], "usage": usage}]
        stream = b"".join(b"data: %s\n\n" % json.dumps(chunk).encode() for chunk in chunks) + b"data: [DONE]\n\n"
        buffer = FrameRelay()
        for chunk in cut(stream, at):
            buffer.feed(chunk)
        assert buffer.is_done
        assert not buffer.ended_in_error
        assert buffer.usage() == Usage(prompt_tokens=3, completion_tokens=4)

    @given(
        frames=st.lists(FRAME | st.just(b"data: [DONE]"), max_size=6),
        end=st.sampled_from([b"\n\n", b"\r\n\r\n"]),
        at=st.lists(st.integers(0, 200), max_size=8),
    )
    def test_what_is_plain_passes_as_it_is_and_is_not_the_end(self, frames, end, at) -> None:
        buffer = FrameRelay()
        for chunk in cut(b"".join(frame + end for frame in frames), at):
            is_plain = buffer.is_plain(chunk)
            passed = buffer.feed(chunk)
            assert not is_plain or (passed == chunk and not buffer.is_done and not buffer.broken_frame)
        assert FrameRelay().is_plain(b"data: a" + end)

    def test_done_inside_a_frame_is_not_the_end(self) -> None:
        buffer = FrameRelay()
        buffer.feed(b'data: {"text": "data: [DONE]"}\n\n')
        assert not buffer.is_done
        buffer.feed(b"data: [DONE]")  # without its end: cut
        assert not buffer.is_done

    def test_a_long_stream_is_not_kept(self) -> None:
        buffer = FrameRelay()
        for _ in range(10_000):
            buffer.feed(b"data: " + b"x" * 100 + b"\n\n")
        assert sum(map(len, buffer._tail)) < 20_000

    def test_an_overlong_frame_passes_in_pieces_and_an_error_starts_anew(self) -> None:
        buffer = FrameRelay()
        big = b"data: " + b"x" * 2_000_000
        assert buffer.feed(big) == big
        assert buffer.broken_frame
        assert not buffer.is_plain(b"data: a\n\n")
        assert error_frame("m", code="c", after_broken_frame=True).startswith(b"\n\ndata: {")
        assert buffer.feed(b"\n\n") == b"\n\n"
        assert not buffer.broken_frame

    @pytest.mark.parametrize(
        "body", [b"", b"[", b'{"usage": 3}', b"\xff", b"[" * 5000, b'{"usage": {"prompt_tokens": "x"}}']
    )
    def test_usage_of_nonsense_is_none(self, body) -> None:
        assert usage_of(body) is None


def deployment(*limits: int, max_queue: int = 100) -> Deployment:
    workers = tuple(
        WorkerTarget(worker_id=f"w{i}", url=f"http://127.0.0.1:{i + 1}", ready=True, max_outstanding=limit)
        for i, limit in enumerate(limits)
    )
    route = Route(name="m", model="m", created=0, max_context_tokens=1, workers=workers)
    return Deployment(route, max_queue, max_wait_s=60.0)


class TestQueue:
    @given(
        limits=st.lists(st.integers(1, 3), min_size=1, max_size=3),
        events=st.lists(st.tuples(st.sampled_from(["arrive", "finish", "leave"]), st.integers(0, 9)), max_size=40),
    )
    def test_laws(self, limits, events) -> None:
        """Workers are within their limits, none has room while a request waits, and turns follow arrivals."""

        async def run() -> None:
            line = deployment(*limits)
            waiting: dict[int, asyncio.Task] = {}
            running: dict[int, WorkerTarget] = {}
            begun: list[int] = []
            for ticket, (event, which) in enumerate(events):
                if event == "arrive":
                    waiting[ticket] = asyncio.create_task(line.acquire(ticket))
                elif event == "finish" and running:
                    line.release(running.pop(sorted(running)[which % len(running)]))
                elif event == "leave" and waiting:
                    waiting.pop(sorted(waiting)[which % len(waiting)]).cancel()
                for _ in range(4):
                    await asyncio.sleep(0)
                for number in [n for n, task in waiting.items() if task.done()]:
                    running[number] = waiting.pop(number).result()
                    begun.append(number)
                per_worker = Counter(target.worker_id for target in running.values())
                assert all(per_worker[f"w{i}"] <= limit for i, limit in enumerate(limits))
                assert line.num_outstanding == len(running)
                assert line.num_waiting == len(waiting)
                assert not waiting or len(running) == sum(limits)
            assert begun == sorted(begun)
            for task in waiting.values():
                task.cancel()
            await asyncio.gather(*waiting.values(), return_exceptions=True)
            assert line.num_waiting == 0

        asyncio.run(run())

    @given(
        limits=st.lists(st.integers(1, 4), min_size=1, max_size=4),
        events=st.lists(
            st.tuples(st.sampled_from(["arrive", "arrive", "finish", "turn"]), st.integers(0, 9)),
            min_size=10,
            max_size=40,
        ),
    )
    @example(limits=[2, 2], events=[("arrive", 0), ("arrive", 0), ("finish", 1), ("arrive", 0)])
    @example(limits=[2, 2], events=[("arrive", 0), ("arrive", 0), ("turn", 0), ("arrive", 0), ("arrive", 0)])
    def test_laws_of_the_choice(self, limits, events) -> None:
        """A request gets the ready worker with room that has the fewest under way.

        Of several such it gets the one that got none for longest; a worker that is not ready gets none, and the
        rest have what it would have got.
        """

        async def run() -> None:
            line = deployment(*limits)
            running: list[WorkerTarget] = []
            last: dict[str, int] = {}
            for ticket, (event, which) in enumerate(events):
                if event == "finish" and running:
                    line.release(running.pop(which % len(running)))
                elif event == "turn":  # ready or no longer, as the controller sees it
                    workers = list(line.route.workers)
                    turned = workers[which % len(workers)]
                    workers[which % len(workers)] = replace(turned, ready=not turned.ready)
                    line.update(replace(line.route, workers=tuple(workers)), 100, 60.0)
                elif event == "arrive":
                    under_way = Counter(target.worker_id for target in running)
                    can = [
                        worker
                        for worker in line.route.workers
                        if worker.ready and under_way[worker.worker_id] < worker.max_outstanding
                    ]
                    if not can:
                        continue
                    chosen = await line.acquire(ticket)
                    fewest = min(under_way[worker.worker_id] for worker in can)
                    alike = [w.worker_id for w in can if under_way[w.worker_id] == fewest]
                    assert chosen.worker_id in alike
                    assert last.get(chosen.worker_id, -1) == min(last.get(one, -1) for one in alike)
                    last[chosen.worker_id] = ticket
                    running.append(chosen)

        asyncio.run(run())

    @given(number=st.integers(1, 4), arrivals=st.integers(0, 30))
    def test_what_comes_is_spread_evenly(self, number, arrivals) -> None:
        async def run() -> None:
            line = deployment(*[100] * number)
            got = Counter([(await line.acquire(ticket)).worker_id for ticket in range(arrivals)])
            shares = [got[f"w{i}"] for i in range(number)]
            assert max(shares) - min(shares) <= 1

        asyncio.run(run())

    def test_who_is_taken_in_is_counted_and_who_is_refused_or_tried_again_is_not(self, monkeypatch) -> None:
        async def run() -> None:
            line = deployment(1, max_queue=1)
            assert line.requests_per_s is None
            await line.acquire(0)
            waits = asyncio.create_task(line.acquire(1))
            await asyncio.sleep(0)
            again = asyncio.create_task(line.acquire(0, avoid="http://127.0.0.1:1"))
            with pytest.raises(ApiError, match="already wait"):
                await line.acquire(2)
            now_s = time.monotonic()
            monkeypatch.setattr(line._rate_window, "_clock", lambda: now_s + 60)
            assert line.requests_per_s == pytest.approx(2 / 60, rel=0.05)
            for task in (waits, again):
                task.cancel()
            await asyncio.gather(waits, again, return_exceptions=True)

        asyncio.run(run())

    def test_a_turn_given_in_the_moment_of_leaving_is_given_on(self) -> None:
        async def run() -> None:
            line = deployment(1)
            first = await line.acquire(0)
            second = asyncio.create_task(line.acquire(1))
            await asyncio.sleep(0)
            line.release(first)  # the turn is the second's now
            second.cancel()  # which leaves before it learns of it
            with pytest.raises(asyncio.CancelledError):
                await second
            assert line.num_outstanding == 0
            assert (await line.acquire(2)).worker_id == "w0"

        asyncio.run(run())

    def test_a_retry_keeps_its_place_before_later_arrivals(self) -> None:
        async def run() -> None:
            line = deployment(1)
            held = await line.acquire(5)
            later = asyncio.create_task(line.acquire(7))
            await asyncio.sleep(0)
            again = asyncio.create_task(line.acquire(3))  # arrived before 7, failed elsewhere, is back
            await asyncio.sleep(0)
            line.release(held)
            await asyncio.sleep(0.01)
            assert again.done()
            assert not later.done()
            later.cancel()

        asyncio.run(run())

    def test_avoided_worker_is_the_last_choice_not_none(self) -> None:
        async def run() -> None:
            line = deployment(2, 1)
            avoid = line.route.workers[0].url
            assert (await line.acquire(0, avoid)).worker_id == "w1"
            assert (await line.acquire(1, avoid)).worker_id == "w0"

        asyncio.run(run())

    def test_who_waits_for_a_busy_worker_is_told_so(self) -> None:
        async def run() -> None:
            line = deployment(1)
            line.max_wait_s = 0.01
            await line.acquire(0)
            with pytest.raises(ApiError, match="busy") as caught:
                await line.acquire(1)
            assert (caught.value.status, caught.value.code) == (503, "queue_timeout")
            assert line.num_waiting == 0

        asyncio.run(run())

    def test_a_full_queue_refuses(self) -> None:
        async def run() -> None:
            line = deployment(1, max_queue=0)
            await line.acquire(0)
            with pytest.raises(ApiError) as caught:
                await line.acquire(1)
            assert caught.value.status == 429

        asyncio.run(run())
