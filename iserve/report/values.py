"""Content of a report, as one value; verdicts and reasons of the planner arrive as text."""

from __future__ import annotations

from dataclasses import dataclass

from fingerprint.config import DeploymentConfig, Workload, even_split
from fingerprint.estimates import Estimate, StageMemory
from fingerprint.estimators.l2 import LayerEffect
from fingerprint.gpu_spec import GpuSpec
from fingerprint.measurements import Profile
from fingerprint.model_spec import ModelSpec
from iserve.report.accuracy import AccuracyRecord, AccuracyRow
from iserve.report.full_model import WholeModel
from iserve.report.latency_fit import TimePanel

__all__ = ["Configuration", "RankedRow", "Ranking", "Report", "Verdict"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Configuration:
    """Point of the space, once for all rankings. ``feasible`` and ``reason``: with no limit but quality."""

    config: DeploymentConfig
    estimate: Estimate | None  # None: nothing is predicted of it
    layers_per_stage: tuple[int, ...] | None  # where it fits
    cost: float | None  # per request, in the report's ``cost_unit``
    feasible: bool
    reason: str | None

    @property
    def fullest_stage(self) -> StageMemory | None:
        """Bytes on the fullest GPU: of its placement, else of the even split."""
        if self.estimate is None:
            return None
        memory = self.estimate.memory
        split = self.layers_per_stage or even_split(memory.num_layers, memory.pp)
        return max(memory.stages(split), key=lambda stage: stage.total_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankedRow:
    """A configuration's verdict under one intent."""

    configuration: int  # index into ``Report.configurations``
    objective: float | None
    feasible: bool
    reason: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Choice of an intent, in the planner's words."""

    sentence: str
    lines: tuple[tuple[str, str], ...]  # label and text; an empty label belongs to the one before
    refused: str  # all refusals counted in one line; empty without any


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranking:
    """All configurations under one intent, best first within the feasible ones."""

    intent: str
    limit: str | None  # an example limit that the intent cannot do without, and where it came from
    objective: str  # "output tokens/s, more is better"
    rows: tuple[RankedRow, ...]
    remarks: tuple[str, ...] = ()  # why better ones were refused
    verdict: Verdict | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Everything on the page. Without a ``profile`` the estimates are the roofline's."""

    model: str
    spec: ModelSpec
    created_at: str  # ISO 8601
    hardware: str  # "8 x a6000"
    device: GpuSpec
    workload: Workload
    cost_model: str
    cost_unit: str
    configurations: tuple[Configuration, ...]
    rankings: tuple[Ranking, ...]  # the first one's verdict is at the head of the page
    profile: Profile | None = None
    panels: tuple[TimePanel, ...] = ()
    layer_effects: tuple[LayerEffect, ...] = ()
    whole: tuple[WholeModel, ...] = ()  # of a depth-tied profile; panels and effects are then empty
    warnings: tuple[str, ...] = ()  # of the estimator, in addition to the profile's notes
    accuracy: AccuracyRecord | None = None

    @property
    def measured_times(self) -> list[tuple[Workload, AccuracyRow]]:
        """Times that were measured on this whole model, with their workloads."""
        rows = () if self.accuracy is None else self.accuracy.rows
        own = [row for row in rows if row.shape_hash == self.spec.shape_hash and row.is_time]
        return [(row.workload, row) for row in own if row.workload is not None]
