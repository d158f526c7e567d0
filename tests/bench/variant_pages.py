"""Tables and figures of docs/adapters-measured.md and decision 54 on adapters, of what an H200 recorded."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fingerprint.codec import from_json
from tests.bench import lora_load_parts
from tests.bench.accuracy import RESULTS
from tests.bench.kept import read_kept
from tests.bench.lora_contest import ACTIVE, Attempt, Contest
from tests.bench.lora_load_parts import LoadParts
from tests.bench.lora_steps_table import Load, LoraSteps
from tests.bench.variant_clients import Answer, p
from tests.bench.variant_contest import DIRECT, OURS, Arm, Cold, VariantContest, agreeing_words, predicted

__all__ = [
    "again_table",
    "agreements",
    "cold_table",
    "cold_times",
    "contest_table",
    "deployed_rows",
    "further_gap_s",
    "goals_table",
    "kept_contest",
    "kept_loads",
    "kept_parts",
    "kept_steps",
    "late_cold",
    "loads_table",
    "p99_s",
    "parts_table",
    "slots_table",
    "steps_of",
    "steps_table",
    "threads_table",
    "ways_table",
    "words_table",
]

CONTEST_FILE, STEPS_FILE = "variant_contest_h200.json.gz", "lora_steps_h200.json.gz"
AGAIN_FILE = "variant_contest_again_h200.json.gz"  # one round, cut off before its last arm
# By time. What the thread does with the memory that it reads to, in each.
LOADS_FILES = {
    "lora_loads_h200.json.gz": "copies of tensors",
    "lora_loads_three_ways_h200.json.gz": "locked by four threads at once",
    "lora_loads_locked_by_mib_h200.json.gz": "locked 1 MiB at a time",
    "lora_loads_unlocked_h200.json.gz": "not locked",
}
_QUICK_S = 0.5  # between the two kinds of cold requests
DEPLOYED = RESULTS / "lora_contest_h200/deployed"
_COLUMNS = ((0, 0), (8, 0), (8, 1), (8, 8), (32, 0), (32, 1), (32, 8), (32, 32))  # slots, adapters in use


def kept_contest(file: str = CONTEST_FILE) -> VariantContest:
    return from_json(read_kept(RESULTS / file), VariantContest, what=file)


def kept_steps() -> LoraSteps:
    return from_json(read_kept(RESULTS / STEPS_FILE), LoraSteps, what=STEPS_FILE)


def kept_loads() -> tuple[LoraSteps, ...]:
    """Return the recordings of loads next to decoding requests; the second has those that stop steps as well."""
    return tuple(from_json(read_kept(RESULTS / file), LoraSteps, what=file) for file in LOADS_FILES)


def kept_parts() -> tuple[LoadParts, ...]:
    """Return the recordings of parts of loads: vLLM's own, then our plug-in's."""
    files = [RESULTS / "lora_load_parts_h200" / f"{side}.json.gz" for side in ("vllm", "ours")]
    return tuple(from_json(read_kept(file), LoadParts, what=file.name) for file in files)


def parts_table() -> str:
    """Return the parts of loads of adapters."""
    return lora_load_parts.table(kept_parts())


def again_table() -> str:
    """Return ``contest_table`` of the later contest."""
    return contest_table(AGAIN_FILE)


def contest_table(file: str = CONTEST_FILE) -> str:
    """Return throughput and P99 of TTFT through iServe and of vLLM by itself, rounds in turn."""
    by = {(arm.adapters, arm.round, arm.side): arm for arm in kept_contest(file).arms}
    lines = [
        "| adapters | tokens/s, vLLM | iServe / vLLM | P99 of TTFT, vLLM | iServe / vLLM |",
        "|---|--:|--:|--:|--:|",
    ]
    rounds = sorted({round_ for _, round_, _ in by})
    for count in sorted({count for count, _, _ in by}):
        pairs = [(by[count, one, DIRECT], by[count, one, OURS]) for one in rounds]
        tails_s = [(p99_s(direct.answers), p99_s(ours.answers)) for direct, ours in pairs]
        cells = (
            ", ".join(f"{direct.tokens_per_s:,.0f}" for direct, _ in pairs),
            ", ".join(f"{ours.tokens_per_s / direct.tokens_per_s:.3f}" for direct, ours in pairs),
            ", ".join(f"{1e3 * direct_s:.0f}" for direct_s, _ in tails_s) + " ms",
            ", ".join(f"{ours_s / direct_s:.2f}" for direct_s, ours_s in tails_s),
        )
        lines.append(f"| {count} | {' | '.join(cells)} |")
    return "\n".join(lines)


def steps_table() -> str:
    """Return median times of a decode step by sequences, slots and adapters in use."""
    head = ("sequences", "no slots", "8 slots, base alone", "1 adapter", "8")
    head += ("32 slots, base alone", "1 adapter", "8", "32")
    lines = [f"| {' | '.join(head)} |", f"|---|{'--:|' * len(_COLUMNS)}"]
    times_s: dict[tuple[int, int, int], list[float]] = {}
    for one in kept_steps().bursts:
        times_s.setdefault((one.batch, one.slots, one.active), []).append(one.step_s)
    for batch in sorted({batch for batch, _, _ in times_s}):
        cells = [f"{1e3 * statistics.median(times_s[batch, *column]):.2f}" for column in _COLUMNS]
        cells[0] += " ms"
        lines.append(f"| {batch} | {' | '.join(cells)} |")
    return "\n".join(lines)


def loads_table() -> str:
    """Return times of loads from the page cache, by rank."""
    times_s: dict[int, list[float]] = {}
    for one in kept_steps().loads:
        times_s.setdefault(one.rank, []).append(one.load_s)
    lines = ["| rank | loads | median | from | to |", "|---|--:|--:|--:|--:|"]
    for rank, own_s in sorted(times_s.items()):
        cells = [f"{1e3 * value:.0f} ms" for value in (statistics.median(own_s), min(own_s), max(own_s))]
        lines.append(f"| {rank} | {len(own_s)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def ways_table() -> str:
    """Return loads of adapters by the ways in which they are read: their time, and what they stop."""
    _, in_turns, _, today = kept_loads()
    return _loads_by(
        {
            "vLLM's own": [one for one in in_turns.loads if not one.plug_in],
            "our plug-in's": [one for one in in_turns.loads if one.plug_in and not one.in_background],
            "by a thread": list(today.loads),
        }
    )


def threads_table() -> str:
    """Return loads by a thread, by what it does with memory."""
    found = zip(kept_loads(), LOADS_FILES.values(), strict=True)
    return _loads_by(
        {f"{way}, {kept.date}": [one for one in kept.loads if one.in_background] for kept, way in found}
    )


def _loads_by(ways: Mapping[str, Sequence[Load]]) -> str:
    lines = [
        "| rank | read | a load | longest gap between tokens | in steps |",
        "|--:|---|--:|--:|--:|",
    ]
    for rank in sorted({one.rank for loads in ways.values() for one in loads}):
        for name, loads in ways.items():
            own = [one for one in loads if one.rank == rank]
            cells = (
                f"{_span([1e3 * one.load_s for one in own])} ms",
                f"{_span([1e3 * one.longest_gap_s for one in own])} ms",
                _span([steps_of(one) for one in own], "#.2g"),
            )
            lines.append(f"| {rank} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def steps_of(load: Load) -> float:
    """Return the longest gap between tokens next to a load in median gaps."""
    return load.longest_gap_s / load.median_gap_s


def further_gap_s(load: Load) -> float:
    """Return a bound of the longest gap within a load but for the longest of all, in which it began.

    The five longest gaps are kept: one that is not among them is no longer than the fifth.
    """
    _, *further = load.long_gaps
    within_s = (gap_s for at_s, gap_s in further if at_s + gap_s > 0 and at_s < load.load_s)
    return max([*within_s, further[-1][1]])


def _span(values: Sequence[float], shown: str = ".0f") -> str:
    least, most = (format(value, shown).removesuffix(".") for value in (min(values), max(values)))
    return f"{least} to {most}"


def slots_table() -> str:
    """Return memory that slots take, and the time of prompts with an adapter by that of prompts without slots."""
    found = kept_steps()
    times_s: dict[tuple[int, int, int, bool], list[float]] = {}
    for one in found.prompts:
        times_s.setdefault((one.requests, one.tokens, one.slots, one.adapter), []).append(one.seconds)
    middle_s = {case: statistics.median(own_s) for case, own_s in times_s.items()}
    gib = {one.slots: one.weights_gib for one in found.memory}
    lines = ["| slots | memory | prompts with an adapter take |", "|---|--:|--:|"]
    for slots in sorted(gib.keys() - {0}):
        own = [s / middle_s[*case[:2], 0, False] for case, s in middle_s.items() if case[2:] == (slots, True)]
        times = f"{min(own):.2f} to {max(own):.2f} times as long"
        lines.append(f"| {slots} | {gib[slots] - gib[0]:.2f} GiB | {times} |")
    return "\n".join(lines)


def goals_table() -> str:
    """Return the goals of the contest, and how they fell."""
    found = kept_contest()
    by = {(arm.adapters, arm.round, arm.side): arm for arm in found.arms}
    pairs = [(arm, by[arm.adapters, arm.round, OURS]) for arm in found.arms if arm.side == DIRECT]
    rates = [ours.tokens_per_s / direct.tokens_per_s - 1 for direct, ours in pairs]
    tails = [1 - p99_s(ours.answers) / p99_s(direct.answers) for direct, ours in pairs]
    both, times, cold = agreements()[OURS, DIRECT], cold_times(), _cold(found)
    alone, first = times["never loaded"], times["first of each"]
    same, asked = (sum(column) for column in zip(*(_same(*pair) for pair in pairs), strict=True))
    failed = sum(bool(one.error) for arm in found.arms for one in arm.answers)
    failed += sum(bool(one.error) for one in (*cold.zipf, *cold.alone))
    rows = [
        (
            "throughput within 2%",
            f"{-min(rates):.1%} lower to {max(rates):.1%} higher",
            "met or better, unexplained",
        ),
        ("P99 of TTFT within 2%", f"{100 * min(tails):.0f} to {max(tails):.0%} lower", "better, unexplained"),
        (
            "tokens identical",
            f"{both.whole} of {len(both.words)} answers one by one, {same} of {asked:,} in the arms",
            _verdict(same == asked),
        ),
        ("no request fails", f"{failed} failed, of all", _verdict(not failed)),
        (
            "P99 of a cold adapter's TTFT under 1 s",
            f"{alone.p99_s:.3f} s of {alone.num} that were never loaded; {first.p99_s:.3f} s of the first request "
            f"for each of {first.num} by Zipf's law",
            _verdict(alone.p99_s < 1) + f" by {alone.p99_s - 1:.0%}; {first.p99_s - 1:.0%}",
        ),
    ]
    return "\n".join(["| goal | measured | |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)])


def words_table() -> str:
    """Return how many words agree of the same prompts one by one, until the first that differs."""
    lines = ["| asked twice | words until one differs: fewest, median, most | same answers |", "|---|---|--:|"]
    names = {(DIRECT, DIRECT): "vLLM by itself", (OURS, OURS): "iServe", (OURS, DIRECT): "iServe, then vLLM"}
    for sides, found in agreements().items():
        words = f"{min(found.words)}, {found.median}, {max(found.words)}"
        lines.append(f"| {names[sides]} | {words} | {found.whole} of {len(found.words)} |")
    return "\n".join(lines)


def cold_table() -> str:
    """Return figures of the requests for 1,000 further adapters."""
    found = kept_contest()
    cold, of_all = _cold(found), cold_times()["all"]
    first_s = sorted(one.first_s for one in cold.alone)
    quick_s, slow_s = ([s for s in first_s if (s < _QUICK_S) is is_quick] for is_quick in (True, False))
    rows = {
        "registered": f"{cold.registered:,}, {cold.adapter_bytes / 2**20:.1f} MiB each, "
        f"{cold.add_s:.0f} s to add; {cold.max_loaded} stay loaded",
        "requests by Zipf's law, exponent 1, in a minute": f"{len(cold.zipf)}",
        "loads, evictions": f"{cold.loads}, {cold.evictions}",
        "of a replay at the same times": "{}, {}".format(*predicted(found, cold)),
        "a load": f"{1e3 * cold.load_s / cold.loads:.0f} ms, {cold.load_s:.0f} s of the minute in all",
        "TTFT, P50 and P99": f"{1e3 * of_all.p50_s:.0f} ms, {of_all.p99_s:.3f} s",
        "TTFT of adapters that were never loaded, next to 16 clients": f"{len(quick_s)} of {len(first_s)} within "
        f"{1e3 * max(quick_s):.0f} ms, {len(slow_s)} after {min(slow_s):.2f} to {max(slow_s):.2f} s",
    }
    return "\n".join(
        ["| 1,000 adapters | |", "|---|---|", *(f"| {name} | {cell} |" for name, cell in rows.items())]
    )


def _cold(found: VariantContest) -> Cold:
    assert found.cold is not None
    return found.cold


def _same(direct: Arm, ours: Arm) -> tuple[int, int]:
    """Return answers of both that are the same, and how many both gave."""
    texts = {one.row: one.text for one in direct.answers if one.is_whole}
    both = [one for one in ours.answers if one.is_whole and one.row in texts]
    return sum(texts[one.row] == one.text for one in both), len(both)


def _verdict(is_met: bool) -> str:
    return "met" if is_met else "**missed**"


def deployed_rows() -> Iterator[str]:
    """Yield rows of steps of attempts as deployments have them, with throughput in parts of the base's."""
    contest = Contest(DEPLOYED)
    for attempt in contest.attempts:
        if attempt.name == "base":
            yield f"| `base`, no slots | {1e3 * attempt.step_s(0):.2f} | | | | |"
        else:
            cells = [f"{1e3 * attempt.step_s(0):.2f}", *_shares(attempt, contest.base_s)]
            yield f"| `{attempt.name}` | {' | '.join(cells)} |"


def _shares(attempt: Attempt, base_s: float) -> Iterator[str]:
    for active in ACTIVE[1:]:
        step_s = attempt.step_s(active)
        yield f"{1e3 * step_s:.2f} ({base_s / step_s:.0%})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """Agreement of the words of two sides that were asked the same, one by one."""

    words: tuple[int, ...]  # of each prompt, until the first that differs
    whole: int  # answers that are the same

    @property
    def median(self) -> int:
        return round(p(self.words, 50))


def agreements() -> dict[tuple[str, str], Agreement]:
    """Return what vLLM and iServe agree in with themselves and each other."""
    turns: dict[str, list[Sequence[Answer]]] = {}
    for side, answers in kept_contest().alone:
        turns.setdefault(side, []).append(answers)
    pairs = {
        (DIRECT, DIRECT): turns[DIRECT],
        (OURS, OURS): turns[OURS],
        (OURS, DIRECT): [turns[OURS][0], turns[DIRECT][0]],
    }
    return {sides: _agreement(*answers) for sides, answers in pairs.items()}


def _agreement(first: Sequence[Answer], second: Sequence[Answer]) -> Agreement:
    pairs = [(one.text, two.text) for one, two in zip(first, second, strict=True)]
    return Agreement(
        words=tuple(agreeing_words(*pair) for pair in pairs), whole=sum(one == two for one, two in pairs)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ColdTimes:
    """TTFT of requests whose adapter was not loaded."""

    num: int
    p50_s: float
    p99_s: float


def cold_times() -> dict[str, ColdTimes]:
    """Return those of adapters that were never loaded, and of the first request for each by Zipf's law."""
    cold = kept_contest().cold
    assert cold is not None
    first: dict[str, Answer] = {}
    for one in sorted(cold.zipf, key=lambda one: one.sent_s):
        first.setdefault(one.model, one)
    return {"never loaded": _times(cold.alone), "first of each": _times(first.values()), "all": _times(cold.zipf)}


@dataclass(frozen=True, kw_only=True, slots=True)
class LateCold:
    """Requests for adapters that were never loaded which waited for long, and those in between.

    They were sent one after the other, next to clients that ask again once they are answered.
    """

    late: tuple[int, ...]  # their numbers in the order of sending
    ended_s: tuple[float, ...]  # when the wait of each was over
    waited_s: tuple[float, ...]  # longer than the quick ones, median
    token_s: tuple[float, float]  # time between tokens of the quick ones, least and most


def late_cold() -> LateCold:
    """Return what the recording of 1,000 adapters has of them."""
    alone = sorted(_cold(kept_contest()).alone, key=lambda one: one.sent_s)
    quick = [one for one in alone if one.last_s < _QUICK_S]
    usual_s = statistics.median(one.last_s for one in quick)
    gaps_s = [(one.last_s - one.first_s) / (one.tokens - 1) for one in quick]
    late = [number for number, one in enumerate(alone) if one.last_s >= _QUICK_S]
    return LateCold(
        late=tuple(late),
        ended_s=tuple(alone[number].sent_s + alone[number].last_s for number in late),
        waited_s=tuple(alone[number].last_s - usual_s for number in late),
        token_s=(min(gaps_s), max(gaps_s)),
    )


def _times(answers: Iterable[Answer]) -> ColdTimes:
    first_s = [one.first_s for one in answers if one.is_whole]
    return ColdTimes(num=len(first_s), p50_s=p(first_s, 50), p99_s=p(first_s, 99))


def p99_s(answers: Iterable[Answer]) -> float:
    return _times(answers).p99_s
