"""A worker as a Compose file (https://compose-spec.io). ``docker compose`` 2.23.1 or newer starts it."""

from __future__ import annotations

import math

from iserve.export.worker_container import FILES, PORT, ExportedWorker
from iserve.export.yaml_text import Value, comment, document

__all__ = ["compose_file"]

_HEALTH = "import urllib.request; urllib.request.urlopen({url!r}, timeout={timeout_s:g})"
_LOOK_S = 10


def compose_file(worker: ExportedWorker, folder: str) -> str:
    """Return the file. ``folder``: of the checkpoint, on the machine that runs it."""
    service: dict[str, Value] = {
        "image": worker.image,
        "entrypoint": [worker.argv[0]],
        "command": [_literal(word) for word in worker.argv[1:]],
        "environment": {name: _literal(value) for name, value in (*worker.env, *worker.pinning)},
        "ports": [f"127.0.0.1:{PORT}:{PORT}"],
        "volumes": [
            {
                "type": "bind",
                "source": _literal(folder),
                "target": worker.model_path,
                "read_only": True,
                "bind": {"create_host_path": False},
            }
        ],
    }
    if worker.files:
        service["configs"] = [{"source": name, "target": f"{FILES}/{name}"} for name, _ in worker.files]
    if reserved := _reserved(worker):
        service["deploy"] = {"resources": {"reservations": reserved}}
    if worker.cores:
        service["cpuset"] = ",".join(map(str, worker.cores))
    service |= {
        "shm_size": worker.shared_bytes,
        "healthcheck": _health(worker),
        "stop_grace_period": f"{math.ceil(worker.stop_grace_s)}s",
        "restart": "unless-stopped",
        "init": True,
        "privileged": False,
        "security_opt": ["no-new-privileges:true"],
    }
    project: dict[str, Value] = {"name": worker.label, "services": {worker.label: service}}
    if worker.files:
        project["configs"] = {name: {"content": _literal(text)} for name, text in worker.files}
    return comment([*worker.remarks, *_own_remarks(worker)]) + document(project)


def _literal(text: str) -> str:
    """Escape ``$NAME``, which Compose replaces in every value."""
    return text.replace("$", "$$")


def _reserved(worker: ExportedWorker) -> dict[str, Value]:
    if not worker.num_gpus:
        return {} if worker.host_bytes is None else {"memory": str(worker.host_bytes)}
    which: dict[str, Value] = (
        {"device_ids": list(worker.gpu_ids)} if worker.gpu_ids else {"count": worker.num_gpus}
    )
    return {"devices": [{"driver": "nvidia", **which, "capabilities": ["gpu"]}]}


def _health(worker: ExportedWorker) -> dict[str, Value]:
    url = f"http://127.0.0.1:{PORT}/health"
    look = _HEALTH.format(url=url, timeout_s=worker.probe_timeout_s)
    return {
        "test": ["CMD", "python3", "-c", look],  # every engine's image has it
        "interval": f"{_LOOK_S}s",
        "timeout": f"{math.ceil(worker.probe_timeout_s) + 5}s",  # an interpreter's start included
        "retries": worker.probe_misses,
        "start_period": f"{math.ceil(worker.start_timeout_s)}s",
    }


def _own_remarks(worker: ExportedWorker) -> list[str]:
    remarks = [f"It answers on http://127.0.0.1:{PORT}/v1 once it is healthy."]
    if worker.num_gpus and not worker.gpu_ids:
        remarks.append("Docker chooses the GPUs: name them with device_ids in the place of count.")
    return remarks
