"""Lines of a text file, plain or gzip, with every way in which they can be bad as one error.

Constant memory: a block at a time, and a bound on the line.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from fingerprint.errors import BadInputError, NotFoundError

__all__ = ["MAX_BLANK_LINES", "MAX_LINE_BYTES", "Lines"]

# The longest honest line holds the prefix blocks of one prompt: 18,000 ids of 7 bytes. Also csv's own bound.
MAX_LINE_BYTES = 128 * 1024
# In a row. A megabyte of gzip can hold a gigabyte of them, which would be read for minutes without a word.
MAX_BLANK_LINES = 10_000
_BLOCK_BYTES = 64 * 1024
_GZIP_MAGIC = b"\x1f\x8b"


class Lines:
    """Iterator over a file's lines, without their ends; ``number`` is the line last given, from 1.

    Gzip is recognised by the file's first bytes, not by its name. A byte order mark is dropped.

    Raises, at the first line that shows it:
        NotFoundError: there is no such file.
        BadInputError: it cannot be read, its gzip stream is damaged or ends early, a line is over
            ``MAX_LINE_BYTES`` or is not UTF-8, or more than ``MAX_BLANK_LINES`` follow one another.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.number = 0

    def error(self, what: str, *, line: int | None = None) -> BadInputError:
        """Return the error that says ``what`` is wrong in the line that was given last."""
        return BadInputError(f"{self.path}, line {line or self.number}: {what}")

    def __iter__(self) -> Iterator[str]:
        blank_lines = 0
        for line in self._raw():
            self.number += 1
            try:
                text = line.decode()
            except UnicodeDecodeError as error:
                raise self.error(f"not UTF-8 text ({error.reason} at byte {error.start + 1})") from error
            if text and not text.isspace():
                blank_lines = 0
            elif (blank_lines := blank_lines + 1) > MAX_BLANK_LINES:
                raise self.error(f"more than {MAX_BLANK_LINES} blank lines in a row; take them out of the file")
            yield text

    def _raw(self) -> Iterator[bytes]:
        try:
            with self.path.open("rb") as file:
                is_gzip = file.read(2) == _GZIP_MAGIC
                file.seek(0)
                if is_gzip:
                    with gzip.open(file) as unzipped:
                        yield from self._split(unzipped)
                else:
                    yield from self._split(file)
        except FileNotFoundError as error:
            raise NotFoundError(f"there is no trace file {self.path}") from error
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            where = "after this line" if self.number else "before its first line ends"
            raise self.error(
                f"the gzip stream is damaged or ends early {where} ({error}); copy the file again",
                line=self.number or 1,
            ) from error
        except OSError as error:
            raise BadInputError(f"{self.path}: cannot be read: {error.strerror or error}") from error

    def _split(self, file: IO[bytes] | gzip.GzipFile) -> Iterator[bytes]:
        rest = b""
        first = True
        while block := file.read(_BLOCK_BYTES):
            if first:
                block, first = block.removeprefix(b"\xef\xbb\xbf"), False
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                self._check_length(line)
                yield line.removesuffix(b"\r")
            self._check_length(rest)
        if rest:
            yield rest.removesuffix(b"\r")

    def _check_length(self, line: bytes) -> None:
        if len(line) > MAX_LINE_BYTES:
            raise self.error(
                f"longer than {MAX_LINE_BYTES} bytes; a trace has one request on a line", line=self.number + 1
            )
