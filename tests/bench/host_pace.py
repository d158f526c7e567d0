"""Variation of the host's pace: the launch of 32 small CUDA graphs and attentions, over seconds.

Run on the GPU machine: ``python tests/bench/host_pace.py``. Needs torch alone. As an engine launches a short
prefill: one graph a layer with an attention between. Prints, for each condition, percentiles of the host's part
(until all is launched) and of the GPU's, and the medians of tenths of the time: where those jump, the host's pace
did. ``distinct`` launches 32 graphs of their own, ``two`` two of them in turns, as a repeated fingerprint does.
"""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import torch

HIDDEN, TOKENS, LAYERS = 4096, 128, 32
_LOOKS = """
import time, pynvml
pynvml.nvmlInit()
gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
while True:
    pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM)
    pynvml.nvmlDeviceGetPowerUsage(gpu)
    pynvml.nvmlDeviceGetMemoryInfo(gpu)
    time.sleep(0.05)
"""


def _matrix(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) * 0.01


class Layers:
    """Layers as CUDA graphs, all of the same shape."""

    def __init__(self) -> None:
        self._input = _matrix(TOKENS, HIDDEN)
        self._heads = torch.randn(1, 32, TOKENS, 128, device="cuda", dtype=torch.bfloat16)
        self._weights = [
            (_matrix(HIDDEN, 6144), _matrix(HIDDEN, 11008), _matrix(11008, HIDDEN)) for _ in range(LAYERS)
        ]
        self._graphs = []
        for index in range(LAYERS):
            self._piece(index)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._piece(index)
            self._graphs.append(graph)

    def _piece(self, index: int) -> torch.Tensor:
        first, up, down = self._weights[index]
        _ = self._input @ first
        return torch.nn.functional.silu(self._input @ up) @ down + self._input

    def burst(self, order: list[int]) -> tuple[float, float]:
        """Seconds of the host and of the GPU."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun = time.perf_counter()
        begin.record()
        for index in order:
            self._graphs[index].replay()
            torch.nn.functional.scaled_dot_product_attention(self._heads, self._heads, self._heads, is_causal=True)
        end.record()
        launched = time.perf_counter()
        torch.cuda.synchronize()
        return launched - begun, begin.elapsed_time(end) / 1e3


def condition(layers: Layers, name: str, order: list[int], *, seconds: float = 5.0, gap_s: float = 0.002) -> None:
    end, rows = time.monotonic() + seconds, []
    while time.monotonic() < end:
        rows.append(layers.burst(order))
        time.sleep(gap_s)
    host, gpu = 1e3 * np.array(rows).T
    parts = " | ".join(
        f"{which} p5/p50/p95 {'/'.join(f'{ms:.2f}' for ms in np.percentile(times, [5, 50, 95]))} ms"
        for which, times in (("host", host), ("GPU", gpu))
    )
    tenths = " ".join(f"{np.median(part):.2f}" for part in np.array_split(host, 10))
    print(f"{name:28s} {parts} | host in tenths {tenths}", flush=True)


def main() -> None:
    layers = Layers()
    distinct, two = list(range(LAYERS)), [0, 1] * (LAYERS // 2)
    for _ in range(3):
        layers.burst(distinct)
    for name, order in (("distinct", distinct), ("two", two), ("distinct, again", distinct)):
        condition(layers, name, order)
    looking = subprocess.Popen([sys.executable, "-c", _LOOKS])
    try:
        condition(layers, "distinct, NVML every 50 ms", distinct)
    finally:
        looking.kill()
        looking.wait()
    condition(layers, "distinct, back to back", distinct, gap_s=0.0)
    condition(layers, "distinct, every 50 ms", distinct, gap_s=0.05)


if __name__ == "__main__":
    main()
