"""Parts of an adapter's load in vLLM's worker, on a GPU without requests: its file, names and matrices, the slot.

    VLLM_PYTHON -m tests.bench.lora_load_parts measure CONFIG_JSON OUT
    python -m tests.bench.lora_load_parts table OUT [OUT ...]

``measure`` runs in vLLM's environment, with random weights, its engine in the same process. It loads eight
adapters of each of ``CASES``, twice, under names of their own each time, from the page cache, with wall times
around functions of vLLM. With our plug-in on ``PYTHONPATH`` (``daemon/engines/vllm/variants``) its loads are
measured, else those of vLLM.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fingerprint.codec import from_json, to_json
from tests.bench.kept import read_kept, write_kept

__all__ = ["CASES", "Load", "LoadParts", "table"]

CASES = {"q and v, rank 8": (8, ("q_proj", "v_proj")), "rank 8": (8, ()), "rank 16": (16, ()), "rank 64": (64, ())}
COUNT, ROUNDS, SLOTS, RANK = 8, 2, 32, 64
PLACES = 40  # copies that vLLM keeps: fewer than are loaded; our plug-in keeps more of small ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """Seconds of one load, and of its parts."""

    case: str
    round: int
    load_s: float
    file_s: float  # opening the adapter's file; our plug-in reads all of it then
    tensors_s: float  # all of reading and naming tensors, the file included
    joined_s: float  # making one of the matrices of modules that are one in the model
    slot_s: float  # launching the copies to a slot
    copies_s: float  # until they are done after that


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadParts:
    """Recording of one side."""

    reader: str  # "our plug-in's" or "vLLM's own"
    model: str
    date: str
    machine: str
    versions: str
    loads: tuple[Load, ...]


def table(sides: Sequence[LoadParts]) -> str:
    """Return medians of loads and of their parts in milliseconds, each side's by case."""
    lines = ["| adapter | read | a load | its file | names, tensors | slot |", "|---|---|--:|--:|--:|--:|"]
    for case in CASES:
        for side in sides:
            own = [one for one in side.loads if one.case == case]
            parts = (
                [one.load_s for one in own],
                [one.file_s for one in own],
                [one.tensors_s - one.file_s + one.joined_s for one in own],
                [one.slot_s + one.copies_s for one in own],
            )
            cells = [f"{1e3 * statistics.median(each_s):.1f} ms" for each_s in parts]
            lines.append(f"| {case} | {side.reader} | {' | '.join(cells)} |")
    return "\n".join(lines)


def measure(config: Path, out: Path) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import torch
    import vllm
    from vllm.lora import lora_model, model_manager, worker_manager
    from vllm.lora.request import LoRARequest

    from tests.bench.engine_contest_run import write_models
    from tests.bench.lora_adapters import write_adapter

    text = config.read_text()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_models([("model", text)], folder)
        for case, (rank, modules) in CASES.items():
            for seed in range(COUNT):
                write_adapter(folder / f"{case}-{seed}", json.loads(text), rank, seed=seed, modules=modules)
        llm = vllm.LLM(
            str(folder / "model"),
            load_format="dummy",
            enable_lora=True,
            max_loras=SLOTS,
            max_lora_rank=RANK,
            max_cpu_loras=PLACES,
            max_num_seqs=64,
            max_model_len=1024,
            kv_cache_memory_bytes=4 << 30,
            gpu_memory_utilization=0.4,
            skip_tokenizer_init=True,
        )
        spent: dict[str, float] = {}
        _time(spent, lora_model.safetensors, "safe_open", "file_s")
        _time(spent, worker_manager.WorkerLoRAManager, "_load_adapter", "tensors_s")
        _time(spent, model_manager.LoRAModelManager, "_create_merged_loras_inplace", "joined_s")
        done = torch.cuda.synchronize
        _time(spent, model_manager.LRUCacheLoRAModelManager, "activate_adapter", "slot_s", ("copies_s", done))
        loads = []
        for round_ in range(ROUNDS):
            for case in CASES:
                for seed in range(COUNT):
                    number = len(loads) + 1
                    spent.clear()
                    begun = time.perf_counter()
                    llm.llm_engine.add_lora(LoRARequest(f"a{number}", number, str(folder / f"{case}-{seed}")))
                    load_s = time.perf_counter() - begun
                    loads.append(Load(case=case, round=round_, load_s=load_s, **spent))
    reader = "our plug-in's" if lora_model.safetensors.__name__ == "AdapterFiles" else "vLLM's own"
    found = LoadParts(
        reader=reader,
        model=config.stem,
        date=time.strftime("%Y-%m-%d"),
        machine=torch.cuda.get_device_name(0),
        versions=f"vllm {vllm.__version__}, torch {torch.__version__}",
        loads=tuple(loads),
    )
    write_kept(out, json.dumps(json.loads(to_json(found)), indent=0))


def _time(
    spent: dict[str, float],
    owner: Any,
    name: str,
    part: str,
    after: tuple[str, Callable[[], object]] | None = None,
) -> None:
    """Have ``owner``'s function add its seconds to ``part``, and those of a call ``after`` it to that part."""
    theirs, raw = getattr(owner, name), vars(owner).get(name)

    def add(part: str, begun: float) -> None:
        spent[part] = spent.get(part, 0.0) + time.perf_counter() - begun

    def call(*given: Any, **named: Any) -> Any:
        begun = time.perf_counter()
        try:
            return theirs(*given, **named)
        finally:
            add(part, begun)
            if after is not None:
                begun = time.perf_counter()
                after[1]()
                add(after[0], begun)

    setattr(owner, name, staticmethod(call) if isinstance(raw, staticmethod) else call)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    orders = parser.add_subparsers(dest="order", required=True)
    one = orders.add_parser("measure")
    one.add_argument("config", type=Path)
    one.add_argument("out", type=Path)
    one = orders.add_parser("table")
    one.add_argument("kept", type=Path, nargs="+")
    options = parser.parse_args()
    if options.order == "measure":
        measure(options.config, options.out)
        return
    print(table([from_json(read_kept(file), LoadParts, what=str(file)) for file in options.kept]))


if __name__ == "__main__":
    main()
