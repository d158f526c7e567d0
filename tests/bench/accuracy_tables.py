"""The tables of ``docs/accuracy.md`` on engines that carry our step timer, as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from tests.bench.accuracy_rows import CostRow, MemoryRow, Row, TimerRow

__all__ = ["markdown", "others_table", "summary"]

GIB = 2**30
_SIZES = ((0, 128, "128"), (129, 2048, "512 to 2,048"), (2049, 16_384, "4,096 to 16,384"), (16_385, 10**9, "more"))


def summary(rows: Sequence[Row], of: Callable[[Row], str]) -> list[tuple[str, str, int, float, float, float]]:
    """(group, metric, points, median error, worst error, share inside), errors as absolute fractions."""
    found = []
    for group in dict.fromkeys(of(row) for row in rows):
        for metric in ("tpot", "ttft"):
            these = [row for row in rows if of(row) == group and row.metric == metric]
            if these:
                errors = [abs(row.error) for row in these]
                inside = sum(row.inside for row in these) / len(these)
                found.append((group, metric, len(these), statistics.median(errors), max(errors), inside))
    return found


def markdown(
    rows: Sequence[Row],
    memory: Sequence[MemoryRow],
    costs: Sequence[CostRow],
    timers: Sequence[TimerRow],
    others: Sequence[Row],
) -> str:
    """All tables."""
    lines = ["| model | number | points | median error | worst error | inside the 90% interval |"]
    lines.append("| --- | --- | --: | --: | --: | --: |")

    def add(table: list[tuple[str, str, int, float, float, float]]) -> None:
        for group, metric, count, median, worst, inside in table:
            share = f"{inside:.0%}" if group != "AIConfigurator 0.12.0" else "gives none"
            lines.append(f"| {group} | {metric.upper()} | {count} | {median:.1%} | {worst:.1%} | {share} |")

    add(summary(rows, lambda row: f"{row.model} {row.variant}"))
    add(summary(rows, lambda row: "all"))
    lines += ["", *_by_prompt_tokens(rows)]
    lines += [
        "",
        "| model | weights | non-KV memory | KV blocks (engine / predicted) |",
        "| --- | --: | --: | --: |",
    ]
    for one in memory:
        lines.append(
            f"| {one.model} {one.variant} | {one.weights_predicted / one.weights_bytes - 1:+.2%} | "
            f"{one.non_kv_predicted / one.non_kv_bytes - 1:+.2%} "
            f"({(one.non_kv_predicted - one.non_kv_bytes) / GIB:+.2f} GiB) | "
            f"{one.blocks:,} / {one.blocks_predicted:,} ({one.blocks_predicted / max(1, one.blocks) - 1:+.2%}) |"
        )
    lines += [
        "",
        "| model | fingerprints | whole model | memory x time, whole / fingerprints | starts | with starts |",
        "| --- | --: | --: | --: | --: | --: |",
    ]
    lines += [_cost_line(cost) for cost in costs]
    lines += ["", *_timer_lines(timers)]
    lines += ["", "| method | number | points | median error | worst error | inside its interval |"]
    lines.append("| --- | --- | --: | --: | --: | --: |")
    add(summary([*rows, *others], lambda row: row.method))
    return "\n".join(lines)


def others_table(ours: Sequence[Row], theirs: Sequence[Row], groups: Mapping[str, Callable[[Row], bool]]) -> str:
    """Return errors of other methods, each with ours on exactly the points that it answers.

    Args:
        groups: what each group of rows is named, and whether a row is in it; one without a row has no line.
    """
    lines = [
        "| method | points of | points | TPOT, its median / worst | iServe's there | TTFT, its median / worst "
        "| iServe's there |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for method in dict.fromkeys(row.method for row in theirs):
        for group, holds in groups.items():
            its = [row for row in theirs if row.method == method and holds(row)]
            answered = {row.point for row in its}
            found = [summary(rows, lambda _: "") for rows in (its, [r for r in ours if r.point in answered])]
            if its:
                (tpot, ttft), (own_tpot, own_ttft) = (
                    [f"{median:.1%} / {worst:.1%}" for *_, median, worst, _ in errors] for errors in found
                )
                lines.append(
                    f"| {method} | {group} | {found[0][0][2]} | {tpot} | {own_tpot} | {ttft} | {own_ttft} |"
                )
    return "\n".join(lines)


def _cost_line(cost: CostRow) -> str:
    memory_time = starts = "not recorded"
    took, whole_took = f"{cost.profile_s:.0f} s", f"{cost.whole_s:.0f} s"
    if cost.profile_gib_s and cost.whole_gib_s:
        took, whole_took = f"{took}, {cost.profile_gib_s:.0f} GiB s", f"{whole_took}, {cost.whole_gib_s:.0f} GiB s"
        memory_time = f"{cost.whole_gib_s / cost.profile_gib_s:.1f}"
        whole = cost.whole_gib_s + (cost.whole_start_gib_s or 0.0)
        starts = f"{whole / (cost.profile_gib_s + (cost.profile_start_gib_s or 0.0)):.1f}"
    return (
        f"| {cost.model} {cost.variant} | {took} | {whole_took} | {memory_time} | "
        f"{cost.profile_start_s:.0f} s / {cost.whole_start_s:.0f} s | {starts} |"
    )


def _by_prompt_tokens(rows: Sequence[Row]) -> list[str]:
    """Errors by the prompt tokens of the whole batch, and how much the whole model's own calls differ there."""
    lines = [
        "| prompt tokens in all | TPOT median / worst | TTFT median / worst | "
        "5th to 95th percentile of the whole model's own calls, median / worst |",
        "| --- | --: | --: | --: |",
    ]
    for low, high, named in _SIZES:
        these = [row for row in rows if low <= row.batch * row.input_tokens <= high]
        if these:
            by_metric = {m: [abs(row.error) for row in these if row.metric == m] for m in ("tpot", "ttft")}
            spread = [row.truth_spread for row in these if row.metric == "ttft"]
            columns = (
                *(f"{statistics.median(e):.1%} / {max(e):.1%}" for e in by_metric.values()),
                f"±{statistics.median(spread):.1%} / ±{max(spread):.1%}",
            )
            lines.append(f"| {named} | {' | '.join(columns)} |")
    return lines


def _timer_lines(timers: Sequence[TimerRow]) -> list[str]:
    lines = ["| model | batch | input | calls | step timer on, against off |", "| --- | --: | --: | --: | --: |"]
    lines += [
        f"| {t.model} {t.variant} | {t.batch} | {t.input_tokens} | {t.calls} | {t.on_s / t.off_s - 1:+.1%} |"
        for t in timers
        if t.calls > 1
    ]
    return lines
