"""REST routes of variants. A change is answered once the gateway has it, or it is said that it has not."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Path, Response
from fastapi.concurrency import run_in_threadpool

from fingerprint.codec import to_json
from fingerprint.errors import BadInputError
from iserve.api_documents import ProgressDocument, VariantDocument, VariantPlaceDocument
from iserve.controller.auth import Caller
from iserve.controller.openapi import BODY, problems
from iserve.controller.quality_api import as_seen_by
from iserve.controller.service import Controller
from iserve.rest_bodies import VariantBody, VariantPinBody
from iserve.route_table import VariantDemand

__all__ = ["add_variant_routes", "with_places"]

VariantName = Annotated[str, Path(description="Name of the variant.")]

_NOT_YET: dict[int | str, dict[str, Any]] = {
    202: {
        "model": VariantDocument,
        "description": "Removed; the gateway has not followed within 10 s and may still answer requests for it.",
    }
}


def add_variant_routes(api: APIRouter, controller: Controller) -> None:
    """Add the routes of ``/variants`` to ``api``."""
    variants = controller.variants

    @api.get("/variants")
    def list_variants() -> tuple[VariantDocument, ...]:
        """List the variants of all base models."""
        return with_places(variants.all(), controller.variant_demand())

    @api.post("/variants", status_code=201, responses=problems(404, 409, *BODY))
    async def add_variant(body: VariantBody, caller: Caller) -> VariantDocument:
        """Copy a LoRA adapter into this home and give it a name.

        Deployments of its base with adapter slots serve it from then on: the gateway knows the name when this is
        answered, unless `in_force` is false. The same request again changes nothing; another content under the
        name needs `replace`.
        """
        added = await asyncio.wrap_future(variants.add_soon(body, caller))
        added = replace(added, in_force=await _follow(controller))
        return await run_in_threadpool(_with_advice, controller, added)

    @api.get("/variants/{name}", responses=problems(404))
    def variant(name: VariantName, caller: Caller) -> VariantDocument:
        """Return one variant as it is now."""
        (found,) = with_places((_with_advice(controller, variants.get(name)),), controller.variant_demand())
        try:
            return replace(found, quality=as_seen_by(caller, controller.quality.of(name)))
        except BadInputError:  # its base has gone
            return found

    @api.get("/variants/{name}/progress", responses=problems(404))
    def variant_progress(name: VariantName) -> ProgressDocument:
        """Return the progress of a variant that is being added."""
        return variants.progress(name)

    @api.patch("/variants/{name}", responses=problems(404, *BODY))
    def pin_variant(name: VariantName, body: VariantPinBody) -> VariantDocument:
        """Pin a variant, so that workers load it at once and keep it loaded, or end that."""
        return variants.pin(name, pinned=body.pinned)

    @api.delete("/variants/{name}", status_code=204, responses=problems(404) | _NOT_YET)
    async def remove_variant(name: VariantName) -> Response:
        """Forget a variant; requests under way are answered, its tensors are removed in the background."""
        removed = await run_in_threadpool(variants.remove, name)
        if await _follow(controller) is not False:
            return Response(status_code=204)
        return Response(to_json(replace(removed, in_force=False)), 202, media_type="application/json")


def with_places(
    found: tuple[VariantDocument, ...], demands: tuple[VariantDemand, ...]
) -> tuple[VariantDocument, ...]:
    """Return documents with the workers that have each variant, as the gateway said."""
    places: dict[str, list[VariantPlaceDocument]] = {}
    for demand in demands:
        for one in demand.places:
            place = VariantPlaceDocument(deployment=demand.deployment, worker_id=one.worker_id, place=one.place)
            places.setdefault(one.variant, []).append(place)
    return tuple(replace(one, places=tuple(places.get(one.name, ()))) for one in found)


def _with_advice(controller: Controller, found: VariantDocument) -> VariantDocument:
    advisor = controller.variant_advice
    return replace(found, merge_advice=advisor.of(found), costs=advisor.costs(found))


async def _follow(controller: Controller) -> bool | None:
    """Return whether the gateway has what was changed; None: no deployment could serve a variant."""
    following = await run_in_threadpool(controller.follow_variants)
    if following is None:
        return None
    return await asyncio.wrap_future(following)
