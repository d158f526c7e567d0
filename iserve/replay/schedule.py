"""Schedule of a run: which request is sent when, and to which deployment, checked before the run begins."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from fingerprint.errors import BadInputError, ConfigError, NotFoundError
from traces.outcomes import Floats, Integers
from traces.request import Request

__all__ = ["MAX_REQUESTS", "Schedule", "ScheduleOptions", "make_schedule"]

MAX_REQUESTS = 2_000_000  # what one run may plan; 100 requests/s for more than five hours


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleOptions:
    """Options of playing a trace.

    Raises:
        ConfigError: a value that cannot be used.
    """

    rate_factor: float = 1.0  # 2: twice the trace's request rate, by dividing its times
    duration_s: float | None = None  # of the run: what is scheduled later is left out
    limit: int | None = None  # the first so many requests
    seed: int = 0
    ignore_models: bool = False  # spread over the deployments, whatever models the trace names

    def __post_init__(self) -> None:
        if not 0 < self.rate_factor < math.inf:
            raise ConfigError(f"the rate factor must be above 0 and finite, got {self.rate_factor}")
        if self.duration_s is not None and not 0 < self.duration_s < math.inf:
            raise ConfigError(f"the duration must be above 0 s and finite, got {self.duration_s}")
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"the limit must be at least 1 request, got {self.limit}")
        if self.seed < 0:
            raise ConfigError(f"the seed must be at least 0, got {self.seed}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Columns of the requests to send, in order."""

    deployments: tuple[str, ...]
    deployment: Integers  # index into ``deployments``
    arrival_s: Floats  # in the trace
    scheduled_s: Floats  # in the run
    input_tokens: Integers
    output_tokens: Integers
    prefix_blocks: Sequence[tuple[int, ...]]  # of every request, empty where it has none; or none at all

    def __len__(self) -> int:
        return int(self.scheduled_s.shape[0])


def make_schedule(requests: Iterable[Request], deployments: Sequence[str], options: ScheduleOptions) -> Schedule:
    """Plan a run. A row that names no model goes to a deployment drawn by the seed.

    Raises:
        BadInputError: nothing to send, more than a run may hold, or times that go back.
        NotFoundError: a row names a model that is not among ``deployments``.
        ConfigError: no deployment, or one named twice.
    """
    index = {name: number for number, name in enumerate(deployments)}
    if not index or len(index) < len(deployments):
        raise ConfigError(f"name one or more different deployments, got {', '.join(deployments) or 'none'}")
    draw = random.Random(options.seed)
    whom, inputs, outputs = array("i"), array("q"), array("q")
    arrivals = array("d")
    blocks: list[tuple[int, ...]] = []
    last_s, seen = -math.inf, 0
    for row, request in enumerate(requests, start=1):
        seen = row
        if not request.arrival_s >= last_s:
            raise BadInputError(
                f"request {row} of the trace arrives at {request.arrival_s} s, after one at {last_s} s"
            )
        last_s = request.arrival_s
        late = options.duration_s is not None and last_s / options.rate_factor >= options.duration_s
        if late or (options.limit is not None and row > options.limit):
            break
        if row > MAX_REQUESTS:
            raise BadInputError(f"more than {MAX_REQUESTS} requests to send; choose a --duration or a --limit")
        if request.model and not options.ignore_models:
            whom.append(_whose(request, row, index))
        else:
            whom.append(draw.randrange(len(deployments)))
        arrivals.append(request.arrival_s)
        inputs.append(request.input_tokens)
        outputs.append(request.output_tokens)
        blocks.append(request.prefix_blocks)
    if not arrivals:
        raise BadInputError(_nothing(seen, last_s, options))
    arrival_s = np.frombuffer(arrivals, np.float64)
    return Schedule(
        deployments=tuple(deployments),
        deployment=np.frombuffer(whom, np.int32),
        arrival_s=arrival_s,
        scheduled_s=arrival_s / options.rate_factor,
        input_tokens=np.frombuffer(inputs, np.int64),
        output_tokens=np.frombuffer(outputs, np.int64),
        prefix_blocks=blocks if any(blocks) else (),
    )


def _whose(request: Request, row: int, index: dict[str, int]) -> int:
    found = index.get(request.model)
    if found is None:
        raise NotFoundError(
            f"request {row} of the trace names {request.model[:100]!r}, which is not among the deployments "
            f"({', '.join(index)}); name it with --deployment, or spread all requests with --ignore-models"
        )
    return found


def _nothing(seen: int, first_s: float, options: ScheduleOptions) -> str:
    if not seen:
        return "the trace holds no requests"
    return (
        f"nothing to send within {options.duration_s:g} s: the trace's first request arrives at {first_s:g} s, "
        f"sent at {first_s / options.rate_factor:g} s; choose a longer --duration"
    )
