"""The contest of variants: its arithmetic, its clients, and what the kept recording says."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
from aiohttp import web

from fingerprint.codec import from_json
from tests.bench.kept import read_kept
from tests.bench.variant_clients import Answer, Asked, answer_all, in_a_loop, p
from tests.bench.variant_contest import DIRECT, OURS, VariantContest, predicted, table

KEPT = Path(__file__).parent / "results" / "variant_contest_h200.json.gz"


def recording() -> VariantContest:
    return from_json(read_kept(KEPT), VariantContest, what=KEPT.name)


def test_the_simulator_predicts_loads_and_evictions_of_the_recording() -> None:
    found = recording()
    assert found.cold is not None
    loads, evictions = predicted(found, found.cold)
    assert abs(loads / found.cold.loads - 1) < 0.10
    assert abs(evictions / found.cold.evictions - 1) < 0.10


def test_no_request_of_the_recording_failed_and_both_sides_were_asked_the_same() -> None:
    found = recording()
    arms = {(arm.adapters, arm.round, arm.side): arm for arm in found.arms}
    assert len(arms) == len(found.arms) == 16
    for arm in found.arms:
        other = arms[arm.adapters, arm.round, DIRECT if arm.side == OURS else OURS]
        asked = {one.row: one.model for one in other.answers}
        assert not [one.error for one in arm.answers if one.error]
        assert all(asked[one.row] == one.model for one in arm.answers if one.row in asked)
    assert "| 128 | 0 | iserve |" in table(found)


def completions(tokens: int, failing: str = "") -> web.Application:
    """Return a server that streams so many words, and refuses the model ``failing``."""

    async def complete(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body["model"] == failing:
            return web.json_response({"error": {"message": "no such model"}}, status=404)
        response = web.StreamResponse()
        await response.prepare(request)
        for number in range(tokens):
            await response.write(f'data: {{"choices": [{{"text": " {body["model"]}{number}"}}]}}\n\n'.encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    return app


async def on_server(app: web.Application, asked: list[Asked], clients: int) -> tuple[list[Answer], list[Answer]]:
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with aiohttp.ClientSession() as session:
            one_by_one = await answer_all(session, url, asked)
        return one_by_one, await in_a_loop(url, asked, clients, 3600.0)
    finally:
        await runner.cleanup()


def test_every_request_is_sent_once_and_its_words_are_kept() -> None:
    asked = [Asked(model=f"m{number}-", prompt=(1, 2), tokens=3) for number in range(7)]
    one_by_one, in_loop = asyncio.run(on_server(completions(3), asked, clients=3))
    assert [one.text for one in one_by_one] == [" ".join(["", *(f"m{n}-{k}" for k in range(3))]) for n in range(7)]
    assert sorted((one.row, one.text) for one in in_loop) == [(one.row, one.text) for one in one_by_one]
    for one in (*one_by_one, *in_loop):
        assert one.is_whole
        assert one.tokens == 3
        assert 0 <= one.first_s <= one.last_s


def test_a_refused_request_is_an_error_and_no_answer() -> None:
    asked = [Asked(model=name, prompt=(1,), tokens=1) for name in ("good", "bad")]
    one_by_one, _ = asyncio.run(on_server(completions(1, failing="bad"), asked, clients=1))
    assert [bool(one.error) for one in one_by_one] == [False, True]
    assert [one.is_whole for one in one_by_one] == [True, False]
    assert one_by_one[1].error.startswith("404: ")


def test_percentiles_of_nothing_are_zero() -> None:
    assert p([], 99) == 0.0
    assert p([1.0, 2.0, 3.0], 50) == 2.0
