"""Engines as estimates and simulations know them: how each one schedules steps and keeps its KV cache.

What an engine runs is its ``EngineCapabilities``. These traits hold for every release that iServe knows and need
no installation, so that the pure packages ask for them by the engine's name. A new engine gets one line in
:data:`TRAITS`: what differs from the defaults, and its place in the order of preference. Help and REST schema name
the engines from there, since a help loads no adapters.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from types import MappingProxyType

__all__ = [
    "GRAPH_TOKENS",
    "TRAITS",
    "EngineTraits",
    "KvCache",
    "graph_sizes",
    "largest_graph",
    "preference",
    "traits_of",
]


class KvCache(StrEnum):
    """Layout of the memory that keeps keys and values."""

    SLOTS = "slots"  # of the longest request, one for each sequence
    PAGES = "pages"  # shared by all requests
    GROUPED_BLOCKS = "grouped-blocks"  # pages that groups of layers share too (``fingerprint.cache_blocks``)


GRAPH_TOKENS = 512
"""Tokens of the largest CUDA graph of vLLM on a dense model, in deployments and profiles. Its own default is twice
the sequences, 512 at most: with few of them a prompt of a hundred tokens is beyond it, and each of its kernels
waits for the host (docs/decisions/0017)."""

_MIXTURE_GRAPH_TOKENS = 4096  # whose layers are many short kernels: the host is the slower one up to there


def largest_graph(engine: str, *, is_mixture: bool) -> int:
    """Return the tokens of the largest CUDA graph with which an engine is launched."""
    return _MIXTURE_GRAPH_TOKENS if is_mixture and traits_of(engine).pads_decode_steps else GRAPH_TOKENS


@cache
def graph_sizes(largest: int) -> tuple[int, ...]:
    """Return the tokens of vLLM's CUDA graphs: its own up to 512, then every 128 to 2,048, every 256 beyond.

    A step is computed by the smallest one that holds it; ``largest`` is the last, whatever its size.
    """
    own = (1, 2, 4, *range(8, 256, 8), *range(256, GRAPH_TOKENS + 1, 16))
    sizes = (*own, *range(640, 2048 + 1, 128), *range(2304, largest, 256))
    return (*(size for size in sizes if size < largest), largest)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineTraits:
    """Traits of one engine, by which its estimates differ from another's.

    Attributes:
        title: the name in a sentence; empty: that of the engine.
        overlaps_host: whether the host prepares a step while the device runs the one before, by default.
        schedules_ahead: whether the content of a step is settled before the one before has ended. vLLM's core
            holds two steps (``step_with_batch_queue``), its pipelines hold one per stage and one more; other
            engines were not looked into.
        fills_stages: whether as many batches are in flight as there are pipeline stages.
        preempts: whether a request is admitted when the KV of its prompt fits, and the latest is preempted when no
            more is free. Else KV for the whole answer is there from its admission on: TensorRT-LLM is launched
            with ``GUARANTEED_NO_EVICT``, slots have it anyway; other engines were not looked into.
        drafts_ngrams: whether it is launched with n-gram drafts where a plan asks for them.
        caches_prefixes: whether it keeps the KV of prompts for later ones that begin alike, as it is launched.
        repacks_weights: whether it holds a quantized checkpoint's matrices as its kernels want them
            (``fingerprint.loaded_bytes``); else as its files have them.
        loads_on_gpu: whether all loaded adapters lie in the GPU's memory; else those that take part in a step.
        serves_deltas: whether it serves deltas of full fine-tunes next to their base, on some release of it.
        delta_formats: whether its slots hold deltas of one format, which a deployment names; else those of any
            format up to a size.
        slots_for_vocabulary: whether an adapter slot has room for updates of embeddings and output layer, which no
            variant has: vLLM's classes mostly do (decision 42).
        pages_adapters: whether slots are pages for adapters of all layers of the model, with each matrix as large
            as the largest, and each adapter that was read stays on the GPU next to them (TensorRT-LLM 1.3.0rc3).
        times_adapters: whether what adapters add to a step was recorded on some release of it.
        loads_stop_steps: whether it decodes nothing while it loads a variant; else a load delays the requests that
            wait for it alone.
        profiles_variants: whether its profiling worker serves variants: ``fingerprint.variant_profile``, or
            ``fingerprint.variant_steps`` on a release that our step timer knows.
        short_steps: whether steps of 2,048 tokens at most were measured to serve no slower than those of 8,192
            (decision 43).
        pads_decode_steps: whether a decode step is computed by the smallest captured graph that holds it
            (:meth:`rows_of_graph`). The sizes are those that vLLM captures as iServe launches it.
        startup_s: seconds from launch until it serves, as simulations take it where they are given none; 0: none
            is known. That of vLLM is a round number below all that were measured: first starts of 0.6B and 8B
            models on an H200 took 84 to 145 s (decision 25).
    """

    title: str = ""
    kv_cache: KvCache = KvCache.PAGES
    overlaps_host: bool = False
    schedules_ahead: bool = False
    fills_stages: bool = True
    preempts: bool = False
    caches_prefixes: bool = False
    drafts_ngrams: bool = False
    repacks_weights: bool = False
    loads_on_gpu: bool = False
    serves_deltas: bool = False
    delta_formats: bool = False
    slots_for_vocabulary: bool = False
    pages_adapters: bool = False
    times_adapters: bool = False
    loads_stop_steps: bool = False
    profiles_variants: bool = False
    short_steps: bool = False
    pads_decode_steps: bool = False
    startup_s: float = 0.0

    @property
    def holds_deltas_by_size(self) -> bool:
        """True where its slots hold deltas of any format up to a size."""
        return self.serves_deltas and not self.delta_formats

    def rows_of_graph(self, sequences: int, *, largest: int = GRAPH_TOKENS) -> int:
        """Return how many rows the graph has that computes a decode step.

        Args:
            largest: tokens of the largest graph; a step of more is not padded.
        """
        if not self.pads_decode_steps or sequences > largest:
            return sequences
        sizes = graph_sizes(largest)
        return sizes[bisect_left(sizes, sequences)]

    @property
    def has_slots(self) -> bool:
        return self.kv_cache is KvCache.SLOTS

    @property
    def has_grouped_blocks(self) -> bool:
        return self.kv_cache is KvCache.GROUPED_BLOCKS


# In the order in which a deployment prefers them.
TRAITS: Mapping[str, EngineTraits] = MappingProxyType(
    {
        "vllm": EngineTraits(
            title="vLLM",
            kv_cache=KvCache.GROUPED_BLOCKS,
            overlaps_host=True,
            schedules_ahead=True,
            preempts=True,
            caches_prefixes=True,
            drafts_ngrams=True,
            repacks_weights=True,
            serves_deltas=True,
            delta_formats=True,
            slots_for_vocabulary=True,
            times_adapters=True,
            loads_stop_steps=True,
            profiles_variants=True,
            short_steps=True,
            pads_decode_steps=True,
            startup_s=60.0,
        ),
        "tensorrt-llm": EngineTraits(
            title="TensorRT-LLM", overlaps_host=True, caches_prefixes=True, pages_adapters=True
        ),
        "torch": EngineTraits(
            title="the embedded engine",
            kv_cache=KvCache.SLOTS,
            fills_stages=False,
            loads_on_gpu=True,
            serves_deltas=True,
            profiles_variants=True,
        ),
    }
)
_DEFAULT = EngineTraits()
_ORDER = tuple(TRAITS)


def traits_of(engine: str) -> EngineTraits:
    """Return the traits of ``engine``; the defaults for one that is not listed."""
    return TRAITS.get(engine, _DEFAULT)


def preference(engine: str) -> int:
    """Return the place of ``engine`` in the order of preference; those that are not listed share the last."""
    return _ORDER.index(engine) if engine in TRAITS else len(_ORDER)
