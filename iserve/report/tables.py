"""Tables, legends and lists: small pieces that several sections share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fingerprint.estimates import Quantity
from iserve.report.markup import Child, Markup, el
from iserve.report.text import range_of, seconds
from iserve.report.values import Verdict

__all__ = ["bullets", "facts", "fold", "legend", "quantity", "table", "time_cell", "verdict"]


def table(
    head: Sequence[str], rows: Iterable[Markup], *, caption: str | None = None, left: Sequence[int] = (0,)
) -> Markup:
    """Return a table of ``rows`` (made of ``tr``) with column names; it scrolls where the page is narrower."""
    names = [el("th", name, scope="col", class_="l" if i in left else None) for i, name in enumerate(head)]
    said = None if caption is None else el("caption", caption)
    made = el("table", said, el("thead", el("tr", names)), el("tbody", list(rows)))
    return el("div", made, class_="scroll", tabindex="0")  # so that the keyboard can scroll it


def quantity(found: Quantity | None) -> Markup:
    """Return a time with its interval and source, as a cell."""
    if found is None:
        return el("td", "not predicted", class_="n")
    return el("td", seconds(found.value), el("small", range_of(found)), el("small", str(found.source)), class_="n")


def time_cell(value_s: float, low_s: float, high_s: float) -> Markup:
    return el("td", seconds(value_s), el("small", f"{seconds(low_s)} to {seconds(high_s)}"), class_="n")


def verdict(found: Verdict) -> Markup:
    """Return a verdict's lines below its sentence, which the caller shows."""
    pairs: list[tuple[str, list[str]]] = []
    for label, text in found.lines:
        if label or not pairs:
            pairs.append((label, [text]))
        else:
            pairs[-1][1].append(text)
    return facts((label, [el("div", text) for text in texts]) for label, texts in pairs)


def facts(pairs: Iterable[tuple[str, Child]]) -> Markup:
    """Return a list of names and values."""
    return el("dl", [[el("dt", name), el("dd", value)] for name, value in pairs])


def legend(items: Iterable[tuple[str, str, str]]) -> Markup:
    """Return a legend of (colour class, shape class, words); a cross is a letter."""
    return el(
        "ul",
        [
            el(
                "li",
                el(
                    "span",
                    "×" if "cross" in shape else "",
                    class_=f"key {shape} {color}".strip(),
                    aria_hidden="true",
                ),
                el("span", words, class_="words"),
            )
            for color, shape, words in items
        ],
        class_="legend",
    )


def bullets(lines: Iterable[str]) -> Markup:
    return el("ul", [el("li", line) for line in lines])


def fold(summary: Child, *children: Child, is_open: bool = False, class_: str | None = None) -> Markup:
    """Return a part to open; works without any script."""
    return el("details", el("summary", summary), *children, open="open" if is_open else None, class_=class_)
