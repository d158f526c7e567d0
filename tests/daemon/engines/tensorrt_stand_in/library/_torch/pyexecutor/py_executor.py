"""``tensorrt_llm._torch.pyexecutor.py_executor``: the overlapped loop, in which a step is read one step later."""

import os
import signal
from types import SimpleNamespace

import torch
from tensorrt_llm import costs


class LlmRequest:
    def __init__(self, length, tokens):
        self.length, self.left = length, tokens
        self.context_current_position, self.context_chunk_size = 0, 0
        self.max_beam_num_tokens = length
        self.py_batch_idx, self.is_dummy = None, False

    @property
    def in_context(self):
        return self.context_current_position < self.length


class PyExecutor:
    def __init__(self, resource_manager, model_engine, rank, world, behaviour):
        self.resource_manager, self.model_engine = resource_manager, model_engine
        self.dist, self._behaviour = SimpleNamespace(rank=rank, world_size=world), behaviour
        self._is_warmup = True
        self.model_engine.warmup()
        self.is_warmup = False

    @property
    def is_warmup(self):
        return self._is_warmup

    @is_warmup.setter
    def is_warmup(self, value):
        self._is_warmup = value

    def generate(self, lengths, tokens):
        behaviour = self._behaviour
        if len(lengths) >= behaviour.get("dies_at_batch", 10**9):
            os.kill(os.getpid(), signal.SIGKILL)
        if sum(lengths) >= behaviour.get("no_memory_at_tokens", 10**9) and not self.is_warmup:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        stats = self.resource_manager.resource_managers.popitem()
        self.resource_manager.resource_managers[stats[0]] = stats[1]
        kv = stats[1].get_kv_cache_stats()
        needed = sum(-(-(length + tokens + 1) // kv.tokens_per_block) for length in lengths)
        assert needed <= kv.max_num_blocks, f"{needed} blocks are needed of {kv.max_num_blocks}"
        requests = [LlmRequest(length, tokens) for length in lengths]
        previous = None
        while batch := self._schedule(requests):
            outputs = self._forward_step(batch, previous and "on the device")
            if previous:
                self._update_requests(previous)
            self._sample_async(batch, outputs)
            self._update_request_states(batch)
            previous = batch
        self._update_requests(previous)
        return [tokens] * len(lengths)

    def _schedule(self, requests):
        args = self.model_engine.args
        active = [request for request in requests if request.left][: args.max_batch_size]
        decoding = [request for request in active if not request.in_context]
        room, prompts = args.max_num_tokens - len(decoding), []
        for request in active:
            if request.in_context and room > 0:
                request.context_chunk_size = min(room, request.length - request.context_current_position)
                room -= request.context_chunk_size
                prompts.append(request)
        return SimpleNamespace(context_requests=prompts, generation_requests=decoding) if active else None

    def _forward_step(self, scheduled_requests, new_tensors_device=None, num_accepted_tokens_device=None):
        torch.kernel(costs.LEAD_S)
        pairs = sum(
            r.context_chunk_size * r.context_current_position
            + r.context_chunk_size * (r.context_chunk_size + 1) // 2
            for r in scheduled_requests.context_requests
        ) + sum(r.length + r.made for r in scheduled_requests.generation_requests)
        return self.model_engine.forward(scheduled_requests, pairs)

    def _forward_step_inter_pp(self, scheduled_batch):
        self._forward_step(scheduled_batch)

    def _sample_async(self, scheduled_batch, batch_outputs):
        torch.kernel(costs.TAIL_S)

    def _update_request_states(self, batch):
        """Update what is known without reading the tokens: positions, and which requests end with the next."""
        batch.sampled = list(batch.generation_requests)
        for request in batch.context_requests:
            request.context_current_position += request.context_chunk_size
            if not request.in_context:
                batch.sampled.append(request)
        for request in batch.sampled:
            request.made = getattr(request, "made", 0) + 1
            request.left -= 1

    def _update_requests(self, batch):
        """``counts_otherwise``: as a release would that reads a token later."""
        for request in batch.sampled:
            request.max_beam_num_tokens += 0 if self._behaviour.get("counts_otherwise") else 1
