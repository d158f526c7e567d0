"""Deltas in vLLM itself: tokens, steps, prompts and loads, on one GPU with vLLM 0.33.0; needs no web framework.

    python -m tests.bench.delta_served write WORK [--parts large small] [--deltas 38] [--contents 4]
    python -m tests.bench.delta_served same OUT --work WORK [--batches 20] [--at-once 1]
    python -m tests.bench.delta_served run OUT --work WORK --engine deltas [--measure steps loads] [--slots 32]
                                           [--eager] [--tp 2] [--settings '{"format": "int4"}']
    python -m tests.bench.delta_served table OUT

``write`` makes models and random deltas: ``large`` takes 7.5 GB of disk, ``small`` 10. ``same`` compares tokens of
mixed batches with those of each request alone, and of a delta with those of the checkpoint that it means, on four
layers of Llama-3.1-8B's shape. ``run`` measures one engine of the whole shape, dummy weights: ``plain`` (without
LoRA), ``deltas`` (slots of deltas alone), ``mixed`` (deltas and adapters). ``--settings`` are the plug-in's: with
``format`` int4 its deltas of 2 bits are recoded as they are loaded, into slots of 4 bits. Slots of 32 deltas and
the spare one take 61 GB: a card of 80 GB holds fewer (``--slots 8``).
``OUT/NAME.json`` is written after each measurement, so a run that is killed keeps what it has. A start takes a
minute or two, so one call has one engine.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.bench.delta_agreement import MARGIN, agreement, allowed_margin, random_batches
from tests.bench.delta_contest import LAWS, ORDERS, PINNED, AtOnce, Swapping, draw, play, summary_of
from tests.bench.delta_served_engine import Served, facts_of, random_tokens
from tests.bench.delta_served_files import Files, write_all
from tests.bench.kept import read_kept

__all__ = ["ENGINES", "GOALS_MS", "Answers", "Kept", "Mix", "compare_batches", "longest_steps", "summary"]

ENGINES = ("plain", "deltas", "mixed")
MEASURES = ("steps", "prompts", "loads", "reloads", "cold", "contest")
GOALS_MS = {1: 6.5, 4: 8.0, 8: 10.0, 32: 24.0}
BASE_SHARE, LOAD_SHARE, COLD_GOAL_S = 0.02, 1.5, 2.0
ROWS, PROMPT, OUTPUT, ROUNDS = 32, 64, 129, 3
ACTIVE = (0, 1, 4, 8, 32)
LONG, MANY = (1, 2048), (4, 2048)  # prompts at once, tokens of each
_LOAD_AT = 100  # step before which a load is asked for
SMALL_VARIANTS = (0, 0, 1, 2, 3, 4, -1, -2)
_SMALL_SLOTS = 5  # for six deltas and adapters, so that slots are taken from some
_FIXED = 12  # prompts of the first batch

Mix = Sequence[int]  # of each row: 0 the base, n delta n, -n adapter n
Ranked = tuple[int, float, float]  # token, its log-probability, its margin above the next


class Kept:
    """Measurements, written after each."""

    def __init__(self, file: Path, facts: dict[str, Any]) -> None:
        self._file, self._rows, self._facts = file, list[dict[str, Any]](), facts
        file.parent.mkdir(parents=True, exist_ok=True)

    def add(self, kind: str, **row: Any) -> None:
        """Keep a row and print it."""
        self._rows.append({"kind": kind, **row})
        print(json.dumps(self._rows[-1]), flush=True)
        whole = json.dumps({"facts": self._facts, "rows": self._rows}, indent=1)
        partial = self._file.with_suffix(".part")
        partial.write_text(whole + "\n")
        os.replace(partial, self._file)


def measure_steps(
    served: Served, kept: Kept, *, active: Sequence[int], numbers: Sequence[int], of: str = "deltas"
) -> None:
    """Time decode steps of 32 rows, each count of distinct variants ``of`` a kind in turn, several times."""
    times: dict[int, list[float]] = {}
    for _ in range(ROUNDS):
        for count in active:
            for row in range(ROWS):
                served.add(random_tokens(row, PROMPT), numbers[row % count] if count else 0, OUTPUT)
            _, steps = served.finish()
            times.setdefault(count, []).append(statistics.median(steps[16:-8]))
    for count, medians in times.items():
        kept.add(
            "step",
            of=of,
            active=count,
            median_ms=1e3 * statistics.median(medians),
            all_ms=[1e3 * seconds for seconds in medians],
        )


def measure_prompts(served: Served, kept: Kept, *, numbers: Sequence[int]) -> None:
    """Time prompts of 2,048 tokens to their first token, of the base and of ``numbers``."""
    for count, tokens in (LONG, MANY):
        for name, asked in {"base": [0] * count, "one": numbers[:1] * count, "distinct": numbers[:count]}.items():
            if len(asked) < count or (name == "distinct" and count == 1):
                continue
            seconds = []
            for round_ in range(6):
                for row, number in enumerate(asked):
                    served.add(random_tokens(100 * round_ + row, tokens), number, 1)
                begin = time.perf_counter()
                served.finish()
                seconds.append(time.perf_counter() - begin)
            kept.add(
                "prompt", prompts=count, tokens=tokens, of=name, median_ms=1e3 * statistics.median(seconds[1:])
            )


class _Loading:
    """Load of one delta, asked for between steps until it is there."""

    def __init__(self, served: Served, number: int, at: int = _LOAD_AT) -> None:
        self._served, self._number, self._at, self._asked = served, number, at, 0.0
        self.seconds: float | None = None
        self.last_step: int | None = None
        """Number of the step before which it was there."""
        self.calls_s: list[float] = []
        """Time of each call that asked."""

    def ask(self, step: int) -> None:
        """Ask before step number ``step``."""
        if step < self._at or self.seconds is not None:
            return
        begin = time.perf_counter()
        self._asked = self._asked or begin
        is_there = self._served.load(self._number)
        end = time.perf_counter()
        self.calls_s.append(end - begin)
        if is_there:
            self.seconds, self.last_step = end - self._asked, step


def measure_loads(served: Served, kept: Kept, *, resident: Sequence[int], new: Sequence[int]) -> None:
    """Time loads while 32 rows decode: the longest step from the request on, against the median."""
    for number in new:
        for row in range(ROWS):
            served.add(random_tokens(row, PROMPT), resident[row % len(resident)], 400)
        loading = _Loading(served, number)
        _, steps = served.finish(loading.ask)
        median = statistics.median(steps[16:_LOAD_AT])
        kept.add(
            "load",
            delta=number,
            loaded_s=loading.seconds,
            median_ms=1e3 * median,
            longest_ms=1e3 * max(steps[_LOAD_AT:-4]),
            longest_share=max(steps[_LOAD_AT:-4]) / median,
            longest_steps=longest_steps(steps[:-4], _LOAD_AT, loading.last_step),
            last_call_ms=1e3 * loading.calls_s[-1],
            longest_earlier_calls_ms=[1e3 * one for one in sorted(loading.calls_s[:-1], reverse=True)[:5]],
            calls=len(loading.calls_s),
        )


def measure_cold(served: Served, kept: Kept, *, new: Sequence[int]) -> None:
    """Time deltas from the request for a load to the first token, no page of their files in memory."""
    for number in new:
        files = [file for file in served.files.delta(number).iterdir() if file.is_file()]
        dropped = [drop_pages(file) for file in files]
        begin = time.perf_counter()
        for file in files:
            with file.open("rb", buffering=0) as stream:
                while stream.read(1 << 24):
                    pass
        disk_alone_s = time.perf_counter() - begin
        dropped += [drop_pages(file) for file in files]
        begin = time.perf_counter()
        while not served.load(number):
            time.sleep(0.005)
        loaded_s = time.perf_counter() - begin
        served.add(random_tokens(number, PROMPT), number, 1)
        served.finish()
        first_token_s = time.perf_counter() - begin
        kept.add(
            "cold",
            delta=number,
            bytes=sum(file.stat().st_size for file in files),
            pages_dropped=all(dropped),
            disk_alone_s=disk_alone_s,
            loaded_s=loaded_s,
            first_token_s=first_token_s,
        )


def drop_pages(file: Path) -> bool:
    """Drop a file's pages from memory; return whether one in its middle is no longer there."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.preadv(descriptor, [bytearray(1)], file.stat().st_size // 2, os.RWF_NOWAIT)
    except OSError as error:
        return error.errno == errno.EAGAIN
    finally:
        os.close(descriptor)
    return False


def measure_contest(served: Served, kept: Kept, *, laws: Sequence[str], orders: Sequence[str]) -> None:
    """Answer the requests of each law, with deltas in slots or, given ``orders``, by swapping full models."""
    swap = None
    if orders:
        begin = time.perf_counter()
        swap = served.pin_copies(PINNED)
        pinned_s = time.perf_counter() - begin
        seconds = []
        for number in range(2 * PINNED):
            begin = time.perf_counter()
            swap(number)
            seconds.append(time.perf_counter() - begin)
        kept.add("swap", copies=PINNED, pinned_s=pinned_s, median_s=statistics.median(seconds))
    for law in laws:
        for order in orders or ("slots",):
            queue = AtOnce() if swap is None else Swapping(order, swap)
            of: Callable[[int], int] = (lambda variant: variant) if swap is None else (lambda variant: 0)
            requests = draw(law, LAWS[law], seed=1)
            times = play(served, requests, queue, LAWS[law], prompt=random_tokens, number_of=of)
            swaps = queue.swaps if isinstance(queue, Swapping) else 0
            kept.add("contest", law=law, order=order, swaps=swaps, **summary_of(times, LAWS[law]))


def longest_steps(steps: Sequence[float], asked: int, loaded: int | None, count: int = 10) -> list[dict[str, Any]]:
    """Return the longest steps from ``asked`` on, by their number after the request and after the load.

    Args:
        steps: seconds of each.
        asked: number of the step before which the load was asked for; its time has that of the request.
        loaded: likewise of the call that said that the delta is there; None: none did.
        count: most steps.
    """
    found = sorted(range(asked, len(steps)), key=lambda number: -steps[number])[:count]
    return [
        {
            "ms": 1e3 * steps[number],
            "after_request": number - asked,
            "after_load": None if loaded is None else number - loaded,
        }
        for number in found
    ]


def run(options: argparse.Namespace) -> None:
    """Measure one engine."""
    files = Files(root=options.work)
    engine, slots = options.engine, options.slots
    asked = {"engine": engine, "slots": slots} | {one: vars(options)[one] for one in ("eager", "tp", "settings")}
    served = Served(files.shape, files, small=False, **asked)
    facts = facts_of(**asked, start_s=served.start_s)
    parts = [engine, *(["eager"] if options.eager else []), *([f"tp{options.tp}"] if options.tp > 1 else [])]
    name = "_".join([*parts, *map(str, sum(options.settings.items(), ()))])
    kept = Kept(options.out / f"{name}.json", facts)
    numbers, compiled = list(range(1, slots + 1)), served.num_compiled()
    if engine != "plain":
        seconds = []
        for number in numbers:
            begin = time.perf_counter()
            while not served.load(number):
                time.sleep(0.01)
            seconds.append(time.perf_counter() - begin)
        kept.add("resident", deltas=slots, median_load_s=statistics.median(seconds), longest_load_s=max(seconds))
    if "steps" in options.measure:
        active = (0,) if engine == "plain" else tuple(count for count in ACTIVE if count <= slots)
        measure_steps(served, kept, active=active, numbers=numbers)
        if engine == "mixed":  # half of the rows each, and adapters alone
            measure_steps(served, kept, active=(2,), numbers=[-1, -2], of="adapters")
            measure_steps(served, kept, active=(4,), numbers=[-1, 1, -2, 2], of="deltas and adapters")
    if "prompts" in options.measure:
        measure_prompts(served, kept, numbers=[] if engine == "plain" else numbers)
    if "contest" in options.measure:
        measure_contest(served, kept, laws=options.laws, orders=ORDERS if engine == "plain" else ())
    if "loads" in options.measure and engine != "plain":
        measure_loads(served, kept, resident=numbers[:4], new=range(slots + 1, slots + 4))
    if "reloads" in options.measure and engine != "plain":  # of what the arena keeps, after what "loads" loaded
        for number in numbers[-3:]:
            served.engine.remove_lora(served.request(number).lora_int_id)
        measure_loads(served, kept, resident=numbers[:4], new=numbers[-3:])
    if "cold" in options.measure and engine != "plain":
        measure_cold(served, kept, new=range(slots + 4, slots + 7))
    kept.add("compiled", at_start=compiled, later=served.num_compiled() - compiled)


def same(options: argparse.Namespace) -> None:
    """Compare tokens; each engine runs in a process of its own, that of the merged checkpoint first."""
    for former in options.out.glob("same_*.json*"):
        former.unlink()
    command = [sys.executable, "-m", "tests.bench.delta_served", "tokens", str(options.out)]
    command += ["--work", str(options.work), "--batches", str(options.batches)]
    command += ["--eager"] if options.eager else []
    subprocess.run([*command, "--of", "merged"], check=True)
    shares = [f"{share}/{options.at_once}" for share in range(options.at_once)]
    mixed = [subprocess.Popen([*command, "--of", "mixed", "--share", share]) for share in shares]
    codes = [process.wait() for process in mixed]
    if any(codes):
        raise SystemExit("an engine of mixed batches failed")


class Answers:
    """Greedy answers of one engine; each that is asked for alone is kept."""

    def __init__(self, served: Served) -> None:
        self._served, self._alone = served, dict[tuple[int, int], list[Ranked]]()

    @staticmethod
    def prompt(number: int) -> list[int]:
        """Return prompt ``number``: the first four of set lengths, those behind them of random ones."""
        lengths = (40, 700, 9, 200)
        return random_tokens(
            number, lengths[number % 4] if number < _FIXED else random.Random(number).randint(1, 1500)
        )

    def together(
        self, asked: Sequence[tuple[int, int]], between: Callable[[int], None] = lambda step: None
    ) -> list[list[Ranked]]:
        """Return the answers to requests of a variant and a prompt each, in one batch."""
        names = [self._served.add(self.prompt(prompt), variant, 32, logprobs=2) for variant, prompt in asked]
        done, _ = self._served.finish(between)
        return [_ranked(done[name]) for name in names]

    def alone(self, variant: int, prompt: int) -> list[Ranked]:
        """Return the answer to one request."""
        if (variant, prompt) not in self._alone:
            (self._alone[variant, prompt],) = self.together([(variant, prompt)])
        return self._alone[variant, prompt]


def tokens_of(options: argparse.Namespace) -> None:
    """Record the tokens of the merged checkpoint, or compare mixed batches with them and with each alone."""
    files, merged = Files(root=options.work), options.of == "merged"
    share, shares = map(int, options.share.split("/"))
    model, engine = (files.merged, "plain") if merged else (files.small, "mixed")
    served = Served(model, files, engine=engine, slots=_SMALL_SLOTS, small=True, eager=options.eager)
    name = f"same_{options.of}{f'_{share}' if share else ''}.json"
    kept = Kept(options.out / name, facts_of(engine=engine, start_s=served.start_s))
    mix = [0, 1, 2, -1, 1, 3, 4, 0, 2, 1, 3, 0] if not merged else [1, 1, 1, 1, 1, 1]
    answers, rows = Answers(served), range(len(mix))
    asked = [(0 if merged else variant, row) for row, variant in enumerate(mix)]
    together, compared = answers.together(asked), []
    for row in rows:
        compared.append(agreement(together[row], answers.alone(*asked[row])))
        kept.add("alone", row=row, variant=mix[row], **compared[-1])
    if merged:
        kept.add("tokens", answers={str(row): answers.alone(*asked[row]) for row in rows})
        return
    recorded = json.loads((options.out / "same_merged.json").read_text())["rows"][-1]["answers"]
    allowed = allowed_margin(compared)
    for row in (row for row in rows if mix[row] == 1 and str(row) in recorded):
        kept.add("merged", row=row, **agreement(together[row], recorded[str(row)], allowed))
    for row in (row for row in rows if mix[row] not in (0, 1) and str(row) in recorded):
        kept.add("control", row=row, variant=mix[row], **agreement(together[row], recorded[str(row)], allowed))
    compare_batches(served, kept, answers, range(share, options.batches, shares))


def compare_batches(served: Served, kept: Kept, answers: Answers, batches: range) -> None:
    """Compare random batches with each request alone; next to each, a delta that it has not is loaded anew.

    Args:
        batches: numbers of those that are compared.
    """
    deltas = [variant for variant in SMALL_VARIANTS if variant > 0]
    drawn = random_batches(0, batches=batches.stop, variants=SMALL_VARIANTS, prompts=_FIXED + 12)
    for number in batches:
        asked = drawn[number]
        new = next((delta for delta in deltas if delta not in {variant for variant, _ in asked}), None)
        between: Callable[[int], None] = lambda step: None  # noqa: E731
        if new is not None:
            served.engine.remove_lora(new)
            loading = _Loading(served, new, at=2)
            between = loading.ask
        together = answers.together(asked, between)
        while new is not None and not served.load(new):
            time.sleep(0.01)
        compared = [agreement(mine, answers.alone(*one)) for one, mine in zip(asked, together, strict=True)]
        errors = [one["largest_logprob_error"] or 0.0 for one in compared]
        kept.add(
            "batch",
            batch=number,
            requests=asked,
            loaded=new,
            passed=all(one["passed"] for one in compared),
            agreed=[one["agreed"] for one in compared],
            margins_where_other=[one["margin_where_other"] for one in compared],
            largest_logprob_error=max(errors),
        )


def _ranked(output: Any) -> list[Ranked]:
    """Return each token with its log-probability and its margin above the next."""
    found = []
    for token, of_step in zip(output.token_ids, output.logprobs, strict=True):
        ranked = sorted((one.logprob for one in of_step.values()), reverse=True)
        found.append((int(token), float(ranked[0]), float(ranked[0] - ranked[1])))
    return found


def summary(out: Path) -> list[str]:
    """Return the lines of a table of all that is in ``out``, with the goals."""
    files = sorted([*out.glob("*.json"), *out.glob("*.json.xz")])
    found = {file.name.partition(".")[0]: json.loads(read_kept(file))["rows"] for file in files}
    lines = []
    plain = [row["median_ms"] for row in found.get("plain", []) if row["kind"] == "step"]
    for name, rows in found.items():
        for row in rows:
            if row["kind"] == "step":
                goal = f"goal {GOALS_MS[row['active']]}" if row["of"] == "deltas" and row["active"] else ""
                if not row["active"] and plain and name != "plain":
                    goal = f"{row['median_ms'] / plain[0] - 1:+.1%} of the plain engine's, goal +{BASE_SHARE:.0%}"
                lines.append(
                    f"{name}: step, {row['active']} {row['of']}: {row['median_ms']:.2f} ms; {goal}".rstrip("; ")
                )
            elif row["kind"] == "prompt":
                lines.append(
                    f"{name}: {row['prompts']} x {row['tokens']} tokens, {row['of']}: {row['median_ms']:.1f} ms"
                )
            elif row["kind"] == "cold":
                lines.append(
                    f"{name}: cold delta, first token after {row['first_token_s']:.2f} s, "
                    f"disk alone {row['bytes'] / row['disk_alone_s'] / 1e9:.2f} GB/s, goal {COLD_GOAL_S} s"
                )
            elif row["kind"] == "contest":
                lines.append(
                    f"{name}: {row['law']}, {row['order']}: {row['ended_per_s']:.2f} requests/s, mean E2E "
                    f"{row['e2e_s']['mean']:.1f} s, TTFT {row['ttft_s']['mean']:.1f} s, {row['swaps']} swaps"
                )
            elif row["kind"] == "load":
                lines.append(
                    f"{name}: load in {row['loaded_s']} s, longest step {row['longest_share']:.2f} of the median, "
                    f"goal {LOAD_SHARE}"
                )
            elif "passed" in row and "row" in row:
                lines.append(
                    f"{name}: row {row['row']}, {row['kind']}: {row['agreed']} of {row['tokens']} tokens, margin "
                    f"{row['margin_where_other']}, log-probabilities within {row['largest_logprob_error']}"
                )
        lines += _batches_line(name, [row for row in rows if row["kind"] == "batch"])
    return lines


def _batches_line(name: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line on random batches, if there are any."""
    if not rows:
        return []
    margins = [margin for row in rows for margin in row["margins_where_other"]]
    alike = sum(margin is None or margin < MARGIN for margin in margins)
    largest = max((margin for margin in margins if margin is not None), default=0.0)
    return [
        f"{name}: {len(rows)} batches, {alike} of {len(margins)} answers as alone up to a margin of {MARGIN}, the "
        f"largest {largest}, log-probabilities within {max(row['largest_logprob_error'] for row in rows):.3f}"
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    write = parts.add_parser("write")
    write.add_argument("work", type=Path)
    write.add_argument("--parts", nargs="+", choices=("large", "small"), default=["large", "small"])
    write.add_argument("--deltas", type=int, default=38)
    write.add_argument("--contents", type=int, default=4)
    for name in ("same", "run", "tokens"):
        part = parts.add_parser(name)
        part.add_argument("out", type=Path)
        part.add_argument("--work", type=Path, required=True)
        part.add_argument("--eager", action="store_true", help="without compiled and captured graphs")
        if name == "run":
            part.add_argument("--engine", choices=ENGINES, required=True)
            part.add_argument("--measure", nargs="+", choices=MEASURES, default=list(MEASURES[:3]))
            part.add_argument("--slots", type=int, default=32)
            part.add_argument("--tp", type=int, default=1)
            part.add_argument("--settings", type=json.loads, default={}, help="of the plug-in, as JSON")
            part.add_argument("--laws", nargs="+", choices=tuple(LAWS), default=list(LAWS), help="of the contest")
        if name == "tokens":
            part.add_argument("--of", choices=("merged", "mixed"), required=True)
            part.add_argument("--share", default="0/1", help="which batches, of how many shares")
        if name == "same":
            part.add_argument("--at-once", type=int, default=1, help="engines that share the batches and the GPU")
        if name in ("same", "tokens"):
            part.add_argument(
                "--batches", type=int, default=20, help="random mixes, each compared with each alone"
            )
    parts.add_parser("table").add_argument("out", type=Path)
    options = parser.parse_args(arguments)
    if options.part == "write":
        write_all(
            Files(root=options.work), deltas=options.deltas, contents=options.contents, parts=tuple(options.parts)
        )
    elif options.part == "table":
        print("\n".join(summary(options.out)))
    else:
        {"same": same, "run": run, "tokens": tokens_of}[options.part](options)


if __name__ == "__main__":
    main()
