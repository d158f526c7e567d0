"""Laws of the metrics of quality (KL bounds, agreement, intervals), and the files of texts that are read."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fingerprint.errors import BadInputError, ConfigError, NotFoundError
from iserve.quality.metrics import agrees, kl_lower_bound, mean_interval, shared_mass
from iserve.quality.texts import MAX_CHARS, MAX_TEXTS, Text, read_texts

logits = st.lists(st.floats(-12, 12), min_size=12, max_size=12)
tops = st.integers(1, 12)


def log_softmax(values: list[float]) -> np.ndarray:
    row = np.array(values)
    return row - row.max() - math.log(np.exp(row - row.max()).sum())


def likeliest(row: np.ndarray, top: int) -> dict[str, float]:
    return {str(token): float(row[token]) for token in np.argsort(-row, kind="stable")[:top]}


@given(logits, logits, tops)
def test_a_bound_of_kl_is_between_none_and_the_divergence(p: list[float], q: list[float], top: int) -> None:
    reference, model = log_softmax(p), log_softmax(q)
    exact = float((np.exp(reference) * (reference - model)).sum())
    bound = kl_lower_bound(likeliest(reference, top), likeliest(model, top))
    assert 0 <= bound <= exact + 1e-4
    if top == len(p):
        assert bound == pytest.approx(exact, abs=1e-4)


@given(logits, tops)
def test_equal_predictions_diverge_nowhere(values: list[float], top: int) -> None:
    one = likeliest(log_softmax(values), top)
    assert kl_lower_bound(one, one) == pytest.approx(0, abs=1e-9)
    assert agrees(one, one)
    assert shared_mass(one, one) == pytest.approx(sum(map(math.exp, one.values())))


@given(logits, logits, tops)
def test_agreement_is_of_the_likeliest_token(p: list[float], q: list[float], top: int) -> None:
    reference, model = log_softmax(p), log_softmax(q)
    same = int(np.argmax(reference)) == int(np.argmax(model))
    ties = len(set(p)) < len(p) or len(set(q)) < len(q)
    assert ties or agrees(likeliest(reference, top), likeliest(model, top)) == same


def test_what_one_side_does_not_report_is_in_the_rest() -> None:
    half = math.log(0.5)
    assert kl_lower_bound({"a": half}, {"b": half}) == 0.0  # all of it is one outcome
    assert shared_mass({"a": half}, {"b": half}) == 0.0
    assert kl_lower_bound({"a": half}, {"a": math.log(0.25)}) == pytest.approx(0.5 * math.log(2 * 2 / 3))


@given(
    st.lists(st.tuples(st.floats(-100, 100), st.integers(1, 50)), min_size=2, max_size=30),
    st.integers(0, 2**32 - 1),
)
def test_an_interval_holds_the_mean(texts: list[tuple[float, int]], seed: int) -> None:
    sums, counts = zip(*texts, strict=True)
    found = mean_interval(sums, counts, seed=seed)
    assert found.value == pytest.approx(sum(sums) / sum(counts), abs=1e-9)
    assert found.low is not None
    assert found.high is not None
    assert found.low <= found.value <= found.high
    assert mean_interval(sums, counts, seed=seed) == found


def test_an_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    covered = 0
    for seed in range(200):
        counts = rng.integers(5, 50, size=40)
        sums = np.array([rng.exponential(2.0, size=count).sum() for count in counts])
        found = mean_interval(sums, counts, seed=seed)
        covered += found.low <= 2.0 <= found.high
    assert 0.88 <= covered / 200 <= 0.99


def test_one_text_has_no_interval() -> None:
    found = mean_interval([6.0], [3], seed=0)
    assert (found.value, found.low, found.high) == (2.0, None, None)


def written(folder: Path, content: str | bytes, name: str = "text.txt") -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_a_plain_text_is_its_paragraphs(tmp_path: Path) -> None:
    read = read_texts(written(tmp_path, "one\ntwo\n\n  \nthree €\r\n\n"))
    assert read.texts == (Text("one\ntwo"), Text("three €"))
    assert len(read.sha256) == 64


def test_lines_are_texts_or_prompts_with_answers(tmp_path: Path) -> None:
    lines = [{"prompt": "1+1=", "answer": "2"}, {"text": "a b"}]
    read = read_texts(written(tmp_path, "\n".join(map(json.dumps, lines)) + "\n\n", "t.jsonl"))
    assert read.texts == (Text("1+1=", "2"), Text("a b"))


@pytest.mark.parametrize("name", [b"\xff.txt", b"two\nlines.txt", b"\x1b[31mred.txt"])
def test_a_name_that_a_result_cannot_have_is_refused(tmp_path: Path, name: bytes) -> None:
    path = tmp_path / os.fsdecode(name)
    path.write_text("a text")
    with pytest.raises(ConfigError, match="rename") as refused:
        read_texts(path)
    assert str(refused.value).isprintable()


def test_a_long_text_is_cut(tmp_path: Path) -> None:
    read = read_texts(written(tmp_path, "x" * (MAX_CHARS + 5)))
    assert len(read.texts[0].text) == MAX_CHARS
    assert read.num_cut == 1


@pytest.mark.parametrize(
    ("content", "name", "reason"),
    [
        ("", "a.txt", "empty"),
        (" \n\n", "a.txt", "empty"),
        ("\n", "a.jsonl", "empty"),
        (b"\x89PNG\r\n\x00\xff", "a.txt", "UTF-8"),
        (b"ab\x00c", "a.txt", "UTF-8"),
        ("{", "a.jsonl", "line 1"),
        ('{"text": "a"}\n[]', "a.jsonl", "line 2"),
        ("[" * 100_000, "a.jsonl", "line 1"),
        ('{"prompt": "a"}', "a.jsonl", "line 1"),
        ('{"prompt": "a", "answer": ""}', "a.jsonl", "line 1"),
        ('{"text": "a", "answer": "b"}', "a.jsonl", "line 1"),
        ('{"text": 5}', "a.jsonl", "line 1"),
        ('{"txt": "a"}', "a.jsonl", "line 1"),
        ("a\n\n" * (MAX_TEXTS + 1), "a.txt", "2001 texts"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: str | bytes, name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_texts(written(tmp_path, content, name))


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "none", tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(NotFoundError):
            read_texts(path)
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(17 * 2**20)
    with pytest.raises(BadInputError, match="MiB"):
        read_texts(tmp_path / "huge")
