"""Choice between adapter slots for all variants of a base and deployments of their own for the hottest. Pure.

A merged variant takes a copy of the weights, and its requests the time of a model without adapters; it leaves the
slots a smaller load. Both sides are judged by the law of load of plans (``fingerprint.queueing``), each deployment
by itself on GPUs like those of the plan, with replicas that serve 1.5 times its rate. As in joint plans
(decision 35) a replica holds of each GPU the larger of its memory and its busy share, memory with twice the KV
cache that the requests of that rate take. Beyond one, replicas count in fractions: else what lies near the step to
one replica more would decide. A request's cost is the GPU-seconds that are held for it. Sums of GPUs are of use to
compare the two sides only: a joint plan reserves for up to 2.5 times the rate, in whole replicas, and holds more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fingerprint.queueing import ServiceColumns, Variation, requests_at_once, slot_wait
from fingerprint.service_model import ServiceModel
from planner.adapter_slots import VariantShares
from planner.intent import MAX_REPLICAS

__all__ = ["MOST_MERGED", "PEAK", "USABLE", "HotVariants", "ServedCost", "hot_variants", "served_cost"]

MOST_MERGED = 16  # variants for which deployments of their own are looked at
PEAK = 1.5  # times the rate, which the replicas must serve
_SPARE = 2.0  # times the requests at once of that rate, for which KV cache is reserved
USABLE = 0.93  # of a GPU's memory
_WORTH = 0.9  # times the cost on slots, up to which merging is advised: the times of adapters are estimated


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedCost:
    """Cost of one deployment at a rate, or the sum over several."""

    replicas: int
    gpus_held: float  # infinite: it is not served
    rate_per_s: float

    @classmethod
    def unserved(cls, rate_per_s: float) -> ServedCost:
        return cls(replicas=MAX_REPLICAS + 1, gpus_held=math.inf, rate_per_s=rate_per_s)

    @property
    def is_served(self) -> bool:
        return math.isfinite(self.gpus_held)

    @property
    def gpu_s_per_request(self) -> float:
        """GPU-seconds that are held for each completed request."""
        return self.gpus_held / self.rate_per_s

    def plus(self, more: ServedCost) -> ServedCost:
        return ServedCost(
            replicas=self.replicas + more.replicas,
            gpus_held=self.gpus_held + more.gpus_held,
            rate_per_s=self.rate_per_s + more.rate_per_s,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class HotVariants:
    """The hottest variants that cost less as deployments of their own."""

    merged: int
    share: float  # of all requests, theirs
    on_slots: ServedCost  # all variants on the slots of the base; may be unserved
    split: ServedCost  # the merged ones, and the base with the rest


def hot_variants(
    load: VariantShares,
    rate_per_s: float,
    on_slots: Callable[[VariantShares], ServiceModel],
    plain: ServiceModel,
    gpu_bytes: int,
) -> HotVariants | None:
    """Return how many of the hottest variants to merge; None: no number of them saves a tenth of the cost.

    What is not served costs infinitely much, so that any number that makes it served saves enough.

    Args:
        on_slots: returns the service model of a replica of the base with slots for this load.
        plain: of a replica without slots: of a merged variant, or of the base when no variant is left.
        gpu_bytes: memory of each GPU.
    """
    everything = served_cost(on_slots(load), rate_per_s, gpu_bytes) or ServedCost.unserved(rate_per_s)
    best, merged_cost, most = (everything, 0), ServedCost(replicas=0, gpus_held=0, rate_per_s=0), 0
    for share in load.of_variants[:MOST_MERGED]:
        one = served_cost(plain, share * rate_per_s, gpu_bytes)
        if one is None or share <= 0:
            break
        merged_cost, most = merged_cost.plus(one), most + 1
        left_per_s = rate_per_s - merged_cost.rate_per_s
        found: ServedCost | None = merged_cost
        if left_per_s > 1e-9 * rate_per_s:
            rest = load.without_first(most)
            service = on_slots(rest) if rest.of_variants else plain
            of_rest = served_cost(service, left_per_s, gpu_bytes)
            found = None if of_rest is None else merged_cost.plus(of_rest)
        if found is not None and found.gpus_held < best[0].gpus_held:
            best = found, most
    split, number = best
    if not number or split.gpus_held > _WORTH * everything.gpus_held:
        return None
    share = sum(load.of_variants[:number])
    return HotVariants(merged=number, share=share, on_slots=everything, split=split)


def served_cost(service: ServiceModel, rate_per_s: float, gpu_bytes: int) -> ServedCost | None:
    """Return the cost of a deployment at a rate; None: it has no room, or 64 replicas are too few.

    Requests are Poisson, their lengths vary as an exponential does.
    """
    room_bytes = USABLE * gpu_bytes - service.fixed_bytes
    room_tokens = room_bytes / max(service.kv_bytes_per_token, 1e-9)
    if room_tokens < service.longest_tokens:
        return None
    columns = ServiceColumns.of([service], np.array([service.batch_of(room_tokens)]))
    slot_s, variation = columns.slot_s, Variation()
    replicas = max(1.0, PEAK * rate_per_s * float(slot_s[0]))
    if replicas > MAX_REPLICAS:
        return None

    def inside(each_per_s: float) -> float:
        """Return the requests at one replica on average, those that wait included.

        One that waits for a load next to the steps holds nothing of a GPU, and costs none.
        """
        used = each_per_s * slot_s
        running = requests_at_once(columns, used, variation)
        waiting_s = slot_wait(columns, used, variation, running.peak).of_all_s
        return each_per_s * float((columns.requests_s(running.mean) + waiting_s)[0])

    each_per_s = rate_per_s / replicas
    at_peak = inside(min(PEAK * each_per_s, 0.98 / float(slot_s[0])))
    tokens = max(_SPARE * max(1.0, at_peak) * service.mean_tokens, 2.0 * service.longest_tokens)
    memory = service.bytes_per_gpu(min(tokens, room_tokens)) / gpu_bytes
    busy = -math.expm1(-inside(each_per_s)) * service.busy_share_per_gpu
    held = replicas * service.num_gpus * max(memory, busy)
    return ServedCost(replicas=math.ceil(replicas), gpus_held=held, rate_per_s=rate_per_s)
