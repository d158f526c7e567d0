"""Fidelity of the simulator to vLLM on one GPU, for a model whose profile is kept as a record.

    python -m tests.bench.fidelity_vllm OUT --record RECORD.json.xz --model PUBLIC_NAME --python VLLM_PYTHON
        --trace TRACE [--gpu I] [--prefix-cache] [--repeats 3] [--seconds 350]
    python -m tests.bench.fidelity_vllm table OUT

RECORD is one of ``tests.bench.accuracy_measure``, made on another day and machine of the same kind; PUBLIC_NAME
names its config in ``tests/fingerprint/recorded/public_models.json``. Starts ``vllm serve`` with random weights as
a daemon would, and warmed as by one, a mixture's tokens drawn uniformly for its experts as in its profile; tells
its capacity; and plays the trace at shares of that, each load several times. A replay of the same load has the
same lengths and times and other tokens. With ``--prefix-cache`` the cache is on, and prompts begin alike as the
trace says or, where it has no prefixes, for the share of ``--shared-prefix``.

Each replay is a file as soon as it has ended (``fidelity_served``). The same command plays only what is missing.
When the next replay would end after ``--seconds`` it is left out, and said to be: repeats of the highest load
first. Every load is played once in any case. ``table`` judges by the goals (``fidelity_table``).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np

from daemon.engines.vllm.launch import warm_up_bursts
from daemon.worker_spec import WorkerLimits
from fingerprint.codec import to_json
from fingerprint.config import DeploymentConfig, Workload
from fingerprint.measurements import Profile
from iserve.planning.estimator_factory import step_tokens_of
from iserve.simulation.running import launch_limits
from iserve.verify.bursts import BurstClient
from tests.bench.engine_contest import PlacedReplica
from tests.bench.engine_contest_run import Worker, _nvidia, _version, _wait_for, write_models
from tests.bench.family_configs import config_of
from tests.bench.fidelity import (
    PROFILE,
    Target,
    machine,
    read_profile,
    replayed,
    served_by,
    streamed_burst_s,
)
from tests.bench.fidelity_compare import (
    PERCENTS,
    Comparison,
    Sent,
    Served,
    compare,
    paced,
    saturated_rate,
    simulated_requests,
)
from tests.bench.fidelity_prefixes import cached_share, share_of_counters, with_shared_prefixes
from tests.bench.fidelity_served import Asked, Launch, Played, Turn, keep, order, played_path, read_launch
from tests.bench.fidelity_steps import lone_request
from tests.bench.fidelity_table import table
from traces.outcomes import Failure, Outcomes
from traces.request import Request
from traces.trace_argument import requests_of
from traces.transforms import cap_lengths

__all__ = ["Bench", "main", "parser"]

_SHARE = 0.9  # of the GPU's memory, to the server
_PER_SLOT = 4  # requests of the burst that tells the capacity
_STRETCH = 16  # of every so many requests one is in it: neighbors are alike
_BURST_SEED = 900_000  # replays have smaller ones
_TIMEOUT_S = 300.0
Tell = Callable[[str], None]


class Bench:
    """Measurement of one server, from its launch to its last replay."""

    def __init__(self, options: argparse.Namespace, profile: Profile, tell: Tell) -> None:
        self._begun_s = time.monotonic()
        self._options, self._profile, self._tell = options, profile, tell
        self._name = options.model.rpartition("/")[2]
        self._workload = Workload(options.batch, options.input_tokens, options.output_tokens)
        self._limits = launch_limits(self._workload, "vllm", step_tokens_of(profile))
        self._config = DeploymentConfig(engine="vllm")
        self._asked = Asked(
            model=self._name,
            profile=f"{profile.model} on {profile.engine}, {profile.created_at}",
            workload=self._workload,
            trace=Path(options.trace).name,
            prefix_cache=options.prefix_cache,
            shared_prefix=options.shared_prefix if options.prefix_cache else 0.0,
            window_s=60 * options.minutes,
            capacity_by=options.capacity if options.capacity in ("burst", "simulator") else "given",
        )
        self._took_s: dict[float, float] = {}  # the longest replay so far, by load

    def run(self) -> None:
        """Play what is missing, as far as there is time."""
        out, turns = self._options.out, order(self._options.loads, self._options.repeats)
        launch = read_launch(out, self._asked)
        missing = [turn for turn in turns if not played_path(out, self._asked, turn).exists()]
        if not missing:
            self._tell(f"all {len(turns)} replays are in {out}")
            return
        with ExitStack() as stack:
            worker = self._started(stack)
            launch = launch or self._launched(worker)
            target = replace(launch.target, url=_url(worker))
            served = self._served(launch)
            for number, turn in enumerate(missing):
                if turn.repeat > 1 and not self._has_time(turn):
                    self._tell(f"left out, as {self._options.seconds:g} s are over: {_named(missing[number:])}")
                    break
                keep(out, launch, self._played(worker, target, served, launch, turn))

    def _started(self, stack: ExitStack) -> Worker:
        """Start the server, and warm it as a daemon does."""
        options, name = self._options, self._name
        gpus = _nvidia("memory.total")
        total = int(gpus[options.gpu]) * 2**20 if gpus else self._profile.machine.device.memory_bytes
        text = to_json(config_of(options.model)).decode()
        folder = options.work.resolve() / name
        if not (folder / "tokenizer_config.json").exists() or (folder / "config.json").read_text() != text:
            write_models([(name, text)], options.work.resolve())
        replica = PlacedReplica(
            deployment=name,
            config=self._config,
            devices=(options.gpu,),
            bytes_per_gpu=int(_SHARE * total),
            limits=self._limits,
        )
        os.environ["VLLM_MOE_ROUTING_SIMULATION_STRATEGY"] = "uniform_random"  # read by mixtures alone
        worker = Worker(
            options.gpu, replica, total, options.work.resolve(), options.python, prefix_cache=options.prefix_cache
        )
        stack.callback(worker.end)
        _wait_for([worker])
        self._warm(worker)
        self._tell(f"started and warm after {self._elapsed_s():.0f} s")
        return worker

    def _warm(self, worker: Worker) -> None:
        limits = self._limits
        client = BurstClient(
            _url(worker), self._name, self._profile.spec.vocab_size, timeout_s=_TIMEOUT_S, seed=_BURST_SEED
        )
        held = WorkerLimits(
            max_batch=limits.max_batch,
            max_batched_tokens=limits.max_batched_tokens,
            max_context_tokens=limits.max_context_tokens,
            kv_tokens=limits.kv_tokens or limits.max_batch * limits.max_context_tokens,
            memory_bytes_per_device=1,
        )
        for burst in warm_up_bursts(held):
            client.burst(Workload(burst.requests, burst.input_tokens, burst.output_tokens))

    def _launched(self, worker: Worker) -> Launch:
        """Measure what the simulator is given of the server, and its capacity; kept before the first replay."""
        target = Target(
            url=_url(worker), model=self._name, config=self._config, workload=self._workload, limits=self._limits
        )
        lone = lone_request(partial(streamed_burst_s, target))
        served = served_by(target, self._profile, None, lone)
        launch = Launch(
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            machine=", ".join([*_nvidia("name")[self._options.gpu :][:1], machine()]),
            versions=", ".join([f"vllm {_version(self._options.python)}", *_nvidia("driver_version")[:1]]),
            asked=self._asked,
            target=target,
            lone=lone,
            overhead_s=served.overhead_s,
            capacity_requests_per_s=0.0,
            simulated_capacity_requests_per_s=0.0,
        )
        launch = self._with_capacity(launch, target)
        keep(self._options.out, launch)
        return launch

    def _with_capacity(self, launch: Launch, target: Target) -> Launch:
        slots, given = self._limits.max_batch, self._options.capacity
        asked = [replace(one, arrival_s=0.0) for one in self._requests(_STRETCH * _PER_SLOT * slots)[::_STRETCH]]
        simulated = saturated_rate(simulated_requests(asked, self._served(launch)), slots)
        if given == "burst":
            capacity = saturated_rate(replayed(target, asked, seed=_BURST_SEED), slots)
        else:
            capacity = simulated if given == "simulator" else float(given)
        self._tell(
            f"a lone token takes {launch.lone.ttft_s * 1e3:.1f} ms; capacity {capacity:.3g} requests/s "
            f"({self._asked.capacity_by}), simulated {simulated:.3g}; {self._elapsed_s():.0f} s so far"
        )
        return replace(launch, capacity_requests_per_s=capacity, simulated_capacity_requests_per_s=simulated)

    def _served(self, launch: Launch) -> Served:
        served = served_by(launch.target, self._profile, None, launch.lone)
        return replace(served, prefix_cache=self._asked.prefix_cache)

    def _requests(self, count: int) -> list[Request]:
        """Return the first of the trace, cut to the server's context, with shared prefixes if they are asked."""
        trace = cap_lengths(requests_of(self._options.trace), context_tokens=self._limits.max_context_tokens)
        found = list(islice(trace, count))
        if not self._asked.prefix_cache:
            return [replace(one, prefix_blocks=()) for one in found]
        return with_shared_prefixes(found, self._asked.shared_prefix)

    def _has_time(self, turn: Turn) -> bool:
        took_s = self._took_s.get(turn.load, max(self._took_s.values(), default=self._asked.window_s))
        limit_s: float = self._options.seconds
        return self._elapsed_s() + took_s <= limit_s

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._begun_s

    def _played(self, worker: Worker, target: Target, served: Served, launch: Launch, turn: Turn) -> Played:
        """Play one load once, and simulate it."""
        rate = launch.capacity_requests_per_s * turn.load
        asked = paced(self._requests(max(2, round(rate * self._asked.window_s))), rate)
        self._tell(f"plays {len(asked)} requests: load {turn.load:g}, repeat {turn.repeat}")
        begun_s, before = time.monotonic(), _metrics(worker)
        seed = 1000 * round(100 * turn.load) + turn.repeat
        real = replayed(target, asked, seed=seed)
        took_s = time.monotonic() - begun_s
        self._check(worker, real, turn)
        sent = Sent.of(real, asked)
        found = compare(real, {PROFILE: simulated_requests(sent.requests(), served)})
        self._took_s[turn.load] = max(took_s, self._took_s.get(turn.load, 0.0))
        self._tell("\n".join(_told(turn, found)))
        tokens = int(np.maximum(real.output_tokens - 1, 0).sum())
        gaps = len(real.gaps_s)
        return Played(
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            turn=turn,
            seconds=took_s,
            failures=_failures(real),
            found=found,
            requests=sent,
            cached_share=share_of_counters(before, _metrics(worker)),
            simulated_cached_share=cached_share(sent) if self._asked.prefix_cache else 0.0,
            tokens_in_one_piece=max(0.0, 1 - gaps / tokens) if tokens else 0.0,
        )

    def _check(self, worker: Worker, real: Outcomes, turn: Turn) -> None:
        """End where the server has, so that no replay is kept that it did not live through."""
        if worker.answers() and real.completed.any():
            return
        raise SystemExit(
            f"{self._name} ended in the replay of load {turn.load:g}, repeat {turn.repeat} "
            f"({dict(_failures(real))} of {len(real)} requests failed), which is not kept; the ones before are, "
            f"and the same command goes on after them. Its last words, in {worker.log}:\n"
            f"{worker.log.read_text(errors='replace')[-3000:]}"
        )


def _told(turn: Turn, found: Comparison) -> Iterator[str]:
    yield (
        f"load {turn.load:g}, repeat {turn.repeat}: {found.completed} of {found.requests} completed, "
        f"{found.mean_running:.1f} at once, sender late {found.lateness_p99_s * 1e3:.1f} ms at P99"
    )
    for metric in found.predictions[0].metrics:
        columns = zip(PERCENTS, metric.real_s, metric.errors, strict=True)
        yield f"  {metric.name:<5}" + "".join(f" P{p} {s * 1e3:8.1f} ms {error:+.0%}" for p, s, error in columns)


def _failures(real: Outcomes) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(Counter(Failure(int(code)).words for code in real.failure if code).items()))


def _named(turns: Sequence[Turn]) -> str:
    return ", ".join(f"load {turn.load:g} repeat {turn.repeat}" for turn in turns)


def _url(worker: Worker) -> str:
    return f"http://127.0.0.1:{worker.port}"


def _metrics(worker: Worker) -> str:
    with suppress(OSError):
        text: bytes = urllib.request.urlopen(f"{_url(worker)}/metrics", timeout=5).read()
        return text.decode()
    return ""


def _capacity(text: str) -> str:
    if text not in ("burst", "simulator") and not 0 < float(text) < float("inf"):
        raise argparse.ArgumentTypeError(f"burst, simulator or requests/s, got {text}")
    return text


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("out", type=Path)
    found.add_argument("--record", type=Path, required=True)
    found.add_argument("--model", required=True)
    found.add_argument("--python", required=True, help="vLLM's")
    found.add_argument("--trace", required=True)
    found.add_argument("--gpu", type=int, default=0)
    found.add_argument("--loads", type=float, nargs="+", default=[0.4, 0.7, 0.9], help="shares of the capacity")
    found.add_argument("--capacity", type=_capacity, default="burst", help="burst, simulator, or requests/s")
    found.add_argument("--repeats", type=int, default=3, help="replays of each load")
    found.add_argument("--minutes", type=float, default=0.5, help="of each replay's arrivals")
    found.add_argument("--seconds", type=float, default=350.0, help="of all, the server's start included")
    found.add_argument("--prefix-cache", action="store_true", help="on, and prompts that begin alike")
    found.add_argument("--shared-prefix", type=float, default=0.5, help="of the tokens, where the trace has none")
    found.add_argument("--batch", type=int, default=64, help="slots of the server")
    found.add_argument("--input-tokens", type=int, default=3072)
    found.add_argument("--output-tokens", type=int, default=1024, help="with the input: its context")
    found.add_argument("--work", type=Path, default=Path("/tmp/fidelity"))
    return found


def main(arguments: Sequence[str]) -> None:
    """Measure one model, or print the table of a folder."""
    if arguments[:1] == ["table"]:
        for out in arguments[1:]:
            print(table(Path(out)))
        return
    options = parser().parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    Bench(options, read_profile(options.record), lambda line: print(line, flush=True)).run()


if __name__ == "__main__":
    main(sys.argv[1:])
