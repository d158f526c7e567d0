"""Two clients that send the same load to an endpoint, and what each says of it in the same terms.

``iserve replay`` as a person runs it, and guidellm, which is never a dependency: name the Python that has it. Both
send the same prompts, in the same order, at the same constant rate, as text to ``/v1/completions``, and ask for
answers of a set length without sampling.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from fingerprint.codec import from_json
from iserve.replay.document import ReplayDocument
from iserve.replay.prompts import PromptOptions, Prompts
from traces.request import Request
from traces.summary import Percentiles
from traces.writing import write_trace

__all__ = ["ClientRun", "Load", "Quantiles", "guidellm", "read_guidellm", "read_replay", "replay", "texts"]

COMMAND = Path(sys.executable).with_name("iserve")
TOKENIZER = Path(__file__).resolve().parents[2] / "iserve" / "demo" / "model"


@dataclass(frozen=True, kw_only=True)
class Load:
    """``count`` requests at a constant rate; ``words`` of a prompt, whose tokens the server counts."""

    requests_per_s: float
    count: int
    words: int
    output_tokens: int

    def __str__(self) -> str:
        return (
            f"{self.count} requests at {self.requests_per_s:g}/s, prompts of {self.words} words, "
            f"{self.output_tokens} tokens out"
        )


@dataclass(frozen=True, kw_only=True)
class Quantiles:
    p50_s: float
    p90_s: float
    p99_s: float


@dataclass(frozen=True, kw_only=True)
class ClientRun:
    """Figures of a client. Latencies are of completed requests and count from the actual send.

    ``e2e`` ends where the client ends it, ``e2e_last_token`` at the last token; ``late`` is the actual send after
    the scheduled one. Tokens are the server's count, of all completed requests. ``unsaid`` requests of the load
    are neither among the completed nor among the failed.
    """

    client: str
    completed: int
    failed: int
    unsaid: int
    prompt_tokens: int
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    ttft: Quantiles
    tpot: Quantiles
    e2e: Quantiles
    e2e_last_token: Quantiles
    late: Quantiles


def texts(load: Load) -> list[str]:
    """The prompts that ``iserve replay --prompts text`` makes of such a trace, in order."""
    prompts = Prompts(("m",), PromptOptions(kind="text"))
    bodies = [prompts.body(0, load.words, load.output_tokens) for _ in range(load.count)]
    return [json.loads(body)["prompt"] for body in bodies]


# iserve replay


def replay(url: str, model: str, load: Load) -> ClientRun:
    """Raises SystemExit where it fails."""
    trace = [Request(i / load.requests_per_s, load.words, load.output_tokens) for i in range(load.count)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.csv"
        write_trace(path, trace)
        where = ("--url", url, "--deployment", model)
        return read_replay(_run([COMMAND, "replay", path, *where, "--prompts", "text", "--json"]))


def read_replay(printed: str) -> ClientRun:
    """Read what ``iserve replay --json`` prints."""
    document = from_json(printed, ReplayDocument, what="the answer of iserve replay")
    found = document.summary
    assert found.lengths.input_tokens is not None
    return ClientRun(
        client="iserve replay",
        completed=found.completed,
        failed=found.requests - found.completed,
        unsaid=document.run.planned_requests - found.requests,
        prompt_tokens=found.lengths.input_tokens,
        output_tokens=found.lengths.output_tokens,
        requests_per_s=found.completed_requests_per_s,
        output_tokens_per_s=found.output_tokens_per_s,
        ttft=_quantiles(found.ttft_from_send),
        tpot=_quantiles(found.tpot),
        e2e=_quantiles(found.e2e_from_send),
        e2e_last_token=_quantiles(found.e2e_from_send),
        late=_quantiles(found.lateness),
    )


def _quantiles(found: Percentiles | None) -> Quantiles:
    assert found is not None
    return Quantiles(p50_s=found.p50_s, p90_s=found.p90_s, p99_s=found.p99_s)


# guidellm


def guidellm(python: Path, url: str, model: str, load: Load) -> ClientRun:
    """Raises SystemExit where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        prompts, output = Path(folder) / "prompts.jsonl", Path(folder) / "benchmarks.json"
        rows = [{"prompt": text, "output_tokens_count": load.output_tokens} for text in texts(load)]
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
        backend = {
            "kind": "openai_http",
            "target": url,
            "model": model,
            "request_format": "/v1/completions",
            "validate_backend": False,  # it would ask for /health, which an OpenAI API need not have
            "extras": {"body": {"temperature": 0}},
        }
        parts: list[object] = [python.with_name("guidellm"), "run", "--disable-console"]
        parts += ["--backend", json.dumps(backend)]
        parts += ["--profile", f"kind=constant,rate={load.requests_per_s}"]
        parts += ["--constraint", f"kind=max_requests,count={load.count}"]
        parts += ["--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}"]
        parts += ["--data", f"kind=json_file,path={prompts}"]
        parts += ["--output", f"kind=json,path={output}"]
        _run(parts)
        return read_guidellm(output.read_bytes(), asked=load.count)


class _Points(msgspec.Struct):
    p50: float
    p90: float
    p99: float

    def quantiles(self, unit_s: float = 1.0) -> Quantiles:
        return Quantiles(p50_s=self.p50 * unit_s, p90_s=self.p90 * unit_s, p99_s=self.p99 * unit_s)


class _Distribution(msgspec.Struct):
    mean: float
    percentiles: _Points


class _Statuses(msgspec.Struct):
    successful: _Distribution


class _Totals(msgspec.Struct):
    successful: int
    incomplete: int
    errored: int


class _Metrics(msgspec.Struct):
    request_totals: _Totals
    requests_per_second: _Statuses
    output_tokens_per_second: _Statuses
    time_to_first_token_ms: _Statuses
    inter_token_latency_ms: _Statuses  # per request: last token - first, over the tokens but one
    request_latency: _Statuses
    request_dispatch_delay: _Statuses


class _Timings(msgspec.Struct):
    request_start: float
    last_token_iteration: float


class _Info(msgspec.Struct):
    timings: _Timings


class _RequestRow(msgspec.Struct):
    prompt_tokens: int
    output_tokens: int
    info: _Info


class _Rows(msgspec.Struct):
    successful: list[_RequestRow]


class _Benchmark(msgspec.Struct):
    metrics: _Metrics
    requests: _Rows


class _Report(msgspec.Struct):
    benchmarks: list[_Benchmark]


def read_guidellm(report: bytes, *, asked: int) -> ClientRun:
    """Read the JSON that guidellm 0.8 writes of ``asked`` requests.

    Its own percentiles (an order statistic each), but for ``e2e_last_token``, which it does not report: computed
    from its times of each request. Its "TPOT" is E2E over all tokens; what is TPOT here it calls ITL.

    Raises:
        BadInputError: no such report.
        SystemExit: not one request was completed.
    """
    (found,) = from_json(report, _Report, what="guidellm's report").benchmarks
    metrics, rows = found.metrics, found.requests.successful
    if not rows:
        raise SystemExit("guidellm completed none of the requests")
    times = [row.info.timings for row in rows]
    totals = metrics.request_totals
    return ClientRun(
        client="guidellm",
        completed=totals.successful,
        failed=totals.incomplete + totals.errored,
        unsaid=asked - totals.successful - totals.incomplete - totals.errored,
        prompt_tokens=sum(row.prompt_tokens for row in rows),
        output_tokens=sum(row.output_tokens for row in rows),
        requests_per_s=metrics.requests_per_second.successful.mean,
        output_tokens_per_s=metrics.output_tokens_per_second.successful.mean,
        ttft=metrics.time_to_first_token_ms.successful.percentiles.quantiles(1e-3),
        tpot=metrics.inter_token_latency_ms.successful.percentiles.quantiles(1e-3),
        e2e=metrics.request_latency.successful.percentiles.quantiles(),
        e2e_last_token=quantiles_of([t.last_token_iteration - t.request_start for t in times]),
        late=metrics.request_dispatch_delay.successful.percentiles.quantiles(),
    )


def quantiles_of(values_s: Sequence[float]) -> Quantiles:
    p50, p90, p99 = (float(value) for value in np.percentile(values_s, (50, 90, 99)))
    return Quantiles(p50_s=p50, p90_s=p90, p99_s=p99)


def _run(parts: Sequence[object]) -> str:
    """Return what a client prints."""
    command = [str(part) for part in parts]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    if done.returncode:
        raise SystemExit(f"{command[0]} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return done.stdout
