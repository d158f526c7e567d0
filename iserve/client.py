"""The REST API as the command line uses it; starts the embedded controller when none runs."""

from __future__ import annotations

import contextlib
import copy
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote, urlencode

from daemon.home import make_home
from daemon.http_exchange import EXCHANGE_ERRORS, exchange
from daemon.json_http import JsonHttp
from daemon.log_rotation import why_silent
from daemon.process import ProcessRecord, is_alive, read_record, spawn_detached
from daemon.procfs import start_time_ticks
from fingerprint.codec import to_json
from fingerprint.errors import (
    BusyError,
    ConflictError,
    NoAnswerError,
    StateUnavailableError,
    UnavailableError,
)
from iserve.settings import Settings

__all__ = [
    "ControllerClient",
    "check_running_settings",
    "connect",
    "controller_record",
    "post_once",
    "post_when_free",
]

T = TypeVar("T")

_POST_PAUSES_S = (0.2, 1.0, 3.0, 0.0)
_FREE_PAUSES_S = (0.2, 10.0)  # the first, and the longest, while the controller takes no further request
_REFUSED_S = 3.0  # without a listener: nothing there is being started
_RESET_S = 30.0  # without an answer from a listener that ends connections


class ControllerClient:
    """A controller at ``url``. One connection per call; nothing to close.

    Every method raises what the controller raised, or UnavailableError when it is away.
    """

    def __init__(self, url: str, token: str, *, timeout_s: float = 60.0) -> None:
        hint = "; `iserve status` looks, `iserve up` starts it"
        self._http = JsonHttp(url, token, server="the controller", hint=hint)
        self._timeout_s = timeout_s

    def patient(self, timeout_s: float) -> ControllerClient:
        """Return a client of the same controller that waits as long for each answer."""
        found = copy.copy(self)
        found._timeout_s = timeout_s
        return found

    def get(self, path: str, kind: type[T], **query: object) -> T:
        return self._http.ask("GET", _target(path, query), kind, timeout_s=self._timeout_s)

    def text(self, path: str, **query: object) -> str:
        return self._http.request("GET", _target(path, query), timeout_s=self._timeout_s).decode(errors="replace")

    def post(
        self, path: str, body: object, kind: type[T], *, idempotency_key: str | None = None, **query: object
    ) -> T:
        headers = {} if idempotency_key is None else {"Idempotency-Key": idempotency_key}
        return self._http.ask(
            "POST", _target(path, query), kind, body=to_json(body), headers=headers, timeout_s=self._timeout_s
        )

    def patch(self, path: str, body: object, kind: type[T]) -> T:
        return self._http.ask("PATCH", _target(path, {}), kind, body=to_json(body), timeout_s=self._timeout_s)

    def delete(self, path: str, **query: object) -> bool:
        """Return whether it is done: an answer with a body says what is not yet."""
        return not self._http.request("DELETE", _target(path, query), timeout_s=self._timeout_s)


def post_once(
    connect: Callable[[], ControllerClient], path: str, body: object, kind: type[T], key: str, **query: object
) -> tuple[ControllerClient, T]:
    """Post ``body`` until the controller answers, and return the client that was answered with the answer.

    A request whose connection was lost may have been carried out, or not; repeated under its key it is carried out
    once. The controller that answers may be a new one. A refusal is an answer, one for lack of the hub as well.

    Args:
        connect: begins anew each time.
        key: by which the controller knows the second from the first.

    Raises:
        NoAnswerError: still no answer; the message says how to ask again.
        IserveError: what the controller answered with.
    """
    last: UnavailableError | None = None
    for pause_s in _POST_PAUSES_S:
        try:
            client = connect()
        except UnavailableError as error:
            if last is None:  # nothing was asked yet
                raise
            last = error
        else:
            try:
                return client, client.post(path, body, kind, idempotency_key=key, **query)
            except (NoAnswerError, StateUnavailableError) as error:
                last = error
        time.sleep(pause_s)
    raise NoAnswerError(
        f"{last}; whether it was accepted is not known: the same command with --idempotency-key {key} asks again "
        "and does nothing twice"
    ) from last


def post_when_free(client: ControllerClient, path: str, body: object, kind: type[T], *, patience_s: float) -> T:
    """Post ``body``, again and again while the controller has no room for it, and return its answer.

    For requests that change nothing when they are repeated: one whose connection was lost may have been carried
    out. Pauses double, and differ between clients that were refused together.

    Args:
        patience_s: longest time for which a controller that says that it is busy is asked.

    Raises:
        BusyError: it still is.
        NoAnswerError: no answer, for 3 s where nothing listens and 30 s where connections end without one.
        IserveError: what the controller answered with.
    """
    began_s = time.monotonic()
    failed_s: float | None = None
    pause_s, longest_s = _FREE_PAUSES_S
    while True:
        try:
            return client.post(path, body, kind)
        except BusyError:
            failed_s = None
            if time.monotonic() + pause_s > began_s + patience_s:
                raise
        except NoAnswerError as error:
            if not isinstance(error.__cause__, ConnectionError):  # which a timeout is not
                raise
            is_refused, now_s = isinstance(error.__cause__, ConnectionRefusedError), time.monotonic()
            if failed_s is None:  # the first in a row
                failed_s, pause_s = now_s, _FREE_PAUSES_S[0]
            if now_s + pause_s > failed_s + (_REFUSED_S if is_refused else _RESET_S):
                raise
        time.sleep(pause_s * random.uniform(0.5, 1.0))
        pause_s = min(2 * pause_s, longest_s)


def _target(path: str, query: dict[str, object]) -> str:
    given = {name: value for name, value in query.items() if value is not None}
    return quote(path) + (f"?{urlencode(given)}" if given else "")


def controller_record(settings: Settings) -> ProcessRecord | None:
    """Return the record of the living controller of this home; None when none lives."""
    record = read_record(settings.run_folder / "controller.json")
    return record if is_alive(record) else None


def check_running_settings(settings: Settings) -> None:
    """Refuse settings that differ from those of the controller and gateway that run: they hold until both end.

    A record of an older release says nothing of them.

    Raises:
        ConflictError: a setting differs.
    """
    wanted, differing = settings.recorded(), dict[str, str]()
    for name in ("gateway", "controller"):
        record = read_record(settings.run_folder / f"{name}.json")
        if record is None or not is_alive(record):
            continue
        for variable, running in record.settings.items():
            if variable in wanted and wanted[variable] != running:
                differing[variable] = f"{variable} is {running or 'unset'}, not {wanted[variable] or 'unset'}"
    if differing:
        raise ConflictError(
            f"this home runs with other settings: {'; '.join(differing.values())}; "
            "run `iserve down`, then `iserve up`"
        )


def connect(settings: Settings, *, start: bool = True, timeout_s: float = 60.0) -> ControllerClient:
    """Return a client of this home's controller, which is started, detached, when there is none.

    One that is just starting, for another command say, is waited for.

    Raises:
        UnavailableError: there is none and ``start`` is False, or it does not start (the reason from its log is
            quoted).
    """
    if not start and controller_record(settings) is None:
        raise UnavailableError(f"no controller runs on {settings.home}; `iserve up` starts one")
    log_path = settings.log_folder / "controller.log"
    pid, log_start = 0, 0
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        started = pid == 0 or _runs(pid)  # looked at before the record, which is there before it ends
        record = controller_record(settings)
        if record is not None and _is_ready(record):
            return ControllerClient(record.url, record.token)
        if record is None and pid == 0:
            pid, log_start = _spawn_controller(settings, log_path)
        elif record is None and not started:
            raise UnavailableError(_reason(log_path, log_start))
        time.sleep(0.05)
    raise UnavailableError(f"the controller is not ready after {timeout_s:.0f} s (log: {log_path})")


def _spawn_controller(settings: Settings, log_path: Path) -> tuple[int, int]:
    """Start a controller; return its process id, and where in the log it begins."""
    try:
        make_home(settings.home, log_path.parent.name)
        log_start = log_path.stat().st_size if log_path.exists() else 0
    except OSError as error:
        raise UnavailableError(
            f"the home {settings.home} cannot be written ({error.strerror}); mend it or set ISERVE_HOME"
        ) from error
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ISERVE_")}
    command = [sys.executable, "-m", "iserve.controller"]
    return spawn_detached(command, log_path, environment | settings.environment()), log_start


def _runs(pid: int) -> bool:
    return start_time_ticks(pid) is not None


def _is_ready(record: ProcessRecord) -> bool:
    try:
        return exchange(record.url, "GET", "/readyz", timeout_s=5, max_bytes=1)[0] == 200
    except EXCHANGE_ERRORS:
        return False


def _reason(log_path: Path, start: int) -> str:
    """Return the last line of a controller that did not start, without the ``iserve: `` of its line."""
    with contextlib.suppress(OSError), log_path.open("rb") as file:
        file.seek(start)
        lines = [line.strip() for line in file.read(1 << 20).decode(errors="replace").splitlines()]
        said = [line for line in lines if line]
        if said:
            return said[-1].removeprefix("iserve: ")
    return f"the controller did not start; {why_silent(log_path) or f'it said nothing (log: {log_path})'}"
