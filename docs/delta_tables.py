"""Tables of recorded results on deltas: kernels alone, steps and loads in vLLM, scheduling policies."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from tests.bench.kept import read_kept

__all__ = ["DELTA_TABLES"]

RESULTS = Path(__file__).parents[1] / "tests/bench/results"
Row = Mapping[str, Any]
LAYERS = 32


@cache
def _read(name: str) -> Any:
    raw = read_kept(RESULTS / name)
    return [json.loads(line) for line in raw.splitlines()] if ".jsonl" in name else json.loads(raw)


def _rows(file: str, kind: str, **having: Any) -> list[Row]:
    """Return the rows of a kind of a file of ``delta_served_h200``, in their order."""
    rows = _read(f"delta_served_h200/{file}")["rows"]
    return [row for row in rows if row["kind"] == kind and all(row[key] == value for key, value in having.items())]


def _table(head: str, align: str, lines: Sequence[Sequence[str]]) -> str:
    return "\n".join([head, align, *(f"| {' | '.join(line)} |" for line in lines)])


def _listed(values: Sequence[float], shown: str) -> str:
    return ", ".join(format(value, shown) for value in values)


def _spread(values: Sequence[float], shown: str) -> str:
    least, most = format(min(values), shown), format(max(values), shown)
    return least if least == most else f"{least} to {most}"


def _bold(words: str) -> str:
    return words.replace("missed", "**missed**")


def _judged(measured: Sequence[float], goal: float) -> str:
    """Return whether all of ``measured`` are at most ``goal``; of those that are not, by how much the worst is."""
    above = [value / goal - 1 for value in measured if value > goal]
    if not above:
        return "met"
    share = f"{max(above):.1%}" if max(above) < 0.05 else f"{max(above):.0%}"
    if len(measured) == 1:
        return f"missed by {share}"
    by = "by" if len(above) == 1 else "by up to"
    return f"missed {by} {share}" if len(above) == len(measured) else (
        f"missed in {len(above)} of {len(measured)}, {by} {share}"
    )  # fmt: skip


# Steps, prompts, loads and first tokens in vLLM.

STEP_GOALS = {1: 6.5, 4: 8.0, 8: 10.0, 32: 24.0}
PROFILED_GOAL = 11.5  # of 8 deltas, with a profile that shows the bound


def _step(file: str, active: int, of: str = "deltas") -> Row:
    (row,) = _rows(file, "step", active=active, of=of)
    return row


def _prompt(file: str, prompts: int, of: str) -> float:
    (row,) = _rows(file, "prompt", prompts=prompts, of=of)
    return row["median_ms"]


def _steps_table() -> list[list[str]]:
    without = _step("plain.json", 0)["median_ms"]
    base = _step("deltas.json", 0)["median_ms"]
    lines = [
        ["step of 32 rows, no delta in it", "2% over an engine without LoRA",
         f"{base:.2f} ms; {without:.2f} without LoRA (in another call)", _judged([base], 1.02 * without)],
    ]  # fmt: skip
    for active, goal in STEP_GOALS.items():
        row = _step("deltas.json", active)
        goals, judged = f"{goal:g} ms", _judged([row["median_ms"]], goal)
        if active == 8:
            goals += f", or {PROFILED_GOAL:g} with a profile that shows the bound"
            judged += f"; {PROFILED_GOAL:g}: {_judged([row['median_ms']], PROFILED_GOAL)}"
        measured = f"{row['median_ms']:.2f} ms ({_spread(row['all_ms'], '.2f')})"
        lines.append([f"{active} delta{'s' * (active > 1)}", goals, measured, judged])
    return lines


def _prompt_line() -> list[str]:
    one, base = _prompt("deltas.json", 1, "one"), _prompt("deltas.json", 1, "base")
    measured = f"{one:.1f} ms for {base:.1f}: {one / base:.3f} times"
    return ["prompt of 2,048 tokens of one delta", "1.25 times the base's", measured, _judged([one / base], 1.25)]


_LOADS = (  # in their order of time
    ("2026-11-28, one GPU, first call (steps of 12 ms)", "deltas_before_triton_3.8.json"),
    ("2026-11-28, one GPU, second call", "deltas.json"),
    ("2026-11-28, one GPU, third call, loads made shorter", "contest_slots.json"),
    ("2026-11-29, two GPUs (`tp` 2)", "deltas_tp2.json"),
    ("2026-11-30, one GPU, files read by four threads", "deltas_read_by_threads.json"),
    ("2026-11-30, the same next to slots of adapters", "mixed_graphs_by_kind.json"),
)


def _load_lines() -> list[list[str]]:
    lines = []
    for name, file in _LOADS:
        shares = [row["longest_share"] for row in _rows(file, "load")]
        measured = (
            f"{_listed(shares, '.2f')} ({_spread([r['longest_ms'] for r in _rows(file, 'load')], '.1f')} ms)"
        )
        lines.append(
            [f"longest step next to a load, {name}", "1.5 times the median", measured, _judged(shares, 1.5)]
        )
    spans = [
        _spread([row["loaded_s"] for _, file in calls for row in _rows(file, "load")], ".2f")
        for calls in (_LOADS[1:3], _LOADS[4:])
    ]
    what = "a load from the page cache next to steps, one GPU: 2026-11-28; 2026-11-30"
    return [*lines, [what, "", f"{'; '.join(spans)} s", ""]]


def _cold_line() -> list[str]:
    rows = _rows("contest_slots.json", "cold")
    assert all(row["pages_dropped"] for row in rows)
    first = [row["first_token_s"] for row in rows]
    disk = [row["disk_alone_s"] for row in rows]
    speed = [row["bytes"] / row["disk_alone_s"] / 1e9 for row in rows]
    measured = (
        f"{_listed(first, '.3f')} s, of which the disk's {_listed(disk, '.2f')} ({_spread(speed, '.1f')} GB/s)"
    )
    return ["first token of a delta that is nowhere in memory", "below 2 s", measured, _judged(first, 2.0)]


_LAWS = {"zipf-bursts": "Zipf 1.5 in bursts", "even": "even"}


def _ended(law: str, order: str) -> Row:
    file = "contest_slots.json" if order == "slots" else "contest_swapping.json"
    (row,) = _rows(file, "contest", law=law, order=order)
    return row


def _swapping_lines() -> list[list[str]]:
    lines = []
    for order, words in (("fcfs", "in order of arrival"), ("grouped", "grouped by model")):
        gains = [_ended(law, "slots")["ended_per_s"] / _ended(law, order)["ended_per_s"] for law in _LAWS]
        measured = ", ".join(f"{gain:.1f} ({law})" for gain, law in zip(gains, _LAWS.values(), strict=True))
        judged = "met" if min(gains) >= 12 else "missed"
        goal = "12 times" if order == "fcfs" else ""
        lines.append(
            [f"requests/s with 32 deltas, to swapping full models {words}", goal, measured, judged * bool(goal)]
        )
    return lines


def _mixed_lines() -> list[list[str]]:
    """Return steps next to slots of adapters, with graphs for each kind of step and with one for all."""
    kinds, one = (
        [_step(f"mixed_{graphs}.json", active)["median_ms"] for active in (0, *STEP_GOALS)]
        for graphs in ("graphs_by_kind", "one_graph")
    )
    base = _judged(kinds[:1], 1.02 * _step("plain.json", 0)["median_ms"])
    deltas = [_judged([ms], goal) for ms, goal in zip(kinds[1:], STEP_GOALS.values(), strict=True)]
    deltas[2] += f" ({PROFILED_GOAL:g}: {_judged([kinds[3]], PROFILED_GOAL)})"
    what = "steps with 0, 1, 4, 8, 32 deltas next to slots of adapters, 2026-11-30"
    return [
        [
            f"{what}, graphs for each kind of step", "as above", f"{_listed(kinds, '.2f')} ms",
            "; ".join([base, *deltas]),
        ],
        ["the same in the next start on that GPU, one graph for all kinds", "", f"{_listed(one, '.2f')} ms", ""],
    ]  # fmt: skip


def _in_short() -> str:
    """Return what a reader of the variants' page needs: every goal, measured or missed."""
    lines = [*_steps_table(), *_mixed_lines(), _prompt_line(), *_load_lines(), _cold_line(), *_swapping_lines()]
    lines = [[*line[:3], _bold(line[3])] for line in lines]
    return _table(
        "| an H200, Llama-3.1-8B's shape, deltas of 2 bits | goal | measured | |", "|---|---|---|---|", lines
    )


def _further() -> str:
    """Return what was measured with the goals, and has none."""
    prompts = [_prompt("deltas.json", 4, of) for of in ("base", "one", "distinct")]
    graphs = [_step("specialized.json", active)["median_ms"] for active in (1, 4, 8)]
    last = [_spread([row["last_call_ms"] for row in _rows(file, "load")], ".1f") for file in _LAST_CALLS]
    starts = [_read(f"delta_served_h200/{file}.json")["facts"]["start_s"] for file in _STARTS]
    lines = [
        ["4 prompts of 2,048 tokens at once: of the base, of one delta, of four", f"{_listed(prompts, '.0f')} ms"],
        [
            "graphs for each number of deltas in use, 8 slots: steps with 1, 4 and 8",
            f"{_listed(graphs, '.2f')} ms: not worth having",
        ],
        *_adapters_lines(),
        [
            "loads of the first 32 deltas, nothing else running, median and longest: second call; third; "
            "2026-11-30 without slots of adapters; next to them, two starts",
            "; ".join(f"{row['median_load_s']:.2f} and {row['longest_load_s']:.2f} s" for row in _resident()),
        ],
        ["call with which a load ends: third call; 2026-11-30, both engines", f"{'; '.join(last)} ms"],
        *_reader_lines(),
        [
            "start with 32 slots, and without LoRA: first two calls (FlashInfer's sampler there already); third",
            "{:.0f} and {:.0f} s; {:.0f} and {:.0f} s (both compile anew, side by side)".format(*starts),
        ],
    ]
    return _table("| | |", "|---|---|", lines)


_MIXED = ("mixed_graphs_by_kind", "mixed_one_graph")  # graphs for each kind of step, and one for all
_LAST_CALLS = ("contest_slots.json", "deltas_read_by_threads.json", "mixed_graphs_by_kind.json")
_LOGS = "logs_of_2026-11-30.json"


def _resident() -> list[Row]:
    files = ("deltas", "contest_slots", "deltas_read_by_threads", *_MIXED)
    return [_rows(f"{file}.json", "resident")[0] for file in files]


def _adapters_lines() -> list[list[str]]:
    """Return steps with adapters, and what graphs take, where slots hold both kinds of variants."""
    steps = [
        [_step(f"{file}.json", *of)["median_ms"] for of in ((2, "adapters"), (4, "deltas and adapters"))]
        for file in _MIXED
    ]
    starts = [_rows(_LOGS, "start", of=file)[0] for file in ("deltas_read_by_threads", *_MIXED)]
    return [
        [
            "step next to slots of adapters: two adapters; two deltas and two adapters, half of the rows each",
            "{} ms; {} with one graph for all kinds".format(*(_listed(each, ".2f") for each in steps)),
        ],
        [
            "graphs of 32 slots of deltas alone; next to slots of adapters; the same with one graph for all kinds",
            "; ".join(f"{row['graphs_s']} s and {row['graphs_gib']:.2f} GiB" for row in starts),
        ],
    ]


def _reader_lines() -> list[list[str]]:
    """Return the bandwidth of reading a delta's file by the number of threads, means of two readings."""
    lines = []
    for source in ("page cache", "disk"):
        for memory, name in (("plain", "memory"), ("pinned", "page-locked memory")):
            rows = _rows(_LOGS, "reader", memory=memory)
            speeds = [
                [row["gb_per_s"] for row in rows if (row["from"], row["threads"]) == (source, threads)]
                for threads in (1, 2, 4, 8)
            ]
            means = [sum(each) / len(each) for each in speeds]
            lines.append(
                [
                    f"a delta's file read from the {source} to {name} by 1, 2, 4, 8 threads",
                    f"{_listed(means, '.1f')} GB/s",
                ]
            )
    return lines


_STARTS = ("deltas", "plain", "contest_slots", "contest_swapping")


def _contest() -> str:
    lines = []
    for law, name in (
        ("zipf-bursts", "Zipf 1.5, each variant's arrivals in bursts, 180 s"),
        ("even", "all alike, Poisson, 90 s"),
    ):
        for order in ("slots", "fcfs", "grouped"):
            row = _ended(law, order)
            lines.append([
                f"{name}: slots" if order == "slots" else order,
                f"{row['requests'] / (180 if law == 'zipf-bursts' else 90):.1f}" if order == "slots" else "",
                f"{row['ended_per_s']:.2f}", f"{row['tokens_per_s']:,.0f}", f"{row['e2e_s']['mean']:.1f}",
                f"{row['ttft_s']['mean']:.1f}", str(row["swaps"] or ""),
            ])  # fmt: skip
    return _table(
        "| | arrivals/s | requests/s | tokens/s | E2E, mean, s | TTFT, mean, s | swaps |",
        "|---|--:|--:|--:|--:|--:|--:|",
        lines,
    )


# Kernels alone.


def _kernels(run: str) -> Row:
    found: Row = _read(f"delta_kernels_h200/{run}.json.gz")
    return found


def _added(rows: int, active: int, choice: str) -> float:
    (row,) = (
        each for each in _kernels("run3")["step"]
        if (each["rows"], each["active"], each["choice"]) == (rows, active, choice)
    )  # fmt: skip
    return row["both_ms"] - row["base_ms"]


def _read_speed(active: int) -> float:
    """Return the TB/s of codes and scales by the best tiling of each linear."""
    best: dict[str, Row] = {}
    for row in _kernels("run3")["decode"]:
        if (row["rows"], row["active"]) == (32, active):
            best[row["linear"]] = min(row, best.get(row["linear"], row), key=lambda each: each["us"])
    return sum(row["us"] * row["gb_per_s"] for row in best.values()) / sum(r["us"] for r in best.values()) / 1e3


def _kernels_added() -> str:
    (base,) = (
        r["base_ms"] for r in _kernels("run3")["step"] if (r["rows"], r["active"], r["choice"]) == (32, 0, "fixed")
    )
    lines = [
        [
            "none in use",
            f"{base:.2f} ms",
            f"{_added(32, 0, 'fixed'):.2f}",
            "",
            "",
            "",
            f"{_added(128, 0, 'fixed'):.2f}",
        ]
    ]
    for active in (1, 4, 8, 32):
        added = [f"{_added(32, active, choice):.2f}" for choice in ("fixed", "best", "streams")]
        name = f"{active} delta{'s' * (active > 1)}"
        lines.append(
            [name, f"{base:.2f}", *added, f"{_read_speed(active):.2f} TB/s", f"{_added(128, active, 'best'):.2f}"]
        )
    return _table(
        "| 32 rows | base alone | added, any mix | added, tiling by the deltas in use | on a second stream "
        "| codes and scales read at | 128 rows, by the deltas in use |",
        "|---|--:|--:|--:|--:|--:|--:|", lines,
    )  # fmt: skip


def _prompts() -> str:
    lines = []
    entries = _kernels("run3")["prompts"]
    for rows in sorted({row["rows"] for row in entries}):
        mine = [row for row in entries if row["rows"] == rows]
        base, merged = (sum(row[key] for row in mine) for key in ("base_us", "merged_us"))
        kernel = (
            sum(min(row["kernel_us"].values()) for row in mine) if all(row["kernel_us"] for row in mine) else None
        )
        lines.append([
            f"{rows:,}", f"{base / 1e3:.2f} ms",
            "" if kernel is None else f"{1 + kernel / base:.2f} times", f"{merged / base:.2f} times",
        ])  # fmt: skip
    return _table(
        "| rows of one delta | base, all four linears of a layer | base + kernel | merged |",
        "|---|--:|--:|--:|",
        lines,
    )


def _other_formats() -> str:
    lines = []
    for name in ("int4", "int3", "int1"):
        times = []
        for run in ("run1", "run2", "run3"):
            best: dict[str, float] = {}
            for row in _kernels(run)["formats"]:
                if (row["format"], row["rows"], row["active"]) == (name, 32, 8):
                    best[row["linear"]] = min(row["us"], best.get(row["linear"], row["us"]))
            assert len(best) == 4
            times.append(f"{sum(best.values()) * LAYERS / 1e3:.1f}")
        lines.append([name, *times])
    return _table("| 8 deltas, 32 rows: added, ms | first run | second | third |", "|---|--:|--:|--:|", lines)


def _in_vllm(active: int) -> float:
    return _step("deltas.json", active)["median_ms"] - _step("deltas.json", 0)["median_ms"]


def _cuda() -> str:
    tries = _read("delta_kernels_h200/cuda_tries.jsonl.gz")
    active = (1, 4, 8, 32)

    def best(form: str, *, is_triton: bool = False) -> list[float]:
        times: dict[int, list[float]] = {each: [] for each in active}
        for row in tries:
            if row["form"] != form or (row.get("cfg") == "triton") != is_triton:
                continue
            if "added_ms" in row and row["active"] in times:
                times[row["active"]].append(row["added_ms"])
            elif "a" in row and row["a"] in times:
                times[row["a"]].append(row["ms"])
        return [min(times[each]) for each in active]

    forms = (
        (
            "Triton 3.8, any mix, in vLLM on torch 2.14 (another program: steps less the base's)",
            [_in_vllm(n) for n in active],
        ),
        ("Triton 3.6, in the same program on torch 2.11", best("clusters", is_triton=True)),
        ("a cluster of 2, 4 or 8 blocks for a tile, sums by distributed shared memory", best("clusters")),
        ("the same, the cluster's blocks in teams by the number of tiles", best("teams of clusters")),
        ("stream-K, a warp that copies (`cp.async.bulk`), 3 blocks of an SM", best("stream-K")),
    )
    lines = [[name, *(f"{value:.2f}" for value in values)] for name, values in forms]
    return _table("| form, added ms | 1 | 4 | 8 | 32 deltas |", "|---|--:|--:|--:|--:|", lines)


# Policies.

_POLICIES = ("ours", "ours, closed", "deltazip", "deltazip, preempting", "fcfs")


def _policies(file: str) -> str:
    """Return mean and P95 of E2E latency, and P99 of the wait for a slot. *Resumed in no time* is left out."""
    lines: dict[tuple[float, float], list[str]] = {}
    for cell in (cell for cell in _read(file)["cells"] if cell["policy"] in _POLICIES):
        key = (cell["skew"], cell["load"])
        line = lines.setdefault(key, [f"{cell['skew']:g}, {cell['slots']}", f"{cell['load']:.0%}"])
        line.append(_cell(cell, is_first=len(line) == 2))
    return _table(
        "| Zipf, slots | load | ours | closed | deltazip, blocking | deltazip, preempting | fcfs |",
        "|---|---:|---|---|---|---|---|",
        list(lines.values()),
    )


def _cell(cell: Row, *, is_first: bool) -> str:
    """Return mean and P95 of E2E latency and P99 of the wait, in three digits."""
    mean, p95, waited = (_digits(cell[key]) for key in ("mean_s", "p95_s", "waited_p99_s"))
    return f"{mean}, {p95}; {waited}{' s' * is_first}"


def _digits(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _numbers() -> str:
    lines = []
    for row in _read("delta_policies.json.gz")["numbers"]:
        found, expected = row["tokens_per_s"], row["expected_tokens_per_s"]
        share = found[str(row["chosen"])] / max(found.values())
        figures = [f"{found[n]:,.0f} ({expected[n]:,.0f})" for n in found]
        lines.append([f"{row['skew']:g}", str(row["clients"]), *figures, str(row["chosen"]), f"{share:.0%}"])
    return _table(
        "| Zipf | requests | N = 2 | 4 | 8 | 16 | 32 | chosen | of the best |", "|---|" + "---:|" * 8, lines
    )


DELTA_TABLES: dict[str, Callable[[], str]] = {
    "deltas on an H200": _in_short,
    "deltas on an H200, further": _further,
    "deltas against swapping": _contest,
    "delta kernels": _kernels_added,
    "delta kernels for prompts": _prompts,
    "delta kernels, other formats": _other_formats,
    "delta kernels in CUDA": _cuda,
    "policies of deltas": partial(_policies, "delta_policies.json.gz"),
    "policies of deltas, loads of 1 s": partial(_policies, "delta_policies_load_1s.json.gz"),
    "policies of deltas, loads of 2 s": partial(_policies, "delta_policies_load_2s.json.gz"),
    "numbers of deltas": _numbers,
}
