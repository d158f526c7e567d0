"""Compression of a full fine-tune on a CPU and on a GPU: seconds, and whether the two make the same delta.

    python -m tests.bench.delta_compress OUT.json [--device cuda:0] [--layers 2] [--cpu-seconds 90]

Random layers of Llama-3.1-8B's shape with a small random change, 2 bits, 16,384 random tokens. Parts, each written
to OUT when it is done: second moments and their factor on both devices; one matrix in each format on both; the
whole command on the device; the same command on the CPU, which ends after a layer or, at a matrix, after the
seconds that are given. What both have made is compared. Seconds of the whole model are an extrapolation by
weights. Needs torch, transformers, safetensors.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

from daemon.variants.compress import CompressOrder, compress_delta, compute_device
from daemon.variants.compress.solver import Curvature, compress_matrix, relative_error, second_moment
from daemon.variants.compress.work_folder import UnitRecord, work_folder_of
from fingerprint.checkpoint import Checkpoint
from fingerprint.codec import from_json
from fingerprint.delta import FORMATS, read_delta
from fingerprint.delta.manifest import MatrixRecord
from fingerprint.delta.packing import unpack_codes
from fingerprint.delta.reader import codes_name

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS = 4096, 14336, 32, 8
LAYERS, VOCABULARY = 32, 128_256  # of the model that is extrapolated to
ROWS, TOKENS = 1024, 8192  # of the part that has one matrix
MAX_RATIO = 0.01  # by which errors of both devices may differ
MIN_SAME = 0.99  # of the codes of the matrix, and of the first linears of a layer, whose inputs are the same


class _EnoughError(Exception):
    """Ends a command on the CPU."""


def _config(shape: dict[str, int]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape["hidden"],
        "intermediate_size": shape["intermediate"],
        "num_hidden_layers": shape["layers"],
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["kv_heads"],
        "vocab_size": shape["vocabulary"],
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def _shapes(shape: dict[str, int]) -> dict[str, tuple[int, ...]]:
    hidden, wide = shape["hidden"], shape["intermediate"]
    keys = hidden // shape["heads"] * shape["kv_heads"]
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (shape["vocabulary"], hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (shape["vocabulary"], hidden),
    }
    for layer in range(shape["layers"]):
        prefix = f"model.layers.{layer}"
        for name, outputs, inputs in (
            *(
                (f"self_attn.{each}_proj", size, hidden)
                for each, size in zip("qkv", (hidden, keys, keys), strict=True)
            ),
            ("self_attn.o_proj", hidden, hidden),
            ("mlp.gate_proj", wide, hidden),
            ("mlp.up_proj", wide, hidden),
            ("mlp.down_proj", hidden, wide),
        ):
            found[f"{prefix}.{name}.weight"] = (outputs, inputs)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"{prefix}.{norm}.weight"] = (hidden,)
    return found


def _write_pair(folder: Path, shape: dict[str, int], device: torch.device) -> None:
    """Write a base and its fine-tune, in bfloat16. Embeddings have a fourth of the directions, and some noise."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device)

    base, tuned = {}, {}
    for name, size in _shapes(shape).items():
        if len(size) == 1:
            weight = torch.ones(size, device=device)
        elif name == "model.embed_tokens.weight":
            rank = size[1] // 4
            weight = normal(size[0], rank) @ normal(rank, size[1]) / rank**0.5 + 0.3 * normal(*size)
        else:
            weight = normal(*size) / size[1] ** 0.5
        base[name] = weight.to(torch.bfloat16).cpu()
        change = normal(*size) * (1e-3 if len(size) > 1 else 0)
        tuned[name] = (base[name].to(device).float() + change).to(torch.bfloat16).cpu()
    for side, tensors in (("base", base), ("tuned", tuned)):
        (folder / side).mkdir()
        (folder / side / "config.json").write_text(json.dumps(_config(shape)))
        save_file(tensors, folder / side / "model.safetensors", metadata={"format": "pt"})


def _synchronized(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _one_matrix(device: torch.device, hidden: int, keep: Callable[..., None]) -> None:
    """Compress a matrix on the CPU and on ``device``, on the same inputs: their second moments H and its factor,
    which all matrices of the same inputs share, then every format. ``keep`` gets what is measured after each.
    """
    generator = torch.Generator().manual_seed(1)
    rank = hidden // 4
    inputs = torch.randn(TOKENS, rank, generator=generator) @ torch.randn(rank, hidden, generator=generator)
    inputs = inputs / rank**0.5 + 0.3 * torch.randn(TOKENS, hidden, generator=generator)
    change = torch.randn(ROWS, hidden, generator=generator) * 1e-3
    sides = {each.type: each for each in (torch.device("cpu"), device)}
    of_inputs: dict[str, Any] = {"shape": [TOKENS, hidden]}
    for name, side in sides.items():
        of_inputs |= {f"{name}_{part}_s": seconds for part, seconds in _input_seconds(inputs.to(side)).items()}
        keep(inputs=of_inputs)
    print(of_inputs, flush=True)
    hessian = second_moment(inputs)
    of_side = {name: (change.to(side), Curvature.of(hessian.to(side))) for name, side in sides.items()}
    rows = []
    for format_name, format_ in FORMATS.items():
        row: dict[str, Any] = {"format": format_name, "shape": [ROWS, hidden]}
        codes = []
        for name, (own, curvature) in of_side.items():
            compress_matrix(own[:64], curvature, format_)  # what is loaded first
            started = _synchronized(own.device)
            found = compress_matrix(own, curvature, format_)
            row[f"{name}_s"] = round(_synchronized(own.device) - started, 4)
            row[f"{name}_error"] = relative_error(own, found.values(format_), curvature)
            codes.append(found.codes.cpu())
        row["same_codes"] = float((codes[0] == codes[-1]).float().mean())
        rows.append(row)
        keep(matrices=rows)
        print(row, flush=True)


def _input_seconds(inputs: torch.Tensor) -> dict[str, float]:
    """Return the seconds of H and of its factor; each is computed once before, for what is loaded first."""
    seconds: dict[str, float] = {}
    for _ in range(2):
        started = _synchronized(inputs.device)
        hessian = second_moment(inputs)
        between = _synchronized(inputs.device)
        Curvature.of(hessian)
        seconds = {
            "second_moments": round(between - started, 4),
            "factor": round(_synchronized(inputs.device) - between, 4),
        }
    return seconds


def _order(folder: Path, target: str, device: torch.device) -> CompressOrder:
    return CompressOrder(
        base=folder / "base",
        finetuned=folder / "tuned",
        target=folder / target,
        format=FORMATS["int2"],
        calibration=None,
        max_error=None,
        base_name="base",
        finetuned_name="tuned",
        device=device,
    )


def _timed(order: CompressOrder, layers: int, seconds: float | None) -> dict[str, Any]:
    """Run a command, and return seconds by unit. With ``seconds`` it ends after the first layer, or at a matrix
    after them.
    """
    started, marks = time.perf_counter(), []

    def mark(what: str, done: int, total: int) -> None:
        del total
        at = _synchronized(order.device) - started
        marks.append((what.split(",")[0], done, at))
        is_over = what.startswith("matrices") and (done > 8 or at > (seconds or 0))
        if seconds is not None and is_over:
            raise _EnoughError

    with suppress(_EnoughError):
        compress_delta(order, mark)
    ended = _synchronized(order.device) - started
    read = max((at for what, _, at in marks if what != "matrices"), default=0.0)
    at = {done: at for what, done, at in marks if what == "matrices"}
    units = {"read and hashed": read}
    ends = {"embeddings": 1} | {f"layer {layer}": 8 + 7 * layer for layer in range(layers)}
    ends["output layer"] = 2 + 7 * layers
    before = read
    for name, number in ends.items():
        if number in at:
            units[name], before = at[number] - before, at[number]
    within = {
        f"matrix {number} of layer 0": at[number + 1] - at[number] for number in range(1, 8) if number + 1 in at
    }
    found: dict[str, Any] = {"units_s": units, "layer_0_s": within, "total_s": ended, "is_whole": seconds is None}
    if order.device.type == "cuda":
        found["peak_gib"] = torch.cuda.max_memory_allocated(order.device) / 2**30
    return found


def _whole_model_s(units: dict[str, float], shape: dict[str, int]) -> float | None:
    """Return the extrapolated seconds of Llama-3.1-8B; None where no whole layer was measured. All weights of
    linears and output layer take what those of the last measured layer do; reading goes by the tensors.
    """
    layer = units.get(f"layer {shape['layers'] - 1}", units.get("layer 0"))
    if layer is None:
        return None
    sizes = {name: float(np.prod(size)) for name, size in _shapes(shape).items()}
    own = sum(size for name, size in sizes.items() if ".layers.0." in name)
    vocabulary = VOCABULARY * shape["hidden"]
    of_model = LAYERS * own + 2 * vocabulary
    return layer / own * (of_model - vocabulary) + units["read and hashed"] / sum(sizes.values()) * of_model


def _compared(folder: Path) -> list[dict[str, Any]]:
    """Return how far the first layer's linears agree that both commands have made."""
    work = work_folder_of(folder / "of_cpu")
    if (folder / "of_cpu").exists():
        own, files = list(read_delta(folder / "of_cpu").manifest.matrices), folder / "of_cpu"
    else:
        record, files = work / "records" / "00001.json", work / "delta"
        if not record.exists():
            return []
        own = list(from_json(record.read_bytes(), UnitRecord, what="record").matrices)
    theirs = {each.name: each for each in read_delta(folder / "of_device").manifest.matrices}
    rows = []
    for each in own:
        if "layers.0." not in each.name:
            continue
        other = theirs[each.name]
        same = np.mean(_codes(files, each) == _codes(folder / "of_device", other))
        rows.append(
            {"name": each.name, "cpu_error": each.error, "device_error": other.error, "same_codes": float(same)}
        )
        print(rows[-1], flush=True)
    return rows


def _codes(folder: Path, record: MatrixRecord) -> np.ndarray[Any, Any]:
    raw = Checkpoint.of_file(folder / record.file).read(codes_name(record.name))
    format_ = FORMATS[record.format]
    words = np.frombuffer(raw, "<u2").reshape(format_.codes_shape(record.shape))
    return unpack_codes(words, format_.bits, record.shape)


def _disagreements(matrices: list[dict[str, Any]], layer: list[dict[str, Any]]) -> list[str]:
    """Return what differs between the devices by more than rounding does."""
    found = []
    for row in matrices:
        if row["same_codes"] < MIN_SAME or abs(row["cuda_error"] / row["cpu_error"] - 1) > MAX_RATIO:
            found.append(f"{row['format']} of one matrix")
    for row in layer:
        if abs(row["device_error"] / row["cpu_error"] - 1) > MAX_RATIO:
            found.append(f"error of {row['name']}")
        if (
            row["name"].endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
            and row["same_codes"] < MIN_SAME
        ):
            found.append(f"codes of {row['name']}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=16_384)
    parser.add_argument("--scale", type=int, default=1, help="divides the widths, for a trial on a small machine")
    parser.add_argument("--cpu-seconds", type=float, default=90.0)
    parser.add_argument("--threads", type=int, default=16)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device = compute_device(args.device)
    shape = {
        "hidden": HIDDEN // args.scale,
        "intermediate": INTERMEDIATE // args.scale,
        "heads": HEADS // args.scale,
        "kv_heads": max(1, KV_HEADS // args.scale),
        "layers": args.layers,
        "vocabulary": args.vocabulary,
    }
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    kept: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, {args.threads} threads",
        "gpu": gpu,
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "shape": shape,
    }

    def keep(**part: Any) -> None:
        kept.update(part)
        args.out.write_text(json.dumps(kept, indent=1) + "\n")

    keep()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if device.type == "cuda":
            _one_matrix(device, shape["hidden"], keep)
        _write_pair(folder, shape, device)
        of_device = _timed(_order(folder, "of_device", device), args.layers, None)
        keep(device=of_device | {"whole_model_s_extrapolated": _whole_model_s(of_device["units_s"], shape)})
        print(json.dumps(of_device, indent=1), flush=True)
        of_cpu = _timed(_order(folder, "of_cpu", torch.device("cpu")), args.layers, args.cpu_seconds)
        keep(cpu=of_cpu | {"whole_model_s_extrapolated": _whole_model_s(of_cpu["units_s"], shape)})
        print(json.dumps(of_cpu, indent=1), flush=True)
        keep(layer=_compared(folder))
    keep(disagreements=_disagreements(kept.get("matrices", []), kept["layer"]))
    print("disagreements:", kept["disagreements"] or "none", flush=True)


if __name__ == "__main__":
    main()
