"""A worker as a shell command: the engine's own server on this machine, or in a container by ``docker run``."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable

from iserve.export.worker_container import FILES, PORT, ExportedWorker

__all__ = ["docker_command", "server_command"]


def server_command(worker: ExportedWorker) -> str:
    """Return the engine's server with its environment, for a POSIX shell.

    ``worker`` is bare: not in a container.
    """
    return _command([*(f"{name}={shlex.quote(value)}" for name, value in worker.env), _server(worker.argv)])


def _server(argv: tuple[str, ...]) -> str:
    """Return the program, its subcommand and the model on one line, each option on its own."""
    options = next((i for i, word in enumerate(argv) if word.startswith("-")), len(argv))
    return _joined([*filter(None, [shlex.join(argv[:options])]), *map(shlex.quote, argv[options:])])


def docker_command(worker: ExportedWorker) -> str:
    """Return ``docker run`` in the foreground, for a POSIX shell; the engine's files are written first."""
    folder = f"./{worker.label}"
    options = [
        f"--name {shlex.quote(worker.label)}",
        *_devices(worker),
        f"-p 127.0.0.1:{PORT}:{PORT}",
        f"-v {shlex.quote(f'{worker.checkpoint}:{worker.model_path}:ro')}",
        *([f"-v {shlex.quote(f'{folder}:{FILES}:ro')}"] if worker.files else []),
        *(f"-e {shlex.quote(f'{name}={value}')}" for name, value in (*worker.env, *worker.pinning)),
        f"--shm-size {worker.shared_bytes}",
        f"--stop-timeout {math.ceil(worker.stop_grace_s)}",
        "--security-opt no-new-privileges:true",
        f"--entrypoint {shlex.quote(worker.argv[0])}",
        shlex.quote(worker.image),
        _server(worker.argv[1:]),
    ]
    return _files(worker, folder) + _command(["docker run --rm --init", *options])


def _devices(worker: ExportedWorker) -> list[str]:
    if worker.gpu_ids:
        return [f"--gpus {shlex.quote(_named(worker.gpu_ids))}"]
    if worker.num_gpus:
        return [f"--gpus {worker.num_gpus}"]
    cores = [f"--cpuset-cpus {','.join(map(str, worker.cores))}"] if worker.cores else []
    return cores if worker.host_bytes is None else [*cores, f"--memory-reservation {worker.host_bytes}"]


def _named(gpu_ids: tuple[str, ...]) -> str:
    """Quote a value that Docker reads as CSV: the quotes keep several devices in one field."""
    return f'"device={",".join(gpu_ids)}"'


def _files(worker: ExportedWorker, folder: str) -> str:
    """Return commands that write the files; no line of a file is the mark of its end."""
    if not worker.files:
        return ""
    written = [f"mkdir -p {shlex.quote(folder)}\n"]
    for name, text in worker.files:
        mark = _mark(text.splitlines())
        end = "" if text.endswith("\n") else "\n"
        written.append(f"cat > {shlex.quote(f'{folder}/{name}')} <<'{mark}'\n{text}{end}{mark}\n")
    return "".join(written)


def _mark(lines: Iterable[str]) -> str:
    mark, taken = "END", set(lines)
    while mark in taken:
        mark += "_"
    return mark


def _joined(parts: Iterable[str]) -> str:
    return " \\\n  ".join(parts)


def _command(parts: Iterable[str]) -> str:
    return _joined(parts) + "\n"
