"""Text from outside, made harmless where people read it: terminal, log, report.

Characters that a terminal obeys (control characters, escape sequences among them), that change the direction of
writing, that begin a line or that cannot be encoded are shown as JSON writes them, so that JSON stays the same
JSON.
"""

from __future__ import annotations

import re

__all__ = ["UNPRINTABLE", "is_plain", "printable"]

# For a character class: C0 without tab and newline, C1, marks of direction, separators, lone surrogates.
UNPRINTABLE = (
    r"\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f"
    r"\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff"
)  # fmt: skip
_UNPRINTABLE = re.compile(f"[{UNPRINTABLE}]")


def printable(text: str) -> str:
    """Return ``text`` with each such character as ``\\u001b``; emoji and any script are left as they are."""
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def is_plain(text: str) -> bool:
    """Return whether ``text`` is one line that can be shown as it is."""
    return not _UNPRINTABLE.search(text) and "\n" not in text and "\t" not in text
