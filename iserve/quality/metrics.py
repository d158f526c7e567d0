"""Metrics of next-token predictions, and bootstrap intervals over texts. Pure: numbers in, numbers out.

An endpoint reports the probabilities of the likeliest tokens only, so that a KL divergence is not known exactly.
What is computed is a lower bound of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from iserve.quality.document import Interval

__all__ = ["CONFIDENCE", "agrees", "kl_lower_bound", "mean_interval", "shared_mass"]

CONFIDENCE = 0.95
RESAMPLES = 2000
_ROUNDING = 1e-6  # of a probability that is one less a sum of float32 numbers


def kl_lower_bound(reference: Mapping[str, float], model: Mapping[str, float]) -> float:
    """Return a lower bound of KL(reference || model) in nats, given the likeliest tokens of each.

    Tokens that both report are one outcome each, all the rest together is one more: of a token that one side does
    not report only that side's sum is known. Merging outcomes never raises a KL divergence (data-processing
    inequality), so the divergence of the whole vocabularies is at least this. It is exact where both report all
    tokens with a probability.
    """
    shared = reference.keys() & model.keys()
    p = np.exp([reference[token] for token in shared])
    q = np.exp([model[token] for token in shared])
    p_rest, q_rest = max(_ROUNDING, 1 - p.sum()), max(_ROUNDING, 1 - q.sum())
    known = math.fsum(
        probability * (reference[token] - model[token])
        for token, probability in zip(shared, p, strict=True)
        if probability > 0
    )
    return max(0.0, float(known + p_rest * math.log(p_rest / q_rest)))


def shared_mass(reference: Mapping[str, float], model: Mapping[str, float]) -> float:
    """Return the probability, by the reference, of the tokens that both report: near 1 the KL bound is tight."""
    return min(1.0, math.fsum(math.exp(reference[token]) for token in reference.keys() & model.keys()))


def agrees(reference: Mapping[str, float], model: Mapping[str, float]) -> bool:
    """Return whether both find the same token likeliest; the first by name of those that are equally likely."""
    return _likeliest(reference) == _likeliest(model)


def _likeliest(top: Mapping[str, float]) -> str:
    return min(top, key=lambda token: (-top[token], token))


def mean_interval(sums: Sequence[float], counts: Sequence[float], *, seed: int) -> Interval:
    """Return the mean of what each text has a sum and a count of, and its bootstrap interval over texts.

    Texts are drawn anew with replacement, as many as there are; a drawn text brings its sum and its count. The
    interval holds the mean.
    """
    total, num = np.asarray(sums, float), np.asarray(counts, float)
    value = float(total.sum() / num.sum())
    if len(total) < 2:
        return Interval(value=value, low=None, high=None)
    weights = np.random.default_rng(seed).multinomial(len(total), np.full(len(total), 1 / len(total)), RESAMPLES)
    means = (weights @ total) / (weights @ num)
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(value=value, low=min(value, float(low)), high=max(value, float(high)))
