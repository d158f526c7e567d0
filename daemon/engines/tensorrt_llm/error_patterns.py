"""The texts with which TensorRT-LLM is documented to end, and what each means.

Sources, in 1.3.0rc3 and reports of 1.2: ``tensorrt_llm/{executor,llmapi,commands,_torch,mapping.py}``. Order
counts: the process above a rank says that the rank died after the rank has said of what.
"""

from __future__ import annotations

import re

from daemon.engines.failures import ErrorPattern
from fingerprint.errors import (
    CheckpointError,
    ConfigError,
    EngineError,
    InfeasibleError,
    UnavailableError,
    UnsupportedModelError,
)

__all__ = ["ERROR_PATTERNS"]

_LESS = "give it a smaller batch or context, larger tp or pp, or GPUs with more free memory"
_RANK_ENDED = r"Executor worker (?:died during initialization|returned error)"

ERROR_PATTERNS = (
    # The wrapper has seen the port free, so another process took it since; the next start moves to another.
    ErrorPattern(
        re.compile(r"Failed to bind socket to (?P<where>[^\s,;]+)"),
        UnavailableError,
        "{where} was taken while it started; it is started again",
    ),
    ErrorPattern(
        re.compile(r"Only (?P<have>\d+) GPUs are available, but (?P<need>\d+) are required"),
        InfeasibleError,
        "it sees {have} GPUs and needs {need}; look whether all are still there, or plan a smaller tp or pp",
    ),
    ErrorPattern(
        re.compile(r"component could not be created: [^\n]*(?i:KV cache)"),
        EngineError,
        f"its KV cache did not get its memory; {_LESS}",
    ),
    ErrorPattern(
        re.compile(r"Executor creation failed due to insufficient GPU memory"),
        EngineError,
        f"it ran out of GPU memory while it started; {_LESS}",
    ),
    ErrorPattern(
        re.compile(r"CUDA runtime error in ::cudaMalloc"),
        EngineError,
        f"its KV cache did not get its memory; {_LESS}",
    ),
    ErrorPattern(
        re.compile(r"Unknown architecture for AutoModelForCausalLM: (?P<name>\w+)"),
        UnsupportedModelError,
        "its PyTorch backend does not have {name}; deploy this model with another engine",
    ),
    ErrorPattern(
        re.compile(r"LLM got invalid argument: (?P<key>\w+)"),
        EngineError,
        "the installed release does not know the option {key}; install TensorRT-LLM 1.2.1, or plan without what "
        "it is for (pp_partition: stages of differing numbers of layers)",
    ),
    ErrorPattern(
        re.compile(r"The following arguments are specific to TensorRT backend"),
        EngineError,
        "the PyTorch backend was given an option of the older engine flow, a fault of the adapter; report it",
    ),
    ErrorPattern(
        re.compile(r"Unsupported quantization_config"),
        CheckpointError,
        "its PyTorch backend does not read the checkpoint's quantization; give the 16-bit model, or one quantized "
        "to fp8 or 4-bit AWQ with NVIDIA ModelOpt",
    ),
    ErrorPattern(
        re.compile(r"unsupported quant mode"),
        CheckpointError,
        "its linear layers do not have the checkpoint's quantization; give the 16-bit model, or one quantized to "
        "fp8 or 4-bit AWQ with NVIDIA ModelOpt",
    ),
    ErrorPattern(
        re.compile(r"Overriding KV cache quantization with an invalid type"),
        ConfigError,
        "it has no such KV format; plan with kv=16bit or kv=fp8",
    ),
    ErrorPattern(
        re.compile(r"(?i:kv|quant)[^\n]*\bdoesn't match"),
        ConfigError,
        "the KV format contradicts the checkpoint's own; plan with the one that the checkpoint was made for",
    ),
    ErrorPattern(
        re.compile(r"CUDA out of memory|OutOfMemoryError"),
        EngineError,
        f"it ran out of GPU memory; {_LESS}",
    ),
    ErrorPattern(
        re.compile(rf"(?s)(?P<cause>\b[A-Za-z_.]*(?:Error|Exception): [^\n]{{1,300}}).*{_RANK_ENDED}"),
        EngineError,
        "one of its ranks died: {cause}",
    ),
    ErrorPattern(
        re.compile(_RANK_ENDED), EngineError, "one of its ranks died; the lines before that in its log may say why"
    ),
)
