"""The HTTP face of the stand-in, with the documented routes, bodies and refusals."""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from .adapters import BadAdapterError
from .engine import Engine

VERSION = "1.2.1"
_SAMPLING = {
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
} | {
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "length_penalty",
    "early_stopping",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "bad",
    "prompt_ignore_length",
    "return_context_logits",
    "detokenize",
    "logit_bias",
    "logprobs",
    "response_format",
    "lora_request",
    "disaggregated_params",
    "use_beam_search",
    "best_of",
    "n",
    "user",
}
_COMMON = {"model", "stream", "stream_options", "max_tokens"} | _SAMPLING
_FIELDS = {
    "/v1/completions": _COMMON | {"prompt", "suffix", "echo", "add_special_tokens", "truncate_prompt_tokens"},
    "/v1/chat/completions": _COMMON
    | {"messages", "max_completion_tokens", "top_logprobs", "tools", "tool_choice", "chat_template_kwargs"}
    | {"add_generation_prompt", "chat_template", "documents", "parallel_tool_calls", "reasoning_effort"},
}


class BadRequestError(Exception):
    """Answered as 400 in the flat form."""


def serve(server: ThreadingHTTPServer, engine: Engine) -> None:
    """Answer until the server is shut down."""
    server.RequestHandlerClass = type("Handler", (_Handler,), {"engine": engine})
    server.serve_forever(poll_interval=0.05)


class _Handler(BaseHTTPRequestHandler):
    engine: Engine
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        engine = self.engine
        if self.path == "/health":
            self._send(200, b"")
        elif self.path == "/version":
            self._json(200, {"version": VERSION})
        elif self.path == "/v1/models":
            model = {"id": engine.name, "object": "model", "created": 0, "owned_by": "tensorrt_llm"}
            self._json(200, {"object": "list", "data": [model]})
        elif self.path == "/metrics":
            self._json(200, engine.drain_records())
        else:
            self._json(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path not in _FIELDS:
            self._json(404, {"detail": "Not Found"})
            return
        try:
            asked = json.loads(raw)
            prompt_tokens, output_tokens = self._check(asked)
            adapter = self.engine.adapters.content(asked.get("lora_request"))
        except (BadRequestError, BadAdapterError, ValueError) as error:
            self._flat(str(error))
            return
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": output_tokens,
            "total_tokens": prompt_tokens + output_tokens,
        }
        pieces = self.engine.generate(prompt_tokens, output_tokens, adapter)
        self.engine.in_flight += 1
        try:
            self._reply(asked, pieces, usage)
        finally:
            self.engine.in_flight -= 1

    def _reply(self, asked: dict, pieces: Iterator[str], usage: dict) -> None:
        if asked.get("stream"):
            self._stream(pieces, usage if (asked.get("stream_options") or {}).get("include_usage") else None)
        else:
            self._whole(pieces, usage)

    def _check(self, asked: dict) -> tuple[int, int]:
        """Tokens of prompt and answer. Raises BadRequestError."""
        if unknown := sorted(asked.keys() - _FIELDS[self.path]):
            raise BadRequestError(f"body.{unknown[0]}: Extra inputs are not permitted")
        if "top_k" in asked and (asked["top_k"] is None or asked["top_k"] < 0):
            raise BadRequestError("body.top_k: Input should be a valid integer of at least 0")
        width = asked.get("best_of", asked.get("n", 1)) if asked.get("use_beam_search") else 1
        if width != self.engine.options["max_beam_width"]:
            raise BadRequestError(f"Request beam width {width} is not equal to max_beam_width 1.")
        prompt_tokens = self._prompt_tokens(asked)
        left = self.engine.max_seq_len - prompt_tokens
        if left <= 0:
            raise BadRequestError(
                f"`default_max_tokens` ({left}) must be greater than 0, `default_max_tokens` is max_seq_len "
                f"({self.engine.max_seq_len}) - prompt ({prompt_tokens})"
            )
        options = self.engine.options
        if prompt_tokens > options["max_num_tokens"] and not options["enable_chunked_prefill"]:  # type: ignore[operator]
            raise BadRequestError(
                f"The sum of prompt length ({prompt_tokens}) and query length should not exceed max_num_tokens "
                f"({options['max_num_tokens']})"
            )
        wanted = asked.get("max_tokens", asked.get("max_completion_tokens"))
        return prompt_tokens, left if wanted is None else min(wanted, left)

    def _prompt_tokens(self, asked: dict) -> int:
        if self.path == "/v1/chat/completions":
            return sum(len(str(message["content"]).split()) for message in asked["messages"])
        prompt = asked["prompt"]
        return len(prompt) if isinstance(prompt, list) else len(prompt.split())

    def _answer(self, text: str, finish: str | None, *, streamed: bool = False) -> dict:
        chat = self.path == "/v1/chat/completions"
        part = {"role": "assistant", "content": text}
        body = {"delta" if streamed else "message": part} if chat else {"text": text}
        kind = "chat.completion" + (".chunk" if streamed else "") if chat else "text_completion"
        choice = {"index": 0, **body, "finish_reason": finish}
        return {"id": "x", "object": kind, "created": 0, "model": self.engine.name, "choices": [choice]}

    def _whole(self, pieces: Iterator[str], usage: dict) -> None:
        """Send a whole answer; as an ASGI server does, it sees a client that leaves while it waits."""
        text = ""
        for piece in pieces:
            text += piece
            readable, _, _ = select.select([self.connection], [], [], 0)
            if readable and not self.connection.recv(1, socket.MSG_PEEK):
                self.close_connection = True
                self.engine.cut.set()
                return
        self._json(200, self._answer(text, "length") | {"usage": usage})

    def _stream(self, pieces: Iterator[str], usage: dict | None) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            for number, piece in enumerate(pieces):
                if number == self.engine.behaviour.break_after:
                    self.close_connection = True  # and no end of the body: it broke off
                    return
                self._event(self._answer(piece, None, streamed=True))
        except OSError:
            self.close_connection = True
            self.engine.cut.set()
            return
        self._event(self._answer("", "length", streamed=True))
        if usage is not None:
            self._event(self._answer("", None, streamed=True) | {"choices": [], "usage": usage})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _event(self, body: dict) -> None:
        self._chunk(b"data: " + json.dumps(body).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _flat(self, message: str) -> None:
        body = {"object": "error", "message": message, "type": "BadRequestError", "param": None, "code": 400}
        self._json(400, body)

    def _json(self, status: int, body: object) -> None:
        self._send(status, json.dumps(body).encode(), "application/json")

    def _send(self, status: int, data: bytes, kind: str = "text/plain") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_arguments: object) -> None:
        pass
