"""Profiles fingerprints of many families on vLLM and a GPU, and records what vLLM keeps of each layer.

Run with vLLM's own Python on the GPU machine, from the repository's root::

    python -m tests.bench.family_runs OUT CONFIGS [--at-once N] [--seconds S] [--gib G]

CONFIGS holds a folder with a config.json for each family (``tests.bench.family_configs``); weights are random.
Families run in the order of their names in ``CONFIGS/order.txt``, N at a time on one GPU, each within G GiB. What
is free of the GPU is then what a process itself has not taken (a plug-in for vLLM sees to it), so memory outside
torch's allocator is not measured, and times are those of a GPU that is shared: they show that a profile leads to
an estimate, not how good it is.

Writes OUT/families.json.xz, a :class:`FamilyRun` each, and OUT/logs.tar.xz.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from fingerprint.codec import to_json
from fingerprint.config import Workload
from fingerprint.depth_tied_cuts import tied_depths, why_no_cuts
from fingerprint.depth_tied_plan import depth_tied_plan
from fingerprint.depth_tied_profile import depth_tied_profile
from fingerprint.errors import IserveError
from fingerprint.families import load_spec
from fingerprint.measurements import Profile
from fingerprint.truncate import generate_shape
from tests.bench.kept import write_kept

WORKLOAD = Workload(batch=16, input_tokens=512, output_tokens=128)
MAX_BATCH = 32
BUDGET_S = 20.0
PLUGIN = """
import torch

OUTSIDE_BYTES = 700 * 2**20  # CUDA context and libraries, assumed


def register():
    real = torch.accelerator.get_memory_info

    def own(device=None):
        total = real(device)[1]
        return total - torch.cuda.memory_reserved() - OUTSIDE_BYTES, total

    torch.accelerator.get_memory_info = own
    torch.cuda.mem_get_info = own
"""


@dataclass(frozen=True, kw_only=True)
class FamilyRun:
    """Run of one family: its profile, or one line why there is none."""

    name: str
    config: str  # text of config.json; JSON of Python, Infinity among it
    seconds: float
    cache_lines: tuple[str, ...] = ()  # of vLLM's log, on the KV cache
    profile: Profile | None = None
    why_not: str | None = None


def run_one(name: str, configs: Path, out: Path, gib: float, port: int) -> None:
    """Profile one family and write OUT/NAME.json."""
    from tests.bench.accuracy_measure import _Bench, machine_here

    begun, folder = time.monotonic(), configs / name
    scratch = out / f"{name}-scratch"
    scratch.mkdir()
    profile, why_not = None, None
    try:
        spec = load_spec(folder)
        if not tied_depths(spec, 1):
            raise IserveError(why_no_cuts(spec, 1))
        bench = _Bench(
            out=out,
            tp=1,
            pp=1,
            machine=machine_here(1),
            budget_bytes=int(gib * 2**30),
            scratch=scratch,
            port=port,
        )

        def shape(layers: int) -> Path:
            target = scratch / f"{layers}-layers"
            if not target.exists():
                generate_shape(folder, target, layers)
            return target

        plan = depth_tied_plan(spec, WORKLOAD, max_batch=MAX_BATCH, budget_s=BUDGET_S)
        with bench.target(folder, spec) as target:
            profile = depth_tied_profile(name, spec, target, shape, plan)
    except IserveError as error:
        why_not = f"{type(error).__name__}: {error}"
    logs = b"".join(path.read_bytes() for path in sorted(scratch.glob("*/log.txt")))
    lines = logs.decode(errors="replace").splitlines()
    said = [line for line in lines if "KV cache" in line or "block size" in line or "attention backend" in line]
    run = FamilyRun(
        name=name,
        config=(folder / "config.json").read_text(),
        seconds=round(time.monotonic() - begun, 1),
        cache_lines=tuple(said[:40]),
        profile=profile,
        why_not=why_not,
    )
    (out / f"{name}.json").write_bytes(to_json(run))


def run_all(
    names: list[str], configs: Path, out: Path, work: Path, at_once: int, seconds: float, gib: float
) -> None:
    """Run each family in a process of its own and pack what they wrote by then."""
    plugin = work / "plugin"
    (plugin / "shared_gpu-1.0.dist-info").mkdir(parents=True)
    (plugin / "shared_gpu.py").write_text(PLUGIN)
    metadata = "Metadata-Version: 2.1\nName: shared-gpu\nVersion: 1.0\n"
    (plugin / "shared_gpu-1.0.dist-info/METADATA").write_text(metadata)
    entry = "[vllm.general_plugins]\nshared_gpu = shared_gpu:register\n"
    (plugin / "shared_gpu-1.0.dist-info/entry_points.txt").write_text(entry)
    if at_once > 1:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(plugin), os.environ.get("PYTHONPATH", "")])
    end, running, waiting = time.monotonic() + seconds, {}, list(enumerate(names))
    while (waiting or running) and time.monotonic() < end:
        for name in [name for name, process in running.items() if process.poll() is not None]:
            print(f"{name}: {running.pop(name).returncode}", flush=True)
        while waiting and len(running) < at_once:
            number, name = waiting.pop(0)
            arguments = [str(work), str(configs), "--one", name, "--gib", str(gib)]
            arguments += ["--port", str(19_000 + 20 * number)]
            running[name] = subprocess.Popen([sys.executable, "-m", "tests.bench.family_runs", *arguments])
        time.sleep(0.5)
    for process in running.values():
        process.send_signal(signal.SIGINT)  # so that it ends its worker
    for process in running.values():
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:  # what is recorded is written all the same
            process.kill()
    texts = [path.read_text() for path in sorted(work.glob("*.json"))]
    write_kept(out / "families.json.xz", "[" + ",\n".join(texts) + "]")
    with tarfile.open(out / "logs.tar.xz", "w:xz") as tar:
        for path in sorted(work.rglob("log*.txt")):
            tar.add(path, "-".join(path.relative_to(work).parts))
    print(f"{len(texts)} of {len(names)}; not done: {[*running, *(name for _, name in waiting)]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("configs", type=Path)
    parser.add_argument("--one")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--port", type=int, default=19_000)
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3000.0)
    parser.add_argument("--gib", type=float, default=60.0)
    given = parser.parse_args()
    if given.one:
        run_one(given.one, given.configs, given.out, given.gib, given.port)
        return
    names = given.only or (given.configs / "order.txt").read_text().split()
    with tempfile.TemporaryDirectory() as work:
        run_all(names, given.configs, given.out, Path(work), given.at_once, given.seconds, given.gib)


if __name__ == "__main__":
    main()
