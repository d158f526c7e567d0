"""Sizes of CUDA graphs: vLLM's own up to 512 tokens, and no more than a quarter apart beyond."""

from __future__ import annotations

from itertools import pairwise

import pytest

from fingerprint.engines import TRAITS, graph_sizes, largest_graph


def test_up_to_512_they_are_those_that_pad_decode_steps() -> None:
    rows = {TRAITS["vllm"].rows_of_graph(sequences) for sequences in range(1, 513)}
    assert [*graph_sizes(512)] == sorted(rows)


def test_a_step_has_the_rows_of_the_smallest_graph_that_holds_it() -> None:
    rows = TRAITS["vllm"].rows_of_graph
    asked = [1, 3, 5, 257, 512, 513, 640, 641, 2049, 4096, 4097]
    assert [rows(n, largest=4096) for n in asked] == [1, 4, 8, 272, 512, 640, 640, 768, 2304, 4096, 4097]
    assert rows(513) == 513  # of a dense model no graph holds it
    assert TRAITS["torch"].rows_of_graph(513, largest=4096) == 513


@pytest.mark.parametrize("largest", [300, 512, 640, 700, 2048, 4096])
def test_they_ascend_to_the_largest_and_are_a_quarter_apart_at_most(largest: int) -> None:
    sizes = graph_sizes(largest)
    assert sizes[-1] == largest
    assert all(before < after for before, after in pairwise(sizes))
    beyond = [size for size in sizes if size >= 256]
    assert all(after <= 1.25 * before for before, after in pairwise(beyond))


def test_mixtures_on_vllm_alone_have_larger_ones() -> None:
    assert largest_graph("vllm", is_mixture=True) == 4096
    for engine in TRAITS:
        assert largest_graph(engine, is_mixture=False) == 512
        assert engine == "vllm" or largest_graph(engine, is_mixture=True) == 512
