"""A deployment that rejects late requests: the option's way from the command line to the gateway.

It is measured for a demo model that is asked for twice what it serves. Real processes, real HTTP.
"""

from __future__ import annotations

from typing import Any

import pytest

from fingerprint.codec import from_json
from iserve.route_table import RouteTable
from planner.intent import Slo
from tests.bench.refusing import batch_time_s, figures, measured_service, open_load, sent

pytestmark = pytest.mark.long

NAME = "prompt-one"
SLOTS, INPUT, OUTPUT = 2, 64, 48
WORK = (
    "--input-tokens",
    INPUT,
    "--output-tokens",
    OUTPUT,
    "--context",
    512,
    "--batch",
    SLOTS,
    "--engine",
    "torch",
)


def table(installation: Any) -> RouteTable:
    return from_json((installation.home / "run" / "routes.json").read_bytes(), RouteTable)


@pytest.fixture(scope="module")
def refusing(shared_home: Any) -> Any:
    given = ("--name", NAME, "--slo", "e2e=60", "--reject-late")
    shared_home.first = shared_home.json("deploy", *WORK, *given)
    return shared_home


def test_its_route_has_the_limits_and_the_times_of_its_plan(refusing: Any) -> None:
    assert refusing.first["rejects_late"]
    (route,) = table(refusing).routes
    plan = refusing.get(f"/api/v1/deployments/{NAME}/plan")
    full = plan["candidates"][plan["chosen"]]["estimate"]
    assert route.admission is not None
    assert (route.admission.slo, route.admission.slots) == (Slo(e2e_s=60.0), SLOTS)
    service = route.admission.service
    assert (service.input_tokens, service.output_tokens) == (INPUT, OUTPUT)
    assert service.prompt_s == plan["single_request"]["ttft_s"]["value"]
    assert service.prompts_s(SLOTS * INPUT) == pytest.approx(full["ttft_s"]["value"])
    assert service.step_of(1) == plan["single_request"]["tpot_s"]["value"]
    assert service.step_of(SLOTS) == pytest.approx(full["tpot_s"]["value"])
    assert [worker.max_outstanding for worker in route.workers] == [SLOTS]
    assert "rejects late" in refusing.run("ps").stdout


def test_it_answers(refusing: Any) -> None:
    asked = [{"role": "user", "content": "123+456="}]
    for stream in (False, True):
        found = refusing.openai().chat.completions.create(model=NAME, messages=asked, temperature=0, stream=stream)
        words = (
            found.choices[0].message.content
            if not stream
            else "".join(c.choices[0].delta.content or "" for c in found)
        )
        assert words == "579"


def test_under_twice_what_it_serves_more_keep_their_slo_and_most_of_the_accepted_do(refusing: Any) -> None:
    """The runs without and with the option are compared, one after the other on one machine.

    The only assertion on a single run is that most accepted requests are in time.
    """
    refusing.run("rm", NAME)
    url = f"{refusing.record('gateway').url}/v1"
    refusing.run("deploy", *WORK, "--name", "plain")
    service = measured_service(url, "plain", SLOTS, INPUT, OUTPUT)
    batch_s = batch_time_s(service)
    slo = Slo(e2e_s=4 * batch_s)
    asked = open_load(2 * SLOTS / batch_s, 30 * batch_s, service, output_cv=0.5, seed=0, model="any")
    plain = figures(sent(url, asked, "plain"), slo, refusing=False)
    refusing.run("rm", "plain")
    refusing.run("deploy", *WORK, "--name", NAME, "--slo", f"e2e={slo.e2e_s}", "--reject-late")
    rejecting = figures(sent(url, asked, NAME), slo, refusing=True)
    assert rejecting.refused_late > 0
    assert rejecting.kept_fraction > 1.2 * plain.kept_fraction
    assert rejecting.kept_of_answered > 0.6
