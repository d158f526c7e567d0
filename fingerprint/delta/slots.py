"""Slots for deltas of one format, and narrower matrices: bytes that they take on a GPU, and what they do not hold.

Slots are made at the start, for all that a full fine-tune may change: linears and the output layer in the slots'
format, embeddings in ``EMBEDDING_FORMAT``, norms in 16 bits. Tensor parallelism cuts linears as those of the base,
in whole tiles alone; each rank has the whole vocabulary. Counts only, from
:class:`~fingerprint.model_spec.ModelSpec`; what is allocated is in ``daemon/engines/vllm/variants``.
"""

from __future__ import annotations

from dataclasses import dataclass

from fingerprint.capability import DELTA_FAMILIES
from fingerprint.config import DeploymentConfig, Pruning, SlotFormat, WeightFormat
from fingerprint.delta.formats import EMBEDDING_FORMAT, FORMATS, GROUP, TILE_ROWS
from fingerprint.delta.manifest import DeltaManifest, MatrixRecord
from fingerprint.model_spec import ModelSpec
from fingerprint.weight_bytes import kv_heads_per_gpu

__all__ = [
    "buffer_bytes",
    "delta_places",
    "format_refusal",
    "layer_place_bytes",
    "misfit",
    "other_place_bytes",
]

_JOINED_FAMILIES = frozenset({"phi3"})  # whose checkpoints join q, k and v, and gate and up
_OTHER_NORMS = frozenset({"gemma2", "gemma3_text"})  # families whose norms are not weight * x
_EMBEDDINGS = frozenset({"embed_tokens", "embed_in", "tok_embeddings", "wte"})  # modules
_HEADS = frozenset({"lm_head", "embed_out", "output"})  # modules
_BF16_BYTES = 2
_WORKSPACE_BYTES = 32 * 2**20  # of the kernels: sums of 4 programs of an SM, 17 MB with 132 SMs


@dataclass(frozen=True, slots=True)
class _Linear:
    """Part of a linear on one rank, which may join matrices with the same inputs."""

    names: tuple[str, ...]
    outputs: tuple[int, ...]  # of each matrix
    inputs: int

    @property
    def is_whole(self) -> bool:
        return all(one % TILE_ROWS == 0 for one in self.outputs) and self.inputs % GROUP == 0


def delta_places(config: DeploymentConfig) -> int:
    """Return the places for deltas on a GPU: the slots, and a spare one that is filled while steps go on."""
    return config.adapter_slots + 1


def layer_place_bytes(spec: ModelSpec, config: DeploymentConfig) -> int:
    """Return the bytes of one layer in a place, on one rank. Of norms it has their number of elements at least."""
    format_ = FORMATS[config.delta_format]
    linears = sum(format_.matrix_bytes((sum(one.outputs), one.inputs)) for one in _linears(spec, config.tp))
    return linears + _norm_elements(spec) * _BF16_BYTES


def other_place_bytes(spec: ModelSpec, config: DeploymentConfig) -> int:
    """Return the bytes of embeddings, output layer and last norm in a place, counted as on every stage."""
    shape = spec.vocab_size, spec.hidden_size
    output = 0 if spec.tied_embeddings else FORMATS[config.delta_format].matrix_bytes(shape)
    return EMBEDDING_FORMAT.matrix_bytes(shape) + output + spec.final_norm_params * _BF16_BYTES


def buffer_bytes(spec: ModelSpec, config: DeploymentConfig, num_layers: int) -> int:
    """Return the bytes that a GPU with ``num_layers`` layers keeps for all places together.

    The largest linear merged with a delta, sums of kernels, and norms of the base, of which tables have a copy.
    """
    largest = max(sum(one.outputs) * one.inputs for one in _linears(spec, config.tp))
    norms = num_layers * _norm_elements(spec) + spec.final_norm_params
    return (largest + norms) * _BF16_BYTES + _WORKSPACE_BYTES


def format_refusal(spec: ModelSpec, config: DeploymentConfig) -> str | None:
    """Return why slots of ``config`` hold no deltas of ``spec``; None where they do."""
    if spec.is_mixture:
        return "slots have no room for experts"
    if spec.tower_params:
        return "the plug-in takes no models with towers for images, video and sound"
    if spec.family not in DELTA_FAMILIES or spec.layer_shapes or not spec.gated_mlp:
        return f"the layers of {spec.architecture} were not looked into"
    if config.weights is not WeightFormat.BITS16 or config.pruning is not Pruning.NONE:
        return "a base in 16 bits alone was looked into, the one that deltas are made of"
    if config.draft_tokens:
        return "they are not served with n-gram drafts"
    if config.tp > 1 and spec.family in _JOINED_FAMILIES:
        return f"tp={config.tp} cuts one by one what the checkpoint joins (qkv_proj, gate_up_proj); take tp=1"
    for one in _linears(spec, config.tp):
        if not one.is_whole:
            outputs, names = (" + ".join(map(str, of)) for of in (one.outputs, one.names))
            return (
                f"with tp={config.tp} a GPU has {outputs} outputs and {one.inputs} inputs of {names}, "
                f"which are no whole tiles of {TILE_ROWS} and groups of {GROUP}"
            )
    return None


def misfit(manifest: DeltaManifest, format_: SlotFormat, family: str, *, is_tied: bool = False) -> str | None:
    """Return which tensor of a delta slots of ``format_`` do not hold, and why; None: they hold all.

    A matrix of fewer bits, whose levels are among the slots', is recoded when it is loaded: slots of the widest
    format serve a delta whose bits were chosen matrix by matrix.

    Args:
        family: of the base.
        is_tied: whether the base's output layer is its embedding; a stored one is compressed as that is, and no
            slots hold it.
    """
    for matrix in manifest.matrices:
        held = EMBEDDING_FORMAT if _is_embedding(matrix, is_tied) else FORMATS[format_]
        if not held.holds(FORMATS[matrix.format]):
            enough = _format_for(manifest, is_tied)
            return (
                f"its tensor {matrix.name} is in {matrix.format}, where slots have {held.name}: "
                + (f"deploy with --delta-format {enough}, which holds all of it, or " if enough else "")
                + f"compress it with --format {format_}, without --max-error"
            )
    for tensor in manifest.exact:
        if not tensor.name.endswith(".weight"):
            return f"its tensor {tensor.name} changes, of which the engine adds one for all rows of a step"
        if not _leaf(tensor.name).endswith("norm"):
            return f"slots hold no {tensor.name} that is kept as it is"
        if family in _OTHER_NORMS:
            return f"its tensor {tensor.name} changes, and slots hold no norms of {family}"
    return None


def _format_for(manifest: DeltaManifest, is_tied: bool) -> str | None:
    """Return the format of the fewest bits whose slots hold linears and output layer; None: there is none."""
    found = {matrix.format for matrix in manifest.matrices if not _is_embedding(matrix, is_tied)}
    by_bits = sorted(FORMATS.values(), key=lambda one: one.bits)
    return next((one.name for one in by_bits if all(one.holds(FORMATS[name]) for name in found)), None)


def _is_embedding(matrix: MatrixRecord, is_tied: bool) -> bool:
    return _leaf(matrix.name) in (_EMBEDDINGS | _HEADS if is_tied else _EMBEDDINGS)


def _leaf(tensor: str) -> str:
    """Return the last part of the name of a tensor's module."""
    return tensor.rpartition(".")[0].rpartition(".")[2]


def _linears(spec: ModelSpec, tp: int) -> tuple[_Linear, ...]:
    """Return one rank's linears of a layer."""
    hidden, mlp = spec.hidden_size, spec.intermediate_size // tp
    queries, keys = spec.num_heads * spec.head_dim // tp, int(kv_heads_per_gpu(spec, tp)) * spec.head_dim
    return (
        _Linear(("q_proj", "k_proj", "v_proj"), (queries, keys, keys), hidden),
        _Linear(("o_proj",), (hidden,), queries),
        _Linear(("gate_proj", "up_proj"), (mlp, mlp), hidden),
        _Linear(("down_proj",), (hidden,), mlp),
    )


def _norm_elements(spec: ModelSpec) -> int:
    """Return the parameters of a layer's norms; biases, which slots have none of, are counted as well."""
    return spec.layer_params - spec.layer_linear_params
