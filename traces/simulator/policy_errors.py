"""A policy that raises is not the simulator's bug: it is caught where it was asked and named to the user."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from fingerprint.errors import IserveError

__all__ = ["PolicyFault", "ask"]

T = TypeVar("T")


class PolicyFault(Exception):
    """Error of a policy. Where the clock is known it becomes a ``PolicyError`` with the time."""

    def __init__(self, policy: str, did: str) -> None:
        super().__init__(policy, did)
        self.policy, self.did = policy, did


def ask(policy: str, decide: Callable[[], T]) -> T:
    """Return a policy's answer.

    Raises:
        PolicyFault: it raised.
    """
    try:
        return decide()
    except Exception as error:
        kind = "" if isinstance(error, IserveError) else f"{type(error).__name__}: "
        raise PolicyFault(policy, f"raised {kind}{error}") from error
