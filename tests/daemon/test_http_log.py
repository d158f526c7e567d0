"""A request that is not valid HTTP is one line of the log; an error of our own keeps its traceback."""

from __future__ import annotations

import asyncio
import logging

import pytest
from aiohttp import web

from daemon.http_log import log_bad_requests_in_one_line

BAD = {
    "version": b"GET / HTTP/9.9\r\nHost: x\r\n\r\n",
    "header": b"GET / HTTP/1.1\r\nHost x\r\n\r\n",
    "escape": b"GET /\x1b[31m HTTP/1.1\r\nHost: x\r\n\r\n",
    "two lengths": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    "two framings": b"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunk": b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n\r\n",
    "large": b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 20_000 + b"\r\n\r\n",
    "gzip": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\nabcd",
    "bug": b"GET /bug HTTP/1.1\r\nHost: x\r\n\r\n",
}


async def answer(request: web.Request) -> web.Response:
    if request.path == "/bug":
        raise ValueError("ours")
    await request.read()
    return web.Response()


async def send_all() -> None:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    for request in BAD.values():
        reader, writer = await asyncio.open_connection(*runner.addresses[0][:2])
        writer.write(request)
        await reader.read(1)  # it is answered or refused: the line is written
        writer.close()
    await runner.cleanup()


def test_bad_requests_are_one_line_each(caplog: pytest.LogCaptureFixture) -> None:
    log_bad_requests_in_one_line()
    log_bad_requests_in_one_line()  # once is enough
    with caplog.at_level(logging.INFO, logger="aiohttp.server"):
        asyncio.run(send_all())
    *bad, ours = caplog.records
    assert len(bad) >= len(BAD) - 1  # a body that breaks off is read twice
    for record in bad:
        assert record.exc_info is None
        line = record.getMessage()
        assert line.isprintable()
        assert len(line) < 500
    assert ours.exc_info
    assert isinstance(ours.exc_info[1], ValueError)
