"""Profiles and measures one model in each quantized format that vLLM runs without conversion, on vLLM and a GPU.

Run with vLLM's own Python on the GPU machine, from the repository's root::

    python -m tests.bench.format_runs OUT MODEL [FORMAT ...] [--at-once N] [--first-gpu I] [--seconds S]
        [--each S] [--most-prompt-tokens N]

MODEL is a folder with a config.json in 16 bits, or a recorded model's name: ``tests.bench.format_configs`` makes a
folder of each format from it, with random weights. Each format is a run of ``tests.bench.accuracy_measure`` in a
process of its own, N at once on a GPU each, which is ended after ``--each`` seconds, and all after ``--seconds``.
An 8B model is expected to take 205 s a format on an H200, by its runs in 16 bits, and 170 s with
``--most-prompt-tokens 32768``: two or three formats in ten minutes on one GPU, all seven on four.

Writes OUT/NAME-FORMAT-WEIGHTS-tp1-pp1.json.xz as soon as a format is measured, so that a run that is killed keeps
what it has, and OUT/NAME-FORMAT.txt with the lines in which vLLM says which kernels it took and what it kept. No
engine outlives this process. ``tests.bench.format_table`` prints what is predicted of it all.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from daemon.process_tree import become_subreaper, end_all_children, set_parent_death_signal
from daemon.procfs import processes
from fingerprint.config_json import read_config
from tests.bench.format_configs import FORMATS, formats_of, model_folder, write_format

MODULE = "tests.bench.accuracy_measure"
SECONDS, EACH_S = 570.0, 420.0
_POLL_S = 0.2
_SAID = re.compile(
    r"Using \w*(Kernel|backend)|Selected \w+|Model loading took|KV cache size|backend|fall", re.IGNORECASE
)
_MOST_LINES = 60


@dataclass
class Runs:
    """Formats of one model, each in a process of its own.

    Attributes:
        out, work: folders of what is kept, and of what is not.
        gpus: indexes; a format runs on each.
        more: further arguments of ``tests.bench.accuracy_measure``.
    """

    model: Path
    out: Path
    work: Path
    gpus: range
    each_s: float
    more: Sequence[str] = ()
    _running: dict[int, tuple[str, subprocess.Popen[bytes], float]] = field(default_factory=dict)  # by GPU

    def run(self, names: Sequence[str], seconds: float) -> None:
        """Run ``names`` in turn; what has not ended after ``seconds`` is ended."""
        waiting, end = list(names), time.monotonic() + seconds
        try:
            while (waiting or self._running) and time.monotonic() < end:
                free = [gpu for gpu in self.gpus if gpu not in self._running]
                for gpu in free[: len(waiting)]:
                    self._start(gpu, waiting.pop(0))
                time.sleep(_POLL_S)
                self._collect()
        finally:
            end_all_children()
            for name, _, _ in self._running.values():
                self._keep_log(name)
            self._running.clear()

    def _start(self, gpu: int, name: str) -> None:
        folder = write_format(self.model, name, self.work / "models")
        scratch = self.work / name
        scratch.mkdir()
        asked = f"{folder}:{FORMATS[name].weights}"
        arguments = [str(self.out), asked, "--first-gpu", str(gpu), "--scratch", str(scratch), *self.more]
        with (scratch / "said.txt").open("wb") as said:
            process = subprocess.Popen(
                [sys.executable, "-m", MODULE, *arguments],
                stdout=said,
                stderr=said,
                start_new_session=True,
                preexec_fn=partial(set_parent_death_signal, signal.SIGKILL),
            )
        print(f"{name} on GPU {gpu}", flush=True)
        self._running[gpu] = name, process, time.monotonic()

    def _collect(self) -> None:
        for gpu, (name, process, begun) in list(self._running.items()):
            status = process.poll()
            if status is None and time.monotonic() - begun < self.each_s:
                continue
            if status is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            del self._running[gpu]
            self._end_orphans()
            self._keep_log(name)
            ended = f"ended after {self.each_s:.0f} s" if status is None else f"exit status {status}"
            print(f"{name}: {ended}, {time.monotonic() - begun:.0f} s", flush=True)

    def _end_orphans(self) -> None:
        """Kill and reap what a format's process left behind: it is our child by now."""
        own = {process.pid for _, process, _ in self._running.values()}
        for stat in processes():
            if stat.parent_pid == os.getpid() and stat.pid not in own:
                with suppress(ProcessLookupError, ChildProcessError):
                    os.kill(stat.pid, signal.SIGKILL)
                    os.waitpid(stat.pid, 0)

    def _keep_log(self, name: str) -> None:
        scratch = self.work / name
        lines = (scratch / "said.txt").read_text(errors="replace").splitlines()[-_MOST_LINES:]
        for path in sorted(scratch.glob("*/log.txt")):
            said = path.read_text(errors="replace").splitlines()
            told = dict.fromkeys(line for line in said if _SAID.search(line))
            lines += [f"-- {path.parent.name}", *list(told)[:_MOST_LINES], "-- its end", *said[-20:]]
        (self.out / f"{self.model.name}-{name}.txt").write_text("\n".join(lines) + "\n")


def _file_of(model: Path, name: str) -> str:
    """Return the name under which ``tests.bench.accuracy_measure`` records it."""
    return f"{model.name}-{name}-{FORMATS[name].weights}-tp1-pp1.json.xz"


def _ended(signum: int, _frame: object) -> None:
    raise SystemExit(128 + signum)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("model", help="folder with a config.json in 16 bits, or a recorded model's name")
    parser.add_argument("formats", nargs="*", help=f"of {', '.join(FORMATS)}; all that the model runs in")
    parser.add_argument("--at-once", type=int, default=1, help="formats at once, each on a GPU of its own")
    parser.add_argument("--first-gpu", type=int, default=0, help="the GPUs from this index on")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="end what still runs after so many")
    parser.add_argument("--each", type=float, default=EACH_S, help="end a format after so many seconds")
    parser.add_argument("--most-prompt-tokens", type=int, help="of a point's whole batch")
    options = parser.parse_args(argv)
    more = [] if options.most_prompt_tokens is None else ["--most-prompt-tokens", str(options.most_prompt_tokens)]
    with tempfile.TemporaryDirectory() as work:
        model = model_folder(options.model, Path(work) / "model")
        known = formats_of(read_config(model))
        names = options.formats or known
        if unknown := [name for name in names if name not in known]:
            parser.error(f"{model.name} does not run in {unknown[0]}; it runs in {', '.join(known)}")
        options.out.mkdir(parents=True, exist_ok=True)
        out = options.out.resolve()
        become_subreaper()
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, _ended)
        try:
            gpus = range(options.first_gpu, options.first_gpu + options.at_once)
            Runs(model, out, Path(work), gpus, options.each, more).run(names, options.seconds)
        finally:
            kept = [name for name in names if (out / _file_of(model, name)).exists()]
            lacking = [name for name in names if name not in kept]
            print(
                f"measured: {', '.join(kept) or 'none'}; not measured: {', '.join(lacking) or 'none'}", flush=True
            )


if __name__ == "__main__":
    main()
