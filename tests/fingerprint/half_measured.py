"""An estimator that has measured some configurations and scales all further ones from them."""

from __future__ import annotations

from dataclasses import replace

from fingerprint.config import DeploymentConfig, Workload
from fingerprint.estimates import Estimate, Estimator, Source


class HalfMeasured:
    """The figures of another estimator, as if tp = 1 and 8 had been run, with narrow intervals of the rest."""

    name = "half measured"

    def __init__(self, figures: Estimator) -> None:
        self._figures = figures

    def estimate(self, config: DeploymentConfig, workload: Workload) -> Estimate:
        raw = self._figures.estimate(config, workload)
        times = [
            replace(q, low=q.value * 0.8, high=q.value * 1.25, source=Source.SCALED)
            for q in (raw.ttft_s, raw.tpot_s)
        ]
        run = replace(config, tp=1 if config.tp < 4 else 8)
        return replace(raw, ttft_s=times[0], tpot_s=times[1], measured_config=run)
