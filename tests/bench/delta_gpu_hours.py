"""GPU-hours of 32 variants: deltas in slots, swapped models, and a vLLM for each on as many GPUs as memory needs.

    python -m tests.bench.delta_gpu_hours

Computed from what was measured on an H200: the contest (``delta_contest``), and the memory of a vLLM that has
Llama-3.1-8B's shape (``full_model_accuracy``). A side that was overloaded is charged for what it ended. A vLLM for
each variant was never run: it is charged as if it answered every request as it arrives, which is the least that
its GPUs can take for a request at that rate.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.delta_contest import LAWS, MOST_ROWS, ORDERS, VARIANTS
from tests.bench.kept import read_kept

__all__ = [
    "KV_ROOMS",
    "USABLE_SHARE",
    "GpuHours",
    "ServerMemory",
    "gpu_hours",
    "gpus_by_memory",
    "read_server_memory",
    "table",
]

RESULTS = Path(__file__).with_name("results")
_MEMORY = "h200-vllm-0.33/Llama-3.1-8B-16bit-tp1-pp1.json.xz"
USABLE_SHARE = 0.9  # of a GPU, for all its servers together; assumed
KV_ROOMS = {  # tokens of the KV cache of each server; assumed
    f"KV of {MOST_ROWS} mean requests": MOST_ROWS * (256 + 200),
    "KV of the longest request": 1536 + 512,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerMemory:
    """Measured memory of one vLLM and its GPU.

    Attributes:
        fixed_bytes: weights, the largest step's activations, graphs and runtime.
    """

    gpu_bytes: int
    fixed_bytes: int
    kv_bytes_per_token: float


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuHours:
    """GPU time of one way to serve the contest's requests.

    Attributes:
        is_estimate: GPUs and rate are computed; else both were measured.
        e2e_s, ttft_s: mean and P99; None: not measured.
    """

    law: str
    served_by: str
    gpus: int
    requests_per_s: float
    is_estimate: bool
    e2e_s: tuple[float, float] | None = None
    ttft_s: tuple[float, float] | None = None

    @property
    def per_1000_requests(self) -> float:
        return self.gpus * 1000 / (3600 * self.requests_per_s)


def read_server_memory(content: bytes) -> ServerMemory:
    """Return the memory that a comparison of predictions with a whole model measured."""
    found = json.loads(content)
    (rank,) = found["whole_memory"]
    parts = ("weights_bytes", "activation_peak_bytes", "graph_bytes", "runtime_bytes")
    return ServerMemory(
        gpu_bytes=found["profile"]["machine"]["device"]["memory_bytes"],
        fixed_bytes=sum(rank[part] for part in parts),
        kv_bytes_per_token=rank["kv_bytes"] / rank["kv_room_tokens"],
    )


def gpus_by_memory(memory: ServerMemory, servers: int, kv_tokens: int, usable: float = USABLE_SHARE) -> int:
    """Return the GPUs that ``servers`` need, each on one of them with room for ``kv_tokens``."""
    of_one = memory.fixed_bytes + kv_tokens * memory.kv_bytes_per_token
    on_a_gpu = int(usable * memory.gpu_bytes / of_one)
    if not on_a_gpu:
        raise ValueError(
            f"a server of {of_one / 1e9:.1f} GB does not fit a GPU of {memory.gpu_bytes / 1e9:.1f} GB"
        )
    return math.ceil(servers / on_a_gpu)


def gpu_hours() -> list[GpuHours]:
    """Return every way to serve, by law, from the files that are kept."""
    rows = [
        row for name in ("contest_slots", "contest_swapping") for row in _rows(name) if row["kind"] == "contest"
    ]
    memory = read_server_memory(read_kept(RESULTS / _MEMORY))
    return [
        each
        for law in LAWS
        for each in _of_law(law, {row["order"]: row for row in rows if row["law"] == law}, memory)
    ]


def _of_law(law: str, rows: dict[str, Any], memory: ServerMemory) -> Iterator[GpuHours]:
    slots = rows["slots"]
    arrived_per_s = slots["requests"] / LAWS[law]
    yield _measured(law, "iServe, 32 slots", slots)
    carrying = math.ceil(arrived_per_s / slots["ended_per_s"])
    yield _computed(law, "iServe, on GPUs that carry the rate", carrying, arrived_per_s)
    for room, tokens in KV_ROOMS.items():
        gpus = gpus_by_memory(memory, VARIANTS, tokens)
        yield _computed(law, f"a vLLM for each variant, {room}", gpus, arrived_per_s)
    for order in ORDERS:
        yield _measured(law, f"swapping, {order}", rows[order])


def _computed(law: str, served_by: str, gpus: int, requests_per_s: float) -> GpuHours:
    return GpuHours(law=law, served_by=served_by, gpus=gpus, requests_per_s=requests_per_s, is_estimate=True)


def _measured(law: str, served_by: str, row: dict[str, Any]) -> GpuHours:
    return GpuHours(
        law=law,
        served_by=served_by,
        gpus=1,
        requests_per_s=row["ended_per_s"],
        is_estimate=False,
        e2e_s=(row["e2e_s"]["mean"], row["e2e_s"]["p99"]),
        ttft_s=(row["ttft_s"]["mean"], row["ttft_s"]["p99"]),
    )


def _rows(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((RESULTS / "delta_served_h200" / f"{name}.json").read_bytes())["rows"]
    return found


def table(found: list[GpuHours]) -> str:
    """Return GPU-hours for 1,000 requests and times by law, in Markdown."""
    lines = [
        "| requests | served by | GPUs | requests/s | GPU-hours for 1,000 | to iServe's | E2E, s | TTFT, s |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for each in found:
        least = next(one for one in found if one.law == each.law).per_1000_requests
        mark = ", estimated" if each.is_estimate else ""
        cells = [
            {"zipf-bursts": "Zipf 1.5, bursts", "even": "even"}[each.law],
            each.served_by + mark,
            str(each.gpus),
            f"{each.requests_per_s:.2f}",
            f"{each.per_1000_requests:.4f}",
            f"{each.per_1000_requests / least:.1f}",
            *(
                "not measured" if time is None else f"{time[0]:.1f}, {time[1]:.1f}"
                for time in (each.e2e_s, each.ttft_s)
            ),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(gpu_hours()))
