"""Rank of two, in vLLM's own code with tensor parallelism on a CPU: loads on which the ranks have to agree.

    python -m tests.daemon.engines.vllm_delta_cases.rank_process SITE RANK STORE WORK

``STORE`` is a file that both ranks rendezvous at, ``WORK`` a folder with the deltas ``a`` and ``b`` and an adapter
of too large a rank. It prints a line of JSON: for each step what was said and what is loaded.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from tests.daemon.engines.vllm_delta_cases.tiny_model import request, tiny_model
from tests.daemon.engines.vllm_on_cpu import import_vllm
from tests.daemon.variant_kernels import VARIANTS_PATH


def steps(rank: int, work: Path) -> list[dict[str, Any]]:
    """Return what each step of the case answers on this rank."""
    from iserve_variants import vllm_manager

    tiny = tiny_model(background=True, ranks=2)
    manager, loader = tiny.manager, tiny.manager.loader
    a, b, large = (request(number, work / name) for number, name in ((1, "a"), (2, "b"), (3, "large")))
    found: list[dict[str, Any]] = []

    def ask(asked: Any) -> None:
        try:
            said = str(tiny.runner.add_lora(asked))
        except Exception as error:  # noqa: BLE001 - compared
            said = str(error)
        found.append({"said": said, "loaded": sorted(tiny.runner.list_loras()), "slots": manager.lora_index_to_id})
        found[-1]["slots"] = list(found[-1]["slots"])

    go, read = threading.Event(), loader._read
    if rank:  # the second rank reads for longer
        loader._read = lambda folder: (go.wait(120), read(folder))[1]
    ask(a)
    if not rank:
        loader.wait()
    ask(a)  # the first rank is done
    go.set()
    loader.wait()
    ask(a)
    ask(a)  # it is there
    go.clear()
    if not rank:
        loader._read = lambda folder: (_ for _ in ()).throw(ValueError("rank 0 cannot read b"))
    go.set()
    ask(b)
    loader.wait()
    ask(b)
    loader._read = read
    ask(b)
    loader.wait()
    activate = manager._activate_delta

    def fails_on_one(delta: Any) -> None:
        if not rank:
            raise RuntimeError("rank 0 is full")
        activate(delta)

    with patch.object(manager, "_activate_delta", fails_on_one):
        ask(b)
    ask(b)
    loader.wait()
    ask(b)
    ask(large)
    with patch.object(vllm_manager, "_is_delta", lambda folder: bool(rank)):
        tiny.runner.remove_lora(2)
        ask(b)
    found.append({"shards": {name: shard_sum(manager, name) for name in ("qkv_proj", "o_proj", "gate_up_proj")}})
    return found


def shard_sum(manager: Any, leaf: str) -> list[int]:
    """Return sums of delta a's codes and scales in layer 0, by which a rank's part is known."""
    deltas = manager.modules[f"layers.0.{leaf}"].deltas
    place = manager.runtime.places.of(manager.lora_index_to_id.index(1))
    codes, scales = deltas.codes[place], deltas.scales[place]
    return [int(codes.long().sum()), int(scales.view(torch.int16).long().sum())]


def main() -> None:
    """Run one rank."""
    site, rank, store, work = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    import_vllm(site)
    sys.path.insert(0, VARIANTS_PATH)
    import vllm
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        destroy_distributed_environment,
        destroy_model_parallel,
        init_distributed_environment,
        initialize_model_parallel,
    )

    vllm.__version__ = "0.33.0"
    from iserve_variants.plugin import register
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    MessageQueue.create_from_process_group = staticmethod(lambda *given, **named: None)  # it needs ZeroMQ
    register()
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(2, rank, f"file://{store}", rank, "gloo")
        initialize_model_parallel(2, 1)
        print(json.dumps(steps(rank, work)), flush=True)
        destroy_model_parallel()  # as vLLM's workers do: Gloo's threads abort a process that ends with them
        destroy_distributed_environment()


if __name__ == "__main__":
    main()
