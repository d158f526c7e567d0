"""Formats that are chosen by their loss: which texts judge, what the command says, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from daemon.variants.compress import TextLoss, Trial
from fingerprint.delta import read_delta
from fingerprint.errors import ConfigError
from iserve.delta_loss import is_within, judgement_document, split_texts
from iserve.quality.texts import read_texts
from tests.daemon.variants.trained_pair import write_trained_pair
from tests.fingerprint.small_fine_tunes import TEXTS
from tests.golden_words import Golden
from tests.iserve.command_line import Done, iserve

__all__ = ["iserve"]  # a fixture


def file_of(folder: Path, name: str, texts: tuple[str, ...]) -> Path:
    path = folder / name
    path.write_text("\n\n".join(texts))
    return path


# Which texts judge.


def test_each_fourth_distinct_text_judges_and_no_text_does_both(tmp_path: Path) -> None:
    file = read_texts(file_of(tmp_path, "texts.txt", (*TEXTS[:3], TEXTS[0], *TEXTS[3:], *TEXTS)))
    split = split_texts(file, None)
    assert [text.whole for text in split.judgement] == list(TEXTS[3::4])
    assert [text.whole for text in split.calibration] == [each for n, each in enumerate(TEXTS) if n % 4 != 3]
    assert split.is_split
    assert split.judgement_sha256 != split.calibration_sha256


def test_files_of_their_own_are_used_whole(tmp_path: Path) -> None:
    calibration, text = file_of(tmp_path, "a.txt", TEXTS[:5]), file_of(tmp_path, "b.txt", TEXTS[5:9])
    split = split_texts(read_texts(calibration), read_texts(text))
    assert [text.whole for text in split.calibration] == list(TEXTS[:5])
    assert [text.whole for text in split.judgement] == list(TEXTS[5:9])
    assert not split.is_split
    assert split_texts(None, read_texts(text)).calibration == ()


def test_texts_that_would_do_both_are_refused(tmp_path: Path, golden: Golden) -> None:
    calibration, text = file_of(tmp_path, "a.txt", TEXTS[:5]), file_of(tmp_path, "b.txt", TEXTS[4:9])
    few = file_of(tmp_path, "c.txt", TEXTS[:3])
    for files in ((calibration, text), (few, None), (None, None)):
        with pytest.raises(ConfigError) as error:
            split_texts(*(None if file is None else read_texts(file) for file in files))
        golden("variant", str(error.value).replace(str(tmp_path), "TMP"), str(len([f for f in files if f])))


# What is within a limit.


def trial_of(*differences: float) -> Trial:
    losses = tuple(
        TextLoss(num_tokens=10, finetuned_nll=20.0, delta_nll=20.0 + 10 * each, kl=10 * abs(each), num_agreeing=9)
        for each in differences
    )
    return Trial(format="int2", content_hash="0", num_bytes=1000, losses=losses)


def test_the_upper_end_of_the_interval_decides(tmp_path: Path) -> None:
    trial = trial_of(*([0.0] * 15 + [0.2] * 5))
    texts = split_texts(read_texts(file_of(tmp_path, "texts.txt", TEXTS)), None)
    (found,) = judgement_document(texts, [trial], 0.06).trials
    assert found.loss.value == pytest.approx(0.05)
    assert found.loss.low is not None
    assert found.loss.high is not None
    assert found.loss.low < 0.05 < found.loss.high
    assert not found.is_kept  # its mean is within, the upper end is not
    assert is_within(trial, found.loss.high)
    assert not is_within(trial, found.loss.high - 1e-9)
    assert found.finetuned_nll == pytest.approx(2.0)
    assert found.top1_agreement.value == pytest.approx(0.9)
    assert is_within(trial_of(*[0.01] * 10), 0.0100001)


# The command.


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    file_of(folder, "texts.txt", write_trained_pair(folder))
    return folder


def compress(iserve: Callable[..., Done], trained: Path, out: Path, loss: float, *options: object) -> Done:
    words = (trained / "base", trained / "tuned", out, "--max-quality-loss", loss)
    return iserve("variant", "compress", *words, "--calibration", trained / "texts.txt", *options)


@pytest.mark.slow
def test_a_stricter_limit_takes_more_bits(
    iserve: Callable[..., Done], trained: Path, tmp_path: Path, golden: Golden
) -> None:
    loose, strict = (compress(iserve, trained, tmp_path / str(loss), loss, "--json") for loss in (0.5, 0.05))
    formats = [one.document["format"] for one in (loose, strict)]
    assert formats == ["int2", "int3"]
    assert read_delta(tmp_path / "0.05").manifest.format == "int3"
    judgement = strict.document["judgement"]
    refused, kept = judgement["trials"]
    assert (refused["format"], refused["is_kept"], kept["format"], kept["is_kept"]) == (
        "int2",
        False,
        "int3",
        True,
    )
    assert refused["loss"]["high"] > 0.05 >= kept["loss"]["high"]
    assert judgement["is_split"]
    assert judgement["num_texts"] == 12
    calibration = read_delta(tmp_path / "0.05").manifest.calibration
    assert calibration is not None
    assert calibration.num_texts == 37
    assert calibration.sha256 != judgement["sha256"]
    said = compress(iserve, trained, tmp_path / "said", 0.05).out.splitlines()
    assert [line.split()[0] for line in said if line.endswith(("kept", "refused"))] == ["int2", "int3"]
    golden("variant", next(line for line in said if line.startswith("judged by")))


@pytest.mark.slow
def test_a_limit_that_no_format_keeps_leaves_nothing(
    iserve: Callable[..., Done], trained: Path, tmp_path: Path
) -> None:
    done = compress(iserve, trained, tmp_path / "delta", 1e-9)
    assert done.code != 0
    for words in ("1e-09", "int2 +0.", "int3 ", "int4 ", "--max-quality-loss"):
        assert words in done.err.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "options",
    [
        ("--max-quality-loss", "-1", "--text", "TEXTS"),
        ("--max-quality-loss", "nan", "--text", "TEXTS"),
        ("--max-quality-loss", "0.1"),
        ("--text", "TEXTS"),
    ],
)
def test_options_that_mean_nothing(iserve: Callable[..., Done], tmp_path: Path, options: tuple[str, ...]) -> None:
    done = iserve("variant", "compress", tmp_path / "a", tmp_path / "b", tmp_path / "delta", *options)
    assert done.code == 2
    assert options[0] in done.err


def test_prompts_are_not_judged_their_answers_are(tmp_path: Path) -> None:
    lines = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(8)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    split = split_texts(read_texts(tmp_path / "pairs.jsonl"), None)
    assert [(text.text, text.answer) for text in split.judgement] == [("3+1=", "4"), ("7+1=", "8")]
