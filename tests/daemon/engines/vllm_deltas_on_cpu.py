"""Cases of the deltas' plug-in in vLLM's own LoRA code on a CPU; prints a line of JSON for each.

    python -m tests.daemon.engines.vllm_deltas_on_cpu SITE [CASE ...]

``SITE`` is a folder with vLLM 0.33.0 and the Python of its dependencies. Kernels are the references in torch.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.daemon.engines.vllm_delta_cases import tiny_model
from tests.daemon.engines.vllm_on_cpu import import_vllm
from tests.daemon.variant_kernels import VARIANTS_PATH

FILES = ("products", "prompts", "loads", "places", "graphs", "several_gpus")


def main(cases: Mapping[str, Callable[[], None]]) -> None:
    """Run all of ``cases``, or those that are named."""
    import_vllm(Path(sys.argv[1]))
    sys.path.insert(0, VARIANTS_PATH)
    import vllm
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    vllm.__version__ = "0.33.0"  # a folder without its metadata does not know
    from iserve_variants.plugin import register

    register()
    with tempfile.NamedTemporaryFile() as store, set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{store.name}", 0, "gloo")
        initialize_model_parallel(1, 1)
        wanted = sys.argv[2:] or list(cases)
        for name, function in ((name, cases[name]) for name in wanted):
            try:
                function()
                said = ""
            except BaseException:  # noqa: BLE001 - each case is reported
                said = traceback.format_exc()
            print(json.dumps({"case": name, "error": said}), flush=True)


if __name__ == "__main__":
    for file in FILES:
        importlib.import_module(f"tests.daemon.engines.vllm_delta_cases.{file}")
    main(tiny_model.CASES)
