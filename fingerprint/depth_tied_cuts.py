"""Layer counts of the two fingerprints whose forward is repeated to the model's depth.

A repeat's time is a line over layers, o + n h, where h is one layer or the mean of a mix of kinds. Layers of
several kinds are two or more unknowns, yet two cuts tell the whole model where its mix lies on the line through
theirs: with counts a, b and N of each kind in the deeper cut, the shallower one and the model, where N - b is a
multiple of a - b. So the deeper cut is the shallower one and one repeating pattern more (GPT-OSS, Gemma 2: a
sliding and a full layer; Gemma 3: five and one), and the shallower one is

* one pattern, where the depth is a multiple of it: both have the model's own mix (12 and 6 layers of Gemma 3 12B's
  48, 4 and 2 of GPT-OSS's 24), as layers all alike have with 2 and 1;
* else what is left of the depth after whole patterns (Gemma 3 of 62 layers: 2 and 8; of 34: 4 and 10). Then no
  kind is modelled and no remainder assumed, the whole is on the line through both.

Where the first few layers are of their own (three dense ones before 58 mixtures of experts in DeepSeek V3), both
cuts have them all, and the deeper one four patterns more: with one more, an error of a cut's time would be
four times as large after the line over the depth.

All stages of a cut have one mix, since one stage's reading is taken for all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fingerprint.model_spec import ModelSpec

__all__ = ["MOST_FIRST_LAYERS", "kind_counts", "repeats_the_mix", "tied_depths", "why_no_cuts"]

MOST_FIRST_LAYERS = 8  # that are of their own, before a pattern
_PATTERNS_MORE = 4  # in the deeper of two cuts behind such layers


def tied_depths(spec: ModelSpec, pp: int) -> tuple[int, ...]:
    """Layers per stage of the fingerprints, each the model's first layers, the deepest first.

    Empty where the model has too few layers, or where its kinds follow each other in no pattern that it repeats,
    or in one that ``pp`` stages cannot share.
    """
    pattern = _pattern(spec.kind_indexes)
    if not spec.several_kinds:
        return tuple(k for k in (2, 1) if k * pp <= spec.num_layers)
    if 2 * pattern > spec.num_layers:
        return _behind_first_layers(spec, pp)
    left = spec.num_layers % (pattern * pp)
    for shallow in ([left // pp] if left and left % pp == 0 else []) + [pattern]:
        if _tells_the_whole(spec, shallow, shallow + pattern, pp):
            return (shallow + pattern, shallow)
    return ()


def _behind_first_layers(spec: ModelSpec, pp: int) -> tuple[int, ...]:
    """Return :func:`tied_depths` of a pattern that begins behind the first few layers; pp = 1 alone has those."""
    kinds, num_layers = spec.kind_indexes, spec.num_layers
    for first in range(1, min(MOST_FIRST_LAYERS, num_layers - 1) + 1 if pp == 1 else 0):
        pattern = _pattern(kinds[first:])
        times, left = divmod(num_layers - first, pattern)
        if times < 2:
            continue
        shallow = first + left + (0 if left else pattern)
        deep = shallow + min(_PATTERNS_MORE, (num_layers - shallow) // pattern) * pattern
        if deep > shallow and _tells_the_whole(spec, shallow, deep, pp):
            return (deep, shallow)
    return ()


def why_no_cuts(spec: ModelSpec, pp: int) -> str:
    """Return the reason why :func:`tied_depths` is empty."""
    several = f" of {len(spec.kinds)} kinds, in no pattern that repeats and that {pp} stages share"
    return f"the model has {spec.num_layers} layers" + (several if spec.several_kinds else "")


def kind_counts(spec: ModelSpec, layers: int | Sequence[int]) -> tuple[int, ...]:
    """Return how many of these layers, or of the first so many, are of each of the model's kinds; empty where all
    are alike.
    """
    chosen = range(layers) if isinstance(layers, int) else layers
    counts = Counter(spec.kind_indexes[layer] for layer in chosen)
    return tuple(counts[kind] for kind in range(len(spec.kinds))) if spec.several_kinds else ()


def repeats_the_mix(spec: ModelSpec, pp: int) -> bool:
    """Return whether both fingerprints have the model's mix of kinds, so only a repeat's own cost differs."""
    whole = kind_counts(spec, spec.num_layers)
    return all(_parallel(kind_counts(spec, k * pp), whole) for k in tied_depths(spec, pp))


def _pattern(kinds: tuple[int, ...]) -> int:
    """The fewest layers that, one after the other, are the whole model, the last time perhaps cut short."""
    return next(p for p in range(1, len(kinds) + 1) if kinds[p:] == kinds[:-p])


def _tells_the_whole(spec: ModelSpec, shallow: int, deep: int, pp: int) -> bool:
    if deep * pp > spec.num_layers:
        return False
    for k in (shallow, deep):
        stages = [Counter(spec.kind_indexes[stage * k : (stage + 1) * k]) for stage in range(pp)]
        if any(stage != stages[0] for stage in stages):
            return False
    b, a = kind_counts(spec, shallow * pp), kind_counts(spec, deep * pp)
    whole = kind_counts(spec, spec.num_layers)
    return _parallel([n - m for n, m in zip(whole, b, strict=True)], [n - m for n, m in zip(a, b, strict=True)])


def _parallel(one: tuple[int, ...] | list[int], other: tuple[int, ...] | list[int]) -> bool:
    return all(x * v == y * u for x, u in zip(one, other, strict=True) for y, v in zip(one, other, strict=True))
