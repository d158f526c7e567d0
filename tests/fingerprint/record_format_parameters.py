"""Record which kernels and parameters vLLM's own classes take for each quantized format, without a GPU.

    python -m tests.fingerprint.record_format_parameters

Runs in an environment that has vLLM's wheel, its requirements and a CPU build of torch; its platform is said to be
an H200 (``vllm_on_cpu``). Models are made on torch's meta device, of the folders that
``tests.bench.format_configs`` writes. Parameters are those of the first layer before vLLM's
``process_weights_after_loading``, which re-packs them. Writes ``recorded/format_parameters.json``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from fingerprint.config import WeightFormat
from tests.bench.format_configs import FORMATS, formats_of, write_format

RECORDED = Path(__file__).parent / "recorded"
RECORD = RECORDED / "format_parameters.json"
MODELS = ("meta-llama/Llama-3.1-8B", "openai/gpt-oss-20b")
_LIMIT_S = 300
_KERNELS = ("kernel", "fp8_linear", "experts_cls")


def parameters(folder: str, quantization: str | None) -> dict[str, Any]:
    """Return vLLM's release, its name of the method, and each module of the first layer that has parameters."""
    import torch

    from tests.fingerprint.vllm_on_cpu import play_h200

    play_h200()
    import vllm
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    arguments = EngineArgs(
        model=folder,
        skip_tokenizer_init=True,
        load_format="dummy",
        enable_prefix_caching=False,
        max_num_seqs=32,
        max_model_len=2048,
        max_num_batched_tokens=2048,
        quantization=quantization,
    )
    config = arguments.create_engine_config()
    with set_current_vllm_config(config), tempfile.NamedTemporaryFile() as file:
        init_distributed_environment(1, 0, f"file://{file.name}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        torch.set_default_dtype(config.model_config.dtype)
        with torch.device("meta"):
            model = initialize_model(config)
    modules = {}
    for name, module in model.named_modules():
        own = list(module.named_parameters(recurse=False))
        if own and (".layers.0." in name or ".layers." not in name):
            modules[name] = {
                "method": type(getattr(module, "quant_method", None)).__name__,
                "kernel": _kernel(module),
                "parameters": {key: [str(t.dtype).removeprefix("torch."), *t.shape] for key, t in own},
            }
    return {"vllm": vllm.__version__, "quantization": config.model_config.quantization, "modules": modules}


def _kernel(module: Any) -> str:
    """Return the class that multiplies by the module's weights; empty where it names none."""
    holders = [
        holder for name in ("quant_method", "scheme") if (holder := getattr(module, name, None)) is not None
    ]
    found = [
        kernel for holder in holders for name in _KERNELS if (kernel := getattr(holder, name, None)) is not None
    ]
    return next((kernel.__name__ if isinstance(kernel, type) else type(kernel).__name__ for kernel in found), "")


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        print(f"\n{json.dumps(parameters(sys.argv[2], sys.argv[3] or None))}")
        return
    models = json.loads((RECORDED / "public_models.json").read_text())["models"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    found: dict[str, dict[str, Any]] = {}
    for model in MODELS:
        config = models[model]["config"]
        for name in formats_of(config):
            with tempfile.TemporaryDirectory() as work:
                source = Path(work) / "model"
                source.mkdir()
                (source / "config.json").write_text(json.dumps(config))
                folder = write_format(source, name, Path(work))
                online = "fp8" if FORMATS[name].weights is WeightFormat.FP8 else ""
                command = [sys.executable, "-m", "tests.fingerprint.record_format_parameters", "--one"]
                run = subprocess.run(
                    [*command, str(folder), online],
                    env=environment,
                    capture_output=True,
                    text=True,
                    timeout=_LIMIT_S,
                )
            if run.returncode:
                print(f"{model} {name}: {run.stderr.strip().splitlines()[-1]}")
                continue
            found.setdefault(model, {})[name] = json.loads(run.stdout.splitlines()[-1])
    RECORD.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
