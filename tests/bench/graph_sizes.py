"""Measures prompts on vLLM with CUDA graphs up to 512 tokens, as by its default, and with larger ones.

    python -m tests.bench.graph_sizes measure OUT CONFIG_JSON [...] [--largest 512 4096] [--rounds 2]
    python -m tests.bench.graph_sizes table OUT/graph_sizes.json [...]

``measure`` runs with vLLM's own Python on the GPU machine, one engine after the other, each in a process of its
own with random weights; a mixture's experts are drawn uniformly. A step of more tokens than the largest graph has
is launched kernel by kernel, which takes the host longer than the GPU where layers are made of many short kernels.

* ``alone``: from the call until its first token, of a lone prompt;
* ``among decoders``: the longest time between two tokens of a batch of 16 while one prompt arrives.

The sizes in between are those of ``fingerprint.engines.graph_sizes``. What graphs cost is the engine's start and
room for KV; the first start of each compiles for itself. An engine whose file OUT has is not measured again.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from fingerprint.codec import from_json, to_json
from fingerprint.engines import GRAPH_TOKENS, graph_sizes
from tests.bench.accuracy_measure import Recorded
from tests.bench.served_steps import SteppedServer

__all__ = ["Engine", "GraphSizes", "Prompts", "main", "recorded_table", "table"]

ALONE = (256, 512, 520, 640, 768, 1024, 1536, 2048, 3000, 4000)
CONTEXT, DECODING = 512, 16
AMONG = (240, 496, 752, 1008, 1520, 2032)  # with the tokens of those that decode a step is of a graph's size
CALLS, LEFT_OUT = 14, 4
RESULTS = Path(__file__).parent / "results"
MOST = 16_384  # tokens of a graph


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompts:
    """Times of one case."""

    case: str  # "alone" or "among decoders"
    batch: int  # sequences that decode
    tokens: int  # of the prompt
    seconds: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """Times of one engine; engines are in the order of their starts."""

    model: str
    largest: int  # tokens of the largest graph
    start_s: float
    kv_blocks: int
    prompts: tuple[Prompts, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphSizes:
    date: str
    machine: str
    versions: str
    engines: tuple[Engine, ...]


def _measured(server: SteppedServer) -> Iterator[Prompts]:
    for tokens in ALONE:
        seconds = [server.first_token(tokens) for _ in range(CALLS)][LEFT_OUT:]
        yield Prompts(case="alone", batch=0, tokens=tokens, seconds=tuple(seconds))
    for tokens in AMONG:
        longest = [server.arrivals(DECODING, CONTEXT, tokens)[1][1] for _ in range(2)]
        yield Prompts(case="among decoders", batch=DECODING, tokens=tokens, seconds=tuple(longest))


def measure_one(config: Path, out: Path, largest: int) -> None:
    """Measure one engine, in this process; OUT is its file."""
    os.environ.setdefault("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "uniform_random")
    folder = out.parent / "model" / config.stem
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(config.read_text())
    begun_s = time.monotonic()
    server = SteppedServer(folder, graphs=graph_sizes(largest))
    start_s = time.monotonic() - begun_s
    for tokens in ALONE:  # what compiles does so here
        server.first_token(tokens)
    engine = Engine(
        model=config.stem,
        largest=largest,
        start_s=round(start_s, 1),
        kv_blocks=server.kv_blocks,
        prompts=tuple(_measured(server)),
    )
    out.write_bytes(to_json(engine))


def measure(configs: Sequence[Path], out: Path, largest: Sequence[int], rounds: int) -> None:
    """Measure all, the sizes in turns; what was measured is kept after each engine.

    Raises:
        SystemExit: an engine failed; the rest was measured.
    """
    from tests.bench.engine_contest_run import _nvidia

    out.mkdir(parents=True, exist_ok=True)
    engines, failed = list[Engine](), list[str]()
    for config in configs:
        for turn in range(rounds):
            for size in largest if turn % 2 == 0 else reversed(largest):
                file = out / f"{config.stem}-{size}-{turn}.json"
                order = [sys.executable, "-m", "tests.bench.graph_sizes", "one", str(file), str(config), str(size)]
                if not file.exists() and subprocess.run(order, check=False).returncode != 0:
                    failed.append(f"{config.stem} with graphs up to {size:,} tokens failed")
                    print(failed[-1], flush=True)
                    continue
                engines.append(from_json(file.read_bytes(), Engine, what=str(file)))
                kept = GraphSizes(
                    date=time.strftime("%Y-%m-%d"),
                    machine=(_nvidia("name") or ["?"])[0],
                    versions=f"vllm {metadata.version('vllm')}, driver {(_nvidia('driver_version') or ['?'])[0]}",
                    engines=tuple(engines),
                )
                (out / "graph_sizes.json").write_bytes(to_json(kept, indent=1))
                print(table([kept]), flush=True)
    if failed:
        raise SystemExit("; ".join(failed))


def recorded_table() -> str:
    """Return TTFT of whole mixtures recorded with graphs up to 512 tokens, and with larger ones, as Markdown."""
    from tests.bench.accuracy import load, truths

    before = {one.model: one for one in load(RESULTS / "graphs-512-h200-vllm-0.33")}
    after = {one.model: one for one in load(RESULTS / "families-h200-vllm-0.33") if one.model in before}
    cases: dict[tuple[int, int], list[str]] = {}
    for model in before:
        earlier, later = (
            {(t.batch, t.input_tokens): t.ttft_s for t in truths(of[model])} for of in (before, after)
        )
        for case in earlier:
            cell = f"{1e3 * earlier[case]:.0f}, {1e3 * later[case]:.0f}" if case in later else "-"
            cases.setdefault(case, []).append(cell)
    shown = [(case, cells) for case, cells in cases.items() if len(cells) == len(before)]
    rows = [
        ["prompts", *before],
        ["---", *["---"] * len(before)],
        *([f"{batch} x {tokens:,}", *cells] for (batch, tokens), cells in sorted(shown, key=_tokens_of)),
        ["memory of graphs, MiB", *(_before_and_after(before, after, model, _graph_mib) for model in before)],
        ["start, s", *(_before_and_after(before, after, model, _start_s) for model in before)],
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _tokens_of(row: tuple[tuple[int, int], list[str]]) -> tuple[int, int]:
    (batch, tokens), _ = row
    return batch * tokens, batch


def _before_and_after(
    before: Mapping[str, Recorded], after: Mapping[str, Recorded], model: str, of: Callable[[Recorded], float]
) -> str:
    return f"{of(before[model]):.1f}, {of(after[model]):.1f}"


def _graph_mib(one: Recorded) -> float:
    return max(rank.graph_bytes for rank in one.whole_memory) / 2**20


def _start_s(one: Recorded) -> float:
    return one.start_s[-1]


def table(kept: Sequence[GraphSizes]) -> str:
    """Return medians over all rounds as a Markdown table, a column for each model and largest graph."""
    engines = [one for found in kept for one in found.engines]
    columns = sorted({(one.model, one.largest) for one in engines})
    by_column = {c: [one for one in engines if (one.model, one.largest) == c] for c in columns}
    lines = [
        f"| | {' | '.join(f'{model}, up to {largest:,}' for model, largest in columns)} |",
        f"|---|{'--:|' * len(columns)}",
        f"| start | {' | '.join(_range([one.start_s for one in by_column[c]], 's') for c in columns)} |",
        f"| blocks of KV | {' | '.join(f'{by_column[c][0].kv_blocks:,}' for c in columns)} |",
    ]
    for case in dict.fromkeys((p.case, p.batch, p.tokens) for one in engines for p in one.prompts):
        cells = [_range(_middles_ms(by_column[c], case), "ms") for c in columns]
        lines.append(f"| {_said(*case)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _middles_ms(engines: Sequence[Engine], case: tuple[str, int, int]) -> list[float]:
    return [
        1e3 * statistics.median(p.seconds)
        for one in engines
        for p in one.prompts
        if (p.case, p.batch, p.tokens) == case
    ]


def _range(values: Sequence[float], unit: str) -> str:
    """Return the median of the rounds, and their range where there are several."""
    if not values:
        return "-"
    apart = "" if len(values) == 1 else f" ({min(values):.1f} to {max(values):.1f})"
    return f"{statistics.median(values):.1f} {unit}{apart}"


def _said(case: str, batch: int, tokens: int) -> str:
    if case == "alone":
        return f"{tokens:,} {case}"
    return f"longest step of {batch} that decode, a prompt of {tokens:,} arrives"


def _largest(text: str) -> int:
    value = int(text)
    if value < GRAPH_TOKENS or value not in graph_sizes(MOST):
        raise argparse.ArgumentTypeError(f"no graph has {value} tokens: see fingerprint.engines.graph_sizes")
    return value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    orders = parser.add_subparsers(dest="order", required=True)
    many = orders.add_parser("measure")
    many.add_argument("out", type=Path)
    many.add_argument("configs", type=Path, nargs="+")
    many.add_argument("--largest", type=_largest, nargs="+", default=[GRAPH_TOKENS, 4096])
    many.add_argument("--rounds", type=int, default=2)
    one = orders.add_parser("one")
    one.add_argument("out", type=Path)
    one.add_argument("config", type=Path)
    one.add_argument("largest", type=int)
    orders.add_parser("table").add_argument("kept", type=Path, nargs="+")
    options: Any = parser.parse_args()
    match options.order:
        case "measure":
            measure(options.configs, options.out, options.largest, options.rounds)
        case "one":
            measure_one(options.config, options.out, options.largest)
        case _:
            print(table([from_json(one.read_bytes(), GraphSizes, what=str(one)) for one in options.kept]))


if __name__ == "__main__":
    main()
