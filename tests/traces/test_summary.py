"""Outcomes to figures: against numpy's percentiles, and the laws that SLO attainment and goodput keep."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fingerprint.errors import BadInputError
from planner.intent import Slo
from tests.golden_words import Golden
from tests.traces.outcome_makers import outcomes
from traces.outcomes import Failure
from traces.summary import limit_words, outcome_words, percentiles, summarize

NAN = math.nan
latencies = st.lists(st.floats(0.001, 100, allow_nan=False), min_size=1, max_size=40)


@given(latencies)
def test_percentiles_are_numpys(values: list[float]) -> None:
    found = percentiles(np.array(values))
    assert found is not None
    for percent, value in ((50, found.p50_s), (90, found.p90_s), (95, found.p95_s), (99, found.p99_s)):
        assert value == pytest.approx(float(np.quantile(np.array(values), percent / 100)))
    assert found.count == len(values)
    assert found.mean_s == pytest.approx(sum(values) / len(values))
    assert found.max_s == max(values)


def test_what_never_happened_is_in_no_percentile() -> None:
    assert percentiles(np.array([NAN, NAN])) is None
    assert percentiles(np.array([])) is None
    found = percentiles(np.array([1.0, NAN, 3.0]))
    assert found is not None
    assert (found.count, found.p50_s) == (2, 2.0)


def test_latencies_by_hand() -> None:
    """Nine of ten tokens follow the first. A sender 0.2 s late hides as much TTFT from a count from the send."""
    found = summarize(outcomes(ttft_s=[1.0], e2e_s=[1.9], late_s=0.2))
    assert found.ttft is not None
    assert found.ttft_from_send is not None
    assert found.tpot is not None
    assert found.e2e is not None
    assert found.lateness is not None
    assert found.ttft.p50_s == pytest.approx(1.0)
    assert found.ttft_from_send.p50_s == pytest.approx(0.8)
    assert found.tpot.p50_s == pytest.approx(0.1)
    assert found.e2e.p50_s == pytest.approx(1.9)
    assert found.lateness.p50_s == pytest.approx(0.2)
    assert found.itl is None, "no gaps were recorded"


def test_rates_by_hand() -> None:
    """Three requests at 0, 1 and 2 s, the last ends at 4 s: one a second offered, 30 tokens in 4 s."""
    found = summarize(outcomes(ttft_s=[0.5, 0.5, 0.5], e2e_s=[1.0, 1.0, 2.0]))
    assert found.duration_s == pytest.approx(4.0)
    assert found.offered_requests_per_s == pytest.approx(1.0)
    assert found.completed_requests_per_s == pytest.approx(0.75)
    assert found.output_tokens_per_s == pytest.approx(7.5)


def test_an_answer_of_one_token_has_no_tpot_and_misses_none() -> None:
    found = summarize(outcomes(ttft_s=[1.0], e2e_s=[1.0], output_tokens=[1]), Slo(tpot_s=0.001))
    assert found.tpot is None
    assert found.slo is not None
    assert found.slo.attainment_fraction == 1.0


def test_a_failed_request_has_no_latency_but_misses_the_slo() -> None:
    """Or a server would look better for failing its slow requests."""
    found = summarize(
        outcomes(
            ttft_s=[0.1, 0.2, NAN], e2e_s=[1, 1, NAN], failure=[Failure.NONE, Failure.TIMEOUT, Failure.TIMEOUT]
        ),
        Slo(ttft_s=10),
    )
    assert found.ttft is not None
    assert found.slo is not None
    assert found.ttft.count == 1
    assert found.slo.attainment_fraction == pytest.approx(1 / 3)
    assert [(f.kind, f.count) for f in found.failures] == [("timeout", 2)]


@given(latencies, st.floats(0.001, 100), st.floats(0.001, 100))
def test_a_laxer_slo_is_never_attained_less(values: list[float], one_s: float, other_s: float) -> None:
    run = outcomes(ttft_s=values, e2e_s=[2 * v for v in values])
    low, high = sorted((one_s, other_s))
    tight, lax = summarize(run, Slo(ttft_s=low)).slo, summarize(run, Slo(ttft_s=high)).slo
    assert tight is not None
    assert lax is not None
    assert tight.attainment_fraction <= lax.attainment_fraction
    assert tight.goodput_requests_per_s <= lax.goodput_requests_per_s


@given(latencies, st.floats(0.001, 100), st.floats(0.001, 100))
def test_one_more_limit_is_never_attained_more(values: list[float], ttft_s: float, e2e_s: float) -> None:
    run = outcomes(ttft_s=values, e2e_s=[2 * v for v in values])
    one, both = summarize(run, Slo(ttft_s=ttft_s)).slo, summarize(run, Slo(ttft_s=ttft_s, e2e_s=e2e_s)).slo
    assert one is not None
    assert both is not None
    assert both.met <= one.met
    assert both.met >= len(values) - both.missed_ttft - both.missed_e2e


@given(latencies)
def test_goodput_is_at_most_throughput(values: list[float]) -> None:
    found = summarize(outcomes(ttft_s=values, e2e_s=values), Slo(e2e_s=1.0))
    assert found.slo is not None
    assert found.slo.goodput_requests_per_s <= found.completed_requests_per_s


@given(st.lists(st.lists(st.floats(0.001, 1), max_size=5), min_size=2, max_size=10), st.data())
def test_the_parts_by_deployment_are_the_whole(gaps: list[list[float]], data: st.DataObject) -> None:
    n = len(gaps)
    owner = data.draw(st.lists(st.integers(0, 1), min_size=n, max_size=n))
    run = outcomes(
        ttft_s=[float(i) for i in range(n)], e2e_s=[float(i) for i in range(n)], gaps=gaps, deployment=owner
    )
    parts = dict(run.by_deployment())
    assert sum(len(part) for part in parts.values()) == n
    for index, name in enumerate("ab"):
        if name in parts:
            expected = [gap for row, of in zip(gaps, owner, strict=True) if of == index for gap in row]
            assert parts[name].gaps_s.tolist() == expected
            assert parts[name].ttft_s.tolist() == pytest.approx([i for i, of in enumerate(owner) if of == index])


def test_lengths_that_differ_from_the_traces_are_counted() -> None:
    run = outcomes(ttft_s=[1, 1], e2e_s=[2, 2], output_tokens=[10, 10])
    run = replace(run, output_tokens=np.array([10, 7]), input_tokens=np.array([100, 103]))
    found = summarize(run).lengths
    assert (found.asked_output_tokens, found.output_tokens, found.requests_of_other_output) == (20, 17, 1)
    assert (found.asked_input_tokens, found.input_tokens, found.requests_of_other_input) == (200, 203, 1)


def test_a_server_that_does_not_count_prompts_is_not_said_to_differ() -> None:
    run = replace(outcomes(ttft_s=[1, 1], e2e_s=[2, 2]), input_tokens=np.array([0, 0]))
    assert summarize(run).lengths.input_tokens is None
    assert summarize(run).lengths.requests_of_other_input == 0


def test_columns_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(BadInputError, match="differ in length"):
        replace(outcomes(ttft_s=[1, 1], e2e_s=[2, 2]), sent_s=np.zeros(3))
    with pytest.raises(BadInputError, match="num_gaps"):
        replace(outcomes(ttft_s=[1], e2e_s=[2]), num_gaps=np.array([4]))


def test_what_was_in_flight_when_a_run_was_ended_is_not_judged() -> None:
    run = outcomes(ttft_s=[0.1, NAN], e2e_s=[1, NAN], failure=[Failure.NONE, Failure.INTERRUPTED])
    found = summarize(run, Slo(ttft_s=10)).slo
    assert found is not None
    assert found.attainment_fraction == 1.0


def test_the_first_line_says_how_many_failed_and_why(golden: Golden) -> None:
    fates = [Failure.NONE] * 4 + [Failure.BAD_REQUEST] * 14 + [Failure.TIMEOUT] * 2
    times = [1.0 if fate is Failure.NONE else NAN for fate in fates]
    found = summarize(outcomes(ttft_s=times, e2e_s=times, failure=fates))
    golden("traces", outcome_words(found))
    told = outcome_words(found, {"bad request": "longer than planned for"})
    golden("traces", told)
    alike = summarize(outcomes(ttft_s=[NAN], e2e_s=[NAN], failure=[Failure.TIMEOUT]))
    golden("traces", outcome_words(alike))
    golden("traces", outcome_words(summarize(outcomes(ttft_s=[1], e2e_s=[2]))))
    golden("traces", outcome_words(summarize(outcomes(ttft_s=[], e2e_s=[]))))


def test_limits_are_said_where_there_are_any() -> None:
    assert limit_words(None) == "none"
    assert limit_words(Slo(ttft_s=0.5, e2e_s=8)) == "TTFT 0.5 s, E2E 8 s"
    assert limit_words(summarize(outcomes(ttft_s=[1], e2e_s=[2]), Slo(tpot_s=0.05)).slo) == "TPOT 0.05 s"
