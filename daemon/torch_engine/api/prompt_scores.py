"""Log-probabilities of prompts: OpenAI's ``echo`` with ``logprobs``, by sequences whose answer is forced."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from daemon.torch_engine.api.openai_api import Generation, bad_request
from daemon.torch_engine.api.streams import Choice
from daemon.torch_engine.runtime.engine import SequenceRequest
from daemon.torch_engine.runtime.sampling import SamplingParams

__all__ = ["scored_choice", "scoring_requests"]

MAX_LOGPROBS = 2**18  # of one answer: tokens times one more than the likeliest in place of each


def scoring_requests(requests: Sequence[SequenceRequest], top: int) -> list[SequenceRequest]:
    """Return ``requests`` as sequences that begin with the first token of a prompt and are given the rest.

    Raises:
        ApiError: 400, more logprobs than one answer holds.
    """
    total = sum(len(request.prompt) for request in requests) * (top + 1)
    if total > MAX_LOGPROBS:
        raise bad_request(
            f"the answer would hold {total} logprobs, at most {MAX_LOGPROBS} are allowed: send fewer or shorter "
            "prompts at once, or lower logprobs",
            "logprobs",
        )
    return [
        replace(
            request,
            prompt=request.prompt[:1],
            forced=request.prompt[1:],
            score_top=top,
            max_tokens=max(1, len(request.prompt) - 1),  # after a lone token one is chosen, and not shown
            min_tokens=0,
            end_ids=frozenset(),  # one within a prompt ends nothing
            sampling=SamplingParams(temperature=0),
        )
        for request in requests
    ]


def scored_choice(generation: Generation, index: int, choice: Choice) -> dict[str, Any]:
    """Return a prompt with the score of each of its tokens but the first, which nothing precedes.

    Tokens are named by their text, or by their ids where the request asks for it or there is no tokenizer; two of
    one text share an entry of ``top_logprobs`` then, as they do in vLLM.
    """
    codec = choice.codec
    known: dict[int, str] = {}

    def name(token: int) -> str:
        if token not in known:
            by_id = generation.tokens_as_ids or codec is None
            known[token] = f"token_id:{token}" if by_id or codec is None else codec.decode([token])
        return known[token]

    tokens = (*choice.request.prompt, *choice.request.forced)
    rest = list(zip(tokens[1:], choice.scores, strict=True))
    likeliest = ({name(token): s.logprob} | {name(other): p for other, p in s.top} for token, s in rest)
    logprobs = {
        "tokens": [name(token) for token in tokens],
        "token_logprobs": [None, *(score.logprob for _, score in rest)],
        "top_logprobs": [None, *likeliest],
        "text_offset": list(itertools.accumulate((len(name(token)) for token in tokens[:-1]), initial=0)),
    }
    text = "" if codec is None else codec.decode(tokens)
    return {"index": index, "finish_reason": "length", "logprobs": logprobs, "text": text}
