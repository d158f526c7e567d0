"""Limits of what a prober reads of an answer."""

from __future__ import annotations

import asyncio

from daemon.probe import Prober

PART = b"x" * (1 << 20)
PARTS = 400  # far more than the buffers of a loopback connection hold


def test_a_completion_without_an_end_is_read_no_further_than_any_other_answer():
    async def ask() -> tuple[bool, int]:
        sent, is_over = [], asyncio.Event()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")  # the answer ends with the connection
            try:
                while len(sent) < PARTS:
                    writer.write(PART)
                    await writer.drain()
                    sent.append(PART)
            except ConnectionError:  # the prober has read enough
                pass
            writer.close()
            is_over.set()

        async with await asyncio.start_server(answer, "127.0.0.1") as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            async with Prober(timeout_s=1.0) as prober:
                is_answered = await prober.completes(url, {"prompt": [1]}, None)
            await is_over.wait()
        return is_answered, len(sent)

    is_answered, sent = asyncio.run(ask())
    assert is_answered
    assert sent < PARTS
