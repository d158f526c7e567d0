"""Text in, text out: a checkpoint's tokenizer and chat template, pieces of text that are whole, and stop strings.

Knows nothing of sequences or requests. A checkpoint without a tokenizer has no :class:`TextCodec`; it can still be
given token ids.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from daemon.torch_engine.api.chat_template import ChatTemplate, RenderedTooLongError
from fingerprint.errors import BadInputError, CheckpointError, EngineError

__all__ = [
    "ChatMessage",
    "Detokenizer",
    "StopMatcher",
    "TextCodec",
    "TextTooLongError",
    "end_token_ids",
    "load_text_codec",
]

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are no character (yet)
_JOINED_CHARS = 4  # that Unicode normalization may make one of (Greek letters with three accents)
_TAIL_TOKENS = 6  # of the prompt, so that the first new token is decoded in its context


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: str
    content: str


class TextTooLongError(BadInputError):
    """Text of more characters than the tokens that it may have can represent."""


class TextCodec:
    """A tokenizer and its chat template. Thread-safe as far as the tokenizer is used here: it is never changed.

    ``close`` it at the end.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._size = len(tokenizer)
        self._special = frozenset(tokenizer.all_special_ids)
        self._longest_chars = _JOINED_CHARS * max(map(len, tokenizer.get_vocab()), default=1)
        self.eos_token_id: int | None = tokenizer.eos_token_id
        self._template, self._no_template = _chat_template(tokenizer)
        self.has_chat_template = self._template is not None or self._no_template is not None

    def close(self) -> None:
        """End the encoding of conversations; what is being rendered is given up."""
        if self._template is not None:
            self._template.close()

    def encode(self, text: str, max_tokens: int) -> list[int]:
        """Return token ids of a prompt, with the special tokens that the tokenizer puts around one.

        Raises:
            BadInputError: the tokenizer fails on the text.
            TextTooLongError: the text must have more than ``max_tokens``, by its length alone. It is not tokenized
                then: 8 MiB took 12 s and more than 1 GB. A text that passes may still have more.
        """
        return self._encode(text, max_tokens, special=True)

    def _encode(self, text: str, max_tokens: int, *, special: bool) -> list[int]:
        if len(text) > max_tokens * self._longest_chars:
            raise self._too_long(len(text), max_tokens)
        try:
            return list(self._tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])
        except BaseException as error:
            if not _is_tokenizers_failure(error):
                raise
            raise BadInputError(f"the model's tokenizer fails on this text: {str(error)[:200]}") from error

    def _too_long(self, chars: int, max_tokens: int) -> TextTooLongError:
        most = max_tokens * self._longest_chars
        return TextTooLongError(
            f"the prompt has {chars:,} characters, {max_tokens} tokens stand for {most:,} at most"
        )

    def encode_chat(self, messages: Sequence[ChatMessage], max_tokens: int) -> list[int]:
        """Return token ids of a conversation, up to where the assistant's answer begins.

        With the checkpoint's chat template; without one as plain text, ``Role: content`` a line and ``Assistant:``
        at the end.

        Raises:
            BadInputError, EngineError, UnavailableError: as :meth:`ChatTemplate.render`, which this waits for.
            TextTooLongError: as :meth:`encode`.
        """
        if self._no_template is not None:
            raise BadInputError(f"the model's chat template refuses these messages: {self._no_template}")
        if self._template is None:
            lines = [f"{message.role.capitalize()}: {message.content}\n" for message in messages]
            return self.encode("".join(lines) + "Assistant:", max_tokens)
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            text = self._template.render(turns, max_tokens * self._longest_chars)
        except RenderedTooLongError as error:
            raise self._too_long(error.chars, max_tokens) from error
        return self._encode(text, max_tokens, special=False)

    def decode(self, tokens: Sequence[int]) -> str:
        known = [token for token in tokens if 0 <= token < self._size]  # a vocabulary may be padded beyond it
        try:
            text = self._tokenizer.decode(known, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        except BaseException as error:
            if not _is_tokenizers_failure(error):
                raise
            raise EngineError(f"the model's tokenizer fails on its tokens: {str(error)[:200]}") from error
        return str(text)

    def detokenizer(self, prompt: Sequence[int]) -> Detokenizer:
        return Detokenizer(self.decode, self._special, prompt)


def _is_tokenizers_failure(error: BaseException) -> bool:
    """Return whether the tokenizer raised it. A panic of its Rust code is no Exception."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


class Detokenizer:
    """Decoder of tokens to text as they arrive, never half a character, no character changed once given out.

    A token's text depends on the one before (leading spaces), so each piece is decoded together with the last.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], special: frozenset[int], prompt: Sequence[int]
    ) -> None:
        self._decode = decode
        self._special = special
        self._tokens = [token for token in prompt[-_TAIL_TOKENS:] if token not in special]
        self._prefix = 0  # tokens[prefix:read] have been given out, and are the context of the rest
        self._read = len(self._tokens)
        self._prefix_text = decode(self._tokens)

    def push(self, token: int) -> str:
        """Return the text that is complete with this token; may be empty."""
        if token in self._special:
            return ""
        self._tokens.append(token)
        # An unfinished character began at most three tokens ago: one of the cuts is at a character's end.
        for cut in range(len(self._tokens), max(self._read, len(self._tokens) - 4), -1):
            text = self._decode(self._tokens[self._prefix : cut])
            if not text.endswith(_REPLACEMENT):
                return self._take(cut, text)
        if len(self._tokens) - self._read > 3:  # bytes that no continuation makes a character
            cut = len(self._tokens) - 3
            return self._take(cut, self._decode(self._tokens[self._prefix : cut]))
        return ""

    def flush(self) -> str:
        """Return what is left at the end, an unfinished character as U+FFFD."""
        return self._take(len(self._tokens), self._decode(self._tokens[self._prefix :]))

    def _take(self, cut: int, text: str) -> str:
        new = text[len(self._prefix_text) :]
        if new:
            self._prefix, self._read = self._read, cut
            self._prefix_text = self._decode(self._tokens[self._prefix : self._read])
        return new


class StopMatcher:
    """Cuts text at the first stop string to be complete, wherever the pieces are divided."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str, *, armed: bool = True) -> tuple[str, bool]:
        """Return the text that can be given out now, and whether a stop string was met (it is not part of the
        text).

        No stop string ends in a text that is pushed while not ``armed``; one may begin there.
        """
        if not self._stops:
            return text, False
        seen = len(self._held)
        self._held += text
        ends_in_text = ((stop, self._held.find(stop, max(0, seen - len(stop) + 1))) for stop in self._stops)
        matches = [(at + len(stop), at) for stop, at in ends_in_text if at >= 0]
        if matches and armed:
            _, at = min(matches)
            given, self._held = self._held[:at], ""
            return given, True
        keep = max(self._overlap(stop) for stop in self._stops)
        cut = len(self._held) - keep
        given, self._held = self._held[:cut], self._held[cut:]
        return given, False

    def flush(self) -> str:
        """Return the text that was held back in case a stop string went on."""
        given, self._held = self._held, ""
        return given

    def _overlap(self, stop: str) -> int:
        """Return the length of the longest end of the held text that is a beginning of ``stop``."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)


def load_text_codec(checkpoint: Path) -> TextCodec | None:
    """Return the checkpoint's tokenizer; None when it has no tokenizer files.

    Raises:
        CheckpointError: the files are there and cannot be read, or want code that is not ours to run.
    """
    if not any((checkpoint / name).is_file() for name in _TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer  # seconds; only workers that have text pay them

    try:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True, trust_remote_code=False)
    except BaseException as error:  # the tokenizers library raises bare Exceptions for a bad file, or panics
        if not _is_tokenizers_failure(error):
            raise
        raise CheckpointError(f"the tokenizer in {checkpoint} cannot be read: {error}") from error
    return TextCodec(tokenizer)


def _chat_template(tokenizer: Any) -> tuple[ChatTemplate | None, str | None]:
    """Return the tokenizer's template, or why it has several and none is meant; neither where it has none."""
    if not tokenizer.chat_template:
        return None, None
    try:
        text = tokenizer.get_chat_template()
    except ValueError as error:
        return None, str(error)
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return ChatTemplate(text, special), None


def end_token_ids(checkpoint: Path, codec: TextCodec | None) -> frozenset[int]:
    """Return tokens that end an answer: generation_config.json's, else config.json's, and the tokenizer's own."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        try:
            value = json.loads((checkpoint / name).read_bytes()).get("eos_token_id")
        except FileNotFoundError:
            continue
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{checkpoint / name} cannot be read: {error}") from error
        found.update(token for token in (value if isinstance(value, list) else [value]) if isinstance(token, int))
        if found:
            break
    if codec is not None and codec.eos_token_id is not None:
        found.add(codec.eos_token_id)
    return frozenset(token for token in found if token >= 0)
