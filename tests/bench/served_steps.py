"""Steps of vLLM as a server has them: contexts of many lengths, a prompt among decoders, prompts cached in part.

    python -m tests.bench.served_steps measure CONFIG_JSON OUT
    python -m tests.bench.served_steps table OUT/served_steps.json

``measure`` runs with vLLM's own Python on the GPU machine, on one engine with random weights in its default
mode with the prefix cache on; a mixture's experts are drawn uniformly. A profile's bursts have prompts of one
length, all at once, none of which is cached; what a server does otherwise is measured here next to the like of
them:

* ``decode``: the median step of a batch with equal contexts, and of one with the same tokens in all, spread as in
  a trace, or one long context among short ones;
* ``padded``: the median step of a batch that a graph of more sequences computes, and of as many as that has;
* ``arrival``: the steps while a batch decodes from a prompt's arrival to its first token, in all, the longest of
  them, and the next one; over a usual step;
* ``cached``: a lone prompt of which so many tokens are cached, and one of as many tokens as are not.

Times are between tokens as the engine's client gets them, medians of ``ROUNDS``. No web framework is imported.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from itertools import count, pairwise
from pathlib import Path
from typing import Any

from fingerprint.codec import from_json, to_json
from fingerprint.config_json import read_config
from fingerprint.engines import GRAPH_TOKENS, graph_sizes, largest_graph
from fingerprint.families import read_spec

__all__ = [
    "ServedStep",
    "ServedSteps",
    "SteppedServer",
    "contexts_of",
    "main",
    "share_of_longest",
    "summary",
    "table",
]

BATCHES, MEAN_CONTEXTS = (8, 32), (512, 1024)
PADDED = ((3, 4), (5, 8), (9, 16), (12, 16), (17, 24))  # sequences, and those of vLLM's next larger graph
ARRIVING, CACHED, PROMPT = (128, 512, 1024, 2048), (0, 512, 1024, 1536), 2048
DECODE_STEPS, ROUNDS, BETWEEN_STEPS = 48, 5, 12
MAX_CONTEXT, MAX_BATCH, STEP_TOKENS = 4096, 64, 8192
_ANSWER = DECODE_STEPS + 40  # tokens, so that none ends while its batch is timed
_MOST = MAX_CONTEXT - _ANSWER - 1
# Shares of the mean, by quantile: prompt and half of the answer of the Azure 2023 conversations, roughly.
_SPREAD = (0.1, 0.2, 0.35, 0.5, 0.75, 1.1, 1.9, 3.1)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedStep:
    """Times of one case."""

    part: str  # "decode", "padded", "arrival" or "cached"
    case: str
    batch: int  # sequences that decode
    tokens: int  # of the contexts on average, or of the prompt
    cached_tokens: int
    seconds: tuple[float, ...]  # decode, padded: of a step; arrival: of all, longest, next; cached: until a token
    plain_s: (
        float  # of its like: equal contexts, a full graph, a step without a prompt, a prompt of the rest alone
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedSteps:
    model: str
    date: str
    machine: str
    versions: str
    steps: tuple[ServedStep, ...]
    graph_tokens: int = GRAPH_TOKENS  # of the largest CUDA graph


def contexts_of(kind: str, batch: int, mean: int) -> list[int]:
    """Return the contexts of a batch, of ``batch * mean`` tokens in all: ``equal``, ``spread`` or ``one long``."""
    if kind == "equal":
        return [mean] * batch
    if kind == "one long":
        long = min(_MOST, batch * mean - 16 * (batch - 1))
        shares = [*([(batch * mean - long) / (batch - 1)] * (batch - 1)), long]
    else:
        total = sum(_SPREAD[row % len(_SPREAD)] for row in range(batch))
        shares = [batch * mean * _SPREAD[row % len(_SPREAD)] / total for row in range(batch)]
    lengths = [max(1, round(share)) for share in shares]
    lengths[0] += batch * mean - sum(lengths)  # of rounding
    return lengths


class SteppedServer:
    """vLLM's engine, stepped by hand.

    Args:
        graphs: rows of the CUDA graphs that it captures; none are given: those of a deployment.
    """

    def __init__(self, folder: Path, *, graphs: Sequence[int] = ()) -> None:
        from vllm import LLM

        is_mixture = read_spec(read_config(folder)).is_mixture
        sizes = graphs or graph_sizes(largest_graph("vllm", is_mixture=is_mixture))
        self.graph_tokens = max(sizes)
        self._llm = LLM(
            model=str(folder), load_format="dummy", skip_tokenizer_init=True, enable_prefix_caching=True,
            max_model_len=MAX_CONTEXT, max_num_seqs=MAX_BATCH, max_num_batched_tokens=STEP_TOKENS, seed=0,
            gpu_memory_utilization=0.85, compilation_config={"cudagraph_capture_sizes": list(sizes)},
        )  # fmt: skip
        self._engine = self._llm.llm_engine
        self._vocab = self._engine.model_config.get_vocab_size()
        self._names, self._random = count(), random.Random(0)
        self._tokens: dict[str, int] = {}

    @property
    def kv_blocks(self) -> int:
        """Blocks of KV that it has room for."""
        return int(self._engine.vllm_config.cache_config.num_gpu_blocks)

    def prompt(self, tokens: int) -> list[int]:
        return [self._random.randrange(self._vocab) for _ in range(tokens)]

    def add(self, prompt: Sequence[int], output_tokens: int) -> str:
        from vllm import SamplingParams

        name = str(next(self._names))
        parameters = SamplingParams(
            max_tokens=output_tokens, min_tokens=output_tokens, ignore_eos=True, temperature=0.0, detokenize=False
        )
        self._engine.add_request(name, {"prompt_token_ids": list(prompt)}, parameters)
        self._tokens[name] = 0
        return name

    def tokens(self, name: str) -> int:
        """Return how many tokens a request has got."""
        return self._tokens[name]

    def step(self) -> float:
        """Wait for the next tokens; return when they were there."""
        while True:
            found = self._engine.step()
            for one in found:
                self._tokens[one.request_id] = len(one.outputs[0].token_ids)
            if found:
                return time.perf_counter()

    def end(self) -> None:
        """Let all requests run to their end."""
        while self._engine.has_unfinished_requests():
            self._engine.step()
        self._tokens.clear()

    def decode(self, contexts: Sequence[int]) -> list[float]:
        """Return the seconds of steps of a batch whose prompts are all computed."""
        names = [self.add(self.prompt(length), _ANSWER) for length in contexts]
        while min(map(self.tokens, names)) < 2:
            self.step()
        times_s = [self.step() for _ in range(DECODE_STEPS)]
        self.end()
        return [after - before for before, after in pairwise(times_s)]

    def arrivals(self, batch: int, context: int, tokens: int) -> tuple[float, tuple[float, ...]]:
        """Return medians: a step of a batch; all until a prompt's first token less usual ones but one, the longest
        of these, and the next one.

        A step is given out once the next one is launched, which takes the host long where prompts are in it: the
        step before that of the token is the long one.
        """
        steps = (BETWEEN_STEPS + 8) * ROUNDS + 40
        names = [self.add(self.prompt(context), steps) for _ in range(batch)]
        while min(map(self.tokens, names)) < 2:
            self.step()
        usual, around = list[float](), list[tuple[list[float], float]]()
        for _ in range(ROUNDS):
            times_s = [self.step() for _ in range(BETWEEN_STEPS)]
            usual += [after - before for before, after in pairwise(times_s[2:])]
            name, last_s, gaps = self.add(self.prompt(tokens), 1), times_s[-1], list[float]()
            while not self.tokens(name):
                now_s = self.step()
                gaps.append(now_s - last_s)
                last_s = now_s
            around.append((gaps, self.step() - last_s))
        self.end()
        usual_s = statistics.median(usual)
        found = [(sum(gaps) - (len(gaps) - 1) * usual_s, max(gaps), next_s) for gaps, next_s in around]
        return usual_s, tuple(statistics.median(row) for row in zip(*found, strict=True))

    def first_token(self, tokens: int) -> float:
        """Return the seconds until a lone prompt has a token."""
        prompt, begun_s = self.prompt(tokens), time.perf_counter()
        self.add(prompt, 1)
        self.end()
        return time.perf_counter() - begun_s

    def lone(self, tokens: int, cached: int) -> float:
        """Return the seconds of a lone prompt, ``cached`` tokens of which a request before it had."""
        found = []
        for _ in range(ROUNDS):
            begin = self.prompt(cached)
            if cached:
                self.add([*begin, *self.prompt(1)], 1)
                self.end()
            asked, begun_s = [*begin, *self.prompt(tokens - cached)], time.perf_counter()
            self.add(asked, 1)
            found.append(self.step() - begun_s)
            self.end()
        return statistics.median(found)


def _measured(server: SteppedServer) -> Iterator[ServedStep]:
    for batch in BATCHES:
        for mean in MEAN_CONTEXTS:
            equal_s: dict[int, float] = {}
            for kind in ("equal", "spread", "one long"):
                rounds = [server.decode(contexts_of(kind, batch, mean)) for _ in range(2)]
                seconds = tuple(statistics.median(one) for one in rounds)
                equal_s.setdefault(mean, statistics.median(seconds))
                yield ServedStep(
                    part="decode", case=kind, batch=batch, tokens=mean, cached_tokens=0, seconds=seconds,
                    plain_s=equal_s[mean],
                )  # fmt: skip
    for batch, graph in PADDED:
        full_s = statistics.median(server.decode(contexts_of("equal", graph, MEAN_CONTEXTS[0])))
        rounds = [server.decode(contexts_of("equal", batch, MEAN_CONTEXTS[0])) for _ in range(2)]
        yield ServedStep(
            part="padded", case=f"graph of {graph}", batch=batch, tokens=MEAN_CONTEXTS[0], cached_tokens=0,
            seconds=tuple(statistics.median(one) for one in rounds), plain_s=full_s,
        )  # fmt: skip
    for batch in BATCHES:
        for tokens in ARRIVING:
            usual_s, around = server.arrivals(batch, 512, tokens)
            yield ServedStep(
                part="arrival", case="among decoders", batch=batch, tokens=tokens, cached_tokens=0,
                seconds=around, plain_s=usual_s,
            )  # fmt: skip
    for cached in CACHED:
        rest_s = server.lone(PROMPT - cached, 0)
        seconds = (server.lone(PROMPT, cached),)
        yield ServedStep(
            part="cached", case="alone", batch=0, tokens=PROMPT, cached_tokens=cached, seconds=seconds,
            plain_s=rest_s,
        )  # fmt: skip


def table(found: ServedSteps) -> str:
    """Return what was measured as a Markdown table."""
    lines = [
        "| part | case | batch | tokens | cached | time | of the like of it |",
        "|---|---|--:|--:|--:|---|---|",
    ]
    for one in found.steps:
        times = " / ".join(f"{1e3 * s:.2f}" for s in one.seconds)
        over = " / ".join(f"{s / one.plain_s - 1:+.0%}" for s in one.seconds)
        lines.append(
            f"| {one.part} | {one.case} | {one.batch} | {one.tokens:,} | {one.cached_tokens:,} | {times} ms "
            f"| {1e3 * one.plain_s:.2f} ms, {over} |"
        )
    return "\n".join(lines)


def summary(found: Sequence[ServedSteps]) -> str:
    """Return what was measured of several models, a column each, over the like of it as a Markdown table.

    Arrivals, whose times are not of one kind, are left out.
    """
    cases = dict.fromkeys((s.part, s.case, s.batch, s.tokens, s.cached_tokens) for one in found for s in one.steps)
    lines = [f"| | {' | '.join(map(_column, found))} |", f"|---|{'---|' * len(found)}"]
    for case in cases:
        if case[1] != "equal" and case[0] != "arrival" and (case[0] != "cached" or case[-1]):
            lines.append(f"| {_said(*case)} | {' | '.join(_cell(one, case) for one in found)} |")
    return "\n".join(lines)


def _column(found: ServedSteps) -> str:
    graphs = f", graphs to {found.graph_tokens:,}" if found.graph_tokens != GRAPH_TOKENS else ""
    return f"{found.model}{graphs}"


def _cell(found: ServedSteps, case: tuple[str, str, int, int, int]) -> str:
    for step in found.steps:
        if (step.part, step.case, step.batch, step.tokens, step.cached_tokens) == case:
            middle_s = statistics.median(step.seconds)
            return f"{1e3 * middle_s:.2f} ms {middle_s / step.plain_s - 1:+.0%}"
    return "-"


def _said(part: str, case: str, batch: int, tokens: int, cached: int) -> str:
    if part == "decode":
        return f"{batch} sequences of {tokens:,} tokens in the mean, {case}"
    if part == "padded":
        return f"{batch} sequences in a {case}"
    return f"a prompt of {tokens:,}, {cached:,} of them cached"


def share_of_longest(kept: Sequence[ServedSteps]) -> float:
    """Return ``steady_state.LONGEST_SHARE`` by decode steps with contexts of many lengths.

    By least squares of errors relative to the steps. Attention grows with the context as it does from the one mean
    to the other where contexts are equal.
    """
    added, grown = list[float](), list[float]()
    for one in kept:
        steps = {
            (s.case, s.batch, s.tokens): statistics.median(s.seconds) for s in one.steps if s.part == "decode"
        }
        for (case, batch, mean), seconds in steps.items():
            less, more = (steps["equal", batch, tokens] for tokens in MEAN_CONTEXTS)
            a_token_s = (more - less) / (MEAN_CONTEXTS[1] - MEAN_CONTEXTS[0])
            equal_s = steps["equal", batch, mean]
            added.append(seconds / equal_s - 1)
            grown.append(a_token_s * (max(contexts_of(case, batch, mean)) - mean) / equal_s)
    return sum(a * g for a, g in zip(added, grown, strict=True)) / sum(g * g for g in grown)


def measure(config: Path, out: Path) -> None:
    """Measure one model; its file is kept after each case."""
    from tests.bench.engine_contest_run import _nvidia

    os.environ.setdefault("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "uniform_random")
    folder = out / "model"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(config.read_text())
    server, steps = SteppedServer(folder), list[ServedStep]()
    server.decode(contexts_of("equal", 8, 512))  # what compiles does so here
    for step in _measured(server):
        steps.append(step)
        kept = ServedSteps(
            model=config.stem,
            date=time.strftime("%Y-%m-%d"),
            machine=(_nvidia("name") or ["?"])[0],
            versions=f"vllm {metadata.version('vllm')}, driver {(_nvidia('driver_version') or ['?'])[0]}",
            steps=tuple(steps),
            graph_tokens=server.graph_tokens,
        )
        (out / "served_steps.json").write_bytes(to_json(kept, indent=1))
    print(table(kept))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    orders = parser.add_subparsers(dest="order", required=True)
    one = orders.add_parser("measure")
    one.add_argument("config", type=Path)
    one.add_argument("out", type=Path)
    orders.add_parser("table").add_argument("kept", type=Path)
    options: Any = parser.parse_args()
    if options.order == "measure":
        measure(options.config, options.out)
    else:
        print(table(from_json(options.kept.read_bytes(), ServedSteps, what=str(options.kept))))


if __name__ == "__main__":
    main()
