"""Work in the background, asked for by its job id."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from fingerprint.errors import EngineError, NotFoundError, UnavailableError
from iserve.api_documents import ProfileJobDocument, ProgressDocument
from iserve.controller.jobs import Jobs
from tests.golden_words import Golden
from tests.waiting import PATIENCE_S

Show = Callable[[ProfileJobDocument], None]
HALF = ProgressDocument(step="measuring", done=1, total=2, elapsed_s=3.0)


def job(job_id: str = "j") -> ProfileJobDocument:
    return ProfileJobDocument(job_id=job_id, model="m", status="running", error=None, progress=None)


@pytest.fixture
def jobs() -> Iterator[Jobs[ProfileJobDocument]]:
    made: Jobs[ProfileJobDocument] = Jobs("profile")
    yield made
    made.close()


def ended(jobs: Jobs[ProfileJobDocument], work: Callable[[Show], ProfileJobDocument]) -> ProfileJobDocument:
    """The job of ``work`` once it is over: the next one begins only then."""
    over = threading.Event()
    assert jobs.start(job(), work) == job()

    def next_one(_: Show) -> ProfileJobDocument:
        over.set()
        return job("next")

    jobs.start(job("next"), next_one)
    assert over.wait(PATIENCE_S)
    return jobs.get("j")


def test_what_the_work_returns_is_the_job_that_is_done(jobs: Jobs[ProfileJobDocument]) -> None:
    def work(show: Show) -> ProfileJobDocument:
        show(replace(job(), progress=HALF))
        assert jobs.get("j").progress == HALF
        return replace(job(), engine="vllm")

    assert ended(jobs, work) == replace(job(), status="done", engine="vllm")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        pytest.param(EngineError("the engine died"), "the engine died", id="expected"),
        pytest.param(KeyError("secret"), "internal error: KeyError", id="a-bug"),
    ],
)
def test_a_failure_is_told_with_what_was_known_by_then(
    jobs: Jobs[ProfileJobDocument], error: Exception, told: str
) -> None:
    def work(show: Show) -> ProfileJobDocument:
        show(replace(job(), engine="vllm", progress=HALF))
        raise error

    assert ended(jobs, work) == replace(job(), status="failed", engine="vllm", error=told)


def test_too_many_at_once_are_refused_and_unknown_ones_named(
    jobs: Jobs[ProfileJobDocument], golden: Golden
) -> None:
    hold = threading.Event()

    def held(_: Show) -> ProfileJobDocument:
        hold.wait(PATIENCE_S)
        return job()

    try:
        for number in range(20):
            jobs.start(job(f"j{number}"), held)
        with golden.raises("rest-errors", UnavailableError):
            jobs.start(job("more"), lambda _show: job())
    finally:
        hold.set()
    with golden.raises("rest-errors", NotFoundError):
        jobs.get("more")
