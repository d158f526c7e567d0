"""References that are folders: scores and greedy answers of a checkpoint that no worker serves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from daemon.torch_engine.api.tokenizer import load_text_codec
from daemon.variants.local_model import LocalModel
from fingerprint.errors import CheckpointError
from iserve.quality.facts import tensors_sha256
from iserve.quality.local import ScoredFolder, folder_of, local_facts, open_folder
from iserve.quality.measure import measure
from iserve.quality.scoring import TooLongError
from iserve.quality.texts import Text, TextFile
from tests.fingerprint.small_fine_tunes import TEXTS, tiny_tensors, tuned, write_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / "base", tiny_tensors())
    write_model(folder / "tuned", tuned(tiny_tensors(), size=0.05))
    return folder


@pytest.fixture(scope="module")
def model(folders: Path) -> Iterator[ScoredFolder]:
    with open_folder(folders / "base") as opened:
        yield opened


def texts_of(*texts: Text) -> TextFile:
    return TextFile(path=Path("texts.txt"), sha256="0" * 64, texts=texts, num_cut=0)


def reference(folder: Path) -> Any:
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


def test_scores_are_those_of_transformers(folders: Path, model: ScoredFolder) -> None:
    codec = load_text_codec(folders / "base")
    assert codec is not None
    tokens = codec.encode(TEXTS[0], 512)
    codec.close()
    with torch.no_grad():
        expected = reference(folders / "base")(torch.tensor([tokens])).logits[0].float().log_softmax(-1)
    found = model.score(Text(TEXTS[0]))
    assert found.tokens == tuple(f"token_id:{token}" for token in tokens[1:])
    for place, (logprob, top) in enumerate(zip(found.logprobs, found.top, strict=True)):
        assert logprob == pytest.approx(float(expected[place, tokens[place + 1]]), abs=0.05)
        assert 20 <= len(top) <= 21
        assert max(top.values()) == pytest.approx(float(expected[place].max()), abs=0.05)


def test_answers_are_those_of_greedy_decoding(folders: Path, model: ScoredFolder) -> None:
    """A prompt whose first tokens leave no two close, so that rounding does not decide."""
    loaded, codec = reference(folders / "base"), load_text_codec(folders / "base")
    assert codec is not None
    prompt = codec.encode(TEXTS[3], 512)
    tokens = list(prompt)
    for _ in range(3):
        with torch.no_grad():
            tokens.append(int(np.argmax(loaded(torch.tensor([tokens])).logits[0, -1].float().numpy())))
    said = codec.decode(tokens[len(prompt) :]).strip()
    local = LocalModel(folders / "base")
    assert local.answers_with(prompt, said, 3)
    assert not local.answers_with(prompt, said + " and more", 3)
    assert not local.answers_with(prompt, "x" + said, 3)
    local.close()
    codec.close()


def test_a_model_is_no_different_from_itself(model: ScoredFolder) -> None:
    pairs = [Text(*text.split("A:", 1)) for text in TEXTS[:4]]
    found = measure(texts_of(*pairs), model, model, seed=0)
    assert found.comparison is not None
    assert found.comparison.nll_difference.value == 0
    assert found.comparison.kl.value == pytest.approx(0, abs=1e-6)
    assert found.comparison.top1_agreement.value == 1
    assert found.exact_match == found.comparison.exact_match
    assert found.text.num_tokens == sum(len(model.score(pair).tokens) for pair in pairs)


def test_a_fine_tune_is_another_than_its_base(folders: Path, model: ScoredFolder) -> None:
    with open_folder(folders / "tuned") as other:
        found = measure(texts_of(*map(Text, TEXTS[:4])), other, model, seed=0)
    assert found.comparison is not None
    assert found.comparison.kl.value > 0.01
    assert found.comparison.top1_agreement.value < 1


def test_a_long_text_is_cut_and_a_long_prompt_left_out(model: ScoredFolder) -> None:
    found = model.score(Text(TEXTS[0] * 100))
    assert found.was_cut
    assert len(found.tokens) < 512
    assert TEXTS[0] * 100 == found.part + (TEXTS[0] * 100)[len(found.part) :]
    with pytest.raises(TooLongError):
        model.score(Text(TEXTS[0] * 100, "an answer"))


def test_folders_are_named_as_paths(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folders)
    assert folder_of("./base") == Path("base")
    assert folder_of(str(folders / "base")) == folders / "base"
    assert folder_of("base") is None  # a served name
    with pytest.raises(CheckpointError, match="no folder"):
        folder_of("./nothing")


def test_facts_name_the_tensors(folders: Path) -> None:
    facts = local_facts(folders / "tuned")
    assert facts.sha256 == tensors_sha256(folders / "tuned")
    assert facts.variant_hash is None
    assert "torch" in (facts.engine_version or "")


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "bare", tiny_tensors(), has_tokenizer=False)
    with pytest.raises(CheckpointError, match="tokenizer"), open_folder(tmp_path / "bare"):
        pass
