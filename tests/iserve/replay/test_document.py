"""A run's timeline and curves, and the page that is made of them."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fingerprint.codec import from_json, to_json
from iserve.replay.document import ReplayDocument, ReplayRun, make_document
from iserve.report.replay import render_replay
from planner.intent import Slo
from tests.golden_words import Golden
from tests.iserve.page_words import page_words
from tests.traces.outcome_makers import outcomes
from traces.outcomes import Failure, Outcomes
from traces.timeline import curve, timeline

NAN = math.nan
HOSTILE = '<script>alert("x")</script>&\x00'


def document(
    run: Outcomes, *, trace: str = "t.csv", slo: Slo | None = None, words: str = "told 500", bad: str | None = None
) -> ReplayDocument:
    facts = ReplayRun(
        trace=trace,
        url="http://127.0.0.1:1/v1",
        started_at=datetime(2026, 1, 1, tzinfo=UTC).isoformat(),
        planned_requests=len(run),
        elapsed_s=10.0,
        interrupted=False,
        rate_factor=1.0,
        seed=0,
        timeout_s=600.0,
        max_in_flight=2000,
        prompts="ids",
        ignore_eos=True,
        deployed=("chat: intent min-cost, 2 requests/s",),
    )
    examples = {Failure.SERVER_ERROR: words} | ({} if bad is None else {Failure.BAD_REQUEST: bad})
    return make_document(facts, run, slo, examples)


def mixed() -> Outcomes:
    """Three deployments' worth of fates: served, failed, and a late sender."""
    return outcomes(
        ttft_s=[0.1, 0.2, NAN, 0.4],
        e2e_s=[1, 2, NAN, 3],
        failure=[Failure.NONE, Failure.NONE, Failure.SERVER_ERROR, Failure.NONE],
        late_s=0.05,
        gaps=[[0.1, 0.2], [0.3], [], [0.1]],
        deployment=[0, 1, 0, 1],
    )


@given(st.lists(st.floats(0.01, 50), min_size=1, max_size=60), st.data())
def test_a_timeline_loses_no_request(e2e: list[float], data: st.DataObject) -> None:
    failed = data.draw(st.lists(st.booleans(), min_size=len(e2e), max_size=len(e2e)))
    run = outcomes(
        ttft_s=[NAN if bad else value / 2 for value, bad in zip(e2e, failed, strict=True)],
        e2e_s=[NAN if bad else value for value, bad in zip(e2e, failed, strict=True)],
        failure=[Failure.TIMEOUT if bad else Failure.NONE for bad in failed],
    )
    bins = timeline(run)
    assert sum(b.scheduled for b in bins) == len(e2e)
    assert sum(b.failed for b in bins) == sum(failed)
    assert sum(b.completed for b in bins) == len(e2e) - sum(failed)
    served = sum(b.output_tokens_per_s * b.width_s for b in bins)
    assert served == pytest.approx(10 * (len(e2e) - sum(failed)))
    assert bins[-1].in_flight == 0
    assert 0 < len(bins) <= 61


def test_in_flight_by_hand() -> None:
    """Sent at 0, 1, 2 s and ended at 2.5, 3.5, 4.5 s; the bins are 0.1 s wide."""
    bins = timeline(outcomes(ttft_s=[0.5] * 3, e2e_s=[2.5] * 3))
    at = {round(b.start_s + b.width_s, 6): b.in_flight for b in bins}
    assert (at[0.5], at[1.5], at[2.2], at[3.0], at[4.0]) == (1, 2, 3, 2, 1)


def test_a_curve_rises_to_the_largest() -> None:
    found = curve(np.array([3.0, 1.0, NAN, 2.0]))
    assert [p.value_s for p in found] == sorted(p.value_s for p in found)
    assert (found[0].value_s, found[-1].value_s) == (1.0, 3.0)
    assert curve(np.array([NAN])) == ()


def test_a_document_survives_json() -> None:
    found = document(mixed(), slo=Slo(ttft_s=0.3))
    assert from_json(to_json(found), ReplayDocument) == found


def test_notes_say_what_is_not_as_the_trace_had_it(golden: Golden) -> None:
    notes = " ".join(document(mixed()).notes)
    golden("reports", notes)
    quiet = outcomes(ttft_s=[0.1] * 3, e2e_s=[1.0] * 3)
    assert document(quiet).notes == ()


def test_requests_refused_for_their_length_are_told_what_cuts_or_takes_them(golden: Golden) -> None:
    refused = outcomes(ttft_s=[0.1, NAN], e2e_s=[1.0, NAN], failure=[Failure.NONE, Failure.BAD_REQUEST])
    (note,) = document(refused, bad="400 This model's maximum context length is 256 tokens. However, ...").notes
    golden("reports", note)
    assert document(refused, bad="400 ignore_eos is not known").notes == ()


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(mixed(), id="mixed"),
        pytest.param(outcomes(ttft_s=[0.1], e2e_s=[0.1], output_tokens=[1]), id="one-token"),
        pytest.param(outcomes(ttft_s=[NAN], e2e_s=[NAN], failure=[Failure.SERVER_ERROR]), id="nothing-served"),
    ],
)
def test_the_page_is_well_formed_and_says_the_figures(run: Outcomes, golden: Golden) -> None:
    found = document(run, slo=Slo(ttft_s=0.3, e2e_s=5))
    page = render_replay(found)
    root = ElementTree.fromstring(page.partition("\n")[2])
    text = " ".join(root.itertext())
    assert f"{found.summary.slo.attainment_fraction:.1%}" in text if found.summary.slo else False
    assert ("told 500" in text) == bool(found.summary.failures)
    failed = found.summary.requests - found.summary.completed
    first, *_ = (" ".join(p.itertext()) for p in root.iter("p"))
    assert not failed or first.startswith(f"{failed} of {found.summary.requests} ")
    golden("reports", page_words(page))
    assert "http:" not in "".join(e.get("href", "") + e.get("src", "") for e in root.iter())


def test_hostile_names_and_words_are_text() -> None:
    page = render_replay(document(mixed(), trace=HOSTILE, words=HOSTILE))
    assert "<script" not in page
    ElementTree.fromstring(page.partition("\n")[2])


def test_a_share_of_kept_limits_is_of_the_requests_next_to_it() -> None:
    """Requests that were in flight when the run was ended are not judged."""
    run = outcomes(
        ttft_s=[0.1, 0.2, NAN], e2e_s=[1, 9, NAN], failure=[Failure.NONE, Failure.NONE, Failure.INTERRUPTED]
    )
    page = render_replay(document(run, slo=Slo(e2e_s=5)))
    (met, judged, share), *_ = re.findall(r"(\d+) of (\d+) requests \w+ \w+ \w+ \(([\d.]+)%\)", page)
    assert (int(met), int(judged), float(share)) == (1, 2, 50.0)
