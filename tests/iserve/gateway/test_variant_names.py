"""The ``model`` of a body, found and replaced to the byte."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iserve.gateway.errors import ApiError
from iserve.gateway.request_body import parse_head
from iserve.gateway.variant_names import model_span, with_model

KEYS = st.sampled_from(["model", "model", "mod", 'x"model', "\\model", "messages"]) | st.text(max_size=3)
TEXTS = st.sampled_from(["v", '"model":"v"', '\\"model": ', "model", '{"model":"v"}']) | st.text(max_size=6)
VALUES = st.recursive(
    TEXTS | st.integers() | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)
BLANKS = st.sampled_from(["", " ", "\n\t "])


def text_of(pairs: list[tuple[str, Any]], blanks: list[str], *, escaped: bool) -> bytes:
    """Return a JSON object of ``pairs``, which may have a key twice; ``escaped``: its "model" as \\u escapes."""
    parts = []
    for (key, value), blank in zip(pairs, blanks, strict=False):
        written = json.dumps(key, ensure_ascii=escaped)
        if escaped and key == "model":
            written = '"\\u006dod\\u0065\\u006C"'
        parts.append(f"{blank}{written}{blank}:{blank}{json.dumps(value, ensure_ascii=escaped)}{blank}")
    return ("{" + ",".join(parts) + "}").encode()


@given(
    before=st.lists(st.tuples(KEYS.filter(lambda key: key != "model"), VALUES), max_size=4),
    after=st.lists(st.tuples(KEYS.filter(lambda key: key != "model"), VALUES), max_size=4),
    name=TEXTS,
    blanks=st.lists(BLANKS, min_size=9, max_size=9),
    escaped=st.booleans(),
)
def test_the_top_level_name_changes_and_no_other_byte(before, after, name, blanks, escaped) -> None:
    body = text_of([*before, ("model", name), *after], blanks, escaped=escaped)
    begin, end = model_span(body)
    assert json.loads(body[begin:end]) == name
    sent = with_model(body, (begin, end), "v@0123")
    assert sent == body[:begin] + b'"v@0123"' + body[end:]
    assert json.loads(sent) == {**json.loads(body), "model": "v@0123"}


@given(
    pairs=st.lists(st.tuples(KEYS, VALUES), max_size=4),
    values=st.tuples(VALUES, VALUES),
    place=st.integers(0, 4),
    blanks=st.lists(BLANKS, min_size=6, max_size=6),
    escaped=st.booleans(),
)
def test_twice_is_refused(pairs, values, place, blanks, escaped) -> None:
    first, second = (("model", value) for value in values)
    with pytest.raises(ApiError, match="twice"):
        model_span(text_of([*pairs[:place], first, *pairs[place:], second], blanks, escaped=escaped))


def test_many_keys_of_that_name_take_bounded_time() -> None:
    nested = b'{"model":"v","a":[' + b",".join([b'{"model":"v"}'] * 9_000) + b"]}"
    began_s = time.process_time()
    assert model_span(nested) == (9, 12)
    assert time.process_time() - began_s < 2
    many = b'{"model":"v","a":[' + b",".join([b'{"model":"v"}'] * 2_000_000) + b"]}"
    assert model_span(many) == (9, 12)
    assert time.process_time() - began_s < 10


@pytest.mark.parametrize("nested", [0, 9_000])
@pytest.mark.parametrize("text", [b"x", b" the model", b"data:image/png;base64,"])
def test_a_long_text_is_searched_as_fast_as_it_is_parsed(text: bytes, nested: int) -> None:
    """A variant's request may have images of many megabytes, and other streams wait while it is looked at."""
    keys = b"{" + b",".join([b'"model":"v"'] * nested) + b"}"
    body = b'{"messages":["' + text * (2**25 // len(text)) + b'"],"model":"v","tools":' + keys + b"}"

    def took_s(look: Callable[[bytes], object]) -> float:
        began_s = time.process_time()
        look(body)
        return time.process_time() - began_s

    parse_s, span_s = (min(took_s(look) for _ in range(3)) for look in (parse_head, model_span))
    assert span_s < 4 * parse_s


def test_what_parse_head_takes_has_a_span() -> None:
    body = b' {"model"\n:\t"\\u0061"} '
    assert parse_head(body).model == "a"
    assert with_model(body, model_span(body), "b") == b' {"model"\n:\t"b"} '
