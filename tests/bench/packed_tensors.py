"""Bytes and speeds of tensors that the variant store packs, by kind and level, and what packing costs a load.

    python -m tests.bench.packed_tensors measure OUT.json --machine WORDS
    python -m tests.bench.packed_tensors tables OUT.json

The store packs deltas alone; adapters were measured before that was decided, and still are: packed as deltas are.
The tensors are codes and scales of a small trained model's deltas (``delta_quality``'s, its first seed) and of a
larger random one's, a trained adapter, the demo's adapters and its embedding. Those of a kind are joined to one
tensor. The rules of the choice are in ``docs/decisions/0055-packed-tensors.md``. One thread.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from statistics import median
from unittest.mock import patch

import numpy as np
import torch
import zstandard
from transformers import LlamaForCausalLM

from daemon.variants import store as variant_store
from daemon.variants import tensor_files
from daemon.variants.adapter_tensors import TensorToStore, tensors_to_store
from daemon.variants.compress import CalibrationTexts, CompressOrder, compress_delta
from daemon.variants.store import VariantStore
from daemon.variants.tensor_files import pack, unpack
from fingerprint.checkpoint import Checkpoint
from fingerprint.codec import to_json
from fingerprint.delta import FORMATS, Delta, read_delta
from fingerprint.delta.reader import codes_name, scales_name
from fingerprint.float_bytes import decode_floats, encode_floats
from fingerprint.lora import LoraAdapter, read_adapter
from fingerprint.lora.adapter import WEIGHTS_FILE
from fingerprint.lora.adapter_config import CONFIG_FILE
from fingerprint.safetensors_writer import OutputTensor, write_safetensors
from iserve.demo import demo_model_path
from tests.bench.delta_quality import COST_CONFIG, SIZES, as_texts, write_tokenizer
from tests.bench.kept import write_kept
from tests.bench.packed_tensors_tables import (
    LEVELS,
    Kind,
    Load,
    Packing,
    Study,
    chosen_level,
    kinds_table,
    levels_table,
    loads_table,
    read_study,
    shuffle_gain,
)
from tests.bench.variant_quality import load_model, pretrained_model, tasks, train_adapter, train_model
from tests.fingerprint.small_adapters import LORA

TRAINED, WIDE, DEMO = "trained, 128 wide", "random, 512 wide", "demo"
_MOST_BYTES = 4 * 2**20  # of a kind
_ROUNDS, _LEAST_CALLS, _LEAST_S = 3, 3, 0.2  # of a figure
_MB = 1e6
_ADAPTER_RANK = 64
_LOADED_MODULES, _LOADED_WIDTH = 96, 2048  # of the random adapter that is loaded: 50 MB


@dataclass(frozen=True, slots=True)
class _Sample:
    """Bytes of a kind."""

    kind: Kind
    data: bytes


# Tensors.


def _sample(name: str, model: str, dtype: str, parts: list[bytes], num_values: int) -> _Sample:
    """Return ``parts`` as one tensor, of ``num_values``; what is beyond the most bytes is left out."""
    whole = b"".join(parts)
    data = whole[:_MOST_BYTES]
    values = num_values * len(data) // len(whole)
    zlib_bits = 8 * len(zlib.compress(data, 9)) / values
    kind = Kind(
        name=name,
        model=model,
        dtype=dtype,
        num_bytes=len(data),
        num_values=values,
        zlib_bits=round(zlib_bits, 3),
    )
    print(kind, file=sys.stderr, flush=True)
    return _Sample(kind, data)


def _compressed(base: Path, tuned: Path, target: Path, name: str, texts: CalibrationTexts | None) -> Delta:
    order = CompressOrder(
        base=base,
        finetuned=tuned,
        target=target,
        format=FORMATS[name],
        calibration=texts,
        max_error=None,
        base_name="base",
        finetuned_name="tuned",
    )
    compress_delta(order)
    return read_delta(target)


def _of_delta(delta: Delta, name: str, model: str) -> Iterator[_Sample]:
    """Yield codes of the linears, and scales once; of the first format, codes of the embeddings as well."""
    linears = [each for each in delta.manifest.matrices if "embed" not in each.name]
    codes = [delta.files[each.file].read(codes_name(each.name)) for each in linears]
    yield _sample(name, model, "I16", codes, sum(each.shape[0] * each.shape[1] for each in linears))
    if name == "int2":
        scales = [delta.files[each.file].read(scales_name(each.name)) for each in linears]
        yield _sample("scales of int2", model, "BF16", scales, sum(map(len, scales)) // 2)
        embedding = [each for each in delta.manifest.matrices if "embed" in each.name]
        codes = [delta.files[each.file].read(codes_name(each.name)) for each in embedding]
        yield _sample(
            "embedding, int4", model, "I16", codes, sum(each.shape[0] * each.shape[1] for each in embedding)
        )


def _trained(folder: Path) -> Iterator[_Sample]:
    """Yield the deltas of ``delta_quality``'s first seed, and an adapter for the same facts."""
    task = tasks(SIZES, 0)["facts"]
    base, steps = pretrained_model(SIZES, 0, folder / "base"), SIZES.steps[0][1]
    model, rng = load_model(base), np.random.default_rng([0, 0])
    train_model(model, steps, SIZES.full_lr, lambda: task.train(rng, SIZES.batch), task.answer)
    model.save_pretrained(folder / "tuned")
    write_tokenizer(folder / "tuned")
    for name in FORMATS:
        delta = _compressed(base, folder / "tuned", folder / name, name, as_texts(task.measured))
        yield from _of_delta(delta, name, TRAINED)
    train_adapter(base, task, steps, _ADAPTER_RANK, SIZES, 0, folder / "adapter")
    checkpoint = Checkpoint.of_file(folder / "adapter" / WEIGHTS_FILE)
    numbers = [checkpoint.read(tensor) for tensor in sorted(checkpoint.tensors)]
    yield _sample("adapter, F32", TRAINED, "F32", numbers, sum(map(len, numbers)) // 4)
    rounded = [encode_floats(decode_floats(raw, "F32"), "BF16") for raw in numbers]
    yield _sample("adapter, BF16", TRAINED, "BF16", rounded, sum(map(len, rounded)) // 2)


def _wide(folder: Path) -> Iterator[_Sample]:
    """Yield the deltas of ``delta_quality``'s larger model, whose changes are random."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(COST_CONFIG).to(torch.bfloat16)  # type: ignore[arg-type]
    model.save_pretrained(folder / "base")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 1e-3)
    model.save_pretrained(folder / "tuned")
    for name in FORMATS:
        yield from _of_delta(_compressed(folder / "base", folder / "tuned", folder / name, name, None), name, WIDE)


def _demo() -> Iterator[_Sample]:
    folder = demo_model_path().parent / "adapters"
    files = [Checkpoint.of_file(folder / name / WEIGHTS_FILE) for name in ("capitals", "shout")]
    parts = [file.read(tensor) for file in files for tensor in sorted(file.tensors)]
    yield _sample("adapter, BF16", DEMO, "BF16", parts, sum(map(len, parts)) // 2)
    embedding = Checkpoint.open(demo_model_path()).read("model.embed_tokens.weight")
    yield _sample("embedding, BF16", DEMO, "BF16", [embedding], len(embedding) // 2)


def _random_adapter(folder: Path) -> LoraAdapter:
    """Return an adapter of normal values in BF16: its exponents are spread as a trained one's."""
    folder.mkdir()
    rng, outputs = np.random.default_rng(0), []
    for number in range(_LOADED_MODULES):
        module = f"base_model.model.model.layers.{number}.self_attn.q_proj"
        for letter, shape in (("A", (_ADAPTER_RANK, _LOADED_WIDTH)), ("B", (_LOADED_WIDTH, _ADAPTER_RANK))):
            raw = encode_floats(rng.standard_normal(shape, np.float32) * np.float32(0.02), "BF16")
            name = f"{module}.lora_{letter}.weight"
            outputs.append(OutputTensor(name, "BF16", shape, len(raw), lambda raw=raw: [raw]))  # type: ignore[misc]
    write_safetensors(folder / WEIGHTS_FILE, outputs)
    config = {**LORA, "r": _ADAPTER_RANK, "target_modules": ["q_proj"]}
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    return read_adapter(folder)


# Measuring.


def _rate(work: Callable[[], object], num_bytes: int) -> float:
    """Return MB/s, by the median of calls."""
    times: list[float] = []
    while len(times) < _LEAST_CALLS or sum(times) < _LEAST_S:
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return round(num_bytes / _MB / median(times), 1)


def _shuffled(data: bytes, dtype: str) -> bytes:
    return np.frombuffer(data, np.uint8).reshape(-1, _bytes_of(dtype)).T.tobytes()


def _restored(data: bytes, dtype: str) -> bytes:
    return np.frombuffer(data, np.uint8).reshape(_bytes_of(dtype), -1).T.tobytes()


def _bytes_of(dtype: str) -> int:
    return {"BF16": 2, "F32": 4}[dtype]


def _packings(samples: list[_Sample]) -> tuple[Packing, ...]:
    sizes: dict[tuple[int, int, bool], int] = {}
    rates: dict[tuple[int, int, bool], list[tuple[float, float]]] = {}
    for number in range(_ROUNDS):
        for index, sample in enumerate(samples):
            for is_shuffled in (False, True) if sample.kind.dtype in ("BF16", "F32") else (False,):
                for level in LEVELS:
                    size, pack_rate, unpack_rate = _measured(sample, level, is_shuffled=is_shuffled)
                    key = index, level, is_shuffled
                    sizes[key] = size
                    rates.setdefault(key, []).append((pack_rate, unpack_rate))
        print(f"round {number + 1} of {_ROUNDS}", file=sys.stderr, flush=True)
    return tuple(
        Packing(
            kind=samples[index].kind.name,
            model=samples[index].kind.model,
            level=level,
            is_shuffled=is_shuffled,
            num_bytes=size,
            bits=round(8 * size / samples[index].kind.num_values, 3),
            pack_mb_s=tuple(rate for rate, _ in rates[index, level, is_shuffled]),
            unpack_mb_s=tuple(rate for _, rate in rates[index, level, is_shuffled]),
        )
        for (index, level, is_shuffled), size in sizes.items()
    )


def _measured(sample: _Sample, level: int, *, is_shuffled: bool) -> tuple[int, float, float]:
    """Return packed bytes and MB/s of packing and unpacking, each with the shuffle where there is one."""
    data, dtype = sample.data, sample.kind.dtype

    def packed() -> bytes:
        return b"".join(pack([_shuffled(data, dtype) if is_shuffled else data], level))

    file = packed()

    def unpacked() -> bytes:
        raw = b"".join(unpack(BytesIO(file), len(data)))
        return _restored(raw, dtype) if is_shuffled else raw

    assert unpacked() == data
    return len(file), _rate(packed, len(data)), _rate(unpacked, len(data))


def _may_be_packed(adapter: LoraAdapter, scale: float) -> Iterator[TensorToStore]:
    """Yield the tensors of an adapter for the store to pack, which it does not by itself."""
    return (replace(tensor, may_be_packed=True) for tensor in tensors_to_store(adapter, scale))


def _loads(contents: Mapping[str, LoraAdapter | Delta], folder: Path) -> Iterator[Load]:
    for name, variant in contents.items():
        times: dict[str, list[float]] = {"packed": [], "plain": [], "add packed": [], "add plain": []}
        sizes: dict[str, tuple[int, int, int]] = {}
        for _ in range(_ROUNDS):
            for form in ("packed", "plain"):
                store = VariantStore(folder / form)
                # Nothing is tried where all would have to be saved: the store of before.
                with (
                    patch.object(tensor_files, "_LEAST_SHARE_SAVED", 0.05 if form == "packed" else 1.0),
                    patch.object(variant_store, "tensors_to_store", _may_be_packed),
                ):
                    started = time.perf_counter()
                    added = store.add(variant)
                    times[f"add {form}"].append(round(time.perf_counter() - started, 4))
                started = time.perf_counter()
                loaded = store.loadable(added.content_hash)
                times[form].append(round(time.perf_counter() - started, 4))
                tensors = sum(len(Checkpoint.of_file(file).tensors) for file in loaded.glob("*.safetensors"))
                sizes[form] = tensors, added.num_bytes, added.disk_bytes
                shutil.rmtree(store.root)
        yield Load(
            content=name,
            level=tensor_files.LEVEL,
            num_tensors=sizes["packed"][0],
            num_bytes=sizes["packed"][1],
            disk_bytes=sizes["packed"][2],
            packed_s=tuple(times["packed"]),
            plain_s=tuple(times["plain"]),
            add_packed_s=tuple(times["add packed"]),
            add_plain_s=tuple(times["add plain"]),
        )


def measure(machine: str) -> Study:
    started = time.monotonic()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in ("trained", "wide"):
            (folder / name).mkdir()
        samples = [*_trained(folder / "trained"), *_wide(folder / "wide"), *_demo()]
        packings = _packings(samples)
        contents: dict[str, LoraAdapter | Delta] = {
            **{f"delta, {name}, 512 wide": read_delta(folder / "wide" / name) for name in FORMATS},
            "adapter of random values, BF16": _random_adapter(folder / "random"),
        }
        loads = tuple(_loads(contents, folder))
    version = ".".join(map(str, zstandard.ZSTD_VERSION))
    return Study(
        date=datetime.now(UTC).date().isoformat(),
        machine=machine,
        zstandard=f"zstandard {version}, python-zstandard {zstandard.__version__}",
        elapsed_s=round(time.monotonic() - started, 1),
        kinds=tuple(sample.kind for sample in samples),
        packings=packings,
        loads=loads,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("measure", "tables"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--machine", default="", help="words for the machine and what else ran on it")
    args = parser.parse_args()
    if args.command == "measure":
        if not args.machine:
            parser.error("measure needs --machine")
        write_kept(args.file, json.dumps(json.loads(to_json(measure(args.machine))), indent=1) + "\n")
    study = read_study(args.file)
    level = chosen_level(study)
    print("\n\n".join((kinds_table(study), levels_table(study), loads_table(study))))
    print(f"\nlevel {level}; shuffled bytes: {shuffle_gain(study, level):.1%} fewer")


if __name__ == "__main__":
    main()
