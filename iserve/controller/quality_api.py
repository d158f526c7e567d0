"""REST routes of results of ``iserve quality``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Query

from iserve.controller.auth import Caller
from iserve.controller.folder_access import Reach
from iserve.controller.openapi import BODY, problems
from iserve.controller.service import Controller
from iserve.quality.document import ModelFacts, QualityDocument, TextFacts

__all__ = ["add_quality_routes", "as_seen_by"]


def as_seen_by(caller: Reach, results: Iterable[QualityDocument]) -> tuple[QualityDocument, ...]:
    """Return ``results`` without the folders of this machine that ``caller`` may not name."""

    def side(facts: ModelFacts) -> ModelFacts:
        is_hidden = facts.checkpoint is not None and not caller.may_see(facts.checkpoint)
        return replace(facts, checkpoint=None) if is_hidden else facts

    def seen(result: QualityDocument) -> QualityDocument:
        text = result.text if caller.may_see(result.text.file) else _without_folder(result.text)
        against = None if result.against is None else side(result.against)
        return replace(result, model=side(result.model), against=against, text=text)

    return tuple(map(seen, results))


def _without_folder(text: TextFacts) -> TextFacts:
    return replace(text, file=Path(text.file).name)


def add_quality_routes(api: APIRouter, controller: Controller) -> None:
    """Add the routes of ``/quality`` to ``api``."""
    results = controller.quality

    def _check(caller: Reach, model: str) -> None:
        if not results.is_named(model):
            caller.check(model)

    @api.get("/quality", responses=problems(404))
    def quality(
        caller: Caller,
        model: Annotated[
            str | None,
            Query(
                min_length=1,
                max_length=4096,
                description="Variant, deployment or model; only results of its present contents are returned.",
            ),
        ] = None,
    ) -> tuple[QualityDocument, ...]:
        """List the results that are kept, the newest first: 8 of one model, or 100 of all, of any contents.

        Folders outside ISERVE_MODEL_FOLDERS are shown to the home's own token alone.
        """
        if model is None:
            return as_seen_by(caller, results.all())
        _check(caller, model)
        return as_seen_by(caller, results.of(model))

    @api.post("/quality", status_code=201, responses=problems(404, 409, *BODY))
    def keep_quality(body: QualityDocument, caller: Caller) -> QualityDocument:
        """Keep what `iserve quality` measured, in place of a result of the same contents, text and engine.

        The model must still have the contents that the result is of.
        """
        _check(caller, body.model.name)
        return results.keep(body)
