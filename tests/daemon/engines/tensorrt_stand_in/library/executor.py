"""A rank: finds its model, sizes its cache in a dry run, then serves."""

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

import torch


def worker_main(pipe, args, rank, world, model_classes):
    """Run one rank. ``model_classes`` arrived by name: their modules were imported to read them."""
    from tensorrt_llm._torch.models.modeling_utils import MODEL_CLASS_MAPPING

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    MODEL_CLASS_MAPPING.update(model_classes)
    torch.cuda.set_device(rank)
    try:
        executor = create_py_executor(SimpleNamespace(**args), rank, world)
    except Exception as error:  # noqa: BLE001
        print(f"[TRT-LLM] [E] Failed to initialize executor on rank {rank}: {error}", file=sys.stderr, flush=True)
        traceback.print_exc()
        pipe.send(("failed", error))
        return
    pipe.send(("ready", None))
    while True:
        try:
            _, (lengths, tokens) = pipe.recv()
        except EOFError:
            return
        begun_s, queued_s = time.perf_counter(), torch.stream.now_s
        try:
            made = executor.generate(lengths, tokens)
        except RuntimeError as error:
            print(f"[TRT-LLM] [E] Encountered an error in forward function: {error}", file=sys.stderr, flush=True)
            pipe.send(("failed", str(error)))
            continue
        took_s = torch.stream.now_s - queued_s
        time.sleep(max(0.0, took_s - (time.perf_counter() - begun_s)))
        pipe.send(("done", made))


def create_py_executor(args, rank, world):
    """``py_executor_creator.create_py_executor``: one executor for the dry run, and the one that serves."""
    from tensorrt_llm._torch.models.modeling_utils import create_model
    from tensorrt_llm._torch.pyexecutor._util import KvCacheCreator
    from tensorrt_llm._torch.pyexecutor.model_engine import PyTorchModelEngine
    from tensorrt_llm._torch.pyexecutor.py_executor import PyExecutor

    folder = Path(args.model)
    told = [file for where in (folder, Path(sys.prefix)) if (file := where / "behaviour.json").exists()]
    behaviour = json.loads(told[0].read_text()) if told else {}
    config = json.loads((folder / "config.json").read_text())
    if "start_error" in behaviour:
        raise RuntimeError(behaviour["start_error"])
    if behaviour.get("dies_at_start"):
        os.kill(os.getpid(), signal.SIGKILL)
    model = create_model(config, args)
    engine = PyTorchModelEngine(model, args)
    creator = KvCacheCreator(engine, args, config, behaviour)
    dry = PyExecutor(creator.build_managers(estimating=True), engine, rank, world, behaviour)
    creator.configure_kv_cache_capacity(dry)
    if rank > 0:
        time.sleep(behaviour.get("others_are_late_s", 0.0))
    return PyExecutor(creator.build_managers(estimating=False), engine, rank, world, behaviour)
