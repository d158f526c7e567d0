"""Contest of ways to make decode steps with many adapters faster on vLLM: the whole model, on one GPU.

Run with vLLM's own Python on the GPU machine, from the repository's root, after ``tests.bench.lora_kernels OUT``::

    python -m tests.bench.lora_contest measure OUT [--attempts default dual ...] [--gpu 0] [--seconds 540]
    python -m tests.bench.lora_contest table OUT

Qwen3-8B's shape with random weights, 32 slots with distinct adapters of rank 16, 32 rows that decode: steps with
the numbers of distinct adapters in ``ACTIVE``, in interleaved rounds, of which the first warms up. An attempt is
a start of its own, with its settings; two of the default show the spread. ``OUT/NUMBER-ATTEMPT.json`` is written
after each burst, and the tokens of each request to ``OUT/NUMBER-ATTEMPT.tokens.jsonl``. No attempt begins that is
expected to end, by the longest so far, after ``--seconds``. Attempts of several calls are numbered on.

**Judged**, as written down before the first result: that attempt wins whose median step with 32 adapters is
shortest and whose tokens agree; the goal is 80% of the throughput of ``base``. Tokens agree where the mean share
of a request's tokens before its first difference from a run of the first ``default`` is, for each number of
adapters in use, at most ``MOST_APART`` below that between the last and the first start of the default.
An attempt whose log does not show that its setting was taken (``SHOWN``) is out.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

from daemon.engines.vllm.variant_plug_in import ADAPTER_KERNELS
from fingerprint.codec import to_json
from fingerprint.families import load_spec
from fingerprint.random_variants import write_random_variant
from fingerprint.variant_measurements import VariantKind
from tests.bench import lora_contest_plugin as plugin
from tests.bench.kept import read_kept
from tests.bench.variant_costs_vllm import Kept, Shapes, Watched

MODEL, KIND, SLOTS = "Qwen/Qwen3-8B", VariantKind(16), 32
ROWS, INPUT, OUTPUT, CONTEXT = 32, 64, 65, 1024
ACTIVE = (0, 1, 4, 8, 32)
ROUNDS = 5  # the first one warms up
GOAL = 0.8  # of the base's throughput
MOST_APART = 0.1
DUAL, TUNED = "VLLM_LORA_ENABLE_DUAL_STREAM", "VLLM_TUNED_CONFIG_FOLDER"
# base: no slots. aligned: tuned too. The last two have no part in the default order.
ATTEMPTS = ("base", "default", "dual", "tuned", "aligned", "own", "specialized", "dual-tuned")
SHOWN = {  # in an attempt's log
    "dual": f"{DUAL}=1",
    "tuned": "Using tuned LoRA kernel configs",
    "aligned": "aligned the pointers of slices",
    "own": "kernels of adapters are iServe's",
    "specialized": f"{plugin.SPECIALIZE}=1",
    "dual-tuned": "Using tuned LoRA kernel configs",
}
# In logs of kept starts, whose kernels the bench's own plug-in put in vLLM's place; `forked`, which ran parts of
# them on a second stream, is gone (docs/decisions/0054).
SHOWN_BEFORE = {"own": f"our kernels for {ROWS} rows", "forked": f"our kernels next to {ROWS} rows"}
ORDER = ("base", "default", "dual", "tuned", "aligned", "own", "default")


def settings_of(attempt: str, out: Path, scratch: Path) -> dict[str, str]:
    """Return an attempt's variables. One that changes what is traced has a cache of compiled models of its own."""
    cache = {"VLLM_CACHE_ROOT": str(scratch / f"cache-{attempt}")}
    tuned = {TUNED: str(out / "tuned")}
    tuned_aligned = out / "aligned" / "tuned"
    return {
        "base": {},
        "default": {},
        "dual": {DUAL: "1"} | cache,
        "tuned": tuned,
        "aligned": {plugin.ALIGN: "1"}
        | (tuned | {TUNED: str(tuned_aligned)} if tuned_aligned.exists() else tuned),
        "own": {ADAPTER_KERNELS: "1"},
        "specialized": {plugin.SPECIALIZE: "1"},
        "dual-tuned": {DUAL: "1"} | tuned | cache,
    }[attempt]


def write_plug_in(folder: Path) -> None:
    """Write a folder for ``PYTHONPATH`` in which vLLM finds the plug-in."""
    info = folder / "lora_contest-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lora-contest\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nlora_contest = lora_contest_plugin:register\n")
    shutil.copy(plugin.__file__, folder / "lora_contest_plugin.py")


@contextmanager
def variables(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables, which a worker that is started here has too; put them back at the end."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def measure(
    out: Path,
    attempts: Sequence[str],
    run: Callable[[str, Path, Kept], None],
    end_s: float = math.inf,
    clock: Callable[[], float] = time.monotonic,
    **facts: object,
) -> bool:
    """Run the attempts in their order; return whether all ended without an error.

    Args:
        run: of an attempt, the file of its tokens, and what is kept.
        end_s: by ``clock``, after which no attempt is to end.
    """
    out.mkdir(parents=True, exist_ok=True)
    first, longest_s, all_ended = len(kept_files(out)), 0.0, True
    for number, attempt in enumerate(attempts, first):
        begun_s = clock()
        if begun_s + longest_s > end_s:
            print(f"left out for the time: {' '.join(attempts[number - first :])}", flush=True)
            return False
        name = f"{number}-{attempt}"
        kept = Kept(out / f"{name}.json", attempt=attempt, at=time.strftime("%Y-%m-%dT%H:%M:%S"), **facts)
        try:
            run(attempt, out / f"{name}.tokens.jsonl", kept)
        except (Exception, SystemExit):  # noqa: BLE001  # the file says what ended the attempt
            all_ended = False
            kept.add("error", text=traceback.format_exc())
        longest_s = max(longest_s, clock() - begun_s)
    return all_ended


def measure_attempt(attempt: str, target: Any, shapes: Shapes, kept: Kept) -> None:
    """Start the whole model, with slots but for ``base``, and run the rounds."""
    layers = load_spec(shapes.whole).num_layers
    slots = 0 if attempt == "base" else SLOTS
    session = Watched(target.open(tp=1, pp=1), kept)
    try:
        session.load_with_slots(
            shapes.whole,
            num_layers=layers,
            max_batch=ROWS,
            max_context_tokens=CONTEXT,
            kv_tokens=2 * ROWS * (INPUT + OUTPUT),  # whole blocks for each request, so that none waits
            slots=slots,
            rank=KIND.rank if slots else 0,
        )
        if slots:
            folders = [shapes.whole.with_name(f"adapter-{number}") for number in range(slots)]
            for number, folder in enumerate(folders):  # all distinct, so that a wrong slot shows in the tokens
                write_random_variant(shapes.whole, folder, KIND, number)
            session.load_variants(folders)
        for number in range(ROUNDS):
            for active in ACTIVE if number % 2 else ACTIVE[::-1]:
                if slots or not active:
                    session.bursts(
                        batch=ROWS, input_tokens=INPUT, output_tokens=OUTPUT, most=1, until_s=0.0, active=active
                    )
    finally:
        session.close()


def run_on(gpu: int, out: Path) -> Callable[[str, Path, Kept], None]:
    """Return how an attempt runs on ``gpu``: in a worker and folders of its own, with its settings."""
    from tests.bench.accuracy_measure import MEMORY_FRACTION, _Bench, machine_here, total_bytes

    machine, started = machine_here(1), 0

    def run(attempt: str, tokens: Path, kept: Kept) -> None:
        nonlocal started
        started += 1
        kept.keep("machine", json.loads(to_json(machine)))
        with tempfile.TemporaryDirectory(prefix="lora-contest-") as name:
            folder = Path(name)
            write_plug_in(folder / "plug-in")
            (folder / "workers").mkdir()
            values = settings_of(attempt, out.resolve(), folder)
            kept.keep("settings", values)
            path = os.pathsep.join([str(folder / "plug-in"), os.environ.get("PYTHONPATH", "")])
            values = {"PYTHONPATH": path, plugin.TOKENS: str(tokens.resolve())} | values
            shapes = Shapes(folder / "models", MODEL)
            bench = _Bench(
                out=out,
                tp=1,
                pp=1,
                machine=machine,
                budget_bytes=int(MEMORY_FRACTION * total_bytes()),
                scratch=folder / "workers",
                port=18_480 + 100 * gpu + 10 * started,
                first_gpu=gpu,
            )
            try:
                with variables(values), bench.target(shapes.whole, load_spec(shapes.whole)) as target:
                    measure_attempt(attempt, target, shapes, kept)
            finally:
                kept.keep("log", worth_keeping(folder / "workers"))

    return run


def worth_keeping(folder: Path) -> list[str]:
    """Return what workers logged of adapters, graphs and errors, and their last lines."""
    lines = [
        line[:400]
        for log in sorted(folder.glob("*/log.txt"))
        for line in log.read_text(errors="replace").splitlines()
    ]
    words = ("LoRA", "lora_", "capturing finished", "init engine", "rror", "cache")
    said = [line for line in lines if plugin.SAID in line or any(word in line for word in SHOWN.values())]
    return [*said, *[line for line in lines if any(word in line for word in words)][:200], *lines[-40:]]


def kept_files(out: Path) -> list[Path]:
    """Return the attempts that were measured, in their order; committed ones are compressed."""
    found = [path for path in out.glob("*-*.json*") if path.name.endswith((".json", ".json.xz"))]
    return sorted(found, key=lambda path: int(path.name.partition("-")[0]))


def tokens_of(file: Path) -> dict[int, list[list[list[int]]]]:
    """Return the tokens of each request, of each burst, by the distinct adapters in use; all of a warm-up too."""
    name = file.name.partition(".json")[0] + ".tokens.jsonl"
    path = next((p for p in (file.with_name(name), file.with_name(f"{name}.xz")) if p.exists()), None)
    found: dict[int, list[list[list[int]]]] = {}
    for line in read_kept(path).splitlines() if path else ():
        row = json.loads(line)
        found.setdefault(row["active"], []).append(row["tokens"])
    return found


def agreement(bursts: Sequence[list[list[int]]], others: Sequence[list[list[int]]]) -> float:
    """Return the mean share of a request's tokens before the first that differs, over pairs of bursts."""
    shares = []
    for burst, other in product(bursts, others):
        for mine, yours in zip(burst, other, strict=True):
            same = next((i for i, (a, b) in enumerate(zip(mine, yours, strict=True)) if a != b), len(mine))
            shares.append(same / len(mine))
    return statistics.mean(shares)


class Attempt:
    """Times and tokens of one attempt."""

    def __init__(self, file: Path) -> None:
        document = json.loads(read_kept(file))
        self.name, self.number = document["facts"]["attempt"], file.name.partition("-")[0]
        self.error = next((row["text"].splitlines()[-1] for row in document["rows"] if row["kind"] == "error"), "")
        shown = [names[self.name] for names in (SHOWN, SHOWN_BEFORE) if self.name in names]
        found = any(word in line for line in document.get("log", []) for word in shown)
        if shown and not self.error and not found:
            self.error = f"not in its log: {shown[0]}"
        self.tokens = tokens_of(file)
        self._bursts = [row for row in document["rows"] if row["kind"] == "burst"]

    def steps_s(self, active: int) -> list[float]:
        """Return the median step of each burst but the one that warmed up."""
        return [row["step_s"] for row in self._bursts if row["active"] == active and "step_s" in row][1:]

    def step_s(self, active: int) -> float:
        """Return the median over bursts; infinite where none was measured."""
        return statistics.median(self.steps_s(active) or [math.inf])


def agreements(attempt: Attempt, default: Attempt) -> dict[int, float]:
    """Return the agreement with the first start of the default, for each number of adapters that both had."""
    both = [active for active in ACTIVE if active in attempt.tokens and active in default.tokens]
    return {active: agreement(attempt.tokens[active], default.tokens[active]) for active in both}


def agrees(found: dict[int, float], ruler: dict[int, float]) -> bool:
    """Return whether tokens with adapters agree as well as those of two starts of the default, or nearly."""
    used = [active for active in ACTIVE if active]
    return all(active in found and found[active] >= ruler.get(active, 1.0) - MOST_APART for active in used)


class Contest:
    """All attempts of a folder, and which of them wins."""

    def __init__(self, out: Path) -> None:
        self.attempts = [Attempt(file) for file in kept_files(out)]
        defaults = [attempt for attempt in self.attempts if attempt.name == "default"]
        if not defaults:
            raise SystemExit("no start of the default was measured")
        self.default = defaults[0]
        self._ruler = agreements(defaults[-1], self.default)
        self.base_s = min((each.step_s(0) for each in self.attempts if each.name == "base"), default=math.inf)

    def verdict(self, attempt: Attempt) -> str:
        """Return whether the attempt's tokens agree, or what is wrong with it; nothing of the base's."""
        if attempt.error or attempt.name == "base":  # without slots no adapter's tokens are to agree
            return attempt.error
        return "yes" if agrees(agreements(attempt, self.default), self._ruler) else "no"

    def share(self, attempt: Attempt) -> float:
        """Return its throughput with all adapters, as a share of the base's; NaN without a base."""
        return self.base_s / attempt.step_s(SLOTS) if self.base_s < math.inf else math.nan

    def winner(self) -> Attempt:
        """Return the attempt of the shortest step with all adapters whose tokens agree."""
        good = [each for each in self.attempts if each.name != "base" and self.verdict(each) == "yes"]
        return min(good, key=lambda each: each.step_s(SLOTS), default=self.default)


def table(out: Path) -> list[str]:
    """Return lines of a table: an attempt's steps by adapters in use, its share of the base, and its tokens."""
    contest = Contest(out)
    lines = [
        f"| attempt | {' | '.join(f'{active} adapters' for active in ACTIVE)} | with {SLOTS}, of the base | "
        "tokens | agree |",
        "|---|" + "--:|" * (len(ACTIVE) + 2) + "---|",
    ]
    for attempt in contest.attempts:
        cells = [_milliseconds(attempt.steps_s(active)) for active in ACTIVE]
        share, found = contest.share(attempt), agreements(attempt, contest.default)
        cells += [f"{share:.0%}" if share > 0 else ""]
        cells += ["; ".join(f"{active}: {value:.0%}" for active, value in found.items()), contest.verdict(attempt)]
        lines.append(f"| {attempt.number} {attempt.name} | {' | '.join(cells)} |")
    tokens, winner = contest.default.tokens, contest.winner()
    if {0, SLOTS} <= tokens.keys():
        lines.append(f"tokens of the base and of {SLOTS}: {agreement(tokens[0], tokens[SLOTS]):.0%}")
    reached = "" if contest.share(winner) >= GOAL else "not "
    lines.append(f"shortest: {winner.name}; the goal of {GOAL:.0%} is {reached}reached")
    return lines


def _milliseconds(found: Sequence[float]) -> str:
    if not found:
        return ""
    return f"{1e3 * statistics.median(found):.2f} ({1e3 * min(found):.2f} to {1e3 * max(found):.2f})"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("order", choices=("measure", "table"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--attempts", nargs="+", choices=ATTEMPTS, default=list(ORDER))
    parser.add_argument("--gpu", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=540.0, help="after which no attempt is to end")
    given = parser.parse_args(arguments)
    if given.order == "table":
        print("\n".join(table(given.out)))
        return
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # it is compiled at the first start
    os.environ.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)  # an engine in the worker's process would not end
    end_s = time.monotonic() + given.seconds
    given.out.mkdir(parents=True, exist_ok=True)
    if not measure(given.out, given.attempts, run_on(given.gpu, given.out), end_s, gpu=given.gpu, model=MODEL):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
