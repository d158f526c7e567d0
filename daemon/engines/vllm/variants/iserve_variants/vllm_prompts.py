"""Logits of prompts, of which vLLM makes their logprobs: each row has the delta of its own token.

Both model runners compute them after the samples', by the same method of the model, of views of the step's hidden
states. Which rows a view has follows from where its memory begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from iserve_variants.step_routes import StepRoutes

__all__ = ["adapters_of_samples_only", "compute_logits_of_prompts", "watch_prompts"]

_steps: list[torch.Tensor] = []  # hidden states of the step whose prompts' logits are computed; at most one
_MARK = "iserve_deltas"
_MOST_ROWS = 4096  # at once: kernels count elements of logits in 32 bits


def watch_prompts() -> None:
    """Note when a model runner computes logits of prompts; once in a process."""
    # Both import much, which processes that run no model have no use for.
    from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if hasattr(GPUModelRunner._get_prompt_logprobs_dict, _MARK):
        return
    of_runner = GPUModelRunner._get_prompt_logprobs_dict
    of_worker = PromptLogprobsWorker.compute_prompt_logprobs
    of_token_ids = PromptLogprobsWorker.compute_prompt_token_id_logprobs

    def get_prompt_logprobs_dict(self: Any, hidden_states: torch.Tensor, *given: Any) -> Any:
        with _prompts_of(hidden_states):
            return of_runner(self, hidden_states, *given)

    def compute_prompt_logprobs(self: Any, logits_fn: Any, hidden_states: torch.Tensor, *given: Any) -> Any:
        with _prompts_of(hidden_states):
            return of_worker(self, logits_fn, hidden_states, *given)

    def compute_prompt_token_id_logprobs(
        self: Any, logits_fn: Any, hidden_states: torch.Tensor, *given: Any
    ) -> Any:
        with _prompts_of(hidden_states):
            return of_token_ids(self, logits_fn, hidden_states, *given)

    setattr(get_prompt_logprobs_dict, _MARK, True)
    GPUModelRunner._get_prompt_logprobs_dict = get_prompt_logprobs_dict
    PromptLogprobsWorker.compute_prompt_logprobs = compute_prompt_logprobs
    PromptLogprobsWorker.compute_prompt_token_id_logprobs = compute_prompt_token_id_logprobs


@contextmanager
def _prompts_of(hidden_states: torch.Tensor) -> Iterator[None]:
    _steps.append(hidden_states)
    try:
        yield
    finally:
        _steps.pop()


def compute_logits_of_prompts(model: torch.nn.Module, routes: StepRoutes) -> None:
    """Make ``model`` compute logits of prompts by ``routes`` of their tokens, not of samples."""
    inner = model.compute_logits

    def compute_logits(hidden_states: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor | None:
        if not _steps:
            return inner(hidden_states, *given, **named)
        parts = []
        for part in hidden_states.split(_MOST_ROWS):
            with routes.of_prompts(_first_row(part, _steps[-1]), part.shape[0]):
                parts.append(inner(part, *given, **named))
        return parts[0] if len(parts) == 1 or parts[0] is None else torch.cat(parts)

    model.compute_logits = compute_logits


class _NoAdapters:
    """Stand-in for the kernels of adapters, which adds nothing to logits."""

    def add_lora_logits(self, y: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        return y


@contextmanager
def adapters_of_samples_only(processor: Any) -> Iterator[None]:
    """Keep adapters of the output layer out of logits of prompts, whose rows are not those of their mapping.

    iServe serves no adapter that has any; vLLM would launch its kernel for the rows of samples all the same.
    """
    if not _steps or not hasattr(processor, "lora_a_stacked"):
        yield
        return
    kernels, processor.punica_wrapper = processor.punica_wrapper, _NoAdapters()
    try:
        yield
    finally:
        processor.punica_wrapper = kernels


def _first_row(part: torch.Tensor, whole: torch.Tensor) -> int:
    """Return the row of ``whole`` at which ``part``, a view of some of its rows, begins.

    Raises:
        RuntimeError: it is no such view, so that its rows are of no known tokens.
    """
    first, rest = divmod(part.data_ptr() - whole.data_ptr(), whole.stride(0) * whole.element_size())
    if rest or first < 0 or first + part.shape[0] > whole.shape[0]:
        raise RuntimeError(
            "logits of prompts are asked for rows that are none of the step; ask for no logprobs of them"
        )
    return int(first)
