"""Kept results of the contest of adapter kernels on an H200 hold the figures that the decision cites."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from tests.bench import lora_contest as bench
from tests.bench.kept import read_kept

KEPT = Path(__file__).parent / "results/lora_contest_h200"


def bursts_of(attempt: str) -> list[dict[str, Any]]:
    """Return the kept bursts of an attempt's one start."""
    (file,) = KEPT.glob(f"*-{attempt}.json.xz")
    return [row for row in json.loads(read_kept(file))["rows"] if row["kind"] == "burst"]


@pytest.fixture(scope="module")
def page() -> str:
    return (Path(__file__).parents[2] / "docs/decisions/0054-adapter-kernels.md").read_text()


@pytest.fixture(scope="module")
def contest() -> bench.Contest:
    return bench.Contest(KEPT)


@pytest.fixture(scope="module")
def kernels() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(read_kept(KEPT / "kernels.json.xz"))["rows"]
    return rows


class TestDecision:
    """Figures of docs/decisions/0054, as an H200 measured them."""

    RUNS = ("vllm", "tuned", "own", "forked")

    def part_ms(self, attempt: str, active: int, name: str) -> float:
        """Return the median of a part of steps over bursts, but for the one that warmed up."""
        found = [row[name] for row in bursts_of(attempt) if row["active"] == active][1:]
        return 1e3 * statistics.median(found)

    def test_our_kernels_on_two_streams_win_and_miss_the_goal(self, contest: bench.Contest, page: str) -> None:
        assert contest.winner().name == "forked"
        assert contest.share(contest.winner()) < bench.GOAL
        assert f"{1e3 * contest.base_s / bench.GOAL:.2f} ms" in page
        found = {attempt.name: contest.verdict(attempt) for attempt in contest.attempts}
        assert found == {"base": "", "default": "yes", "own": "yes", "forked": "yes", "aligned": "yes"}
        assert [attempt.name for attempt in contest.attempts] == ["base", "default", "own", "forked", "aligned"]

    def test_steps_and_shares(self, contest: bench.Contest, page: str) -> None:
        for attempt in contest.attempts:
            steps_s = [attempt.step_s(active) for active in bench.ACTIVE]
            if attempt.name == "base":
                assert f"| `base`, no slots | {1e3 * steps_s[0]:.2f} |" in page
                continue
            cells = [f"{1e3 * each:.2f} ({contest.base_s / each:.0%})" for each in steps_s[1:]]
            assert f"| `{attempt.name}` | {1e3 * steps_s[0]:.2f} | {' | '.join(cells)} |" in page
        spread_s = [max(steps) - min(steps) for each in contest.attempts for steps in
                    (each.steps_s(active) for active in bench.ACTIVE) if steps]  # fmt: skip
        assert max(spread_s) < 2e-5

    def test_shares_of_tokens(self, contest: bench.Contest, page: str) -> None:
        for attempt in contest.attempts[1:]:
            name = "`default` with itself" if attempt.name == "default" else f"`{attempt.name}`"
            found = bench.agreements(attempt, contest.default)
            assert f"| {name} | {' | '.join(f'{found[active]:.0%}' for active in bench.ACTIVE)} |" in page
        assert bench.agreement(contest.default.tokens[0], contest.default.tokens[32]) < 0.005

    def test_kernels_by_themselves(self, kernels: list[dict[str, Any]], page: str) -> None:
        cases = [row for row in kernels if row["kind"] == "case"]
        assert len(cases) == 8
        for row in cases:
            cells = [f"{row['ms'][run]:.2f}" for run in self.RUNS]
            assert f"| {row['rows']} | {row['active']} | {' | '.join(cells)} |" in page
        times = {
            (row["linear"], row["run"]): row
            for row in kernels
            if row["kind"] == "time" and (row["rows"], row["active"]) == (32, 32)
        }
        for linear in ("qkv", "o", "gate_up", "down"):
            cells = [f"{times[linear, run]['us']:.1f}" for run in self.RUNS]
            pace = times[linear, "own"]["gb_per_s"] / 1e3
            assert f"| {linear} | {' | '.join(cells)} | {pace:.1f} |" in page

    def test_checks_passed(self, kernels: list[dict[str, Any]], page: str) -> None:
        checks = [row for row in kernels if row["kind"] == "check"]
        assert all(row["passed"] for row in checks)
        assert f"all {len(checks)} checks" in page
        assert max(row["error"] for row in checks) < 0.0025
        assert sum(row["run"] == "vllm" for row in checks) == 16
        assert not [row for row in kernels if row["kind"] in ("error", "failed", "left-out")]

    def test_parts_of_steps(self, page: str) -> None:
        for attempt in ("default", "aligned", "own", "forked"):
            forwards = [self.part_ms(attempt, active, "forward_s") for active in (1, 32)]
            tails = [self.part_ms(attempt, active, "tail_s") for active in (0, 1, 32)]
            cells = " | ".join(f"{each:.2f}" for each in (*forwards, *tails))
            assert f"| `{attempt}` | {cells} |" in page

    def test_what_is_left(self, contest: bench.Contest, kernels: list[dict[str, Any]], page: str) -> None:
        """The forward is met by the kernels by themselves, and the goal by a subtraction alone."""
        ms = {row["active"]: row["ms"] for row in kernels if row["kind"] == "case" and row["rows"] == 32}
        grown = {
            name: self.part_ms("own", 32, name) - self.part_ms("own", 1, name)
            for name in ("step_s", "forward_s", "tail_s")
        }
        alone_ms = ms[32]["own"] - ms[1]["own"]
        figures = [f"{each:.2f}" for each in (grown["step_s"], alone_ms, grown["forward_s"], grown["tail_s"])]
        assert figures == ["0.93", "0.59", "0.66", "0.27"]
        assert all(figure in page for figure in figures)
        assert f"{grown['forward_s'] - alone_ms:.2f}" == "0.07"
        for attempt, added in (("own", "1.46"), ("forked", "1.38")):
            forward_ms = self.part_ms(attempt, 32, "forward_s") - self.part_ms(attempt, 0, "forward_s")
            assert f"{forward_ms:.2f}" == added
            assert f"`{attempt}` adds {added} ms" in page or f"`{attempt}` {added} (" in page
        left_ms = {
            attempt.name: 1e3 * attempt.step_s(32)
            - self.part_ms(attempt.name, 32, "tail_s")
            + self.part_ms(attempt.name, 0, "tail_s")
            for attempt in contest.attempts[2:4]
        }
        assert {name: f"{each:.2f}" for name, each in left_ms.items()} == {"own": "7.11", "forked": "7.03"}
        shares = [f"{1e3 * contest.base_s / each:.0%}" for each in left_ms.values()]
        assert shares == ["79%", "80%"]
        assert all(f"{each:.2f}" in page for each in left_ms.values())
