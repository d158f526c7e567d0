"""The recorded engines that shared H200s, and the law of it (``fingerprint.gpu_sharing``)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fingerprint.codec import from_json
from fingerprint.gpu_sharing import GROUP_LOSS, slowdown
from tests.bench.gpu_sharing import GPU_OF, Scene, Sharing, slowdowns, table
from tests.bench.kept import read_kept

PAGE = Path(__file__).parents[2] / "docs" / "gpu-sharing.md"


@pytest.fixture(scope="module")
def sharing() -> Sharing:
    path = Path(__file__).with_name("results") / "gpu_sharing.json"
    return from_json(read_kept(path), Sharing, what=path.name)


def scene(sharing: Sharing, run: str, **loads: str) -> Scene:
    return next(one for one in reversed(sharing.scenes) if one.run == run and one.loads == loads)


def test_an_idle_neighbour_costs_nothing(sharing):
    for load in ("decode1", "decode16"):
        alone, idle = (one for one in sharing.scenes if one.run == "pairs" and one.loads == {"a": load})
        assert (alone.loaded, idle.loaded) == ("a", "abdefg")
        assert idle.pace("a") > 0.97 * alone.pace("a")


@pytest.mark.parametrize(
    "loads",
    [
        pytest.param({"a": "decode16", "b": "decode16"}, id="decode"),
        pytest.param({"a": "decode1", "b": "decode16"}, id="steps of unequal batches"),
        pytest.param({"d": "decode16", "e": "decode16"}, id="two TP groups"),
        pytest.param({"d": "decode1", "e": "decode1"}, id="two TP groups with one sequence each"),
        pytest.param({"d": "decode16", "a": "decode16"}, id="a TP group and one engine on a GPU of it"),
    ],
)
def test_two_busy_engines_take_2_2_times_as_long(sharing, loads):
    found = slowdowns(sharing, scene(sharing, "pairs", **loads))
    assert list(found.values()) == pytest.approx([slowdown(1.0)] * 2, rel=0.03)


def test_prompts_are_slowed_as_much_or_less_on_one_gpu_and_more_in_groups(sharing):
    for loads in ({"a": "decode16", "b": "prefill"}, {"a": "prefill", "b": "prefill"}):
        assert all(1.8 < one < 2.2 for one in slowdowns(sharing, scene(sharing, "pairs", **loads)).values())
    for loads in ({"d": "decode16", "e": "prefill"}, {"d": "prefill", "e": "prefill"}):
        assert all(2.7 < one < 3.4 for one in slowdowns(sharing, scene(sharing, "pairs", **loads)).values())


@pytest.mark.parametrize(("engine", "other"), [("a", "b"), ("d", "e")])
def test_a_neighbour_slows_only_while_it_is_busy(sharing, engine, other):
    found = scene(sharing, "pairs", **{engine: "decode16", other: "rare"})
    busy = found.busy[other]
    assert slowdowns(sharing, found)[engine] == pytest.approx(1 / (busy / slowdown(1.0) + 1 - busy), rel=0.06)


def test_the_loss_of_crowded_tp_groups_is_the_geometric_mean_of_what_was_measured(sharing):
    crowded = [one for one in sharing.scenes if len(one.loads) > 2 and slowdowns(sharing, one)]
    assert all(len(GPU_OF[name]) == 2 for one in crowded for name in one.loads)
    losses = [
        np.mean([np.log(times / slowdown(len(one.loads) - 1.0)) for times in slowdowns(sharing, one).values()])
        for one in crowded
    ]
    assert len(losses) == 6
    assert np.exp(np.mean(losses)) == pytest.approx(GROUP_LOSS, abs=0.05)
    assert (np.exp(min(losses)), np.exp(max(losses))) == pytest.approx((0.98, 34.7), abs=0.1)


def test_the_page_has_the_table(sharing):
    assert table(sharing) in PAGE.read_text()
