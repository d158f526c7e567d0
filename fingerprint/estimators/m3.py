"""M3 of the paper: the fingerprint loaded under every configuration, each extrapolated in layers by itself.

Under one (t, p) a stage with n layers holds ``n * b + e``: two depths tell both, and nothing is solved between
configurations, so what TP divides or replicates need not be known. Its price is two loads per configuration; one
that was not loaded is refused.
"""

from __future__ import annotations

from fingerprint.config import DeploymentConfig, Pruning, even_split
from fingerprint.errors import NotMeasuredError
from fingerprint.estimators.m2 import M2, RankWeights

__all__ = ["M3"]


class M3(M2):
    """Memory of the configurations that were loaded. Activations, buffers and runtime are their own too.

    Args:
        profile, max_batched_tokens: as M2's.
    """

    name = "M3"

    def rank_weights(self, config: DeploymentConfig) -> RankWeights:
        own = self.degree(config.weights, config.tp, config.pp)
        if own is None or own.borrowed_from is not None or config.pruning is not Pruning.NONE:
            raise NotMeasuredError(f"M3 needs fingerprints loaded at {config}")
        first, last = own.line(0), own.line(config.pp - 1)
        layer = max(first.layer, last.layer)
        doubt = even_split(self.spec.num_layers, config.pp)[0] * abs(first.layer - last.layer)
        if config.pp == 1:  # one stage holds both ends: only their sum is seen, and only that counts
            return RankWeights(layer, first.end, 0.0, doubt)
        return RankWeights(layer, first.end, last.end, doubt)
