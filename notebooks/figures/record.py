"""Record of every figure: computes them in full and writes JSON with date and machine, and an SVG.

Run: ``make evaluation``, or ``python -m notebooks.figures.record [NUMBER...]``. The files are next to the
notebooks, whose printed output is renewed too. With ``EVALUATION_SERVICE=fcfs-pipelined`` every stage of a
pipeline holds a request; that goes to a folder of its own, and no notebook shows it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from fingerprint.codec import from_json, to_json
from notebooks.figures.attainment import figure_14
from notebooks.figures.charts import svg
from notebooks.figures.choices import figure_11_to_13
from notebooks.figures.effects import figure_3, figure_4, figure_5
from notebooks.figures.figure import Figure
from notebooks.figures.fleet import figure_16
from notebooks.figures.fleet_load import figure_16_load
from notebooks.figures.h200 import figure_h200
from notebooks.figures.harvest import figure_20
from notebooks.figures.launches import figure_15
from notebooks.figures.layers import figure_7, figure_8
from notebooks.figures.load import SERVICE
from notebooks.figures.policies import figure_10
from notebooks.figures.strategies import figure_9
from notebooks.figures.under_load import figure_11, figure_12, figure_13
from traces.simulator.scenario import Service

__all__ = ["FIGURES", "NOTEBOOKS", "ORDERS", "RESULTS", "Record", "main", "read", "renew", "write"]

NOTEBOOKS = Path(__file__).parents[1]
RESULTS = NOTEBOOKS / "results"
HERE = RESULTS if SERVICE is Service.FCFS else RESULTS / SERVICE
ORDERS = 20  # of figure 16: table 1's and 19 shuffles

FIGURES: Mapping[str, Callable[[], Figure]] = {
    "3": figure_3,
    "4": figure_4,
    "5": figure_5,
    "7": figure_7,
    "8": figure_8,
    "9": figure_9,
    "10": figure_10,
    "11-13": figure_11_to_13,
    "11": figure_11,
    "12": figure_12,
    "13": figure_13,
    "14": figure_14,
    "15": figure_15,
    "16": lambda: figure_16(ORDERS),
    "16-load": figure_16_load,
    "20": figure_20,
    "h200": figure_h200,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """Figure as computed. ``machine`` is the one that computed; the figure says where it was measured."""

    created_at: str  # ISO 8601, UTC
    machine: str
    figure: Figure


def read(number: str) -> Record:
    """Return what is committed of a figure."""
    path = RESULTS / f"figure_{number}.json"
    return from_json(path.read_bytes(), Record, what=str(path))


def write(record: Record) -> None:
    """Write the figure's JSON and its SVG."""
    number = record.figure.number
    (HERE / f"figure_{number}.json").write_text(_lines(json.loads(to_json(record))) + "\n")
    if HERE == RESULTS:
        (HERE / f"figure_{number}.svg").write_text(svg(record.figure))


def _lines(value: object) -> str:
    """Return JSON in which each list or object without nested ones is a line: a row, a finding."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if not any(isinstance(one, dict | list) for one in inner):
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    if isinstance(value, dict):
        return "{\n" + ",\n".join(f"{json.dumps(name)}:{_lines(one)}" for name, one in value.items()) + "\n}"
    return "[\n" + ",\n".join(map(_lines, inner)) + "\n]"


def _machine() -> str:
    return (
        f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}, "
        f"numpy {version('numpy')}, no GPU used"
    )


def renew(path: Path) -> None:
    """Runs a notebook's cells in this process and keeps what they print."""
    notebook = json.loads(path.read_text())
    namespace: dict[str, object] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec("".join(cell["source"]), namespace)
            text = printed.getvalue().splitlines(keepends=True)
            cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": text}] if text else []
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("numbers", nargs="*", metavar="NUMBER", help=f"of {', '.join(FIGURES)}; all without")
    numbers = parser.parse_args().numbers or list(FIGURES)
    if unknown := sorted(set(numbers) - set(FIGURES)):
        parser.error(f"there is no figure {', '.join(unknown)}; there are {', '.join(FIGURES)}")
    HERE.mkdir(parents=True, exist_ok=True)
    for number in numbers:
        figure = FIGURES[number]()
        record = Record(
            created_at=datetime.now(UTC).isoformat(timespec="seconds"), machine=_machine(), figure=figure
        )
        write(record)
        print(f"figure {number}: {figure.title}")
    for path in sorted(NOTEBOOKS.glob("evaluation_*.ipynb")) if HERE == RESULTS else ():
        renew(path)
        print(f"renewed {path.name}")


if __name__ == "__main__":
    main()
