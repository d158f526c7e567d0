"""``vllm.LLM`` and ``vllm.SamplingParams``: documented arguments and no other, the engine in another process."""

import json
import multiprocessing
from pathlib import Path
from types import SimpleNamespace

from vllm import adapters, checks, core


class EngineDeadError(Exception):
    def __init__(self):
        super().__init__("EngineCore encountered an issue. See stack trace (above) for the root cause.")


class SamplingParams:
    def __init__(self, *, n=1, temperature=1.0, top_p=1.0, top_k=0, seed=None, stop=None, stop_token_ids=None,
                 ignore_eos=False, max_tokens=16, min_tokens=0, logprobs=None, detokenize=True):  # fmt: skip
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {max_tokens}.")
        if not 0 <= min_tokens <= max_tokens:
            raise ValueError(
                f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {min_tokens}."
            )
        if temperature < 0:
            raise ValueError(f"temperature must be non-negative, got {temperature}.")
        self.max_tokens, self.min_tokens, self.ignore_eos = max_tokens, min_tokens, ignore_eos
        self.detokenize, self.temperature = detokenize, temperature


class LLM:
    def __init__(self, model, *, skip_tokenizer_init=False, tensor_parallel_size=1, pipeline_parallel_size=1,
                 dtype="auto", quantization=None, seed=0, gpu_memory_utilization=0.92, enforce_eager=False,
                 compilation_config=None, kv_cache_memory_bytes=None, load_format="auto", max_model_len=None,
                 max_num_seqs=256, max_num_batched_tokens=8192, num_gpu_blocks_override=None,
                 kv_cache_dtype="auto", enable_prefix_caching=True, block_size=None,
                 distributed_executor_backend=None, disable_log_stats=True, language_model_only=False,
                 trust_remote_code=False, enable_lora=False, max_loras=1, max_lora_rank=16, max_cpu_loras=None,
                 additional_config=None, enable_expert_parallel=False):  # fmt: skip
        arguments = {name: value for name, value in locals().items() if name != "self"}
        core.load_general_plugins()
        config = json.loads((Path(model) / "config.json").read_text())
        checks.check_options(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            gpu_memory_utilization=gpu_memory_utilization,
        )
        if quantization not in {None, *checks.QUANTIZATIONS} or kv_cache_dtype not in checks.KV_DTYPES:
            raise ValueError(f"Unknown quantization method {quantization} or KV cache type {kv_cache_dtype}")
        checks.check_code(Path(model), config, trusted=trust_remote_code)
        checks.check_folder(
            Path(model),
            config,
            max_model_len=max_model_len,
            load_format=load_format,
            skip_tokenizer_init=skip_tokenizer_init,
        )
        if max_lora_rank not in adapters.RANKS:
            raise ValueError(f"max_lora_rank ({max_lora_rank}) must be one of {adapters.RANKS}.")
        if enable_lora and max_cpu_loras is not None and max_cpu_loras < max_loras:
            raise ValueError(f"max_cpu_loras ({max_cpu_loras}) must be >= max_loras ({max_loras}).")
        self._limits, self._vocab = arguments, config["vocab_size"]
        core_client = _EngineCoreClient(arguments)
        self.llm_engine = SimpleNamespace(
            model_config=SimpleNamespace(get_vocab_size=lambda: self._vocab),
            engine_core=core_client,
            add_lora=lambda request: core_client.ask("add_lora", (request,)),
        )

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        assert timeout is None
        assert not kwargs
        return self.llm_engine.engine_core.ask("rpc", (method, args))

    def generate(self, prompts, sampling_params=None, *, use_tqdm=True, lora_request=None):
        """Random weights and ``ignore_eos`` off: a sequence may end at once, so it does."""
        given = sampling_params
        if lora_request is not None:
            if not self._limits["enable_lora"]:
                raise ValueError(f"Got lora_request {lora_request} but LoRA is not enabled!")
            if len(lora_request) != len(prompts):
                raise ValueError("The lengths of prompts and lora_request must be the same.")
        for prompt in prompts:
            ids, longest = prompt["prompt_token_ids"], self._limits["max_model_len"]
            if not ids or max(ids) >= self._vocab or min(ids) < 0:
                raise ValueError("Token id is out of vocabulary")
            if len(ids) + given.max_tokens > longest:
                raise ValueError(f"The decoder prompt (length {len(ids)}) is longer than {longest}.")
        if given.detokenize and self._limits["skip_tokenizer_init"]:
            raise ValueError("cannot detokenize: skip_tokenizer_init is True")
        tokens = given.max_tokens if given.ignore_eos else max(1, given.min_tokens)
        lengths = [len(prompt["prompt_token_ids"]) for prompt in prompts]
        asked = [0] * len(prompts) if lora_request is None else [one.lora_int_id for one in lora_request]
        made = self.llm_engine.engine_core.ask("generate", (lengths, tokens, asked))
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * count)]) for count in made]


class _EngineCoreClient:
    def __init__(self, arguments):
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=core.main, args=(theirs, arguments))
        self._process.start()
        theirs.close()
        try:
            self._pipe.recv()
        except EOFError:
            self._process.join()
            raise RuntimeError(
                "Engine core initialization failed. See root cause above. Failed core proc(s): "
                f"{{'EngineCore': {self._process.exitcode}}}"
            ) from None

    def ask(self, name, given):
        try:
            self._pipe.send((name, given))
            kind, answer = self._pipe.recv()
        except (EOFError, OSError):
            raise EngineDeadError from None
        if kind == "failed":
            raise Exception(answer)  # as vLLM does
        return answer

    def shutdown(self, timeout=None):
        self._process.terminate()
        self._process.join()
