"""Outcomes of all requests of a run, replayed or simulated: one array per fact, one row per request.

Times are seconds on the run's clock, 0 at its start; the time of an event that never happened is NaN. A simulation
sends each request when it is scheduled; a replay may be late, and its outcomes say by how much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from fingerprint.errors import BadInputError

__all__ = ["Failure", "Floats", "Integers", "Outcomes"]

Floats = NDArray[np.floating]
Integers = NDArray[np.integer]


class Failure(IntEnum):
    """Reason for which a request has no complete answer. The number is what ``Outcomes.failure`` holds."""

    NONE = 0
    REFUSED_BY_CLIENT = 1  # more in flight than allowed; never sent, never delayed
    NO_CONNECTION = 2
    TIMEOUT = 3
    RATE_LIMITED = 4  # 429
    BAD_REQUEST = 5  # another 4xx
    SERVER_ERROR = 6  # 5xx
    CONNECTION_LOST = 7  # before the answer was complete
    MALFORMED = 8  # not HTTP, not SSE, not JSON, or a line without an end
    ERROR_FRAME = 9  # the server ended the stream with an error of its own
    NO_TOKENS = 10  # complete, and empty
    INTERRUPTED = 11  # the run was ended while it was in flight
    NOT_SERVED = 12  # no deployment was there to take it (simulation)
    TOO_LATE = 13  # it could not keep its SLO any more, and was refused for it

    @property
    def words(self) -> str:
        return self.name.lower().replace("_", " ")


def _no_floats() -> Floats:
    return np.zeros(0, np.float32)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcomes:
    """Columns of ``n`` requests in the order of their scheduled sends.

    Raises:
        BadInputError: columns of different lengths.
    """

    deployments: tuple[str, ...]
    deployment: Integers  # index into ``deployments``
    arrival_s: Floats  # in the trace's own time
    scheduled_s: Floats  # the trace's time at the run's rate: when it should be sent
    sent_s: Floats  # when it was; NaN: never
    first_token_s: Floats
    last_token_s: Floats
    asked_input_tokens: Integers  # by the trace
    asked_output_tokens: Integers
    input_tokens: Integers  # as the server counts them; 0: it did not say
    output_tokens: Integers  # served
    failure: Integers  # of ``Failure``
    # Gaps between one piece of an answer and the next, of all requests in their order; empty: not recorded.
    gaps_s: Floats = field(default_factory=_no_floats)
    num_gaps: Integers | None = None  # of each request; None: not recorded

    def __post_init__(self) -> None:
        sizes = {f.name: getattr(self, f.name).shape[0] for f in fields(self) if f.name in _COLUMNS}
        if len(set(sizes.values())) > 1:
            raise BadInputError(f"the columns of outcomes differ in length: {sizes}")
        if self.num_gaps is not None and (
            self.num_gaps.shape[0] != len(self) or int(self.num_gaps.sum()) != self.gaps_s.shape[0]
        ):
            raise BadInputError("num_gaps does not describe gaps_s")

    def __len__(self) -> int:
        return int(self.scheduled_s.shape[0])

    @property
    def completed(self) -> NDArray[np.bool_]:
        return np.asarray(self.failure == Failure.NONE)

    @property
    def lateness_s(self) -> Floats:
        """Delay of each send behind its schedule; NaN for requests that were not sent."""
        return self.sent_s - self.scheduled_s

    @property
    def ttft_s(self) -> Floats:
        """From the scheduled send, so that a late sender cannot hide a wait (coordinated omission)."""
        return self.first_token_s - self.scheduled_s

    @property
    def ttft_from_send_s(self) -> Floats:
        return self.first_token_s - self.sent_s

    @property
    def e2e_s(self) -> Floats:
        """From the scheduled send to the last token."""
        return self.last_token_s - self.scheduled_s

    @property
    def e2e_from_send_s(self) -> Floats:
        return self.last_token_s - self.sent_s

    @property
    def tpot_s(self) -> Floats:
        """Mean time per output token after the first; NaN for answers of one token."""
        after_first = np.where(self.output_tokens > 1, self.output_tokens - 1, np.nan)
        return np.asarray((self.last_token_s - self.first_token_s) / after_first)

    def select(self, rows: NDArray[np.bool_]) -> Outcomes:
        """Return the requests where ``rows`` is true."""
        columns = {name: getattr(self, name)[rows] for name in _COLUMNS}
        gaps_s, num_gaps = self.gaps_s, self.num_gaps
        if num_gaps is not None:
            gaps_s, num_gaps = gaps_s[np.repeat(rows, num_gaps)], num_gaps[rows]
        return Outcomes(deployments=self.deployments, gaps_s=gaps_s, num_gaps=num_gaps, **columns)

    def by_deployment(self) -> Sequence[tuple[str, Outcomes]]:
        """Return the requests of each deployment that had any."""
        parts = [(name, self.select(self.deployment == i)) for i, name in enumerate(self.deployments)]
        return [(name, part) for name, part in parts if len(part)]


_COLUMNS = tuple(f.name for f in fields(Outcomes) if f.name not in {"deployments", "gaps_s", "num_gaps"})
