"""Write a stream as a trace file: whole or not at all."""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from fingerprint.errors import BadInputError
from fingerprint.output_file import output_file
from traces.formats import FORMATS
from traces.request import Request
from traces.text_reader import MAX_LINE_BYTES

__all__ = ["write_trace"]


def write_trace(path: str | Path, requests: Iterable[Request], format: str = "csv") -> int:  # noqa: A002
    """Write the requests and return how many there were; a path that ends in ``.gz`` is written as gzip.

    ``csv`` keeps everything. Each other format keeps what it has columns for, and refuses a request with more.

    Raises:
        BadInputError: no requests, an unknown format, a request that the format cannot hold, a line too long to be
            read again, or a path that cannot be written. Nothing is left behind then; a file that was there stays.
    """
    path = output_file(Path(path))
    if format not in FORMATS:
        raise BadInputError(f"there is no trace format {format!r} to write; there are {', '.join(_written())}")
    if FORMATS[format].write is None:
        raise BadInputError(
            f"{format} describes traffic, not requests; it is only read. Write one of {', '.join(_written())}"
        )
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            if path.suffix == ".gz":
                # No name and no time inside: equal traces make equal files.
                with gzip.GzipFile("", "wb", fileobj=file, mtime=0) as zipped:
                    count = _write_lines(zipped, requests, format)
            else:
                count = _write_lines(file, requests, format)
        if count == 0:
            raise BadInputError(f"there are no requests to write to {path}")
        temporary.replace(path)
    except OSError as error:
        raise BadInputError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return count


def _written() -> list[str]:
    return [name for name, known in FORMATS.items() if known.write is not None]


def _write_lines(file: IO[bytes] | gzip.GzipFile, requests: Iterable[Request], format_name: str) -> int:
    count = 0

    def counted() -> Iterable[Request]:
        nonlocal count
        for request in requests:
            count += 1
            yield request

    write = FORMATS[format_name].write
    assert write is not None
    for line in write(counted()):
        data = line.encode() + b"\n"
        if len(data) > MAX_LINE_BYTES:
            raise BadInputError(
                f"request {count} makes a line of {len(data)} bytes; "
                f"one over {MAX_LINE_BYTES} could not be read again"
            )
        file.write(data)
    return count
