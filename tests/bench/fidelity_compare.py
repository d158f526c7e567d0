"""The same requests as an endpoint served them and as the simulator has them, side by side. Values only, no clock.

Times count from the actual send, on both sides: what made the sender late is neither the server's nor simulated.
The simulated requests arrive when the real ones were sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fingerprint.config import DeploymentConfig, even_split
from fingerprint.errors import BadInputError
from fingerprint.estimates import Estimator
from fingerprint.gpu_spec import GpuSpec
from iserve.simulation.running import idle_cluster
from placement.types import ClusterSnapshot, Placement, StagePlacement
from traces.outcomes import Floats, Outcomes
from traces.request import Request
from traces.simulator.scenario import Deploy, Deployed, NotDeployed, Policies, Scenario
from traces.simulator.simulation import simulate
from traces.simulator.step_model import Limits, StepModel, tabulate
from traces.timeline import CurvePoint, curve

__all__ = [
    "PERCENTS",
    "Comparison",
    "Metric",
    "Prediction",
    "Sent",
    "Served",
    "compare",
    "paced",
    "relative_error",
    "saturated_rate",
    "simulated",
    "simulated_requests",
    "token_gaps_s",
]

PERCENTS = (50, 90, 99)
_NO_GAP_S = 1e-9
_ANY_NUMBER = 10**9  # outstanding per slot: no gateway is before the worker, so all wait within it


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """Worker as it was launched, and what its times are predicted by."""

    gpu: GpuSpec
    num_layers: int
    config: DeploymentConfig
    limits: Limits
    estimator: Estimator
    behind_gateway: bool
    overhead_s: float  # of a request in addition to its steps
    prefix_cache: bool = False  # on

    def steps(self) -> StepModel:
        return tabulate(self.estimator, self.config, self.limits)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    """Requests in order: when they were sent and how long they were."""

    sent_s: tuple[float, ...]
    input_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]
    prefix_blocks: tuple[tuple[int, ...], ...] = ()  # of each; or of none

    @classmethod
    def of(cls, real: Outcomes, asked: Sequence[Request] = ()) -> Sent:
        """Return those of ``real`` that were sent; times to a tenth of a millisecond.

        Args:
            asked: the same requests as they were given to the replay, for their prefixes; empty: they have none.
        """
        was_sent = ~np.isnan(real.sent_s)
        sent = real.select(was_sent)
        blocks = [one.prefix_blocks for one, is_sent in zip(asked, was_sent, strict=False) if is_sent]
        return cls(
            sent_s=tuple(sent.sent_s.round(4).tolist()),
            input_tokens=tuple(sent.asked_input_tokens.tolist()),
            output_tokens=tuple(sent.asked_output_tokens.tolist()),
            prefix_blocks=tuple(blocks) if any(blocks) else (),
        )

    def requests(self) -> list[Request]:
        columns = (self.sent_s, self.input_tokens, self.output_tokens)
        blocks = self.prefix_blocks or [()] * len(self.sent_s)
        return [
            Request(*row, prefix_blocks=own) for row, own in zip(zip(*columns, strict=True), blocks, strict=True)
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """Latency of the requests that completed on both sides; ``errors`` are simulated over real, less 1."""

    name: str
    real_s: tuple[float, ...]  # at PERCENTS
    simulated_s: tuple[float, ...]
    errors: tuple[float, ...]
    median_request_error: float  # of each request's own ratio; of ITL, that of its mean gap
    real_curve: tuple[CurvePoint, ...]
    simulated_curve: tuple[CurvePoint, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Prediction for the requests by one source of step times."""

    source: str
    completed: int
    metrics: tuple[Metric, ...]

    def metric(self, name: str) -> Metric:
        return next(metric for metric in self.metrics if metric.name == name)


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Comparison of one replay with the predictions of it."""

    requests: int
    completed: int
    offered_requests_per_s: float
    lateness_p99_s: float  # of the sender
    mean_running: float  # requests in the system, real, by Little's law
    predictions: tuple[Prediction, ...]


def simulated(real: Outcomes, served: Served, asked: Sequence[Request] = ()) -> Outcomes:
    """The requests of ``real`` that were sent, arriving when they were; ``asked`` as for :meth:`Sent.of`."""
    return simulated_requests(Sent.of(real, asked).requests(), served)


def simulated_requests(requests: Sequence[Request], served: Served) -> Outcomes:
    """Simulate requests to the one worker, whatever models they name."""
    config = served.config
    scenario = Scenario(
        cluster=idle_cluster(served.gpu, config.tp * config.pp, per_node=config.tp * config.pp),
        actions=(Deploy(at_s=0.0, name="m", model="m"),),
        outstanding_per_slot=2 if served.behind_gateway else _ANY_NUMBER,
        most_waiting=max(1, len(requests)),
        overhead_s=served.overhead_s,
        token_times=config.pp == 1,
        prefix_cache=served.prefix_cache,
    )
    return simulate(
        [replace(r, model="m") for r in requests], scenario, Policies(deployer=_Fixed(served))
    ).outcomes


class _Fixed:
    """The one worker, as it was launched."""

    name = "as launched"

    def __init__(self, served: Served) -> None:
        self._served = served

    def __call__(self, model: str, snapshot: ClusterSnapshot) -> Deployed | NotDeployed:
        served, tp = self._served, self._served.config.tp
        split = even_split(served.num_layers, served.config.pp)
        stages = tuple(
            StagePlacement(
                node_id=snapshot.gpus[0].node_id,
                device_ids=tuple(gpu.device_id for gpu in snapshot.gpus[i * tp : (i + 1) * tp]),
                first_layer=sum(split[:i]),
                num_layers=layers,
                bytes_per_gpu=1,
            )
            for i, layers in enumerate(split)
        )
        return Deployed(placement=Placement(stages), steps=served.steps(), what=str(served.config))


def compare(real: Outcomes, models: Mapping[str, Outcomes]) -> Comparison:
    """All of the same requests in the same order, as :func:`simulated` gives them; ``models`` by their source.

    Raises:
        BadInputError: they are not of the same requests, or none completed on both sides.
    """
    sent = real.select(~np.isnan(real.sent_s))
    done = sent.select(sent.completed)
    span_s = float(np.ptp(sent.sent_s))
    return Comparison(
        requests=len(real),
        completed=len(done),
        offered_requests_per_s=(len(sent) - 1) / span_s if span_s else 0.0,
        lateness_p99_s=float(np.percentile(sent.lateness_s, 99)),
        mean_running=float(done.e2e_from_send_s.sum()) / span_s if span_s else 0.0,
        predictions=tuple(_prediction(source, sent, model) for source, model in models.items()),
    )


def _prediction(source: str, sent: Outcomes, model: Outcomes) -> Prediction:
    if len(sent) != len(model) or (sent.asked_output_tokens != model.asked_output_tokens).any():
        raise BadInputError(
            f"{len(sent)} requests that were sent and {len(model)} that were simulated are not alike"
        )
    both = sent.completed & model.completed
    if not both.any():
        raise BadInputError("no request completed on both sides; there is nothing to compare")
    a, b = sent.select(both), model.select(both)
    metrics = [
        _metric("TTFT", a.ttft_from_send_s, b.ttft_from_send_s),
        _metric("TPOT", a.tpot_s, b.tpot_s),
        _metric("E2E", a.e2e_from_send_s, b.e2e_from_send_s),
    ]
    gaps = [token_gaps_s(one) for one in (a, b) if one.num_gaps is not None]
    if len(gaps) == 2 and all(map(len, gaps)):
        metrics.insert(
            1, replace(_percentiles("ITL", *gaps), median_request_error=metrics[1].median_request_error)
        )
    return Prediction(source=source, completed=int(model.completed.sum()), metrics=tuple(metrics))


def token_gaps_s(outcomes: Outcomes) -> Floats:
    """Return the seconds from each token to the next, pooled over the requests: ITL.

    A client sees pieces, and a piece may hold several tokens: those that arrive together have gaps of 0, on either
    side, so that each answer has one gap less than tokens and their sum is its E2E less its TTFT.

    Raises:
        BadInputError: gaps were not recorded.
    """
    if outcomes.num_gaps is None:
        raise BadInputError("no gaps between tokens were recorded of these requests")
    together = np.maximum(outcomes.output_tokens - 1 - outcomes.num_gaps, 0)
    return np.concatenate([outcomes.gaps_s.astype(np.float64), np.zeros(int(together.sum()))])


def relative_error(simulated_s: float, real_s: float) -> float:
    """Return simulated over real, less 1; a real gap of 0 counts as a nanosecond, so that the error is finite."""
    return simulated_s / max(real_s, _NO_GAP_S) - 1 if simulated_s != real_s else 0.0


def _metric(name: str, real_s: Floats, simulated_s: Floats) -> Metric:
    known = ~(np.isnan(real_s) | np.isnan(simulated_s))
    return _percentiles(name, real_s[known], simulated_s[known])


def _percentiles(name: str, real_s: Floats, simulated_s: Floats) -> Metric:
    """Return both sides at ``PERCENTS``; of as many values, in pairs, also the median of their ratios."""
    a, b = (tuple(float(v) for v in np.percentile(values, PERCENTS)) for values in (real_s, simulated_s))
    return Metric(
        name=name,
        real_s=a,
        simulated_s=b,
        errors=tuple(relative_error(y, x) for x, y in zip(a, b, strict=True)),
        median_request_error=(
            float(np.median(simulated_s / real_s)) - 1 if len(real_s) == len(simulated_s) and real_s.all() else 0.0
        ),
        real_curve=curve(real_s),
        simulated_curve=curve(simulated_s),
    )


def paced(requests: Sequence[Request], requests_per_s: float) -> list[Request]:
    """Return the same pattern, stretched to so many requests a second; 0 s is the first one's time."""
    first_s, span_s = requests[0].arrival_s, requests[-1].arrival_s - requests[0].arrival_s
    scale = (len(requests) - 1) / requests_per_s / span_s if span_s else 0.0
    return [replace(request, arrival_s=(request.arrival_s - first_s) * scale) for request in requests]


def saturated_rate(outcomes: Outcomes, slots: int) -> float:
    """Return the requests per second of a burst that arrived at once, while every slot had work.

    Counted until as many are left as there are slots.

    Raises:
        BadInputError: the burst was no longer than that.
    """
    ends_s = np.sort(outcomes.last_token_s[outcomes.completed])
    count = len(ends_s) - slots
    if count < 1:
        raise BadInputError(f"{len(ends_s)} requests completed of a burst for {slots} slots; send more")
    return count / float(ends_s[count - 1] - outcomes.sent_s[0])
