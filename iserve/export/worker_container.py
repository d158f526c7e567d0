"""The worker of a launch as a container runtime has to know it: what all kinds of files have in common."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from daemon.devices import Device
from daemon.engines.base import Container, Engine, Inside
from daemon.settings import DaemonSettings
from daemon.worker_spec import WorkerSpec
from fingerprint.errors import ConfigError
from iserve import __version__
from iserve.planning.worker_launch import LaunchDocument

__all__ = ["FILES", "PORT", "ExportedWorker", "exported_worker"]

PORT = 8000
FILES = "/iserve"  # where the engine's files lie in the container
_ANY_ADDRESS = "0.0.0.0"
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,255}")
# Of /dev/shm, through which an engine's processes hand each other messages; Docker's default is 64 MiB.
_SHARED_BYTES = 8 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportedWorker:
    """Worker to export. Its times are those that a daemon gives a worker."""

    label: str  # its name in letters, digits and '-'
    engine: str
    image: str
    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    files: tuple[tuple[str, str], ...]
    model_path: str  # in the container
    checkpoint: str  # the folder here
    gpu_ids: tuple[str, ...]  # of this node; empty when planned for GPUs elsewhere
    num_gpus: int
    num_cpu_devices: int
    cores: tuple[int, ...]  # of this node, of all its CPU devices
    pinning: tuple[tuple[str, str], ...]  # variables that give each of them its own
    host_bytes: int | None  # of memory, for CPU workers
    shared_bytes: int
    start_timeout_s: float
    stop_grace_s: float
    probe_timeout_s: float
    probe_misses: int
    unresponsive_s: float
    remarks: tuple[str, ...]  # on the whole, for the head of a file
    num_replicas: int = 1


def exported_worker(
    launch: LaunchDocument,
    engine: Engine,
    *,
    elsewhere: bool,
    start_timeout_s: float,
    image: str | None = None,
    bare: bool = False,
) -> ExportedWorker:
    """Return the worker of ``launch`` in a container.

    Args:
        elsewhere: planned for GPUs that are not this node's.
        image: instead of the engine's own for the release that was planned for.
        bare: in no container: on this machine's devices and files, for itself alone.

    Raises:
        ConfigError: an image of no such name.
        BadInputError: as ``engine.container``.
    """
    if image is not None and not _IMAGE.fullmatch(image):
        raise ConfigError(f"the image {image[:80]!r} is no image's name; give one such as registry/name:tag")
    worker = replace(launch.worker, host=launch.worker.host if bare else _ANY_ADDRESS, port=PORT)
    model_path = worker.checkpoint if bare else f"/models/{worker.served_model}"
    devices = _numbered(launch.devices, anew=not bare)
    inside = Inside(model=model_path, files=FILES, release=launch.release, is_whole=launch.has_weights)
    container = engine.container(worker, inside, devices)
    times = DaemonSettings(home=Path(FILES))
    is_cpu = all(device.kind == "cpu" for device in launch.devices)
    return ExportedWorker(
        label=f"iserve-{worker.worker_id}".rstrip("-"),
        engine=engine.name,
        image=image or container.image,
        argv=container.argv,
        env=_environment(worker, devices, container),
        files=container.files,
        model_path=model_path,
        checkpoint=worker.checkpoint,
        gpu_ids=() if is_cpu or elsewhere else tuple(device.device_id for device in devices.values()),
        num_gpus=0 if is_cpu else len(devices),
        num_cpu_devices=len(devices) if is_cpu else 0,
        cores=tuple(sorted({core for device in launch.devices for core in device.cores})) if is_cpu else (),
        pinning=_pinning(devices) if is_cpu else (),
        host_bytes=sum(worker.promised_bytes().values()) if is_cpu else None,
        shared_bytes=_SHARED_BYTES,
        start_timeout_s=start_timeout_s,
        stop_grace_s=times.stop_grace_s,
        probe_timeout_s=times.probe_timeout_s,
        probe_misses=times.probe_misses,
        unresponsive_s=times.unresponsive_s,
        remarks=(*_remarks(launch, engine, bare=bare), *(container.notes if image is None else ())),
        num_replicas=launch.plan.replicas,
    )


def _numbered(devices: tuple[Device, ...], *, anew: bool) -> dict[str, Device]:
    """Return devices by id; ``anew``: numbered from 0 in the node's order, as a container sees its GPUs."""
    ordered = sorted(devices, key=lambda device: device.index)
    return {d.device_id: replace(d, index=index) if anew else d for index, d in enumerate(ordered)}


def _environment(
    worker: WorkerSpec, devices: dict[str, Device], container: Container
) -> tuple[tuple[str, str], ...]:
    """Return the engine's variables, and a daemon's: exactly its devices, in stage order."""
    used = [devices[device_id] for stage in worker.stages for device_id in stage.device_ids]
    gpus = ",".join(str(device.index) for device in used if device.kind == "cuda")
    added = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": gpus}
    return tuple((added | dict(container.env)).items())


def _pinning(devices: dict[str, Device]) -> tuple[tuple[str, str], ...]:
    cores = [f"{name}={','.join(map(str, device.cores))}" for name, device in devices.items() if device.cores]
    return (("ISERVE_DEVICE_CORES", ";".join(cores)),) if cores else ()


def _remarks(launch: LaunchDocument, engine: Engine, *, bare: bool) -> tuple[str, ...]:
    plan, config, limits = launch.plan, launch.worker.config, launch.worker.limits
    layers = [stage.num_layers for stage in launch.worker.stages]
    basis = "datasheets" if launch.release is None else f"what was measured on {engine.name} {launch.release}"
    remarks = [
        f"Made by iServe {__version__}: {plan.model} on {plan.hardware}, intent {plan.intent}.",
        f"{config} on {engine.name}, layers per stage {layers}; planned with {basis}.",
        f"Requests at once: {limits.max_batch}; tokens of one, in and out: {limits.max_context_tokens}; "
        f"memory of a device: {limits.memory_bytes_per_device / 2**30:.2f} GiB.",
        f"iServe has not run this {'command' if bare else 'image'}. Clients that reach the port can use the model"
        f"{'; it is on loopback' if bare else ': put a gateway before it'}.",
    ]
    if engine.warm_up_bursts(launch.worker):
        remarks.append(
            "There is no warm-up as under iServe's daemon: the first prompts of a size may wait for kernels to be "
            "compiled."
        )
    if not launch.has_weights:
        remarks.append(
            "The weights were not here and were not checked: the folder that is served needs them, and the "
            "tokenizer."
        )
    return (*remarks, *(f"Note: {note}" for note in plan.notes))
