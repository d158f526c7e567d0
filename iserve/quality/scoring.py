"""Scores of texts by a served model, over its OpenAI completions: log-probabilities, and greedy answers.

Works with every engine that answers ``echo`` with ``logprobs``: iServe's own and vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import msgspec

from daemon.common_tokens import num_common
from daemon.http_exchange import EXCHANGE_ERRORS, exchange
from fingerprint.errors import BadInputError, ConfigError, EngineError, NotFoundError, UnavailableError
from iserve.quality.texts import Text
from iserve.replay.endpoint import Endpoint

__all__ = ["MAX_MATCHED_TOKENS", "TOP", "ScoredModel", "ScoredText", "Scorer", "TooLongError"]

TOP = 20  # likeliest tokens for each place; vLLM's limit
_MAX_ANSWER_BYTES = 64 * 2**20
_TIMEOUT_S = 600.0
MAX_MATCHED_TOKENS = 511  # of an answer without its end
_CONTEXT_EXCEEDED = "context_length_exceeded"  # OpenAI's code of a prompt that is too long
_TOO_LONG = ("context length", "logprobs, at most")  # parts of messages on one, of engines that give no such code

T = TypeVar("T")


class TooLongError(BadInputError):
    """A text with more tokens than the model's context."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredText:
    """Predictions of a model on one text, at each token that counts."""

    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    top: tuple[Mapping[str, float], ...]  # log-probabilities of the likeliest tokens in its place, and its own
    was_cut: bool
    is_match: bool | None  # whether the greedy answer is the given one; None: none is given, or it is too long
    part: str  # that was scored

    def first(self, count: int) -> ScoredText:
        """Return the predictions of the first ``count`` tokens."""
        return replace(self, tokens=self.tokens[:count], logprobs=self.logprobs[:count], top=self.top[:count])


class Scorer(Protocol):
    """Model that texts are scored by, in several threads at once."""

    @property
    def name(self) -> str:
        """Name that messages have."""

    def score(self, text: Text) -> ScoredText:
        """Return the model's predictions on ``text``; TooLongError: it is not cut and does not fit."""


class _Logprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None]


class _Choice(msgspec.Struct):
    text: str = ""
    logprobs: _Logprobs | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]


class _Error(msgspec.Struct):
    message: str = ""
    code: str | int | None = None


class _ErrorBody(msgspec.Struct):
    error: _Error


@dataclass(frozen=True, slots=True)
class ScoredModel:
    """Model of an endpoint. Methods may run in several threads at once."""

    endpoint: Endpoint
    name: str
    key: str | None

    def __post_init__(self) -> None:
        if self.key and not (self.key.isascii() and self.key.isprintable()):
            raise ConfigError("the API key (--key, OPENAI_API_KEY) holds characters that no key has")

    def score(self, text: Text) -> ScoredText:
        """Return the model's predictions on ``text``, of which half is left until it fits the context.

        Raises:
            TooLongError: a prompt with its answer, which are not cut.
            EngineError: the answer has no logprobs.
            UnavailableError, NotFoundError, BadInputError: what the endpoint said.
        """
        if text.answer is not None:
            return self._score_answer(text.text, text.answer)
        part = text.text
        while True:
            try:
                return _scored(self._logprobs(part), 1, part, was_cut=part != text.text, is_match=None)
            except TooLongError:
                if len(part) < 2:
                    raise
                part = part[: len(part) // 2]

    def _score_answer(self, prompt: str, answer: str) -> ScoredText:
        """Return the predictions of what the tokens of both have after the prompt's own.

        A tokenizer may merge the end of a prompt and the start of its answer, "A: " and "Paris" into " Paris": a
        token of both is predicted.
        """
        whole = self._logprobs(prompt + answer)
        first = num_common(self._logprobs(prompt, top=1).tokens, whole.tokens)
        is_short = len(whole.tokens) - first <= MAX_MATCHED_TOKENS
        return _scored(
            whole,
            first,
            prompt + answer,
            was_cut=False,
            is_match=self._matches(prompt, answer) if is_short else None,
        )

    def _matches(self, prompt: str, answer: str) -> bool:
        limit = 1 + min(MAX_MATCHED_TOKENS, len(answer.encode()))  # no token has less than a byte
        greedy = self._complete({"prompt": prompt, "max_tokens": limit, "temperature": 0})
        return greedy.choices[0].text.strip() == answer.strip()

    def _logprobs(self, text: str, top: int = TOP) -> _Logprobs:
        options = {"echo": True, "logprobs": top, "max_tokens": 0, "return_tokens_as_token_ids": True}
        found = self._complete({"prompt": text, "temperature": 0} | options).choices[0].logprobs
        if found is None or not len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs):
            raise EngineError(
                f"{self.endpoint.url} answers without logprobs of the prompt; iServe's embedded engine and vLLM "
                "have them (echo with logprobs): deploy the model on one of these"
            )
        return found

    def _complete(self, body: dict[str, Any]) -> _Answer:
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        try:
            status, raw = exchange(
                self.endpoint.url,
                "POST",
                f"{self.endpoint.base_path}/completions",
                body=msgspec.json.encode({"model": self.name} | body),
                headers=headers,
                timeout_s=_TIMEOUT_S,
                max_bytes=_MAX_ANSWER_BYTES,
            )
        except EXCHANGE_ERRORS as error:
            raise UnavailableError(f"{self.endpoint.url} does not answer: {error}") from error
        if status != 200:
            raise self._failure(status, raw)
        answer = _decoded(raw, _Answer)
        if answer is None or not answer.choices:
            raise EngineError(f"{self.endpoint.url} answers with what is no OpenAI completion; give another URL")
        return answer

    def _failure(self, status: int, raw: bytes) -> Exception:
        body = _decoded(raw, _ErrorBody)
        said = f"status {status}; its log may say why" if body is None else body.error.message[:500]
        message = f"{self.endpoint.url} on {self.name!r}: {said}"
        code = None if body is None else body.error.code
        if status == 400 and (code == _CONTEXT_EXCEEDED or any(part in said for part in _TOO_LONG)):
            return TooLongError(message)
        if status == 404:
            return NotFoundError(message)
        return BadInputError(message) if status == 400 else UnavailableError(message)


def _decoded(raw: bytes, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _scored(found: _Logprobs, first: int, part: str, *, was_cut: bool, is_match: bool | None) -> ScoredText:
    """Return the predictions from token ``first`` on; the first of all has none."""
    places = range(max(1, first), len(found.tokens))
    logprobs = tuple(found.token_logprobs[place] for place in places)
    tops: Sequence[dict[str, float | None]] = [found.top_logprobs[place] or {} for place in places]
    if any(logprob is None for logprob in logprobs) or not all(tops):
        raise EngineError("the answer has tokens without logprobs; deploy the model on another engine")
    return ScoredText(
        tokens=tuple(found.tokens[place] for place in places),
        logprobs=tuple(float(logprob or 0.0) for logprob in logprobs),
        top=tuple({token: -9999.0 if p is None else p for token, p in top.items()} for top in tops),
        was_cut=was_cut,
        is_match=is_match,
        part=part,
    )
