"""Arithmetic of the bench of n-gram drafts, on bursts worked out by hand."""

from __future__ import annotations

import pytest

from tests.bench.ngram_steps import BATCHES, DRAFTS, Burst, NgramSteps, table


def burst(draft_tokens: int, batch: int, step_s: float, accepted_per_step: int) -> Burst:
    """Return a burst of 32 decode steps, each of one token and so many accepted drafts for every sequence."""
    steps = 32
    return Burst(
        draft_tokens=draft_tokens,
        batch=batch,
        prompt="repeated",
        decode_s=steps * step_s,
        drafts=steps * batch if draft_tokens else 0,
        accepted=steps * batch * accepted_per_step,
        generated=batch * (1 + steps * (1 + accepted_per_step)),
    )


@pytest.mark.parametrize("accepted", [0, 1, 3])
def test_a_step_takes_the_decode_time_over_the_steps_that_were_counted(accepted: int) -> None:
    found = burst(4, 8, 0.007, accepted)
    assert found.steps == pytest.approx(32)
    assert found.step_s == pytest.approx(0.007)
    assert found.drafted == pytest.approx(1.0)


def test_drafts_accepted_beyond_the_longest_answer_make_no_steps_fewer() -> None:
    """Counters of vLLM 0.33: 129 tokens with 8 drafts, all accepted, were 15 steps and 120 accepted drafts."""
    found = Burst(draft_tokens=8, batch=1, prompt="random", decode_s=0.075, drafts=15, accepted=120, generated=129)
    assert found.steps == 15
    assert found.step_s == pytest.approx(0.005)
    assert found.drafted == 1.0


def test_the_table_has_each_step_over_that_without_drafts() -> None:
    bursts = [burst(drafts, batch, 0.006 + 0.001 * drafts, drafts) for batch in BATCHES for drafts in DRAFTS]
    rows = table(NgramSteps(model="m", date="", machine="", versions="", bursts=tuple(bursts)), None).splitlines()
    assert len(rows) == 2 + len(BATCHES) * len(DRAFTS)
    assert "| 8 | 4 | 10.00 ms | 1.67 |  | 1 | 100% |" in rows


def test_bursts_without_drafts_to_verify_measure_nothing() -> None:
    bursts = [burst(0, batch, 0.006, 0) for batch in BATCHES]
    assert "| 1 | 8 | not measured | | | 0 | |" in table(
        NgramSteps(model="m", date="", machine="", versions="", bursts=tuple(bursts)), None
    )
