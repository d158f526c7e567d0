"""A worker under twice what it serves, behind a real gateway: rejecting late requests against letting all wait.

No time is asserted: both runs meet the same requests, machine and minute, and are held against one another.
"""

from __future__ import annotations

import numpy as np
import pytest

from planner.intent import Slo
from tests.bench.refusing import figures, open_load, own_gateway, sent
from tests.iserve.replay.stand_in import GAP_S, SLOTS, TTFT_S, stand_in
from tests.two_point_service import two_point_service
from traces.outcomes import Failure

MODEL = "slotted"
SERVICE = two_point_service(batch=SLOTS, input_tokens=8, output_tokens=6, ttft_s=TTFT_S, tpot_s=GAP_S)
BATCH_S = TTFT_S + (SERVICE.output_tokens - 1) * GAP_S
SLO = Slo(e2e_s=3.5 * BATCH_S)


@pytest.mark.process
def test_under_twice_what_is_served_more_keep_their_slo_and_most_of_the_accepted_do() -> None:
    asked = open_load(2 * SLOTS / BATCH_S, 1.5, SERVICE, output_cv=0.3, seed=0, model=MODEL)
    with stand_in() as server, own_gateway(server.url, MODEL, SERVICE, SLO) as gateway:
        plain = figures(sent(gateway.url, asked, MODEL), SLO, refusing=False)
        gateway.serve(refusing=True)
        outcomes = sent(gateway.url, asked, MODEL)
    refusing = figures(outcomes, SLO, refusing=True)
    assert (plain.requests, plain.answered, plain.refused_late) == (len(asked), len(asked), 0)
    assert refusing.answered + refusing.refused_late == len(asked)
    assert refusing.kept_fraction > 1.2 * plain.kept_fraction
    assert refusing.kept_of_answered > max(0.6, 1.2 * plain.kept_of_answered)
    late = outcomes.failure == Failure.TOO_LATE
    assert late.any()
    assert np.isnan(outcomes.first_token_s[late]).all()


def test_the_load_is_the_same_for_the_same_seed() -> None:
    one, two, other = (open_load(20.0, 5.0, SERVICE, output_cv=0.5, seed=seed, model=MODEL) for seed in (1, 1, 2))
    assert one == two != other
    assert all(2 <= request.output_tokens <= 4 * SERVICE.output_tokens for request in one)
