"""Checks of a profile: impossible answers of an engine, depths whose times contradict each other, and conditions.

An engine is another process, and a profile is kept: what is wrong in it would be wrong in every estimate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields

from fingerprint.engines import largest_graph
from fingerprint.errors import EngineError
from fingerprint.measurements import ExpertCount, Profile, RankMemory, RunReading, StepReading, TimingPoint

__all__ = [
    "caveats",
    "check_ranks",
    "check_runs",
    "contradiction",
    "deployed_graph_tokens",
    "graphs_caveat",
    "routing_caveat",
]


def check_runs(runs: Sequence[RunReading], *, batch: int, input_tokens: int) -> None:
    """Raises EngineError: there is none, or one whose times or steps cannot be those of such a burst."""
    at = f"batch {batch}, {input_tokens} in"
    if not runs:
        raise EngineError(f"no run at {at}")
    for run in runs:
        if not _is_time(run.e2e_s) or run.e2e_s == 0 or not all(map(_is_step, run.steps)):
            raise EngineError(f"a run at {at} was answered with times or counts that cannot be")
        prompts = sum(step.prefill_tokens for step in run.steps)
        # A step may take the last token of a prompt by itself, and tells it as one that is generated.
        if not batch * input_tokens - len(run.steps) <= prompts <= batch * input_tokens or prompts < 1:
            raise EngineError(
                f"the steps of a run at {at} computed {prompts} tokens of {batch * input_tokens} in its prompts: "
                "not all of them were recorded, or some were computed again"
            )


def _is_step(step: StepReading) -> bool:
    times = (step.gap_s, step.lead_s, step.forward_s, step.tail_s)
    counts = 1 <= step.sequences <= step.tokens and 0 <= step.prefill_tokens <= step.tokens
    return counts and all(map(_is_time, times)) and step.forward_s > 0


def _is_time(seconds: float) -> bool:
    return 0 <= seconds < math.inf


def check_ranks(ranks: Sequence[RankMemory], *, pp: int) -> None:
    """Raises EngineError: not a rank of every stage, or bytes that cannot be."""
    if {rank.stage for rank in ranks} != set(range(pp)):
        raise EngineError(
            f"memory was answered for stages {sorted({rank.stage for rank in ranks})}, there are {pp}"
        )
    for rank in ranks:
        values = [(f.name, getattr(rank, f.name)) for f in fields(rank)]
        counts: list[tuple[str, float]] = [(name, value) for name, value in values if isinstance(value, int)]
        counts += [("layer_caches", min(cache.token_bytes, cache.state_bytes)) for cache in rank.layer_caches]
        wrong = [(name, count) for name, count in counts if not count >= (name == "weights_bytes")]
        if wrong:
            told = ", ".join(f"{name}={count}" for name, count in wrong)
            raise EngineError(f"memory of rank {rank.rank} was answered with what cannot be: {told}")


def contradiction(points: Sequence[TimingPoint]) -> str | None:
    """Return where a decode step of more layers took less time than one of fewer; None: nowhere.

    Repeated steps are compared, by the time of one repeat; unrepeated ones, each with its like, only where no
    batch was repeated at two depths: of several ranks each waits in its forward for the one that the host served
    last, which in a step of a layer or two can be most of the time and tells nothing of the layers.
    """
    repeated, others = _by_depth(points, repeated=True), _by_depth(points, repeated=False)
    compared = repeated if _tells(repeated) else others
    if not _tells(compared):  # of a model of two layers one depth is repeated, the other is the model
        compared = {at: repeated.get(at, {}) | others.get(at, {}) for at in repeated | others}
    for (batch, input_tokens), by_depth in compared.items():
        for fewer, more in zip(sorted(by_depth), sorted(by_depth)[1:], strict=False):
            if by_depth[more] <= by_depth[fewer]:
                return (
                    f"a step of {more} layers took {1e3 * by_depth[more]:.3f} ms, of {fewer} layers "
                    f"{1e3 * by_depth[fewer]:.3f} ms (batch {batch}, {input_tokens} in)"
                )
    return None


def _tells(steps: dict[tuple[int, int], dict[int, float]]) -> bool:
    return any(len(by_depth) > 1 for by_depth in steps.values())


def _by_depth(points: Sequence[TimingPoint], *, repeated: bool) -> dict[tuple[int, int], dict[int, float]]:
    """Seconds of the median decode step by batch and input tokens, then by layers."""
    steps: dict[tuple[int, int], dict[int, float]] = {}
    for point in points:
        decoding = sorted(s.forward_s for run in point.runs for s in run.steps if not s.prefill_tokens)
        if decoding and (point.repeat > 1) == repeated:
            each = decoding[len(decoding) // 2] / point.repeat
            steps.setdefault((point.batch, point.input_tokens), {})[point.num_layers] = each
    return steps


def caveats(profile: Profile) -> tuple[str, ...]:
    """Return what is to be said of estimates from ``profile`` alone."""
    return tuple(filter(None, (routing_caveat(profile), graphs_caveat(profile))))


def routing_caveat(profile: Profile) -> str | None:
    """Return how a mixture's tokens fell on its experts in ``profile``; None where there are no experts."""
    if not profile.spec.is_mixture:
        return None
    ranks = [rank for point in profile.memory for rank in point.ranks]
    routings = {rank.expert_routing for rank in ranks}
    counts = [rank.expert_count for rank in ranks if rank.expert_count is not None]
    busiest = max((count.busiest_layer for count in counts), default=None)
    told = "" if busiest is None else f" (counted: the busiest of a layer was chosen {busiest:.2f} times the mean)"
    off = "times may be off by more than the intervals say"
    if routings == {"uniform"} and not all(map(_is_uniform, counts)):
        return f"experts should be drawn uniformly and were not{told}; {off}"
    if routings == {"uniform"}:
        return (
            f"experts were drawn uniformly{told}; traffic that favours some of them had decode steps 5% shorter "
            "in the one model measured, on one GPU, with the busiest at 1.65 times the mean (docs/accuracy.md)"
        )
    if "weights" in routings:
        return f"experts were chosen by random weights{told}, not as in the whole model or in real traffic; {off}"
    if routings and "" not in routings:
        return (
            f"experts were drawn by vLLM's {' and '.join(sorted(routings))}{told}; times are for no other traffic "
            "than such"
        )
    return f"the profile does not say how tokens fell on experts; {off}"


def deployed_graph_tokens(profile: Profile) -> int:
    """Return the tokens of the largest CUDA graph that a deployment of the profiled model has."""
    return largest_graph(profile.engine, is_mixture=profile.spec.is_mixture)


def graphs_caveat(profile: Profile) -> str | None:
    """Return that a deployment has other CUDA graphs than the measured engine; None where it has the same."""
    measured, deployed = profile.graph_tokens, deployed_graph_tokens(profile)
    if measured == deployed:
        return None
    least, most = sorted((measured, deployed))
    return (
        f"its profile was taken with CUDA graphs of up to {measured:,} tokens and deployments have up to "
        f"{deployed:,}; until it is profiled anew, times of steps of {least + 1:,} to {most:,} tokens are not "
        "theirs"
    )


def _is_uniform(count: ExpertCount) -> bool:
    """Return whether no layer's busiest expert is busier than even chances make one.

    Of n experts of all layers with m choices each on average, by a normal law, the busiest is 1 + sqrt(2 ln n / m)
    times the mean at about the most; twice that excess is allowed.
    """
    mean = count.choices / count.experts
    return count.busiest_layer <= 1 + 2 * math.sqrt(2 * math.log(count.experts * count.layers) / mean)
