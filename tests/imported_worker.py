"""Shims for workers, in a process that has imported the embedded engine: its worker is forked from the shim.

That takes 0.2 s of a core where a started worker takes two to import torch and transformers. Another engine's
worker, and the ranks beyond the first, are started.

While a home has the file ``HOLD_LOADS``, its workers hold each load of a variant once they have begun it, and add
a line to ``HELD_LOADS`` there: a test can kill a worker in the midst of a load.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

os.environ["HF_HUB_OFFLINE"] = "1"  # read once, as in the environment of each installation

from daemon import shim
from daemon.torch_engine import __main__ as worker
from tests.fork_server import HELD_LOADS, HOLD_LOADS, Order, become, import_trimmed

__all__ = ["main"]

_LOOK_EVERY_S = 0.01

_USED = (
    "aiohttp.web",
    "daemon.torch_engine.api.adapters",
    "daemon.torch_engine.api.server",
    "daemon.torch_engine.parallel.runner",
    "transformers.models.llama.modeling_llama",  # of the demo model
)
import_trimmed(_USED)

_WORKER = (sys.executable, "-m", "daemon.torch_engine")


class _ForkedWorker:
    """Worker as the shim's child, with what a shim uses of ``subprocess.Popen``."""

    def __init__(self, order: Order, prepare: Callable[[], None]) -> None:
        reading, writing = os.pipe()
        begins, begun = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.dup2(writing, 1)
            become(order, partial(_run, prepare))
        os.close(writing)
        os.close(begun)
        os.read(begins, 1)  # nothing, once the worker has closed it
        os.close(begins)
        self.stdout: IO[bytes] = os.fdopen(reading, "rb", buffering=0)

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _run(prepare: Callable[[], None]) -> int:
    os.setpgid(0, 0)
    prepare()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.closerange(3, 1024)  # the shim's, its lock among them
    if home := os.environ.get("ISERVE_HOME"):
        adapters = vars(sys.modules["daemon.torch_engine.api.adapters"])
        adapters["check_variant"] = partial(_check_held, adapters["check_variant"], Path(home))
    return worker.main()


def _check_held(check: Callable[[Path, int], None], home: Path, folder: Path, max_rank: int) -> None:
    """Check the variant in ``folder``, as a load begins, once loads are not held."""
    if (home / HOLD_LOADS).exists():
        with (home / HELD_LOADS).open("a") as held:
            held.write(f"{folder.name}\n")
    while (home / HOLD_LOADS).exists():
        time.sleep(_LOOK_EVERY_S)
    check(folder, max_rank)


def _start(
    argv: Sequence[str], *, cwd: Path, env: Mapping[str, str], preexec_fn: Callable[[], None], **started: Any
) -> _ForkedWorker | subprocess.Popen[bytes]:
    if tuple(argv[:3]) != _WORKER:
        return subprocess.Popen(argv, cwd=cwd, env=env, preexec_fn=preexec_fn, **started)
    order = Order(argv, argv[2:], env, str(cwd), os.devnull, "/dev/stdout", "/dev/stdout")
    return _ForkedWorker(order, preexec_fn)


vars(shim)["subprocess"] = SimpleNamespace(**vars(subprocess) | {"Popen": _start})


def main() -> int:
    """Keep the worker of the folder that ``sys.argv`` names."""
    return shim.main(sys.argv[1:])
