"""Recording of LoRA variants through iServe and by vLLM alone, and its table."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from tests.bench.variant_clients import Answer, p
from traces.simulator.variants import VariantArrival, VariantWorkers, replay_variants

__all__ = ["Arm", "Cold", "VariantContest", "adapter_names", "agreeing_words", "predicted", "table"]

MOST, BATCH, OUTPUT = 128, 64, 128
DIRECT, OURS = "vllm", "iserve"


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """Half a minute of one side."""

    side: str
    adapters: int
    round: int
    seconds: float
    answers: tuple[Answer, ...]

    @property
    def tokens_per_s(self) -> float:
        """Tokens that arrived within the arm's time, those of requests that it cut off included."""
        return sum(answer.tokens for answer in self.answers) / self.seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Cold:
    """Requests for many more adapters than are kept loaded."""

    registered: int
    slots: int
    max_loaded: int
    adapter_bytes: int
    add_s: float  # of all registrations, two at a time
    loads: int  # counted by the gateway, of the requests by Zipf's law
    load_s: float  # of these together
    evictions: int
    zipf: tuple[Answer, ...]
    alone: tuple[Answer, ...]  # each for an adapter that was never loaded
    clients: tuple[Answer, ...] = ()  # of the clients next to these
    share: float = 1.0  # of a place, that each of them takes
    arm_shares: tuple[float, ...] = (1.0,)  # that the adapters of the arms take, in turn


@dataclass(frozen=True, kw_only=True, slots=True)
class VariantContest:
    """Recording of one model."""

    model: str
    date: str
    machine: str
    versions: str
    direct_words: tuple[str, ...] = ()
    ready_s: tuple[tuple[str, float], ...] = ()
    alone: tuple[tuple[str, tuple[Answer, ...]], ...] = ()
    arms: tuple[Arm, ...] = ()
    cold: Cold | None = None


def adapter_names(count: int) -> list[str]:
    return [f"adapter-{number}" for number in range(count)]


def table(found: VariantContest) -> str:
    """Return what was measured as Markdown tables."""
    parts = [_alone_text(found), _arm_rows(found)]
    if found.cold is not None:
        parts.append(_cold_text(found.cold))
        loads, evictions = predicted(found, found.cold)
        parts.append(
            f"The simulator, given the requests and the time of a load: {loads} loads "
            f"({found.cold.loads} measured), {evictions} evictions ({found.cold.evictions})"
        )
    return "\n\n".join(parts)


def predicted(found: VariantContest, cold: Cold) -> tuple[int, int]:
    """Return loads and evictions during the requests by Zipf's law, as the simulator has them.

    The arms are replayed before them, since what was asked for often stays loaded; their times are rebuilt.
    """
    arrivals = [
        VariantArrival(arrived_s=0.3 * i, variant=name, service_s=1.0)
        for i, name in enumerate(adapter_names(MOST))
    ]
    began_s = 0.3 * MOST + 100.0
    for arm in found.arms:
        if arm.side == OURS:
            arrivals += _arrivals(arm.answers, began_s)
        began_s += arm.seconds
    workers = VariantWorkers(
        num_workers=1,
        slots=cold.slots,
        max_loaded=cold.max_loaded,
        max_outstanding=BATCH,
        variant_bytes=cold.adapter_bytes,
        load_bytes_per_s=cold.adapter_bytes * cold.loads / cold.load_s,
        share_of=dict.fromkeys((one.model for one in cold.zipf), cold.share)
        | dict(zip(adapter_names(MOST), itertools.cycle(cold.arm_shares), strict=False)),
    )
    before = replay_variants(arrivals, workers)
    after = replay_variants([*arrivals, *_arrivals(cold.zipf, began_s)], workers)
    return after.loads - before.loads, after.evictions - before.evictions


def _arrivals(answers: Sequence[Answer], began_s: float) -> list[VariantArrival]:
    usual_s = p([one.last_s for one in answers if one.is_whole], 50)
    return [
        VariantArrival(
            arrived_s=began_s + one.sent_s,
            variant=one.model,
            service_s=one.last_s if one.is_whole else usual_s,
        )
        for one in answers
    ]


def _alone_text(found: VariantContest) -> str:
    said: dict[str, list[tuple[Answer, ...]]] = {}
    for side, answers in found.alone:
        said.setdefault(side, []).append(answers)

    def equal(first: Sequence[Answer], second: Sequence[Answer]) -> str:
        words = [agreeing_words(a.text, b.text) for a, b in zip(first, second, strict=True)]
        return f"{min(words)}, {p(words, 50):.0f} and {max(words)}"

    direct, ours = said.get(DIRECT, []), said.get(OURS, [])
    return (
        f"Alone, words until the first that differs (fewest, median, most of {OUTPUT}): "
        f"{DIRECT} twice {equal(direct[0], direct[1])}, "
        f"{OURS} twice {equal(ours[0], ours[1])}, "
        f"{OURS} as {DIRECT} {equal(direct[0], ours[0])}"
    )


def agreeing_words(first: str, second: str) -> int:
    """Return how many words at the begin are the same."""
    pairs = zip(first.split(), second.split(), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _arm_rows(found: VariantContest) -> str:
    head = ("adapters", "round", "side", "tokens/s", "ratio", "TTFT P50", "P99", "ratio", "same words", "failed")
    lines = [f"| {' | '.join(head)} |", f"|{'---:|' * len(head)}"]
    by = {(arm.adapters, arm.round, arm.side): arm for arm in found.arms}
    for (count, round_, side), arm in sorted(by.items()):
        other = by.get((count, round_, DIRECT)) if side == OURS else None
        done = [one for one in arm.answers if one.is_whole]
        ttft = [one.first_s for one in done]
        rates, tails, same = "", "", ""
        if other is not None:
            rates = f"{arm.tokens_per_s / other.tokens_per_s:.3f}"
            theirs = [one.first_s for one in other.answers if one.is_whole]
            tails = f"{p(ttft, 99) / p(theirs, 99):.3f}"
            texts = {one.row: one.text for one in other.answers if one.is_whole}
            both = [one for one in done if one.row in texts]
            same = f"{sum(texts[one.row] == one.text for one in both)} of {len(both)}"
        failed = sum(1 for one in arm.answers if one.error)
        lines.append(
            f"| {count} | {round_} | {side} | {arm.tokens_per_s:.0f} | {rates} | {1e3 * p(ttft, 50):.1f} ms "
            f"| {1e3 * p(ttft, 99):.1f} ms | {tails} | {same} | {failed} |"
        )
    return "\n".join(lines)


def _cold_text(cold: Cold) -> str:
    done = [one for one in cold.zipf if one.is_whole]
    first = [one.first_s for one in done]
    alone = [one.first_s for one in cold.alone if one.is_whole]
    failed = sum(1 for one in (*cold.zipf, *cold.alone) if one.error)
    return (
        f"{cold.registered} registered ({cold.adapter_bytes / 2**20:.1f} MiB each, {cold.add_s:.0f} s to add), "
        f"{cold.slots} slots, {cold.max_loaded} loaded, {len(done)} answers by Zipf's law: {cold.loads} loads "
        f"({1e3 * cold.load_s / max(cold.loads, 1):.0f} ms each), {cold.evictions} evictions, TTFT P50 "
        f"{1e3 * p(first, 50):.0f}, P99 {1e3 * p(first, 99):.0f}, longest {1e3 * max(first, default=0):.0f} ms; "
        f"{len(alone)} cold ones: P50 {1e3 * p(alone, 50):.0f}, P99 {1e3 * p(alone, 99):.0f} ms; {failed} failed"
    )
