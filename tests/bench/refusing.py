"""Value of rejecting late requests: one worker under more than it serves, with and without, in turn.

    python tests/bench/refusing.py --worker http://127.0.0.1:8000 --model NAME --slots 32 --json out.json
    python tests/bench/refusing.py --gateway http://127.0.0.1:8080 --model A --refusing B --rate 4 --slo e2e=8

The first form wants an OpenAI server of any engine, alone on its GPU, and the number of requests that it runs at
once; it measures its times (one request, a batch of all slots), starts a gateway of its own before it, and gives
that gateway a table without refusing and one with it, in turn. The second form wants a gateway that serves the
same model under two names, one deployed with ``--reject-late``, and sends to each in turn.

The load is open: Poisson arrivals at ``--load`` times what batches of all slots would serve, answers of lognormal
lengths, the same requests in every run. Printed is, of all requests, how many were answered, refused, and kept the
SLO; and of the answered how many kept it. Needs no more of iServe than its gateway does.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from daemon.atomic_file import write_file_atomically
from daemon.process import read_record
from fingerprint.codec import to_json
from fingerprint.service_model import ServiceModel
from iserve.replay.endpoint import resolve_endpoint
from iserve.replay.prompts import PromptOptions
from iserve.replay.runner import Replay, ReplayOptions
from iserve.replay.schedule import ScheduleOptions, make_schedule
from iserve.route_table import GatewayLimits, Route, RouteTable, WorkerTarget
from planner.admission import AdmissionPolicy
from planner.intent import Slo, parse_slo
from tests.two_point_service import two_point_service
from traces.outcomes import Failure, Outcomes
from traces.request import Request
from traces.summary import kept, percentiles

__all__ = ["Form", "OwnGateway", "batch_time_s", "figures", "measured_service", "open_load", "sent"]

_PATIENCE_S = 30.0
_POLL_S = 0.3  # the gateway looks for a new table every 0.1 s


@dataclass(frozen=True, kw_only=True)
class Form:
    """Result of one run."""

    refusing: bool
    requests: int
    answered: int
    refused_late: int
    refused_else: int  # the queue was full
    failed: int
    kept: int
    kept_fraction: float  # of all requests
    kept_of_answered: float
    ttft_p50_s: float | None  # of the answered, as the next
    ttft_p99_s: float | None
    e2e_p50_s: float | None
    e2e_p99_s: float | None
    lateness_max_s: float  # of the sender


def open_load(
    per_s: float, seconds: float, service: ServiceModel, *, output_cv: float, seed: int, model: str
) -> list[Request]:
    """Poisson arrivals; prompts of the mean length, answers of its mean length, no longer than four times."""
    rng, at_s, found = np.random.default_rng(seed), 0.0, []
    sigma = float(np.sqrt(np.log1p(output_cv**2)))
    while (at_s := at_s + float(rng.exponential(1 / per_s))) < seconds:
        length = service.output_tokens * float(rng.lognormal(-(sigma**2) / 2, sigma))
        tokens = min(max(2, round(length)), 4 * round(service.output_tokens))
        found.append(Request(at_s, round(service.input_tokens), tokens, model))
    return found


def sent(url: str, requests: Sequence[Request], model: str, timeout_s: float = 600.0) -> Outcomes:
    """Send requests in time, whatever the outcome."""

    async def run() -> Outcomes:
        schedule = make_schedule(requests, (model,), ScheduleOptions(ignore_models=True))
        options = ReplayOptions(timeout_s=timeout_s, prompts=PromptOptions())
        return await Replay(schedule, resolve_endpoint(url), options).run()

    return asyncio.run(run())


def measured_service(url: str, model: str, slots: int, input_tokens: int, output_tokens: int) -> ServiceModel:
    """Measure the times of the server itself: medians of three requests alone, and of two batches of all slots.

    A warm-up runs first.
    """

    def batch(size: int) -> tuple[float, float]:
        asked = [Request(0.0, input_tokens, output_tokens, model) for _ in range(size)]
        done = sent(url, asked, model)
        if not done.completed.all():
            raise SystemExit(f"{url} failed {(~done.completed).sum()} of {size} requests: is it of {model}?")
        return float(done.ttft_s.max()), float(np.median(done.tpot_s))

    batch(1)
    batch(slots)
    alone, full = [batch(1) for _ in range(3)], [batch(slots) for _ in range(2)]
    return two_point_service(
        batch=slots,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        ttft_s=float(np.median([ttft for ttft, _ in alone])),
        full_ttft_s=float(np.median([ttft for ttft, _ in full])),
        tpot_s=float(np.median([tpot for _, tpot in alone])),
        full_tpot_s=float(np.median([tpot for _, tpot in full])),
    )


def batch_time_s(service: ServiceModel) -> float:
    """Return the E2E of a full batch of mean requests, handed over at once."""
    slots = service.largest_batch
    return service.prompts_s(slots * service.input_tokens) + (service.output_tokens - 1) * service.step_of(slots)


def figures(outcomes: Outcomes, slo: Slo, *, refusing: bool) -> Form:
    """A refused one keeps nothing."""
    answered, met = int(outcomes.completed.sum()), int(kept(outcomes, slo).sum())
    late = int((outcomes.failure == Failure.TOO_LATE).sum())
    elsewise = int((outcomes.failure == Failure.RATE_LIMITED).sum())
    ttft, e2e = (percentiles(column[outcomes.completed]) for column in (outcomes.ttft_s, outcomes.e2e_s))
    return Form(
        refusing=refusing,
        requests=len(outcomes),
        answered=answered,
        refused_late=late,
        refused_else=elsewise,
        failed=len(outcomes) - answered - late - elsewise,
        kept=met,
        kept_fraction=met / max(1, len(outcomes)),
        kept_of_answered=met / max(1, answered),
        ttft_p50_s=ttft and ttft.p50_s,
        ttft_p99_s=ttft and ttft.p99_s,
        e2e_p50_s=e2e and e2e.p50_s,
        e2e_p99_s=e2e and e2e.p99_s,
        lateness_max_s=float(np.nanmax(outcomes.lateness_s, initial=0.0)),
    )


class OwnGateway:
    """A gateway before one worker; ``serve`` says by which rule."""

    def __init__(self, home: Path, worker_url: str, model: str, service: ServiceModel, slo: Slo) -> None:
        self._path, self._worker_url, self._model = home / "run" / "routes.json", worker_url, model
        self._service, self._slo, self._version = service, slo, 0
        self.url = ""

    def serve(self, *, refusing: bool) -> None:
        """Serve as a controller would configure it: twice the slots, or just the slots and what is late."""
        self._version += 1
        slots = self._service.largest_batch
        policy = AdmissionPolicy(slo=self._slo, service=self._service, slots=slots) if refusing else None
        target = WorkerTarget(
            worker_id="w",
            url=self._worker_url,
            ready=True,
            max_outstanding=slots * (1 if refusing else 2),
        )
        route = Route(
            name=self._model,
            model=self._model,
            created=0,
            max_context_tokens=round(self._service.input_tokens + 4 * self._service.output_tokens),
            workers=(target,),
            admission=policy,
        )
        table = RouteTable(
            version=self._version, auth_required=False, routes=(route,), keys=(), limits=GatewayLimits()
        )
        write_file_atomically(self._path, to_json(table))
        time.sleep(_POLL_S)


@contextmanager
def own_gateway(worker_url: str, model: str, service: ServiceModel, slo: Slo) -> Iterator[OwnGateway]:
    """A process of its own, ended with the block."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        (home / "run").mkdir()
        gateway = OwnGateway(home, worker_url, model, service, slo)
        gateway.serve(refusing=False)
        command = [sys.executable, "-m", "iserve.gateway", "--home", folder, "--port", "0"]
        process = subprocess.Popen(command)
        try:
            deadline_s = time.monotonic() + _PATIENCE_S
            while (record := read_record(home / "run" / "gateway.json")) is None:
                if time.monotonic() > deadline_s or process.poll() is not None:
                    raise SystemExit("the gateway did not start")
                time.sleep(0.05)
            gateway.url = record.url
            time.sleep(_POLL_S)
            yield gateway
        finally:
            process.terminate()
            process.wait()


def in_turn(run: Callable[[bool, int], Form], repeats: int) -> list[Form]:
    """Without and with, then the other way round, and so on."""
    return [
        run(refusing, seed) for seed in range(repeats) for refusing in ((False, True), (True, False))[seed % 2]
    ]


def before_a_worker(args: argparse.Namespace) -> tuple[list[Form], dict[str, object]]:
    service = measured_service(args.worker, args.model, args.slots, args.input_tokens, args.output_tokens)
    batch_s = batch_time_s(service)
    per_s = args.rate or args.load * args.slots / batch_s
    slo = parse_slo(args.slo) if args.slo else Slo(e2e_s=2 * batch_s)
    with own_gateway(args.worker, args.model, service, slo) as gateway:

        def run(refusing: bool, seed: int) -> Form:
            gateway.serve(refusing=refusing)
            return _one(args, gateway.url, args.model, per_s, service, slo, refusing, seed)

        forms = in_turn(run, args.repeats)
    return forms, {
        "service": asdict(service),
        "rate_per_s": per_s,
        "slo": asdict(slo),
        "slots_per_batch_s": batch_s,
    }


def before_a_gateway(args: argparse.Namespace) -> tuple[list[Form], dict[str, object]]:
    if not (args.refusing and args.rate and args.slo):
        raise SystemExit("--gateway goes with --refusing, --rate and --slo: its deployments know their own times")
    slo = parse_slo(args.slo)
    lengths = two_point_service(
        batch=1, input_tokens=args.input_tokens, output_tokens=args.output_tokens, ttft_s=1.0, tpot_s=1.0
    )

    def run(refusing: bool, seed: int) -> Form:
        name = args.refusing if refusing else args.model
        return _one(args, args.gateway, name, args.rate, lengths, slo, refusing, seed)

    return in_turn(run, args.repeats), {"rate_per_s": args.rate, "slo": asdict(slo)}


def _one(
    args: argparse.Namespace,
    url: str,
    model: str,
    per_s: float,
    service: ServiceModel,
    slo: Slo,
    refusing: bool,
    seed: int,
) -> Form:
    requests = open_load(per_s, args.seconds, service, output_cv=args.output_cv, seed=seed, model=model)
    form = figures(sent(url, requests, model), slo, refusing=refusing)
    print(
        f"{'refusing' if refusing else 'plain':>8}: {form.requests} requests, answered {form.answered}, late "
        f"{form.refused_late}, queue full {form.refused_else}, failed {form.failed}; kept "
        f"{form.kept_fraction:.1%} of all, {form.kept_of_answered:.1%} of the answered; TTFT p50 "
        f"{form.ttft_p50_s} s, E2E p50 {form.e2e_p50_s} s, p99 {form.e2e_p99_s} s",
        flush=True,
    )
    return form


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--worker", help="URL of an OpenAI server")
    where.add_argument("--gateway", help="URL of a gateway")
    parser.add_argument(
        "--model", required=True, help="as the server knows it; of a gateway: that does not refuse"
    )
    parser.add_argument("--refusing", help="of a gateway: the deployment that refuses")
    parser.add_argument("--slots", type=int, default=32, help="requests that the server runs at once")
    parser.add_argument("--input-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=128, help="mean")
    parser.add_argument("--output-cv", type=float, default=0.5)
    parser.add_argument("--load", type=float, default=2.0, help="times slots / E2E of a whole batch")
    parser.add_argument("--rate", type=float, help="requests/s, in place of --load")
    parser.add_argument("--slo", help="as `iserve deploy --slo`; else e2e of twice a batch's")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    forms, given = before_a_worker(args) if args.worker else before_a_gateway(args)
    document = {
        "command": sys.argv[1:] if argv is None else list(argv),
        "machine": platform.platform(),
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **given,
        "forms": [asdict(form) for form in forms],
    }
    if args.json:
        args.json.write_bytes(to_json(document, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
