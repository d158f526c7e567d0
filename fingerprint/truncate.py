"""Fingerprints: checkpoints with all of a model's unique parts and few of its hidden layers.

``generate`` cuts one out of a checkpoint, reading only the bytes it needs; ``generate_dummy`` makes one from a
config.json alone. Either way the result is an ordinary model directory of the same family, which any engine loads.
It knows nothing of engines, and it neither interprets nor changes a weight.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import prod
from pathlib import Path

import numpy as np

from fingerprint.checkpoint import CHUNK_BYTES, DTYPE_BITS, SINGLE_FILE, Checkpoint
from fingerprint.companion_files import copy_code, copy_companions
from fingerprint.config_json import show
from fingerprint.description.facts import LAYERS_KEYS
from fingerprint.errors import BadInputError, CheckpointError, ConfigError, UnsupportedModelError
from fingerprint.families import Blueprint, family_of, is_tabled, load_spec, read_blueprint, read_config
from fingerprint.float_bytes import encode_floats
from fingerprint.safetensors_writer import OutputTensor, new_directory, write_safetensors
from fingerprint.shard_config import shard_config
from fingerprint.tensor_shapes import Role, TensorShape, elements
from fingerprint.truncated_config import cut_config

__all__ = ["GenerateResult", "generate", "generate_dummy", "generate_shape"]

Progress = Callable[[int, int], None]  # bytes written so far, bytes in all

DUMMY_STD = 0.02  # the initializer_range of most families: activations stay in range whatever the depth
_DUMMY_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateResult:
    """Size of a generation: layers, and bytes read and written."""

    directory: Path
    layers: tuple[int, ...]  # source layer indexes, in order
    source_bytes: int  # size of the source's safetensors files; 0 for a dummy
    bytes_read: int  # of these files and their index
    bytes_written: int  # of the new safetensors file


def generate(
    source: Path, target: Path, layers: Sequence[int], *, progress: Progress | None = None
) -> GenerateResult:
    """Write to ``target`` the model of ``source`` with only ``layers``, renumbered from 0 in their order.

    Memory: the headers and a few MiB, whatever the model's size.

    Args:
        source: a checkpoint directory (one or many safetensors files).
        target: a directory that is not there yet (or is empty); it appears whole or not at all.
        layers: source layer indexes, strictly increasing.
        progress: called with bytes written so far and in all.

    Raises:
        BadInputError: ``layers`` is empty, out of range, repeated or not increasing.
        CheckpointError: the checkpoint is unreadable, or lacks tensors that its config.json promises.
        ConflictError: ``target`` is there already.
        NotFoundError, ConfigError, UnsupportedModelError: as ``families.read_spec``.
    """
    config = read_config(source)
    blueprint = read_blueprint(config)
    chosen = _checked_layers(layers, blueprint.spec.num_layers)
    checkpoint = Checkpoint.open(source)
    renamed = _select(checkpoint, family_of(config).layout.layers, blueprint, chosen)
    tensors = [
        OutputTensor(new, entry.dtype, entry.shape, entry.num_bytes, partial(checkpoint.chunks, old))
        for new, old in renamed.items()
        for entry in (checkpoint.tensors[old],)
    ]
    new_config = _cut_config(config, blueprint, chosen)
    written = _write(target, new_config, tensors, source, chosen, blueprint.spec.num_layers, progress)
    return GenerateResult(
        directory=target,
        layers=chosen,
        source_bytes=checkpoint.source_bytes,
        bytes_read=checkpoint.bytes_read,
        bytes_written=written,
    )


def generate_dummy(
    config_dir: Path,
    target: Path,
    layers: int | Sequence[int],
    *,
    seed: int = 0,
    progress: Progress | None = None,
) -> GenerateResult:
    """Write to ``target`` a model of the family and sizes of ``config_dir`` with ``layers``, or the first so many.

    Its weights are random (matrices normal(0, 0.02), norms 1, biases 0), in the config's dtype, float32 when it
    names none: good for profiling, which does not depend on trained values; its text is noise. Names and shapes
    come from the family's own table, not from transformers' classes: those keep other names in memory than
    checkpoints have on disk (stacked experts), and this way the caller never loads torch. Same seed, same bytes.

    Raises:
        BadInputError: a number that is not in 1..the model's, or as :func:`generate`.
        ConflictError, CheckpointError, NotFoundError, ConfigError, UnsupportedModelError: as :func:`generate`.
    """
    config = read_config(config_dir)
    blueprint = read_blueprint(config)
    if blueprint.spec.stored is not None:
        raise UnsupportedModelError(
            f"random weights are made in 16 bits only, and {config_dir} says {blueprint.spec.stored.method}: give "
            "a folder with the checkpoint's own weights, or leave quantization_config out of config.json"
        )
    chosen = _chosen(layers, blueprint.spec.num_layers)
    stack = family_of(config).layout.layers
    dtype = _dummy_dtype(config)
    shapes = list(blueprint.rest)
    for index in range(len(chosen)):
        prefix = f"{stack}.{index}."
        shapes += [TensorShape(prefix + shape.name, shape.shape, shape.role) for shape in blueprint.layer]
    tensors = [
        OutputTensor(
            shape.name,
            dtype,
            shape.shape,
            prod(shape.shape) * DTYPE_BITS[dtype] // 8,
            partial(_dummy_pieces, shape, dtype, [seed, number]),
        )
        for number, shape in enumerate(shapes)
    ]
    new_config = _cut_config(config, blueprint, chosen)
    written = _write(target, new_config, tensors, config_dir, chosen, blueprint.spec.num_layers, progress)
    return GenerateResult(directory=target, layers=chosen, source_bytes=0, bytes_read=0, bytes_written=written)


def generate_shape(
    config_dir: Path, target: Path, layers: int | Sequence[int], *, tp: int = 1, code: bool = False
) -> None:
    """Write to ``target`` the config.json and tokenizer of ``layers``, or of the first so many, and no weights.

    For an engine that makes random weights itself.

    Args:
        tp: above 1, the shape is that of one rank of so many (``shard_config``). It has no tokenizer and no
            generation settings, which speak of tokens beyond a rank's vocabulary.
        code: with the Python files that the model brings, for an engine that may run them.

    Raises:
        BadInputError: as :func:`generate_dummy`, or ``tp`` does not divide the model (``shard_config``).
        ConflictError, CheckpointError, NotFoundError, ConfigError, UnsupportedModelError: as :func:`generate`.
    """
    config = read_config(config_dir)
    blueprint = _tabled(config)
    if blueprint is not None:
        new_config = _cut_config(config, blueprint, _chosen(layers, blueprint.spec.num_layers))
    else:
        spec = load_spec(config_dir)
        new_config = cut_config(config, _first_layers(layers, spec.num_layers), LAYERS_KEYS)
    if tp > 1:
        new_config = shard_config(new_config, tp)
    source = config_dir if config_dir.is_dir() else config_dir.parent
    if code and "auto_map" in config:
        new_config["auto_map"] = config["auto_map"]
    with new_directory(target, needed_bytes=0) as part:
        (part / "config.json").write_text(json.dumps(new_config, indent=2) + "\n", encoding="utf-8")
        if tp == 1:
            copy_companions(source, part)
        if code:
            copy_code(source, part)


def _tabled(config: Mapping[str, object]) -> Blueprint | None:
    """Return the blueprint; None: the family has no row, or the model is otherwise than its row."""
    try:
        return read_blueprint(config) if is_tabled(config) else None
    except UnsupportedModelError:
        return None


def _first_layers(layers: int | Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Return the chosen layers, which must be the model's first: a class makes a layer by its index.

    Raises:
        UnsupportedModelError: any other layers.
    """
    chosen = _chosen(layers, num_layers)
    if chosen != tuple(range(len(chosen))):
        raise UnsupportedModelError(
            f"layers {show(list(chosen))} were asked for; of a family without a table the first are cut"
        )
    return chosen


def _chosen(layers: int | Sequence[int], num_layers: int) -> tuple[int, ...]:
    if not isinstance(layers, int):
        return _checked_layers(layers, num_layers)
    if not 1 <= layers <= num_layers:
        raise BadInputError(f"num_layers must be 1 to {num_layers} for this model, got {layers}")
    return tuple(range(layers))


def _checked_layers(layers: Sequence[int], num_layers: int) -> tuple[int, ...]:
    chosen = tuple(layers)
    if not chosen:
        raise BadInputError(f"layers is empty; name at least one of 0 to {num_layers - 1}")
    for layer in chosen:
        if type(layer) is not int or not 0 <= layer < num_layers:
            raise BadInputError(f"layer {show(layer)} is not one of 0 to {num_layers - 1}")
    # A repeated layer would be stored twice and cost what a different one costs; an engine that wants full depth
    # in little memory ties layers itself. So the order is the model's and each layer is stored once.
    if any(after <= before for before, after in pairwise(chosen)):
        raise BadInputError(f"layers must be strictly increasing, got {show(list(chosen))}")
    return chosen


def _cut_config(config: Mapping[str, object], blueprint: Blueprint, chosen: tuple[int, ...]) -> dict[str, object]:
    """Return the config with the chosen layers only.

    Which layers slide is written out where the class would otherwise derive it from the kept layers' positions.
    """
    windows = blueprint.spec.layer_windows
    if windows and config.get("layer_types") is None:
        types = ["full_attention" if window is None else "sliding_attention" for window in windows]
        config = {**config, "layer_types": types}
    return cut_config(config, chosen, family_of(config).layers_keys)


def _select(checkpoint: Checkpoint, layers: str, blueprint: Blueprint, chosen: tuple[int, ...]) -> dict[str, str]:
    """Return new name -> old name of each tensor to keep: all outside the layers, and those of the chosen layers.

    Raises:
        CheckpointError: a layer has fewer tensors or elements than the rest or than config.json says.
    """
    prefix = layers + "."
    of_layer: dict[int, dict[str, str]] = {layer: {} for layer in chosen}
    rest = {}
    for name in checkpoint.tensors:
        index, dot, suffix = name.removeprefix(prefix).partition(".") if name.startswith(prefix) else ("", "", "")
        if not (dot and index.isascii() and index.isdigit()):
            rest[name] = name
        elif len(index) < 6 and int(index) in of_layer:
            of_layer[int(index)][suffix] = name
    missing = [shape.name for shape in blueprint.rest if shape.name not in rest]
    if missing:
        raise CheckpointError(
            f"the checkpoint in {checkpoint.directory} has no {missing[0]}; its config.json needs it"
        )
    every = sorted(set().union(*of_layer.values()))
    for layer, tensors in of_layer.items():
        absent = [suffix for suffix in every if suffix not in tensors]
        if blueprint.spec.stored is not None:  # matrices that are left in 16 bits may differ from layer to layer
            absent = _modules_without(tensors, blueprint)
        found = sum(prod(checkpoint.tensors[name].shape) for name in tensors.values())
        if absent or (blueprint.spec.stored is None and found < blueprint.spec.layer_params):
            lack = (
                f"no {absent[0]}"
                if absent
                else f"{found:,} weights, config.json says {elements(blueprint.layer):,}"
            )
            raise CheckpointError(f"layer {layer} of the checkpoint in {checkpoint.directory} has {lack}")
    renamed = dict(rest)
    for new, layer in enumerate(chosen):
        renamed |= {f"{prefix}{new}.{suffix}": name for suffix, name in of_layer[layer].items()}
    return renamed


def _modules_without(suffixes: Iterable[str], blueprint: Blueprint) -> list[str]:
    """Return matrices of a layer of which a quantized checkpoint stores nothing, whatever it calls the parts."""
    starts = {suffix[: at.start()] for suffix in suffixes for at in re.finditer(r"[._](?=[^._]*$)|\.", suffix)}
    starts |= set(suffixes)
    return [t.name for t in blueprint.layer if t.name.removesuffix(".weight") not in starts]


def _write(
    target: Path,
    config: Mapping[str, object],
    tensors: Sequence[OutputTensor],
    source: Path,
    chosen: tuple[int, ...],
    num_layers: int,
    progress: Progress | None,
) -> int:
    total = sum(tensor.num_bytes for tensor in tensors)
    done = 0

    def on_bytes(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    metadata = {"iserve_layers": ",".join(map(str, chosen)), "iserve_num_layers": str(num_layers)}
    with new_directory(target, needed_bytes=total) as part:
        (part / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        copy_companions(source if source.is_dir() else source.parent, part)
        return write_safetensors(part / SINGLE_FILE, tensors, metadata=metadata, on_bytes=on_bytes)


def _dummy_dtype(config: Mapping[str, object]) -> str:
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    text = name.removeprefix("torch.") if isinstance(name, str) else ""
    if text not in _DUMMY_DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(_DUMMY_DTYPES)}, got {show(name)}")
    return _DUMMY_DTYPES[text]


def _dummy_pieces(shape: TensorShape, dtype: str, seed: list[int]) -> Iterator[bytes]:
    random = np.random.default_rng(seed)
    left = prod(shape.shape)
    while left:
        count = min(left, CHUNK_BYTES // 4)
        left -= count
        if shape.role in (Role.NORM, Role.BIAS):
            values = np.full(count, 1.0 if shape.role is Role.NORM else 0.0, np.float32)
        else:
            values = random.standard_normal(count, np.float32) * np.float32(DUMMY_STD)
        yield encode_floats(values, dtype)
