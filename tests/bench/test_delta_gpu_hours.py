"""GPU-hours of 32 variants: the arithmetic, and what the kept measurements give."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench.delta_gpu_hours import (
    KV_ROOMS,
    GpuHours,
    ServerMemory,
    gpu_hours,
    gpus_by_memory,
    read_server_memory,
    table,
)

PAGE = Path(__file__).parents[2] / "docs" / "deltas.md"
MEMORY = ServerMemory(gpu_bytes=100, fixed_bytes=18, kv_bytes_per_token=0.5)


@pytest.mark.parametrize(
    ("servers", "kv_tokens", "usable", "gpus"),
    [
        (4, 4, 1.0, 1),  # 20 each, 5 on a GPU
        (6, 4, 1.0, 2),
        (4, 4, 0.79, 2),  # 3 on a GPU
        (4, 164, 1.0, 4),  # one fills a GPU
    ],
)
def test_servers_share_gpus_as_memory_allows(servers: int, kv_tokens: int, usable: float, gpus: int) -> None:
    assert gpus_by_memory(MEMORY, servers, kv_tokens, usable) == gpus


def test_a_server_that_fits_no_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        gpus_by_memory(MEMORY, 1, 166, 1.0)


def test_two_gpus_at_ten_requests_a_second_take_a_ninth_of_half_an_hour_for_1000() -> None:
    row = GpuHours(law="even", served_by="any", gpus=2, requests_per_s=10.0, is_estimate=True)
    assert row.per_1000_requests == pytest.approx(2 * 100 / 3600)


def test_memory_is_the_sum_of_its_measured_parts() -> None:
    rank = {"weights_bytes": 16, "activation_peak_bytes": 2, "graph_bytes": 0.5, "runtime_bytes": 0.25}
    rank |= {"kv_bytes": 80, "kv_room_tokens": 10}
    content = {"whole_memory": [rank], "profile": {"machine": {"device": {"memory_bytes": 150}}}}
    found = read_server_memory(json.dumps(content).encode())
    assert found == ServerMemory(gpu_bytes=150, fixed_bytes=18.75, kv_bytes_per_token=8.0)


def test_what_was_measured_has_times_and_what_was_computed_none() -> None:
    found = gpu_hours()
    assert {each.law for each in found} == {"zipf-bursts", "even"}
    for each in found:
        assert each.is_estimate == (each.e2e_s is None) == (each.ttft_s is None)
        assert each.is_estimate == (each.served_by != "iServe, 32 slots" and "swapping" not in each.served_by)


def test_slots_take_the_fewest_gpu_hours_and_a_vllm_for_each_variant_at_least_three_times_as_many() -> None:
    for law in ("zipf-bursts", "even"):
        slots, *rest = [each for each in gpu_hours() if each.law == law]
        assert all(each.per_1000_requests > slots.per_1000_requests for each in rest)
        of_each = [each for each in rest if each.served_by.startswith("a vLLM for each variant")]
        assert len(of_each) == len(KV_ROOMS)
        assert all(each.per_1000_requests > 3 * slots.per_1000_requests for each in of_each)


def test_the_page_has_the_table() -> None:
    assert table(gpu_hours()) in PAGE.read_text()
