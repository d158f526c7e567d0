"""Recorded replays to vLLM on an H200, simulated again.

A guard against steps that become worse, not a proof: the model of a step was mended after this was seen
(docs/fidelity.md).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fingerprint.codec import to_json
from fingerprint.config import Workload
from fingerprint.errors import BadInputError
from fingerprint.estimators.calibration import Calibration, shipped_calibration
from fingerprint.measurements import Profile
from iserve.planning.estimator_factory import estimator_for
from tests.bench.fidelity import CHECKED, PROFILE, WHOLE, Asked, Fidelity, Load, served_by
from tests.bench.fidelity_again import again, kept_of, read
from tests.bench.fidelity_compare import Sent, compare, simulated_requests
from tests.bench.fidelity_steps import WholeSteps, whole_profile
from tests.bench.kept import write_kept

RESULTS = Path(__file__).parents[2] / "bench/results/fidelity"
KEPT = read(RESULTS / "h200-vllm.json.xz")
FRESH = read(RESULTS / "h200-vllm-fresh.json.xz")  # played after the step model was mended
THREE_MINUTES = read(RESULTS / "h200-vllm-three-minutes.json.xz")  # later, at two loads
CLOCKS = read(RESULTS / "h200-vllm-clocks.json.xz")  # at 0.8 again, with own steps


@pytest.fixture
def _errors_of_that_day(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the calibration of that day: errors of further models move a profile's times.

    Those of models measured since would hide or make what the simulator does.
    """
    errors = tuple(error for error in shipped_calibration().errors if error.model != "Llama-2-13b-hf")
    monkeypatch.setattr("fingerprint.estimators.depth_tied.shipped_calibration", lambda: Calibration(errors))


@pytest.mark.usefixtures("_errors_of_that_day")
def test_a_kept_replay_is_simulated_as_near_as_the_document_says() -> None:
    ((load, predictions),) = again(KEPT)
    assert [p.source for p in predictions] == [PROFILE, CHECKED]
    for found in predictions:
        assert found.saturated_requests_per_s == pytest.approx(KEPT.saturated_requests_per_s, rel=0.03)
        assert found.at.e2e_s == pytest.approx(load.measured.e2e_s, rel=0.11)
        assert found.at.ttft_s == pytest.approx(load.measured.ttft_s, rel=0.16)
        assert found.at.tpot_s == pytest.approx(load.measured.tpot_s, rel=0.16)


@pytest.mark.usefixtures("_errors_of_that_day")
def test_a_replay_that_nobody_had_seen_is_simulated_within_a_tenth() -> None:
    ((load, (found,)),) = again(FRESH)
    assert found.saturated_requests_per_s == pytest.approx(FRESH.saturated_requests_per_s, rel=0.1)
    for name in ("ttft_s", "tpot_s", "e2e_s"):  # at P50, P90, P99
        assert getattr(found.at, name) == pytest.approx(getattr(load.measured, name), rel=0.1)


def test_three_minutes_that_nobody_had_seen_are_simulated_as_the_document_says() -> None:
    """The profile is within a tenth at 0.6; at 0.8 all but first tokens are, which wait for slots there."""
    (at_06, by_06), (at_08, by_08) = again(THREE_MINUTES)
    assert (at_06.utilisation, at_08.utilisation) == (0.6, 0.8)
    for load, (profile, checked) in ((at_06, by_06), (at_08, by_08)):
        assert (profile.source, checked.source) == (PROFILE, CHECKED)
        for found in (profile, checked):  # the check gave no time per token, and corrects none
            for name in ("tpot_s", "e2e_s"):  # at P50, P90, P99
                assert getattr(found.at, name) == pytest.approx(getattr(load.measured, name), rel=0.1)
    assert by_06[0].at.ttft_s == pytest.approx(at_06.measured.ttft_s, rel=0.1)


def test_three_minutes_at_eight_tenths_again() -> None:
    """The profile predicts all but the P99 of first tokens; own steps, measured at a lower clock, are too long."""
    ((load, (profile, checked, whole)),) = again(CLOCKS)
    assert (profile.source, checked.source, whole.source) == (PROFILE, CHECKED, WHOLE)
    for name in ("tpot_s", "e2e_s"):  # at P50, P90, P99
        assert getattr(profile.at, name) == pytest.approx(getattr(load.measured, name), rel=0.06)
        assert getattr(checked.at, name) == pytest.approx(getattr(load.measured, name), rel=0.06)
        assert min(getattr(whole.at, name)) > min(getattr(load.measured, name))
    assert profile.at.ttft_s[:2] == pytest.approx(load.measured.ttft_s[:2], rel=0.1)
    assert profile.at.ttft_s[2] == pytest.approx(load.measured.ttft_s[2], rel=0.15)


def test_what_is_kept_is_what_was_played() -> None:
    (load,) = KEPT.loads
    requests, burst = load.requests.requests(), KEPT.burst.requests()
    rate = (len(requests) - 1) / (requests[-1].arrival_s - requests[0].arrival_s)
    assert rate == pytest.approx(load.utilisation * KEPT.saturated_requests_per_s, rel=1e-3)
    assert {request.arrival_s for request in burst} == {0.0}
    assert len(burst) == 4 * KEPT.target.limits.max_batch
    longest = max(r.input_tokens + r.output_tokens for r in (*requests, *burst))
    assert longest <= KEPT.target.limits.max_context_tokens


@pytest.fixture(scope="module")
def whole() -> Profile:
    """The worker's own steps, were it as the profile says."""
    estimator = estimator_for(KEPT.profile)
    target = KEPT.target

    def burst(work: Workload) -> float:
        return estimator.estimate(target.config, work).e2e_s.value

    return whole_profile(burst, KEPT.profile, target.config, target.workload, beside_s=0.0, max_seconds=0.0)


def test_own_steps_are_those_that_were_measured(whole: Profile) -> None:
    steps, truth, config = WholeSteps(whole), estimator_for(KEPT.profile), KEPT.target.config
    for p in whole.timing:
        work = Workload(p.batch, p.input_tokens, 33)
        found, true = steps.estimate(config, work), truth.estimate(config, work)
        assert found.ttft_s.value == pytest.approx(true.ttft_s.value, rel=1e-6)
        assert found.tpot_s.value == pytest.approx(true.tpot_s.value, rel=1e-6)


@pytest.mark.parametrize("batch", [1, 3, 10, 20, 32])
@pytest.mark.parametrize("tokens", [200, 500, 1168, 2496])
def test_own_steps_between_are_near_the_truth(whole: Profile, batch: int, tokens: int) -> None:
    work, config = Workload(batch, tokens, 64), KEPT.target.config
    found, true = (e.estimate(config, work) for e in (WholeSteps(whole), estimator_for(KEPT.profile)))
    assert found.tpot_s.value == pytest.approx(true.tpot_s.value, rel=0.1)
    assert found.ttft_s.value == pytest.approx(true.ttft_s.value, rel=0.25)


def test_what_the_bench_keeps_is_simulated_again(tmp_path: Path, whole: Profile) -> None:
    """The simulator as the machine is predicted exactly, and again."""
    served = served_by(KEPT.target, KEPT.profile, None, KEPT.lone)
    played = simulated_requests(KEPT.loads[0].requests.requests()[:80], served)
    found = Fidelity(
        date=KEPT.date,
        machine=KEPT.machine,
        target=KEPT.target,
        profile="",
        check=None,
        lone=KEPT.lone,
        overhead_s={},
        asked=Asked(trace="", minutes=3.0, loads=(0.6,), check_s=0.0, steps_s=0.0, capacity=None),
        capacity_requests_per_s=10.0,
        simulated_capacity_requests_per_s={PROFILE: 10.0},
        loads=(
            Load(utilisation=0.6, pace=1.0, found=compare(played, {PROFILE: played}), requests=Sent.of(played)),
        ),
        burst=KEPT.burst,
        steps=whole,
    )
    path = tmp_path / "kept.json.xz"
    write_kept(path, to_json(kept_of(found, KEPT.profile)).decode())
    ((load, predictions),) = again(read(path))
    assert load.measured == load.then[0].at
    assert [p.source for p in predictions] == [PROFILE, WHOLE]
    by_profile, by_steps = predictions
    assert by_profile.at.e2e_s == pytest.approx(load.measured.e2e_s, rel=1e-3)
    assert by_steps.at.e2e_s == pytest.approx(load.measured.e2e_s, rel=0.1)  # nothing is hidden from them
    with pytest.raises(BadInputError, match="leave out --capacity"):
        kept_of(replace(found, burst=None), KEPT.profile)
