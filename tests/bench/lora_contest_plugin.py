"""Plug-in of ``lora_contest`` in vLLM's processes: keeps generated tokens, and puts our kernels in vLLM's place.

The bench copies this file to a folder on ``PYTHONPATH``, so it imports neither tests nor iServe. It does nothing
unless ``LORA_CONTEST_TOKENS`` is set. The patched ``add_lora_linear`` is traced into vLLM's compiled graphs, so an
attempt with it needs a ``VLLM_CACHE_ROOT`` of its own: vLLM looks for a compiled model by its own sources alone.
"""

# No ``from __future__ import annotations``: schemas of operators are inferred from annotations that are types.

import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

TOKENS = "LORA_CONTEST_TOKENS"  # file to which generated tokens are appended
KERNELS = "LORA_CONTEST_KERNELS"  # adapter_kernels.py, or empty: vLLM's kernels
TILINGS = "LORA_CONTEST_TILINGS"  # chosen tilings, or empty: the default one
SPECIALIZE = "LORA_CONTEST_SPECIALIZE"  # 1: graphs for each power of two of adapters
FORK = "LORA_CONTEST_FORK"  # 1: our kernels next to each linear, with vLLM's layers of two streams
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
    if os.environ.get(KERNELS):
        use = fork_kernels if os.environ.get(FORK) == "1" else use_kernels
        use(Path(os.environ[KERNELS]), read_tilings(os.environ.get(TILINGS, "")))
    names = ("VLLM_LORA_ENABLE_DUAL_STREAM", "VLLM_TUNED_CONFIG_FOLDER", KERNELS, TILINGS, FORK, SPECIALIZE, ALIGN)
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


def read_tilings(file: str) -> dict[str, dict[str, Any]]:
    return dict(json.loads(Path(file).read_text())) if file else {}


def load_module(name: str, file: Path) -> Any:
    """Return the module in ``file``, without the package around it and its plug-in."""
    if (found := sys.modules.get(name)) is not None:
        return found
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def keep_split_groups(kernels: Any) -> None:
    """Keep vLLM's groups in pieces of a product's rows as well, in buffers that captured graphs read."""
    from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta

    if hasattr(LoRAKernelMeta.prepare_tensors, "splits"):
        return
    their_make, theirs = LoRAKernelMeta.make, LoRAKernelMeta.prepare_tensors

    def split(meta: Any) -> Any:
        found = (meta.num_tokens_per_lora, meta.lora_token_start_loc, meta.active_lora_ids)
        groups = kernels.Groups(meta.token_indices_sorted_by_lora_ids, *found)
        return groups.split(kernels.AdapterTiling().rows)[1:]

    def make(*args: Any, **kwargs: Any) -> Any:
        meta = their_make(*args, **kwargs)
        meta.pieces = split(meta)
        return meta

    def prepare_tensors(self: Any, token_lora_mapping: torch.Tensor) -> None:
        theirs(self, token_lora_mapping)
        for into, new in zip(self.pieces, split(self), strict=True):
            into.copy_(new)

    prepare_tensors.splits = True
    LoRAKernelMeta.make, LoRAKernelMeta.prepare_tensors = staticmethod(make), prepare_tensors


def use_kernels(file: Path, tilings: dict[str, dict[str, Any]]) -> None:
    """Compute small steps of linears by the kernels in ``file``; all else stays vLLM's."""
    from vllm.lora.ops.triton_ops.lora_expand_op import _lora_expand
    from vllm.lora.ops.triton_ops.lora_shrink_op import _lora_shrink
    from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU
    from vllm.utils.torch_utils import direct_register_custom_op

    if hasattr(torch.ops.vllm, "lora_contest_linear"):
        return
    kernels = load_module("iserve_adapter_kernels", file)
    keep_split_groups(kernels)
    direct_register_custom_op(
        op_name="lora_contest_linear",
        op_func=linear_operator(kernels, tilings, _lora_shrink, _lora_expand),
        mutates_args=["y"],
        fake_impl=_nothing,
    )
    PunicaWrapperGPU.add_lora_linear = add_lora_linear


def linear_operator(
    kernels: Any, tilings: dict[str, dict[str, Any]], shrink: Callable[..., None], expand: Callable[..., None]
) -> Callable[..., None]:
    """Return the operator: our kernels where they are for a product, else ``shrink`` and ``expand`` of vLLM."""
    of_shape = {shape: kernels.AdapterTiling(**values) for shape, values in tilings.items()}
    said = set()

    def lora_contest_linear(
        y: torch.Tensor,
        x: torch.Tensor,
        a: list[torch.Tensor],
        b: list[torch.Tensor],
        mapping: torch.Tensor,
        order: torch.Tensor,
        counts: torch.Tensor,
        starts: torch.Tensor,
        slots: torch.Tensor,
        is_base: torch.Tensor,
        num_active: torch.Tensor,
        piece_counts: torch.Tensor,
        piece_starts: torch.Tensor,
        piece_slots: torch.Tensor,
        scale: float,
        adds: bool,
    ) -> None:
        if is_base.item() or x.shape[0] == 0:
            return
        x = x.contiguous()
        if adds and kernels.takes(x, a, b):
            shape = f"{x.shape[1]}x{y.shape[1]}"
            tiling = of_shape.get(shape, kernels.AdapterTiling())
            if (shape, x.shape[0]) not in said:
                said.add((shape, x.shape[0]))
                print(SAID, f"our kernels for {x.shape[0]} rows of {shape}: {tiling}", flush=True)
            groups = kernels.Groups(order, piece_counts, piece_starts, piece_slots)
            kernels.add_adapters(y, x, a, b, groups, scale, tiling)
            return
        mixed = (mapping, order, counts, starts, slots, is_base, num_active)
        buffer = torch.empty((len(b), x.shape[0], b[0].shape[-1]), dtype=torch.float32, device=x.device)
        shrink(x, a, buffer, *mixed, scale)
        expand(buffer, b, y, *mixed, offset_start=0, add_inputs=adds)

    return lora_contest_linear


def fork_kernels(file: Path, tilings: dict[str, dict[str, Any]]) -> None:
    """Compute small steps of vLLM's layers of two streams by the kernels in ``file``; all else stays vLLM's."""
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA

    theirs = BaseLinearLayerWithLoRA._apply_async_impl
    if not hasattr(theirs, "forks"):
        kernels = load_module("iserve_adapter_kernels", file)
        keep_split_groups(kernels)
        BaseLinearLayerWithLoRA._apply_async_impl = forked_layer(kernels, tilings, theirs)


def forked_layer(
    kernels: Any, tilings: dict[str, dict[str, Any]], theirs: Callable[..., torch.Tensor]
) -> Callable[..., torch.Tensor]:
    """Return what a layer computes: our kernels next to the linear, or what it did where these are not for it."""
    of_shape = {shape: kernels.AdapterTiling(**values) for shape, values in tilings.items()}
    streams, said = {}, set()

    def apply(self: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        a, b = self.lora_a_stacked, self.lora_b_stacked
        if x.ndim != 2 or not kernels.takes(x, a, b):
            return theirs(self, x, bias)
        meta = self.punica_wrapper.token_mapping_meta
        _, order, _, _, _, is_base, _ = meta.meta_args(x.size(0), False)

        def product() -> torch.Tensor:
            return self._get_quant_method().apply(self.base_layer, x, bias)

        if is_base.item():
            return product()
        shape = f"{x.shape[1]}x{sum(self.output_slices)}"
        tiling = of_shape.get(shape, kernels.AdapterTiling(fork="shrink"))
        if (shape, x.shape[0]) not in said:
            said.add((shape, x.shape[0]))
            print(SAID, f"our kernels next to {x.shape[0]} rows of {shape}: {tiling}", flush=True)
        if x.device not in streams:
            streams[x.device] = kernels.SecondStream(x.device) if x.device.type == "cuda" else None
        groups = kernels.Groups(order, *meta.pieces)
        return kernels.product_with_adapters(product, x.contiguous(), a, b, groups, 1.0, tiling, streams[x.device])

    apply.forks = True
    return apply


def _nothing(*_: object, **__: object) -> None:
    return


def add_lora_linear(
    self: Any,
    y: torch.Tensor,
    x: torch.Tensor,
    lora_a_stacked: Any,
    lora_b_stacked: Any,
    scale: float,
    output_slices: Any,
    *,
    buffer: Any = None,
    **kwargs: Any,
) -> None:
    """Call the operator, in place of ``PunicaWrapperGPU.add_lora_linear``: it knows its sizes when it runs."""
    torch.ops.vllm.lora_contest_linear(
        y,
        x,
        lora_a_stacked,
        lora_b_stacked,
        *self.token_mapping_meta.meta_args(x.size(0), self.lora_config.specialize_active_lora),
        *self.token_mapping_meta.pieces,
        scale,
        kwargs.get("add_inputs", True),
    )
