"""Tables of ``quality_at_scale`` in the form of DeltaZip's (arXiv 2312.05215v3): 1, formats and their compression
ratios; 2, full fine-tune, adapters and deltas by task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import fsum

from fingerprint.delta import FORMATS
from tests.bench.delta_quality import TEXTS, WHOLE
from tests.bench.quality_at_scale import LEARNED_BEFORE
from tests.bench.quality_at_scale_studies import ScaleOutcome, SeedStudy
from tests.bench.variant_quality import BASE, FULL, OTHER_BASE, lora_name, mean_and_range

__all__ = ["PAPER_RATIOS", "formats_table", "ranks_table"]

NOT_MEASURED = "not measured"
PAPER_RATIOS = {  # of Llama-2-7B in DeltaZip's table 1
    FULL: "1.00",
    f"{WHOLE} sparse24-int4": "5.61 (SparseGPT)",
    f"{WHOLE} int4": "3.64 (AWQ)",
    "sparse24-int4": "5.39",
    "sparse24-int2": "10.36",
}
_ORDER = ("int2", "int3", "int4", "sparse24-int4", "sparse24-int2", "int1")


def formats_table(studies: Sequence[SeedStudy]) -> str:
    """Return exact match by format and task, means and ranges over the seeds, with ratios, in Markdown."""
    names = _tasks(studies)
    if not names:
        return _sentence()
    assert set(_ORDER) == set(FORMATS)
    heads = ["", "calibration", *names, "ratio of the linears", "of the model", "DeltaZip's, Llama-2-7B"]
    lines = [_row(heads), "|---" * len(heads) + "|"]
    methods = [FULL, *_ORDER, *(f"{WHOLE} {name}" for name in _ORDER)]
    found = list(_outcomes(studies))
    for method in (BASE, *methods):
        own = [each for each in found if each.case.method == method]
        for calibration in dict.fromkeys(each.case.calibration for each in own):
            rows = [each for each in own if each.case.calibration == calibration]
            is_paper = calibration in ("", TEXTS)
            lines.append(
                _row(
                    [
                        method,
                        calibration,
                        *_by_task(names, rows, len(studies)),
                        _ratio(rows, lambda each: 16 / each.bits if each.bits else None),
                        "" if method == BASE else _ratio(rows, lambda each: each.model_bytes / each.kept_bytes),
                        PAPER_RATIOS.get(method, "") if is_paper else "",
                    ]
                )
            )
    return "\n".join(lines)


def ranks_table(studies: Sequence[SeedStudy]) -> str:
    """Return exact match by task of the fine-tune, adapters and deltas, in Markdown."""
    names = _tasks(studies)
    if not names:
        return _sentence()
    ranks = [lora_name(rank) for rank in studies[0].scale.sizes.ranks]
    methods = [BASE, FULL, *ranks, "int2", "sparse24-int4", "int4", OTHER_BASE]
    found = [each for each in _outcomes(studies) if each.case.calibration in ("", TEXTS)]
    lines = [_row(["task", *methods]), "|---" * (len(methods) + 1) + "|"]
    for name in (LEARNED_BEFORE, *names):
        of_task = [each for each in found if each.case.task == name]
        cells = [
            _cell([each for each in of_task if each.case.method == method], len(studies)) for method in methods
        ]
        lines.append(
            _row(
                [
                    name,
                    *(
                        "" if name == LEARNED_BEFORE and method != BASE else cell
                        for method, cell in zip(methods, cells, strict=True)
                    ),
                ]
            )
        )
    sizes = [[each for each in found if each.case.method == method] for method in methods]
    shares = [
        f"{_mean(100 * each.kept_bytes / each.model_bytes for each in rows):.1f}%" if rows else ""
        for rows in sizes
    ]
    lines.append(_row(["bytes, of the fine-tune's", "", *shares[1:-1], ""]))
    return "\n".join(lines)


def _tasks(studies: Sequence[SeedStudy]) -> list[str]:
    return [name for name, _ in studies[0].scale.sizes.steps] if studies else []


def _outcomes(studies: Sequence[SeedStudy]) -> Iterable[ScaleOutcome]:
    return (outcome for study in studies for outcome in study.outcomes)


def _by_task(names: Sequence[str], rows: Sequence[ScaleOutcome], seeds: int) -> list[str]:
    return [_cell([each for each in rows if each.case.task == name], seeds) for name in names]


def _cell(rows: Sequence[ScaleOutcome], seeds: int) -> str:
    """Return mean and range of exact match, with the number of seeds where some are missing."""
    if not rows:
        return NOT_MEASURED
    missing = "" if len(rows) == seeds else f", {len(rows)} of {seeds} seeds"
    return mean_and_range([100 * each.exact_match for each in rows], ".1f") + "%" + missing


def _ratio(rows: Sequence[ScaleOutcome], ratio: Callable[[ScaleOutcome], float | None]) -> str:
    values = [value for each in rows if (value := ratio(each)) is not None]
    return f"{_mean(values):.2f}" if values else ""


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return fsum(found) / len(found)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _sentence() -> str:
    return f"{NOT_MEASURED.capitalize()}."
