"""Fidelity of ``iserve simulate`` to a real engine: a trace replayed, and the same requests simulated.

    python -m tests.bench.fidelity --url http://127.0.0.1:8000 --model NAME --profile profile.json \
        --batch 64 --input-tokens 3584 --output-tokens 512 --minutes 2 --json out.json --page out.html

The endpoint may be any that speaks the OpenAI API; the profile is what ``iserve profile --json`` printed, the
other options what the worker was launched with. No controller is needed. First a burst tells what the endpoint
serves when it is saturated, then the trace is played at shares of that. Of one replay several
predictions are made: by the profile; with ``--check-seconds`` by the profile, corrected by a check of the running
worker as ``iserve verify`` makes it; with ``--steps-seconds`` by steps measured of the whole running model.

``--demo`` makes an installation of its own, profiles and deploys the demo model there, and measures it twice:
through the gateway, and at the worker itself.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import count, islice
from pathlib import Path

import numpy as np

from daemon.worker_token import read_token
from fingerprint.codec import from_json, to_json
from fingerprint.config import DeploymentConfig, KvFormat, WeightFormat, Workload, even_split
from fingerprint.errors import EngineError, NotMeasuredError
from fingerprint.estimates import Estimator
from fingerprint.estimators.corrected import CorrectedEstimator
from fingerprint.measurements import Profile
from fingerprint.verification import Verification
from iserve.planning.estimator_factory import estimator_for, step_tokens_of
from iserve.replay.endpoint import resolve_endpoint
from iserve.replay.prompts import PromptOptions
from iserve.replay.runner import Replay, ReplayOptions
from iserve.replay.schedule import ScheduleOptions, make_schedule
from iserve.report.text import seconds
from iserve.simulation.running import launch_limits, pads_steps
from iserve.verify.bursts import BurstClient
from iserve.verify.timing import Burst, time_bursts
from tests.bench.fidelity_compare import (
    Comparison,
    Metric,
    Sent,
    Served,
    compare,
    paced,
    saturated_rate,
    simulated,
)
from tests.bench.fidelity_page import render_fidelity
from tests.bench.fidelity_steps import Lone, WholeSteps, lone_request, whole_profile
from tests.bench.kept import read_kept, write_kept
from traces.outcomes import Outcomes
from traces.request import Request
from traces.simulator.step_model import Limits
from traces.trace_argument import requests_of
from traces.transforms import cap_lengths

__all__ = [
    "Asked",
    "Fidelity",
    "Target",
    "checked",
    "measure",
    "pace_s",
    "read_profile",
    "replayed",
    "served_by",
    "served_whole",
    "streamed_burst_s",
]

_SEEDS = count(1_000_000)  # of bursts; those of replays are small
PROFILE, CHECKED, WHOLE = "the profile", "the profile, corrected by a check", "the worker's own steps"
_PER_SLOT = 4  # requests of the burst that saturates
_STRETCH = 16  # of every so many requests one is in the burst
_TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A worker that runs, and how it was launched."""

    url: str
    model: str
    config: DeploymentConfig
    workload: Workload  # it was launched for
    limits: Limits
    behind_gateway: bool = False
    token: str | None = None  # of the worker itself


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    trace: str
    minutes: float  # of each load
    loads: tuple[float, ...]  # utilisations
    check_s: float  # of the check that corrects the profile; 0: none
    steps_s: float  # for measuring the worker's own steps, to simulate by them too; 0: not
    capacity: float | None  # requests/s when saturated; None: a burst tells
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    utilisation: float
    pace: float  # of bursts just before and after, over those when steps were measured: 1 on a quiet machine
    found: Comparison
    requests: Sent


@dataclass(frozen=True, kw_only=True, slots=True)
class Fidelity:
    """Result that the bench writes."""

    date: str
    machine: str
    target: Target
    profile: str
    check: Verification | None
    lone: Lone
    overhead_s: dict[str, float]  # of each request, by source of step times
    asked: Asked
    capacity_requests_per_s: float  # of the endpoint
    simulated_capacity_requests_per_s: (
        dict[str, float] | None
    )  # by source of step times; None: the endpoint's was given
    loads: tuple[Load, ...]
    burst: Sent | None  # that gave the rate
    steps: Profile | None  # of the worker, where they were measured


def served_by(target: Target, profile: Profile, check: Verification | None, lone: Lone) -> Served:
    """Return what the simulator is given of ``target``.

    That is its launch, its profile, the check where there is one, and what a lone request of one token takes
    beyond its predicted TTFT.
    """
    estimator: Estimator = estimator_for(profile)
    if check is not None:
        estimator = CorrectedEstimator(estimator, [check])
    return _served(target, profile, estimator, lone)


def served_whole(target: Target, whole: Profile, lone: Lone) -> Served:
    """Return the worker by its own steps; the embedded engine's lie on L2's lines, which average noise."""
    estimator = estimator_for(whole) if whole.engine == "torch" else WholeSteps(whole)
    return _served(target, whole, estimator, lone)


def _served(target: Target, profile: Profile, estimator: Estimator, lone: Lone) -> Served:
    predicted_s = estimator.estimate(target.config, Workload(1, 1, 1)).ttft_s.value
    return Served(
        gpu=profile.machine.device,
        num_layers=profile.spec.num_layers,
        config=target.config,
        limits=replace(target.limits, pads_steps=pads_steps(profile.spec, target.config.engine)),
        estimator=estimator,
        behind_gateway=target.behind_gateway,
        overhead_s=max(0.0, lone.ttft_s - predicted_s),
    )


def checked(target: Target, profile: Profile, max_seconds: float) -> Verification:
    """Measure a running worker as ``iserve verify`` does, but for its memory, which no simulation asks for."""
    client = BurstClient(
        target.url, target.model, profile.spec.vocab_size, timeout_s=_TIMEOUT_S, seed=1, token=target.token
    )
    times = time_bursts(
        lambda work: Burst(client.burst(work), alone=True),
        target.workload,
        max_seconds=max_seconds,
        clock=time.monotonic,
        progress=lambda done, planned, elapsed_s: None,
    )
    return Verification(
        config=target.config,
        workload=times.workload,
        launch_workload=target.workload,
        layers_per_stage=even_split(profile.spec.num_layers, target.config.pp),
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        ttft_s=times.ttft_s,
        tpot_s=times.tpot_s,
        memory_bytes_per_gpu=None,
        kv_tokens=None,
    )


def replayed(target: Target, requests: Sequence[Request], *, seed: int = 0) -> Outcomes:
    schedule = make_schedule(requests, (target.model,), ScheduleOptions(ignore_models=True, seed=seed))
    options = ReplayOptions(
        timeout_s=_TIMEOUT_S,
        max_in_flight=max(2000, len(requests)),
        prompts=PromptOptions(seed=seed),
        key=target.token,
    )
    return asyncio.run(Replay(schedule, resolve_endpoint(target.url), options).run())


def streamed_burst_s(target: Target, work: Workload) -> float:
    """Return the seconds of a burst as clients send it: every sequence a stream, its prompt never sent before.

    An engine may keep the KV of prompts (vLLM does, by default) and compute a repeated one in no time.

    Raises:
        EngineError: not all were answered.
    """
    requests = [Request(0.0, work.input_tokens, work.output_tokens)] * work.batch
    outcomes = replayed(target, requests, seed=next(_SEEDS))
    if not outcomes.completed.all():
        raise EngineError(
            f"{target.url} answered {int(outcomes.completed.sum())} of a burst of {work.batch} requests"
        )
    return float(outcomes.last_token_s.max() - outcomes.sent_s[0])


def measure(
    target: Target, profile: Profile, asked: Asked, tell: Callable[[str], None] = lambda line: None
) -> Fidelity:
    """Measure what the simulator is given, the burst, then every load."""
    burst = partial(streamed_burst_s, target)
    lone = lone_request(burst)
    tell(f"a lone token takes {lone.ttft_s * 1e3:.1f} ms, of which {lone.beside_s * 1e3:.1f} ms are no step")
    served = {PROFILE: served_by(target, profile, None, lone)}
    check = checked(target, profile, asked.check_s) if asked.check_s else None
    if check is not None:
        served[CHECKED] = served_by(target, profile, check, lone)
    whole = None
    if asked.steps_s:
        whole = whole_profile(
            burst, profile, target.config, target.workload, beside_s=lone.beside_s, max_seconds=asked.steps_s
        )
        try:
            served[WHOLE] = served_whole(target, whole, lone)
        except NotMeasuredError as error:
            tell(f"not simulated by {WHOLE}: {error}")
            whole = None
    calm_s = pace_s(target)
    capacity, simulated_capacity, at_once = asked.capacity, None, None
    if capacity is None:
        slots = target.limits.max_batch
        real = replayed(target, _at_once(asked, target, _PER_SLOT * slots))
        capacity, at_once = saturated_rate(real, slots), Sent.of(real)
        simulated_capacity = {name: saturated_rate(simulated(real, s), slots) for name, s in served.items()}
        tell(f"saturated: {capacity:.3g} requests/s, simulated {_rates(simulated_capacity)}")
    loads = []
    for number, utilisation in enumerate(asked.loads):
        rate = capacity * utilisation
        requests = paced(_requests(asked, target, max(2, round(rate * asked.minutes * 60))), rate)
        before_s = pace_s(target)
        real = replayed(target, requests, seed=1 + len(asked.loads) * asked.seed + number)
        pace = (before_s + pace_s(target)) / 2 / calm_s
        found = compare(real, {name: simulated(real, s) for name, s in served.items()})
        loads.append(Load(utilisation=utilisation, pace=pace, found=found, requests=Sent.of(real)))
        tell(told(loads[-1]))
    return Fidelity(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=machine(),
        target=target,
        profile=f"{profile.model} on {profile.engine}, {profile.created_at}",
        check=check,
        lone=lone,
        overhead_s={name: one.overhead_s for name, one in served.items()},
        asked=asked,
        capacity_requests_per_s=capacity,
        simulated_capacity_requests_per_s=simulated_capacity,
        loads=tuple(loads),
        burst=at_once,
        steps=whole,
    )


def _at_once(asked: Asked, target: Target, count: int) -> list[Request]:
    """From a longer stretch of the trace: neighbours are alike, and a few of them not like the rest."""
    stretch = _requests(asked, target, _STRETCH * count)
    return [replace(request, arrival_s=0.0) for request in stretch[::_STRETCH]]


def pace_s(target: Target) -> float:
    """A burst of the same lengths: how fast this machine is just now."""
    work = Workload(max(1, target.workload.batch // 2), max(1, target.workload.context_tokens // 4), 33)
    return float(np.median([streamed_burst_s(target, work) for _ in range(3)]))


def _rates(rates: Mapping[str, float]) -> str:
    return ", ".join(f"{rate:.3g} by {name}" for name, rate in rates.items())


def _requests(asked: Asked, target: Target, count: int) -> list[Request]:
    """The first ``count`` of the trace, cut to the worker's context."""
    trace = requests_of(asked.trace, seed=asked.seed)
    return list(islice(cap_lengths(trace, context_tokens=target.limits.max_context_tokens), count))


def told(load: Load) -> str:
    """A few lines for a terminal."""
    found = load.found
    lines = [
        f"utilisation {load.utilisation:g}: {found.offered_requests_per_s:.3g} requests/s, {found.completed} of "
        f"{found.requests} completed, {found.mean_running:.1f} at once, sender late "
        f"{found.lateness_p99_s * 1e3:.1f} ms at P99, bursts beside it "
        f"{load.pace:.2f} times as long as when steps were measured"
    ]
    for prediction in found.predictions:
        lines.append(f"  by {prediction.source}: {prediction.completed} completed")
        lines += [f"    {_metric_told(metric)}" for metric in prediction.metrics]
    return "\n".join(lines)


def _metric_told(metric: Metric) -> str:
    columns = zip(("P50", "P90", "P99"), metric.real_s, metric.simulated_s, metric.errors, strict=True)
    cells = [f"{name} {a * 1e3:8.1f} {b * 1e3:8.1f} ({error:+.0%})" for name, a, b, error in columns]
    return f"{metric.name:<5} " + "  ".join(cells) + f" ms, each {metric.median_request_error:+.0%}"


def machine() -> str:
    """Return the machine with its load, which shows whether other processes were at work."""
    name = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return (
        f"{name[1] if name else platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, "
        f"Python {platform.python_version()}"
    )


def page(found: Fidelity) -> str:
    rates = found.simulated_capacity_requests_per_s
    about = [
        ("date", found.date),
        ("machine", found.machine),
        ("configuration", f"{found.target.config} on {found.target.config.engine}"),
        ("through", "the gateway" if found.target.behind_gateway else "the worker's own port"),
        ("trace", Path(found.asked.trace).name),
        ("profile", found.profile),
        ("corrected by a check", "no" if found.check is None else found.check.measured_at),
        ("beside its steps a request takes", seconds(found.lone.beside_s)),
        ("saturated", f"{found.capacity_requests_per_s:.3g} requests/s"),
        ("saturated, simulated", "not simulated" if rates is None else _rates(rates)),
    ]
    loads = [(f"Utilisation {load.utilisation:g}", load.found) for load in found.loads]
    return render_fidelity("Simulated and measured", about, loads)


# The demo


@contextmanager
def demo(workload: Workload, profile_s: float) -> Iterator[tuple[Profile, Target, Target]]:
    """The demo model profiled and deployed in a home of its own: its profile, the gateway, the worker itself."""
    from tests.iserve.conftest import Installation

    with tempfile.TemporaryDirectory() as folder:
        home = Installation(Path(folder) / "home")
        work = (
            *("--batch", str(workload.batch)),
            *("--input-tokens", str(workload.input_tokens), "--output-tokens", str(workload.output_tokens)),
        )
        try:
            profile = from_json(
                home.run("profile", *work, "--max-seconds", profile_s, "--json").stdout.encode(), Profile
            )
            deployed = home.json("deploy", "--name", "demo", *work)
            target = Target(
                url=deployed["worker_url"],
                token=read_token(home.home / "workers" / deployed["replicas"][0]["worker_id"]),
                model="demo",
                config=from_json(to_json(deployed["config"]), DeploymentConfig),
                workload=workload,
                limits=launch_limits(workload, "torch", step_tokens_of(profile)),
            )
            yield profile, replace(target, url=deployed["base_url"], behind_gateway=True, token=None), target
        finally:
            home.clear()


def main(arguments: Sequence[str]) -> None:
    options = _parser().parse_args(arguments)
    if options.keep and options.capacity is not None:
        raise SystemExit("--keep needs the burst that tells the saturated rate; leave out --capacity")
    workload = Workload(options.batch, options.input_tokens, options.output_tokens)
    asked = Asked(
        trace=options.trace,
        minutes=options.minutes,
        loads=tuple(options.loads),
        check_s=options.check_seconds,
        steps_s=options.steps_seconds,
        capacity=options.capacity,
        seed=options.seed,
    )
    print(machine(), flush=True)
    if options.demo:
        with demo(workload, options.profile_seconds) as (profile, gateway, worker):
            found = [
                measure(target, profile, asked, lambda line: print(line, flush=True))
                for target in (worker, gateway)
            ]
    else:
        profile = read_profile(options.profile)
        found = [
            measure(_target(options, profile, workload), profile, asked, lambda line: print(line, flush=True))
        ]
    if options.json:
        options.json.write_bytes(to_json(found, indent=2))
    if options.page:
        for number, one in enumerate(found):
            path = options.page.with_stem(options.page.stem + ("-gateway" if number else ""))
            path.write_text(page(one), encoding="utf-8")
    if options.keep:
        from tests.bench.fidelity_again import kept_of

        write_kept(options.keep, to_json(kept_of(found[0], profile)).decode())


def read_profile(path: Path) -> Profile:
    if path.suffix != ".xz":
        return from_json(path.read_bytes(), Profile, what=str(path))
    from tests.bench.accuracy_measure import Recorded

    return from_json(read_kept(path), Recorded, what=str(path)).profile


def _target(options: argparse.Namespace, profile: Profile, workload: Workload) -> Target:
    limits = launch_limits(workload, profile.engine, options.step_tokens or step_tokens_of(profile))
    return Target(
        url=options.url,
        model=options.model,
        config=DeploymentConfig(
            tp=options.tp, pp=options.pp, weights=options.weights, kv=options.kv, engine=profile.engine
        ),
        workload=workload,
        limits=replace(limits, kv_tokens=options.kv_tokens or limits.kv_tokens),
        behind_gateway=options.behind_gateway,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", help="of the endpoint")
    where.add_argument("--demo", action="store_true", help="the demo model, in an installation of its own")
    parser.add_argument("--model", help="the name that the endpoint serves it by")
    parser.add_argument(
        "--profile",
        type=Path,
        help="what `iserve profile --json` printed, or a record of tests.bench.accuracy_measure (.json.xz)",
    )
    parser.add_argument("--profile-seconds", type=float, default=60, help="of the demo's profile")
    parser.add_argument("--behind-gateway", action="store_true", help="the URL is that of iServe's gateway")
    parser.add_argument("--batch", type=int, default=8, help="sequences at once it was launched for")
    parser.add_argument("--input-tokens", type=int, default=768)
    parser.add_argument("--output-tokens", type=int, default=256, help="with the input: its context")
    parser.add_argument("--step-tokens", type=int, help="of its largest step; else as a deploy sets it")
    parser.add_argument("--kv-tokens", type=int, help="of its KV cache; else batch times context")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--weights", type=WeightFormat, default=DeploymentConfig().weights)
    parser.add_argument("--kv", type=KvFormat, default=DeploymentConfig().kv)
    parser.add_argument("--trace", default="synthetic:azure-conv")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=3.0, help="of each load")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.3, 0.6, 0.8], help="shares of saturation")
    parser.add_argument("--capacity", type=float, help="requests/s when saturated; else a burst tells")
    parser.add_argument("--check-seconds", type=float, default=0.0, help="of a check that corrects the profile")
    parser.add_argument(
        "--steps-seconds",
        type=float,
        default=0.0,
        help="also simulate by the worker's own steps, measured so long",
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--keep", type=Path, help="what tests.bench.fidelity_again simulates again (.json.xz)")
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])
