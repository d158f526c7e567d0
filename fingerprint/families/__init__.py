"""Reader of models: a parsed config.json, and the checkpoint's headers where known, become counts and tensors.

A new row is a module with ``FAMILIES``, its name in ``_MODULES``, and a small config.json in tests/fingerprint/
conftest.py. A family with a row is described by the list of its tensors, from which the counts of
:class:`ModelSpec` and the files of a dummy checkpoint both come; no torch is needed. Every other is described by
what its checkpoint holds, or by transformers' class (``fingerprint.description``). No code that a model brings is
imported or run: of ``auto_map`` the kinds of classes are kept. It knows nothing of formats, devices or engines.
The tests compare names, shapes and counts with what the transformers classes build.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from fingerprint.checkpoint import INDEX_FILE, SINGLE_FILE, StoredTensor, indexed_files, stored_tensors
from fingerprint.config_json import Fields, read_config, show
from fingerprint.description import describe, described_config
from fingerprint.description.facts import TEXT_PARTS, Facts, text_config
from fingerprint.description.transformers_class import class_defaults
from fingerprint.errors import CheckpointError, ConfigError, UnsupportedModelError
from fingerprint.extras import need_extra
from fingerprint.families import falcon, gemma, gpt_neox, gpt_oss, gptj, llama_like, opt, phi3
from fingerprint.families.base import Blueprint, Family, ModuleLayout
from fingerprint.families.generic import general_family
from fingerprint.families.unsupported import (
    family_name,
    is_multimodal,
    refuse_other_kinds,
    refuse_other_tasks,
    supported,
)
from fingerprint.model_spec import ModelSpec
from fingerprint.own_code import own_code_kinds
from fingerprint.quantized import read_stored

__all__ = [
    "FAMILIES",
    "Blueprint",
    "Family",
    "ModuleLayout",
    "check_agreement",
    "family_of",
    "is_tabled",
    "load_spec",
    "read_blueprint",
    "read_config",
    "read_spec",
]

_READ_OF_THE_WHOLE = ("quantization_config", "rope_scaling", "rope_parameters")
_MODULES = (llama_like, gemma, gpt_oss, phi3, falcon, gptj, gpt_neox, opt)
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {k: v for module in _MODULES for k, v in module.FAMILIES.items()}
)


def load_spec(path: Path, tensors: Mapping[str, StoredTensor] | None = None) -> ModelSpec:
    """Return :func:`read_spec` of the config.json at ``path`` (the file, or a directory that holds it).

    A family without a row is described by the headers of the checkpoint's files where they are there.

    Args:
        tensors: of the checkpoint, where its files are elsewhere.

    Raises:
        NotFoundError: no such file, or a directory without config.json.
        ConfigError, UnsupportedModelError: as :func:`read_spec`, or not a JSON object of at most 4 MiB.
        CheckpointError: the checkpoint's files are unreadable, or not those of the model that config.json says.
    """
    config = read_config(path)
    spec = _spec_of(config, path if path.is_dir() else path.parent, tensors)
    kinds = () if is_tabled(config) else own_code_kinds(config)
    return replace(spec, own_code=kinds) if kinds else spec


def _spec_of(
    config: Mapping[str, object], directory: Path, tensors: Mapping[str, StoredTensor] | None
) -> ModelSpec:
    try:
        if is_tabled(config):
            return _tabled(config, directory, tensors)
    except UnsupportedModelError:  # a quantization or layers that the row does not know; the headers may tell
        refuse_other_kinds(config)
        if not _has_headers(directory):
            raise
    if tensors is None and _has_headers(directory):
        tensors = stored_tensors(directory)
    if tensors is None:
        return read_spec(config)
    refuse_other_kinds(config)
    return describe(_completed(config), tensors)


def _tabled(
    config: Mapping[str, object], directory: Path, tensors: Mapping[str, StoredTensor] | None
) -> ModelSpec:
    """Return the model by its family's row, once its tensors were seen to agree; unreadable files are not judged.

    Raises:
        As :func:`load_spec`.
    """
    blueprint = read_blueprint(config)
    with suppress(CheckpointError, OSError):
        if tensors is None and _has_headers(directory):
            tensors = stored_tensors(directory)
    if tensors is not None:
        check_agreement(blueprint, FAMILIES[str(config["model_type"])].layout.layers, tensors)
    return blueprint.spec


def _completed(config: Mapping[str, object]) -> Mapping[str, object]:
    """Return ``config`` with what it leaves out to its class: by the row of its text model, else by the class.

    Raises:
        MissingExtraError: transformers is needed for that and not installed.
    """
    leaves_out = Facts(config).leaves_out
    if not leaves_out:
        return config
    part = next((name for name in TEXT_PARTS if isinstance(config.get(name), Mapping)), None)
    text = text_config(config)
    name = text.get("model_type")
    if part is not None and isinstance(name, str) and name in FAMILIES:
        plain = {key: value for key, value in text.items() if key not in _READ_OF_THE_WHOLE}
        with suppress(ConfigError):  # the row asks for what its class has by default
            return {**config, part: {**text, **_facts_of(FAMILIES[name].read(Fields(plain, name)).spec)}}
    need_extra(
        "torch", f"{', '.join(leaves_out)} of {show(config.get('model_type'))}, which config.json leaves out,"
    )
    filled = class_defaults(config)
    quantized = {"quantization_config": config["quantization_config"]} if "quantization_config" in config else {}
    return (
        {
            **filled,
            **quantized,
            "model_type": config.get("model_type"),
            "architectures": config.get("architectures"),
        }
        if filled
        else config
    )


def _facts_of(spec: ModelSpec) -> dict[str, object]:
    """Return the model's facts as a config.json gives them."""
    windows = [window for window in spec.windows if window is not None]
    return {
        "num_hidden_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.intermediate_size,
        "max_position_embeddings": spec.max_context_tokens,
        "layer_types": ["sliding_attention" if window else "full_attention" for window in spec.windows],
        "sliding_window": windows[0] if windows else None,
    }


def _has_headers(directory: Path) -> bool:
    if (directory / SINGLE_FILE).is_file():
        return True
    return (directory / INDEX_FILE).is_file() and all((directory / f).is_file() for f in indexed_files(directory))


def read_spec(config: Mapping[str, object]) -> ModelSpec:
    """Return the architecture that a parsed config.json describes. Offline; code that a model brings is never run.

    Of a family without a row, transformers' class is built on the meta device: seconds, the first time.

    Raises:
        ConfigError: a size is missing, of the wrong type, out of bounds, or contradicts another.
        UnsupportedModelError: an encoder-decoder or a model that generates no text, one that transformers has no
            class of, or one that is quantized in a way that ``fingerprint.quantized`` does not know.
        MissingExtraError: transformers or torch is not installed, and the family has no row.
    """
    if is_tabled(config):
        return read_blueprint(config).spec
    refuse_other_kinds(config)
    return described_config(config)


def is_tabled(config: Mapping[str, object]) -> bool:
    """Return whether the family has a row of the table, which multimodal models have not."""
    name = config.get("model_type")
    return isinstance(name, str) and name in FAMILIES and not is_multimodal(config)


def read_blueprint(config: Mapping[str, object]) -> Blueprint:
    """Return the tensors of a model with one stack of equal layers, which it is cut and run by.

    Raises:
        As :func:`read_spec`, and UnsupportedModelError: layers that differ, or a multimodal model.
    """
    family = family_of(config)
    found = family.read(Fields(config, str(config["model_type"])))
    stored = read_stored(
        config.get("quantization_config"), found.layer, family.layout.layers, found.spec.num_layers
    )
    return found if stored is None else replace(found, spec=replace(found.spec, stored=stored))


def family_of(config: Mapping[str, object]) -> Family:
    """Return the row of the table, else what transformers' class amounts to; errors as :func:`read_spec`."""
    name = family_name(config, FAMILIES)
    family = FAMILIES.get(name) or general_family(config, name)
    if family is None:
        raise UnsupportedModelError(f"model_type {show(name)} is not supported; {supported(FAMILIES)}")
    refuse_other_tasks(config, name, family.architectures)
    return family


_WHOLE_DTYPES = frozenset({"F16", "BF16", "F32", "F64"})  # the rest may be packed, whatever config.json says


def check_agreement(blueprint: Blueprint, layers: str, tensors: Mapping[str, StoredTensor]) -> None:
    """Compare the number of layers, and the shape of each tensor that both have under one name.

    A checkpoint whose layers have another name is not judged, nor are shapes of what is quantized.

    Args:
        layers: name of the list of layers.
        tensors: of the whole checkpoint, as they are stored.

    Raises:
        CheckpointError: they differ.
    """
    indexed = re.compile(re.escape(layers) + r"\.(0|[1-9][0-9]{0,5})\..+")
    stored = {int(found[1]) for name in tensors if (found := indexed.fullmatch(name))}
    num_layers = blueprint.spec.num_layers
    if stored and stored != set(range(num_layers)):
        missing = next((index for index in range(num_layers) if index not in stored), None)
        has = "" if missing is None else f" and none of index {missing}"
        raise CheckpointError(
            f"config.json says {num_layers} layers, of the tensors {layers} has {len(stored)}{has}; one of them "
            "is wrong"
        )
    if blueprint.spec.stored is not None:
        return
    of_layers = [(f"{layers}.{index}.{t.name}", t.shape) for index in sorted(stored) for t in blueprint.layer]
    for name, shape in [*((t.name, t.shape) for t in blueprint.rest), *of_layers]:
        if name in tensors and tensors[name].dtype in _WHOLE_DTYPES and tensors[name].shape != shape:
            raise CheckpointError(
                f"config.json says that {name} is of {list(shape)}, its tensor is of {list(tensors[name].shape)}; "
                "one of them is of another model"
            )
