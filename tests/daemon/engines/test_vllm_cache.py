"""Bytes of vLLM's cache for models whose layers keep different things."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from daemon.engines.vllm.cache import kv_cache_bytes
from daemon.worker_spec import WorkerLimits
from fingerprint.config import KvFormat
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
        self,
        shapes: tuple[LayerShape, ...],
        order: tuple[int, ...],
        *,
        tp: int = 1,
        kv: KvFormat = KvFormat.BITS16,
        **sizes: Any,
    ) -> int:
        model = replace(
            read_spec(LLAMA_8B), layer_shapes=shapes, layer_shape_indexes=order, num_layers=len(order), **sizes
        )
        return kv_cache_bytes(worker(Path("/"), layers=(len(order),), limits=self.LIMITS, tp=tp, kv=kv), model)

    def test_a_latent_is_whole_on_every_rank(self) -> None:
        latent = replace(self.ATTENTION, kv_elements=576)
        dense_first = (latent, replace(latent, params=9))  # one cache, however the layers differ otherwise
        for tp in (1, 4):
            found = self.bytes_of(dense_first, (0, 1, 1, 1), tp=tp, num_kv_heads=1, kv_head_elements=576)
            assert found == (1 + math.ceil(4100 / 64) + 100) * 4 * 64 * 576 * 2

    def test_a_block_is_as_large_as_the_largest_state(self) -> None:
        """Three states to one attention: 1,097,728 bytes are 268 tokens of 4,096, so blocks are of 5 times 64.

        FlashInfer's gated delta rule keeps states at multiples of 64 tokens (``update_block_size_for_backend``);
        each sequence may have two of them, and one prompt a third (``MambaSpec.max_memory_usage_bytes``).
        """
        state = replace(self.ATTENTION, mixer="gated delta", kv_elements=0, state_bytes=1_097_728)
        page, attention = 320 * 4096, math.ceil(4100 / 320) + 100
        assert self.bytes_of((state, self.ATTENTION), (0, 0, 0, 1) * 4) == (1 + 3 * 201 + attention) * 4 * page

    def test_a_state_beside_a_latent_is_in_blocks_of_128(self) -> None:
        """1,097,728 bytes are 953 tokens of 1,152: vLLM takes blocks of 8 times 128 where a model has latents."""
        state = replace(self.ATTENTION, mixer="gated delta", kv_elements=0, state_bytes=1_097_728)
        latent = replace(self.ATTENTION, mixer="latent attention", kv_elements=576)
        found = self.bytes_of((state, latent), (0, 0, 0, 1) * 4, num_kv_heads=1, kv_head_elements=576)
        assert found == (1 + 3 * 201 + math.ceil(4100 / 1024) + 100) * 4 * 1024 * 1152

    def test_one_request_starts(self) -> None:
        """vLLM refuses a cache that does not hold one request: three states of each group, and its own block.

        ``_check_enough_kv_cache_memory`` of 0.33; with one state for each sequence a hybrid model did not start.
        """
        state = replace(self.ATTENTION, mixer="gated delta", kv_elements=0, state_bytes=1_097_728)
        one = replace(self.LIMITS, max_batch=1, max_context_tokens=640, kv_tokens=640)
        model = replace(
            read_spec(LLAMA_8B),
            layer_shapes=(state, self.ATTENTION),
            layer_shape_indexes=(0, 0, 0, 1) * 4,
            num_layers=16,
        )
        given = kv_cache_bytes(worker(Path("/"), layers=(16,), limits=one), model)
        page = 320 * 4096
        needed_blocks = 1 + 3 * 3 + math.ceil(640 / 320)
        assert given >= needed_blocks * 4 * page

    def test_ranks_divide_states_and_heads(self) -> None:
        state = replace(self.ATTENTION, mixer="gated delta", kv_elements=0, state_bytes=1_097_728)
        alone, split = (self.bytes_of((state, self.ATTENTION), (0, 0, 0, 1) * 4, tp=tp) for tp in (1, 4))
        assert split == alone / 4

    def test_a_layer_may_keep_both(self) -> None:
        both = replace(self.ATTENTION, mixer="mamba2 and attention", state_bytes=533_504)
        page = 144 * 4096  # 130.25 tokens, in blocks of 16
        assert self.bytes_of((both,), (0, 0)) == (1 + math.ceil(4100 / 144) + 100 + 201) * 2 * page

    def test_layers_that_keep_half_as_much_have_half_a_page(self) -> None:
        """A single table of blocks serves all layers, whose pages differ (``UniformTypeKVCacheSpecs``)."""
        half = replace(self.ATTENTION, kv_elements=1024)
        found = self.bytes_of((self.ATTENTION, half), (0, 1))
        assert found == (1 + 257 + 100) * 16 * (4096 + 2048)

    def test_layers_with_a_window_that_keep_half_as_much_have_twice_the_tokens_in_a_block(self) -> None:
        half = replace(self.ATTENTION, kv_elements=1024)
        found = self.bytes_of((self.ATTENTION, half), (0, 1), layer_windows=(None, 4096))
        assert found == (1 + (257 + 100) + (129 + 2 * 100)) * 16 * 4096

    def test_the_keys_of_a_sparse_attention_are_pages_of_their_own(self) -> None:
        """Hand-computed for GLM-5: 576 elements and 132 bytes a token, in fp8 656 and 132.

        ``DeepseekV32IndexerCache`` (128 of fp8, one float32 scale), ``MLAAttention.get_kv_cache_spec`` (656).
        """
        sparse = replace(self.ATTENTION, mixer="latent attention", kv_elements=642, kv_fp8_bytes=788)
        for kv, token_bytes in ((KvFormat.BITS16, 1284), (KvFormat.FP8, 788)):
            found = self.bytes_of((sparse,), (0, 0), num_kv_heads=1, kv_head_elements=642, kv=kv)
            assert found == (1 + 65 + 100) * 2 * 64 * token_bytes

    def test_states_alone(self) -> None:
        state = replace(self.ATTENTION, mixer="mamba2", kv_elements=0, state_bytes=2_158_592)
        assert self.bytes_of((state,), (0,) * 64) == 101 * 64 * 2_158_592
