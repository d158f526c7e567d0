"""Sizes that an engine is started with, the largest step among them. Pure.

A step's tokens bound how long running answers wait for prompts that join them. Engines are measured with steps of
8,192 tokens; on vLLM steps of 2,048 were no slower, and faster where prompts are long (docs/decisions/0043).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fingerprint.config import DeploymentConfig, Workload
from fingerprint.engines import traits_of
from fingerprint.estimators.roofline import DEFAULT_MAX_BATCHED_TOKENS
from fingerprint.model_spec import ModelSpec

__all__ = [
    "SHORT_STEP_MEAN_PROMPT",
    "SHORT_STEP_TOKENS",
    "LaunchLimits",
    "largest_step",
    "launch_limits",
    "unmeasured_step_tokens",
]

SHORT_STEP_TOKENS = 2_048
# Tokens; three of four prompts fit into a short step then, were their lengths exponential about the mean.
SHORT_STEP_MEAN_PROMPT = int(SHORT_STEP_TOKENS / math.log(4))
_SLOT_STEP_TOKENS = 512  # of the largest step of an engine with slots, at least


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchLimits:
    """Sizes that an engine is started with."""

    max_batch: int
    max_batched_tokens: int
    max_context_tokens: int
    kv_tokens: int


def launch_limits(
    planned: Workload, engine: str, step_tokens: int | None = None, *, served: Workload | None = None
) -> LaunchLimits:
    """Return the limits of a worker of ``engine`` that was planned for ``planned`` and serves ``served``.

    Args:
        step_tokens: tokens of the largest step that the engine was measured with, whose activations and chunks of
            prompts the estimate therefore has; None: the estimate has those of the workload's own largest step.
        served: None: no more than is planned for.
    """
    served = served or planned
    largest = step_tokens or unmeasured_step_tokens(planned, engine, served)
    return LaunchLimits(
        max_batch=served.batch,
        max_batched_tokens=max(largest, served.batch),
        max_context_tokens=served.context_tokens,
        kv_tokens=served.kv_tokens(engine),
    )


def largest_step(
    spec: ModelSpec, config: DeploymentConfig, planned: Workload, served: Workload, measured: int | None
) -> int:
    """Return tokens of the largest step of a worker that is planned for ``planned`` and serves ``served``.

    It is ``SHORT_STEP_TOKENS`` where that is known to be no slower and most prompts fit into it: a dense model on
    one GPU with vLLM, without drafts, adapter slots, images or states. Elsewhere it is the step that was measured,
    for which memory is planned. It has room for one token of each request served.

    Args:
        measured: tokens of the largest step that the engine was measured with; None: as ``launch_limits``.
    """
    usual = launch_limits(planned, config.engine, measured, served=served).max_batched_tokens
    if not _is_known(spec, config) or planned.input_tokens > SHORT_STEP_MEAN_PROMPT:
        return usual
    return min(usual, max(SHORT_STEP_TOKENS, served.batch))


def _is_known(spec: ModelSpec, config: DeploymentConfig) -> bool:
    """Return whether steps of ``SHORT_STEP_TOKENS`` are known to be no slower for such a worker."""
    is_dense = not (spec.is_mixture or spec.keeps_state or spec.tower_params)
    is_plain = config.num_gpus == 1 and not (config.draft_tokens or config.adapter_slots)
    return traits_of(config.engine).short_steps and is_dense and is_plain


def unmeasured_step_tokens(planned: Workload, engine: str, served: Workload) -> int:
    """Return tokens of the largest step that an engine is started for, where no measurement gives them."""
    one = served
    least = 0
    if traits_of(engine).has_slots and served != planned:
        one, least = planned, min(_SLOT_STEP_TOKENS, served.context_tokens)
    return min(DEFAULT_MAX_BATCHED_TOKENS, max(one.batch * one.input_tokens, one.context_tokens, least))
