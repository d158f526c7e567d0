"""vLLM's last words and what they mean; that a release still prints its own is held by ``contract.TEXTS``."""

from __future__ import annotations

import re

from daemon.engines.failures import ErrorPattern
from daemon.engines.vllm.release import KNOWN
from fingerprint.errors import (
    ConfigError,
    ConflictError,
    EngineError,
    InfeasibleError,
    UnavailableError,
    UnsupportedAdapterError,
    UnsupportedModelError,
)

__all__ = ["DULL", "ERROR_PATTERNS", "OTHERS_TEXTS"]

# Words that the known releases do not print themselves, by whose they are.
OTHERS_TEXTS = {
    "CUDA out of memory": "torch",
    "CUDA error: out of memory": "torch",
    "torch.OutOfMemoryError": "torch",
    "torch.cuda.OutOfMemoryError": "torch",
    "No CUDA GPUs are available": "torch",
    "model type `": "transformers",
    "` but Transformers does not recognize": "transformers",
    "contains custom code which must be executed": "transformers",
    "unrecognized arguments: ": "argparse",
    "validation error for LoRAConfig": "pydantic",
    "Input should be ": "pydantic",
    "vLLM did not load ": "our profiling worker",
    "deltas are not served ": "our plug-in for deltas",
    "iserve_deltas: ": "our plug-in for deltas",
    "Sparse24 models are no longer supported": "vLLM before 0.22",
    "[Errno 98]": "the system",
    "address already in use": "the system",
}

# Lines that only say that another process of the engine failed.
DULL = re.compile(
    r"[Ss]ee (?:the )?(?:root cause|stack trace)|Failed core proc|WorkerProc initialization failed|EngineDeadError"
)

_WITHOUT_SLOTS = "deploy it without slots for variants, or use engine torch"
_OTHER_ENGINE = "this vLLM does not run the architecture {architecture}; use engine torch, or another vLLM"

# The first that is found decides: causes before what they bring about.
ERROR_PATTERNS = (
    ErrorPattern(
        re.compile(r"Free memory on device.*on startup is less than desired GPU memory utilization"),
        UnavailableError,
        "others use its GPU: less is free than it was given; stop them or choose another device",
    ),
    ErrorPattern(
        re.compile(r"No available memory for the cache blocks"),
        InfeasibleError,
        "weights and activations fill what it may use of a GPU; give it more memory per GPU, raise tp or pp, or "
        "take a smaller weight format",
    ),
    ErrorPattern(
        re.compile(
            r"To serve at least one request with the model's max seq len \((?P<asked>\d+)\)"
            r"(?:.*?estimated maximum model length is (?P<fits>\d+))?"
        ),
        InfeasibleError,
        "its KV cache does not hold one sequence of {asked} tokens (it would hold {fits}); deploy for fewer "
        "tokens or give it more memory",
    ),
    ErrorPattern(
        re.compile(r"CUDA out of memory|CUDA error: out of memory|torch\.(?:cuda\.)?OutOfMemoryError"),
        EngineError,
        "it ran out of GPU memory; give it more memory, a smaller batch or fewer batched tokens",
    ),
    ErrorPattern(
        re.compile(r"Model architectures? \[?'?(?P<architecture>\w+).*(?:not supported)"),
        UnsupportedModelError,
        _OTHER_ENGINE,
    ),
    ErrorPattern(  # one that it has no class of is looked for among Transformers'
        re.compile(r"The Transformers implementation of '(?P<architecture>\w+)' is not compatible with vLLM"),
        UnsupportedModelError,
        _OTHER_ENGINE,
    ),
    *(
        ErrorPattern(
            re.compile(pattern),
            UnsupportedModelError,
            f"this vLLM serves no variants of models of the class {{architecture}}; {_WITHOUT_SLOTS}",
        )
        for pattern in (
            r"(?P<architecture>\w+) does not support LoRA yet",
            r"LoRA is not supported for (?P<architecture>\w+) \(",  # before it loads the model, from 0.33 on
            r"No supported LoRA modules found in (?P<architecture>\w+)",
        )
    ),
    ErrorPattern(
        re.compile(r"When using LoRA, vocab size must be <= (?P<most>\d+)"),
        UnsupportedModelError,
        f"this vLLM serves no variants of models of more than {{most}} tokens of vocabulary; {_WITHOUT_SLOTS}",
    ),
    ErrorPattern(
        re.compile(r"Monolithic kernels are not supported for Fused MoE LoRA|\w does not support LoRA\. For "),
        UnsupportedModelError,
        f"the kernels that it chose for the experts take no variants; {_WITHOUT_SLOTS}",
    ),
    ErrorPattern(  # of LoRA's layers alone
        re.compile(r"Unsupported base layer: (?P<layer>\w+)"),
        UnsupportedModelError,
        f"this vLLM serves no variants on the weights' format of its {{layer}} layers; take another format, "
        f"{_WITHOUT_SLOTS}",
    ),
    ErrorPattern(
        re.compile(
            r"validation error for LoRAConfig\s+max_lora_rank\s+Input should be (?P<ranks>[^\[\n]{1,80})\b"
        ),
        ConfigError,
        "this vLLM has no slots of that rank; the ranks that it has are {ranks}",
    ),
    ErrorPattern(
        re.compile(r"iserve_deltas: (?P<why>deltas are not served [^;\n]{1,100})"),
        ConfigError,
        "{why}; deploy it without slots for deltas",
    ),
    ErrorPattern(  # a server that refused a request's variant goes on, and may end later for another reason
        re.compile(r"vLLM did not load [^\n]*LoRA rank (?P<rank>\d+) is greater than max_lora_rank (?P<most>\d+)"),
        UnsupportedAdapterError,
        "an adapter of rank {rank} does not fit slots of rank {most}; start it with slots of that rank",
    ),
    ErrorPattern(
        re.compile(
            r"vLLM did not load [^\n]* target modules in [^\n]* but received \[?(?P<matrices>[^]\n]{1,99})"
        ),
        UnsupportedAdapterError,
        "this vLLM has slots for some of an adapter's matrices alone, not for {matrices}; merge it into its base "
        "(iserve variant merge) and deploy that",
    ),
    ErrorPattern(
        re.compile(r"model type `(?P<kind>[^`\n]{1,80})` but Transformers does not recognize"),
        UnsupportedModelError,
        "the Transformers beside this vLLM does not know the model type {kind}; install a newer one there, or use "
        "engine torch",
    ),
    ErrorPattern(  # of the tokenizer or the processor, say, where config.json names none
        re.compile(r"contains custom code which must be executed"),
        ConfigError,
        "it needs Python code of the model's repository; read that code, then deploy with --trust-remote-code, "
        "which runs it as the daemon's user",
    ),
    ErrorPattern(
        re.compile(r"Sparse24 models are no longer supported|Sparsity support has been removed"),
        UnsupportedModelError,
        "vLLM no longer runs 2:4 sparse checkpoints; serve the dense weights",
    ),
    ErrorPattern(
        re.compile(
            r"Total number of attention heads \((?P<heads>\d+)\) must be divisible by tensor parallel size "
            r"\((?P<tp>\d+)\)"
        ),
        ConfigError,
        "{heads} attention heads cannot be split by tp={tp}; choose a tp that divides them",
    ),
    ErrorPattern(
        re.compile(r"Invalid partition string|does not match (?:pp_size|num_hidden_layers)="),
        ConfigError,
        "the layers of its stages do not add up to the model's; give each of the model's layers to one stage",
    ),
    ErrorPattern(
        re.compile(r"\((?P<asked>\d+)\) is greater than the derived max_model_len.*?=(?P<most>[\d.]+)"),
        ConfigError,
        "a context of {asked} tokens is longer than the model's {most}; deploy for fewer tokens",
    ),
    ErrorPattern(
        re.compile(
            r"max_num_batched_tokens \((?P<tokens>\d+)\) must be greater than or equal to max_num_seqs "
            r"\((?P<asked>\d+)\)"
        ),
        ConfigError,
        "{asked} requests at once are more than the {tokens} tokens of its steps; deploy for a smaller batch",
    ),
    ErrorPattern(
        re.compile(r"unrecognized arguments: (?P<flags>[^\n]{1,200})"),
        ConfigError,
        f"this vLLM does not know {{flags}}; install one of {KNOWN}",
    ),
    ErrorPattern(
        re.compile(r"\[Errno 98\]|[Aa]ddress already in use(?!\. Retrying)"),  # vLLM's own warning, not its end
        ConflictError,
        "its port is in use; choose another or let the daemon choose (port 0)",
    ),
    ErrorPattern(
        re.compile(r"No CUDA GPUs are available|Failed to infer device type"),
        EngineError,
        "it sees no GPU; look at the node's driver and at the PyTorch build beside vLLM",
    ),
    ErrorPattern(
        re.compile(r"EngineDeadError|EngineCore encountered an issue|died unexpectedly"),
        EngineError,
        "its engine died; the lines before that in its log say why, and where they do not it was killed from "
        "outside (by the kernel, which was out of memory, say)",
    ),
)
