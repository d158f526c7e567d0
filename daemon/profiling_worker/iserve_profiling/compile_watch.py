"""Times at which this process compiled, tuned or loaded a kernel while it served.

Kernels of Triton and FlashInfer are made at their first use for a shape, which took 0.3 to 1.4 s on an H200 within
a call of 50 ms. A call in which that happened says nothing of later calls. Runs in the engine's own processes and
imports nothing of theirs: packages that the engine has imported are watched.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

# Module, class, method. A release may lack some: calls that do not agree are noticed without them.
WATCHED = (
    ("triton.runtime.jit", "JITFunction", "_do_compile"),
    ("triton.compiler.compiler", "CompiledKernel", "_init_handles"),  # loads what the disk had
    ("triton.runtime.autotuner", "Autotuner", "_bench"),
    ("torch._inductor.runtime.triton_heuristics", "CachingAutotuner", "benchmark_all_configs"),
    ("flashinfer.jit.core", "JitSpec", "build_and_load"),
    ("flashinfer.autotuner.autotuner", "AutoTuner", "_profile_single_kernel"),
    ("flashinfer.autotuner", "AutoTuner", "_profile_single_kernel"),
)
_MARK = "_iserve_watched"
_LEAST_S = 2e-4  # shorter ones found nothing to do
_LIMIT = 100_000  # compilations kept; later ones are not recorded


class CompileWatch:
    """Compilations of this process, each as its begin and end by ``time.perf_counter``."""

    def __init__(self) -> None:
        self._compilations: list[tuple[float, float]] = []
        self._lock = threading.Lock()  # kernels are compiled from several threads

    def install(self) -> int:
        """Watch each method of ``WATCHED`` whose module is imported by now; return how many are watched.

        Safe to call again: an engine imports some of them when it needs them.
        """
        found = 0
        for module, name, method in WATCHED:
            owner = getattr(sys.modules.get(module), name, None)
            inner = None if owner is None else owner.__dict__.get(method)
            if not callable(inner):
                continue
            found += 1
            if not hasattr(inner, _MARK):
                setattr(owner, method, self._timed(inner))
        return found

    def _timed(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(inner)
        def watched(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self._note(begin, time.perf_counter())

        setattr(watched, _MARK, True)
        return watched

    def _note(self, begin: float, end: float) -> None:
        with self._lock:
            if end - begin >= _LEAST_S and len(self._compilations) < _LIMIT:
                self._compilations.append((begin, end))

    def read(self) -> list[tuple[float, float]]:
        """Return the compilations since the last call, in the order of their ends."""
        with self._lock:
            compilations, self._compilations = self._compilations, []
        return compilations


WATCH = CompileWatch()
