"""The table of graphs' sizes has a column for each largest one."""

from __future__ import annotations

from tests.bench.graph_sizes import Engine, GraphSizes, Prompts, table


def test_a_cell_is_the_median_of_the_rounds_with_their_range() -> None:
    def engine(largest: int, ms: float) -> Engine:
        prompts = (Prompts(case="alone", batch=0, tokens=640, seconds=(9.0, ms / 1e3, 0.001)),)
        return Engine(model="m", largest=largest, start_s=20.0, kv_blocks=1000, prompts=prompts)

    engines = (engine(512, 16.0), engine(2048, 7.0), engine(512, 18.0))
    text = table([GraphSizes(date="2026-11-29", machine="x", versions="y", engines=engines)])
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    assert rows[0] == ["", "m, up to 512", "m, up to 2,048"]
    assert rows[-1] == ["640 alone", "17.0 ms (16.0 to 18.0)", "7.0 ms"]
