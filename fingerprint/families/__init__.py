"""The table of model families: from a parsed config.json to the tensors a model consists of.

A family is described once, by the list of its tensors; the counts of :class:`ModelSpec` and the files of a dummy
checkpoint both come from that list. No code that a model brings is imported or run (``auto_map`` is ignored);
a family without a row is left to ``general``, which asks transformers' own class. It knows nothing of formats,
devices or engines. A new family is one row of a module's ``FAMILIES`` and, where no present reader fits, one
function. The tests compare names, shapes and counts with what the transformers classes build.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from fingerprint.config_json import Fields, read_config, show
from fingerprint.errors import UnsupportedModelError
from fingerprint.families import falcon, gemma, gpt_neox, gpt_oss, gptj, llama_like, opt, phi3
from fingerprint.families.blueprint import Blueprint, Family, ModuleLayout
from fingerprint.families.general import general_family
from fingerprint.families.refusals import family_name, refuse_other_tasks, supported
from fingerprint.model_spec import ModelSpec
from fingerprint.quantized import read_stored

__all__ = [
    "FAMILIES",
    "Blueprint",
    "Family",
    "ModuleLayout",
    "family_of",
    "load_spec",
    "read_blueprint",
    "read_config",
    "read_spec",
]

_MODULES = (llama_like, gemma, gpt_oss, phi3, falcon, gptj, gpt_neox, opt)
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {k: v for module in _MODULES for k, v in module.FAMILIES.items()}
)


def load_spec(path: Path) -> ModelSpec:
    """:func:`read_spec` of the config.json at ``path`` (the file, or a directory that holds it).

    Raises:
        NotFoundError: no such file, or a directory without config.json.
        ConfigError, UnsupportedModelError: as :func:`read_spec`, or not a JSON object of at most 4 MiB.
    """
    return read_spec(read_config(path))


def read_spec(config: Mapping[str, object]) -> ModelSpec:
    """The architecture that a parsed config.json describes. Offline; code that a model brings is never run.

    Of a family without a row, transformers' class is built on the meta device: seconds, the first time.

    Raises:
        ConfigError: a size is missing, of the wrong type, out of bounds, or contradicts another.
        UnsupportedModelError: another family, an encoder-decoder, multimodal or non-generating model, or one that
            is quantized in a way that ``fingerprint.quantized`` does not know.
    """
    return read_blueprint(config).spec


def read_blueprint(config: Mapping[str, object]) -> Blueprint:
    """:func:`read_spec` with the tensors that the counts come from; same errors."""
    family = family_of(config)
    found = family.read(Fields(config, str(config["model_type"])))
    stored = read_stored(
        config.get("quantization_config"), found.layer, family.layout.layers, found.spec.num_layers
    )
    return found if stored is None else replace(found, spec=replace(found.spec, stored=stored))


def family_of(config: Mapping[str, object]) -> Family:
    """The row of the table, else what transformers' class amounts to; errors as :func:`read_spec`."""
    name = family_name(config, FAMILIES)
    family = FAMILIES.get(name) or general_family(config, name)
    if family is None:
        raise UnsupportedModelError(f"model_type {show(name)} is not supported; {supported(FAMILIES)}")
    refuse_other_tasks(config, name, family.architectures)
    return family
