"""Values of the OpenAI API: bodies checked on the way in, bodies and error documents on the way out.

Pure: bytes and values, no socket, no engine. Fields that would change the answer and are not done here are refused
by name; fields unknown to this engine are ignored, as vLLM does.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from daemon.torch_engine.api.tokenizer import ChatMessage
from daemon.torch_engine.runtime.sampling import SamplingParams
from daemon.torch_engine.runtime.scoring import MAX_TOP
from fingerprint.errors import BadInputError, ConfigError, IserveError

__all__ = [
    "CONTEXT_EXCEEDED",
    "ApiError",
    "Generation",
    "Usage",
    "choice_body",
    "choice_chunk",
    "context_error",
    "error_body",
    "parse_chat",
    "parse_completion",
    "response",
]

MAX_PROMPTS = 128
MAX_MESSAGES = 10_000
MAX_STOPS = 4
MAX_STOP_TOKENS = 1024
MAX_STOP_CHARS = 1024
DEFAULT_COMPLETION_TOKENS = 16
CONTEXT_EXCEEDED = "context_length_exceeded"

T = TypeVar("T")

# Field -> the values that ask for nothing. ``[]`` and ``{}`` always do.
_NOT_SUPPORTED: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),  # a prompt's scores have it
    "suffix": ("",),
    "logit_bias": (),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "use_beam_search": (False,),
    "prompt_embeds": (),
    "tools": (),
    "tool_choice": ("none", "auto"),
    "functions": (),
    "function_call": ("none", "auto"),
    "audio": (),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "allowed_token_ids": (),
    "bad_words": (),
    "truncate_prompt_tokens": (),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "chat_template": (),
    "chat_template_kwargs": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}


class ApiError(IserveError):
    """An answer other than 200, with the fields of an OpenAI error body."""

    def __init__(
        self, status: int, message: str, kind: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(status, message, kind, param, code)
        self.status, self.message, self.kind, self.param, self.code = status, message, kind, param, code

    def __str__(self) -> str:
        return self.message


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, "invalid_request_error", param, code)


def context_error(prompt_tokens: int, max_tokens: int, context_tokens: int, param: str) -> ApiError:
    asked = f"{prompt_tokens} in the prompt" + (f", {max_tokens} for the output" if max_tokens else "")
    return bad_request(
        f"this model's maximum context length is {context_tokens} tokens, "
        f"you asked for {prompt_tokens + max_tokens} ({asked}); shorten the prompt or lower max_tokens",
        param,
        CONTEXT_EXCEEDED,
    )


def error_body(error: ApiError) -> dict[str, Any]:
    return {
        "error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code},
    }


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Body(msgspec.Struct):
    model: str | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None


class _CompletionBody(_Body):
    prompt: Any = None
    echo: bool | None = None
    logprobs: int | None = None
    return_tokens_as_token_ids: bool | None = None


class _Part(msgspec.Struct):
    type: str
    text: str | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Part] | None = None


class _ChatBody(_Body):
    messages: list[_Message] | None = None
    max_completion_tokens: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """A checked request. One of ``texts``, ``token_lists`` and ``messages`` is there."""

    model: str | None
    chat: bool
    stream: bool
    include_usage: bool
    sampling: SamplingParams
    stops: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    max_tokens: int | None  # None: the default of the route
    min_tokens: int
    ignore_eos: bool
    return_token_ids: bool
    texts: tuple[str, ...] = ()
    token_lists: tuple[tuple[int, ...], ...] = ()
    messages: tuple[ChatMessage, ...] = ()
    score_top: int | None = None  # the prompts are scored and nothing is generated, with so many likeliest tokens
    tokens_as_ids: bool = False  # tokens of scores are named by their ids

    @property
    def prompt_param(self) -> str:
        return "messages" if self.chat else "prompt"


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int

    def body(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


def parse_completion(raw: bytes) -> Generation:
    """Return the body of ``POST /v1/completions``.

    Raises:
        ApiError: 400, naming the field.
    """
    body = _convert(_decode(raw, supported=("echo",)), _CompletionBody)
    texts, token_lists = _prompts(body.prompt)
    scores = _scores(body)
    max_tokens = None if scores else body.max_tokens
    return _generation(body, max_tokens, chat=False, texts=texts, token_lists=token_lists, **scores)


def _scores(body: _CompletionBody) -> dict[str, Any]:
    """Return the fields of a request that scores its prompts; none where it generates."""
    if not body.echo and body.logprobs is None:
        return {}
    for param, is_missing in (
        ("logprobs", not body.echo),  # 0 asks for the sampled token's
        ("echo", body.logprobs is None),
        ("max_tokens", body.max_tokens != 0),
        ("stream", bool(body.stream)),
    ):
        if is_missing:
            raise bad_request(
                "logprobs are those of prompts: send echo=true and max_tokens=0 with them, and no stream", param
            )
    assert body.logprobs is not None
    if not 0 <= body.logprobs <= MAX_TOP:
        raise bad_request(f"logprobs must be 0 to {MAX_TOP}, got {body.logprobs}", "logprobs")
    return {"score_top": body.logprobs, "tokens_as_ids": bool(body.return_tokens_as_token_ids)}


def parse_chat(raw: bytes) -> Generation:
    """Return the body of ``POST /v1/chat/completions``.

    Raises:
        ApiError: 400, naming the field.
    """
    fields = _decode(raw)
    if fields.get("logprobs"):
        raise bad_request("logprobs is not supported", "logprobs")
    body = _convert(fields, _ChatBody)
    if not body.messages:
        raise bad_request("messages must hold at least one message", "messages")
    if len(body.messages) > MAX_MESSAGES:
        raise bad_request(f"{len(body.messages)} messages, at most {MAX_MESSAGES} are allowed", "messages")
    messages = tuple(ChatMessage(message.role, _content(message)) for message in body.messages)
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return _generation(body, limit, chat=True, messages=messages)


def _decode(raw: bytes, supported: Collection[str] = ()) -> dict[str, Any]:
    try:
        fields = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise bad_request("the body is nested too deeply") from error
    if not isinstance(fields, dict):
        raise bad_request("the body must be a JSON object")
    for name, neutral in _NOT_SUPPORTED.items():
        value = fields.get(name)
        if value is not None and value not in ([], {}) and value not in neutral and name not in supported:
            raise bad_request(f"{name}={_short(value)} is not supported", name)
    return fields


def _convert(fields: dict[str, Any], kind: type[T]) -> T:
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        at = re.search(r"at `\$\.?(\w+)", str(error))
        raise bad_request(str(error), at.group(1) if at else None) from error


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _prompts(prompt: object) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
    """Return a prompt in one of its four shapes, as texts or as lists of token ids."""
    if isinstance(prompt, str):
        return (prompt,), ()
    if not isinstance(prompt, list) or not prompt:
        raise bad_request(
            "prompt must be a string, strings, token ids, or lists of token ids, not empty", "prompt"
        )
    try:
        if isinstance(prompt[0], int):
            return (), (msgspec.convert(prompt, tuple[int, ...]),)
        if len(prompt) > MAX_PROMPTS:
            raise bad_request(f"prompt holds {len(prompt)} prompts, at most {MAX_PROMPTS} are allowed", "prompt")
        if isinstance(prompt[0], str):
            return msgspec.convert(prompt, tuple[str, ...]), ()
        return (), msgspec.convert(prompt, tuple[tuple[int, ...], ...])
    except msgspec.ValidationError as error:
        raise bad_request(f"prompt mixes kinds: {error}", "prompt") from error


def _content(message: _Message) -> str:
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    for part in message.content:
        if part.type != "text" or part.text is None:
            raise bad_request(f"content of type {part.type!r} is not supported, only text is", "messages")
    return "".join(part.text or "" for part in message.content)


def _generation(body: _Body, max_tokens: int | None, *, chat: bool, **prompts: Any) -> Generation:
    if max_tokens is not None and max_tokens < 1:
        raise bad_request(f"max_tokens must be at least 1, got {max_tokens}", "max_tokens")
    min_tokens = body.min_tokens or 0
    if min_tokens < 0 or (max_tokens is not None and min_tokens > max_tokens):
        raise bad_request(f"min_tokens must be between 0 and max_tokens, got {min_tokens}", "min_tokens")
    stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if len(stops) > MAX_STOPS:
        raise bad_request(f"stop holds {len(stops)} strings, at most {MAX_STOPS} are allowed", "stop")
    if any(not 1 <= len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise bad_request(f"each stop must have 1 to {MAX_STOP_CHARS} characters", "stop")
    stop_tokens = tuple(body.stop_token_ids or ())
    if len(stop_tokens) > MAX_STOP_TOKENS:  # each step of the whole batch would go through them
        raise bad_request(
            f"{len(stop_tokens)} stop_token_ids, at most {MAX_STOP_TOKENS} are allowed", "stop_token_ids"
        )
    if any(token < 0 for token in stop_tokens):
        raise bad_request(f"stop_token_ids must be at least 0, got {min(stop_tokens)}", "stop_token_ids")
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options needs stream=true", "stream_options")
    return Generation(
        model=body.model,
        chat=chat,
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        sampling=_sampling(body),
        stops=stops,
        stop_token_ids=stop_tokens,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        ignore_eos=bool(body.ignore_eos),
        return_token_ids=bool(body.return_token_ids),
        **prompts,
    )


def _sampling(body: _Body) -> SamplingParams:
    values = {
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "top_k": 0 if body.top_k in (None, -1) else body.top_k,
        "seed": body.seed,
    }
    try:
        return SamplingParams(**values)
    except ConfigError as error:
        raise bad_request(str(error), str(error).split()[0]) from error


# What goes out.


def choice_body(
    generation: Generation, index: int, text: str, finish: str, prompt: tuple[int, ...], tokens: list[int]
) -> dict[str, Any]:
    """Return one finished choice of an answer that is not streamed."""
    body: dict[str, Any] = {"index": index, "finish_reason": finish, "logprobs": None}
    if generation.chat:
        body["message"] = {"role": "assistant", "content": text}
    else:
        body["text"] = text
    if generation.return_token_ids:
        body["prompt_token_ids"], body["token_ids"] = prompt, tokens
    return body


def choice_chunk(
    generation: Generation, index: int, text: str, finish: str | None, tokens: list[int], *, first: bool = False
) -> dict[str, Any]:
    """Return one piece of a choice that is streamed; ``first`` opens a chat answer with its role."""
    body: dict[str, Any] = {"index": index, "finish_reason": finish, "logprobs": None}
    if generation.chat:
        delta = {"role": "assistant", "content": text} if first else {"content": text} if text else {}
        body["delta"] = delta
    else:
        body["text"] = text
    if generation.return_token_ids:
        body["token_ids"] = tokens
    return body


def response(
    generation: Generation,
    request_id: str,
    model: str,
    choices: list[dict[str, Any]],
    usage: Usage | None,
    *,
    created: int | None = None,
) -> dict[str, Any]:
    """Return the whole answer, or one chunk of a stream when the request asked for one."""
    kind = "text_completion"
    if generation.chat:
        kind = "chat.completion.chunk" if generation.stream else "chat.completion"
    body: dict[str, Any] = {
        "id": request_id,
        "object": kind,
        "created": int(time.time()) if created is None else created,
        "model": model,
        "choices": choices,
    }
    if usage is not None or (generation.stream and generation.include_usage):
        body["usage"] = usage.body() if usage is not None else None
    return body


def as_api_error(error: IserveError) -> ApiError:
    """Return the project's own errors in the words of this API."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, BadInputError):
        return bad_request(str(error))
    return ApiError(503, str(error), "service_unavailable_error", None, "unavailable")
