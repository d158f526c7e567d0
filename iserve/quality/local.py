"""Reference that is a folder: its scores in the form of a served model's, computed in this process."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from daemon.common_tokens import num_common
from daemon.torch_engine.trimmed_imports import trimmed_imports
from fingerprint.errors import CheckpointError
from fingerprint.extras import need_extra
from iserve.model_source import existing_path
from iserve.quality.document import ModelFacts
from iserve.quality.facts import tensors_sha256, weights_stamp
from iserve.quality.scoring import MAX_MATCHED_TOKENS, TOP, ScoredText, TooLongError
from iserve.quality.texts import Text

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from daemon.variants.local_model import LocalModel

__all__ = ["ScoredFolder", "folder_of", "local_facts", "open_folder"]


def folder_of(reference: str) -> Path | None:
    """Return the folder that a reference names, which begins with ``.``, ``/`` or ``~``; None: a served name.

    Raises:
        CheckpointError: there is no such folder.
    """
    if not reference.startswith((".", "/", "~")):
        return None
    path = existing_path(reference)
    if path is None or not path.is_dir():
        raise CheckpointError(
            f"there is no folder {reference[:200]!r}; give a checkpoint's, or a name that is served"
        )
    return path


def local_facts(folder: Path) -> ModelFacts:
    """Return what is known of a checkpoint that this process loads; errors of ``tensors_sha256``."""
    from daemon.torch_engine.versions import component_versions

    stamp, sha256 = weights_stamp(folder), tensors_sha256(folder)
    version = ", ".join(f"{name} {release}" for name, release in component_versions()[1:])
    return ModelFacts(
        name=str(folder), checkpoint=str(folder), sha256=sha256, weights_stamp=stamp, engine_version=version
    )


@contextmanager
def open_folder(folder: Path) -> Iterator[ScoredFolder]:
    """Yield the model in ``folder``, loaded.

    Raises:
        MissingExtraError: torch is not installed.
        BadInputError: as ``LocalModel``.
    """
    need_extra("torch", "a reference that is a folder")
    with trimmed_imports():  # torch: seconds
        from daemon.variants.local_model import LocalModel

    model = LocalModel(folder)
    try:
        yield ScoredFolder(name=str(folder), model=model)
    finally:
        model.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredFolder:
    """Model of this process. Methods may run in several threads at once."""

    name: str
    model: LocalModel

    def score(self, text: Text) -> ScoredText:
        """Return the model's predictions on ``text``, of which half is left until it fits the context.

        Raises:
            TooLongError: a prompt with its answer, which are not cut.
        """
        if text.answer is not None:
            return self._score_answer(text.text, text.answer)
        part = text.text
        while (tokens := self.model.encode(part)) is None:
            part = part[: len(part) // 2]
        return self._scored(tokens, 1, part, was_cut=part != text.text, is_match=None)

    def _score_answer(self, prompt: str, answer: str) -> ScoredText:
        tokens, before = self.model.encode(prompt + answer), self.model.encode(prompt)
        if tokens is None or before is None:
            raise TooLongError(f"a prompt with its answer is longer than the context of {self.name}")
        first = num_common(before, tokens)
        is_match = None
        if len(tokens) - first <= MAX_MATCHED_TOKENS:
            limit = 1 + min(MAX_MATCHED_TOKENS, len(answer.encode()))
            is_match = self.model.answers_with(before, answer, limit)
        return self._scored(tokens, first, prompt + answer, was_cut=False, is_match=is_match)

    def _scored(
        self, tokens: list[int], first: int, part: str, *, was_cut: bool, is_match: bool | None
    ) -> ScoredText:
        found = self.model.score(tokens, max(1, first), TOP)
        predicted = found.tokens[found.first :]
        tops = (
            {_name(token): each.logprob} | {_name(other): p for other, p in each.top}
            for token, each in zip(predicted, found.scores, strict=True)
        )
        return ScoredText(
            tokens=tuple(map(_name, predicted)),
            logprobs=tuple(each.logprob for each in found.scores),
            top=tuple(tops),
            was_cut=was_cut,
            is_match=is_match,
            part=part,
        )


def _name(token: int) -> str:
    return f"token_id:{token}"
