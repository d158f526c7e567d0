"""L1 of the paper: the latency of a model from the whole model itself, run at pp = 1 with two output lengths.

``T(n_out) = TTFT + (n_out - 1) * TPOT`` solved on the whole model, so nothing is extrapolated in layers; its price
is the whole model's memory and time. Batches between those that were run come from L2's polynomials with the
number of layers fixed, and so do lengths where three were run. Other pp, at batch 1, take the time of pp = 1 and
no more: the paper measured the hand-overs between stages as under 0.05% of a 70B model. That was on A6000s in
2024; a smaller model on a faster GPU spends a larger share on them, which this strategy does not see.
"""

from __future__ import annotations

from dataclasses import replace

from fingerprint.config import DeploymentConfig, Pruning, Workload
from fingerprint.errors import NotMeasuredError
from fingerprint.estimates import Source
from fingerprint.estimators.l2 import L2, Latency
from fingerprint.measurements import Profile, key_of

__all__ = ["L1"]


class L1(L2):
    """Fits of the whole model at pp = 1.

    Args:
        profile: fingerprints in it are not looked at.
    """

    name = "L1"

    def __init__(self, profile: Profile) -> None:
        whole = tuple(p for p in profile.timing if p.num_layers == profile.spec.num_layers and p.pp == 1)
        super().__init__(replace(profile, timing=whole))

    def latency(self, config: DeploymentConfig, workload: Workload) -> Latency:
        """Return the latency of the whole model under ``config``.

        Raises:
            NotMeasuredError: it was not run at this tp and format, the runs do not determine this workload, or it
                is of a batch above 1 at a pp above 1.
        """
        fit = self.fits.get(replace(key_of(config), pp=1))
        if fit is None or config.pruning is not Pruning.NONE:
            raise NotMeasuredError(f"L1 needs the whole model run at {replace(config, pp=1)}")
        if config.pp == 1:
            return fit.latency(workload)
        if workload.batch != 1:
            raise NotMeasuredError(f"L1 knows pp={config.pp} at batch 1 only, {workload} is asked")
        alone = fit.latency(workload)
        return Latency(
            replace(alone.ttft_s, source=Source.EXTRAPOLATED), replace(alone.tpot_s, source=Source.EXTRAPOLATED)
        )
