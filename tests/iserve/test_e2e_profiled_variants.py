"""Variants in a profile of the demo model: real controller, daemon and profiling worker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

WORK = ("--engine", "torch", "--input-tokens", "16", "--output-tokens", "8", "--variants", "2", "--rank", "8")


def test_variants_are_measured_once_and_their_files_are_gone(
    profiled: Path, make_installation: Callable[..., Any]
) -> None:
    """The base was measured before; time is enough for a machine that is busy, and not needed on another."""
    home = make_installation(profiled, ISERVE_PROFILE_SECONDS="60")

    def profilings() -> int:
        return [event["kind"] for event in home.get("/api/v1/events")].count("profiling")

    assert home.json("deploy", "--name", "first", *WORK)["status"] == "ready"
    (profile,) = home.get("/api/v1/profiles")
    assert [(one["kind"]["rank"], one["failure"]) for one in profile["variants"]] == [(8, "")], profile["notes"]
    (measured,) = profile["variants"]
    assert {runs["num_layers"] for runs in measured["runs"]} == {1, 2}
    assert min(seconds for runs in measured["runs"] for seconds in runs["runs_s"]) > 0
    assert list((home.home / "fingerprints").iterdir()) == []
    assert profilings() == 1
    assert home.json("deploy", "--name", "second", *WORK)["status"] == "ready"
    assert profilings() == 1
    assert home.get("/api/v1/profiles") == [profile]


def test_a_profile_measures_a_rank_without_a_deploy(profiled: Path, make_installation: Callable[..., Any]) -> None:
    """Rank 5 takes slots of rank 8. A second is enough for the base, and more is given on a busy machine alone."""
    home = make_installation(profiled)
    words = ("profile", "--engine", "torch", "--input-tokens", "4", "--output-tokens", "4", "--rank", "5")
    for seconds in ("1", "60"):
        home.run(*words, "--max-seconds", seconds, check=seconds == "60")
        profiles = home.get("/api/v1/profiles")
        if profiles and profiles[0]["variants"]:
            break
    (profile,) = profiles
    assert profile["timing"]
    assert [(one["kind"]["rank"], one["failure"]) for one in profile["variants"]] == [(8, "")], profile["notes"]
    (measured,) = profile["variants"]
    assert {runs["num_layers"] for runs in measured["runs"]} == {1, 2}
    assert min(seconds for runs in measured["runs"] for seconds in runs["runs_s"]) > 0
    assert list((home.home / "fingerprints").iterdir()) == []
    assert home.get("/api/v1/deployments") == []
