"""Cases of logits of prompts' rows, in vLLM's own code of both model runners."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.daemon.engines.vllm_delta_cases.tiny_model import (
    VOCABULARY,
    case,
    changed_model,
    close,
    request,
    run,
    tiny_model,
    write_delta,
)


@case
def logprobs_of_prompts_have_the_output_layer_of_their_own_delta() -> None:
    """Compare logits by both model runners' own code, in a step whose samples are other rows than the prompts'."""
    for is_tied in (False, True):
        settings: dict[str, Any] = {"is_tied": True, "output_format": None} if is_tied else {}
        with tempfile.TemporaryDirectory() as place:
            leave = ("lm_head",) if is_tied else ()
            folders = [write_delta(Path(place) / str(seed), seed, leave=leave) for seed in (1, 2)]
            requests = [request(i + 1, folder) for i, folder in enumerate(folders)]
            tiny = tiny_model(**settings)
            tokens = torch.randint(0, VOCABULARY, (15,))
            ids, prompts = [2, 1, *[0] * 4, *[1] * 5, *[2] * 4], {"a": (2, 6), "b": (6, 11), "c": (11, 15)}
            used = set(requests)
            tiny.runner._set_active_loras((2, 1, 0, 1), tuple(ids), used)  # "c" goes on in a later step
            hidden = tiny.model(tokens)
            sampled = tiny.model.compute_logits(hidden[torch.tensor([0, 1, 5, 10])])
            assert tiny.manager.runtime.routes.logits_route is not None
            found = {True: prompt_scores(tiny.model, hidden, tokens, prompts)}
            found[False] = prompt_token_scores(tiny.model, hidden, prompts)
            assert torch.equal(tiny.model.compute_logits(hidden[torch.tensor([0, 1, 5, 10])]), sampled)
            for name, (first, end) in prompts.items():
                number = ids[first]
                changed = changed_model(folders[number - 1], **settings) if number else tiny_model(**settings)
                logits = run(changed, [0] * (end - first), [], tokens[first:end])
                for from_first_runner, want in (
                    (True, logits[:-1].gather(1, tokens[first + 1 : end, None])),
                    (False, logits[:-1, :10]),
                ):
                    close(found[from_first_runner][name], want)
                    base = run(tiny_model(**settings), [0] * (end - first), [], tokens[first:end])[:-1, :10]
                    if number and not from_first_runner:
                        assert float((base - want).norm() / want.norm()) > 0.2


def prompt_scores(
    model: torch.nn.Module, hidden: torch.Tensor, tokens: torch.Tensor, prompts: Mapping[str, tuple[int, int]]
) -> dict[str, torch.Tensor]:
    """Return the logits of each prompt's next tokens, by the code of vLLM's first model runner."""
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    starts = np.array([*(first for first, _ in prompts.values()), len(hidden)])
    state = SimpleNamespace(
        num_prompt_logprobs=dict.fromkeys(prompts, 0),
        requests={
            name: SimpleNamespace(
                prompt_token_ids=tokens[first:end].tolist(),
                in_progress_prompt_logprobs_cpu=None,
                num_computed_tokens=0,
            )
            for name, (first, end) in prompts.items()
        },
        device=torch.device("cpu"),
        input_batch=SimpleNamespace(req_id_to_index={name: at for at, name in enumerate(prompts)}),
        query_start_loc=SimpleNamespace(np=starts),
        model=model,
        model_config=SimpleNamespace(logprobs_mode="raw_logits"),
        sampler=Sampler(),
        _sync_device=lambda: None,
    )
    scheduled = {name: end - first for name, (first, end) in prompts.items()}
    found = GPUModelRunner._get_prompt_logprobs_dict(state, hidden, scheduled)
    return {name: one.logprobs[:, :1] for name, one in found.items()}


def prompt_token_scores(
    model: torch.nn.Module, hidden: torch.Tensor, prompts: Mapping[str, tuple[int, int]]
) -> dict[str, torch.Tensor]:
    """Return the logits of the first ten tokens at each place of a prompt, by vLLM's second model runner."""
    from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker

    worker, lengths = PromptLogprobsWorker(8, torch.device("cpu"), "raw_logits"), []
    for at, (name, (first, end)) in enumerate(prompts.items()):
        asked = np.tile(np.arange(10), (end - first - 1, 1))
        parameters = SimpleNamespace(
            prompt_logprobs=None, prompt_logprob_token_ids=asked, prompt_logprob_start=None
        )
        worker.add_request(name, at, parameters)
        lengths.append(end - first)
    batch = SimpleNamespace(
        req_ids=list(prompts),
        idx_mapping_np=np.arange(len(prompts)),
        num_computed_prefill_tokens_np=np.zeros(len(prompts), dtype=int),
        num_scheduled_tokens=np.array(lengths),
        prefill_len_np=np.array(lengths),
        query_start_loc_np=np.array([*(first for first, _ in prompts.values()), len(hidden)]),
    )
    return worker.compute_prompt_token_id_logprobs(model.compute_logits, hidden, batch, np.array(lengths))
