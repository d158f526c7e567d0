"""Conformance suites of trace formats.

    class TestMine(RequestFormatConformance):
        format = MINE
        published: ClassVar = {"mine": ("lines\n", [Request(...)])}
        step_s, from_first, writable = 1e-9, False, streams()

``FormatConformance`` holds the laws of every format, ``RequestFormatConformance`` also those of a format of single
requests, which can be written.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fingerprint.errors import BadInputError, IserveError
from traces.formats import FORMATS, TraceFormat
from traces.reading import open_trace
from traces.request import Request
from traces.writing import write_trace

__all__ = [
    "BLOCKS",
    "MODELS",
    "FormatConformance",
    "RequestFormatConformance",
    "every_suite",
    "read_or_refused",
    "streams",
    "write",
]

PAGE = Path(__file__).parents[2] / "docs" / "traces.md"
TOKENS = st.integers(1, 10**6)
MODELS = st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=12)
NO_MODEL, NO_BLOCKS = st.just(""), st.just(())
BLOCKS = st.lists(st.integers(0, 10**6), max_size=5).map(tuple)


def write(folder: Path, content: str | bytes, name: str = "trace") -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def streams(
    *, models: st.SearchStrategy[str] = NO_MODEL, blocks: st.SearchStrategy[tuple[int, ...]] = NO_BLOCKS
) -> st.SearchStrategy[list[Request]]:
    """Draw requests in the order of their times."""
    times = st.lists(st.floats(0, 10**6), min_size=1, max_size=8).map(sorted)
    return times.flatmap(
        lambda chosen: st.tuples(*(st.builds(Request, st.just(t), TOKENS, TOKENS, models, blocks) for t in chosen))
    ).map(list)


class FormatConformance:
    """Laws of any format; name it, and make a small trace of it in a folder."""

    format: ClassVar[TraceFormat]

    @pytest.fixture
    def trace(self, tmp_path: Path) -> Path:
        raise NotImplementedError

    def test_it_is_registered_under_its_name(self) -> None:
        assert FORMATS[self.format.name] is self.format

    def test_it_says_what_it_is(self) -> None:
        """In refusals, and in the table of its page."""
        assert self.format.describes
        assert f"\n| `{self.format.name}` |" in PAGE.read_text()

    def test_it_is_recognised(self, trace: Path) -> None:
        assert open_trace(trace).format is self.format

    def test_by_its_name_it_is_read_likewise(self, trace: Path) -> None:
        opened = open_trace(trace, self.format.name)
        assert list(islice(opened, 100)) == list(islice(open_trace(trace), 100))
        assert opened.format is self.format

    def test_no_further_format_takes_its_first_line(self, trace: Path) -> None:
        if trace.is_file():
            first = trace.read_text().splitlines()[0]
            assert [name for name, known in FORMATS.items() if known.recognises(first)] == [self.format.name]

    def test_requests_are_in_order_with_tokens(self, trace: Path) -> None:
        requests = list(islice(open_trace(trace), 100))
        assert requests
        times = [request.arrival_s for request in requests]
        assert times == sorted(times)
        assert times[0] >= 0
        assert all(request.input_tokens > 0 and request.output_tokens > 0 for request in requests)

    def test_one_that_is_only_read_is_not_written(self, tmp_path: Path) -> None:
        if self.format.write is None:
            with pytest.raises(BadInputError, match="only read"):
                write_trace(tmp_path / "new", [Request(0, 1, 1)], self.format.name)
            assert not (tmp_path / "new").exists()


class RequestFormatConformance(FormatConformance):
    """Laws of a format of single requests.

    Attributes:
        published: lines as the publisher has them, and their requests, by what is special in them.
        step_s: resolution of written times; 0: exact.
        from_first: whether the clock starts at the first request.
        writable: requests that the format can hold.
    """

    published: ClassVar[Mapping[str, tuple[str, list[Request]]]]
    step_s: ClassVar[float]
    from_first: ClassVar[bool]
    writable: ClassVar[st.SearchStrategy[list[Request]]]

    @pytest.fixture
    def trace(self, tmp_path: Path) -> Path:
        content, _ = next(iter(self.published.values()))
        return write(tmp_path, content)

    @pytest.mark.parametrize("zipped", [False, True], ids=["plain", "gzip"])
    def test_published_rows(self, zipped: bool, tmp_path: Path) -> None:
        for case, (content, expected) in self.published.items():
            data = gzip.compress(content.encode()) if zipped else content.encode()
            opened = open_trace(write(tmp_path, data))
            assert list(opened) == expected, case
            assert opened.format is self.format, case

    def test_a_format_by_name(self, tmp_path: Path) -> None:
        for case, (content, expected) in self.published.items():
            opened = open_trace(write(tmp_path, content), self.format.name)
            assert list(opened) == expected, case
            assert opened.format.name == self.format.name

    @pytest.mark.slow
    def test_what_is_written_is_read_again(self, tmp_path: Path) -> None:
        """Times to the format's step; some clocks start at the first request."""

        @settings(deadline=None)
        @given(requests=self.writable)
        def law(requests: list[Request]) -> None:
            path = tmp_path / "trace"
            assert write_trace(path, requests, self.format.name) == len(requests)
            again = list(open_trace(path))
            start_s = requests[0].arrival_s if self.from_first else 0.0
            for before, after in zip(requests, again, strict=True):
                assert after.arrival_s == pytest.approx(before.arrival_s - start_s, abs=2 * self.step_s)
                assert (after.input_tokens, after.output_tokens) == (before.input_tokens, before.output_tokens)
                assert (after.model, after.prefix_blocks) == (before.model, before.prefix_blocks)
            assert open_trace(path).format.name == self.format.name

        law()

    def test_no_bytes_make_a_traceback(self, tmp_path: Path) -> None:
        """Behind each first line that the format is published with."""
        headers = sorted({content.splitlines(keepends=True)[0] for content, _ in self.published.values()})

        @settings(max_examples=50, deadline=None)
        @given(header=st.sampled_from(headers), body=_BODIES, zipped=st.booleans())
        def law(header: str, body: bytes, zipped: bool) -> None:
            data = header.encode() + body
            read_or_refused(write(tmp_path, gzip.compress(data) if zipped else data))

        law()


_BODIES = st.one_of(
    st.binary(max_size=300), st.text(alphabet='0123456789,.-:"{} \n', max_size=300).map(str.encode)
)


def read_or_refused(path: Path) -> None:
    """Read a file to its end: requests in order with tokens, or an error of our own."""
    last_s = 0.0
    try:
        for request in open_trace(path):
            assert request.arrival_s >= last_s
            assert request.input_tokens > 0
            assert request.output_tokens > 0
            last_s = request.arrival_s
    except IserveError:
        pass


def every_suite(kind: type[FormatConformance] = FormatConformance) -> Iterator[type[FormatConformance]]:
    """Yield the subclasses that name a format."""
    for one in kind.__subclasses__():
        if "format" in vars(one):
            yield one
        yield from every_suite(one)
