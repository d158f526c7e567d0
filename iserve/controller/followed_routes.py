"""Changes of the routes that the gateway has in force: a change is answered once the gateway follows it.

The reconciler writes the route table several times a second and the gateway looks for a new one as often. A caller
that was answered before both would ask for a name that the gateway does not know yet.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

__all__ = ["FOLLOW_S", "FollowedRoutes"]

log = logging.getLogger(__name__)

FOLLOW_S = 10.0  # a gateway that is started again reads the routes within it
_LOOK_S = 0.05


@dataclass(slots=True, eq=False)
class _Waiting:
    ticket: int
    deadline_s: float
    answer: Future[bool] = field(default_factory=Future)


class FollowedRoutes:
    """Waits for the gateway to have routes that were read after a change. Thread-safe.

    Args:
        version_in_force: of the gateway's table; None: the gateway is away.
        patience_s: after which a caller is answered that the gateway does not follow.
    """

    def __init__(self, version_in_force: Callable[[], int | None], patience_s: float = FOLLOW_S) -> None:
        self._version_in_force, self._patience_s = version_in_force, patience_s
        self._changed = threading.Condition()
        self._waiting: list[_Waiting] = []
        self._newest = 0
        self._published = (-1, 0)  # the newest ticket that a table follows, and the version of that table
        self._thread: threading.Thread | None = None
        self._closing = False

    def follow(self) -> Future[bool]:
        """Return whether the gateway has what the state holds now, once it has or once patience ends."""
        with self._changed:
            self._newest += 1
            waiting = _Waiting(self._newest, time.monotonic() + self._patience_s)
            waiting.answer.set_running_or_notify_cancel()  # a caller that leaves does not cancel it
            if self._closing:
                waiting.answer.set_result(False)
                return waiting.answer
            self._waiting.append(waiting)
            if self._thread is None:
                self._thread = threading.Thread(target=self._look, name="followed-routes", daemon=True)
                self._thread.start()
            self._changed.notify()
        return waiting.answer

    def begin(self) -> int:
        """Return the ticket of a table whose content is read after this call."""
        with self._changed:
            return self._newest

    def publish(self, ticket: int, version: int) -> None:
        """Note that the table of ``begin``'s ticket is written; an unchanged one keeps its version."""
        with self._changed:
            self._published = (ticket, version)

    def close(self) -> None:
        """Answer all callers."""
        with self._changed:
            self._closing = True
            self._changed.notify()
            waiting, self._waiting = self._waiting, []
        for one in waiting:
            one.answer.set_result(False)

    def _look(self) -> None:
        while True:
            with self._changed:
                while not (self._closing or self._waiting):
                    self._changed.wait()
                if self._closing:
                    return
                ticket, version = self._published
                is_published = any(one.ticket <= ticket for one in self._waiting)
            try:
                in_force = self._version_in_force() if is_published else None
            except Exception:  # a thread that ends would leave all callers waiting
                log.exception("the version of the routes in force")
                in_force = None
            follows = in_force is not None and in_force >= version
            now_s, answered = time.monotonic(), []
            with self._changed:
                for one in self._waiting:
                    if (follows and one.ticket <= ticket) or now_s >= one.deadline_s:
                        answered.append(one)
                self._waiting = [one for one in self._waiting if one not in answered]
            for one in answered:
                one.answer.set_result(follows and one.ticket <= ticket)
            time.sleep(_LOOK_S)
