"""A worker as Kubernetes objects: a Deployment, a Service, and a ConfigMap where its engine reads files."""

from __future__ import annotations

import math

from iserve.export.worker_container import FILES, PORT, ExportedWorker
from iserve.export.yaml_text import Value, comment, document

__all__ = ["kubernetes_objects"]

_LOOK_S = 10


def kubernetes_objects(worker: ExportedWorker, claim: str) -> str:
    """Return the objects, one document each.

    ``claim``: the PersistentVolumeClaim that has the checkpoint in its root.
    """
    objects = [_deployment(worker, claim), _service(worker)]
    if worker.files:
        objects.insert(0, _config_map(worker))
    return comment([*worker.remarks, *_own_remarks(worker, claim)]) + "---\n".join(map(document, objects))


def _metadata(worker: ExportedWorker) -> dict[str, Value]:
    return {"name": worker.label, "labels": _labels(worker)}


def _labels(worker: ExportedWorker) -> dict[str, Value]:
    return {"app.kubernetes.io/name": worker.label, "app.kubernetes.io/component": worker.engine}


def _config_map(worker: ExportedWorker) -> dict[str, Value]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(worker),
        "data": dict(worker.files),
    }


def _deployment(worker: ExportedWorker, claim: str) -> dict[str, Value]:
    mounts: list[Value] = [
        {"name": "model", "mountPath": worker.model_path, "readOnly": True},
        {"name": "shared-memory", "mountPath": "/dev/shm"},
    ]
    volumes: list[Value] = [
        {"name": "model", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": str(worker.shared_bytes)}},
    ]
    if worker.files:
        mounts.append({"name": "files", "mountPath": FILES, "readOnly": True})
        volumes.append({"name": "files", "configMap": {"name": worker.label}})
    container: dict[str, Value] = {
        "name": "worker",
        "image": worker.image,
        "command": [worker.argv[0]],
        "args": [_literal(word) for word in worker.argv[1:]],
        "env": [{"name": name, "value": _literal(value)} for name, value in (*worker.env, *_threads(worker))],
        "ports": [{"name": "http", "containerPort": PORT}],
        "resources": _resources(worker),
        **_probes(worker),
        "securityContext": {"privileged": False, "allowPrivilegeEscalation": False},
        "volumeMounts": mounts,
    }
    pod: dict[str, Value] = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,  # vLLM reads variables that a service named vllm would set
        "terminationGracePeriodSeconds": math.ceil(worker.stop_grace_s),
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
        "volumes": volumes,
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _metadata(worker),
        "spec": {
            "replicas": worker.num_replicas,
            "strategy": {"type": "Recreate"},  # there need not be room for more
            "selector": {"matchLabels": {"app.kubernetes.io/name": worker.label}},
            "template": {"metadata": {"labels": _labels(worker)}, "spec": pod},
        },
    }


def _service(worker: ExportedWorker) -> dict[str, Value]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(worker),
        "spec": {
            "selector": {"app.kubernetes.io/name": worker.label},
            "ports": [{"name": "http", "port": PORT, "targetPort": "http"}],
        },
    }


def _literal(text: str) -> str:
    """Escape ``$(NAME)``, which Kubernetes replaces in commands and variables."""
    return text.replace("$(", "$$(")


def _threads(worker: ExportedWorker) -> list[tuple[str, str]]:
    """Return the thread count of each process; nothing is pinned, for the cores of the container are not known."""
    each = len(worker.cores) // worker.num_cpu_devices if worker.num_cpu_devices else 0
    return [("OMP_NUM_THREADS", str(each))] if each else []


def _resources(worker: ExportedWorker) -> dict[str, Value]:
    if worker.num_gpus:
        return {"limits": {"nvidia.com/gpu": worker.num_gpus}}
    cores: dict[str, Value] = {"cpu": len(worker.cores)} if worker.cores else {}
    memory: dict[str, Value] = {} if worker.host_bytes is None else {"memory": str(worker.host_bytes)}
    return {"requests": {**cores, **memory}, "limits": cores}


def _probes(worker: ExportedWorker) -> dict[str, Value]:
    """Return the probes, as a daemon's: how long a start may take, when it takes no requests, when it is
    restarted.
    """
    asked: dict[str, Value] = {
        "httpGet": {"path": "/health", "port": "http"},
        "periodSeconds": _LOOK_S,
        "timeoutSeconds": math.ceil(worker.probe_timeout_s),
    }
    return {
        "startupProbe": {**asked, "failureThreshold": math.ceil(worker.start_timeout_s / _LOOK_S)},
        "readinessProbe": {**asked, "failureThreshold": worker.probe_misses},
        "livenessProbe": {**asked, "failureThreshold": math.ceil(worker.unresponsive_s / _LOOK_S)},
    }


def _own_remarks(worker: ExportedWorker, claim: str) -> list[str]:
    remarks = [
        f"The claim {claim} must have the checkpoint's files (config.json, weights, tokenizer) in its root."
    ]
    if worker.num_replicas > 1:
        remarks.append(
            f"{worker.num_replicas} replicas: the Service spreads connections over them, whatever each has to do; "
            "iServe's gateway would send each request to the one with the fewest. All of them read the claim."
        )
    if worker.num_gpus:
        remarks.append(
            "Kubernetes chooses the GPUs: where nodes differ, add a nodeSelector for the kind planned for."
        )
    elif worker.cores:
        remarks.append("Kubernetes chooses the cores: workers are not pinned as they are under iServe's daemon.")
    return remarks
