"""Simulation of a recorded replay: what a change of the simulator does to it, without the machine.

    python -m tests.bench.fidelity_again tests/bench/results/fidelity/h200-vllm.json.xz

The requests are those that were played. That a figure is nearer to the measured one here than it was then shows
what a change does, not that it is right: its author had seen the result. A fresh run shows that.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fingerprint.codec import from_json
from fingerprint.errors import BadInputError
from fingerprint.measurements import Profile
from fingerprint.verification import Verification
from tests.bench.fidelity import CHECKED, PROFILE, WHOLE, Fidelity, Target, served_by, served_whole
from tests.bench.fidelity_compare import PERCENTS, Prediction, Sent, Served, saturated_rate, simulated_requests
from tests.bench.fidelity_steps import Lone
from tests.bench.kept import read_kept
from traces.outcomes import Outcomes

__all__ = ["Kept", "KeptLoad", "Percentiles", "Simulated", "again", "kept_of", "read"]


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles of the requests, at ``PERCENTS``."""

    ttft_s: tuple[float, ...]
    tpot_s: tuple[float, ...]
    e2e_s: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulated:
    source: str  # of the step times
    saturated_requests_per_s: float
    at: Percentiles


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptLoad:
    utilisation: float
    pace: float
    requests: Sent
    measured: Percentiles
    then: tuple[Simulated, ...]  # what the simulator of that day made of them


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    date: str
    machine: str
    target: Target
    profile: Profile
    check: Verification | None
    lone: Lone
    burst: Sent  # that saturated the endpoint
    saturated_requests_per_s: float
    loads: tuple[KeptLoad, ...]
    notes: tuple[str, ...] = ()
    steps: Profile | None = None  # the worker's own, where they were measured and kept


def kept_of(found: Fidelity, profile: Profile) -> Kept:
    """Return what is needed to simulate ``found`` again.

    Raises:
        BadInputError: its saturated rate was given, not measured.
    """
    rates, burst = found.simulated_capacity_requests_per_s, found.burst
    if rates is None or burst is None:
        raise BadInputError("a replay is kept with the burst that told its saturated rate; leave out --capacity")
    return Kept(
        date=found.date,
        machine=found.machine,
        target=found.target,
        profile=profile,
        check=found.check,
        lone=found.lone,
        burst=burst,
        saturated_requests_per_s=found.capacity_requests_per_s,
        loads=tuple(
            KeptLoad(
                utilisation=load.utilisation,
                pace=load.pace,
                requests=load.requests,
                measured=_of(load.found.predictions[0], real=True),
                then=tuple(
                    Simulated(source=p.source, saturated_requests_per_s=rates[p.source], at=_of(p, real=False))
                    for p in load.found.predictions
                ),
            )
            for load in found.loads
        ),
        steps=found.steps,
    )


def _of(prediction: Prediction, *, real: bool) -> Percentiles:
    metrics = (prediction.metric(name) for name in ("TTFT", "TPOT", "E2E"))
    return Percentiles(*(m.real_s if real else m.simulated_s for m in metrics))


def read(path: Path) -> Kept:
    return from_json(read_kept(path), Kept, what=str(path))


def again(kept: Kept) -> Iterator[tuple[KeptLoad, tuple[Simulated, ...]]]:
    """Every load with what the simulator of today makes of it, by the times measured that day."""
    served = {PROFILE: served_by(kept.target, kept.profile, None, kept.lone)}
    if kept.check is not None:
        served[CHECKED] = served_by(kept.target, kept.profile, kept.check, kept.lone)
    if kept.steps is not None:
        served[WHOLE] = served_whole(kept.target, kept.steps, kept.lone)
    rates = {name: _saturated(kept, one) for name, one in served.items()}
    for load in kept.loads:
        yield (
            load,
            tuple(
                Simulated(source=name, saturated_requests_per_s=rates[name], at=_percentiles(load, one))
                for name, one in served.items()
            ),
        )


def _saturated(kept: Kept, served: Served) -> float:
    return saturated_rate(simulated_requests(kept.burst.requests(), served), served.limits.max_batch)


def _percentiles(load: KeptLoad, served: Served) -> Percentiles:
    found: Outcomes = simulated_requests(load.requests.requests(), served)
    metrics = (found.ttft_from_send_s, found.tpot_s, found.e2e_from_send_s)
    return Percentiles(*(tuple(float(v) for v in np.nanpercentile(times, PERCENTS)) for times in metrics))


def _told(kept: Kept) -> Iterator[str]:
    """A table of errors, simulated over measured less 1."""
    yield "| step times | saturated | TTFT | TPOT | E2E |"
    yield "|---|---|---|---|---|"
    for load, now in again(kept):
        m = load.measured
        cells = " | ".join(_times(v) for v in (m.ttft_s, m.tpot_s, m.e2e_s))
        yield f"| *measured at {load.utilisation:g}* | {kept.saturated_requests_per_s:.3g} requests/s | {cells} |"
        for when, predictions in (("then", load.then), ("now", now)):
            for p in predictions:
                pairs = ((m.ttft_s, p.at.ttft_s), (m.tpot_s, p.at.tpot_s), (m.e2e_s, p.at.e2e_s))
                cells = " | ".join(_errors(*pair) for pair in pairs)
                rate = p.saturated_requests_per_s / kept.saturated_requests_per_s - 1
                yield f"| {p.source}, {when} | {rate:+.0%} | {cells} |"


def _times(values: tuple[float, ...]) -> str:
    return " / ".join(f"{v * 1e3:,.3g}" if v < 1 else f"{v * 1e3:,.0f}" for v in values) + " ms"


def _errors(measured: tuple[float, ...], simulated: tuple[float, ...]) -> str:
    return " / ".join(f"{b / a - 1:+.0%}" for a, b in zip(measured, simulated, strict=True))


def main(arguments: Sequence[str]) -> None:
    for name in arguments:
        for line in _told(read(Path(name))):
            print(line)


if __name__ == "__main__":
    main(sys.argv[1:])
