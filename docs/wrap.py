"""Wrapping of Markdown prose at 100 columns; tables, code and headings stay as they are."""

from __future__ import annotations

import re
import textwrap

__all__ = ["wrapped"]

WIDTH = 100
_ITEM = re.compile(r" *([-*]|\d+\.) +")
_AS_IT_IS = re.compile(r"\s*$|    |\||#|<|>|---")
# A word that would begin a list, a heading or a quotation, were it the first of a line.
_MARKER = re.compile(r" (?=(?:[-+*>]|#+|\d+[.)])(?: |$))")
_CODE = re.compile(r"(?<!`)(`+)(?!`).+?(?<!`)\1(?!`)")
_GLUE = "\0"


def wrapped(page: str) -> str:
    """Return ``page`` with every paragraph and list item filled to 100 columns."""
    lines: list[str] = []
    paragraph: list[str] = []
    fenced = False

    def flush() -> None:
        if paragraph:
            lines.extend(_filled(paragraph))
            paragraph.clear()

    for line in page.splitlines():
        fence = line.lstrip().startswith("```")
        item = _ITEM.match(line) if paragraph or not line.startswith("    ") else None  # else code
        if fence or fenced or (_AS_IT_IS.match(line) and not (paragraph and line.strip()) and not item):
            flush()
            lines.append(line)
            fenced ^= fence
        else:
            if item or line.startswith(("|", "#")):
                flush()
            if line.startswith(("|", "#")):
                lines.append(line)
            else:
                paragraph.append(line)
    flush()
    return "\n".join(lines)


def _filled(paragraph: list[str]) -> list[str]:
    item = _ITEM.match(paragraph[0])
    first = item[0] if item else re.match(" *", paragraph[0])[0]  # type: ignore[index]
    text = " ".join(line.strip() for line in (paragraph[0][len(first) :], *paragraph[1:]))
    text = _CODE.sub(lambda code: code[0] if len(code[0]) > 60 else code[0].replace(" ", _GLUE), text)
    rows = textwrap.wrap(
        _MARKER.sub(_GLUE, text),
        WIDTH,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [row.replace(_GLUE, " ") for row in rows]
