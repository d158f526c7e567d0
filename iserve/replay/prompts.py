"""Request bodies with synthetic prompts of the trace's lengths, the same for the same seed.

As token ids the length is exact. The ids are drawn from the first few hundred, which every vocabulary has; text is
words that are about one token each in the usual vocabularies, and the server's count gives their number of tokens.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fingerprint.errors import ConfigError
from traces.request import PREFIX_BLOCK_TOKENS

__all__ = ["PromptOptions", "Prompts"]

FIRST_ID = 4  # below are, in many vocabularies, padding, the beginning and the end of a text
_KEPT_BLOCKS = 4096
_TEXT = (
    "the of and to in is that it was for on are with as be at one have this from or had by but what some "
    "we can out other were all there when up use your how said each she which do their time if will way "
    "about many then them would like so these her long make thing see him two has look more day could go "
    "come did number sound no most people my over know water than call first who may down side been now "
    "find any new work part take get place"
)

PromptKind = Literal["ids", "text"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptOptions:
    """Options of the request bodies.

    Raises:
        ConfigError: a value that cannot be used.
    """

    kind: PromptKind = "ids"
    chat: bool = False  # /v1/chat/completions, with text
    vocabulary: int = 256  # ids are below
    ignore_eos: bool = True  # answers have the trace's length; only where the engine knows the field
    seed: int = 0

    def __post_init__(self) -> None:
        if self.vocabulary <= FIRST_ID:
            raise ConfigError(f"the vocabulary must have more than {FIRST_ID} ids, got {self.vocabulary}")
        if self.chat and self.kind == "ids":
            raise ConfigError("a chat is asked with text; token ids go to the completions endpoint")

    @property
    def path(self) -> str:
        return "/chat/completions" if self.chat else "/completions"


class Prompts:
    """Bodies, one after the other; the order decides the draws."""

    def __init__(self, models: Sequence[str], options: PromptOptions) -> None:
        self._options = options
        self._random = np.random.default_rng(options.seed)
        self._heads = [b'{"model":' + json.dumps(model).encode() for model in models]
        if options.kind == "ids":
            self._pieces = [b"%d" % i for i in range(FIRST_ID, options.vocabulary)]
            self._joint, self._open, self._close = b",", b',"prompt":[', b"]"
        else:
            self._pieces = [word.encode() for word in _TEXT.split()]
            self._joint = b" "
            self._open, self._close = b',"prompt":"', b'"'
            if options.chat:
                self._open, self._close = b',"messages":[{"role":"user","content":"', b'"}]'
        ends = b',"ignore_eos":true' if options.ignore_eos else b""
        self._tail = b',"temperature":0,"stream":true,"stream_options":{"include_usage":true}' + ends + b"}"
        self._block = functools.lru_cache(_KEPT_BLOCKS)(self._make_block)

    def body(self, model: int, input_tokens: int, output_tokens: int, blocks: Sequence[int] = ()) -> bytes:
        """Return the body of one request. Lengths below one become one: no engine takes less.

        Args:
            model: index into the models.
            blocks: hashes of the prompt's leading blocks; equal ones make equal tokens.
        """
        wanted = max(input_tokens, 1)
        parts = [self._block(block) for block in blocks[: -(-wanted // PREFIX_BLOCK_TOKENS)]]
        shared = [piece for part in parts for piece in part][:wanted]
        drawn = self._random.integers(0, len(self._pieces), wanted - len(shared)).tolist()
        text = self._joint.join([*shared, *map(self._pieces.__getitem__, drawn)])
        limit = b',"max_tokens":%d' % max(output_tokens, 1)
        return b"".join((self._heads[model], self._open, text, self._close, limit, self._tail))

    def _make_block(self, block: int) -> list[bytes]:
        draw = np.random.default_rng((self._options.seed, block % 2**64))
        drawn = draw.integers(0, len(self._pieces), PREFIX_BLOCK_TOKENS).tolist()
        return [self._pieces[i] for i in drawn]
