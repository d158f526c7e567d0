"""The pure parts: HTTP and event streams cut anywhere, schedules, prompts, addresses."""

from __future__ import annotations

import itertools
import json
from functools import partial
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fingerprint.errors import BadInputError, ConfigError, NotFoundError, UnavailableError
from iserve.replay import schedule as schedule_module
from iserve.replay.endpoint import resolve_endpoint
from iserve.replay.inflight_request import MAX_EVENT_BYTES, InflightRequest
from iserve.replay.prompts import FIRST_ID, PromptOptions, Prompts
from iserve.replay.runner import _calm_collector
from iserve.replay.schedule import ScheduleOptions, make_schedule
from iserve.replay.stream_events import error_words
from iserve.sse import FrameBuffer, event_data
from tests.golden_words import Golden
from traces.outcomes import Failure
from traces.request import PREFIX_BLOCK_TOKENS, Request

EVENTS = [b'{"choices":[{"text":"a"}]}', b'{"choices":[{"text":"\\u00e9"}]}', b"[DONE]"]
STREAM = b"".join(b"data: " + event + b"\n\n" for event in EVENTS)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    ends = sorted({place % (len(data) + 1) for place in places} | {0, len(data)})
    return [data[a:b] for a, b in itertools.pairwise(ends)]


def sent(status: int = 200, content_type: bytes = b"text/event-stream") -> InflightRequest:
    request = InflightRequest(0, 10, lambda _: None)
    request.started(status, content_type)
    return request


@given(places=st.lists(st.integers(0, 10_000), max_size=12), line_end=st.sampled_from([b"\n", b"\r\n"]))
def test_a_stream_cut_anywhere_is_the_same_stream(places: list[int], line_end: bytes) -> None:
    body = (b": comment\n\n" + STREAM + b"event: x\n\n").replace(b"\n", line_end)
    frames, found = FrameBuffer(), []
    for part in cut(body, places):
        found += event_data(frames.feed(part))
    assert found == EVENTS


@given(st.sampled_from([200, 429, 503]), st.binary(max_size=400), st.lists(st.integers(0, 400), max_size=5))
def test_no_bytes_whatever_raise_anything(status: int, noise: bytes, places: list[int]) -> None:
    for prefix in (b"", b"data: ", b"data: {"):
        request = sent(status)
        for part in cut(prefix + noise, places):
            request.feed(part, 1.0)
        request.ended()
        assert request.over


@pytest.mark.parametrize(
    "part",
    [b"x" * 1000, b"data: " + b"x" * 1000 + b"\n"],
)
def test_an_event_without_an_end_is_given_up_at_the_bound(part: bytes, golden: Golden) -> None:
    request = sent()
    for number in range(MAX_EVENT_BYTES // 1000 + 2):
        request.feed(part, number)
    assert request.failure is Failure.MALFORMED
    golden("controller", request.message)


def test_a_line_of_no_known_kind_is_no_event_stream(golden: Golden) -> None:
    request = sent()
    request.feed(b"<html>\n\n", 1.0)
    golden("controller", request.message)
    assert request.failure == Failure.MALFORMED


def test_a_refusal_without_an_end_is_given_up_at_the_bound() -> None:
    request = sent(429, b"application/json")
    for _ in range(100):
        request.feed(b"x" * 1000, 1.0)
    assert request.failure is Failure.RATE_LIMITED


def test_data_of_several_lines_is_one_event() -> None:
    assert event_data(b'data: {"a":\ndata: 1}\n\n') == [b'{"a":\n1}']


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"error": {"message": "too\\n long", "type": "x"}}', "too long"),
        (b'{"error": "NotFound"}', "NotFound"),
        (b"<html>Bad Gateway</html>", "<html>Bad Gateway</html>"),
        (b"\xff\xfe", "\ufffd\ufffd"),
        (b"", ""),
    ],
)
def test_the_words_of_a_refusal(body: bytes, expected: str) -> None:
    assert error_words(body) == expected


def answered(*events: bytes) -> InflightRequest:
    """A request that got these events 0.1 s apart."""
    request = sent()
    for number, event in enumerate(events, start=1):
        request.feed(b"data: " + event + b"\n\n", number / 10)
    return request


CHAT_OPENS = b'{"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}'
CHAT_TOKEN = b'{"choices":[{"delta":{"content":"hi"},"finish_reason":null}]}'
CHAT_ENDS = b'{"choices":[{"delta":{},"finish_reason":"stop"}]}'
TWO = b'{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2}}'
EMPTY_TEXT = b'{"choices":[{"text":"","finish_reason":null}]}'
EMPTY_END = b'{"choices":[{"text":"","finish_reason":"length"}]}'


@pytest.mark.parametrize(
    ("events", "first_s", "last_s", "pieces"),
    [
        pytest.param([CHAT_OPENS, CHAT_TOKEN, CHAT_TOKEN, CHAT_ENDS, TWO], 0.2, 0.3, 2, id="a-role-is-no-token"),
        pytest.param([EMPTY_TEXT, EMPTY_TEXT, EMPTY_END, TWO], 0.1, 0.2, 2, id="text-may-be-empty"),
        pytest.param([EMPTY_TEXT, EMPTY_END, TWO], 0.1, 0.2, 2, id="the-last-token-may-have-no-text"),
        pytest.param([EMPTY_TEXT, EMPTY_END], 0.1, 0.1, 1, id="without-usage-a-closing-piece-is-none"),
    ],
)
def test_which_pieces_are_tokens(events: list[bytes], first_s: float, last_s: float, pieces: int) -> None:
    request = answered(*events, b"[DONE]")
    assert request.failure is Failure.NONE
    assert (request.first_s, request.last_s, request.pieces) == (first_s, last_s, pieces)
    assert len(request.gaps) == pieces - 1


@pytest.mark.parametrize("count", [10**20, 2**63, -5])
def test_counts_that_no_array_holds_are_malformed(count: int) -> None:
    """A count of 2**63 ended the request's task and left the run waiting for it."""
    usage = b'{"choices":[],"usage":{"prompt_tokens":%d,"completion_tokens":1}}' % count
    assert answered(EMPTY_TEXT, usage).failure is Failure.MALFORMED


def test_the_outcome_stands_whatever_comes_after_it() -> None:
    request = answered(EMPTY_TEXT, b"[DONE]")
    request.feed(b"data: " + CHAT_TOKEN + b"\n\n", 9.0)
    request.lost(ConnectionResetError())
    assert (request.failure, request.pieces, request.last_s) == (Failure.NONE, 1, 0.1)


# Schedules


def trace(*arrivals_s: float, model: str = "") -> list[Request]:
    return [Request(at, 10, 5, model) for at in arrivals_s]


def test_a_rate_factor_divides_the_traces_times() -> None:
    found = make_schedule(trace(0, 1, 4), ("a",), ScheduleOptions(rate_factor=2))
    assert found.scheduled_s.tolist() == [0, 0.5, 2]
    assert found.arrival_s.tolist() == [0, 1, 4]


@given(
    st.lists(st.floats(0, 1000), max_size=50).map(sorted),
    st.floats(0.1, 10),
    st.floats(0.1, 2000),
    st.integers(1, 60),
)
def test_limits_keep_the_beginning(arrivals: list[float], factor: float, duration_s: float, limit: int) -> None:
    options = ScheduleOptions(rate_factor=factor, duration_s=duration_s, limit=limit)
    expected = [at / factor for at in arrivals if at / factor < duration_s][:limit]
    if expected:
        assert make_schedule(iter(trace(*arrivals)), ("a",), options).scheduled_s.tolist() == expected
    else:
        with pytest.raises(BadInputError):
            make_schedule(iter(trace(*arrivals)), ("a",), options)


def test_requests_without_a_model_are_spread_by_the_seed() -> None:
    rows = trace(*range(200))
    one, same, other = (make_schedule(rows, ("a", "b"), ScheduleOptions(seed=seed)) for seed in (1, 1, 2))
    assert one.deployment.tolist() == same.deployment.tolist() != other.deployment.tolist()
    assert 60 < sum(one.deployment.tolist()) < 140


def test_requests_go_to_the_model_they_name() -> None:
    rows = [Request(i, 1, 1, "ab"[i % 2]) for i in range(6)]
    assert make_schedule(rows, ("a", "b"), ScheduleOptions()).deployment.tolist() == [0, 1] * 3


def test_a_row_naming_an_unknown_model_is_refused_before_anything_is_sent(golden: Golden) -> None:
    rows = [*trace(0, 1, model="a"), *trace(2, model="gpt-4")]
    with golden.raises("controller", NotFoundError):
        make_schedule(rows, ("a", "b"), ScheduleOptions())
    assert len(make_schedule(rows, ("a", "b"), ScheduleOptions(ignore_models=True))) == 3


def test_schedules_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch, golden: Golden) -> None:
    with golden.raises("controller", BadInputError):
        make_schedule([], ("a",), ScheduleOptions())
    with golden.raises("controller", BadInputError):
        make_schedule(trace(60), ("a",), ScheduleOptions(duration_s=10, rate_factor=2))
    with golden.raises("controller", BadInputError):
        make_schedule(trace(2, 1), ("a",), ScheduleOptions())
    with golden.raises("controller", ConfigError):
        make_schedule(trace(1), ("a", "a"), ScheduleOptions())
    monkeypatch.setattr(schedule_module, "MAX_REQUESTS", 3)
    with pytest.raises(BadInputError, match="--duration"):
        make_schedule(trace(*range(4)), ("a",), ScheduleOptions())
    for options in (
        {"rate_factor": 0},
        {"duration_s": -1},
        {"limit": 0},
        {"seed": -1},
        {"rate_factor": float("nan")},
    ):
        with pytest.raises(ConfigError):
            ScheduleOptions(**options)


# Prompts


@given(st.integers(0, 3000), st.integers(0, 100), st.lists(st.integers(0, 2**63), max_size=6))
def test_prompts_of_ids_have_the_length_asked(tokens: int, output_tokens: int, blocks: list[int]) -> None:
    body = json.loads(Prompts(["a", 'b"é'], PromptOptions()).body(1, tokens, output_tokens, blocks))
    assert body["model"] == 'b"é'
    assert len(body["prompt"]) == max(tokens, 1)
    assert all(FIRST_ID <= token < 256 for token in body["prompt"])
    assert body["max_tokens"] == max(output_tokens, 1)
    assert body["ignore_eos"] is body["stream"] is body["stream_options"]["include_usage"] is True


def test_prompts_are_the_seeds() -> None:
    def bodies(seed: int) -> list[bytes]:
        prompts = Prompts(["a"], PromptOptions(seed=seed))
        return [prompts.body(0, 50, 5) for _ in range(3)]

    assert bodies(1) == bodies(1) != bodies(2)
    assert len(set(bodies(1))) == 3, "no two prompts of a run share their beginning"


def test_equal_blocks_are_equal_tokens_and_others_are_not() -> None:
    prompts = Prompts(["a"], PromptOptions())
    first, second = (json.loads(prompts.body(0, 1500, 5, (7, rest)))["prompt"] for rest in (8, 9))
    assert first[:PREFIX_BLOCK_TOKENS] == second[:PREFIX_BLOCK_TOKENS]
    assert first[PREFIX_BLOCK_TOKENS:1024] != second[PREFIX_BLOCK_TOKENS:1024]


def test_an_engine_that_knows_no_ignore_eos_is_not_given_it() -> None:
    body = json.loads(Prompts(["a"], PromptOptions(kind="text", chat=True, ignore_eos=False)).body(0, 5, 5))
    assert "ignore_eos" not in body
    assert len(body["messages"][0]["content"].split()) == 5


def test_prompts_that_cannot_be_made() -> None:
    with pytest.raises(ConfigError, match="token ids"):
        PromptOptions(chat=True)
    with pytest.raises(ConfigError, match="vocabulary"):
        PromptOptions(vocabulary=4)


# Addresses


@pytest.mark.parametrize(
    ("url", "authority", "base_path"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1:8000", "/v1"),
        ("http://127.0.0.1:8000/v1/", "127.0.0.1:8000", "/v1"),
        ("http://127.0.0.1/x%20y", "127.0.0.1:80", "/x%20y/v1"),
        ("https://127.0.0.1", "127.0.0.1:443", "/v1"),
        ("http://[::1]:8000", "[::1]:8000", "/v1"),
    ],
)
def test_urls(url: str, authority: str, base_path: str) -> None:
    found = resolve_endpoint(url)
    assert (found.origin.authority, found.base_path) == (authority, base_path)


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:8000", "ftp://x", "http://", "http://x:99999", "http://x/a b", "http://x/?q=1"]
)
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(ConfigError):
        resolve_endpoint(url)


def test_a_host_that_nobody_knows() -> None:
    with pytest.raises(UnavailableError, match=r"nowhere\.invalid"):
        resolve_endpoint("http://nowhere.invalid:8000")


@pytest.mark.parametrize(("frozen_before", "freezes"), [(0, True), (1000, False)])
def test_a_replay_thaws_what_it_froze_and_touches_nothing_that_others_froze(
    monkeypatch: pytest.MonkeyPatch, frozen_before: int, freezes: bool
) -> None:
    """The collector's own functions, watched: what this test run froze has to stay so."""
    called: list[str] = []
    watched = {name: partial(called.append, name) for name in ("collect", "freeze", "unfreeze")}
    thresholds = {"get_threshold": lambda: (7, 7, 7), "set_threshold": lambda *given: called.append(str(given))}
    count = {"get_freeze_count": lambda: frozen_before}
    monkeypatch.setattr("iserve.replay.runner.gc", SimpleNamespace(**watched, **thresholds, **count))
    with _calm_collector():
        assert called[:-1] == (["collect", "freeze"] if freezes else [])
        assert called[-1] not in ("(7, 7, 7)", "freeze")  # collections are rarer meanwhile
    assert ("unfreeze" in called) == freezes
    assert "(7, 7, 7)" in called
