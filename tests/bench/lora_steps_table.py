"""Recordings of vLLM's adapter slots (``lora_steps``), and their tables: medians, and what plans say of them."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fingerprint.config import DeploymentConfig
from fingerprint.estimators.adapter_slots import ADDED_ERROR, added_prompt_share, added_step_s
from fingerprint.families import read_spec
from fingerprint.lora import slot_bytes

__all__ = ["RANK", "Burst", "Load", "LoraSteps", "Memory", "Prompt", "config_of", "table"]

RANK = 64  # of the slots


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Memory and start of a worker."""

    slots: int
    weights_gib: float  # slots included
    graphs_gib: float
    graphs_s: float
    kv_tokens: int  # that it has room for
    ready_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Burst:
    """Equal requests at once, of the base or of adapters in turn."""

    slots: int
    active: int  # adapters; 0: the base alone
    batch: int
    decode_s: float  # of the call with all tokens less that with one
    tokens: int  # of each request, after its first

    @property
    def step_s(self) -> float:
        return self.decode_s / self.tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """Equal prompts at once, with one token of answer."""

    slots: int
    requests: int
    tokens: int
    adapter: bool
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """Load of an adapter by HTTP while requests of the base decode."""

    slots: int
    rank: int
    load_s: float
    longest_gap_s: float  # between tokens of one of these requests, of all gaps that touch the load
    usual_gap_s: float  # the longest one that does not
    in_background: bool = False  # whether a thread of the worker reads it
    plug_in: bool = False  # whether our plug-in reads its file; with such a thread it does
    median_gap_s: float = 0.0  # of all gaps; 0: not kept
    calls: int = 1  # until it was loaded
    long_gaps: tuple[tuple[float, float], ...] = ()  # the five longest: seconds from the request, and of the gap


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraSteps:
    """Recording of one model."""

    model: str
    date: str
    machine: str
    versions: str
    memory: tuple[Memory, ...] = ()
    bursts: tuple[Burst, ...] = ()
    prompts: tuple[Prompt, ...] = ()
    loads: tuple[Load, ...] = ()


def config_of(slots: int) -> DeploymentConfig:
    return DeploymentConfig(engine="vllm", adapter_slots=slots, adapter_rank=RANK if slots else 0)


def table(found: LoraSteps, config: Mapping[str, Any] | None) -> str:
    """Return what was measured as Markdown tables: medians."""
    parts = (
        _steps(found),
        _prompt_times(found),
        _estimated(found, config),
        _load_times(found),
        _bytes(found, config),
    )
    return "\n\n".join(parts)


def _rows(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---:"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _steps(found: LoraSteps) -> str:
    rows, times_s = [], _medians_of_steps(found)
    for (batch, slots, active), step_s in times_s.items():
        plain_s = times_s.get((batch, 0, 0))
        over = f"{step_s / plain_s:.2f}" if plain_s else ""
        rows.append((str(batch), str(slots), str(active), f"{1e3 * step_s:.2f} ms", over))
    return _rows(("sequences", "slots", "adapters", "step", "over one without slots"), rows)


def _prompt_times(found: LoraSteps) -> str:
    rows = [
        (f"{requests} x {tokens}", str(slots), "yes" if adapter else "no", f"{1e3 * middle_s:.1f} ms")
        for (requests, tokens, slots, adapter), middle_s in _medians_of_prompts(found).items()
    ]
    return _rows(("prompts", "slots", "adapter", "time"), rows)


def _estimated(found: LoraSteps, config: Mapping[str, Any] | None) -> str:
    """Return what adapters add to steps and prompts of the worker without slots, next to what plans say of it."""
    rows = []
    step_s, prompt_s = _medians_of_steps(found), _medians_of_prompts(found)
    for (batch, slots, active), seconds in step_s.items():
        plain_s = step_s.get((batch, 0, 0))
        if config is not None and active and plain_s is not None:
            rows.append(
                _compared(
                    f"step of {batch}, adapters {active}, slots {slots}",
                    seconds - plain_s,
                    added_step_s(read_spec(dict(config)).num_layers, batch, active, slots),
                )
            )
    for (requests, tokens, slots, has_adapter), seconds in prompt_s.items():
        plain_s = prompt_s.get((requests, tokens, 0, False))
        if has_adapter and plain_s is not None:
            what = f"prompts of {requests} x {tokens}, slots {slots}"
            rows.append(_compared(what, seconds - plain_s, added_prompt_share(slots) * plain_s))
    return _rows(("time that adapters add", "measured", "estimated", "its interval", "holds it"), rows)


def _compared(what: str, measured_s: float, estimated_s: float) -> tuple[str, ...]:
    low_s, high_s = estimated_s / ADDED_ERROR, estimated_s * ADDED_ERROR
    interval = f"{1e3 * low_s:.2f} to {1e3 * high_s:.2f} ms"
    holds = "yes" if low_s <= measured_s <= high_s else "no"
    return what, f"{1e3 * measured_s:.2f} ms", f"{1e3 * estimated_s:.2f} ms", interval, holds


def _medians_of_steps(found: LoraSteps) -> dict[tuple[int, int, int], float]:
    """Return the time of a step by sequences, slots and adapters."""
    times_s: dict[tuple[int, int, int], list[float]] = defaultdict(list)
    for one in found.bursts:
        times_s[one.batch, one.slots, one.active].append(one.step_s)
    return {case: statistics.median(own) for case, own in sorted(times_s.items())}


def _medians_of_prompts(found: LoraSteps) -> dict[tuple[int, int, int, bool], float]:
    """Return the time of prompts by requests, tokens, slots, and whether they have adapters."""
    times_s: dict[tuple[int, int, int, bool], list[float]] = defaultdict(list)
    for one in found.prompts:
        times_s[one.requests, one.tokens, one.slots, one.adapter].append(one.seconds)
    return {case: statistics.median(own) for case, own in sorted(times_s.items())}


def _load_times(found: LoraSteps) -> str:
    cases = sorted({(one.in_background, one.plug_in, one.slots, one.rank) for one in found.loads})
    rows = []
    for in_background, plug_in, *case in cases:
        own = [
            one
            for one in found.loads
            if (one.in_background, one.plug_in, one.slots, one.rank) == (in_background, plug_in, *case)
        ]
        columns = ([getattr(one, name) for one in own] for name in ("load_s", "longest_gap_s", "usual_gap_s"))
        row = (*map(str, case), *(f"{1e3 * statistics.median(column):.0f} ms" for column in columns))
        steps = [one.longest_gap_s / one.median_gap_s for one in own if one.median_gap_s]
        way = ", a thread reads" if in_background else ", our plug-in reads" if plug_in else ""
        rows.append((*row, f"{max(steps, default=0):.2f}{way}"))
    head = ("slots", "rank", "load", "longest gap meanwhile", "longest gap else")
    if not any(one.median_gap_s for one in found.loads):  # of runs that kept none
        return _rows(head, [row[: len(head)] for row in rows])
    return _rows((*head, "longest of all, in medians"), rows)


def _bytes(found: LoraSteps, config: Mapping[str, Any] | None) -> str:
    spec = None if config is None else read_spec(dict(config))
    plain = next((one.weights_gib for one in found.memory if not one.slots), None)
    rows = []
    for one in found.memory:
        added = f"{one.weights_gib - plain:.2f}" if one.slots and plain is not None else ""
        counted = ""
        if spec is not None and one.slots:
            counted = f"{one.slots * slot_bytes(spec, config_of(one.slots), spec.num_layers) / 2**30:.2f}"
        measured = (f"{one.weights_gib:.2f}", added, counted, f"{one.graphs_gib:.2f}", f"{one.graphs_s:.0f} s")
        rows.append((str(one.slots), *measured, str(one.kv_tokens), f"{one.ready_s:.0f} s"))
    head = (
        "slots",
        "weights, GiB",
        "of these slots",
        "counted",
        "graphs, GiB",
        "captured in",
        "KV tokens",
        "ready",
    )
    return _rows(head, rows)
