"""Plug-in of ``lora_contest`` in vLLM's processes: keeps generated tokens, and changes what an attempt changes.

The bench copies this file to a folder on ``PYTHONPATH``, so it imports neither tests nor iServe. It does nothing
unless ``LORA_CONTEST_TOKENS`` is set.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

TOKENS = "LORA_CONTEST_TOKENS"  # file to which generated tokens are appended
SPECIALIZE = "LORA_CONTEST_SPECIALIZE"  # 1: graphs for each power of two of adapters
ALIGN = "LORA_CONTEST_ALIGN"  # 1: vLLM's kernels know that weights of packed linears are aligned
SAID = "lora contest:"


def register() -> None:
    if not os.environ.get(TOKENS):
        return
    keep_tokens(Path(os.environ[TOKENS]))
    if os.environ.get(SPECIALIZE) == "1":
        specialize()
    if os.environ.get(ALIGN) == "1":
        align_pointers(Path(__file__).with_name("lora_contest_kernel_utils.py"))
    names = ("VLLM_LORA_ENABLE_DUAL_STREAM", "VLLM_TUNED_CONFIG_FOLDER", SPECIALIZE, ALIGN)
    print(SAID, *(f"{name}={os.environ.get(name, '')}" for name in names), flush=True)


def keep_tokens(file: Path) -> None:
    """Append to ``file`` what each call of ``LLM.generate`` makes, where this process has that class."""
    module = sys.modules.get("vllm.entrypoints.llm")
    if module is None or hasattr(module.LLM.generate, "keeps_tokens"):
        return
    theirs = module.LLM.generate

    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        done = theirs(self, *args, **kwargs)
        asked = kwargs.get("lora_request")
        active = len({one.lora_int_id for one in asked}) if asked else 0
        with file.open("a") as out:
            made = [list(one.outputs[0].token_ids) for one in done]
            out.write(json.dumps({"active": active, "tokens": made}) + "\n")
        return done

    generate.keeps_tokens = True
    module.LLM.generate = generate


def specialize() -> None:
    """Give ``--specialize-active-lora``, where this process makes the configuration."""
    module = sys.modules.get("vllm.engine.arg_utils")
    if module is None or hasattr(module.EngineArgs.create_engine_config, "specializes"):
        return
    theirs = module.EngineArgs.create_engine_config

    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.specialize_active_lora = bool(self.enable_lora)
        return theirs(self, *args, **kwargs)

    create_engine_config.specializes = True
    module.EngineArgs.create_engine_config = create_engine_config


def aligned_source(source: str) -> str:
    """Return vLLM's ``kernel_utils`` in which pointers and first outputs of slices are multiples of 16.

    They are read from memory. Triton knows that pointers which are arguments, as those of one slice, are aligned,
    and loads 16 bytes a thread; of these it does not, and loads 2.

    Raises:
        RuntimeError: the source is not as in vLLM 0.33.0.
    """
    pointer = r"cur_lora_ptr = (tl\.load\(lora_ptr \+ slice_id\)\.to\(\s*tl\.pointer_type\([\w.]+\)\s*\))"
    aligned, pointers = re.subn(pointer, r"cur_lora_ptr = tl.multiple_of(\1, 16)", source)
    start = r"cur_slice_start = (tl\.load\(slice_start_loc \+ slice_id\))"
    aligned, starts = re.subn(start, r"cur_slice_start = tl.multiple_of(\1, 16)", aligned)
    if (pointers, starts) != (2, 1):
        raise RuntimeError(
            f"vLLM's kernel_utils reads {pointers} pointers and {starts} starts of slices, not 2 and 1"
        )
    return aligned


def align_pointers(file: Path) -> None:
    """Have vLLM's kernels call the aligned functions, which are written to ``file``, from their first call on."""
    from vllm.lora.ops.triton_ops import kernel_utils, lora_expand_op, lora_shrink_op

    aligned = aligned_source(Path(kernel_utils.__file__).read_text())
    part = file.with_suffix(f".{os.getpid()}")
    part.write_text(aligned)
    part.replace(file)
    module = load_module("lora_contest_kernel_utils", file)
    lora_shrink_op.do_shrink_kernel = module.do_shrink_kernel
    lora_expand_op.do_expand_kernel = module.do_expand_kernel
    print(SAID, "aligned the pointers of slices", flush=True)


def load_module(name: str, file: Path) -> Any:
    """Return the module in ``file``, without the package around it and its plug-in."""
    if (found := sys.modules.get(name)) is not None:
        return found
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
