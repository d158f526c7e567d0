"""Interface of what variants in slots take on top of their base: planner, merge advice and simulator ask it alone.

It is measured, where fingerprints with variants were (``measured_variants``); on vLLM it is scaled from recordings
of one H200 otherwise (``adapter_slots``); elsewhere it is not known.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from fingerprint.config import DeploymentConfig, Workload
from fingerprint.estimates import Quantity
from fingerprint.load_time import RECORDED_TENSORS
from fingerprint.variant_measurements import VariantMeasurement

__all__ = ["TellsVariantCost", "VariantCost"]


class VariantCost(ABC):
    """Time that variants of one configuration add."""

    measured: VariantMeasurement | None = None
    """Measurement that it rests on; None: a recording of another model and GPU."""
    is_exact: bool = False
    """Whether the measurement is of the same kind of variants on one GPU; else it is scaled from there."""
    has_measured_prompts: bool = True
    """Whether the measurement gives the time of prompts too; else they are scaled from the recording."""
    prompt_share: float = 0.0
    """Time that is added to prompts of variants, as a share of theirs, where :attr:`prompt_s` is None."""
    prompt_s: Callable[[int], float] | None = None
    """Time that one variant's prompts add to a step, by their tokens."""

    @abstractmethod
    def step_s(self, rows: float, active: float) -> Quantity:
        """Return the time that is added to a decode step of ``rows`` sequences with ``active`` distinct variants.

        Below one, ``active`` is the share of steps with one variant; the rest are steps of the base alone. All
        rows count as rows of variants where there is one.
        """

    @abstractmethod
    def prompts_s(self, workload: Workload, ttft_s: float, base_share: float, distinct: float) -> Quantity:
        """Return the time that is added to the prompts of ``workload``, handed over at once.

        Args:
            ttft_s: that they take without slots.
            base_share: those for the base, as a share of all.
            distinct: variants that they are for on average.
        """

    @abstractmethod
    def load_s(self, num_bytes: int, num_tensors: int = RECORDED_TENSORS) -> float:
        """Return the time of a load from the page cache of a variant of ``num_bytes``.

        Args:
            num_tensors: of an adapter; of a delta the default.
        """


@runtime_checkable
class TellsVariantCost(Protocol):
    """An estimator that may have measurements of variants."""

    def variant_cost(self, config: DeploymentConfig) -> VariantCost | None:
        """Return what variants in the slots of ``config`` take, as measured; None: they were not."""
        ...
