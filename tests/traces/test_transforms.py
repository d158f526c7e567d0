"""Streams out of streams: nothing is lost or reordered but what was asked for."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fingerprint.errors import ConfigError
from traces.popularity import Distinct, Zipf
from traces.request import Request
from traces.transforms import assign_models, cap_lengths, clip, merge

REQUESTS = st.builds(
    Request,
    st.floats(0, 100),
    st.integers(1, 5000),
    st.integers(1, 5000),
    st.sampled_from("abc"),
    st.lists(st.integers(0, 9), max_size=4).map(tuple),
)
STREAMS = st.lists(REQUESTS, max_size=20).map(lambda found: sorted(found, key=lambda request: request.arrival_s))


@given(st.lists(STREAMS, max_size=3))
def test_merge_holds_all_in_order(streams: list[list[Request]]) -> None:
    merged = list(merge(*streams))
    everything = [request for stream in streams for request in stream]
    # A stable sort of them one after the other: of equals, the earlier stream's come first.
    assert merged == sorted(everything, key=lambda request: request.arrival_s)


@given(STREAMS)
def test_the_parts_of_all_models_merge_to_the_whole(stream: list[Request]) -> None:
    parts = [[request for request in stream if request.model == model] for model in "abc"]
    whole = list(merge(*parts))
    assert sorted(whole, key=repr) == sorted(stream, key=repr)
    assert [request.arrival_s for request in whole] == [request.arrival_s for request in stream]


@given(STREAMS, st.floats(0, 50), st.floats(1, 50))
def test_clip_is_a_window_with_its_own_clock(stream: list[Request], start_s: float, length_s: float) -> None:
    end_s = start_s + length_s
    clipped = list(clip(stream, start_s, end_s))
    inside = [request for request in stream if start_s <= request.arrival_s < end_s]
    assert [request.arrival_s for request in clipped] == [request.arrival_s - start_s for request in inside]
    assert [request.input_tokens for request in clipped] == [request.input_tokens for request in inside]


def test_clip_reads_no_further_than_its_end() -> None:
    def endless() -> Iterator[Request]:
        for second in range(1000):
            assert second <= 5
            yield Request(float(second), 1, 1)

    assert len(list(clip(endless(), 0, 5))) == 5


@given(
    STREAMS,
    st.one_of(st.none(), st.integers(1, 3000)),
    st.one_of(st.none(), st.integers(1, 3000)),
    st.one_of(st.none(), st.integers(2, 3000)),
)
def test_capped_lengths_fit(
    stream: list[Request], max_input: int | None, max_output: int | None, context: int | None
) -> None:
    capped = list(
        cap_lengths(stream, max_input_tokens=max_input, max_output_tokens=max_output, context_tokens=context)
    )
    for before, after in zip(stream, capped, strict=True):
        assert (after.arrival_s, after.model) == (before.arrival_s, before.model)
        assert 1 <= after.input_tokens <= min(before.input_tokens, max_input or before.input_tokens)
        assert 1 <= after.output_tokens <= min(before.output_tokens, max_output or before.output_tokens)
        assert after.input_tokens + after.output_tokens <= (context or math.inf)
        assert after.prefix_blocks == before.prefix_blocks[: len(after.prefix_blocks)]
    once_more = cap_lengths(
        capped, max_input_tokens=max_input, max_output_tokens=max_output, context_tokens=context
    )
    assert [(r.input_tokens, r.output_tokens) for r in once_more] == [
        (r.input_tokens, r.output_tokens) for r in capped
    ]


def test_the_prompt_gives_way_before_the_answer_and_takes_its_blocks_along() -> None:
    four_blocks = Request(0.0, 2048, 500, "", (1, 2, 3, 4))
    assert list(cap_lengths([four_blocks], context_tokens=1524)) == [Request(0.0, 1024, 500, "", (1, 2))]
    assert list(cap_lengths([four_blocks], context_tokens=400)) == [Request(0.0, 1, 399, "", (1,))]
    assert list(cap_lengths([four_blocks], context_tokens={"": 400})) == [Request(0.0, 1, 399, "", (1,))]
    assert list(cap_lengths([four_blocks], context_tokens={"another": 400})) == [four_blocks]
    assert list(cap_lengths([four_blocks], max_input_tokens=1100)) == [Request(0.0, 1100, 500, "", (1, 2, 3))]


@given(STREAMS, st.integers(0, 99))
def test_assigning_models_changes_nothing_else(stream: list[Request], seed: int) -> None:
    assigned = list(assign_models(iter(stream), ["x", "y"], Zipf(), seed=seed))
    assert {request.model for request in assigned} <= {"x", "y"}
    assert [(r.arrival_s, r.input_tokens, r.prefix_blocks) for r in assigned] == [
        (r.arrival_s, r.input_tokens, r.prefix_blocks) for r in stream
    ]
    assert assigned == list(assign_models(iter(stream), ["x", "y"], Zipf(), seed=seed))


def test_a_longer_stream_begins_with_the_same_models() -> None:
    def models(count: int) -> list[str]:
        stream = (Request(float(t), 1, 1) for t in range(count))
        return [request.model for request in assign_models(stream, "abcd", Zipf(), seed=5)]

    assert models(9000)[:5000] == models(5000)
    in_turn = assign_models((Request(float(t), 1, 1) for t in range(9000)), "abc", Distinct(), seed=0)
    assert [request.model for request in in_turn] == list("abc") * 3000


@pytest.mark.parametrize(
    "act",
    [
        pytest.param(lambda: clip([], 5, 5), id="empty-window"),
        pytest.param(lambda: clip([], -1, 5), id="before-the-trace"),
        pytest.param(lambda: clip([], 0, math.nan), id="nan"),
        pytest.param(lambda: assign_models([], [], Zipf(), seed=0), id="no-models"),
        pytest.param(lambda: assign_models([], ["a", "a"], Zipf(), seed=0), id="one-model-twice"),
        pytest.param(lambda: cap_lengths([], max_input_tokens=0), id="no-input"),
        pytest.param(lambda: cap_lengths([], max_output_tokens=-1), id="negative-output"),
        pytest.param(lambda: cap_lengths([], context_tokens=1), id="context-of-one"),
        pytest.param(lambda: cap_lengths([], context_tokens={"a": 9, "b": 1}), id="context-of-one-model"),
    ],
)
def test_what_is_refused_at_once(act: object) -> None:
    with pytest.raises(ConfigError):
        act()  # type: ignore[operator]
