"""Two workers with adapter slots and the table of their route, for the bench of routing, on two engines.

Workers of the embedded engine are deployed by iServe's command line. Servers of vLLM are started here, both at
once, with the arguments and the warm-up that the daemon gives them (``daemon.engines.vllm.launch``): a deploy
would measure the model for minutes first. Store and route table are then written as the controller writes them, so
that the gateway reads the same files either way. vLLM's prefix cache is off: both policies get the same prompts.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from daemon.engines.vllm import launch
from daemon.process import read_record
from daemon.variants.store import VariantStore
from daemon.worker_spec import WorkerLimits
from fingerprint.codec import from_json, to_json
from fingerprint.config import DeploymentConfig
from fingerprint.lora.adapter import read_adapter
from iserve.client import ControllerClient
from iserve.demo import demo_adapter_path
from iserve.route_table import GatewayLimits, Route, RouteTable, VariantRoute, WorkerTarget
from tests.bench.delta_served_files import LLAMA_8B
from tests.bench.engine_contest import PlacedReplica
from tests.bench.engine_contest_run import Worker, _nvidia, _version, _wait_for, write_models
from tests.bench.lora_adapters import write_adapter
from tests.bench.variant_clients import Asked, at_times
from traces.simulator.step_model import Limits

__all__ = ["CASES", "NAME", "PATIENCE_S", "RoutingCase", "Served", "on_torch", "on_vllm", "replica", "route_table"]

NAME, PATIENCE_S = "base", 600.0
RANK, CONTENTS = 16, ("capitals", "shout")  # contents: of the embedded engine's variants
SLOTS, NUM_CONTENTS, CONTEXT, STEP_TOKENS = 8, 4, 512, 8192  # on vLLM
_SHARE = 0.9  # of a GPU's memory, to its server
# Requests at a worker for each that it runs, as the controller writes it without admission control.
_SENT_A_SLOT = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingCase:
    """Deployment and requests of a comparison."""

    file: str  # of the recording
    variants: int
    batch: int  # requests that a worker runs at once
    input_tokens: int
    output_tokens: int
    token_ids: tuple[int, int]  # of prompts, the second one excluded
    loop_clients: int  # of the closed loop: twice the requests that both workers run at once
    turn_s: float
    rounds: int
    warm_up_s: float  # of requests before the first measurement


CASES = {
    "torch": RoutingCase(
        file="variant_routing_cpu.json.gz",
        variants=60,
        batch=4,
        input_tokens=24,
        output_tokens=8,
        token_ids=(10, 90),
        loop_clients=16,
        turn_s=30.0,
        rounds=4,
        warm_up_s=0.0,
    ),
    "vllm": RoutingCase(
        file="variant_routing_vllm.json.gz",
        variants=200,
        batch=32,
        input_tokens=256,
        output_tokens=64,
        token_ids=(10, 2000),
        loop_clients=38,  # 9.5 requests ask for 8 variants, one for each slot
        turn_s=35.0,
        rounds=3,
        warm_up_s=8.0,
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """Source of a gateway: the files that it serves from, and the workers behind its route."""

    home: Path  # has ``run/routes.json`` and ``variants``
    route: Route
    machine: str
    versions: str = ""
    start_s: tuple[float, ...] = ()  # until each worker was ready


class Home:
    """Installation in a folder of its own, by the command line."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        kept = {name: value for name, value in os.environ.items() if not name.startswith("ISERVE_")}
        own = {"ISERVE_HOME": str(folder), "ISERVE_PORT": "0", "ISERVE_API_PORT": "0", "HF_HUB_OFFLINE": "1"}
        self._environment = kept | own | {"ISERVE_CPU_DEVICES": "2", "ISERVE_PROFILE_SECONDS": "120"}

    def run(self, *words: object) -> None:
        command = [str(Path(sys.executable).with_name("iserve")), *map(str, words)]
        subprocess.run(command, env=self._environment, check=True, timeout=PATIENCE_S)

    def controller(self) -> ControllerClient:
        record = read_record(self.folder / "run" / "controller.json")
        assert record is not None, "the controller runs"
        return ControllerClient(record.url, record.token).patient(PATIENCE_S)

    def table(self) -> RouteTable:
        return from_json((self.folder / "run" / "routes.json").read_bytes(), RouteTable)


@contextmanager
def on_torch(folder: Path) -> Iterator[Served]:
    """Deploy the demo model with two workers on the CPU, and register all variants."""
    home = Home(folder)
    machine = f"{os.uname().machine}, {os.cpu_count()} CPUs"
    try:
        yield Served(home=folder, route=_deploy(home, CASES["torch"]), machine=machine)
    finally:
        home.run("down")


def _deploy(home: Home, case: RoutingCase) -> Route:
    """Deploy the model and register all variants; return the route once it has them all."""
    home.run(
        *("deploy", "iserve-demo", "--name", NAME, "--engine", "torch", "--replicas", 2, "--policy", "packing"),
        *("--quality", "exact", "--batch", case.batch, "--context", 2 * (case.input_tokens + case.output_tokens)),
        *("--input-tokens", case.input_tokens, "--output-tokens", case.output_tokens),
        *("--variants", case.variants, "--rank", RANK),
    )
    for number in range(case.variants):
        adapter = str(demo_adapter_path(CONTENTS[number % len(CONTENTS)]))
        body = {"name": f"v{number}", "base": NAME, "path": adapter}
        home.controller().post("/api/v1/variants", body, dict[str, Any])
    deadline = time.monotonic() + PATIENCE_S
    while True:
        (route,) = home.table().routes
        if len(route.variants) == case.variants and [one.ready for one in route.workers] == [True, True]:
            return route
        assert time.monotonic() < deadline, "the table has two workers and all variants"
        time.sleep(0.5)


@contextmanager
def on_vllm(folder: Path, python: str, gpus: Sequence[int]) -> Iterator[Served]:
    """Start a server of Llama-3.1-8B's shape with random weights on each GPU, and store all variants meanwhile.

    ``python`` is vLLM's. Raises SystemExit where a server ends or is not ready in time.
    """
    case = CASES["vllm"]
    write_models([(NAME, json.dumps(LLAMA_8B))], folder)
    with ExitStack() as stack:
        workers = []
        for number, gpu in enumerate(gpus):
            total_bytes = int(_nvidia("memory.total")[gpu]) * 2**20
            workers.append(Worker(number, replica(case, gpu, total_bytes), total_bytes, folder, python))
            stack.callback(workers[-1].end)
        urls = [f"http://127.0.0.1:{worker.port}" for worker in workers]
        began_s = time.monotonic()
        table = route_table(case, urls, _stored(folder, case))
        (folder / "run").mkdir(exist_ok=True)
        (folder / "run" / "routes.json").write_bytes(to_json(table))
        print(f"{time.strftime('%H:%M:%S')} variants stored in {time.monotonic() - began_s:.0f} s", flush=True)
        _wait_for(workers)
        began_s = time.monotonic()
        asyncio.run(_warm_up(urls, case))
        print(f"{time.strftime('%H:%M:%S')} warmed up in {time.monotonic() - began_s:.0f} s", flush=True)
        yield Served(
            home=folder,
            route=table.routes[0],
            machine=", ".join(_nvidia("name")[gpu] for gpu in gpus),
            versions=f"vllm {_version(python)}, driver {_nvidia('driver_version')[0]}",
            start_s=tuple(round(worker.ready_s or 0.0, 1) for worker in workers),
        )


def replica(case: RoutingCase, gpu: int, total_bytes: int) -> PlacedReplica:
    """Return a worker with the slots and limits of the case on one GPU."""
    return PlacedReplica(
        deployment=NAME,
        config=DeploymentConfig(engine="vllm", adapter_slots=SLOTS, adapter_rank=RANK),
        devices=(gpu,),
        bytes_per_gpu=int(_SHARE * total_bytes),
        limits=Limits(max_batch=case.batch, max_context_tokens=CONTEXT, max_batched_tokens=STEP_TOKENS),
    )


def _stored(home: Path, case: RoutingCase) -> list[VariantRoute]:
    """Store ``NUM_CONTENTS`` random adapters; return routes of variants that have them in turn.

    The engine reads the content of each name anew: a name has an adapter of its own there.
    """
    store, contents = VariantStore(home / "variants"), []
    for number in range(NUM_CONTENTS):
        source = home / f"adapter-{number}"
        write_adapter(source, LLAMA_8B, RANK, seed=number)
        contents.append(store.add(read_adapter(source)))
        store.loadable(contents[-1].content_hash)
    variants = []
    for number in range(case.variants):
        content = contents[number % NUM_CONTENTS]
        variants.append(
            VariantRoute(
                name=f"v{number}",
                engine_name=f"v{number}@{content.content_hash[:16]}",
                content_hash=content.content_hash,
                created=number,
                num_bytes=content.num_bytes,
            )
        )
    return variants


def route_table(case: RoutingCase, urls: Sequence[str], variants: Sequence[VariantRoute]) -> RouteTable:
    """Return the table that the controller would write for these workers."""
    config = replica(case, 0, 2**30).config
    route = Route(
        name=NAME,
        model=NAME,
        created=0,
        max_context_tokens=CONTEXT,
        workers=tuple(
            WorkerTarget(worker_id=f"w-{number}", url=url, ready=True, max_outstanding=_SENT_A_SLOT * case.batch)
            for number, url in enumerate(urls)
        ),
        adapter_slots=config.adapter_slots,
        loaded_adapters=config.loaded_adapters,
        variants=tuple(variants),
    )
    return RouteTable(version=1, auth_required=False, routes=(route,), keys=(), limits=GatewayLimits())


async def _warm_up(urls: Sequence[str], case: RoutingCase) -> None:
    """Send each worker the bursts that a daemon sends before a worker counts as ready."""
    limits = WorkerLimits(
        max_batch=case.batch,
        max_batched_tokens=STEP_TOKENS,
        max_context_tokens=CONTEXT,
        kv_tokens=case.batch * CONTEXT,
        memory_bytes_per_device=0,
    )
    rng = np.random.default_rng(0)
    for burst in launch.warm_up_bursts(limits):
        prompts = rng.integers(*case.token_ids, (burst.requests, burst.input_tokens)).tolist()
        asked = [Asked(model=NAME, prompt=tuple(prompt), tokens=burst.output_tokens) for prompt in prompts]
        answers = await asyncio.gather(*(at_times(url, asked, [0.0] * len(asked)) for url in urls))
        if failed := [one.error for some in answers for one in some if not one.is_whole]:
            raise SystemExit(f"the warm-up of {burst} failed: {failed[0]}")
