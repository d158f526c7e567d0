"""Bodies of the OpenAI API: what is read, what is refused, and by which field."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.torch_engine.api.openai_api import ApiError, Generation, parse_chat, parse_completion

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def completion(**body: Any) -> Generation:
    return parse_completion(json.dumps({"prompt": "hi"} | body).encode())


def chat(**body: Any) -> Generation:
    return parse_chat(json.dumps(CHAT | body).encode())


def test_nulls_are_defaults() -> None:
    names = [
        "model",
        "stream",
        "stream_options",
        "temperature",
        "top_p",
        "seed",
        "stop",
        "max_tokens",
        "n",
        "logprobs",
    ]
    assert completion(**dict.fromkeys(names)) == completion()
    assert chat(**dict.fromkeys([*names, "tools", "max_completion_tokens"])) == chat()
    assert completion().sampling.temperature == 1.0
    assert completion().max_tokens is None


@pytest.mark.parametrize(
    ("prompt", "texts", "token_lists"),
    [
        ("a", ("a",), ()),
        (["a", "b"], ("a", "b"), ()),
        ([1, 2], (), ((1, 2),)),
        ([[1], [2, 3]], (), ((1,), (2, 3))),
        ([[]], (), ((),)),
    ],
)
def test_four_shapes_of_prompts(prompt: object, texts: tuple, token_lists: tuple) -> None:
    read = completion(prompt=prompt)
    assert (read.texts, read.token_lists) == (texts, token_lists)


@pytest.mark.parametrize(
    "prompt", [None, [], 5, {}, [1, "a"], ["a", 1], [[1], 2], [1.5], [True, 2.0], [["a"]], ["a"] * 129]
)
def test_other_prompts(prompt: object) -> None:
    with pytest.raises(ApiError) as refused:
        completion(prompt=prompt)
    assert (refused.value.status, refused.value.param) == (400, "prompt")


def test_content_in_parts() -> None:
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "user", "content": content}]).messages[0].content == "ab"


def test_max_completion_tokens_is_the_newer_name() -> None:
    assert chat(max_tokens=3).max_tokens == 3
    assert chat(max_tokens=3, max_completion_tokens=4).max_tokens == 4


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2),
        ("best_of", 2),
        ("echo", True),
        ("logprobs", 0),
        ("suffix", "x"),
        ("logit_bias", {"5": 1}),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -1),
        ("repetition_penalty", 1.1),
        ("tools", [{"type": "function"}]),
        ("response_format", {"type": "json_object"}),
        ("allowed_token_ids", [1]),
        ("include_stop_str_in_output", True),
        ("skip_special_tokens", False),
        ("chat_template", "{{ 1 }}"),
        ("max_tokens", 0),
        ("max_tokens", "5"),
        ("max_tokens", 1.5),
        ("min_tokens", -1),
        ("temperature", -1),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 2),
        ("top_k", -5),
        ("seed", "x"),
        ("stop_token_ids", [5, -1]),
        ("stop_token_ids", [5] * 1025),
        ("stop", ["a"] * 5),
        ("stop", [""]),
        ("stop", 7),
        ("stop", ["x" * 2000]),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
    ],
)
def test_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ApiError) as refused:
        completion(**{field: value})
    assert (refused.value.status, refused.value.kind, refused.value.param) == (400, "invalid_request_error", field)


@pytest.mark.parametrize(
    "value",
    [
        {"n": 1, "echo": False, "tools": [], "logit_bias": {}, "presence_penalty": 0.0, "user": "me", "new": 1},
        {"skip_special_tokens": True, "include_stop_str_in_output": False, "chat_template_kwargs": {}},
    ],
)
def test_fields_that_ask_for_nothing_or_that_nobody_knows_pass(value: dict[str, Any]) -> None:
    assert completion(**value) == completion()


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        "hi",
        [{"role": "user"}] * 10_001,
        [{"content": "x"}],
        [{"role": "user", "content": [{"type": "image_url"}]}],
        [{"role": 1}],
    ],
)
def test_messages_that_are_none(messages: object) -> None:
    with pytest.raises(ApiError) as refused:
        chat(messages=messages)
    assert (refused.value.status, refused.value.param) == (400, "messages")


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"a"',
        b"\xff\xfe",
        b'{"prompt": NaN}',
        b'{"prompt": "\\ud800"}',
        b"[" * 100_000,
        b'{"x":' * 50_000 + b"1" + b"}" * 50_000,
        b'{"prompt": "a", "temperature": 1e999}',
    ],
)
def test_bodies_that_are_no_request(raw: bytes) -> None:
    for parse in (parse_completion, parse_chat):
        with pytest.raises(ApiError) as refused:
            parse(raw)
        assert refused.value.status == 400


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from(
    [
        "prompt",
        "messages",
        "n",
        "stop",
        "stream",
        "temperature",
        "top_k",
        "seed",
        "stop_token_ids",
        "min_tokens",
        "logit_bias",
        "model",
    ]
)


def status_of(parse: Callable[[bytes], Generation], raw: bytes) -> int:
    try:
        parse(raw)
    except ApiError as refused:
        return refused.status
    return 200


@settings(deadline=None)
@given(body=st.dictionaries(FIELDS, JSON, max_size=6))
def test_whatever_is_sent_is_read_or_refused(body: dict[str, Any]) -> None:
    """Never another exception."""
    for parse in (parse_completion, parse_chat):
        assert status_of(parse, json.dumps(body).encode()) in (200, 400)
