"""Measurement of what torch reaches on a device: bandwidth of reading, and 16-bit matrix products.

As a script (``python gpu_bench.py SECONDS``) it takes the first GPU and prints one JSON object; it then runs in an
engine's own Python, so it imports torch and the standard library only. It ends itself if a GPU hangs.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable

import torch

__all__ = ["bytes_per_s", "flops_per_s", "random_matrix"]

_READ_BYTES = {"cpu": 256 * 2**20, "cuda": 2**30}  # well beyond the caches
_MATMUL_SIZE = {"cpu": 1024, "cuda": 8192}
_COLUMNS = 4096
_DRAWN_NUMBERS = {"cpu": 2**20, "cuda": 2**32}  # then repeated: a CPU takes a second for those of a reading
_SEED = 0
_LIMIT_S = 120  # of the script, torch's import and the GPU's start included


def bytes_per_s(kind: str, seconds: float, size_bytes: int | None = None) -> float:
    """Return the bandwidth of reading as a step reads its weights: a 16-bit matrix times one vector."""
    size_bytes = size_bytes or _READ_BYTES[kind]
    weights = random_matrix(kind, size_bytes // 2 // _COLUMNS, _COLUMNS)
    vector = random_matrix(kind, 1, _COLUMNS)
    return weights.numel() * 2 / best_s(kind, seconds, lambda: torch.nn.functional.linear(vector, weights))


def flops_per_s(kind: str, seconds: float, size: int | None = None) -> float:
    """Return the rate of multiplying two square matrices of 16-bit numbers."""
    size = size or _MATMUL_SIZE[kind]
    matrix = random_matrix(kind, size, size)
    return 2 * size**3 / best_s(kind, seconds, lambda: matrix @ matrix)


def random_matrix(kind: str, rows: int, columns: int) -> torch.Tensor:
    """Return the same normal 16-bit numbers at each call.

    Equal numbers would flatter a GPU at its power limit: the fewer bits change, the higher it clocks.
    """
    drawn = min(rows, max(1, _DRAWN_NUMBERS[kind] // columns))
    generator = torch.Generator(kind).manual_seed(_SEED)
    block = torch.randn(drawn, columns, dtype=torch.bfloat16, device=kind, generator=generator)
    return block if drawn == rows else block.repeat(-(-rows // drawn), 1)[:rows]


def best_s(kind: str, seconds: float, work: Callable[[], object]) -> float:
    """Return the shortest of the runs that fit into ``seconds`` (at least three) after one that warms up."""
    times: list[float] = []
    with torch.inference_mode():
        work()
        begun = time.perf_counter()
        while len(times) < 3 or time.perf_counter() - begun < seconds:
            if kind == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            work()
            if kind == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    signal.alarm(_LIMIT_S)
    if not torch.cuda.is_available():
        sys.exit(f"torch {torch.__version__} sees no GPU")
    each = float(sys.argv[1]) / 2
    reached = {"memory_bytes_per_s": bytes_per_s("cuda", each), "flops_16bit_per_s": flops_per_s("cuda", each)}
    print(json.dumps(reached))


if __name__ == "__main__":
    main()
