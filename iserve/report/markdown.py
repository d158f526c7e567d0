"""The page as Markdown: the same sections, with a table of what each drawing shows in the drawing's place.

The page is well-formed XML, so its tree is walked; what it says is written once, in the sections.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from xml.etree import ElementTree

from iserve.report.page import render_report
from iserve.report.values import Report

__all__ = ["markdown_table", "render_markdown"]

_SPECIAL = re.compile(r"([\\`*_\[\]<>|~&])")
_LINE_START = re.compile(r"^(\d*)([#+=.)-])")
_LOWEST = 6  # heading
_BLOCKS = frozenset({"div", "p", "li"})  # each a line of its own on the page

Element = ElementTree.Element


def render_markdown(report: Report) -> str:
    """Return one Markdown file (with GitHub's tables). Nothing in it is HTML, whatever the model's name."""
    body = ElementTree.fromstring(render_report(report)).iter("main")
    blocks = _blocks(next(body), 0)
    return "\n\n".join(block for block in blocks if block) + "\n"


def _blocks(node: Element, depth: int) -> Iterator[str]:
    """Yield the Markdown of the children of ``node``, ``depth`` folds deep."""
    for child in node:
        match child.tag:
            case "h1" | "h2" | "h3":
                yield _heading(int(child.tag[1]) + (depth if child.tag == "h3" else 0), _text(child))
            case "p":
                yield _line(_text(child))
            case "ul" | "ol":
                yield "\n".join(f"{'1.' if child.tag == 'ol' else '-'} {_line(_text(item))}" for item in child)
            case "dl":
                pairs = [[_text(one) for one in pair] for pair in zip(child[::2], child[1::2], strict=True)]
                yield markdown_table(["", ""], pairs)
            case "table":
                yield from _blocks_of_table(child)
            case "svg":
                yield _drawn(child)
            case "details":
                yield _heading(3 + depth, _text(child[0]))
                yield from _blocks(child, depth + 1)
            case "figcaption":
                yield f"**{_text(child)}**"
            case "nav" | "summary":
                pass
            case "div" if child.get("class") == "tile":
                yield f"- {_text(child[1])}: {_text(child[0])}"
            case "div" if child.get("class") == "tiles":
                yield "\n".join(_blocks(child, depth))
            case "div" if child.get("class") == "narrow":
                pass  # the same drawing again
            case _:
                if child.text and child.text.strip():
                    yield _line(_text(child))
                else:
                    yield from _blocks(child, depth)


def _heading(level: int, text: str) -> str:
    return f"{'#' * min(level, _LOWEST)} {text}"


def _line(text: str) -> str:
    """Return a line that begins no list, heading or rule."""
    return _LINE_START.sub(r"\1\\\2", text)


def _text(node: Element) -> str:
    """Return all words in one line, a semicolon before a block; small ones in parentheses, drawings left out."""
    words, small = [node.text or ""], []
    for child in node:
        if child.tag == "small":
            small.append(_plain(child))
        elif child.tag != "svg" and child.get("aria-hidden") != "true":
            if child.tag in _BLOCKS and "".join(words).strip():
                words.append("; ")
            words.append(_plain(child))
        words.append(child.tail or "")
    said = " ".join("".join(words).split())
    beside = f"({', '.join(small)})" if small else ""
    return _SPECIAL.sub(r"\\\1", " ".join(part for part in (said, beside) if part))


def _plain(node: Element) -> str:
    return " ".join("".join(node.itertext()).split())


def _blocks_of_table(node: Element) -> Iterator[str]:
    caption = node.find("caption")
    if caption is not None:
        yield _line(_text(caption))
    head = [_text(cell) for row in node.iterfind("thead/tr") for cell in row]
    rows = [[cell for cell in row for cell in _spread(cell)] for row in node.iterfind("tbody/tr")]
    shown = [i for i in range(len(head)) if not rows or not all(_is_drawing(row[i]) for row in rows)]
    yield markdown_table([head[i] for i in shown], [[_text(row[i]) for i in shown] for row in rows])


def _spread(cell: Element) -> list[Element]:
    return [cell, *(Element("td") for _ in range(int(cell.get("colspan", "1")) - 1))]


def _is_drawing(cell: Element) -> bool:
    return cell.find(".//svg") is not None and not _text(cell)


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in GitHub's Markdown, without a newline at its end."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _drawn(drawing: Element) -> str:
    """Return a table of what each mark of a drawing means; the drawing's own name over it."""
    own, *marks = [_plain(title) for title in drawing.iter("title")]
    rows = [[_SPECIAL.sub(r"\\\1", part) for part in mark.partition(": ")[::2]] for mark in dict.fromkeys(marks)]
    return markdown_table([_SPECIAL.sub(r"\\\1", own), ""], rows)
