"""``evaluate``: contestants in worlds that files state."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from iserve.cli.options import usage_errors

if TYPE_CHECKING:
    from iserve.evaluation.document import EvaluationDocument
    from iserve.evaluation.runner import WorldRun

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    app.command(
        "evaluate",
        epilog="Example: iserve evaluate notebooks/worlds/few-on-eight.yaml --contestants ours,rule-min-tp-full "
        "--seeds 1 --set truth.all_reduce=4 --json few.json",
    )(evaluate)


def evaluate(
    worlds: Annotated[list[Path], typer.Argument(metavar="WORLD...", help="World files, YAML or JSON.")],
    *,
    contestants: Annotated[
        str | None,
        typer.Option("--contestants", help="Names with commas between, in place of the worlds' own."),
    ] = None,
    seeds: Annotated[int | None, typer.Option("--seeds", help="The first N seeds of each world.", min=1)] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="Another value in every world: information=rates."),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all results to this file, too.")] = None,
) -> None:
    """Judge what iServe decides against rules of one line and baselines, in simulated worlds. Starts nothing.

    A world states a cluster, models, requests, what contestants know, and the truth that only the simulator has
    (docs/worlds.md). Of each intent the table has every contestant's metrics, the ratio of its score to that of
    the best contestant with the same information, to the strong rule and to the oracle; below 1 is better.
    """
    from iserve.evaluation.contestants import check_names

    with usage_errors("--contestants"):
        names = tuple(filter(None, (contestants or "").split(",")))
        check_names(names)
    runs = [_read(path, tuple(changes or ())) for path in worlds]
    document = _run(runs, names, seeds)
    _show(document, json_file)


def _read(path: Path, changes: tuple[str, ...]) -> WorldRun:
    from iserve.evaluation.runner import WorldRun
    from iserve.evaluation.world_file import read_world

    return WorldRun(read_world(path, changes), path.resolve().parent, changes)


def _run(runs: list[WorldRun], names: tuple[str, ...], seeds: int | None) -> EvaluationDocument:
    from iserve.cli.progress import StepDisplay
    from iserve.evaluation.runner import evaluate as run_worlds

    with StepDisplay(quiet=False) as display:
        return run_worlds(runs, contestants=names, seeds=seeds, report=lambda text: display.show(text, None))


def _show(document: EvaluationDocument, json_file: Path | None) -> None:
    from fingerprint.codec import to_json
    from fingerprint.errors import NotFoundError
    from iserve.cli.evaluation_text import print_evaluation

    if json_file is not None:
        try:
            json_file.write_bytes(to_json(document, indent=1))
        except OSError as error:
            raise NotFoundError(f"{json_file} cannot be written: {error.strerror or error}") from error
    print_evaluation(document)
