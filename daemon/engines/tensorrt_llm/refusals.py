"""TensorRT-LLM's refusal of a request, in the form that OpenAI clients parse.

Its error bodies are flat: ``{"object": "error", "message", "type", "param", "code"}``, nearly all of them 400
``BadRequestError``, and its wording speaks of its own options. Source: ``tensorrt_llm/serve/openai_server.py``.
"""

from __future__ import annotations

import re

import msgspec

__all__ = ["error_body", "openai_error"]


class _Flat(msgspec.Struct, frozen=True):
    """Refusal as it arrives."""

    object: str
    message: str
    param: str | None = None


_MEANINGS = (  # sign, code, what to change
    (
        re.compile(r"should not exceed max_num_tokens"),
        "context_length_exceeded",
        "the prompt is longer than this deployment takes; shorten it, or deploy for longer ones",
    ),
    (
        re.compile(r"default_max_tokens.*must be greater than 0", re.DOTALL),
        "context_length_exceeded",
        "the prompt leaves no room in the deployment's context; shorten it, or deploy for longer ones",
    ),
    (
        re.compile(r"Request beam width .* is not equal to max_beam_width", re.DOTALL),
        "unsupported_value",
        "beam search is not served; leave out use_beam_search and best_of",
    ),
    (
        re.compile(r"No chat template found"),
        "no_chat_template",
        "the model has no chat template; use /v1/completions, or give its tokenizer one",
    ),
)


def openai_error(body: bytes) -> bytes | None:
    """Return ``{"error": {"message", "type", "param", "code"}}`` for a flat body; None for anything else.

    A refusal that is not one of the documented ones keeps its message and has no code.
    """
    try:
        flat = msgspec.json.decode(body, type=_Flat)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if flat.object != "error":
        return None
    message, code = flat.message, None
    for sign, its_code, meaning in _MEANINGS:
        if sign.search(message):
            message, code = f"{meaning} (the engine said: {message})", its_code
            break
    return error_body(message, code=code, param=flat.param)


def error_body(
    message: str, *, code: str | None = None, param: str | None = None, kind: str = "invalid_request_error"
) -> bytes:
    """Return the body that OpenAI clients parse."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})
