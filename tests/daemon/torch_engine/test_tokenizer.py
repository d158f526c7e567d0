"""Text of tokens as they arrive, stop strings, tokenizers and chat templates."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from daemon.torch_engine.api import chat_template
from daemon.torch_engine.api.chat_template import ChatTemplate
from daemon.torch_engine.api.tokenizer import (
    ChatMessage,
    Detokenizer,
    StopMatcher,
    TextTooLongError,
    end_token_ids,
    load_text_codec,
)
from fingerprint.errors import BadInputError, CheckpointError, EngineError, UnavailableError
from tests.golden_words import Golden

SPECIAL = frozenset({300})


def byte_decode(tokens: Sequence[int]) -> str:
    """Decode one token a byte, as byte-level tokenizers do."""
    return bytes(token for token in tokens if token < 256).decode("utf-8", errors="replace")


def byte_run_decode(tokens: Sequence[int]) -> str:
    """Decode as tokenizers with byte fallback do: a run of bytes that is no text is one U+FFFD a byte."""
    raw = bytes(token for token in tokens if token < 256)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "\ufffd" * len(raw)


def pieces(tokens: Sequence[int], prompt: Sequence[int] = (), decode=byte_decode) -> list[str]:
    detokenizer = Detokenizer(decode, SPECIAL, prompt)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.flush()]


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=30), prompt=st.binary(max_size=8))
@pytest.mark.parametrize("decode", [byte_decode, byte_run_decode])
def test_whole_characters_only_and_nothing_lost(decode, text: str, prompt: bytes) -> None:
    """Each piece is whole: joined they are the text, and no byte waits once its character is complete."""
    clean = text.replace("\ufffd", "?")
    given_out = ""
    detokenizer = Detokenizer(decode, SPECIAL, b"Q: ")
    for at, token in enumerate(clean.encode(), 1):
        given_out += detokenizer.push(token)
        assert given_out == clean.encode()[:at].decode("utf-8", errors="ignore")
    assert detokenizer.flush() == ""
    assert "".join(pieces(clean.encode(), prompt)).endswith(clean[1:])


@settings(max_examples=300, deadline=None)
@given(raw=st.binary(max_size=40))
def test_any_bytes_come_out_as_one_decoding_would_give(raw: bytes) -> None:
    assert "".join(pieces(raw)) == raw.decode("utf-8", errors="replace")


def test_garbage_is_not_held_back_for_ever() -> None:
    assert len("".join(pieces([0x80] * 40)[:-1])) >= 36


def test_an_unfinished_character_is_marked_at_the_end() -> None:
    assert pieces("a€".encode()[:-1]) == ["a", "", "", "\ufffd"]


def test_special_tokens_are_no_text() -> None:
    assert pieces([300, 97, 300, 98, 300]) == ["", "a", "", "b", "", ""]


def test_the_first_token_is_read_in_the_prompts_context() -> None:
    """A tokenizer that marks words drops the space of a text's first word; an answer's first word keeps it."""

    def decode(tokens: Sequence[int]) -> str:
        return " ".join(f"w{token}" for token in tokens)

    assert pieces([7, 8], prompt=[1, 2], decode=decode) == [" w7", " w8", ""]
    assert pieces([7, 8], prompt=[], decode=decode) == ["w7", " w8", ""]


def stopped(stops: Sequence[str], parts: Sequence[str]) -> tuple[str, bool]:
    matcher = StopMatcher(stops)
    out = ""
    for part in parts:
        text, met = matcher.push(part)
        out += text
        if met:
            return out, True
    return out + matcher.flush(), False


ALPHABET = st.text("ab", max_size=14)


@settings(max_examples=500, deadline=None)
@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=4),
    text=ALPHABET,
    cuts=st.sets(st.integers(0, 14)),
)
def test_where_the_pieces_are_divided_never_matters(stops: list[str], text: str, cuts: set[int]) -> None:
    """The text up to the stop string that is complete first, by hand: try every end, then every stop."""
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    parts = [text[a:b] for a, b in itertools.pairwise(bounds)]
    expected = (text, False)
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            expected = (text[: min(starts)], True)
            break
    assert stopped(stops, parts) == expected
    assert stopped(stops, list(text)) == expected


def test_a_stop_string_may_begin_but_not_end_before_it_counts() -> None:
    """ "xab" ends with a whole stop string that does not count, and with the beginning of one that will."""
    matcher = StopMatcher(["ab", "xabc"])
    assert matcher.push("ab-", armed=False) == ("ab-", False)
    assert matcher.push("xab", armed=False) == ("", False)
    assert matcher.push("c") == ("", True)
    matcher = StopMatcher(["ab", "xabc"])
    assert matcher.push("xab", armed=False) == ("", False)
    assert matcher.push("-ab") == ("xab-", True)


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    matcher = StopMatcher(["END"])
    assert [matcher.push(part) for part in ("xE", "N", "e", "EN", "D.")] == [
        ("x", False),
        ("", False),
        ("ENe", False),
        ("", False),
        ("", True),
    ]


def test_the_demo_tokenizer_and_its_template(demo_checkpoint: Path) -> None:
    codec = load_text_codec(demo_checkpoint)
    assert codec is not None
    assert codec.decode(codec.encode("héllo €", 99)) == "héllo €"
    turn = codec.encode_chat([ChatMessage("user", "hi")], 99)
    assert codec.decode(turn) == "Q: hi\nA: "
    assert end_token_ids(demo_checkpoint, codec) == {1}
    assert codec.decode([*codec.encode("a", 99), 999_999]) == "a"


def test_end_tokens_nested_too_deeply_are_an_error_of_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(CheckpointError, match=r"generation_config\.json cannot be read"):
        end_token_ids(tmp_path, None)


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(demo_checkpoint: Path, tmp_path: Path) -> None:
    """A text that may fit is not refused: the demo's longest token, the most that a token represents, is a special
    one.
    """
    codec = load_text_codec(demo_checkpoint)
    bare = load_text_codec(without_template(demo_checkpoint, tmp_path / "m"))
    assert codec is not None
    assert bare is not None
    special = max(codec._tokenizer.all_special_tokens, key=len)
    assert len(codec.encode(special * 10, 10)) == 10
    far_too_long = "x" * (len(special) * 4 * 10 + 1)
    for refuse in (
        lambda: codec.encode(far_too_long, 10),
        lambda: codec.encode_chat([ChatMessage("user", far_too_long)], 10),
        lambda: bare.encode_chat([ChatMessage("user", far_too_long)], 10),
    ):
        with pytest.raises(TextTooLongError, match="10 tokens stand for"):
            refuse()


def without_template(source: Path, target: Path, template: str | None = None) -> Path:
    shutil.copytree(source, target)
    (target / "chat_template.jinja").unlink()
    if template is not None:
        (target / "chat_template.jinja").write_text(template)
    return target


def test_without_a_template_a_conversation_is_plain_text(
    demo_checkpoint: Path, tmp_path: Path, golden: Golden
) -> None:
    codec = load_text_codec(without_template(demo_checkpoint, tmp_path / "m"))
    assert codec is not None
    assert not codec.has_chat_template
    turn = codec.encode_chat([ChatMessage("system", "Be brief."), ChatMessage("user", "hi")], 99)
    golden("daemon", codec.decode(turn))


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no system turns') }}",
        "{{ messages[9].content }}",
        "{{ 1 + 'a' }}",
        "{{ 1 / 0 }}",
        "{% for %}",
        "{% macro again(n) %}{{ again(n + 1) }}{% endmacro %}{{ again(0) }}",
        "{{ 'x'.center(10 ** 12) }}",
        "{% set n = namespace(_a=1) %}",
        "{{ ''.__class__.__mro__ }}",
        "{{ '\\ud800' }}",
    ],
)
def test_a_template_that_refuses(demo_checkpoint: Path, tmp_path: Path, template: str, golden: Golden) -> None:
    codec = load_text_codec(without_template(demo_checkpoint, tmp_path / "m", template))
    assert codec is not None
    with closing(codec), golden.raises("daemon", BadInputError):
        codec.encode_chat([ChatMessage("system", "x")], 99)


@pytest.mark.slow
def test_a_template_without_end_is_given_up_and_the_next_conversation_is_rendered(
    demo_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    """Also within one instruction, which no thread of its interpreter could interrupt."""
    monkeypatch.setattr(chat_template, "MAX_CPU_S", 1)
    template = "{{ bos_token }}ok{% if messages[0].content %}{{ 3 ** (messages | length * 10 ** 9) }}{% endif %}"
    codec = load_text_codec(without_template(demo_checkpoint, tmp_path / "m", template))
    assert codec is not None
    with closing(codec):
        with golden.raises("daemon", BadInputError):
            codec.encode_chat([ChatMessage("user", "x")], 99)
        assert codec.decode(codec.encode_chat([ChatMessage("user", "")], 99)) == "ok"


# What chat templates are made of, in the shapes that checkpoints have them.
TEMPLATES = {
    "turns between tokens": (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>\\n' + m['content'] | trim + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
    ),
    "lines and whitespace": """{{- bos_token }}
    {%- set ns = namespace(system='', last=-1) %}
    {%- for message in messages[::-1] if message.role == 'user' %}
        {%- set ns.last = (messages | length - 1) - loop.index0 %}
        {%- break %}
    {%- endfor %}
    {% for message in messages %}
        {% if message.role == 'system' %}
            {% set ns.system = message.content %}
            {% continue %}
        {% endif %}
Turn {{ loop.index }}{{ ' (last)' if loop.index0 == ns.last else '' }}: {{ message.content }}
    {% endfor %}
{{ ns.system }}""",
    "tools, documents and dates": (
        "{% if tools is not none %}{{ tools | tojson }}{% elif not documents %}"
        "{{ messages | tojson(indent=2) }}{% endif %}"
        "{{ strftime_now('%Y') }}{{ dict(a=1).items() | list }}{{ messages[0] | tojson(sort_keys=True) }}"
    ),
    "answers marked for training": (
        "{% macro say(m) %}{{ m.role | upper }}: {{ m.content }}{% endmacro %}{% for m in messages %}"
        "{% if m.role == 'assistant' %}{% generation %}{% set text = say(m) %}{{ text }}{% endgeneration %}"
        "{% else %}{{ say(m) }}{{ text is defined }}{% endif %}{% endfor %}"
    ),
    "what is not there": "{{ pad_token }}{{ messages[0].name }}{{ messages[0].get('tools', 'none') }}",
    "parts of an answer": (
        "{% for m in messages %}{% if '</think>' in m.content %}"
        "{{ m.content.split('</think>')[-1].lstrip('\\n') }}"
        "{% else %}{{ m.content.replace('<', '&') ~ '.' }}{% endif %}{% endfor %}"
    ),
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_conversations_are_rendered_as_transformers_renders_them(demo_checkpoint: Path, template: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_checkpoint)
    tokenizer.chat_template = template
    turns = [
        {"role": "system", "content": 'Be "brief" & <kind>.\n'},
        {"role": "user", "content": " What's 1 < 2? é€🙂"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes."},
        {"role": "user", "content": "{{ 1 + 1 }}"},
    ]
    own = ChatTemplate(template, tokenizer.special_tokens_map)
    with closing(own):
        text = own.render(turns, 10_000)
    assert text == tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert text


def test_nothing_is_rendered_after_the_end_nor_left_behind(demo_checkpoint: Path) -> None:
    """Closed in the middle of a rendering that would take seconds; closing twice is fine."""
    template = ChatTemplate("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", {})
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(template.render, [], 9)
        while template._process is None:
            time.sleep(0.01)
        process = template._process
        template.close()
        with pytest.raises(UnavailableError):
            waiting.result()
    assert process.returncode == -signal.SIGKILL
    template.close()
    with pytest.raises(UnavailableError):
        template.render([], 9)


def test_a_process_that_was_killed_while_idle_costs_the_next_conversation_nothing() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    with closing(template):
        for text in ("one", "two"):
            assert template.render([{"role": "user", "content": text}], 9) == text
            process = template._process
            assert process is not None
            os.kill(process.pid, signal.SIGKILL)
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it is dead now, and no caller knows
        assert template.render([{"role": "user", "content": "three"}], 9) == "three"


def test_no_tokenizer_and_a_broken_one(tmp_path: Path) -> None:
    assert load_text_codec(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointError, match="tokenizer"):
        load_text_codec(tmp_path)


def test_a_tokenizer_that_panics_fails_the_text_and_not_the_worker(demo_checkpoint: Path, tmp_path: Path) -> None:
    """A panic of its Rust code is no Exception."""
    panics = {
        "encode": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
        "decode": {"decoder": {"type": "Strip", "content": "a", "start": 1, "stop": 1}},
    }
    codecs = {}
    for name, change in panics.items():
        shutil.copytree(demo_checkpoint, tmp_path / name)
        file = tmp_path / name / "tokenizer.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
        codecs[name] = load_text_codec(tmp_path / name)
    whole = load_text_codec(demo_checkpoint)
    with pytest.raises(BadInputError, match="tokenizer fails"):
        codecs["encode"].encode("ab", 100)
    with pytest.raises(EngineError, match="tokenizer fails"):
        codecs["decode"].decode(whole.encode("a", 100))


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (None, {}, set()),
        (None, {"eos_token_id": 2}, {2}),
        ({"eos_token_id": [5, 6]}, {"eos_token_id": 2}, {5, 6}),
        ({"eos_token_id": None}, {"eos_token_id": 2}, {2}),
        ({"eos_token_id": -1}, {}, set()),
    ],
)
def test_end_tokens(tmp_path: Path, generation: dict | None, config: dict, expected: set[int]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert end_token_ids(tmp_path, None) == expected


def test_a_broken_generation_config(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="generation_config"):
        end_token_ids(tmp_path, None)
