"""Kill -9 of a worker in the midst of loads of variants, with ``--reject-late``: real processes, HTTP."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from fingerprint.codec import from_json
from iserve.demo import demo_adapter_path
from iserve.route_table import RouteTable
from tests.fork_server import HELD_LOADS, HOLD_LOADS
from tests.iserve.test_e2e_served_variants import ASKED, NAME
from tests.waiting import PATIENCE_S

VARIANTS = ("capitals", "shout")
WORK = ("--input-tokens", 64, "--output-tokens", 64, "--batch", 8, "--engine", "torch", "--variants", 2)


@pytest.fixture(scope="module")
def serving(shared_home: Any) -> Any:
    """A deployment that knows what a load takes, and rejects requests that are ten minutes late."""
    shared_home.json("deploy", "--name", NAME, *WORK, "--slo", "e2e=600", "--reject-late")
    table = from_json((shared_home.home / "run" / "routes.json").read_bytes(), RouteTable)
    (admission,) = [route.admission for route in table.routes]
    assert admission is not None
    assert admission.service.one_load is not None
    return shared_home


def answer(installation: Any, model: str) -> str:
    question, _ = ASKED[model]
    found = installation.openai().chat.completions.create(
        model=model, messages=[{"role": "user", "content": question}], temperature=0
    )
    return str(found.choices[0].message.content)


def answer_or_error(installation: Any, model: str) -> str | tuple[int, str | None]:
    """Return what the model said, or the status and code of the gateway's error."""
    try:
        return answer(installation, model)
    except openai.APIStatusError as error:
        return error.status_code, error.code


def gauge(installation: Any, name: str) -> int:
    with urllib.request.urlopen(f"{installation.record('gateway').url}/metrics", timeout=PATIENCE_S) as page:
        text = page.read().decode()
    found = re.search(rf'^iserve_gateway_{name}{{deployment="{NAME}"}} (\S+)$', text, re.MULTILINE)
    return 0 if found is None else int(float(found[1]))


def test_a_worker_killed_within_loads_leaves_none_that_is_waited_for(
    serving: Any, kill: Callable[[int], None], until: Callable[..., Any]
) -> None:
    """The worker makes one load ahead of need, and one for a request; several requests wait for each.

    All are answered or refused, no load is pending afterwards, and the next worker has all variants.
    """
    hold, held = serving.home / HOLD_LOADS, serving.home / HELD_LOADS
    hold.touch()
    for name in VARIANTS:
        serving.run("variant", "add", name, "--base", NAME, demo_adapter_path(name))
    (before,) = serving.worker_pids().values()
    restarts = serving.deployment(NAME)["restarts"]
    with ThreadPoolExecutor() as clients:
        asked = {name: [clients.submit(answer_or_error, serving, name) for _ in range(3)] for name in VARIANTS}
        until(lambda: held.exists() and len(held.read_text().split()) >= 2, "the worker makes both loads")
        until(lambda: gauge(serving, "outstanding_requests") == 6, "all requests wait for them")
        assert gauge(serving, "pending_loads") == 2
        assert answer(serving, NAME) == ASKED[NAME][1], "the base waits for no load"
        kill(before)
        hold.unlink()
        for name, futures in asked.items():
            for future in futures:
                said = future.result(PATIENCE_S)
                assert said in (ASKED[name][1], (503, "no_ready_worker"), (503, "worker_lost"))
    until(lambda: serving.deployment(NAME)["restarts"] == restarts + 1, "the worker is started again")
    until(lambda: gauge(serving, "ready_workers") == 1, "requests go to the new one")
    until(lambda: gauge(serving, "pending_loads") == 0, "no load is pending")
    expected = {model: said for model, (_, said) in ASKED.items()}
    until(lambda: {model: answer_or_error(serving, model) for model in ASKED} == expected, "all are served")
    (after,) = serving.worker_pids().values()
    assert after != before
    assert gauge(serving, "pending_loads") == 0
    assert gauge(serving, "late_rejections_total") == 0
