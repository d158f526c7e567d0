"""Facts of transformers' classes, as recorded by ``record_family_truths``. Needs no torch."""

from __future__ import annotations

import json
import lzma
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

_RECORDED = Path(__file__).parent / "recorded"
TRUTHS = _RECORDED / "family_truths.json.xz"
# Kept for choosing tokens, not for attending to them; engines keep them in formats of their own.
INDEXER = "indexer"


@dataclass(frozen=True)
class KeptByLayer:
    """Content of one layer's cache of a sequence."""

    kv_elements: int  # a token; a latent counts as what it is; indexer keys are not in it
    indexer_elements: int  # a token
    window: int | None  # tokens, the query's own included
    state_bytes: int  # of a sequence, as transformers keeps it
    regular: bool  # False: something grows otherwise than by the token (see the recorded sizes)

    @property
    def engine_elements(self) -> int:
        """Elements of 16 bits that vLLM keeps of a token: its indexer keys are of 8, with 4 bytes for each 128."""
        return self.kv_elements + (self.indexer_elements + self.indexer_elements // 128 * 4) // 2


@dataclass(frozen=True)
class Held:
    """A config and what transformers' class holds with it."""

    config: dict[str, Any]
    parameters: int  # elements of the state dict, tied tensors once
    layers_at: str  # name of the longest stack of layers
    layer_parameters: tuple[int, ...]
    other_parameters: Mapping[str, int]  # of each tensor outside of that stack
    vllm_state_bytes: int | None  # of a recurrent layer, by vLLM's own functions; None: it keeps none
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]  # dtype and shape as saved; of shrunk models only
    kept: tuple[KeptByLayer, ...]  # by a forward; of shrunk and public models


@cache
def document() -> dict[str, Any]:
    """Return the whole record: date, versions and each architecture that vLLM lists."""
    return json.loads(lzma.decompress(TRUTHS.read_bytes()))


def recorded() -> list[str]:
    """Return the text architectures that transformers has a class of."""
    return [name for name, record in document()["architectures"].items() if "error" not in record]


def multimodal() -> list[str]:
    """Return the multimodal architectures whose shrunk model answers a prompt of text."""
    return [name for name, record in document()["multimodal"].items() if "cache" in record.get("tiny", {})]


def missing() -> dict[str, str]:
    """Return the architectures that transformers has no class of, and why."""
    records = document()["architectures"]
    return {name: record["error"] for name, record in records.items() if "error" in record}


def default(architecture: str) -> Held:
    """Return the model with its config class's defaults."""
    return _held(_record(architecture)["default"])


def small(architecture: str) -> Held:
    """Return the shrunk model."""
    return _held(_record(architecture)["tiny"])


def _record(architecture: str) -> dict[str, Any]:
    return {**document()["multimodal"], **document()["architectures"]}[architecture]


@cache
def public_models() -> dict[str, dict[str, Any]]:
    """Return configs and published counts of public models, with their sources."""
    models = json.loads((_RECORDED / "public_models.json").read_text(encoding="utf-8"))["models"]
    return dict(models)


def public(model: str) -> Held:
    """Return what transformers' class holds with a public model's config; its forward ran on the meta device."""
    held = _held(document()["public"][model])
    by_config = public_models()[model].get("kv_elements")
    if by_config is None:
        return held
    return replace(held, kept=tuple(replace(layer, kv_elements=by_config) for layer in held.kept))


def published_parameters(model: str) -> int:
    """Return the published count, less what it counts beyond the model (draft layers, towers, stored copies)."""
    entry = public_models()[model]
    return int(entry["published_parameters"]) - sum(entry.get("published_beyond_the_model", {}).values())


def _held(record: Mapping[str, Any]) -> Held:
    return Held(
        config=record["config"],
        parameters=record["parameters"],
        layers_at=record["layers_at"],
        layer_parameters=tuple(record["layer_parameters"]),
        other_parameters=record["other_parameters"],
        vllm_state_bytes=record.get("vllm_state_bytes"),
        tensors={name: (dtype, tuple(shape)) for name, (dtype, shape) in record.get("tensors", {}).items()},
        kept=tuple(_kept(layer) for layer in record.get("cache", ())),
    )


def _kept(layer: Mapping[str, Mapping[str, Any]]) -> KeptByLayer:
    attended = {name: fact for name, fact in layer.items() if INDEXER not in name}
    limits = {fact["tokens_at_most"] for fact in attended.values() if "tokens_at_most" in fact}
    widths = {"bfloat16": 2, "float32": 4}
    return KeptByLayer(
        kv_elements=sum(fact.get("elements_per_token", 0) for fact in attended.values()),
        indexer_elements=sum(f.get("elements_per_token", 0) for name, f in layer.items() if INDEXER in name),
        window=min(limits) + 1 if limits else None,
        state_bytes=sum(fact.get("elements", 0) * widths[fact["dtype"]] for fact in layer.values()),
        regular=not any("elements_after_5_to_8" in fact for fact in layer.values()),
    )
