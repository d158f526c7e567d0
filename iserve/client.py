"""The REST API as the command line uses it; starts the embedded controller when none runs."""

from __future__ import annotations

import contextlib
import http.client
import os
import sys
import time
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from daemon.process import ProcessRecord, is_alive, read_record, spawn_detached
from fingerprint import errors
from fingerprint.codec import from_json, to_json
from fingerprint.errors import BadInputError, ConflictError, IserveError, UnavailableError
from iserve.settings import Settings

__all__ = ["ControllerClient", "connect", "controller_record", "start_controller"]

T = TypeVar("T")

_MAX_ANSWER_BYTES = 64 << 20


class _Problem(msgspec.Struct):
    error: str = "IserveError"
    message: str = ""


class ControllerClient:
    """A controller at ``url``. One connection per call; nothing to close.

    Every method raises what the controller raised, or UnavailableError when it is away.
    """

    def __init__(self, url: str, token: str, *, timeout_s: float = 60.0) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 0
        self._token, self._timeout_s = token, timeout_s

    def get(self, path: str, kind: type[T], **query: object) -> T:
        text = self._request("GET", path, None, query)
        return from_json(text, kind, what=f"the answer to GET {path}")

    def text(self, path: str, **query: object) -> str:
        return self._request("GET", path, None, query).decode(errors="replace")

    def post(self, path: str, body: object, kind: type[T]) -> T:
        return from_json(self._request("POST", path, to_json(body), {}), kind, what=f"the answer to POST {path}")

    def delete(self, path: str) -> bytes:
        return self._request("DELETE", path, None, {})

    def _request(self, method: str, path: str, body: bytes | None, query: dict[str, object]) -> bytes:
        given = {name: value for name, value in query.items() if value is not None}
        target = quote(path) + (f"?{urlencode(given)}" if given else "")
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        try:
            connection.request(method, target, body=body, headers=headers)
            response = connection.getresponse()
            answer = response.read(_MAX_ANSWER_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise UnavailableError(
                f"the controller at {self._host}:{self._port} does not answer ({error}); "
                "`iserve status` looks, `iserve up` starts it"
            ) from error
        finally:
            connection.close()
        if response.status >= 400:
            raise _problem(response.status, answer)
        return answer


def _problem(status: int, answer: bytes) -> IserveError:
    try:
        problem = msgspec.json.decode(answer, type=_Problem)
    except (msgspec.DecodeError, UnicodeDecodeError):
        problem = _Problem(message=f"the controller answered {status}")
    kind = getattr(errors, problem.error, None)
    if not (isinstance(kind, type) and issubclass(kind, IserveError)):
        kind = BadInputError if status < 500 else UnavailableError
    found: IserveError = kind(problem.message)
    return found


def controller_record(settings: Settings) -> ProcessRecord | None:
    """The record of the living controller of this home; None when none lives."""
    record = read_record(settings.run_folder / "controller.json")
    return record if is_alive(record) else None


def start_controller(settings: Settings, *, timeout_s: float = 60.0) -> ProcessRecord:
    """Start the embedded controller, detached, and wait until it is ready.

    Raises:
        UnavailableError: it did not come up; the reason from its log is quoted.
    """
    settings.log_folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    log_path = settings.log_folder / "controller.log"
    start = log_path.stat().st_size if log_path.exists() else 0
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ISERVE_")}
    pid = spawn_detached(
        [sys.executable, "-m", "iserve.controller"], log_path, environment | settings.environment()
    )
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        record = controller_record(settings)
        if record is not None and _is_ready(record):
            return record
        if record is None and not Path(f"/proc/{pid}").exists():
            break
        time.sleep(0.05)
    raise (
        ConflictError(_reason(log_path, start))
        if not controller_record(settings)
        else UnavailableError(f"the controller is not ready after {timeout_s:.0f} s (log: {log_path})")
    )


def connect(settings: Settings, *, start: bool = True) -> ControllerClient:
    """A client of this home's controller.

    Raises:
        UnavailableError: there is none and ``start`` is False, or it does not come up.
    """
    record = controller_record(settings)
    if record is None or not _is_ready(record):
        if not start:
            raise UnavailableError(f"no controller runs on {settings.home}; `iserve up` starts one")
        record = start_controller(settings)
    return ControllerClient(record.url, record.token)


def _is_ready(record: ProcessRecord) -> bool:
    parts = urlsplit(record.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 0, timeout=5)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _reason(log_path: Path, start: int) -> str:
    """What a controller that did not come up said last, without the ``iserve: `` of its line."""
    with contextlib.suppress(OSError), log_path.open("rb") as file:
        file.seek(start)
        lines = [line.strip() for line in file.read(1 << 20).decode(errors="replace").splitlines()]
        said = [line for line in lines if line]
        if said:
            return said[-1].removeprefix("iserve: ")
    return f"the controller did not come up and said nothing (log: {log_path})"
