"""Contest of plans on vLLM and in the simulator: the same requests, one plan after the other.

    python -m tests.bench.engine_contest_run decide tests/bench/worlds/four-on-two.yaml --rates 7.5 14 \
        --set requests.trace=TRACE --json plans.json.gz
    python -m tests.bench.engine_contest_run play plans.json.gz CONTESTANT OUT --python VLLM_PYTHON
    python -m tests.bench.engine_contest_run turns plans.json.gz OUT --python VLLM_PYTHON
    python -m tests.bench.engine_contest_run table plans.json.gz OUT/*.json.gz

``decide`` needs no GPU: it asks the contestants of ``iserve evaluate`` for one plan each, for the highest rate,
and simulates that plan at every rate. ``play`` starts one vLLM worker for each replica as the product would
(random weights, word-level tokenizers made here), sends each rate's requests in an open loop, and writes the
times of the answers. A replica takes the requests of its deployment; with several they take turns. ``turns`` plays
all contestants on one machine, their workers started together: the rest idles while one answers, so that memory
must do for all. It imports no web framework.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from daemon.devices import Device
from daemon.engines.vllm import launch
from daemon.engines.vllm.variant_plug_in import PLUG_IN_PATH
from daemon.worker_spec import StageAssignment, WorkerLimits, WorkerSpec
from fingerprint.codec import from_json, to_json
from fingerprint.engines import largest_graph
from fingerprint.families import load_spec
from iserve.replay.endpoint import resolve_endpoint
from iserve.replay.prompts import PromptOptions
from iserve.replay.runner import Replay, ReplayOptions
from iserve.replay.schedule import Schedule
from tests.bench.engine_contest import Answered, Contest, Load, PlacedReplica, Plan, Played, table
from tests.bench.kept import read_kept, write_kept
from traces.outcomes import Failure, Floats, Integers, Outcomes

if TYPE_CHECKING:
    from iserve.evaluation.arena import Arena
    from iserve.evaluation.situation import Replica

START_S, FIRST_PORT = 300.0, 18_200
WARM_REQUESTS, WARM_TOKENS = 12, (2000, 40)
TIMEOUT_S = 150.0  # of a request
# Of the models and the workers' logs; one place, for vLLM's compiled code is kept by it.
FOLDER = Path(tempfile.gettempdir()) / "engine-contest"
CONTESTANTS = (  # name here, contestant of iserve evaluate, intent, what it knows
    ("rule", "rule-min-tp-full", "min-latency", "none"),
    ("ours", "ours", "min-latency", "none"),
    ("ours, least cost", "ours", "min-cost", "none"),
    ("ours, rates given", "ours", "min-latency", "rates"),
    ("most TP", "max-tp", "min-latency", "none"),
)


def decide(world_file: Path, rates: Sequence[float], changes: Sequence[str]) -> Contest:
    """Ask every contestant for its plan at the highest rate, and simulate it at all."""
    from iserve.evaluation.arena import make_arena
    from iserve.evaluation.contestants import make_contestant
    from iserve.evaluation.play import Placed, play
    from iserve.evaluation.world_file import read_world
    from planner.intent import IntentKind

    def arena(rate: float, knows: str = "none") -> Arena:
        world = read_world(world_file, (*changes, f"requests.rate_per_s={rate:g}", f"information={knows}"))
        return make_arena(world, world.seeds[0], world_file.parent)

    arenas = [arena(rate) for rate in sorted(rates)]
    world = arenas[0].world
    names = list(world.names)
    plans, simulated = [], {}
    for name, contestant, intent, knows in CONTESTANTS:
        asked = arena(max(rates), knows)
        replicas = play(asked, make_contestant(contestant, asked), IntentKind(intent)).replicas
        plans.append(Plan(contestant=name, intent=intent, knows=knows, replicas=tuple(map(_placed, replicas))))
        simulated[name] = tuple(
            _columns(
                rate,
                play(of, Placed(name, replicas), IntentKind(intent)).result.outcomes,
                of.requests[0].arrival_s,
            )
            for rate, of in zip(sorted(rates), arenas, strict=True)
        )
    return Contest(
        world=world.name,
        changes=tuple(change for change in changes if not change.startswith("requests.trace=")),
        slo_multiple=world.slo_multiple,
        total_bytes=arenas[0].cluster.gpus[0].total_bytes,
        models=tuple((model.name, json.dumps(model.config)) for model in world.models),
        loads=tuple(
            Load(
                rate_per_s=rate,
                model=tuple(names.index(one.model) for one in of.requests),
                at_s=tuple(round(one.arrival_s - of.requests[0].arrival_s, 4) for one in of.requests),
                input_tokens=tuple(one.input_tokens for one in of.requests),
                output_tokens=tuple(one.output_tokens for one in of.requests),
                alone_s=tuple(round(float(value), 4) for value in of.all_alone_s),
            )
            for rate, of in zip(sorted(rates), arenas, strict=True)
        ),
        plans=tuple(plans),
        simulated=simulated,
    )


def _placed(replica: Replica) -> PlacedReplica:
    (stage,) = replica.placement.stages
    return PlacedReplica(
        deployment=replica.deployment,
        config=replica.config,
        devices=tuple(int(device.rpartition(":")[2]) for device in stage.device_ids),
        bytes_per_gpu=stage.bytes_per_gpu,
        limits=replica.limits,
    )


def _columns(rate: float, outcomes: Outcomes, begin_s: float = 0.0) -> Answered:
    """Return the outcomes with ``begin_s`` as time 0."""

    def kept(times_s: Floats) -> tuple[float, ...]:
        return tuple(round(float(v), 4) for v in np.nan_to_num(times_s - begin_s, nan=-1.0))

    lost = Counter(Failure(int(code)).name.lower() for code in outcomes.failure if code)
    done = outcomes.completed
    return Answered(
        rate_per_s=rate,
        sent_s=kept(outcomes.sent_s),
        first_s=kept(np.where(done, outcomes.first_token_s, np.nan)),
        last_s=kept(np.where(done, outcomes.last_token_s, np.nan)),
        output_tokens=tuple(int(v) for v in outcomes.output_tokens),
        failures=tuple(sorted(lost.items())),
        late_s=round(float(np.nanmax(outcomes.sent_s - outcomes.scheduled_s, initial=0.0)), 4),
    )


def write_models(models: Iterable[tuple[str, str]], folder: Path) -> None:
    """Write a folder for each model (name, text of config.json) with a tokenizer that has a word for every id."""
    for name, text in models:
        target, config = folder / name, json.loads(text)
        target.mkdir(parents=True, exist_ok=True)
        (target / "config.json").write_text(text)
        words = {f"w{number}": number for number in range(config["vocab_size"])}
        model = {"type": "WordLevel", "vocab": words, "unk_token": "w0"}
        parts = ("truncation", "padding", "normalizer", "post_processor", "decoder")
        tokenizer = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": model}
        (target / "tokenizer.json").write_text(json.dumps(tokenizer | dict.fromkeys(parts)))
        named = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0", "eos_token": "w1"}
        (target / "tokenizer_config.json").write_text(json.dumps(named))


class Worker:
    """vLLM server of one replica, ended with all its processes."""

    def __init__(
        self,
        number: int,
        replica: PlacedReplica,
        total_bytes: int,
        models: Path,
        python: str,
        more: Sequence[str] = (),
        *,
        prefix_cache: bool = False,
        plug_in: bool = False,
    ) -> None:
        self.deployment, self.port = replica.deployment, FIRST_PORT + number
        self.log = models / f"worker-{number}.log"
        devices = {
            str(index): Device(device_id=str(index), index=index, kind="cuda", name="", total_bytes=total_bytes)
            for index in replica.devices
        }
        limits, checkpoint = replica.limits, models / replica.deployment
        layers = json.loads((checkpoint / "config.json").read_text())["num_hidden_layers"]
        spec = WorkerSpec(
            worker_id=f"w-{number}",
            served_model=replica.deployment,
            checkpoint=str(checkpoint),
            config=replica.config,
            stages=(StageAssignment(device_ids=tuple(devices), num_layers=layers),),
            limits=WorkerLimits(
                max_batch=limits.max_batch,
                max_batched_tokens=limits.max_batched_tokens,
                max_context_tokens=limits.max_context_tokens,
                kv_tokens=limits.kv_tokens or limits.max_batch * limits.max_context_tokens,
                memory_bytes_per_device=replica.bytes_per_gpu,
                graph_tokens=largest_graph("vllm", is_mixture=load_spec(checkpoint).is_mixture),
            ),
            port=self.port,
            dummy_weights=True,
        )
        words = launch.arguments(spec, launch.read_model(spec), devices)
        env = (
            os.environ | dict(launch.environment(spec, devices)) | {"PYTHONPATH": PLUG_IN_PATH if plug_in else ""}
        )
        caching = "--enable-prefix-caching" if prefix_cache else "--no-enable-prefix-caching"
        self.begun = time.monotonic()
        self.ready_s: float | None = None
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [python, "-m", "vllm.entrypoints.cli.main", *words, caching, *more],
                env=env,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def is_ready(self) -> bool:
        if self.ready_s is None:
            if self._process.poll() is not None:
                raise SystemExit(f"{self.deployment} ended:\n{self.log.read_text(errors='replace')[-3000:]}")
            if self.answers():
                self.ready_s = time.monotonic() - self.begun
        return self.ready_s is not None

    def answers(self) -> bool:
        """Return whether the server says that it is well."""
        with suppress(OSError, HTTPException):
            urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2)
            return True
        return False

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def play(contest: Contest, names: Sequence[str], models: Path, python: str) -> list[Played]:
    """Run the plans of the contestants, all started first, one after the other at every rate."""
    write_models(contest.models, models)
    with ExitStack() as stack:
        numbers, started = itertools.count(), dict[str, list[Worker]]()
        for name in names:
            started[name] = []
            for replica in contest.plan(name).replicas:
                worker = Worker(next(numbers), replica, contest.total_bytes, models, python)
                stack.callback(worker.end)
                started[name].append(worker)
        _wait_for([worker for workers in started.values() for worker in workers])
        for workers in started.values():
            asyncio.run(_run(workers, [_warm_up(worker) for worker in workers]))
        answered: dict[str, list[Answered]] = {name: [] for name in names}
        for load in contest.loads:
            for name, workers in started.items():
                parts = _parts(contest, workers, load)
                outcomes = asyncio.run(_run(workers, [part for part, _ in parts]))
                answered[name].append(_joined(load, outcomes, [rows for _, rows in parts]))
                print(f"{name}, {load.rate_per_s:g}/s: {_summary(load, answered[name][-1])}", flush=True)
        used = _nvidia("memory.used")
    return [
        Played(
            contestant=name,
            date=time.strftime("%Y-%m-%d"),
            machine=", ".join(_nvidia("name")),
            versions=f"vllm {_version(python)}, driver {_nvidia('driver_version')[0]}" if used else "",
            start_s=tuple(round(worker.ready_s or 0.0, 1) for worker in workers),
            gpu_used_mib=tuple(int(value) for value in used),
            answered=tuple(answered[name]),
        )
        for name, workers in started.items()
    ]


def _wait_for(workers: Sequence[Worker]) -> None:
    limit = time.monotonic() + START_S
    while [worker for worker in workers if not worker.is_ready()]:  # each is asked
        if time.monotonic() > limit:
            raise SystemExit(f"not ready within {START_S:g} s:\n{workers[0].log.read_text()[-3000:]}")
        time.sleep(0.5)
    print("ready", [round(worker.ready_s or 0, 1) for worker in workers], flush=True)


async def _run(workers: Sequence[Worker], schedules: Sequence[Schedule | None]) -> list[Outcomes | None]:
    """Send each worker's schedule, all at once."""
    options = ReplayOptions(
        timeout_s=TIMEOUT_S, max_in_flight=4000, prompts=PromptOptions(vocabulary=2000, seed=1)
    )

    async def one(worker: Worker, schedule: Schedule | None) -> Outcomes | None:
        if schedule is None:
            return None
        replay = Replay(schedule, resolve_endpoint(f"http://127.0.0.1:{worker.port}"), options)
        found = await replay.run()
        for failure, said in replay.examples.items():
            print(worker.deployment, failure.name, said[:300], flush=True)
        return found

    return list(await asyncio.gather(*(one(*pair) for pair in zip(workers, schedules, strict=True))))


def _warm_up(worker: Worker) -> Schedule:
    inputs, outputs = WARM_TOKENS
    return _schedule(
        worker.deployment, np.arange(WARM_REQUESTS) * 0.1, [inputs] * WARM_REQUESTS, [outputs] * WARM_REQUESTS
    )


def _schedule(name: str, at_s: Iterable[float], inputs: Iterable[int], outputs: Iterable[int]) -> Schedule:
    times = np.asarray(list(at_s), np.float64)
    return Schedule(
        deployments=(name,),
        deployment=np.zeros(len(times), np.int32),
        arrival_s=times,
        scheduled_s=times,
        input_tokens=np.asarray(list(inputs), np.int64),
        output_tokens=np.asarray(list(outputs), np.int64),
        prefix_blocks=(),
    )


def _parts(contest: Contest, workers: Sequence[Worker], load: Load) -> list[tuple[Schedule | None, Integers]]:
    """Return each worker's schedule, and which rows of the load it has."""
    names = [name for name, _ in contest.models]
    model = np.array(load.model)
    found: list[tuple[Schedule | None, Integers]] = []
    for worker in workers:
        own = [one for one in workers if one.deployment == worker.deployment]
        rows = np.flatnonzero(model == names.index(worker.deployment))[own.index(worker) :: len(own)]
        columns = (np.array(column)[rows] for column in (load.at_s, load.input_tokens, load.output_tokens))
        found.append((_schedule(worker.deployment, *columns) if len(rows) else None, rows))
    return found


def _joined(load: Load, outcomes: Sequence[Outcomes | None], rows: Sequence[Integers]) -> Answered:
    """Return one table of what the workers answered, in the order of the load."""
    columns = {name: np.full(len(load.at_s), -1.0) for name in ("sent_s", "first_s", "last_s", "output_tokens")}
    failures: dict[str, int] = {}
    late_s = 0.0
    for found, own in zip(outcomes, rows, strict=True):
        if found is None:
            continue
        part = _columns(load.rate_per_s, found)
        for name, column in columns.items():
            column[own] = getattr(part, name)
        for failure, count in part.failures:
            failures[failure] = failures.get(failure, 0) + count
        late_s = max(late_s, part.late_s)
    return Answered(
        rate_per_s=load.rate_per_s,
        failures=tuple(sorted(failures.items())),
        late_s=late_s,
        output_tokens=tuple(int(value) for value in columns.pop("output_tokens")),
        **{name: tuple(column.tolist()) for name, column in columns.items()},
    )


def _summary(load: Load, found: Answered) -> str:
    last = np.array(found.last_s)
    e2e = np.sort((last - np.array(load.at_s))[last >= 0])
    return (
        f"{len(e2e)} of {len(last)} answered, P50 {e2e[len(e2e) // 2]:.2f} s, "
        f"P95 {e2e[int(0.95 * len(e2e))]:.2f} s, late {found.late_s:.3f} s, {dict(found.failures)}"
    )


def _nvidia(field: str) -> list[str]:
    with suppress(OSError):
        command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
        return subprocess.run(command, capture_output=True, text=True).stdout.split("\n")[:-1]
    return []


def _version(python: str) -> str:
    command = [python, "-c", "from importlib.metadata import version; print(version('vllm'))"]
    return subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": ""}
    ).stdout.strip()


def measuring_options(
    description: str | None, reference: str, measures: Sequence[str] = ("measure",)
) -> argparse.Namespace:
    """Return the options of a bench that measures a model on one GPU, and prints what it kept as a table.

    Args:
        reference: what the table is printed next to, a file that may be left out.
        measures: names of the orders that measure.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    orders = parser.add_subparsers(dest="order", required=True)
    for name in measures:
        one = orders.add_parser(name)
        one.add_argument("config", type=Path)
        one.add_argument("out", type=Path)
        one.add_argument("--python", default=sys.executable)
        one.add_argument("--gpu", type=int, default=0, help="index of the GPU")
    one = orders.add_parser("table")
    one.add_argument("kept", type=Path)
    one.add_argument(reference, type=Path, nargs="?")
    return parser.parse_args()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    orders = parser.add_subparsers(dest="order", required=True)
    one = orders.add_parser("decide")
    one.add_argument("world", type=Path)
    one.add_argument("--rates", type=float, nargs="+", required=True)
    one.add_argument("--set", action="append", default=[])
    one.add_argument("--json", type=Path, required=True)
    one = orders.add_parser("play")
    one.add_argument("plans", type=Path)
    one.add_argument("contestant")
    one.add_argument("out", type=Path)
    one.add_argument("--python", default=sys.executable)
    one = orders.add_parser("turns")
    one.add_argument("plans", type=Path)
    one.add_argument("out", type=Path)
    one.add_argument("--python", default=sys.executable)
    one = orders.add_parser("table")
    one.add_argument("plans", type=Path)
    one.add_argument("played", type=Path, nargs="*")
    options = parser.parse_args()
    if options.order == "decide":
        write_kept(options.json, to_json(decide(options.world, options.rates, options.set)).decode())
        return
    contest = from_json(read_kept(options.plans), Contest, what=str(options.plans))
    if options.order == "table":
        print(table(contest, [from_json(read_kept(path), Played, what=str(path)) for path in options.played]))
        return
    names = [options.contestant] if options.order == "play" else [plan.contestant for plan in contest.plans]
    options.out.mkdir(parents=True, exist_ok=True)  # before minutes of work
    for found in play(contest, names, FOLDER, options.python):
        name = found.contestant.replace(",", "").replace(" ", "-")
        write_kept(options.out / f"contest-{name}.json.gz", to_json(found).decode())


if __name__ == "__main__":
    main()
