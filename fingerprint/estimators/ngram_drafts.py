"""Decode steps that verify n-gram drafts, from an estimate of steps of one token a sequence."""

from __future__ import annotations

from dataclasses import replace

from fingerprint.config import DeploymentConfig, Workload
from fingerprint.estimates import Estimate, Estimator, Quantity, Source, SteadyState, TellsSteadyState
from fingerprint.estimators.variant_cost import TellsVariantCost, VariantCost

__all__ = ["WithNgramDrafts", "tokens_per_step"]

_LOGIT_BYTES = 6  # 16 bits and float32


def tokens_per_step(draft_tokens: int, acceptance: float) -> float:
    """Return the tokens that a step of one sequence gains: its own, and the drafts up to the first refused.

    Source: Leviathan et al., Fast Inference from Transformers via Speculative Decoding (ICML 2023), equation 1.

    Args:
        acceptance: share of the drafts that are accepted, of those whose predecessors were; a step for which no
            draft is found counts as refused.
    """
    return sum(acceptance**length for length in range(draft_tokens + 1))


class WithNgramDrafts:
    """``base`` for configurations with ``draft_tokens``; the rest is as ``base`` says.

    A step of n sequences with k drafts each takes a step of n at its context, and what the matrices take for
    n x (k + 1) tokens beyond those for n. Two larger pieces of work bound that, and the lesser counts: a decode
    step of n x (k + 1) sequences, and a step of n prompts of k + 1 tokens, each less its own with one token a
    sequence. The time per token is that step's over :func:`tokens_per_step`. To look a draft up takes no time,
    prompts take none of it, and the sampler holds the logits of all tokens. The interval is as wide in proportion;
    the acceptance is taken as given.
    """

    def __init__(self, base: Estimator, acceptance: float, *, vocab_size: int) -> None:
        self.name = f"{base.name}, {acceptance:.0%} of n-gram drafts accepted"
        self.base, self._acceptance, self._vocab_size = base, acceptance, vocab_size

    def estimate(self, config: DeploymentConfig, workload: Workload) -> Estimate:
        """Predict as ``base``, but for TPOT and the logits of drafts.

        Raises:
            NotMeasuredError: as ``base``, of a step of as many sequences as there are tokens to verify, too.
        """
        drafts = config.draft_tokens
        if not drafts:
            return self.base.estimate(config, workload)
        plain = replace(config, draft_tokens=0)
        found = self.base.estimate(plain, workload)
        step, n = found.tpot_s, workload.batch

        def short(batch: int, input_tokens: int) -> Estimate:
            return self.base.estimate(plain, Workload(batch=batch, input_tokens=input_tokens, output_tokens=2))

        as_sequences_s = short(n * (drafts + 1), 1).tpot_s.value - short(n, 1).tpot_s.value
        as_prompts_s = short(n, drafts + 1).ttft_s.value - short(n, 1).ttft_s.value
        added_s = max(0.0, min(as_sequences_s, as_prompts_s))
        factor = (1 + added_s / step.value) / tokens_per_step(drafts, self._acceptance)
        source = Source.EXTRAPOLATED if step.source is Source.MEASURED else step.source
        logits = workload.batch * drafts * self._vocab_size * _LOGIT_BYTES
        return replace(
            found,
            config=config,
            tpot_s=Quantity(factor * step.value, factor * step.low, factor * step.high, source),
            memory=replace(found.memory, activation_bytes=found.memory.activation_bytes + logits),
            correction=None,
        )

    def steady_state(self, config: DeploymentConfig) -> SteadyState:
        """Return that of ``base``, where it has one (``estimates.TellsSteadyState``)."""
        plain = replace(config, draft_tokens=0)
        return self.base.steady_state(plain) if isinstance(self.base, TellsSteadyState) else SteadyState()

    def variant_cost(self, config: DeploymentConfig) -> VariantCost | None:
        """Return that of ``base``, where it has one (``variant_cost.TellsVariantCost``)."""
        return self.base.variant_cost(config) if isinstance(self.base, TellsVariantCost) else None
