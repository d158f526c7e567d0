"""The stack of hidden layers found in the names of a model's tensors, and the tensors outside it.

A layer's tensors are named ``<stack>.<index>.<rest>``. Experts, pairs of attentions and the like have further
indexes behind it, towers for images and sound have stacks of their own, and draft heads for speculation (MTP) are
layers behind the last or have a name of their own; none of these is served as a layer.

The token embedding is the table that has the config's tokens and width, and the text's stack has that width. A
word that towers are usually named by says something only where it is no part of the embedding's name too.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from math import prod

from fingerprint.checkpoint import StoredTensor
from fingerprint.config_json import MAX_LAYERS
from fingerprint.errors import CheckpointError, UnsupportedModelError

__all__ = ["Stack", "check_tensors", "find_stack"]

_INDEXED = re.compile(r"(.*?)\.(0|[1-9][0-9]{0,5})\.(.+)")
_MOST_NAME_CHARS = 512
_MOST_SIZE = 2**32
_SMALL = 0.1  # of the parameters of the stack that is served: some modules outside it, as many as layers
_TOWERS = re.compile(
    r"(^|[._])(vision|visual|vit|audio|acoustic|image|img|speech|sound|video|talker|qformer|resampler|perceiver|gated_cross_attn|encoder_layers)"
)
_JOINS = re.compile(r"(^|[._])(projector|mm|multi_modal|multimodal|connector|merger|aligner)([._]|$)")
_ENCODER = re.compile(r"(^|[._])encoder\.")  # where a decoder has as many layers, it is of images or sound
_MASK = re.compile(r"(^|[._])(attn|attention)\.(masked_)?bias$")
_DRAFTS = re.compile(r"(^|\.)(mtp|nextn|eagle|draft)(\d*|_\w+)(\.|$)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """A model's tensors by where they belong."""

    name: str  # of the layers' list
    layers: tuple[Mapping[str, StoredTensor], ...]  # by the rest of the name
    embedding: StoredTensor
    head: StoredTensor | None  # None: the embedding is the head
    beside_params: int  # input embedding and all else that belongs to no layer: norms, positions, towers
    norm_params: int  # of these, vectors
    tower_params: int  # of ``beside_params``, towers for images, video and sound, with what joins them to the text
    tower_vector_params: int  # of these, vectors


def check_tensors(tensors: Mapping[str, StoredTensor]) -> None:
    """Refuse names and shapes that no model has and that would be slow to read, or nothing.

    Raises:
        CheckpointError: such a tensor.
    """
    for name, tensor in tensors.items():
        if len(name) > _MOST_NAME_CHARS:
            raise CheckpointError(f"tensor {name[:60]!r}... has a name of {len(name):,} characters")
        if 0 in tensor.shape or any(size > _MOST_SIZE for size in tensor.shape):
            raise CheckpointError(f"tensor {name!r} is of {str(tensor.shape)[:80]}, which no model has")


def find_stack(
    tensors: Mapping[str, StoredTensor], num_layers: int, *, vocab: int | None = None, width: int | None = None
) -> Stack:
    """The stack of ``num_layers`` among ``tensors``.

    Args:
        vocab, width: of the token embedding, which may have more rows; None: not known.

    Raises:
        CheckpointError: none has as many layers, or there is no embedding.
        UnsupportedModelError: several have.
    """
    by_stack: dict[str, dict[int, dict[str, StoredTensor]]] = defaultdict(lambda: defaultdict(dict))
    beside: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        found = _INDEXED.fullmatch(name)
        if _DRAFTS.search(name) or _is_mask(name, tensor):
            continue
        if found is None:
            beside[name] = tensor
        else:
            by_stack[found[1]][int(found[2])][found[3]] = tensor
    sizes = {
        name: sum(_elements(t) for each in layers.values() for t in each.values())
        for name, layers in by_stack.items()
    }
    embedding = _token_embedding(beside, vocab, width)
    name = _only_stack(by_stack, sizes, num_layers, embedding, beside[embedding] if embedding else None)
    if not embedding:
        raise CheckpointError("no tensor beside the layers is an input embedding")
    layers = by_stack.pop(name)
    if not any(map(_DRAFTS.search, tensors)):
        _check_no_more(name, layers, num_layers)
    for other, indexed in by_stack.items():
        beside |= {f"{other}.{index}.{rest}": t for index, each in indexed.items() for rest, t in each.items()}
    head = _head(beside, embedding)
    towers = _towers(beside, name, embedding, head)
    of_beside = sum(_elements(t) for key, t in beside.items() if key != head)
    return Stack(
        name=name,
        layers=tuple(layers[index] for index in range(num_layers)),
        embedding=beside[embedding],
        head=beside.get(head),
        beside_params=of_beside,
        norm_params=sum(_elements(t) for t in beside.values() if len(t.shape) == 1),
        tower_params=sum(map(_elements, towers)),
        tower_vector_params=sum(_elements(t) for t in towers if len(t.shape) == 1),
    )


def _is_mask(name: str, tensor: StoredTensor) -> bool:
    """Return whether it is a causal mask, or its filling, which old GPT checkpoints have and no engine loads."""
    return _MASK.search(name) is not None and len(tensor.shape) in (0, 4)


def _check_no_more(name: str, layers: Mapping[int, Mapping[str, StoredTensor]], num_layers: int) -> None:
    """Raise CheckpointError where a layer behind the last is like those before: a draft head has tensors more."""
    alike = {frozenset((rest, t.shape) for rest, t in layers[index].items()) for index in range(num_layers)}
    for index, tensors in layers.items():
        if index >= num_layers and frozenset((rest, t.shape) for rest, t in tensors.items()) in alike:
            raise CheckpointError(
                f"config.json says {num_layers} layers, of the tensors {name} has {len(layers)}; one of them is "
                "wrong"
            )


def _towers(beside: Mapping[str, StoredTensor], stack: str, embedding: str, head: str) -> list[StoredTensor]:
    """Return the towers' tensors: all outside the text model's module, where something is named as a tower.

    In a model whose towers lie in that module as well, they and what joins them are known by their names.
    """
    if not any(_seems_tower(name, embedding) for name in beside):
        return []
    module = stack.rpartition(".")[0] + "."

    def is_tower(name: str) -> bool:
        apart = not name.startswith(module) or _seems_tower(name, embedding)
        return name not in (embedding, head) and (apart or _JOINS.search(_apart(name, embedding)) is not None)

    return [tensor for name, tensor in beside.items() if is_tower(name)]


def _seems_tower(name: str, embedding: str) -> bool:
    """Return whether ``name``, apart from what it shares with the token embedding's, is that of a tower."""
    return _TOWERS.search(_apart(name, embedding)) is not None


def _apart(name: str, embedding: str) -> str:
    return ".".join(name.split(".")[_shared_parts(name, embedding) :])


def _shared_parts(name: str, other: str) -> int:
    """Return how many parts two names have in common at the beginning."""
    pairs = zip(name.split("."), other.split("."), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _elements(tensor: StoredTensor) -> int:
    return prod(tensor.shape)


def _only_stack(
    by_stack: Mapping[str, Mapping[int, Mapping[str, StoredTensor]]],
    sizes: Mapping[str, int],
    num_layers: int,
    embedding: str,
    table: StoredTensor | None,
) -> str:
    """Return the text's stack: of the embedding's width, and no tower or encoder by name."""
    by_stack = {name: layers for name, layers in by_stack.items() if not _seems_tower(name, embedding)}
    wanted = set(range(num_layers))
    whole = [name for name, layers in by_stack.items() if wanted <= layers.keys()]
    most = {name: max(layers) + 1 for name, layers in by_stack.items() if max(layers) < MAX_LAYERS}
    if not whole:
        longest = max(most, key=lambda name: most[name], default="")
        missing = next((i for i in sorted(wanted) if longest and i not in by_stack[longest]), 0)
        has = (
            f"of the tensors {longest} has {len(by_stack[longest])}"
            if longest
            else "no tensor is named by a layer's index"
        )
        has += f" and none of index {missing}" if longest and len(by_stack[longest]) >= num_layers else ""
        raise CheckpointError(f"config.json says {num_layers} layers, {has}; one of them is wrong")
    fitting = [name for name in whole if most.get(name, 0) <= num_layers + 8]  # draft layers lie behind the last
    fitting = fitting or whole
    preferred: tuple[Callable[[str], bool], ...] = (
        lambda name: table is not None and any(table.shape[-1] in t.shape for t in by_stack[name][0].values()),
        lambda name: not _ENCODER.search(_apart(name, embedding)),
    )
    for is_preferred in preferred:
        fitting = [name for name in fitting if is_preferred(name)] or fitting
    fitting = sorted(fitting, key=lambda name: -sizes[name])
    if len(fitting) > 1 and sizes[fitting[1]] > _SMALL * sizes[fitting[0]]:
        raise UnsupportedModelError(
            f"the model has {len(fitting)} stacks of {num_layers} layers ({', '.join(fitting[:4])}); one is served"
        )
    return fitting[0]


_EMBEDDING = re.compile(
    r"(^|[._])(embed_tokens|wte|word_embeddings?|tok_embeddings|embed_in|embed|embeddings?)\.weight$"
)
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out|unembed|output|head)(\.linear)?\.weight$")


def _token_embedding(beside: Mapping[str, StoredTensor], vocab: int | None, width: int | None) -> str:
    """Return the name of the input embedding; empty: there is none.

    It is the largest table that fits the config and has no head's name; of those the ones with an embedding's
    name, and of these the ones without a tower's, where there are such.
    """
    tables = {name: t for name, t in beside.items() if len(t.shape) == 2}
    fitting = {name: t for name, t in tables.items() if (vocab or 0) <= t.shape[0] and width in (None, t.shape[1])}
    found = [name for name in fitting or tables if not _HEAD.search(name)]
    found = [name for name in found if _EMBEDDING.search(name)] or found
    found = [name for name in found if not _TOWERS.search(name)] or found
    return max(found, key=lambda name: tables[name].shape[0], default="")


def _head(beside: Mapping[str, StoredTensor], embedding: str) -> str:
    """Return the name of the output head; empty: it is the embedding."""
    width = beside[embedding].shape[-1]
    heads = (
        name
        for name, t in beside.items()
        if len(t.shape) == 2 and t.shape[-1] == width and _HEAD.search(name) and not _seems_tower(name, embedding)
    )
    return next(heads, "")
