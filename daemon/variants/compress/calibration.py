"""Tokens that the layers run on while they are compressed: of calibration texts, or random ones."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from daemon.torch_engine.api.tokenizer import TextTooLongError, load_text_codec
from daemon.torch_engine.model.batch import FlatBatch
from daemon.torch_engine.model.kv_cache import KeysValues, KvCache
from daemon.torch_engine.runner_types import StepItem, StepPlan
from fingerprint.errors import CheckpointError, ConfigError

__all__ = [
    "MAX_SEQUENCE_TOKENS",
    "MAX_TOKENS",
    "CalibrationTexts",
    "CalibrationTokens",
    "PromptOnlyCache",
    "batches_of",
    "random_tokens",
    "tokenize",
]

MAX_TOKENS = 65_536  # in all: hidden states of an 8B model take 1 GiB
MAX_SEQUENCE_TOKENS = 2048
_STEP_TOKENS = 4096
_RANDOM_SEQUENCES, _RANDOM_LENGTH, _SEED = 32, 512, 0


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationTexts:
    """Texts as they were read."""

    sha256: str  # of the file, or of what is used of it
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CalibrationTokens:
    """Tokens of the texts that are used, in one step of the model."""

    batch: FlatBatch
    num_texts: int  # 0: random tokens

    @property
    def num_tokens(self) -> int:
        return self.batch.num_tokens

    @property
    def sha256(self) -> str:
        """Hash of the tokens and of where sequences end."""
        digest = hashlib.sha256(str([span.count for span in self.batch.spans]).encode())
        digest.update(self.batch.token_ids.cpu().numpy().tobytes())
        return digest.hexdigest()


class PromptOnlyCache(KvCache):
    """Cache of steps that have whole prompts only: keys and values are those of the step itself, none is kept."""

    def __init__(self) -> None:
        self._keys, self._values = [], []

    def add(self, layer: int, batch: FlatBatch, key: torch.Tensor, value: torch.Tensor) -> list[KeysValues]:
        pieces = [slice(span.first, span.first + span.count) for span in batch.spans]
        return [(key[:, :, piece], value[:, :, piece]) for piece in pieces]


def tokenize(
    texts: CalibrationTexts, checkpoint: Path, max_context: int, device: torch.device
) -> CalibrationTokens:
    """Return the first texts of up to 65,536 tokens together, each cut at 2,048 or the model's context.

    Raises:
        CheckpointError: ``checkpoint`` has no tokenizer, or one that cannot be read.
        ConfigError: no text has a token.
    """
    codec = load_text_codec(checkpoint)
    if codec is None:
        raise CheckpointError(
            f"{checkpoint} has no tokenizer, which calibration texts need; copy the base's there"
        )
    longest, left = min(MAX_SEQUENCE_TOKENS, max_context), MAX_TOKENS
    sequences = []
    try:
        for text in texts.texts:
            try:
                tokens = codec.encode(text, MAX_TOKENS)[: min(longest, left)]
            except TextTooLongError:
                continue
            if tokens:
                sequences.append(tokens)
                left -= len(tokens)
            if left <= 0:
                break
    finally:
        codec.close()
    if not sequences:
        raise ConfigError("the calibration texts have no token; give a file of the text that the fine-tune serves")
    return _one_step(sequences, len(sequences), device)


def random_tokens(vocab_size: int, max_context: int, device: torch.device) -> CalibrationTokens:
    """Return 32 sequences of up to 512 tokens drawn uniformly from the vocabulary, the same every time."""
    shape = (_RANDOM_SEQUENCES, min(_RANDOM_LENGTH, max_context))
    sequences = np.random.Generator(np.random.Philox(_SEED)).integers(vocab_size, size=shape).tolist()
    return _one_step(sequences, 0, device)


def _one_step(sequences: Sequence[list[int]], num_texts: int, device: torch.device) -> CalibrationTokens:
    items = (StepItem(number, 0, tuple(tokens)) for number, tokens in enumerate(sequences))
    return CalibrationTokens(_batch(StepPlan(tuple(items)), device), num_texts)


def batches_of(sequences: Sequence[list[int]], device: torch.device) -> tuple[FlatBatch, ...]:
    """Return steps of whole sequences, in their order, of up to 4,096 tokens together."""
    return tuple(_batch(plan, device) for plan in _plans(sequences))


def _batch(plan: StepPlan, device: torch.device) -> FlatBatch:
    batch = FlatBatch.from_plan(plan, device)
    batch.last_tokens = torch.arange(batch.num_tokens, device=device)  # the output layer gets every token
    return batch


def _plans(sequences: Sequence[list[int]]) -> Iterator[StepPlan]:
    """Yield steps of whole sequences, of up to 4,096 tokens together."""
    items: list[StepItem] = []
    for tokens in sequences:
        if items and sum(len(item.token_ids) for item in items) + len(tokens) > _STEP_TOKENS:
            yield StepPlan(tuple(items))
            items = []
        items.append(StepItem(len(items), 0, tuple(tokens)))
    yield StepPlan(tuple(items))
