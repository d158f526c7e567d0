"""Background jobs, one after the other, each asked for by its id."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Generic, TypeVar

from fingerprint.errors import IserveError, NotFoundError, UnavailableError
from iserve.api_documents import ProfileJobDocument
from iserve.verify.documents import VerificationJobDocument

__all__ = ["Jobs"]

log = logging.getLogger(__name__)

_KEPT = 50
_MOST_WAITING = 20

Job = TypeVar("Job", ProfileJobDocument, VerificationJobDocument)


class Jobs(Generic[Job]):
    """Thread-safe. The last that were begun are remembered.

    Args:
        kind: of work, such as ``profile``.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=kind)
        self._lock = threading.Lock()
        self._jobs: dict[str, Job] = {}

    def start(self, job: Job, work: Callable[[Callable[[Job], None]], Job]) -> Job:
        """Have ``job`` done, and return it as it is now.

        Args:
            work: is given what shows a job's state while it goes on, and returns it as it is at its end; what it
                raises is the job's failure.

        Raises:
            UnavailableError: too many wait already.
        """
        with self._lock:
            waiting = sum(known.status == "running" for known in self._jobs.values())
        if waiting >= _MOST_WAITING:
            raise UnavailableError(f"{waiting} {self._kind} jobs run or wait already; try again later")
        self._put(job)
        self._pool.submit(self._run, job, work)
        return job

    def get(self, job_id: str) -> Job:
        """Return a job. Raises NotFoundError: there is none of that id, or it was long ago."""
        with self._lock:
            found = self._jobs.get(job_id)
        if found is None:
            raise NotFoundError(f"no {self._kind} job has the id {job_id[:80]!r}")
        return found

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _run(self, job: Job, work: Callable[[Callable[[Job], None]], Job]) -> None:
        last = job

        def show(now: Job) -> None:
            nonlocal last
            last = now
            self._put(now)

        try:
            done = work(show)
        except IserveError as error:
            self._put(replace(last, status="failed", progress=None, error=str(error)))
        except Exception as error:
            log.exception("%s of %s", self._kind, job.model)
            internal = f"internal error: {type(error).__name__}"
            self._put(replace(last, status="failed", progress=None, error=internal))
        else:
            self._put(replace(done, status="done", progress=None))

    def _put(self, job: Job) -> None:
        with self._lock:
            self._jobs.pop(job.job_id, None)
            self._jobs[job.job_id] = job
            while len(self._jobs) > _KEPT:
                self._jobs.pop(next(iter(self._jobs)))
