"""The engine core: a process of its own that loads plugins, starts workers, schedules, and dies loudly."""

import json
import multiprocessing
import os
import signal
import sys
import time
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import torch
from vllm import checks, costs, deltas
from vllm.release import IS_NEWER

GIB = 2**30
BLOCK_TOKENS = 16


def load_general_plugins():
    for plugin in metadata.entry_points(group="vllm.general_plugins"):
        if plugin.name != "iserve_variants":  # whose layers and kernels are vLLM's own; ``deltas`` acts it out
            plugin.load()()


def say(text):
    """Print as the logger of the core does."""
    for line in text.splitlines():
        print(
            f"(EngineCore pid={os.getpid()}) ERROR 11-21 10:00:00 [core.py:1137] {line}",
            file=sys.stderr,
            flush=True,
        )


def main(pipe, arguments):
    """The process. Sends ``("ready", None)`` once it serves; ends with 1 when it cannot."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        load_general_plugins()
        core = Core(arguments)
    except Exception as error:  # noqa: BLE001
        say(f"EngineCore failed to start.\nTraceback (most recent call last):\n{type(error).__name__}: {error}")
        sys.exit(1)
    pipe.send(("ready", None))
    while True:
        try:
            name, given = pipe.recv()
        except EOFError:  # as vLLM's, which minds no other process's death: it waits
            time.sleep(3600)
            continue
        try:
            answer = {"rpc": core.rpc, "generate": core.generate, "add_lora": core.add_lora}[name](*given)
        except MemoryError as error:
            say(f"EngineCore encountered a fatal error.\nTraceback (most recent call last):\n{error}")
            os._exit(1)
        except Exception as error:  # noqa: BLE001
            pipe.send(("failed", f"Call to collective_rpc method failed: {error}"))
        else:
            pipe.send(("done", answer))


class Core:
    def __init__(self, arguments):
        self.arguments = arguments
        folder = Path(arguments["model"])
        told = [file for where in (folder, Path(sys.prefix)) if (file := where / "behaviour.json").exists()]
        self.behaviour = json.loads(told[0].read_text()) if told else {}  # of this model, or of every one
        self.seen = set()
        self.loaded = set()  # ids of adapters and deltas
        self.settings = deltas.settings_of(arguments["additional_config"] or {})
        self.reader = deltas.Reader(self.behaviour.get("delta_asks", 2))
        self.config = config = json.loads((folder / "config.json").read_text())
        self.check()
        tp, pp = arguments["tensor_parallel_size"], arguments["pipeline_parallel_size"]
        self.layers = config["num_hidden_layers"] // pp
        kinds = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
        self.windows = [
            None if kind == "full_attention" else config["sliding_window"] for kind in kinds[: self.layers]
        ]
        settings = {
            "architecture": config["architectures"][0],
            "windows": self.windows,
            "total_bytes": 48 * GIB,
            "gpu_memory_utilization": arguments["gpu_memory_utilization"],
            "slots": arguments["max_loras"] if arguments["enable_lora"] else 0,
            "experts": self.behaviour.get("experts", (0, 0)),
        }
        several = tp * pp > 1
        self.workers = [(Remote if several else Here)(settings, rank) for rank in range(tp * pp)]
        self.each("load_model")
        available = min(self.each("determine_available_memory"))
        kv_config = self.kv_config(available)
        self.each("initialize_from_config", kv_config)
        self.each("compile_or_warm_up_model")

    def check(self):
        given, config = self.arguments, self.config
        if "start_error" in self.behaviour:
            raise ValueError(self.behaviour["start_error"])
        checks.check_engine(
            config,
            tp=given["tensor_parallel_size"],
            pp=given["pipeline_parallel_size"],
            compilation=given["compilation_config"] or {},
        )

    def kv_config(self, available):
        given, config = self.arguments, self.config
        tp, kv_dtype = given["tensor_parallel_size"], given["kv_cache_dtype"]
        page = checks.page_bytes(config, tp=tp, kv_dtype=kv_dtype, block_tokens=BLOCK_TOKENS)
        if available <= 0:
            raise ValueError(
                "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when "
                "initializing the engine."
            )
        groups = groups_of(self.windows)
        pools = max(map(len, groups))
        self.blocks = given["num_gpu_blocks_override"] or available // page // pools
        self.tables = [self.windows[group[0]] for group in groups]
        if (self.blocks - 1) * BLOCK_TOKENS < given["max_model_len"]:
            raise ValueError(
                f"To serve at least one request with the model's max seq len ({given['max_model_len']}), more KV "
                f"cache is needed. Based on the available memory, the estimated maximum model length is "
                f"{(self.blocks - 1) * BLOCK_TOKENS}."
            )
        if IS_NEWER:  # every entry has the size of the one allocation
            size = self.blocks * page * pools
            strides = {"layer_stride": page, "block_stride": page * pools, "offset": 0}
            tensors = [SimpleNamespace(size=size, layers=group, **strides) for group in groups]
        else:
            shared = [[group[i] for group in groups if i < len(group)] for i in range(pools)]
            tensors = [SimpleNamespace(size=self.blocks * page, shared_by=layers) for layers in shared]
        return SimpleNamespace(
            num_blocks=self.blocks,
            kv_cache_tensors=tensors,
            kv_cache_groups=[
                SimpleNamespace(
                    layer_names=group,
                    kv_cache_spec=SimpleNamespace(
                        page_size_bytes=page, block_size=BLOCK_TOKENS, sliding_window=self.windows[group[0]]
                    ),
                )
                for group in groups
            ],
        )

    def each(self, method, *arguments):
        for worker in self.workers:
            worker.ask(method, arguments)
        return [worker.answer() for worker in self.workers]

    def rpc(self, method, arguments):
        return self.each(method, *arguments)

    def add_lora(self, request):
        if not self.arguments["enable_lora"]:
            raise RuntimeError("LoRA is not enabled.")
        folder = Path(request.lora_path)
        if self.settings is not None and (folder / deltas.MANIFEST_FILE).is_file():
            if self.settings.background and not self.reader.is_ready(str(folder)):
                raise ValueError("Call to add_lora method failed: " + deltas.BEING_READ.format(request.lora_name))
            if (why := deltas.refusal(folder, self.settings)) is not None:
                raise ValueError(f"Call to add_lora method failed: {why}")
            self.loaded.add(request.lora_int_id)
            return True
        config = folder / "adapter_config.json"
        if not config.is_file():
            raise ValueError(f"Call to add_lora method failed: Loading lora {request.lora_name} failed")
        rank, most = json.loads(config.read_text())["r"], self.arguments["max_lora_rank"]
        if rank > most:
            raise ValueError(
                f"Call to add_lora method failed: LoRA rank {rank} is greater than max_lora_rank {most}."
            )
        time.sleep(costs.LORA_LOAD_S)
        self.loaded.add(request.lora_int_id)
        return True

    def generate(self, lengths, output_tokens, variants):
        """All at once; takes as long as the GPU on paper. Tokens made for each.

        Adapters are loaded before: vLLM would load them within a step, which takes longer.
        """
        behaviour = self.behaviour
        assert set(variants) - {0} <= self.loaded, "adapters that were not loaded"
        assert len(set(variants) - {0}) <= self.arguments["max_loras"], "more adapters than slots"
        if len(lengths) >= behaviour.get("dies_at_batch", 10**9):
            os.kill(os.getpid(), signal.SIGKILL)
        if sum(lengths) >= behaviour.get("no_memory_at_tokens", 10**9):
            raise MemoryError("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
        # Of a sliding layer's blocks none is given back while a prompt is computed.
        blocks = len(self.tables) * sum(-(-(length + output_tokens) // BLOCK_TOKENS) for length in lengths)
        assert blocks < self.blocks, f"{blocks} blocks are needed of {self.blocks - 1}: this would preempt"
        if tuple(lengths) not in self.seen:  # kernels are made for what is new
            self.seen.add(tuple(lengths))
            time.sleep(behaviour.get("kernels_s", 0.0))
        begun_s, queued_s = time.perf_counter(), self.each("gpu_now")[0]
        for step in schedule(lengths, output_tokens, self.arguments, set(self.windows), variants):
            self.each("execute_model", step)
            self.each("sample_tokens", None)
        took_s = self.each("gpu_now")[0] - queued_s
        time.sleep(max(0.0, took_s - (time.perf_counter() - begun_s)))
        return [output_tokens] * len(lengths)


def groups_of(windows):
    """Layers by the tables of blocks they share: of one kind, as many in each."""
    kinds = {window: [i for i, w in enumerate(windows) if w == window] for window in windows}
    sizes = [len(layers) for layers in kinds.values()]
    size = max(sizes) if max(sizes) < 1.5 * min(sizes) else min(sizes)
    counts = {window: -(-len(layers) // size) for window, layers in kinds.items()}
    return [layers[i :: counts[window]] for window, layers in kinds.items() for i in range(counts[window])]


def schedule(lengths, output_tokens, limits, windows=(None,), variants=None):
    """Steps of at most ``max_num_batched_tokens``: running sequences first, then prompts in their order."""
    computed, made = [0] * len(lengths), [0] * len(lengths)
    while any(count < output_tokens for count in made):
        room, scheduled = limits["max_num_batched_tokens"], {}
        running = [i for i, count in enumerate(made) if count < output_tokens][: limits["max_num_seqs"]]
        for i in running:
            count = 1 if made[i] else min(room, lengths[i] - computed[i])
            if count > 0 and room >= count:
                scheduled[i], room = count, room - count
        yield output_of(scheduled, computed, windows, variants or [0] * len(lengths))
        for i, count in scheduled.items():
            computed[i] += count
            made[i] += computed[i] >= lengths[i]


def output_of(scheduled, computed, windows, variants):
    """Return what the step timer reads of vLLM's ``SchedulerOutput``, and what the model on paper needs."""
    new = [i for i in scheduled if not computed[i]]
    old = [i for i in scheduled if computed[i]]
    each = scheduled.items()
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=f"r{i}", num_computed_tokens=0) for i in new],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[f"r{i}" for i in old], num_computed_tokens=[computed[i] for i in old]
        ),
        num_scheduled_tokens={f"r{i}": count for i, count in scheduled.items()},
        total_num_scheduled_tokens=sum(scheduled.values()),
        adapters=len({variants[i] for i in scheduled} - {0}),
        decodes_only=not new and all(count == 1 for count in scheduled.values()),
        pairs={
            window: sum(costs.pairs(computed[i] + q, window) - costs.pairs(computed[i], window) for i, q in each)
            for window in windows
        },
    )


class Here:
    """The only worker lives in the core's own process."""

    def __init__(self, settings, rank):
        from vllm.v1.worker.gpu_worker import Worker

        configs = {
            "cache_config": SimpleNamespace(block_size=BLOCK_TOKENS),
            "model_config": SimpleNamespace(enforce_eager=False),
        }
        self.worker = Worker({**settings, **configs}, rank)

    def ask(self, method, arguments):
        if method == "gpu_now":
            self.said = torch.stream.now_s
        else:
            self.said = getattr(self.worker, method)(*arguments)

    def answer(self):
        return self.said


class Remote:
    """Remote rank, one of several: a process of its own."""

    def __init__(self, settings, rank):
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        context.Process(target=serve_rank, args=(theirs, settings, rank)).start()

    def ask(self, method, arguments):
        self.pipe.send((method, arguments))

    def answer(self):
        failed, said = self.pipe.recv()
        if failed:
            raise RuntimeError(said)
        return said


def serve_rank(pipe, settings, rank):
    load_general_plugins()
    here = Here(settings, rank)
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:  # shut down in order, or the core was killed: nothing else would end it
            return
        try:
            here.ask(method, arguments)
            pipe.send((False, here.answer()))
        except Exception as error:  # noqa: BLE001
            pipe.send((True, f"{type(error).__name__}: {error}"))
