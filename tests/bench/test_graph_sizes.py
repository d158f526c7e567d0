"""Sizes of graphs are vLLM's and those beyond; the table has a column for each largest one."""

from __future__ import annotations

from itertools import pairwise

import pytest

from fingerprint.engines import TRAITS
from tests.bench.graph_sizes import APART, DEFAULT, Engine, GraphSizes, Prompts, sizes_up_to, table


def test_up_to_512_they_are_those_that_pad_decode_steps() -> None:
    sizes = sizes_up_to(DEFAULT)
    rows = {TRAITS["vllm"].rows_of_graph(sequences) for sequences in range(1, DEFAULT + 1)}
    assert rows == set(sizes)


@pytest.mark.parametrize("largest", [DEFAULT, 1024, 2048])
def test_they_ascend_to_the_largest_and_are_128_apart_beyond_vllms(largest: int) -> None:
    sizes = sizes_up_to(largest)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == largest
    beyond = [size for size in sizes if size >= DEFAULT]
    assert {after - before for before, after in pairwise(beyond)} <= {APART}


def test_a_cell_is_the_median_of_the_rounds_with_their_range() -> None:
    def engine(largest: int, ms: float) -> Engine:
        prompts = (Prompts(case="alone", batch=0, tokens=640, seconds=(9.0, ms / 1e3, 0.001)),)
        return Engine(model="m", largest=largest, start_s=20.0, kv_blocks=1000, prompts=prompts)

    engines = (engine(512, 16.0), engine(2048, 7.0), engine(512, 18.0))
    text = table([GraphSizes(date="2026-11-29", machine="x", versions="y", engines=engines)])
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    assert rows[0] == ["", "m, up to 512", "m, up to 2,048"]
    assert rows[-1] == ["640 alone", "17.0 ms (16.0 to 18.0)", "7.0 ms"]
