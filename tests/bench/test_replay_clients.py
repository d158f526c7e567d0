"""The two clients' reports are read correctly, and the page shows what was kept of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fingerprint.errors import BadInputError
from tests.bench.replay_clients import Load, Quantiles, read_guidellm, replay, texts
from tests.bench.replay_compare import KEPT, kept, table, truth_of
from tests.bench.replay_stand_in import Notes
from tests.iserve.replay.stand_in import GAP_S, TTFT_S, stand_in

PAGE = Path(__file__).parents[2] / "docs/decisions/0029-replay-client.md"
RECORDED = Path(__file__).parent / "recorded/guidellm.json"  # three requests of 8 tokens, the fields that matter


def middle(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def test_a_recorded_report_of_guidellm_is_read_in_terms_of_replay() -> None:
    report = json.loads(RECORDED.read_text())
    rows: list[dict[str, Any]] = report["benchmarks"][0]["requests"]["successful"]
    times = [row["info"]["timings"] for row in rows]
    found = read_guidellm(RECORDED.read_bytes(), asked=4)
    assert (found.completed, found.failed, found.unsaid) == (3, 0, 1)
    assert found.output_tokens == 3 * 8
    sent = texts(Load(requests_per_s=10, count=3, words=30, output_tokens=8))
    assert found.prompt_tokens == sum(map(len, sent))  # the stand-in counts characters
    # Of three requests the median is the middle one, worked out from the times when things happened.
    started = [t["request_start"] for t in times]
    first = [t["first_token_iteration"] for t in times]
    last = [t["last_token_iteration"] for t in times]
    assert found.ttft.p50_s == pytest.approx(middle([b - a for a, b in zip(started, first, strict=True)]))
    assert found.tpot.p50_s == pytest.approx(middle([(b - a) / 7 for a, b in zip(first, last, strict=True)]))
    assert found.e2e.p50_s == pytest.approx(middle([t["request_end"] - t["request_start"] for t in times]))
    assert found.e2e_last_token.p50_s == pytest.approx(middle([b - a for a, b in zip(started, last, strict=True)]))
    assert found.late.p50_s == pytest.approx(middle([t["request_start"] - t["targeted_start"] for t in times]))
    # All of it lies within the delays that were set and a second: 80 ms, and 25 ms between tokens.
    assert 0.080 <= found.ttft.p50_s <= found.ttft.p99_s < 1
    assert 0.080 + 7 * 0.025 <= found.e2e_last_token.p50_s < found.e2e.p50_s < 1
    assert found.tpot.p50_s == pytest.approx(0.025, rel=0.1)
    assert found.output_tokens_per_s == pytest.approx(8 * found.requests_per_s, rel=0.05)


def test_another_document_is_refused() -> None:
    with pytest.raises(BadInputError, match="guidellm's report"):
        read_guidellm(b'{"benchmarks": [{"metrics": {}}]}', asked=1)


def test_a_report_without_a_completed_request_has_no_figures() -> None:
    report = json.loads(RECORDED.read_text())
    report["benchmarks"][0]["requests"]["successful"] = []
    with pytest.raises(SystemExit, match="completed none"):
        read_guidellm(json.dumps(report).encode(), asked=3)


@pytest.mark.process
def test_replay_sends_the_prompts_that_the_other_client_is_given() -> None:
    load = Load(requests_per_s=20, count=5, words=4, output_tokens=3)
    with stand_in() as server:
        found = replay(server.url, "m", load)
    assert [body["prompt"] for body in server.bodies] == texts(load)
    assert (found.completed, found.failed) == (5, 0)
    assert (found.prompt_tokens, found.output_tokens) == (5 * 4, 5 * 3)
    assert found.ttft.p50_s >= TTFT_S
    assert found.e2e.p50_s >= TTFT_S + 2 * GAP_S


def test_the_stand_ins_notes_of_a_run() -> None:
    """Ten a second, the second 3 ms after its time; TTFT 80 ms, 25 ms between each of five tokens."""
    noted = Notes(arrived_s=[7.203, 7.0, 7.103], ttft_s=[0.08] * 3, e2e_s=[0.18] * 3)
    found = truth_of(noted, Load(requests_per_s=10, count=3, words=1, output_tokens=5))
    assert found.ttft == Quantiles(p50_s=0.08, p90_s=0.08, p99_s=0.08)
    assert found.tpot.p99_s == pytest.approx(0.025)
    assert (found.late.p50_s, found.late.p90_s) == pytest.approx((0.003, 0.003))


def test_the_tables_are_those_of_the_committed_results() -> None:
    page = PAGE.read_text()
    for number, compared in enumerate(kept(KEPT)):
        shown = page.split("<!-- compared -->\n")[number + 1].partition("<!-- end -->")[0]
        assert shown.splitlines() == list(table(compared))
