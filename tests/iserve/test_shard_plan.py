"""A plan that rests on one tensor-parallel rank measured alone says so."""

from __future__ import annotations

import pytest

from daemon.engines.registry import capabilities_for
from fingerprint.config import DeploymentConfig, Workload
from fingerprint.estimates import Source
from fingerprint.gpus import parse_gpus
from iserve.cli.profile_text import print_profile
from iserve.cli.render import _SOURCE_MARKS, print_plan
from iserve.planning.estimator_factory import estimator_for
from iserve.planning.pipeline import PlanOptions, hypothetical_hardware, make_plan
from iserve.planning.plan_document import plan_document
from tests.fingerprint.test_shards import RankMachine, take
from tests.golden_words import Golden

AT = Workload(8, 1024, 33)


def test_times_of_one_rank_are_marked_and_explained(capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    """On one GPU tp=1 was run whole and tp=2 as a rank; both, and what is scaled from them, are in the plan."""
    profile = take(RankMachine(num_devices=1), degrees=((1, 1), (2, 1)))
    hardware = hypothetical_hardware(*parse_gpus("h200:4"))
    made = make_plan(
        profile.spec, hardware, estimator_for(profile), capabilities_for("vllm"), PlanOptions(workload=AT)
    )
    found = {ranked.config: ranked.estimate for ranked in made.candidates if ranked.estimate is not None}
    sources = [found[DeploymentConfig(tp=tp, engine="vllm")].tpot_s.source for tp in (1, 2, 4)]
    assert sources == [Source.EXTRAPOLATED, Source.SHARDED, Source.SCALED]
    print_plan(plan_document(made, model="m", hardware=hardware.label, workload=AT), rows=50)
    shown = capsys.readouterr().out
    golden("controller", [line for line in shown.splitlines() if "shard" in line])
    (row,) = [line.split() for line in shown.splitlines() if line.split()[1:5] == ["2", "1", "16bit", "16bit"]]
    assert row[-1] == "t"


def test_a_profile_in_the_terminal_says_what_was_run_as_one_rank(
    capsys: pytest.CaptureFixture[str], golden: Golden
) -> None:
    profile = take(RankMachine(num_devices=1), degrees=((1, 1), (2, 1)))
    print_profile(profile, estimator_for(profile), AT)
    shown = capsys.readouterr().out
    golden("controller", shown)


def test_every_source_has_a_mark_of_its_own() -> None:
    assert set(_SOURCE_MARKS) == set(Source)
    assert len(set(_SOURCE_MARKS.values())) == len(Source)


def test_a_shard_is_not_what_a_smaller_group_is_estimated_by() -> None:
    """tp=1 stays what its own fingerprints say."""
    both = take(RankMachine(num_devices=1), degrees=((1, 1), (2, 1)))
    alone = take(RankMachine(num_devices=1), degrees=((1, 1),))
    config = DeploymentConfig(engine="vllm")
    assert estimator_for(both).estimate(config, AT) == estimator_for(alone).estimate(config, AT)
