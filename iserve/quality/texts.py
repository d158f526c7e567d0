"""Texts that a model is measured on: paragraphs of a plain text, or prompts with answers in JSON lines."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import msgspec

from fingerprint.errors import ConfigError, NotFoundError
from fingerprint.sanitize import is_plain

__all__ = ["MAX_CHARS", "MAX_FILE_BYTES", "MAX_TEXTS", "Text", "TextFile", "read_texts"]

MAX_FILE_BYTES = 16 * 2**20
MAX_TEXTS = 2000
MAX_CHARS = 32_768  # of one text; the rest is cut
_FORM = 'a .jsonl file has {"prompt": ..., "answer": ...} or {"text": ...} in each line'


@dataclass(frozen=True, slots=True)
class Text:
    """Text to predict, or an answer to predict after a prompt."""

    text: str  # without an answer, the whole; else the prompt
    answer: str | None = None

    @property
    def whole(self) -> str:
        return self.text + (self.answer or "")


@dataclass(frozen=True, kw_only=True, slots=True)
class TextFile:
    """Content of a file of texts."""

    path: Path
    sha256: str
    texts: tuple[Text, ...]
    num_cut: int  # texts that were longer than is read


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    text: str | None = None
    prompt: str | None = None
    answer: str | None = None


def read_texts(path: Path) -> TextFile:
    """Return the texts of a file: of ``.jsonl`` one a line, of any other its paragraphs.

    Raises:
        NotFoundError, ConfigError: no such file, or one that is empty, too large, no text, of another form, or
            of a name that a result cannot have.
    """
    if not is_plain(str(path)):
        raise ConfigError(
            f"the path {ascii(str(path))[:200]} has control characters, or bytes that are not UTF-8; rename it"
        )
    if not path.is_file():
        raise NotFoundError(f"there is no file {path}; give a text file")
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise NotFoundError(f"{path} cannot be read: {error.strerror}; give a text file") from error
    if len(raw) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} has more than {MAX_FILE_BYTES >> 20} MiB; give a part of it")
    try:
        content = raw.decode()
    except UnicodeDecodeError:
        content = "\0"
    if "\0" in content:
        raise ConfigError(f"{path} is not a text in UTF-8; give one")
    texts = _lines(content, path) if path.suffix == ".jsonl" else _paragraphs(content)
    if not texts:
        raise ConfigError(f"{path} is empty; give a file with a text")
    if len(texts) > MAX_TEXTS:
        raise ConfigError(f"{path} has {len(texts)} texts, at most {MAX_TEXTS} are read; give a part of it")
    cut = [text for text in texts if text.answer is None and len(text.text) > MAX_CHARS]
    return TextFile(
        path=path,
        sha256=hashlib.sha256(raw).hexdigest(),
        texts=tuple(text if text.answer is not None else Text(text.text[:MAX_CHARS]) for text in texts),
        num_cut=len(cut),
    )


def _paragraphs(content: str) -> list[Text]:
    blocks: list[list[str]] = [[]]
    for line in content.splitlines():
        if line.strip():
            blocks[-1].append(line)
        elif blocks[-1]:
            blocks.append([])
    return [Text("\n".join(block)) for block in blocks if block]


def _lines(content: str, path: Path) -> list[Text]:
    return [_line(line, path, number) for number, line in enumerate(content.split("\n"), 1) if line.strip()]


def _line(line: str, path: Path, number: int) -> Text:
    try:
        found = msgspec.json.decode(line, type=_Line)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"line {number} of {path}: {error}; {_FORM}") from error
    if found.text and found.prompt is None and found.answer is None:
        return Text(found.text)
    if found.prompt and found.answer and found.text is None:
        if len(found.prompt) + len(found.answer) > MAX_CHARS:
            raise ConfigError(f"line {number} of {path} has more than {MAX_CHARS} characters; shorten it")
        return Text(found.prompt, found.answer)
    raise ConfigError(f"line {number} of {path} has neither a text nor a prompt with its answer; {_FORM}")
