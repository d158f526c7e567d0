"""Bytes of vLLM's cache for models whose layers keep different things."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from daemon.engines.base import WorkerLimits
from daemon.engines.vllm.cache import kv_cache_bytes
from fingerprint.families import read_spec
from fingerprint.model_spec import LayerShape
from tests.daemon.engines.vllm_worker_spec import GIB, LLAMA_8B, worker


class TestLayersThatKeepOtherThings:
    """100 sequences of 41 tokens, 16 bits; by hand after vLLM's grouping and page sizes."""

    ATTENTION = LayerShape(mixer="attention", params=1, linear_params=1, kv_elements=2048)
    LIMITS = WorkerLimits(
        max_batch=100, max_batched_tokens=8192, max_context_tokens=41, kv_tokens=4100, memory_bytes_per_device=GIB
    )

    def bytes_of(
        self, shapes: tuple[LayerShape, ...], order: tuple[int, ...], *, tp: int = 1, **sizes: int
    ) -> int:
        model = replace(
            read_spec(LLAMA_8B), layer_shapes=shapes, layer_shape_indexes=order, num_layers=len(order), **sizes
        )
        return kv_cache_bytes(worker(Path("/"), layers=(len(order),), limits=self.LIMITS, tp=tp), model)

    def test_a_latent_is_whole_on_every_rank(self) -> None:
        latent = replace(self.ATTENTION, kv_elements=576)
        dense_first = (latent, replace(latent, params=9))  # one cache, however the layers differ otherwise
        for tp in (1, 4):
            found = self.bytes_of(dense_first, (0, 1, 1, 1), tp=tp, num_kv_heads=1, kv_head_elements=576)
            assert found == (1 + math.ceil(4100 / 64) + 100) * 4 * 64 * 576 * 2

    def test_a_block_is_as_large_as_the_largest_state(self) -> None:
        """Three states to one attention: 1,097,728 bytes are 268 tokens of 4,096, so blocks are of 272."""
        state = replace(self.ATTENTION, mixer="gated delta", kv_elements=0, state_bytes=1_097_728)
        page, attention = 272 * 4096, math.ceil(4100 / 272) + 100
        assert self.bytes_of((state, self.ATTENTION), (0, 0, 0, 1) * 4) == (1 + 3 * 100 + attention) * 4 * page

    def test_ranks_divide_states_and_heads(self) -> None:
        state = replace(self.ATTENTION, mixer="gated delta", kv_elements=0, state_bytes=1_097_728)
        alone, split = (self.bytes_of((state, self.ATTENTION), (0, 0, 0, 1) * 4, tp=tp) for tp in (1, 4))
        assert split == alone / 4

    def test_a_layer_may_keep_both(self) -> None:
        both = replace(self.ATTENTION, mixer="mamba2 and attention", state_bytes=533_504)
        page = 144 * 4096  # 130.25 tokens, in blocks of 16
        assert self.bytes_of((both,), (0, 0)) == (1 + math.ceil(4100 / 144) + 100 + 100) * 2 * page

    def test_layers_that_keep_half_as_much_have_twice_the_tokens_in_a_block(self) -> None:
        half = replace(self.ATTENTION, kv_elements=1024)
        found = self.bytes_of((self.ATTENTION, half), (0, 1))
        assert found == (1 + (257 + 100) + (129 + 100)) * 16 * 4096

    def test_states_alone(self) -> None:
        state = replace(self.ATTENTION, mixer="mamba2", kv_elements=0, state_bytes=2_158_592)
        assert self.bytes_of((state,), (0,) * 64) == 101 * 64 * 2_158_592
