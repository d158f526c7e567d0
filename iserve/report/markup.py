"""Markup by construction: a tree is written with :func:`el`, and whatever is not markup already is escaped.

Everything it writes is well-formed XML, so that a test can parse it. Names of models are hostile input.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from typing import TypeAlias

from fingerprint.plain_text import printable

__all__ = ["Child", "Markup", "el", "join"]

_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_VOID = {"meta", "br", "hr", "rect", "circle", "line", "path", "polygon", "polyline", "use"}


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


# a plain string is escaped, a Markup is not; None is nothing; a list is its items
Child: TypeAlias = "str | Sequence[Child] | None"


def join(*children: Child) -> Markup:
    """Return all children one after the other."""
    parts: list[str] = []
    for child in children:
        if child is None:
            continue
        if isinstance(child, Markup):
            parts.append(str(child))
        elif isinstance(child, str):
            parts.append(_escaped(child))
        else:
            parts.append(join(*child))
    return Markup("".join(parts))


def el(tag: str, *children: Child, **attributes: str | float | None) -> Markup:
    """Return an element.

    ``class_`` is ``class``, ``aria_label`` is ``aria-label``; an attribute of None is left out.
    """
    given = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{_attribute(value)}"'
        for name, value in attributes.items()
        if value is not None
    )
    inside = join(*children)
    if not inside and tag in _VOID:
        return Markup(f"<{tag}{given}/>")
    return Markup(f"<{tag}{given}>{inside}</{tag}>")


def _attribute(value: str | float) -> str:
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return _escaped(str(value))


def _escaped(text: str) -> str:
    """Escape text: what XML cannot hold is lost; marks of direction, which would turn what follows them, are
    shown.
    """
    return escape(printable(_NOT_XML.sub("\ufffd", text).replace("\r\n", "\n").replace("\r", "\n")))
