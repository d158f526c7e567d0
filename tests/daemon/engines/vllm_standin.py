"""A strict stand-in for ``python -m vllm.entrypoints.cli.main serve MODEL ...`` (0.24 to 0.33), stdlib only but
for the checks that it shares with the stand-in for vLLM's ``LLM`` class (``vllm_stand_in``).

It takes the documented flags and no other, makes the documented checks with the documented texts, binds its port
with SO_REUSEPORT before it "loads", is as many processes as vLLM is (none of which minds its parent's death), and
answers with the documented bodies. A token is a byte of text or an id. What cannot be checked without a GPU is
given by ``behaviour.json`` in the model's folder, else for every model in the environment's: ``once`` (for one
start), ``free_bytes`` and ``total_bytes`` of a GPU, ``weight_bytes``, ``load_s``, ``token_s``, ``token_file``
(makes tokens only once it exists), ``delta_asks`` (questions until a delta is read), ``deaf`` (ignores SIGTERM),
``bind_file`` (binds its port only once it exists; before, it makes ``bind_file.asked``).
"""

import argparse
import asyncio
import importlib
import itertools
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path

from vllm import adapters, checks

GIB = 2**30


def fail(text):
    """Print as an uncaught exception of the engine core and then of the server that waited for it."""
    core, server = "(EngineCore pid=2)", f"(APIServer pid={os.getpid()})"
    print(f"{core} ERROR 11-21 10:00:00 [core.py:1137] EngineCore failed to start.", file=sys.stderr)
    print(f"{core} ERROR 11-21 10:00:00 [core.py:1137] {text}", file=sys.stderr)
    print(f"{server} Traceback (most recent call last):", file=sys.stderr)
    for number in range(150):
        print(f'{server}   File "/site-packages/vllm/some/module_{number}.py", line 1, in run', file=sys.stderr)
    print(
        f"{server} RuntimeError: Engine core initialization failed. See root cause above. "
        "Failed core proc(s): {'EngineCore': 1}",
        file=sys.stderr,
        flush=True,
    )
    sys.exit(1)


def parse(argv):
    parser = argparse.ArgumentParser(prog="vllm", allow_abbrev=False)
    commands = parser.add_subparsers(required=True)
    serve = commands.add_parser("serve", allow_abbrev=False)
    serve.add_argument("model_tag")
    serve.add_argument("--host")
    for name in ("port", "tensor-parallel-size", "pipeline-parallel-size", "max-model-len", "max-num-seqs",
                 "max-num-batched-tokens", "kv-cache-memory-bytes", "shutdown-timeout"):  # fmt: skip
        serve.add_argument(f"--{name}", type=int, required=name not in ("shutdown-timeout",))
    serve.add_argument("--served-model-name", nargs="+", required=True)
    serve.add_argument("--block-size", type=int, choices=[16, 32, 64, 128], default=16)
    serve.add_argument("--gpu-memory-utilization", type=float, default=0.92)
    serve.add_argument("--kv-cache-dtype", choices=sorted(checks.KV_DTYPES), default="auto")
    serve.add_argument("--load-format", choices=["auto", "safetensors", "dummy"], default="auto")
    serve.add_argument("--quantization", choices=sorted(checks.QUANTIZATIONS))
    serve.add_argument("--generation-config", default="auto")
    serve.add_argument("--distributed-executor-backend", choices=["mp", "uni", "ray", "external_launcher"])
    serve.add_argument("--compilation-config", type=json.loads, default={})
    serve.add_argument("--disable-uvicorn-access-log", action="store_true")
    serve.add_argument("--skip-tokenizer-init", action="store_true")
    serve.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    serve.add_argument("--middleware", action="append", default=[])
    serve.add_argument("--enable-auto-tool-choice", action="store_true")
    serve.add_argument("--tool-call-parser")
    serve.add_argument("--reasoning-parser")
    serve.add_argument("--max-log-len", type=int)
    serve.add_argument("--enable-log-requests", action="store_true")
    serve.add_argument("--language-model-only", action="store_true")
    serve.add_argument("--limit-mm-per-prompt", type=json.loads, default={})
    serve.add_argument("--trust-remote-code", action="store_true")
    adapters.add_options(serve)
    given = parser.parse_args(argv)
    try:
        checks.check_options(
            max_num_seqs=given.max_num_seqs,
            max_num_batched_tokens=given.max_num_batched_tokens,
            max_model_len=given.max_model_len,
            gpu_memory_utilization=given.gpu_memory_utilization,
        )
    except (ValueError, RuntimeError) as error:
        serve.error(str(error))
    return given


class Engine:
    """The checks of the start, then the counters."""

    def __init__(self, given, behaviour):
        self.given, self.behaviour = given, behaviour
        folder = Path(given.model_tag)
        config = json.loads((folder / "config.json").read_text())
        self.num_gpus = given.tensor_parallel_size * given.pipeline_parallel_size
        try:
            checks.check_code(folder, config, trusted=given.trust_remote_code)
            checks.check_folder(
                folder,
                config,
                max_model_len=given.max_model_len,
                load_format=given.load_format,
                skip_tokenizer_init=given.skip_tokenizer_init,
            )
            checks.check_engine(
                config,
                tp=given.tensor_parallel_size,
                pp=given.pipeline_parallel_size,
                compilation=given.compilation_config,
            )
            self.adapters = adapters.Adapters(given, behaviour)
        except (ValueError, RuntimeError, OSError, AssertionError) as error:
            fail(f"{type(error).__name__}: {error}")
        layers = self._layers_per_stage(config["num_hidden_layers"])
        self._check_memory()
        self.blocks = self._kv_blocks(config, layers)
        self.lock = threading.Lock()
        self.running = self.waiting = self.held_tokens = self.prompt_tokens = self.output_tokens = self.steps = 0
        self.slots = threading.Semaphore(given.max_num_seqs)
        self.dead = False

    def _layers_per_stage(self, num_hidden_layers):
        pp = self.given.pipeline_parallel_size
        text = os.environ.get("VLLM_PP_LAYER_PARTITION")
        if text is None:
            return [num_hidden_layers // pp + (index < num_hidden_layers % pp) for index in range(pp)]
        try:
            partitions = [int(layer) for layer in text.split(",")]
        except ValueError:
            fail(f"ValueError: Invalid partition string: {text}")
        if len(partitions) != pp:
            fail(f"ValueError: len(partitions)={len(partitions)} does not match pp_size={pp}.")
        if sum(partitions) != num_hidden_layers:
            fail(f"ValueError: sum(partitions)={sum(partitions)} does not match {num_hidden_layers=}.")
        return partitions

    def _check_memory(self):
        given, behaviour = self.given, self.behaviour
        if self.num_gpus > 1 and given.distributed_executor_backend not in (None, "mp"):
            fail("ValueError: this stand-in has the mp executor only")
        total = behaviour.get("total_bytes", 48 * GIB)
        free = behaviour.get("free_bytes", total)
        wanted = math.ceil(total * given.gpu_memory_utilization)
        if free < wanted:
            fail(
                f"ValueError: Free memory on device cuda:0 ({free / GIB:.2f}/{total / GIB:.2f} GiB) on startup is "
                f"less than desired GPU memory utilization ({given.gpu_memory_utilization}, {wanted / GIB:.2f} "
                "GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
            )
        # With the cache's bytes given, the fraction bounds nothing: what does not fit runs out of memory.
        if behaviour.get("weight_bytes", 0) + given.kv_cache_memory_bytes > free:
            fail(
                "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total "
                "capacity of 47.53 GiB of which 1.20 GiB is free."
            )

    def _kv_blocks(self, config, layers):
        """Return as many blocks as the stage with the most layers can hold; one of them is the engine's own."""
        given = self.given
        page = checks.page_bytes(
            config, tp=given.tensor_parallel_size, kv_dtype=given.kv_cache_dtype, block_tokens=given.block_size
        )
        needed = math.ceil(given.max_model_len / given.block_size) * page * max(layers)
        if needed > given.kv_cache_memory_bytes:
            fits = given.kv_cache_memory_bytes // page // max(layers) * given.block_size
            fail(
                f"ValueError: To serve at least one request with the model's max seq len ({given.max_model_len}), "
                f"({needed / GIB:.2f} GiB KV cache is needed, which is larger than the available KV cache memory "
                f"({given.kv_cache_memory_bytes / GIB:.2f} GiB). Based on the available memory, the estimated "
                f"maximum model length is {fits}. Try increasing `gpu_memory_utilization` or decreasing "
                "`max_model_len` when initializing the engine."
            )
        return given.kv_cache_memory_bytes // page // max(layers)

    def start_processes(self):
        """An engine core with a worker for each GPU; their ids go to ``processes`` in the working directory."""
        sleep = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(3600)"
        core = (
            "import os, subprocess, sys\n"
            f"for _ in range({self.num_gpus if self.num_gpus > 1 else 0}):\n"
            f"    print(subprocess.Popen([sys.executable, '-S', '-c', {sleep!r}], start_new_session=True).pid)\n"
            "print('ready', flush=True)\n" + sleep
        )
        self.core = subprocess.Popen([sys.executable, "-S", "-c", core], stdout=subprocess.PIPE, text=True)
        lines = list(iter(self.core.stdout.readline, "ready\n"))
        with Path("processes").open("a") as file:
            file.write("".join([f"{os.getpid()}\n", f"{self.core.pid}\n", *lines]))

    def generate(self, prompt_length, max_tokens, letters):
        """The pieces of an answer, one token each, in the order of their making."""
        with self.lock:
            self.waiting += 1
        with self.slots:
            with self.lock:
                self.waiting, self.running = self.waiting - 1, self.running + 1
                self.prompt_tokens, self.steps = self.prompt_tokens + prompt_length, self.steps + 1
                self.held_tokens += prompt_length
            held = prompt_length
            try:
                for number in range(max_tokens):
                    time.sleep(self.behaviour.get("token_s", 0))
                    while "token_file" in self.behaviour and not Path(self.behaviour["token_file"]).exists():
                        time.sleep(0.01)
                    with self.lock:
                        self.output_tokens, self.steps = self.output_tokens + 1, self.steps + 1
                        self.held_tokens, held = self.held_tokens + 1, held + 1
                    yield letters[number % len(letters)]
            finally:
                with self.lock:
                    self.running, self.held_tokens = self.running - 1, self.held_tokens - held

    def metrics(self):
        name = self.given.served_model_name[0]
        labels = f'engine="0",model_name="{name}"'
        usage = min(1.0, math.ceil(self.held_tokens / self.given.block_size) / (self.blocks - 1))
        info = (
            f'block_size="{self.given.block_size}",cache_dtype="{self.given.kv_cache_dtype}",engine="0",'
            f'gpu_memory_utilization="{self.given.gpu_memory_utilization}",num_gpu_blocks="{self.blocks}"'
        )
        rows = [
            ("gauge", "num_requests_running", f"{{{labels}}} {float(self.running)}"),
            ("gauge", "num_requests_waiting", f"{{{labels}}} {float(self.waiting)}"),
            ("gauge", "kv_cache_usage_perc", f"{{{labels}}} {usage}"),
            ("gauge", "cache_config_info", f"{{{info}}} 1.0"),
            ("counter", "prompt_tokens_total", f"{{{labels}}} {float(self.prompt_tokens)}"),
            ("counter", "generation_tokens_total", f"{{{labels}}} {float(self.output_tokens)}"),
        ]
        text = "# HELP python_info Python platform information\n# TYPE python_info gauge\npython_info 1.0\n"
        for kind, metric, sample in rows:
            text += f"# HELP vllm:{metric} Of the engine.\n# TYPE vllm:{metric} {kind}\nvllm:{metric}{sample}\n"
        text += "# HELP vllm:iteration_tokens_total Per step.\n# TYPE vllm:iteration_tokens_total histogram\n"
        for bound in ("1.0", "8.0", "+Inf"):
            text += f'vllm:iteration_tokens_total_bucket{{{labels},le="{bound}"}} {float(self.steps)}\n'
        total = self.prompt_tokens + self.output_tokens
        return text + (
            f"vllm:iteration_tokens_total_count{{{labels}}} {float(self.steps)}\n"
            f"vllm:iteration_tokens_total_sum{{{labels}}} {float(total)}\n"
        )


class Refusal(Exception):
    def __init__(self, status, message, param=None):
        super().__init__(message)
        kind = {400: "BadRequestError", 404: "NotFoundError"}[status]
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": status}}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    engine: Engine
    numbers = itertools.count()

    def passes(self):
        """Through the middleware that was given, loaded as vLLM loads it, then vLLM's own key under /v1 alone."""
        said = []

        async def app(scope, receive, send):
            key = os.environ.get("VLLM_API_KEY")
            if key and self.path.startswith("/v1") and self.headers.get("Authorization") != f"Bearer {key}":
                await send({"status": 401})

        async def send(message):
            said.append(message)

        for name in self.engine.given.middleware:
            module, _, attribute = name.rpartition(".")
            app = getattr(importlib.import_module(module), attribute)(app)
        headers = [(name.lower().encode(), value.encode()) for name, value in self.headers.items()]
        asyncio.run(app({"type": "http", "path": self.path, "headers": headers}, None, send))
        if not said:
            return True
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.answer(said[0]["status"], {"error": "Unauthorized"})
        return False

    def do_GET(self):
        if not self.passes():
            return
        engine, name = self.engine, self.engine.given.served_model_name[0]
        if self.path == "/health":
            self.answer(503 if engine.dead else 200, b"")
        elif self.path == "/version":
            self.answer(200, {"version": metadata.version("vllm")})
        elif self.path == "/metrics":
            self.answer(200, engine.metrics().encode(), "text/plain; version=1.0.0; charset=utf-8")
        elif self.path == "/v1/models":
            card = {"id": name, "object": "model", "created": 1, "owned_by": "vllm", "parent": None,
                    "root": engine.given.model_tag, "max_model_len": engine.given.max_model_len,
                    "permission": []}  # fmt: skip
            self.answer(200, {"object": "list", "data": [card, *engine.adapters.cards(card)]})
        else:
            self.answer(404, {"detail": "Not Found"})

    def do_POST(self):
        if not self.passes():
            return
        try:
            asked = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
            if self.path == "/v1/completions":
                self.complete(asked, chat=False)
            elif self.path == "/v1/chat/completions":
                self.complete(asked, chat=True)
            elif self.engine.adapters.has_route(self.path):
                self.answer(*self.engine.adapters.answer(self.path, asked))
            else:
                self.answer(404, {"detail": "Not Found"})
        except Refusal as refusal:
            self.answer(refusal.status, refusal.body)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def complete(self, asked, *, chat):
        given = self.engine.given
        if asked.get("model") not in (*given.served_model_name, *self.engine.adapters.paths):
            raise Refusal(404, f"The model `{asked.get('model')}` does not exist.", "model")
        lengths = self.prompt_lengths(asked, chat=chat)
        length = max(lengths)
        limit = given.max_model_len
        max_tokens = asked.get("max_completion_tokens") or asked.get("max_tokens")
        if max_tokens is None:
            max_tokens = limit - length if chat else 16
        if not isinstance(max_tokens, int) or max_tokens < 0:
            raise Refusal(400, f"max_tokens must be at least 1, got {max_tokens}.", "max_tokens")
        if length + max_tokens > limit or length >= limit:
            raise Refusal(
                400,
                f"This model's maximum context length is {limit} tokens. However, you requested {max_tokens} "
                f"output tokens and your prompt contains {length} input tokens, for a total of "
                f"{length + max_tokens} tokens. Please reduce the length of the input prompt or the "
                "number of requested output tokens.",
                "input_tokens",
            )
        stem = {"id": f"cmpl-{next(self.numbers)}", "created": 1, "model": asked["model"]}
        if self.engine.given.enable_log_requests:
            said = f"prompt: {asked.get('prompt', asked.get('messages'))!r}, params: SamplingParams(n=1)."
            place = f"(APIServer pid={os.getpid()}) INFO 11-21 10:00:00 [logger.py:43]"
            print(f"{place} Received request {stem['id']}: {said}", flush=True)
        given, made = sum(lengths), max_tokens * len(lengths)
        usage = {"prompt_tokens": given, "completion_tokens": made, "total_tokens": given + made}
        letters = self.engine.adapters.letters(asked["model"], asked.get("prompt", asked.get("messages")))
        if asked.get("stream"):
            self.stream(stem, self.engine.generate(length, max_tokens, letters), usage, asked, chat=chat)
            return
        with ThreadPoolExecutor(len(lengths)) as together:
            texts = list(
                together.map(lambda each: "".join(self.engine.generate(each, max_tokens, letters)), lengths)
            )
        kind = "chat.completion" if chat else "text_completion"
        choices = [
            {
                "index": index,
                **({"message": self.message(asked, text)} if chat else {"text": text}),
                "logprobs": None,
                "finish_reason": "length",
            }
            for index, text in enumerate(texts)
        ]
        self.answer(200, {**stem, "object": kind, "choices": choices, "usage": usage})

    def message(self, asked, text):
        """Return a message with a call of the first tool where tools are given, and thoughts where those are
        parsed.
        """
        given, message = self.engine.given, {"role": "assistant", "content": text}
        if asked.get("tools") and asked.get("tool_choice", "auto") == "auto":
            if not (given.enable_auto_tool_choice and given.tool_call_parser):
                raise Refusal(
                    400,
                    '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set',
                )
            name = asked["tools"][0]["function"]["name"]
            call = {"id": "call-1", "type": "function", "function": {"name": name, "arguments": "{}"}}
            message |= {"content": None, "tool_calls": [call]}
        if given.reasoning_parser:
            message["reasoning"] = "thought"
        return message

    def prompt_lengths(self, asked, *, chat):
        """Return the tokens of every prompt. vLLM streams the several of a list too, which no test asks for."""
        prompts = asked.get("prompt")
        if chat or not prompts or not isinstance(prompts, list) or not isinstance(prompts[0], list):
            return [self.prompt_length(asked, prompts, chat=chat)]
        assert not asked.get("stream")
        return [self.prompt_length(asked, prompt, chat=False) for prompt in prompts]

    def prompt_length(self, asked, prompt, *, chat):
        if chat:
            return sum(len(message["content"].encode()) for message in asked["messages"])
        if isinstance(prompt, str):
            if self.engine.given.skip_tokenizer_init:
                raise Refusal(400, "Tokenizer not available when `skip_tokenizer_init=True`")
            return len(prompt.encode())
        if not isinstance(prompt, list) or not prompt or not all(isinstance(token, int) for token in prompt):
            raise Refusal(400, "Either prompt or prompt_embeds must be provided and non-empty.")
        return len(prompt)

    def stream(self, stem, pieces, usage, asked, *, chat):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        kind = "chat.completion.chunk" if chat else "text_completion"
        for piece in pieces:
            said = {"delta": {"content": piece}} if chat else {"text": piece}
            self.event({**stem, "object": kind, "choices": [{"index": 0, **said, "finish_reason": None}]})
        said = {"delta": {}} if chat else {"text": ""}
        self.event({**stem, "object": kind, "choices": [{"index": 0, **said, "finish_reason": "length"}]})
        if (asked.get("stream_options") or {}).get("include_usage"):
            self.event({**stem, "object": kind, "choices": [], "usage": usage})
        self.chunk(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def event(self, body):
        self.chunk(b"data: " + json.dumps(body).encode() + b"\n\n")

    def chunk(self, data):
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def answer(self, status, body, kind="application/json"):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_arguments):
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512

    def server_bind(self):
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        super().server_bind()


def main():
    given = parse(sys.argv[1:])
    told = [file for where in (given.model_tag, sys.prefix) if (file := Path(where) / "behaviour.json").exists()]
    behaviour = json.loads(told[0].read_text()) if told else {}
    if behaviour.get("once"):
        told[0].unlink()
    if behaviour.get("deaf"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    server = Server((given.host, given.port), Handler, bind_and_activate=False)
    if "bind_file" in behaviour:
        Path(f"{behaviour['bind_file']}.asked").touch()
        while not Path(behaviour["bind_file"]).exists():
            time.sleep(0.01)
    server.server_bind()  # before loading; connections are refused until it listens
    engine = Handler.engine = Engine(given, behaviour)
    engine.start_processes()
    time.sleep(behaviour.get("load_s", 0))
    print(f"(APIServer pid={os.getpid()}) INFO 11-21 10:00:00 [launcher.py:37] Available routes are:", flush=True)
    server.server_activate()

    def drain():
        deadline = time.monotonic() + (given.shutdown_timeout or 0)
        while engine.running + engine.waiting and time.monotonic() < deadline:
            time.sleep(0.02)
        engine.core.kill()
        os._exit(0)

    def watch():
        if engine.core.wait() is not None:
            engine.dead = True
            print(f"(APIServer pid={os.getpid()}) ERROR 11-21 10:00:00 [async_llm.py:708] "
                  "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace "
                  "(above) for the root cause.", flush=True)  # fmt: skip
            time.sleep(0.3)  # the server's own watchdog looks every few seconds
            os._exit(0)

    if not behaviour.get("deaf"):
        signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=drain, daemon=True).start())
    threading.Thread(target=watch, daemon=True).start()
    server.serve_forever()


if __name__ == "__main__":
    main()
