"""Every request that has arrived, one row each: what it asked and what became of it."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from traces.outcomes import Failure, Floats, Integers, Outcomes

__all__ = ["Requests"]

_NEVER = float("nan")


class Requests:
    """Columns that grow. Each row ends exactly once: with its last token, or with a failure."""

    __slots__ = (
        "arrival_s", "deployment", "failure", "first_s", "input_tokens", "last_s", "output_tokens",
        "prefix_blocks", "token_s",
    )  # fmt: skip

    def __init__(self, *, token_times: bool = False, prefix_cache: bool = False) -> None:
        # By row, of those that have begun to answer; None: not recorded.
        self.token_s: defaultdict[int, array[float]] | None = (
            defaultdict(lambda: array("d")) if token_times else None
        )
        self.prefix_blocks: list[tuple[int, ...]] | None = (
            [] if prefix_cache else None
        )  # None: no worker keeps any
        self.arrival_s = array("d")
        self.first_s = array("d")
        self.last_s = array("d")
        self.input_tokens = array("q")
        self.output_tokens = array("q")
        self.deployment = array("q")
        self.failure = array("b")

    def __len__(self) -> int:
        return len(self.arrival_s)

    def add(
        self,
        arrival_s: float,
        input_tokens: int,
        output_tokens: int,
        deployment: int,
        prefix_blocks: tuple[int, ...] = (),
    ) -> int:
        """Add a request and return its row."""
        if self.prefix_blocks is not None:
            self.prefix_blocks.append(prefix_blocks)
        self.arrival_s.append(arrival_s)
        self.first_s.append(_NEVER)
        self.last_s.append(_NEVER)
        self.input_tokens.append(input_tokens)
        self.output_tokens.append(output_tokens)
        self.deployment.append(deployment)
        self.failure.append(0)
        return len(self.failure) - 1

    def recent(self, since_s: float) -> tuple[npt.NDArray[np.int64], ...]:
        """Return copies of (deployment, input tokens, output tokens) of requests since ``since_s``."""
        first = bisect_left(self.arrival_s, since_s)
        columns = (self.deployment, self.input_tokens, self.output_tokens)
        return tuple(np.array(column[first:], np.int64) for column in columns)

    def fail(self, row: int, failure: Failure) -> None:
        assert not self.failure[row], "a request fails once"
        assert self.last_s[row] != self.last_s[row], "a request that was answered does not fail"
        self.failure[row] = failure

    def fail_unfinished(self, failure: Failure) -> None:
        """Fail whatever has not ended."""
        for row in range(len(self)):
            if not self.failure[row] and self.last_s[row] != self.last_s[row]:
                self.failure[row] = failure

    def outcomes(self, deployments: Sequence[str], overhead_s: float = 0.0) -> Outcomes:
        """Return outcomes as a replay would have recorded them: sent when scheduled.

        Where possible, views of the columns.

        Args:
            overhead_s: of each request, on its way there and back. It holds no GPU and is the same for all, so it
                delays what a client sees and changes nothing else.
        """
        arrival_s, last_s = np.frombuffer(self.arrival_s), np.frombuffer(self.last_s)
        input_tokens = np.frombuffer(self.input_tokens, np.int64)
        output_tokens = np.frombuffer(self.output_tokens, np.int64)
        gaps_s, num_gaps = self._gaps()
        return Outcomes(
            deployments=tuple(deployments),
            deployment=np.frombuffer(self.deployment, np.int64),
            arrival_s=arrival_s,
            scheduled_s=arrival_s,
            sent_s=arrival_s,
            first_token_s=np.frombuffer(self.first_s) + overhead_s,
            last_token_s=last_s + overhead_s,
            asked_input_tokens=input_tokens,
            asked_output_tokens=output_tokens,
            input_tokens=input_tokens,
            output_tokens=np.where(np.isnan(last_s), 0, output_tokens),
            failure=np.frombuffer(self.failure, np.int8),
            gaps_s=gaps_s,
            num_gaps=num_gaps,
        )

    def _gaps(self) -> tuple[Floats, Integers | None]:
        """Return the seconds from each token of an answer to the next, and how many of them each request has."""
        if self.token_s is None:
            return np.zeros(0), None
        found = [np.diff(self.token_s.get(row, ())) for row in range(len(self))]
        return np.concatenate(found or [np.zeros(0)]), np.array([len(gaps) for gaps in found], np.int64)
