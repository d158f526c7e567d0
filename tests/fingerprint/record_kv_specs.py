"""Record what vLLM's own classes keep of each layer of public models, on a machine without a GPU.

    python -m tests.fingerprint.record_kv_specs [MODEL ...]

Runs in an environment that has vLLM's wheel, its requirements and a CPU build of torch; each model in a process of
its own (about 10 s). Configs are those of ``recorded/public_models.json``; a model whose class cannot be made so
(it asks a CUDA library) is left out, with vLLM's reason on the terminal. Writes ``recorded/kv_specs.json``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).parent / "recorded"
RECORD = RECORDED / "kv_specs.json"
_LIMIT_S = 300


def _layers(folder: str) -> dict[str, Any]:
    """Return the kinds of layers of the model in ``folder``: how many, bytes of a token, of a state, window."""
    import torch

    from tests.fingerprint.vllm_on_cpu import play_h200

    play_h200()
    import vllm
    from vllm.config import get_layers_from_vllm_config, set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.model_loader.utils import initialize_model

    arguments = EngineArgs(
        model=folder,
        skip_tokenizer_init=True,
        load_format="dummy",
        enable_prefix_caching=False,
        max_num_seqs=32,
        max_model_len=2048,
        max_num_batched_tokens=2048,
    )
    config = arguments.create_engine_config()
    with set_current_vllm_config(config), tempfile.NamedTemporaryFile() as file:
        init_distributed_environment(1, 0, f"file://{file.name}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        torch.set_default_dtype(config.model_config.dtype)
        with torch.device("meta"):
            initialize_model(config)
        kinds: Counter[tuple[float, int, int | None]] = Counter()
        for layer in get_layers_from_vllm_config(config, AttentionLayerBase).values():
            spec = layer.get_kv_cache_spec(config)
            if spec is None:
                continue
            if hasattr(spec, "shapes"):
                kinds[0.0, spec.state_content_size_bytes, None] += 1
            else:
                kinds[
                    spec.unpadded_page_size_bytes / spec.block_size, 0, getattr(spec, "sliding_window", None)
                ] += 1
    rows = [
        {"layers": count, "token_bytes": token, "state_bytes": state, "window": window}
        for (token, state, window), count in kinds.items()
    ]
    return {"vllm": vllm.__version__, "kinds": rows}


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        print(f"\n{json.dumps(_layers(sys.argv[2]))}")
        return
    models = json.loads((RECORDED / "public_models.json").read_text())["models"]
    found = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    for name in sys.argv[1:] or models:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(models[name]["config"]))
            command = [sys.executable, "-m", "tests.fingerprint.record_kv_specs", "--one", folder]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, env=environment)
        if done.returncode:
            print(f"{name}: {done.stderr.strip().splitlines()[-1][:200]}", flush=True)
            continue
        found[name] = json.loads(done.stdout.splitlines()[-1])
        RECORD.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n")


if __name__ == "__main__":
    main()
