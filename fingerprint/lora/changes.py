"""Changes that an adapter makes to tensors of its base.

A change has at most two steps: a tensor that was saved whole takes the place of the base's, and one update is
computed from what is there then.
Source of the updates: peft 0.21.2, ``tuners/lora/layer.py``, ``tuners/lora/dora.py``, ``tuners/ia3/layer.py``,
``tuners/trainable_tokens/layer.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fingerprint.checkpoint import TensorEntry
from fingerprint.errors import CheckpointError
from fingerprint.float_bytes import FLOAT_DTYPES
from fingerprint.lora.adapter_config import CONFIG_FILE, AdapterConfig
from fingerprint.lora.tensor_kinds import PREFIX, SortedTensors

__all__ = ["BiasUpdate", "Change", "LoraModule", "LowRank", "Scaling", "TokenRows", "Update", "changes_of"]

_MAX_SHOWN = 200  # characters of a name in a message


@dataclass(frozen=True, slots=True)
class LoraModule:
    """Update of one linear of the base: W + scale * B @ A."""

    name: str  # of the module within the base, e.g. "model.layers.0.self_attn.q_proj"
    rank: int
    scale: float
    in_features: int  # columns of W and of A
    out_features: int  # rows of W and of B

    @property
    def num_params(self) -> int:
        return self.rank * (self.in_features + self.out_features)

    @property
    def weight(self) -> str:
        """Name of the base's tensor that is updated."""
        return f"{self.name}.weight"

    @property
    def factors(self) -> tuple[str, str]:
        """Names of the tensors A and B in the adapter's file."""
        return f"{PREFIX}{self.name}.lora_A.weight", f"{PREFIX}{self.name}.lora_B.weight"


@dataclass(frozen=True, kw_only=True, slots=True)
class LowRank:
    """W + scale * B @ A; with a magnitude m (DoRA, arXiv 2402.09353) m * (W + scale * B @ A) / its norm.

    Linears have A [rank, inputs] and B [outputs, rank], and norms over the inputs, one for each row. Embeddings
    have A [rank, tokens] and B [width, rank], of which the transpose is added, and norms over the tokens, one for
    each column.
    """

    down: str  # tensor A of the adapter
    up: str  # B
    rank: int
    scale: float
    magnitude: str | None
    is_embedding: bool


@dataclass(frozen=True, slots=True)
class Scaling:
    """Rows or columns of W times a vector (IA3, arXiv 2205.05638)."""

    vector: str
    of_inputs: bool  # columns, else rows; a bias has rows


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Rows that take the place of W's."""

    rows: str  # tensor [len(indices), width]
    indices: tuple[int, ...]
    is_for_both: bool  # the same rows are named for output layer and embeddings, so that the base must share these


@dataclass(frozen=True, slots=True)
class BiasUpdate:
    """Bias + scale * the bias of B."""

    bias: str
    scale: float


Update = LowRank | Scaling | TokenRows | BiasUpdate


@dataclass(frozen=True, slots=True)
class Change:
    """Change of one tensor of the base."""

    target: str  # name of the base's tensor
    shape: tuple[int | None, ...]  # that it must have; None: any
    saved: str | None = None  # tensor of the adapter that takes its place, before the update
    update: Update | None = None


def changes_of(
    found: SortedTensors,
    modules: Sequence[LoraModule],
    tensors: Mapping[str, TensorEntry],
    config: AdapterConfig,
    file: Path,
) -> tuple[Change, ...]:
    """Return the changes of an adapter that is applied, in the order of the base's tensors.

    Args:
        found: ``tensors`` by what they are.
        modules: updates of linears, which were checked.
        file: that the tensors are in, for messages.

    Raises:
        CheckpointError: a tensor has another shape or type than the configuration or another tensor asks for.
        UnsupportedAdapterError: expressions in a pattern that are not matched.
    """
    make = _Maker(found, tensors, config, file)
    updates = {
        each.target: each
        for each in (*make.linears(modules), *make.embeddings(), *make.scalings(), *make.token_rows())
    }
    saved = make.saved()
    whole = [Change(target, tensors[name].shape, name) for target, name in saved.items() if target not in updates]
    made = [make.with_saved(each, saved.get(each.target)) for each in updates.values()]
    return tuple(sorted((*whole, *made), key=lambda each: each.target))


class _Maker:
    """Changes of one adapter, each checked against the tensors that it is made of."""

    def __init__(
        self, found: SortedTensors, tensors: Mapping[str, TensorEntry], config: AdapterConfig, file: Path
    ) -> None:
        self._found, self._tensors, self._config, self._file = found, tensors, config, file

    def linears(self, modules: Sequence[LoraModule]) -> Iterator[Change]:
        """Yield the updates of linears and of their biases."""
        for module in modules:
            down, up = module.factors
            magnitude = self._vector("magnitude", module.name, module.out_features)
            update = LowRank(
                down=down, up=up, rank=module.rank, scale=module.scale, magnitude=magnitude, is_embedding=False
            )
            yield Change(module.weight, (module.out_features, module.in_features), update=update)
            bias = self._vector("lora_B.bias", module.name, module.out_features)
            if bias is not None:
                target = f"{module.name}.bias"
                yield Change(target, (module.out_features,), update=BiasUpdate(bias, module.scale))

    def embeddings(self) -> Iterator[Change]:
        """Yield the low-rank updates of embeddings."""
        downs, ups = self._found.of("embedding_A"), self._found.of("embedding_B")
        names = sorted(downs)
        ranks = self._config.rank_pattern.of_modules(names, self._config.rank)
        alphas = self._config.alpha_pattern.of_modules(names, self._config.alpha)
        for name, number, alpha in zip(names, ranks, alphas, strict=True):
            a, b, rank = self._shape(downs[name]), self._shape(ups[name]), int(number)
            if len(a) != 2 or len(b) != 2 or a[0] != b[1] or 0 in a + b:
                raise self._error(
                    f"has lora_embedding_A {list(a)} and _B {list(b)} for {_shown(name)}, not [rank, tokens] and "
                    "[width, rank]"
                )
            if a[0] != rank or not self._config.targets.contain(name):
                raise self._error(f"updates {_shown(name)} with rank {a[0]}, which {CONFIG_FILE} does not say")
            update = LowRank(
                down=downs[name],
                up=ups[name],
                rank=rank,
                scale=self._config.scale(rank, alpha),
                magnitude=self._vector("magnitude", name, b[0]),
                is_embedding=True,
            )
            yield Change(f"{name}.weight", (a[1], b[0]), update=update)

    def scalings(self) -> Iterator[Change]:
        """Yield the scalings of IA3: of inputs for a vector [1, inputs], of outputs for one [outputs, 1]."""
        for name, tensor in self._found.of("ia3").items():
            shape, listed = self._shape(tensor), self._config.feedforward
            if len(shape) != 2 or 1 not in shape or 0 in shape:
                raise self._error(f"has {_shown(tensor)} of {list(shape)}, not [outputs, 1] or [1, inputs]")
            of_inputs = shape[0] == 1
            is_said = listed is None or of_inputs == any(name.endswith(end) for end in listed)
            if not (is_said and self._config.targets.contain(name)):
                side = "inputs" if of_inputs else "outputs"
                raise self._error(f"scales {side} of {_shown(name)}, which {CONFIG_FILE} does not say")
            needed = (None, shape[1]) if of_inputs else (shape[0], None)
            yield Change(f"{name}.weight", needed, update=Scaling(tensor, of_inputs))

    def token_rows(self) -> Iterator[Change]:
        """Yield the embeddings of tokens that were trained."""
        tensors, named = self._found.of("tokens"), self._config.token_rows
        for name, tensor in tensors.items():
            shape = self._shape(tensor)
            own = [rows for end, rows in named if (len(tensors) == 1 if end is None else name.endswith(end))]
            if len(own) != 1 or len(shape) != 2 or shape[0] != len(own[0]):
                said = f"{len(own[0])} tokens" if len(own) == 1 else f"{len(own)} lists of tokens"
                raise self._error(f"has rows {list(shape)} for {_shown(name)}, for which {CONFIG_FILE} has {said}")
            without = [
                (end, rows) for end, rows in named if end and not any(each.endswith(end) for each in tensors)
            ]
            odd = next((end for end, rows in without if rows != own[0]), None)
            if odd is not None:
                raise self._error(f"has no rows for {_shown(odd)}, of which {CONFIG_FILE} names tokens")
            yield Change(f"{name}.weight", (None, shape[1]), update=TokenRows(tensor, own[0], bool(without)))

    def saved(self) -> dict[str, str]:
        """Return the tensors that were saved whole, by the base's."""
        twice = sorted(self._found.saved.keys() & self._found.beneath.keys())
        if twice:
            raise self._error(f"has {_shown(twice[0])} twice, once as base_layer")
        saved = {**self._found.saved, **self._found.beneath}
        for tensor in saved.values():
            self._shape(tensor)
        return saved

    def with_saved(self, change: Change, saved: str | None) -> Change:
        """Return the update ``change`` with the tensor that takes the base's place before it."""
        if saved is None:
            return change
        shape = self._shape(saved)
        sizes = zip(change.shape, shape, strict=False)
        if len(shape) != len(change.shape) or any(needed not in (None, size) for needed, size in sizes):
            raise self._error(f"has {_shown(saved)} of {list(shape)}, which the update next to it does not fit")
        return replace(change, shape=shape, saved=saved)

    def _vector(self, kind: str, module: str, length: int) -> str | None:
        """Return the vector of a kind that a module has; None: none."""
        tensor = self._found.of(kind).get(module)
        if tensor is not None and self._shape(tensor) != (length,):
            raise self._error(f"has {_shown(tensor)} of {list(self._shape(tensor))}; it must be [{length}]")
        return tensor

    def _shape(self, tensor: str) -> tuple[int, ...]:
        entry = self._tensors[tensor]
        if entry.dtype not in FLOAT_DTYPES:
            raise CheckpointError(
                f"{_shown(tensor)} of {self._file} is of {entry.dtype}; known are {', '.join(FLOAT_DTYPES)}: "
                "convert it"
            )
        return entry.shape

    def _error(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._file} {what}; the two files are not of one adapter, fetch both again")


def _shown(name: str) -> str:
    return repr(name[:_MAX_SHOWN])
