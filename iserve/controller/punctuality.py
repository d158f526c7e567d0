"""Limits and plan's times of a deployment that rejects late requests, for the gateway."""

from __future__ import annotations

from functools import lru_cache

from fingerprint.codec import from_json
from fingerprint.errors import BadInputError, ConfigError
from iserve.controller.stored_values import recorded_request
from iserve.planning.document import PlanDocument
from iserve.route_table import Punctuality
from iserve.state.store import DeploymentRow
from planner.intent import Slo
from planner.lateness import Pace

__all__ = ["pace_of", "punctuality_of"]


def punctuality_of(row: DeploymentRow) -> Punctuality | None:
    """Return the punctuality of a deployment; None: it rejects no late requests, or nothing is planned yet."""
    if row.plan is None:
        return None
    try:
        request = recorded_request(row)
    except ConfigError:  # its trouble is reported where it is asked for
        return None
    slo = request.slo
    pace = pace_of(row.plan) if request.reject_late and slo is not None else None
    if pace is None or slo is None:
        return None
    return Punctuality(slo=Slo(ttft_s=slo.ttft_s, tpot_s=slo.tpot_s, e2e_s=slo.e2e_s), pace=pace)


@lru_cache(maxsize=256)
def pace_of(plan: str) -> Pace | None:
    """Return the pace of the chosen configuration of a plan's JSON, given what ran on its GPUs then.

    None: nothing is chosen, or the plan is of another version of iServe.
    """
    try:
        document = from_json(plan, PlanDocument, what="the recorded plan")
    except BadInputError:
        return None
    chosen = None if document.chosen is None else document.candidates[document.chosen]
    if chosen is None or chosen.estimate is None:
        return None
    return Pace.planned(document.workload, chosen.estimate, document.single_request, chosen.slowdown)
