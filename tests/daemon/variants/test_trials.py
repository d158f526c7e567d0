"""Trials of formats: what a delta loses by the reference of transformers, and which format is taken for it."""

from __future__ import annotations

import fcntl
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from daemon.torch_engine.api.tokenizer import load_text_codec
from daemon.variants.compress import (
    CalibrationTexts,
    CompressOrder,
    JudgedText,
    JudgementTexts,
    TextLoss,
    Trial,
    compress_delta,
    compress_within,
)
from daemon.variants.compress.compressor import Prepared, prepare
from daemon.variants.compress.judgement import judge, tokenize_judged
from fingerprint.delta import FORMATS, read_delta
from fingerprint.delta.reader import Delta
from fingerprint.errors import ConfigError, ConflictError
from tests.fingerprint.small_fine_tunes import TEXTS, join_tokens, read_bytes, tiny_tensors, tuned, write_model

JUDGED = (JudgedText("", TEXTS[0]), *(JudgedText(*text.split("A:", 1)) for text in TEXTS[1:12]))
NOTHING: frozenset[str] = frozenset()


def write_pair(folder: Path, *, is_tied: bool) -> Path:
    """Write a base and a fine-tune with an output layer of its own, or one that shares the embeddings."""
    tensors = tiny_tensors()
    if is_tied:
        del tensors["lm_head.weight"]
    for name, values in {"base": tensors, "tuned": tuned(tensors, size=0.05)}.items():
        write_model(folder / name, values, tie_word_embeddings=is_tied)
    return folder


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    return write_pair(tmp_path, is_tied=False)


def order(folder: Path, format_name: str = "int2") -> CompressOrder:
    return CompressOrder(
        base=folder / "base",
        finetuned=folder / "tuned",
        target=folder / "delta",
        format=FORMATS[format_name],
        calibration=CalibrationTexts(sha256="0" * 64, texts=TEXTS[20:]),
        max_error=None,
        base_name="base",
        finetuned_name="tuned",
    )


def tried(folder: Path, *, accepted: frozenset[str], first: str = "int2") -> list[Trial]:
    judged = JudgementTexts(sha256="1" * 64, texts=JUDGED)
    return list(compress_within(order(folder, first), judged, lambda each: each.format in accepted).trials)


def left(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()} - {"base", "tuned"}


def reference(folder: Path) -> list[TextLoss]:
    """Return what each text loses, by transformers with the weights that the delta means."""
    tuned_model, kept = (
        LlamaForCausalLM.from_pretrained(folder / name, dtype=torch.float32) for name in ("tuned", "base")
    )
    delta, stored = read_delta(folder / "delta"), dict(kept.named_parameters())
    with torch.no_grad():
        for matrix in delta.manifest.matrices:
            stored[matrix.name].add_(torch.from_numpy(delta.change(matrix)))
        for exact in delta.manifest.exact:
            stored[exact.name].copy_(tuned_model.get_parameter(exact.name))
    codec = load_text_codec(folder / "tuned")
    assert codec is not None
    found = []
    for text in JUDGED:
        tokens = torch.tensor([codec.encode(text.prompt + text.rest, 512)])
        first = max(1, len(codec.encode(text.prompt, 512))) if text.prompt else 1
        with torch.no_grad():
            p, q = (model(tokens).logits[0, first - 1 : -1].log_softmax(-1) for model in (tuned_model, kept))
        ids = tokens[0, first:, None]
        loss = TextLoss(
            num_tokens=len(ids),
            finetuned_nll=-float(p.gather(1, ids).sum()),
            delta_nll=-float(q.gather(1, ids).sum()),
            kl=float((p.exp() * (p - q)).sum()),
            num_agreeing=int((p.argmax(1) == q.argmax(1)).sum()),
        )
        found.append(loss)
    codec.close()
    return found


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
def test_losses_are_those_of_transformers(tmp_path: Path, is_tied: bool) -> None:
    pair = write_pair(tmp_path, is_tied=is_tied)
    (trial,) = tried(pair, accepted=frozenset({"int2"}))
    for found, expected in zip(trial.losses, reference(pair), strict=True):
        assert (found.num_tokens, found.num_agreeing) == (expected.num_tokens, expected.num_agreeing)
        for name in ("finetuned_nll", "delta_nll", "kl"):
            assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-4, abs=1e-4)
    assert sum(text.kl for text in trial.losses) > 0.01 * sum(text.num_tokens for text in trial.losses)


def test_a_token_of_the_end_of_a_prompt_and_the_start_of_its_answer_is_judged(pair: Path) -> None:
    """For example of "A: " and "Paris", which a byte-pair encoding writes as ``A``, ``:``, `` Paris``."""
    join_tokens(pair / "tuned", "ĠParis")
    texts = [JudgedText("Q: capital?\nA: ", answer) for answer in ("Paris", "Paris is it")] * 5
    tokens = tokenize_judged(texts, prepare(order(pair), lambda what, done, total: None))
    judged = [one[first:] for one, first in zip(tokens.sequences, tokens.first, strict=True)]
    (paris, *rest), codec = judged[1], load_text_codec(pair / "tuned")
    assert codec is not None
    assert (codec.decode([paris]), codec.decode(rest)) == (" Paris", " is it")
    assert judged == [[paris], [paris, *rest]] * 5
    codec.close()


def test_a_base_loses_nothing_as_its_own_fine_tune(tmp_path: Path) -> None:
    for name in ("base", "tuned"):
        write_model(tmp_path / name, tiny_tensors())
    (trial,) = tried(tmp_path, accepted=frozenset({"int2"}))
    for text in trial.losses:
        assert text.delta_nll == text.finetuned_nll
        assert text.kl == 0
        assert text.num_agreeing == text.num_tokens


@pytest.mark.slow
def test_formats_are_tried_in_turn_and_the_accepted_one_is_left(pair: Path) -> None:
    trials = tried(pair, accepted=frozenset({"int3"}))
    assert [trial.format for trial in trials] == ["int2", "int3"]
    assert left(pair) == {"delta"}
    manifest = read_delta(pair / "delta").manifest
    assert (manifest.format, manifest.content_hash) == ("int3", trials[-1].content_hash)
    with pytest.raises(ConflictError):
        tried(pair, accepted=frozenset({"int3"}))


@pytest.mark.slow
def test_refused_formats_leave_nothing(pair: Path) -> None:
    assert [trial.format for trial in tried(pair, accepted=NOTHING)] == ["int2", "int3", "int4"]
    assert left(pair) == set()
    assert [trial.format for trial in tried(pair, accepted=NOTHING, first="sparse24-int4")] == [
        "sparse24-int4",
        "int4",
    ]


def ended_at(folder: Path, format_name: str, what: str, *, is_compensated: bool = True) -> None:
    """Leave the work of a command that ended at its first ``what`` in a format."""

    class EndedError(Exception):
        pass

    def end(counted: str, done: int, total: int) -> None:
        if counted == f"{what}, {format_name}":
            raise EndedError

    with pytest.raises(EndedError):
        compress_within(
            replace(order(folder), is_compensated=is_compensated),
            JudgementTexts(sha256="1" * 64, texts=JUDGED),
            lambda each: each.format == "int3",
            end,
        )


@pytest.mark.slow
@pytest.mark.parametrize("what", ["matrices", "layers judged"])
def test_an_ended_command_goes_on_and_judges_no_format_again(
    pair: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tried(pair, accepted=frozenset({"int3"}))
    content = read_bytes(pair / "delta")
    os.rename(pair / "delta", pair / "whole")
    ended_at(pair, "int3", what)
    assert left(pair) == {"whole", ".delta.trials"}
    judged = []

    def see(prepared: Prepared, delta: Delta, *arguments: Any) -> tuple[TextLoss, ...]:
        judged.append(delta.manifest.format)
        return judge(prepared, delta, *arguments)

    monkeypatch.setattr("daemon.variants.compress.trials.judge", see)
    assert tried(pair, accepted=frozenset({"int3"})) == whole
    assert judged == ["int3"]
    assert read_bytes(pair / "delta") == content
    assert left(pair) == {"whole", "delta"}


@pytest.mark.slow
def test_a_looser_command_takes_what_a_stricter_one_had_refused(pair: Path) -> None:
    ended_at(pair, "int3", "matrices")
    assert [trial.format for trial in tried(pair, accepted=frozenset({"int2"}))] == ["int2"]
    assert read_delta(pair / "delta").manifest.format == "int2"
    assert left(pair) == {"delta"}


@pytest.mark.slow
def test_work_of_another_job_is_begun_anew(pair: Path) -> None:
    ended_at(pair, "int3", "matrices")
    other = JudgementTexts(sha256="2" * 64, texts=JUDGED[::-1])
    trials = compress_within(order(pair), other, lambda each: each.format == "int2").trials
    assert [trial.losses[-1].num_tokens for trial in trials] == [reference(pair)[0].num_tokens]
    assert left(pair) == {"delta"}


def test_trials_by_another_tokenizer_are_begun_anew(pair: Path) -> None:
    """The deltas are rounded: nothing else depends on the tokenizer."""
    join_tokens(pair / "tuned", "Ġplus")
    ended_at(pair, "int3", "matrices", is_compensated=False)
    shutil.copyfile(pair / "base" / "tokenizer.json", pair / "tuned" / "tokenizer.json")
    rounded = replace(order(pair), is_compensated=False)
    tokens = tokenize_judged(JUDGED, prepare(rounded, lambda what, done, total: None))
    (trial,) = compress_within(
        rounded, JudgementTexts(sha256="1" * 64, texts=JUDGED), lambda each: each.format == "int2"
    ).trials
    expected = [len(one) - first for one, first in zip(tokens.sequences, tokens.first, strict=True)]
    assert [text.num_tokens for text in trial.losses] == expected


def test_two_commands_do_not_try_at_once(pair: Path) -> None:
    work = pair / ".delta.trials"
    work.mkdir()
    handle = os.open(work, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    with pytest.raises(ConflictError, match="another command"):
        tried(pair, accepted=NOTHING)
    os.close(handle)


def test_a_target_that_is_there_is_kept(pair: Path) -> None:
    compress_delta(order(pair))
    before = read_bytes(pair / "delta")
    with pytest.raises(ConflictError):
        tried(pair, accepted=frozenset({"int2"}))
    assert read_bytes(pair / "delta") == before
    assert left(pair) == {"delta"}


def test_few_texts_are_refused_before_any_work(pair: Path) -> None:
    few = JudgementTexts(sha256="1" * 64, texts=JUDGED[:9])
    with pytest.raises(ConfigError, match="9 texts"):
        compress_within(order(pair), few, lambda each: True)
    assert left(pair) == set()
