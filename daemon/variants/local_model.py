"""Model of a folder that scores texts in this process, as the embedded engine holds and computes it.

For a reference that is not served: the fine-tune that a delta was made of. A text is one pass, and an answer that
is decoded one pass for each token; nothing is cached between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import numpy as np
import torch

from daemon.torch_engine.api.tokenizer import TextTooLongError, end_token_ids, load_text_codec
from daemon.torch_engine.model.batch import FlatBatch
from daemon.torch_engine.model.stage_model import StageModel, StageShape, read_source
from daemon.torch_engine.model.tensor_parallel import TensorParallel
from daemon.torch_engine.runner_types import StepItem, StepPlan
from daemon.torch_engine.runtime.scoring import TokenScore, score
from daemon.variants.compress.calibration import PromptOnlyCache
from fingerprint.config import WeightFormat
from fingerprint.errors import CheckpointError, EngineError

__all__ = ["LocalModel", "LocalScores"]

_LOGITS_TOKENS = 512  # whose logits are held at once


@dataclass(frozen=True, slots=True)
class LocalScores:
    """Tokens of a text, and the score of each from the first predicted one on."""

    tokens: tuple[int, ...]
    first: int
    scores: tuple[TokenScore, ...]


class LocalModel:
    """Checkpoint that is loaded whole, on the CPU. Methods may run in several threads at once, one waits for
    another.

    Raises:
        NotFoundError, ConfigError, CheckpointError, UnsupportedModelError: as ``read_source`` and
            ``StageModel.load``, or the folder has no tokenizer.
    """

    def __init__(self, checkpoint: Path) -> None:
        device = torch.device("cpu")
        source = read_source(checkpoint, device, None)
        codec = load_text_codec(checkpoint)
        if codec is None:
            raise CheckpointError(f"{checkpoint} has no tokenizer, which texts need; copy the base's there")
        self._codec, self._ends, self._lock = codec, end_token_ids(checkpoint, codec), Lock()
        self.max_context_tokens = source.spec.max_context_tokens
        shape = StageShape(0, source.spec.num_layers, is_first=True, is_last=True)
        try:
            self._stage = StageModel(source, shape, WeightFormat.BITS16, TensorParallel(1, 0, {}))
        except EngineError as error:
            raise CheckpointError(f"{checkpoint} cannot be loaded here: {error}; serve it") from error
        self._stage.load(device)

    def close(self) -> None:
        """End the tokenizer."""
        self._codec.close()

    def encode(self, text: str) -> list[int] | None:
        """Return the tokens of a text; None: there are more than the context holds."""
        try:
            tokens = self._codec.encode(text, self.max_context_tokens)
        except TextTooLongError:
            return None
        return tokens if len(tokens) <= self.max_context_tokens else None

    def score(self, tokens: Sequence[int], first: int, top: int) -> LocalScores:
        """Return the scores of ``tokens`` from ``first`` (1 or more) on, with the ``top`` likeliest of each."""
        found: list[TokenScore] = []
        with self._lock:
            for at in range(first, len(tokens), _LOGITS_TOKENS):
                places = range(at, min(at + _LOGITS_TOKENS, len(tokens)))
                logits = self._logits(tokens, [place - 1 for place in places])
                found.extend(score(row, tokens[place], top) for row, place in zip(logits, places, strict=True))
        return LocalScores(tuple(tokens), first, tuple(found))

    def answers_with(self, prompt: Sequence[int], answer: str, max_tokens: int) -> bool:
        """Return whether greedy decoding after ``prompt`` gives ``answer``, white space around it left out.

        It ends at the first token that leads away from it.
        """
        tokens, wanted = list(prompt), answer.strip()
        reader = self._codec.detokenizer(prompt)
        said = ""
        with self._lock:
            for _ in range(min(max_tokens, self.max_context_tokens - len(prompt))):
                token = int(np.argmax(self._logits(tokens, [len(tokens) - 1])[0]))
                if token in self._ends:
                    break
                tokens.append(token)
                said += reader.push(token)
                if not wanted.startswith(said.strip()):
                    return False
        return (said + reader.flush()).strip() == wanted

    def _logits(self, tokens: Sequence[int], places: Sequence[int]) -> np.ndarray:
        """Return the logits after ``places``, [places, vocabulary] in float32."""
        batch = FlatBatch.from_plan(StepPlan((StepItem(0, 0, tuple(tokens)),)), torch.device("cpu"))
        batch.last_tokens = torch.tensor(places)
        return self._stage.forward(batch, None, PromptOnlyCache()).float().numpy()
