"""Loss of a delta on texts, layer by layer: predictions of base + delta next to those of the fine-tune.

Both compute in float32 on the same tokens, so that only the change that was lost makes the difference. Memory: a
layer of each, the hidden states of both, and the logits of 512 tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from daemon.common_tokens import num_common
from daemon.torch_engine.api.tokenizer import TextCodec, TextTooLongError, load_text_codec
from daemon.torch_engine.model.batch import FlatBatch
from daemon.torch_engine.model.stage_model import StageModel
from daemon.variants.compress.calibration import MAX_SEQUENCE_TOKENS, MAX_TOKENS, PromptOnlyCache, batches_of
from daemon.variants.compress.compressor import Prepared
from daemon.variants.compress.model_parts import layer_stage
from daemon.variants.compress.units import read_matrix
from fingerprint.codec import to_json
from fingerprint.delta.reader import Delta
from fingerprint.errors import CheckpointError, ConfigError

__all__ = ["MIN_TEXTS", "JudgedText", "JudgedTokens", "JudgementTexts", "TextLoss", "judge", "tokenize_judged"]

MIN_TEXTS = 10  # of fewer a bootstrap interval says little
_LOGITS_TOKENS = 512  # whose logits are held at once: 0.25 GiB of each model, of a vocabulary of 131,072
Hidden = list[torch.Tensor | None]  # [1, T, hidden] of each batch; None before the first layer


@dataclass(frozen=True, slots=True)
class JudgedText:
    """Text whose tokens are predicted; where it has a prompt, those alone that the prompt does not begin with."""

    prompt: str
    rest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgementTexts:
    """Texts that deltas are judged on, none of which is one of calibration."""

    sha256: str  # of their file, or of what is used of it
    texts: tuple[JudgedText, ...]


@dataclass(frozen=True, slots=True)
class JudgedTokens:
    """Tokens of texts that have one to predict."""

    sequences: tuple[list[int], ...]
    first: tuple[int, ...]  # place of the first token of each that is predicted

    @property
    def sha256(self) -> str:
        return hashlib.sha256(to_json(self)).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class TextLoss:
    """Sums over the predicted tokens of one text."""

    num_tokens: int
    finetuned_nll: float  # nats
    delta_nll: float
    kl: float  # KL(fine-tune || base + delta), of whole distributions
    num_agreeing: int  # tokens where both find the same one likeliest


def tokenize_judged(texts: Sequence[JudgedText], prepared: Prepared) -> JudgedTokens:
    """Return the tokens of the first texts of up to 65,536 together.

    A text is cut at 2,048 tokens or the model's context. Left out are longer ones that have a prompt, and those
    that have no token to predict.

    Raises:
        CheckpointError: the fine-tune has no tokenizer, or one that cannot be read.
        ConfigError: fewer than 10 texts are left.
    """
    checkpoint = prepared.source.checkpoint
    codec = load_text_codec(checkpoint)
    if codec is None:
        raise CheckpointError(f"{checkpoint} has no tokenizer, which texts need; copy the base's there")
    longest, left = min(MAX_SEQUENCE_TOKENS, prepared.source.spec.max_context_tokens), MAX_TOKENS
    found: list[tuple[list[int], int]] = []
    try:
        for text in texts:
            one = _tokens_of(text, codec, longest)
            if one is not None and len(one[0]) <= left:
                found.append(one)
                left -= len(one[0])
    finally:
        codec.close()
    if len(found) < MIN_TEXTS:
        raise ConfigError(
            f"{len(found)} texts with a token to predict are there to judge the delta by, and {MIN_TEXTS} are "
            "needed for an interval; give more texts"
        )
    return JudgedTokens(tuple(tokens for tokens, _ in found), tuple(first for _, first in found))


def _tokens_of(text: JudgedText, codec: TextCodec, longest: int) -> tuple[list[int], int] | None:
    try:
        tokens = codec.encode(text.prompt + text.rest, MAX_TOKENS)
    except TextTooLongError:
        return None
    first = max(1, num_common(codec.encode(text.prompt, MAX_TOKENS), tokens)) if text.prompt else 1
    if len(tokens) > longest and text.prompt:
        return None
    tokens = tokens[:longest]
    return (tokens, first) if first < len(tokens) else None


def judge(
    prepared: Prepared,
    delta: Delta,
    tokens: JudgedTokens,
    device: torch.device,
    report: Callable[[int, int], None],
) -> tuple[TextLoss, ...]:
    """Return what each text loses by ``delta``, in order; ``report`` gets layers done, and in all.

    Raises:
        CheckpointError: a file that cannot be read, a tensor that changed since ``prepare``, or predictions that
            are not finite.
    """
    batches = batches_of(tokens.sequences, device)
    sides = [_Side(prepared, None, device), _Side(prepared, delta, device)]
    num_layers = prepared.source.spec.num_layers
    for layer in range(num_layers):
        for side in sides:
            side.load(layer)
        if layer < num_layers - 1:
            for side in sides:
                side.advance(batches)
        report(layer, num_layers)
    sums = _Sums(len(tokens.sequences), device)
    first_text = 0
    for number, batch in enumerate(batches):
        firsts = tokens.first[first_text : first_text + len(batch.spans)]
        places, texts = _places(batch, firsts, first_text, device)
        for at in range(0, len(places), _LOGITS_TOKENS):
            part = slice(at, at + _LOGITS_TOKENS)
            of_both = [side.log_probabilities(number, batch, places[part]) for side in sides]
            sums.add(of_both[0], of_both[1], batch.token_ids[0, places[part] + 1], texts[part])
        first_text += len(batch.spans)
    report(num_layers, num_layers)
    return sums.of_texts(prepared)


class _Side:
    """Model that is judged, a layer at a time: the fine-tune, or base + delta."""

    def __init__(self, prepared: Prepared, delta: Delta | None, device: torch.device) -> None:
        self._prepared, self._delta, self._device = prepared, delta, device
        self._records = {} if delta is None else {each.name: each for each in delta.manifest.matrices}
        self._stage: StageModel | None = None
        self._hidden: Hidden = []

    def load(self, layer: int) -> None:
        """Read a layer, with embeddings or output layer where they are next to it."""
        parts, self._stage = self._prepared.parts, None
        stage = layer_stage(parts.source, layer)
        stage.load(self._device)
        self._prepared.pair.finetuned.check_files()
        if self._delta is not None:
            for module, name in parts.layers[layer].items():
                self._set(stage.linears[module], name)
            for module, name in parts.embeddings.items() if stage.shape.is_first else ():
                if module != parts.source.layout.head:
                    self._set(stage.module(module), name)
            head = self._head_name()
            if head is not None and stage.shape.is_last:
                self._set(stage.module(parts.source.layout.head), head)
        self._stage = stage

    def _head_name(self) -> str | None:
        """Return the tensor of the output layer where it was changed; of a tied one, that of the embeddings."""
        parts = self._prepared.parts
        if parts.source.spec.tied_embeddings:
            return parts.embeddings.get(parts.source.layout.embedding[0])
        return parts.head

    def _set(self, module: nn.Module, name: str) -> None:
        assert self._delta is not None
        change = torch.from_numpy(self._delta.change(self._records[name]))
        weight = (read_matrix(self._prepared.pair.base, name) + change).to(self._device)
        assert module.weight.shape == weight.shape
        module.weight = nn.Parameter(weight, requires_grad=False)

    def advance(self, batches: Sequence[FlatBatch]) -> None:
        """Compute the layer's outputs, not of the last."""
        before = self._hidden or [None] * len(batches)
        self._hidden = [self._forward(batch, hidden) for batch, hidden in zip(batches, before, strict=True)]

    def log_probabilities(self, number: int, batch: FlatBatch, places: torch.Tensor) -> torch.Tensor:
        """Return those after ``places`` of a batch, [places, vocabulary] in float32, by the last layer."""
        batch.last_tokens = places
        logits = self._forward(batch, self._hidden[number] if self._hidden else None)
        return torch.log_softmax(logits.float(), dim=-1)

    def _forward(self, batch: FlatBatch, hidden: torch.Tensor | None) -> torch.Tensor:
        assert self._stage is not None
        return self._stage.forward(batch, hidden, PromptOnlyCache())


def _places(
    batch: FlatBatch, firsts: Sequence[int], first_text: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the places of a batch whose next token is predicted, and the number of the text of each."""
    places: list[int] = []
    texts: list[int] = []
    for number, (span, first) in enumerate(zip(batch.spans, firsts, strict=True), first_text):
        own = range(span.first + first - 1, span.first + span.count - 1)
        places.extend(own)
        texts.extend([number] * len(own))
    return torch.tensor(places, device=device), torch.tensor(texts, device=device)


def _divergence(tuned: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Return KL(tuned || kept) [T] of log-probabilities [T, vocabulary]; tokens that cannot be have no part."""
    each = tuned.exp() * (tuned - kept)
    return torch.where(tuned == -torch.inf, torch.zeros_like(each), each).sum(1)


class _Sums:
    """Sums over the tokens of each text, in float64."""

    def __init__(self, num_texts: int, device: torch.device) -> None:
        new = partial(torch.zeros, num_texts, dtype=torch.float64, device=device)
        self._tokens, self._finetuned, self._delta, self._kl, self._agreeing = (new() for _ in range(5))

    def add(self, tuned: torch.Tensor, kept: torch.Tensor, ids: torch.Tensor, texts: torch.Tensor) -> None:
        """Add tokens ``ids`` with their log-probabilities [T, vocabulary] by both models."""
        for total, values in (
            (self._tokens, torch.ones_like(ids)),
            (self._finetuned, -tuned.gather(1, ids[:, None])[:, 0]),
            (self._delta, -kept.gather(1, ids[:, None])[:, 0]),
            (self._kl, _divergence(tuned, kept)),
            (self._agreeing, tuned.argmax(1) == kept.argmax(1)),
        ):
            total.index_add_(0, texts, values.double())

    def of_texts(self, prepared: Prepared) -> tuple[TextLoss, ...]:
        """Return the sums of each text; CheckpointError where one is not finite."""
        if not all(torch.isfinite(each).all() for each in (self._finetuned, self._delta, self._kl)):
            raise CheckpointError(
                f"{prepared.source.checkpoint}, or its delta, gives a text no finite likelihood; the fine-tune "
                "does not compute with these texts, or a layer was damaged: take an earlier one"
            )
        columns = (self._tokens, self._finetuned, self._delta, self._kl, self._agreeing)
        return tuple(
            TextLoss(num_tokens=int(n), finetuned_nll=f, delta_nll=d, kl=k, num_agreeing=int(a))
            for n, f, d, k, a in zip(*(each.tolist() for each in columns), strict=True)
        )
