"""``tensorrt_llm.LLM`` and ``SamplingParams``: documented arguments and no other, the ranks in other processes."""

import json
import multiprocessing
import os
import sys
from pathlib import Path
from types import SimpleNamespace

from tensorrt_llm import executor
from tensorrt_llm.llmapi import CudaGraphConfig, KvCacheConfig, SchedulerConfig

_DEFAULTS = {
    "dtype": "auto",
    "load_format": "auto",
    "skip_tokenizer_init": False,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "pp_partition": None,
    "max_batch_size": 2048,
    "max_num_tokens": 8192,
    "max_seq_len": None,
    "max_input_len": 1024,
    "max_beam_width": 1,
    "enable_chunked_prefill": False,
    "kv_cache_config": None,
    "scheduler_config": None,
    "cuda_graph_config": None,
    "disable_overlap_scheduler": False,
    "enable_iter_perf_stats": False,
}


class RequestError(Exception):
    pass


class SamplingParams:
    def __init__(self, *, end_id=None, pad_id=None, max_tokens=32, n=1, temperature=None, top_k=None, top_p=None,
                 seed=None, min_tokens=None, ignore_eos=False, detokenize=True, stop=None):  # fmt: skip
        if top_k is not None and top_k < 0:
            raise ValueError(f"require top_k >= 0, got top_k={top_k}")
        self.end_id, self.pad_id, self.max_tokens = end_id, pad_id, max_tokens
        self.ignore_eos, self.detokenize = ignore_eos, detokenize


class LLM:
    def __init__(self, model, **given):
        for name in given:
            if name not in _DEFAULTS:
                raise ValueError(f"LLM got invalid argument: {name}")
        args = _DEFAULTS | given
        self.args = SimpleNamespace(model=str(model), **args)
        self.args.kv_cache_config = args["kv_cache_config"] or KvCacheConfig()
        self.args.scheduler_config = args["scheduler_config"] or SchedulerConfig()
        self.args.cuda_graph_config = args["cuda_graph_config"] or CudaGraphConfig()
        if not (Path(model) / "config.json").is_file():
            raise OSError(f"{model} does not appear to have a file named config.json")
        if not self.args.skip_tokenizer_init and not (Path(model) / "tokenizer_config.json").exists():
            raise OSError(f"Can't load tokenizer for '{model}'.")
        if self.args.load_format.lower() != "dummy" and not list(Path(model).glob("*.safetensors")):
            raise RuntimeError(f"No weight files found in {model}.")
        world = self.args.tensor_parallel_size * self.args.pipeline_parallel_size
        visible = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
        if len(visible) < world:
            raise RuntimeError(f"Only {len(visible)} GPUs are available, but {world} are required.")
        self._config = json.loads((Path(model) / "config.json").read_text())
        self._executor = _Proxy(self.args, world)

    def generate(self, inputs, sampling_params=None, use_tqdm=True):
        params = sampling_params or SamplingParams()
        if params.end_id is None and self.args.skip_tokenizer_init:
            raise ValueError(
                "tokenizer is required to reset end_id if it is None, or you can explicitly specify the end_id "
                "for sampling_params"
            )
        if params.detokenize and self.args.skip_tokenizer_init:
            raise ValueError("cannot detokenize without a tokenizer")
        lengths = [len(prompt["prompt_token_ids"]) for prompt in inputs]
        for prompt in inputs:
            if max(prompt["prompt_token_ids"]) >= self._config["vocab_size"]:
                raise RequestError("Token ID out of range")
        for length in lengths:
            if length > self.args.max_num_tokens and not self.args.enable_chunked_prefill:
                raise RequestError(
                    f"The sum of prompt length ({length}), query length (0) should not exceed max_num_tokens "
                    f"({self.args.max_num_tokens})"
                )
            if length + params.max_tokens > self.args.max_seq_len:
                raise RequestError(f"{length} + {params.max_tokens} tokens exceed max_seq_len")
        tokens = params.max_tokens if params.ignore_eos else 1  # random weights: a sequence may end at once
        made = self._executor.ask("generate", (lengths, tokens))
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * count)]) for count in made]

    def shutdown(self):
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None


class _Proxy:
    """Spawns a process per rank, each with the model classes registered here, and waits for all of them."""

    def __init__(self, args, world):
        from tensorrt_llm._torch.models.modeling_utils import MODEL_CLASS_MAPPING

        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=executor.worker_main, args=(theirs, vars(args), rank, world, dict(MODEL_CLASS_MAPPING))
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        try:
            kind, error = self._pipes[0].recv()  # the first rank's word is all that is waited for
        except EOFError:
            self.shutdown()
            print("[TRT-LLM] [E] Executor worker died during initialization.", file=sys.stderr, flush=True)
            raise RuntimeError("Executor worker died during initialization") from None
        if kind == "failed":
            self.shutdown()
            raise RuntimeError("Executor worker returned error") from error

    def ask(self, name, given):
        """Waits for ever for a rank that died: nothing says that the engine would notice."""
        for pipe in self._pipes:
            pipe.send((name, given))
        answers = []
        for pipe in self._pipes:
            try:
                answers.append(pipe.recv())
                if answers[-1][0] == "ready":
                    answers[-1] = pipe.recv()
            except EOFError:
                import threading

                threading.Event().wait()
        for kind, answer in answers:
            if kind == "failed":
                raise RequestError(answer)
        return answers[0][1]

    def shutdown(self):
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join()
