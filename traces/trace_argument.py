"""A trace by what a person types: a file or folder, or ``synthetic:NAME`` for a stand-in that needs no file."""

from __future__ import annotations

from traces.reading import open_trace
from traces.request import RequestStream
from traces.synthetic import standin

__all__ = ["SYNTHETIC", "requests_of"]

SYNTHETIC = "synthetic:"


def requests_of(
    source: str,
    *,
    format: str | None = None,  # noqa: A002  as in open_trace
    strict: bool = False,
    seed: int = 0,
) -> RequestStream:
    """Return the requests of ``source``. ``format`` and ``strict`` are for files, ``seed`` for synthetic traces.

    Raises:
        NotFoundError: no such file, or no such stand-in.
        BadInputError: as ``open_trace``.
    """
    if source.startswith(SYNTHETIC):
        return standin(source.removeprefix(SYNTHETIC)).requests(seed=seed)
    return open_trace(source, format, strict=strict)
