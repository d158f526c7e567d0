"""M2 of the paper: the memory of a model from fingerprints of one and two layers at (1,1), (2,1) and (1,2).

``M(t, p) = W + t * A + t * (p - 1) * A_pp``: W is divided over the TP group, A is held whole by every TP rank,
every further stage adds A_pp on every TP rank. The runtime (context, libraries) is taken off before solving
and put back per GPU; KV is never extrapolated but counted from the spec, and checked against the engine's bytes.

The engine itemises what it holds, so the same equations are solved item by item (:class:`M2`), which is what lets
layers be split unevenly; :meth:`M2.terms` gives the paper's three sums. How tp = 4 follows from 1 and 2: an item
of x1 bytes on the rank at tp = 1 and x2 at tp = 2 has ``split = 2 * (x1 - x2)`` and ``whole = x1 - split``; at t a
rank holds ``split / t + whole``. Norms, a replicated embedding and replicated activations are thereby
``whole`` without anyone saying so. One thing the two points cannot show: above ``num_kv_heads`` ranks the K and V
projections are replicated; that is added from the spec.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from fingerprint.config import DeploymentConfig, KvFormat, Pruning, WeightFormat, Workload, even_split
from fingerprint.errors import NotMeasuredError
from fingerprint.estimates import MemoryEstimate, Source
from fingerprint.estimators.memory_points import BytesOf, Degree, Peak, Steps, along_tokens, in_format
from fingerprint.measurements import MemoryPoint, Profile
from fingerprint.model_spec import ModelSpec
from fingerprint.weight_bytes import (
    WEIGHT_16BIT_BYTES,
    kv_token_bytes_per_gpu,
    kv_tokens_per_layer,
    layer_state_bytes_per_gpu,
    layer_weight_bytes,
)

__all__ = ["M2", "KvCheck", "MemoryTerms", "RankWeights"]

KV_TOLERANCE = 0.02  # above it the engine's own bytes per token replace the spec's, and a warning says so
# Never narrower than this: counted bytes leave out allocator rounding (design, section 9: weights within 0.5%).
ACCOUNTING_ERROR = 0.005


@dataclass(frozen=True, slots=True)
class MemoryTerms:
    """The paper's W, A and A_pp of the full model, in bytes; without runtime and KV cache."""

    weights_bytes: float
    activation_bytes: float
    pp_bytes: float

    def total_bytes(self, tp: int, pp: int) -> float:
        """Over all tp * pp GPUs."""
        return self.weights_bytes + tp * self.activation_bytes + tp * (pp - 1) * self.pp_bytes


@dataclass(frozen=True, slots=True)
class KvCheck:
    """Comparison of the engine's KV cache with the spec's, on the fullest rank."""

    kv: KvFormat
    tp: int
    pp: int
    measured_bytes: int
    expected_bytes: float

    @property
    def ratio(self) -> float:
        return self.measured_bytes / self.expected_bytes

    @property
    def disagrees(self) -> bool:
        return abs(self.ratio - 1) > KV_TOLERANCE


@dataclass(frozen=True, slots=True)
class _Part:
    """Bytes at tp = 1: what TP divides, and what every rank holds whole."""

    split: float
    whole: float

    def at(self, tp: int) -> float:
        return self.split / tp + self.whole


@dataclass(frozen=True, slots=True)
class RankWeights:
    """Weight bytes of one GPU: a layer, the two ends, and how far a stage's sum may be off."""

    layer: float
    first: float
    last: float
    error: float


_Degrees = dict[tuple[WeightFormat, int, int], Degree]


class M2:
    """Memory of the full model under every configuration that the equations reach.

    Args:
        profile: its memory points; (tp, pp) = (1, 1) is needed, (2, 1) for any tp above 1, (1, 2) for any pp.
        max_batched_tokens: largest prefill step the engine will be started with; longer bursts are cut into such.
    """

    name = "M2"

    def __init__(self, profile: Profile, *, max_batched_tokens: int = 8192) -> None:
        self.spec = profile.spec
        self._max_batched_tokens = max_batched_tokens
        self._degrees: _Degrees = {}
        groups: dict[tuple[WeightFormat, int, int], list[MemoryPoint]] = {}
        for point in profile.memory:
            if point.ranks and not point.shard:
                groups.setdefault((point.weights, point.tp, point.pp), []).append(point)
        for (weights, tp, pp), points in sorted(groups.items()):
            self._degrees[weights, tp, pp] = Degree(weights, tp, pp, points)
        self._degrees |= _borrowed(self._degrees)
        self.kv_checks = _kv_checks(profile.spec, (point for points in groups.values() for point in points))
        self._models = {w: self._weights_model(w) for w in sorted({key[0] for key in self._degrees})}

    @property
    def warnings(self) -> tuple[str, ...]:
        """Degrees and formats where the engine's KV cache is not what the spec says."""
        return tuple(
            f"{check.kv} KV at tp={check.tp} pp={check.pp}: the engine holds {check.measured_bytes:,} bytes where "
            f"the spec says {check.expected_bytes:,.0f} ({check.ratio - 1:+.1%}); the engine's count is used"
            for check in self.kv_checks
            if check.disagrees
        )

    def terms(self, weights: WeightFormat) -> MemoryTerms:
        """The paper's three unknowns, from the totals at the largest measured step.

        Raises:
            NotMeasuredError: a tp or pp above 1 is missing.
        """
        num_layers = self.spec.num_layers
        base, split, staged = self.degree(weights, 1, 1), self._wider(weights), self._staged(weights)
        if base is None or split is None or staged is None:
            raise NotMeasuredError(f"W, A and A_pp of {weights} need fingerprints at (1,1), (2,1) and (1,2)")
        alone = base.total(num_layers)
        activations = (split.total(num_layers) - alone) / (split.tp - 1)
        stage = (staged.total(num_layers) - alone) / (staged.pp - 1)
        return MemoryTerms(alone - activations, activations, stage)

    def memory(self, config: DeploymentConfig, workload: Workload) -> MemoryEstimate:
        """Itemised memory of ``config``; the activations are those of the largest prefill step of ``workload``.

        Raises:
            NotMeasuredError: this weight format, or any tp (pp) above 1 where ``config`` has one, was not run.
        """
        weights = self.rank_weights(config)
        tokens = min(workload.most_prompt_tokens, self._max_batched_tokens)
        activation, buffer = self._activation(config, tokens), self._pp_buffer(config, tokens)
        runtime = self._runtime(config)
        kv, layers = self.layer_kv_bytes(config, workload), even_split(self.spec.num_layers, config.pp)[0]
        error = weights.error + sum(p.error for p in (activation, buffer, runtime))
        rest = activation.value + buffer.value + runtime.value
        total = layers * (weights.layer + kv) + max(weights.first, weights.last) + rest
        return MemoryEstimate(
            tp=config.tp,
            pp=config.pp,
            num_layers=self.spec.num_layers,
            layer_weight_bytes=_whole(weights.layer),
            layer_kv_bytes=_whole(kv),
            first_stage_bytes=_whole(weights.first),
            last_stage_bytes=_whole(weights.last),
            activation_bytes=_whole(activation.value),
            pp_buffer_bytes=_whole(buffer.value),
            runtime_bytes=_whole(runtime.value),
            relative_error=ACCOUNTING_ERROR + error / max(total, 1.0),
            source=Source.SCALED if self._is_borrowed(config) else Source.EXTRAPOLATED,
        )

    @property
    def measured(self) -> tuple[tuple[WeightFormat, int, int], ...]:
        """(weights, tp, pp) of every point."""
        return tuple(self._degrees)

    def rank_weights(self, config: DeploymentConfig) -> RankWeights:
        """Return the weights per rank of ``config``, from the three degrees.

        Raises:
            NotMeasuredError: as :meth:`memory`.
        """
        model = self._models.get(config.weights)
        base = self.degree(config.weights, 1, 1)
        if model is None or base is None or config.pruning is not Pruning.NONE:
            raise NotMeasuredError(f"no fingerprint was loaded with weights={config.weights}, {config.pruning}")
        if config.tp > 1 and self._wider(config.weights) is None:
            raise NotMeasuredError(f"tp={config.tp}: no fingerprint was loaded at tp above 1")
        if config.pp > 1 and self._staged(config.weights) is None:
            raise NotMeasuredError(f"pp={config.pp}: no fingerprint was loaded at pp above 1")
        first, last = model.ends(config.tp, config.pp)
        layers = even_split(self.spec.num_layers, config.pp)[0]
        return RankWeights(model.layer_at(config.tp), first, last, model.error(config.tp, config.pp, layers))

    def degree(self, weights: WeightFormat, tp: int, pp: int) -> Degree | None:
        """Return the degree loaded there, or borrowed from another format that was."""
        return self._degrees.get((weights, tp, pp))

    def _wider(self, weights: WeightFormat) -> Degree | None:
        """The smallest tp above 1 at pp = 1."""
        found = [d for (w, tp, pp), d in self._degrees.items() if w == weights and tp > 1 and pp == 1]
        return min(found, key=lambda d: d.tp, default=None)

    def _staged(self, weights: WeightFormat) -> Degree | None:
        """The smallest pp above 1 at tp = 1."""
        found = [d for (w, tp, pp), d in self._degrees.items() if w == weights and tp == 1 and pp > 1]
        return min(found, key=lambda d: d.pp, default=None)

    def _is_borrowed(self, config: DeploymentConfig) -> bool:
        """Return whether a degree above tp = pp = 1 that ``config`` rests on was measured in another format."""
        rests_on = [
            self._wider(config.weights) if config.tp > 1 else None,
            self._staged(config.weights) if config.pp > 1 else None,
        ]
        return any(degree is not None and degree.borrowed_from is not None for degree in rests_on)

    def _weights_model(self, weights: WeightFormat) -> _WeightsModel | None:
        base = self.degree(weights, 1, 1)
        return (
            None if base is None else _WeightsModel(self.spec, base, self._wider(weights), self._staged(weights))
        )

    def _peak(self, degree: Degree, bytes_of: BytesOf, tokens: int, stage: int | None = None) -> Peak:
        """Largest over the ranks (of one stage) for a step of ``tokens``, at the deepest fingerprint.

        The growth from the depth before counts as error. It is not extrapolated in layers as the paper does with
        the whole: inference frees a layer's activations, so the peak stops growing once two layers overlap
        (measured on the embedded engine: 6.57 MB with one layer, 7.09 MB with two and with eight; linear growth
        would have said 10.24 MB).
        """
        growth = self._growth(degree, bytes_of, stage)
        by_depth = sorted(degree.steps(bytes_of, stage).items())
        at_depth = [along_tokens(steps, tokens, growth) for _, steps in by_depth]
        deepest = at_depth[-1]
        doubt = abs(deepest.value - at_depth[-2].value) if len(at_depth) > 1 else 0.0
        if degree.borrowed_from is not None:  # how far the other format's own bytes are from this
            doubt += abs(deepest.value - self._peak(degree.borrowed_from, bytes_of, tokens, stage).value) / 2
        return Peak(deepest.value, deepest.error + doubt)

    def _growth(self, degree: Degree, bytes_of: BytesOf, stage: int | None) -> Steps | None:
        """Two steps or more of what is most like ``degree``: another depth, the format elsewhere, another format.

        A profile that was cut short has fingerprints that ran one step only. The part of a peak that does not grow
        (int8 weights made 16-bit for one product) may be most of it, so the tokens alone do not tell.
        """

        def unlike(other: Degree) -> tuple[float, ...]:
            apart = abs(math.log2(other.tp / degree.tp)) + abs(math.log2(other.pp / degree.pp))
            return (other is not degree, other.format != degree.format, apart, other.tp)

        for other in sorted(self._degrees.values(), key=unlike):
            for _, steps in sorted(other.steps(bytes_of, stage).items(), reverse=True):
                if len(steps) > 1 and max(steps.values()) > 0:
                    return steps
        return None

    def _activation(self, config: DeploymentConfig, tokens: int) -> Peak:
        def peak(degree: Degree) -> Peak:
            return self._peak(degree, lambda rank: rank.activation_peak_bytes, tokens)

        own = self.degree(config.weights, config.tp, config.pp)
        if own is not None:
            return peak(own)
        base, wider = peak(self._degrees[config.weights, 1, 1]), self._wider(config.weights)
        value, error, staged = base.value, base.error, self._staged(config.weights)
        if config.tp > 1 and wider is not None:
            at_wider = peak(wider)
            value, error = _separate(value, at_wider.value, wider.tp).at(config.tp), max(error, at_wider.error)
        if config.pp > 1 and staged is not None and base.value > 0:
            scale = peak(staged).value / base.value  # a stage's peak over that of the whole
            value, error = value * scale, error * scale
        return Peak(value, error)

    def _pp_buffer(self, config: DeploymentConfig, tokens: int) -> Peak:
        """Return the buffer between stages, whole on every TP rank.

        A middle stage holds what the first and what the last one holds.
        """
        measured = self.degree(config.weights, config.tp, config.pp) or self._staged(config.weights)
        if config.pp == 1 or measured is None:
            return Peak(0.0, 0.0)

        def buffer(stage: int | None) -> Peak:
            return self._peak(measured, lambda rank: rank.pp_buffer_bytes, tokens, stage)

        ends = [buffer(stage) for stage in (0, measured.pp - 1)]
        if config.pp > measured.pp == 2:
            return Peak(sum(end.value for end in ends), sum(end.error for end in ends))
        return buffer(None)

    def _runtime(self, config: DeploymentConfig) -> Peak:
        """The largest of this (tp, pp), else of any with as many as one, or more, GPUs."""
        own = self.degree(config.weights, config.tp, config.pp)
        alike = [
            d
            for (w, tp, pp), d in self._degrees.items()
            if w == config.weights and (tp * pp > 1) == (config.num_gpus > 1)
        ]
        seen = [bytes_ for degree in ([own] if own is not None else alike) for bytes_ in degree.runtime_bytes]
        error = (max(seen) - min(seen)) / 2
        if own is not None and own.borrowed_from is not None:
            error += abs(max(seen) - max(own.borrowed_from.runtime_bytes)) / 2
        return Peak(float(max(seen)), error)

    def layer_kv_bytes(self, config: DeploymentConfig, workload: Workload) -> float:
        """Return one layer's KV bytes on one GPU for the whole batch at its end; needs no measured weights."""
        spec = self.spec
        disagreeing = [check.ratio for check in self.kv_checks if check.kv == config.kv and check.disagrees]
        per_token = kv_token_bytes_per_gpu(spec, config)
        tokens = kv_tokens_per_layer(spec, config, workload)
        state_bytes = layer_state_bytes_per_gpu(spec, config, workload.batch)
        return per_token * max(disagreeing, default=1.0) * tokens + state_bytes


class _WeightsModel:
    """Weights of one format: layers, first and last stage, at any tp and pp that was reached."""

    def __init__(self, spec: ModelSpec, base: Degree, wider: Degree | None, staged: Degree | None) -> None:
        self._spec = spec
        alone = base.line(0, _layer_alone(spec, base))
        self._layer, self._ends = _Part(0.0, alone.layer), _Part(0.0, alone.end)
        self._split_at = 1
        if wider is not None:
            rank = wider.line(0, None if len(wider.weights(0)) > 1 else alone.layer / wider.tp)
            self._layer = _separate(alone.layer, rank.layer, wider.tp)
            self._ends = _separate(alone.end, rank.end, wider.tp)
            self._split_at = wider.tp
        self._first, self._last, self._slope_error, self._end_error = None, None, 0.0, 0.0
        if staged is not None:
            first, last = staged.line(0, alone.layer), staged.line(staged.pp - 1, alone.layer)
            self._slope_error = max(abs(first.layer - alone.layer), abs(last.layer - alone.layer))
            self._first, self._last, self._end_error = self._assign(first.end, last.end)

    def _assign(self, first: float, last: float) -> tuple[_Part, _Part, float]:
        """Decide which of embedding and head every TP rank holds whole, from what the ends together hold whole.

        (2, 2) is never run: the choice is the one that explains the whole bytes seen at (2, 1) best. An embedding
        and a head of one size cannot be told apart; the embedding is taken, and the doubt counted as error.
        """
        spec = self._spec
        norm = min(last, spec.final_norm_params * first / max(spec.embedding_params, 1))
        head = last - norm
        options = [(False, False), (True, True)] if spec.tied_embeddings else [
            (True, False), (False, True), (False, False), (True, True)
        ]  # fmt: skip
        tied = spec.tied_embeddings

        def unexplained(option: tuple[bool, bool]) -> float:
            whole = norm + first * option[0] + (0.0 if tied else head * option[1])
            return abs(self._ends.whole - whole)

        best = min(options, key=unexplained)
        error = unexplained(best)
        if not tied and best[0] != best[1] and abs(first - head) <= 0.01 * first:
            error += head / 2
        first_part = _Part(0.0, first) if best[0] else _Part(first, 0.0)
        return first_part, (_Part(0.0, last) if best[1] else _Part(head, norm)), error

    def layer_at(self, tp: int) -> float:
        """Return one layer's bytes on one rank, K and V projections replicated above as many ranks as KV heads."""
        spec = self._spec
        extra = 0.0
        for kind in spec.kinds if spec.layer_linear_params else ():
            heads = spec.kv_heads_of(kind)
            if tp > heads >= self._split_at:
                made = kind.count * kind.kv_share * spec.kv_elements / spec.num_layers
                share = spec.hidden_size * made / spec.layer_linear_params
                extra += share * self._layer.split * (1 / heads - 1 / tp)
        return self._layer.at(tp) + extra

    def ends(self, tp: int, pp: int) -> tuple[float, float]:
        """Return bytes of the first and last stage outside layers; a tied head is a copy only when pp > 1."""
        spec, together = self._spec, self._ends.at(tp)
        if pp == 1 or self._first is None or self._last is None:
            ends = spec.embedding_params + spec.head_params + spec.final_norm_params
            first = min(self._first.at(tp), together) if self._first else together * spec.embedding_params / ends
            return first, together - first
        return self._first.at(tp), self._last.at(tp)

    def error(self, tp: int, pp: int, layers: int) -> float:
        ends = self._end_error if tp > 1 and pp > 1 else 0.0
        return layers * self._slope_error / tp + ends


def _separate(alone: float, rank: float, tp: int) -> _Part:
    """From the bytes at tp = 1 and of a rank at ``tp``; noise may not make either part negative."""
    split = min(max((alone - rank) / (1 - 1 / tp), 0.0), alone)
    return _Part(split, alone - split)


def _layer_alone(spec: ModelSpec, base: Degree) -> float | None:
    """Return one layer's weights if only the whole model was loaded: its share by the tensors' sizes."""
    held = base.weights(0)
    if len(held) > 1 or spec.num_layers not in held:
        return None
    layer = layer_weight_bytes(spec, DeploymentConfig(weights=base.format))
    ends = spec.embedding_params + spec.head_params + spec.final_norm_params
    return held[spec.num_layers] * layer / (spec.num_layers * layer + ends * WEIGHT_16BIT_BYTES)


def _borrowed(degrees: _Degrees) -> _Degrees:
    """Every degree that one format was loaded at, for the formats that were not; the first format that has it."""
    found: _Degrees = {}
    for (weights, tp, pp), base in degrees.items():
        if (tp, pp) != (1, 1) or len(base.weights(0)) < 2:
            continue
        for (other_weights, *where), other in degrees.items():
            other_base = degrees.get((other_weights, 1, 1))
            key = (weights, where[0], where[1])
            if other_base is not None and len(other_base.weights(0)) > 1 and key not in degrees | found:
                found[key] = in_format(base, other_base, other)
    return found


def _kv_checks(spec: ModelSpec, points: Iterable[MemoryPoint]) -> tuple[KvCheck, ...]:
    checks = {}
    for point in points:
        # Which kinds of layers a stage of a fingerprint holds is nowhere recorded.
        if point.kv_tokens and point.ranks and (point.pp == 1 or not point.layer_kinds):
            heads_split = min(point.tp, spec.num_kv_heads)
            per_token = spec.kv_bytes_per_token_per_layer(point.kv) / heads_split
            expected = per_token * _tokens_over_layers(spec, point) / point.pp
            held = max(rank.kv_bytes for rank in point.ranks)
            checks[point.kv, point.tp, point.pp] = KvCheck(point.kv, point.tp, point.pp, held, expected)
    return tuple(checks[key] for key in sorted(checks))


def _tokens_over_layers(spec: ModelSpec, point: MemoryPoint) -> float:
    """Tokens that the cache has room for, summed over the layers of a fingerprint."""
    kinds = zip(spec.kinds, point.layer_kinds or (point.num_layers,), strict=True)
    if not point.kv_sequences:
        return point.num_layers * point.kv_tokens
    room = point.kv_tokens / point.kv_sequences
    return sum(layers * point.kv_sequences * kind.attended(room) for kind, layers in kinds)


def _whole(value: float) -> int:
    return math.ceil(value - 1e-6)
