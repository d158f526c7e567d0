"""Refusals of loads that go on: vLLM logs none of them, and all else."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.daemon.variant_kernels import variant_module

refusals = variant_module("refusals")
OF_A_WORKER = "Worker failed with error '{}', please check the stack trace above for the root cause"
REFUSED = refusals.StillReadError("adapter", "a")


@pytest.fixture(params=refusals.LOGGERS)
def records(request: pytest.FixtureRequest) -> Iterator[tuple[logging.Logger, list[logging.LogRecord]]]:
    """Return a logger of vLLM after its refusals were hidden, and what it logs."""
    found = list[logging.LogRecord]()
    logger, handler = logging.getLogger(request.param), logging.Handler()
    handler.emit = found.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    before = list(logger.filters)
    refusals.hide_refusals()
    refusals.hide_refusals()
    yield logger, found
    logger.removeHandler(handler)
    for one in set(logger.filters) - set(before):
        logger.removeFilter(one)


def log(logger: logging.Logger, error: Exception) -> None:
    try:
        raise error
    except Exception:
        logger.exception("Invocation of %s method failed", "add_lora")


@pytest.mark.parametrize("error", [REFUSED, RuntimeError(OF_A_WORKER.format(REFUSED))])
def test_a_refusal_is_not_logged(
    records: tuple[logging.Logger, list[logging.LogRecord]], error: Exception
) -> None:
    logger, found = records
    log(logger, error)
    assert found == []


@pytest.mark.parametrize(
    "error",
    [
        ValueError(str(REFUSED)),  # vLLM's own, of a name that says so
        RuntimeError(str(REFUSED)),
        RuntimeError(f"no rank answers: {OF_A_WORKER.format(REFUSED)}"),
        ValueError(OF_A_WORKER.format(REFUSED)),
        RuntimeError(OF_A_WORKER.format("CUDA out of memory")),
        RuntimeError(OF_A_WORKER.format(f"No adapter found for {REFUSED}")),
        RuntimeError(OF_A_WORKER.format(f"{REFUSED}: no such file")),
        RuntimeError(""),
    ],
)
def test_every_error_is_logged(records: tuple[logging.Logger, list[logging.LogRecord]], error: Exception) -> None:
    logger, found = records
    log(logger, error)
    assert [one.exc_info[1] for one in found if one.exc_info] == [error]


def test_what_has_no_error_is_logged(records: tuple[logging.Logger, list[logging.LogRecord]]) -> None:
    logger, found = records
    logger.error("adapter %s", REFUSED)
    logger.exception("outside of any")
    assert len(found) == 2
