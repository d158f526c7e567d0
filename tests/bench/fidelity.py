"""How near ``iserve simulate`` comes to a real engine: a trace replayed, and the same requests simulated.

    python -m tests.bench.fidelity --url http://127.0.0.1:8000 --model NAME --profile profile.json \
        --batch 64 --input-tokens 3584 --output-tokens 512 --minutes 2 --json out.json --page out.html

The endpoint may be any that speaks the OpenAI API; the profile is what ``iserve profile --json`` printed, the
other options what the worker was launched with. No controller is needed. First a burst tells what the endpoint
serves when it is saturated, then the trace is played at shares of that. ``--check-seconds`` takes a check of the
running worker as ``iserve verify`` does, and corrects the profile by it before anything is compared.

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from pathlib import Path

from fingerprint.codec import from_json, to_json
from fingerprint.config import DeploymentConfig, KvFormat, WeightFormat, Workload, even_split
from fingerprint.errors import EngineError
from fingerprint.estimators.corrected import CorrectedEstimator
from fingerprint.measurements import Profile
from fingerprint.report.text import seconds
from fingerprint.verification import Verification
from iserve.controller.estimating import estimator_for, step_tokens_of
from iserve.simulation import launch_limits
from iserve.verify.bursts import BurstClient
from iserve.verify.timing import Burst, time_bursts
from tests.bench.fidelity_compare import Comparison, Served, compare, paced, saturated_rate, simulated
from tests.bench.fidelity_page import render_fidelity
from tests.bench.fidelity_steps import request_s, whole_profile
from traces.outcomes import Outcomes
from traces.replay.endpoint import resolve_endpoint
from traces.replay.runner import Replay, ReplayOptions
from traces.replay.schedule import ScheduleOptions, make_schedule
from traces.request import Request
from traces.simulator.step_model import Limits
from traces.sources import requests_of
from traces.transforms import cap_lengths

__all__ = ["Asked", "Fidelity", "Target", "checked", "measure", "replayed", "served_by"]

_BURST_PER_SLOT = 4  # requests of the burst that saturates
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    trace: str
    minutes: float  # of each load
    loads: tuple[float, ...]  # utilisations
    check_s: float  # of the check that corrects the profile; 0: none
    steps_s: float  # for measuring the worker's own steps, which then replace the profile's; 0: they do not
    capacity: float | None  # requests/s when saturated; None: a burst tells
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    utilisation: float
    found: Comparison


@dataclass(frozen=True, kw_only=True, slots=True)
class Fidelity:
    """What the bench writes."""

    date: str
    machine: str
    target: Target
    profile: str
    check: Verification | None
    overhead_s: float  # of a request beside its steps
    asked: Asked
    capacity_requests_per_s: float  # of the endpoint
    simulated_capacity_requests_per_s: float | None  # None: the endpoint's was given
    loads: tuple[Load, ...]


def served_by(target: Target, profile: Profile, check: Verification | None, overhead_s: float) -> Served:
    """What the simulator is told of ``target``: its launch, its profile, and the check where there is one."""
    estimator = estimator_for(profile)
    return Served(
        gpu=profile.machine.device,
        num_layers=profile.spec.num_layers,
        config=target.config,
        limits=target.limits,
        estimator=CorrectedEstimator(estimator, [check]) if check is not None else estimator,
        behind_gateway=target.behind_gateway,
        overhead_s=overhead_s,
    )


def checked(target: Target, profile: Profile, max_seconds: float) -> Verification:
    """What ``iserve verify`` measures of a running worker, but for its memory, which no simulation asks for."""
    client = BurstClient(target.url, target.model, profile.spec.vocab_size, timeout_s=_TIMEOUT_S, seed=1)
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
        room=target.workload,
        layers_per_stage=even_split(profile.spec.num_layers, target.config.pp),
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        ttft_s=times.ttft_s,
        tpot_s=times.tpot_s,
        memory_bytes_per_gpu=None,
        kv_tokens=None,
    )


def replayed(target: Target, requests: Sequence[Request], *, seed: int = 0) -> Outcomes:
    schedule = make_schedule(requests, (target.model,), ScheduleOptions(ignore_models=True, seed=seed))
    options = ReplayOptions(timeout_s=_TIMEOUT_S, max_in_flight=max(2000, len(requests)))
    return asyncio.run(Replay(schedule, resolve_endpoint(target.url), options).run())


def streamed_burst_s(target: Target, work: Workload) -> float:
    """Seconds of a burst as clients call it: every sequence a stream of its own.

    Raises:
        EngineError: not all were answered.
    """
    outcomes = replayed(target, [Request(0.0, work.input_tokens, work.output_tokens)] * work.batch)
    if not outcomes.completed.all():
        raise EngineError(
            f"{target.url} answered {int(outcomes.completed.sum())} of a burst of {work.batch} requests"
        )
    return float(outcomes.last_token_s.max() - outcomes.sent_s[0])


def measure(
    target: Target, profile: Profile, asked: Asked, tell: Callable[[str], None] = lambda line: None
) -> Fidelity:
    """What the simulator is told, the burst, then every load."""

    burst = partial(streamed_burst_s, target)
    overhead_s = request_s(burst)
    tell(f"a request takes {overhead_s * 1e3:.1f} ms beside its steps")
    if asked.steps_s:
        profile = whole_profile(
            burst,
            profile,
            target.config,
            target.workload,
            beside_s=overhead_s,
            max_seconds=asked.steps_s,
        )
    check = checked(target, profile, asked.check_s) if asked.check_s else None
    served = served_by(target, profile, check, overhead_s)
    capacity, simulated_capacity = asked.capacity, None
    if capacity is None:
        slots = target.limits.max_batch
        at_once = [replace(r, arrival_s=0.0) for r in _requests(asked, target, _BURST_PER_SLOT * slots)]
        real = replayed(target, at_once)
        capacity = saturated_rate(real, slots)
        simulated_capacity = saturated_rate(simulated(real, served), slots)
        tell(f"saturated: {capacity:.3g} requests/s, simulated {simulated_capacity:.3g}")
    loads = []
    for utilisation in asked.loads:
        rate = capacity * utilisation
        requests = paced(_requests(asked, target, max(2, round(rate * asked.minutes * 60))), rate)
        real = replayed(target, requests, seed=asked.seed)
        loads.append(Load(utilisation=utilisation, found=compare(real, simulated(real, served))))
        tell(told(loads[-1]))
    return Fidelity(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=machine(),
        target=target,
        profile=f"{profile.model} on {profile.engine}, {profile.created_at}",
        check=check,
        overhead_s=overhead_s,
        asked=asked,
        capacity_requests_per_s=capacity,
        simulated_capacity_requests_per_s=simulated_capacity,
        loads=tuple(loads),
    )


def _requests(asked: Asked, target: Target, count: int) -> list[Request]:
    """The first ``count`` of the trace, cut to the worker's context."""
    trace = requests_of(asked.trace, seed=asked.seed)
    return list(islice(cap_lengths(trace, context_tokens=target.limits.max_context_tokens), count))


def told(load: Load) -> str:
    """A few lines for a terminal."""
    found = load.found
    lines = [
        f"utilisation {load.utilisation:g}: {found.offered_requests_per_s:.3g} requests/s, {found.completed} of "
        f"{found.requests} completed ({found.simulated_completed} simulated), {found.mean_running:.1f} at once, "
        f"sender late {found.lateness_p99_s * 1e3:.1f} ms at P99"
    ]
    for metric in found.metrics:
        cells = [
            f"{name} {real_s * 1e3:8.1f} {model_s * 1e3:8.1f} ({error:+.0%})"
            for name, real_s, model_s, error in zip(
                ("P50", "P90", "P99"), metric.real_s, metric.simulated_s, metric.errors, strict=True
            )
        ]
        lines.append(f"  {metric.name:<5} " + "  ".join(cells) + f"  each {metric.median_request_error:+.0%}")
    return "\n".join(lines)


def machine() -> str:
    """With its load, which tells whether others were at work."""
    name = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return (
        f"{name[1] if name else platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, "
        f"Python {platform.python_version()}"
    )


def page(found: Fidelity) -> str:
    simulated_capacity = found.simulated_capacity_requests_per_s
    about = [
        ("date", found.date),
        ("machine", found.machine),
        ("configuration", f"{found.target.config} on {found.target.config.engine}"),
        ("through", "the gateway" if found.target.behind_gateway else "the worker's own port"),
        ("trace", found.asked.trace),
        ("profile", found.profile),
        ("corrected by a check", "no" if found.check is None else found.check.measured_at),
        ("a request beside its steps", seconds(found.overhead_s)),
        ("saturated", f"{found.capacity_requests_per_s:.3g} requests/s"),
        ("saturated, simulated", "not simulated" if simulated_capacity is None else f"{simulated_capacity:.3g}"),
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
                model="demo",
                config=from_json(to_json(deployed["config"]), DeploymentConfig),
                workload=workload,
                limits=launch_limits(workload, step_tokens_of(profile)),
            )
            yield profile, replace(target, url=deployed["base_url"], behind_gateway=True), target
        finally:
            home.clear()


def main(arguments: Sequence[str]) -> None:
    options = _parser().parse_args(arguments)
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
        profile = from_json(options.profile.read_bytes(), Profile, what=str(options.profile))
        found = [
            measure(_target(options, profile, workload), profile, asked, lambda line: print(line, flush=True))
        ]
    if options.json:
        options.json.write_bytes(to_json(found, indent=2))
    if options.page:
        for number, one in enumerate(found):
            path = options.page.with_stem(options.page.stem + ("-gateway" if number else ""))
            path.write_text(page(one), encoding="utf-8")


def _target(options: argparse.Namespace, profile: Profile, workload: Workload) -> Target:
    limits = launch_limits(workload, options.step_tokens or step_tokens_of(profile))
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
    parser.add_argument("--profile", type=Path, help="what `iserve profile --json` printed")
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
        help="measure the worker's own steps, in place of the profile's",
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", type=Path)
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])
