"""Record of all worlds of ``notebooks/worlds``, as stated and with other knowledge and other truths.

Those of its folder ``variants`` have adapters or deltas, and variants here of their own.

Run: ``python -m notebooks.figures.worlds [--jobs N] [VARIANT...]``; the results are in
``notebooks/results/worlds``, one file for each variant as it ends, and ``docs/world_tables.py`` makes tables of
them. Nothing is measured: any machine and any number of processes give the same figures, but for the oracle, whose
search ends by the clock.
"""

from __future__ import annotations

import argparse
import gzip
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from fingerprint.codec import from_json, to_json
from iserve.evaluation.contestants import (
    AICONFIGURATOR,
    ALPASERVE,
    OF_VARIANTS,
    ORACLE,
    OURS,
    STANDARD,
    STRONG_RULE,
)
from iserve.evaluation.document import EvaluationDocument
from iserve.evaluation.runner import WorldRun, evaluate
from iserve.evaluation.world_file import read_world

__all__ = ["RESULTS", "VARIANTS", "Recorded", "read", "record"]

WORLDS = Path(__file__).parents[1] / "worlds"
RESULTS = Path(__file__).parents[1] / "results" / "worlds"


@dataclass(frozen=True, slots=True)
class Variant:
    """Change that is made in every world of a folder, and the contestants and seeds that are run."""

    changes: tuple[str, ...] = ()
    contestants: tuple[str, ...] = STANDARD
    seeds: int | None = None
    folder: str = ""  # within that of the worlds; `variants`: of models with adapters or deltas


_WITH_SLOTS = (OURS, STRONG_RULE, "rule-replicas", *OF_VARIANTS)
VARIANTS: Mapping[str, Variant] = {
    "as-stated": Variant(),
    "rates-given": Variant(("information=rates",)),
    "slow-all-reduce": Variant(("truth.all_reduce=4",), seeds=1),
    "slow-steps": Variant(("truth.step_times=1.5",), seeds=1),
    "costly-sharing": Variant(("truth.sharing=1.5",), seeds=1),
    "with-aiconfigurator": Variant(contestants=(STRONG_RULE, AICONFIGURATOR)),
    "with-aiconfigurator-rates": Variant(("information=rates",), (STRONG_RULE, AICONFIGURATOR)),
    "with-aiconfigurator-slow-all-reduce": Variant(
        ("truth.all_reduce=4",), (STRONG_RULE, AICONFIGURATOR), seeds=1
    ),
    "tight-slo": Variant(("slo_multiple=1.5", "intents=[latency-slo]"), STANDARD, seeds=1),
    "tight-slo-rates": Variant(
        ("information=rates", "slo_multiple=1.5", "intents=[latency-slo]"), STANDARD, seeds=1
    ),
    "with-alpaserve": Variant(
        ("intents=[min-cost, min-latency, latency-slo]",), (STRONG_RULE, ALPASERVE), seeds=1
    ),
    "with-oracle": Variant(
        ("information=rates", "oracle.seconds=60", "intents=[min-cost, min-latency, latency-slo]"),
        (*STANDARD, AICONFIGURATOR, ORACLE),
        seeds=1,
    ),
    "of-variants": Variant(contestants=_WITH_SLOTS, folder="variants"),
    "of-variants-rates": Variant(("information=rates",), _WITH_SLOTS, folder="variants"),
    "of-variants-loads-free": Variant(
        ("information=rates", "truth.load_times=0", "intents=[min-cost]"), (OURS,), folder="variants"
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """Evaluation of one variant, and when it was run."""

    created_at: str  # ISO 8601, UTC
    variant: str
    document: EvaluationDocument


def record(name: str, jobs: int = 1) -> Recorded:
    """Run one variant in all worlds, in so many processes."""
    variant = VARIANTS[name]
    runs = [
        WorldRun(read_world(path, variant.changes), path.parent, variant.changes)
        for path in sorted((WORLDS / variant.folder).glob("*.yaml"))
    ]
    document = evaluate(runs, contestants=variant.contestants, seeds=variant.seeds, report=_tell, jobs=jobs)
    return Recorded(created_at=datetime.now(UTC).isoformat(timespec="seconds"), variant=name, document=document)


def _tell(line: str) -> None:
    print(line, flush=True)


def read(name: str) -> Recorded:
    """Return what is committed of a variant."""
    path = RESULTS / f"{name}.json.gz"
    return from_json(gzip.decompress(path.read_bytes()), Recorded, what=str(path))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="*", metavar="VARIANT", help=f"of {', '.join(VARIANTS)}; all without")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the work")
    args = parser.parse_args()
    if args.jobs < 1:
        parser.error(f"--jobs is at least 1, got {args.jobs}")
    names = args.variants or list(VARIANTS)
    if unknown := sorted(set(names) - set(VARIANTS)):
        parser.error(f"there is no variant {', '.join(unknown)}; there are {', '.join(VARIANTS)}")
    RESULTS.mkdir(parents=True, exist_ok=True)
    for name in names:
        packed = gzip.compress(to_json(record(name, args.jobs)), mtime=0)
        (RESULTS / f"{name}.json.gz").write_bytes(packed)


if __name__ == "__main__":
    main()
