"""Forecast of a request's latency before it starts, from the requests before it.

A worker runs at most ``slots`` requests in one batch; any more wait, first come first served, for one of them to
end. Known of a request are its prompt's length and the expected length of its answer; of a running one also how
much of both is done. All times are those of the replica's ``ServiceModel``:

*   *a prompt* takes the time of all prompts that are under way, and they are served before it;
*   *a token* takes a step of all running requests, and a share of the prompts that follow as those end;
*   *a slot* is free when the prompt and the rest of the answer in it are through at the pace of a full batch;
    waiting requests take one after the other the slot that is free first.

Later arrivals slow a request too, and are in none of this but the share of prompts: ``planner.admission`` learns
how far off the forecast is.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fingerprint.service_model import ServiceModel

__all__ = ["LatencyForecast", "RemainingWork", "forecast_latency", "forecast_queue"]


class RemainingWork(NamedTuple):
    """Tokens of a request that are still to be processed: all of one that waits.

    ``prompt_tokens`` is 0 once the first token was sent.
    """

    prompt_tokens: float
    output_tokens: float


class LatencyForecast(NamedTuple):
    """Latencies of one request in seconds, TTFT and E2E from now."""

    ttft_s: float
    tpot_s: float
    e2e_s: float


def forecast_queue(
    service: ServiceModel,
    slots: int,
    replicas: Sequence[Sequence[RemainingWork]],
    waiting: Iterable[RemainingWork],
) -> tuple[float, float]:
    """Return the seconds until the next behind ``waiting`` gets a slot, and until all before it have ended.

    Args:
        slots: of each replica.
        replicas: what runs on each that serves; there is at least one.
    """
    token_s, prompt_token_s = service.loaded_step_of(slots), service.added_prompt_s / service.input_tokens
    free_s = []
    for running in replicas:
        # The fixed time of a prompt under way is passed, or shared.
        prompts_s = prompt_token_s * sum(one.prompt_tokens for one in running)
        free_s += [prompts_s + one.output_tokens * token_s for one in running]
        free_s += [0.0] * (slots - len(running))
    heapq.heapify(free_s)
    for prompt_tokens, output_tokens in waiting:  # the first token is the prompt's
        taken_s = service.prompts_s(prompt_tokens) + (max(1.0, output_tokens) - 1) * token_s
        heapq.heapreplace(free_s, free_s[0] + taken_s)
    return free_s[0], max(free_s)


def forecast_latency(
    service: ServiceModel, running: Sequence[RemainingWork], request: RemainingWork, wait_s: float = 0.0
) -> LatencyForecast:
    """Return the forecast of ``request`` on a replica that runs ``running`` when it starts, in ``wait_s``."""
    prompt_tokens = request.prompt_tokens + sum(one.prompt_tokens for one in running)
    ttft_s = wait_s + service.prompts_s(prompt_tokens)
    tpot_s = service.loaded_step_of(len(running) + 1)
    return LatencyForecast(ttft_s, tpot_s, ttft_s + max(0.0, request.output_tokens - 1) * tpot_s)
