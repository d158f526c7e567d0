"""Decisions on this project's own measurements: what ``accuracy_measure.py`` recorded of whole models.

Each alternative is one recording (a format, a TP and a PP degree of one model); iServe decides by the estimates
from its fingerprints, with intervals calibrated on the other models.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from fingerprint.estimators.calibration import Calibration
from fingerprint.estimators.depth_tied import DepthTiedEstimator
from fingerprint.estimators.roofline import RooflineEstimator
from tests.bench.accuracy import Recorded, measured_errors, truths
from tests.bench.decision_grids import joined
from tests.bench.decision_rules import Cell, Measured


def own_cells(recorded: Sequence[Recorded], known: Iterable[str] = ()) -> list[Cell]:
    """Cells of the models that were recorded under two or more configurations on one kind of GPU.

    Args:
        known: names in model-configs.json; a recording names its model by the last part of one.
    """
    full_names = {name.rpartition("/")[2]: name for name in known}
    calibration = Calibration(measured_errors(recorded))

    def rows() -> Iterator[tuple[tuple[object, ...], Cell]]:
        for one in recorded:
            spec, gpu = one.profile.spec, one.profile.machine.device
            estimator = DepthTiedEstimator(one.profile, RooflineEstimator(spec, gpu), calibration)
            config = one.config
            for truth in truths(one):
                work = truth.workload
                measured = Measured(
                    config=config,
                    ttft_s=truth.ttft_s,
                    tpot_s=truth.tpot_s,
                    e2e_s=truth.ttft_s + (work.output_tokens - 1) * truth.tpot_s,
                )
                cell = Cell(
                    table=f"own, vLLM, {gpu.name}",
                    engine="vLLM",
                    model=full_names.get(one.model, one.model),
                    spec=spec,
                    gpu=gpu,
                    workload=work,
                    alternatives=(measured,),
                    estimates=(estimator.estimate(config, work),),
                )
                yield (one.model, gpu.name, work), cell

    return joined(rows())
