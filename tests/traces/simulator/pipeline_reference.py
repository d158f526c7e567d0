"""A pipeline step by step and stage by stage: the truth that ``traces.simulator.pipelined`` shortens.

Every step passes every stage, in the order in which steps entered the first one (a permutation flow shop). Nothing
is summed in closed form, nothing is held up by rule: a batch waits where a stage is not free.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from traces.request import Request
from traces.simulator.step_model import StepModel


@dataclass
class _Sequence:
    row: int
    input_tokens: int
    left: int  # output tokens left
    cached: int = 0
    chunk: int = 0  # prompt tokens in the step under way


@dataclass
class _Batch:
    sequences: list[_Sequence] = field(default_factory=list)
    exit_s: float = math.inf


@dataclass(frozen=True)
class Flow:
    """Flow of requests: when they had their tokens, and how long each stage was at work."""

    first_s: list[float]
    last_s: list[float]
    stage_work_s: list[float]


def flow_shop(
    requests: Sequence[Request], steps: StepModel, shares: Sequence[float], *, unbatched: bool = False
) -> Flow:
    """All requests, in the order of their arrival, by as many batches as there are stages; ``unbatched``: each of
    one request at most."""
    flow = Flow([math.nan] * len(requests), [math.nan] * len(requests), [0.0] * len(shares))
    free_s = [0.0] * len(shares)
    returned: list[_Batch] = []
    flying: list[_Batch] = []
    slots, arrived, waiting, now_s = steps.limits.max_batch, 0, [], 0.0
    if unbatched:
        slots = len(shares)
    while True:
        while arrived < len(requests) and requests[arrived].arrival_s <= now_s:
            request = requests[arrived]
            waiting.append(_Sequence(arrived, request.input_tokens, request.output_tokens))
            arrived += 1
        for batch in [b for b in flying if b.exit_s <= now_s]:
            flying.remove(batch)
            slots += _end_step(batch, flow, now_s)
            if batch.sequences:
                returned.append(batch)
        room = len(flying) + len(returned) < len(shares)
        if free_s[0] <= now_s and (returned or (room and waiting and slots)):
            batch = returned.pop(0) if returned else _Batch()
            room_here = 1 - len(batch.sequences) if unbatched else slots
            slots -= _fill(batch, waiting, room_here, steps.limits.max_batched_tokens)
            step_s, at_s = _step_s(batch, steps), now_s
            for stage, share in enumerate(shares):
                at_s = free_s[stage] = max(at_s, free_s[stage]) + share * step_s
                flow.stage_work_s[stage] += share * step_s
            batch.exit_s = at_s
            flying.append(batch)
            continue
        coming = [b.exit_s for b in flying]
        if arrived < len(requests):
            coming.append(requests[arrived].arrival_s)
        if returned or waiting:
            coming.append(free_s[0])
        coming = [t for t in coming if t > now_s]
        if not coming:
            return flow
        now_s = min(coming)


def _fill(batch: _Batch, waiting: list[_Sequence], slots: int, most: int) -> int:
    """Decoders first, then prompts in order: how many were admitted."""
    left, admitted = most - sum(s.cached >= s.input_tokens for s in batch.sequences), 0
    for sequence in batch.sequences:
        if sequence.cached < sequence.input_tokens:
            sequence.chunk = min(left, sequence.input_tokens - sequence.cached)
            left -= sequence.chunk
    while left and waiting and admitted < slots:
        sequence = waiting.pop(0)
        sequence.chunk = min(left, sequence.input_tokens)
        left -= sequence.chunk
        batch.sequences.append(sequence)
        admitted += 1
    return admitted


def _step_s(batch: _Batch, steps: StepModel) -> float:
    decoding = [s.cached + 1 for s in batch.sequences if s.cached >= s.input_tokens]
    mean = sum(decoding) / len(decoding) if decoding else 0.0
    tokens = sum(s.chunk for s in batch.sequences)
    if not tokens:
        return steps.decode_s(len(decoding), mean)
    attention_s = sum(steps.attention_s[s.cached + s.chunk] - steps.attention_s[s.cached] for s in batch.sequences)
    return steps.mixed_s(tokens, attention_s, len(decoding), mean)


def _end_step(batch: _Batch, flow: Flow, now_s: float) -> int:
    """End the batch's step and return how many have had their last token."""
    stay = []
    for sequence in batch.sequences:
        samples = sequence.cached + sequence.chunk >= sequence.input_tokens
        sequence.cached += sequence.chunk if sequence.chunk else int(samples)
        sequence.chunk = 0
        if samples:
            if math.isnan(flow.first_s[sequence.row]):
                flow.first_s[sequence.row] = now_s
            sequence.left -= 1
        if sequence.left:
            stay.append(sequence)
        else:
            flow.last_s[sequence.row] = now_s
    ended = len(batch.sequences) - len(stay)
    batch.sequences = stay
    return ended
