"""Times of single tokens: every step of a worker, and the steps in which a sequence got its tokens.

A sequence gets a token at the end of each step from the one that ends its prompt to its last. One that is
preempted gets the next at the end of the step that has computed all of its tokens again, so that this gap is long.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, MutableMapping

__all__ = ["TokenTimes"]


class TokenTimes:
    """Writes the times of the tokens of one worker's requests.

    Args:
        token_s: by row, where they go once a sequence leaves.
    """

    __slots__ = ("_ends_s", "_since", "_token_s")

    def __init__(self, token_s: MutableMapping[int, array[float]]) -> None:
        self._token_s = token_s
        self._ends_s = array("d")  # of all steps
        self._since: dict[int, int] = {}  # row -> step of its first token that is not written yet

    def ran(self, ends_s: Iterable[float]) -> None:
        """Note the steps of a run that has ended."""
        self._ends_s.extend(ends_s)

    def answers(self, row: int) -> None:
        """Note that a sequence had its prompt's end, and so a token, in the latest step."""
        self._since[row] = len(self._ends_s) - 1

    def leaves(self, row: int) -> None:
        """Write the tokens of a sequence up to the latest step; it has none after it."""
        since = self._since.pop(row, None)
        if since is not None:
            self._token_s[row].extend(self._ends_s[since:])
