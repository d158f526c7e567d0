"""Loads that a fleet is judged at: rates that are known with their uncertainty, or a prior where none is.

A load is a row of requests per second, one column for each deployment, with a weight; weights add up to 1.

The prior is exchangeable over deployments and in units of the cluster. With G GPUs, and the capacity c at a batch
of 256 and the GPUs g of each deployment as the rule places it, a quarter of the weight is on equal utilisations,
``u c G / sum(g)``, a quarter on equal rates, ``u G / sum(g / c)``, for u of ``UTILISATIONS``, and half on rates by
Zipf's law of eight ranks, which take turns, with the same mean at u of 0.35. Nothing is known of one deployment
that is not known of all; a cluster is bought for a load that it can carry. Where more deployments are expected,
those that are there have their part of it; where nothing is known of further ones, G is the number of GPUs that
those there need (``Fleet.loaded_gpus``).

Where only some rates are known, those deployments have theirs in the mean rows of the prior, and 1 to 2.5 times
theirs in the rest, the more the higher the utilisation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from fingerprint.errors import ConfigError
from fingerprint.service_model import LARGEST_BATCH
from placement.fleet.types import Fleet, FleetPlan

__all__ = ["UTILISATIONS", "Loads", "given_rates", "loads_of", "prior"]

Table = npt.NDArray[np.float64]

UTILISATIONS = (0.05, 0.15, 0.25, 0.35, 0.45, 0.55)
_SKEWED = 3  # number of the one at which popularity differs
_RANKS = 8
_KNOWN_FACTORS = (1.0, 1.0, 1.0, 1.6, 1.6, 2.5)  # of a known rate at each of these
# A rate that was given or learned is a mean: what arrives in a busy minute is more.
_GIVEN_FACTORS, _GIVEN_WEIGHTS = (1.0, 1.6, 2.5), (0.5, 0.3, 0.2)
_GIVEN_ARRIVAL_CV2 = 2.0
_LEAST_RATE_PER_S = 1e-3  # of a deployment that was not asked anything yet: its latency counts a little
# An all-reduce that was not measured may take longer than the model says; of all times, by each doubling of TP.
_SPLIT_LOSSES, _SPLIT_WEIGHTS = (0.0, 0.15, 0.35), (0.5, 0.3, 0.2)


@dataclass(frozen=True)
class Loads:
    """Weighted cases of load and of how well splits over GPUs work.

    Attributes:
        rates_per_s: [cases, deployments].
        weights: [cases], their sum is 1.
        arrival_cv2: squared coefficient of variation of the gaps between arrivals.
        split_loss: [cases]; prompts and steps of a TP degree that was not measured take
            ``1 + split_loss * log2(tp)`` times as long as estimated.
        are_known: the rates were given or learned, not drawn from the prior.
        num_mean: the first cases, whose rates are the mean ones; 0: all are equally so. Those of a prior weigh 0.
    """

    rates_per_s: Table
    weights: Table
    split_loss: Table
    arrival_cv2: float = 1.0
    are_known: bool = False
    num_mean: int = 0

    def __post_init__(self) -> None:
        if not (np.isfinite(self.rates_per_s).all() and (self.rates_per_s >= 0).all()):
            raise ConfigError("the rates of a load must be finite numbers of at least 0")
        if not np.isclose(self.weights.sum(), 1.0):
            raise ConfigError(f"the weights of all loads must add up to 1, got {self.weights.sum():g}")

    @property
    def of_mean_rates(self) -> Table:
        """Weights of the cases of the mean rates; the rest have 0."""
        rows = np.arange(len(self.weights)) < (self.num_mean or len(self.weights))
        weights = np.where(rows, self.weights, 0.0)
        if not weights.any():  # of a prior
            weights = np.where(rows, np.resize(_SPLIT_WEIGHTS, len(rows)), 0.0)
        return np.asarray(weights / weights.sum())

    def at_peak(self, factor: float) -> Loads:
        """Return the cases of the mean rates, every rate times ``factor``."""
        rows = slice(0, self.num_mean or len(self.weights))
        return Loads(
            rates_per_s=self.rates_per_s[rows] * factor,
            weights=self.of_mean_rates[rows],
            split_loss=self.split_loss[rows],
            arrival_cv2=self.arrival_cv2,
            are_known=self.are_known,
        )


def _with_split_losses(rates: Table, weights: Table, **known: float | bool) -> Loads:
    """Return every case of load with every case of split loss."""
    cases, losses = len(rates), len(_SPLIT_LOSSES)
    return Loads(
        rates_per_s=np.repeat(rates, losses, axis=0),
        weights=np.repeat(weights, losses) * np.tile(np.array(_SPLIT_WEIGHTS), cases),
        split_loss=np.tile(np.array(_SPLIT_LOSSES), cases),
        **known,  # type: ignore[arg-type]
    )


def loads_of(
    fleet: Fleet, rule: FleetPlan, rates_per_s: Sequence[float | None], *, burstiness: float = 1.0
) -> Loads:
    """Return the loads of a fleet whose rates are known in part, None being a rate that is not.

    Args:
        burstiness: coefficient of variation of the gaps between arrivals, where it is more than is taken anyway.

    Raises:
        ConfigError: not one rate for each deployment, or one that is not a finite number of at least 0.
    """
    if len(rates_per_s) != len(fleet.deployments):
        raise ConfigError(f"{len(fleet.deployments)} deployments need as many rates, got {len(rates_per_s)}")
    known = [rate for rate in rates_per_s if rate is not None]
    found = given_rates(known) if len(known) == len(rates_per_s) else prior(fleet, rule, rates_per_s)
    return replace(found, arrival_cv2=max(found.arrival_cv2, burstiness**2))


def prior(fleet: Fleet, rule: FleetPlan, rates_per_s: Sequence[float | None] = ()) -> Loads:
    """Return the loads of a fleet of which not every rate is known (module docstring)."""
    capacity, gpus = np.zeros(len(fleet.deployments)), np.zeros(len(fleet.deployments))
    for replica in rule.replicas:
        option = fleet.option(replica)
        capacity[replica.deployment] += option.requests_per_s(LARGEST_BATCH)
        gpus[replica.deployment] += option.num_gpus
    for number in np.flatnonzero(capacity == 0).tolist():  # the rule finds no place for it
        option = fleet.least(number)
        capacity[number], gpus[number] = option.requests_per_s(LARGEST_BATCH), option.num_gpus
    there = len(fleet.deployments) / max(len(fleet.deployments), fleet.expected)
    u = np.array(UTILISATIONS)[:, None] * (fleet.loaded_gpus or len(fleet.gpus)) * there
    alike = capacity / gpus.sum()
    each = np.full(len(capacity), 1.0 / np.sum(gpus / capacity))
    skewed = u[_SKEWED] * each * _popularities(len(capacity))
    rates = np.concatenate(
        [u.mean(axis=0) * alike[None], u.mean(axis=0) * each[None], u * alike, u * each, skewed]
    )
    turns = [_KNOWN_FACTORS[_SKEWED]] * len(skewed)
    busier = np.array(
        [1.0, 1.0, *_KNOWN_FACTORS, *_KNOWN_FACTORS, *turns]
    )  # the mean rows have the rates themselves
    for number, rate in enumerate(rates_per_s):
        if rate is not None:
            rates[:, number] = max(rate, _LEAST_RATE_PER_S) * busier
    weights = np.concatenate([np.zeros(2), *(np.full(num, 0.5 / num) for num in (2 * len(u), len(skewed)))])
    return _with_split_losses(rates, weights, num_mean=2 * len(_SPLIT_LOSSES))


def _popularities(number: int) -> Table:
    """Return rates over their mean [turns, deployments] by Zipf's law, each deployment of each rank in turn."""
    ranks = min(number, _RANKS)
    turns = (np.arange(ranks)[:, None] + np.arange(number)) % ranks
    found = 1.0 / (1 + turns)
    return np.asarray(found / found.mean(axis=1, keepdims=True))


def given_rates(rates_per_s: Sequence[float]) -> Loads:
    """Return the loads where the mean rate of each deployment is known."""
    rates = np.array(_GIVEN_FACTORS)[:, None] * np.maximum(np.array(rates_per_s, np.float64), _LEAST_RATE_PER_S)
    return _with_split_losses(
        rates,
        np.array(_GIVEN_WEIGHTS),
        arrival_cv2=_GIVEN_ARRIVAL_CV2,
        are_known=True,
        num_mean=len(_SPLIT_LOSSES),
    )
