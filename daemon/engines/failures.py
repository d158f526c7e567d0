"""Turns the last words of an engine that is not ours into one of the project's errors, with the fix in it.

Each adapter lists the patterns of its engine; the first that is found in the log decides.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from daemon.exit_codes import PORT_IN_USE
from daemon.worker_spec import WorkerSpec
from fingerprint.errors import ConflictError, EngineError, IserveError

__all__ = ["ErrorPattern", "explain"]

_SHOWN = 400  # characters of the engine's own line
_NAMED_ERROR = re.compile(r"\b[A-Za-z_.]*(?:Error|Exception)\b: ?\S")
_DECORATION = re.compile(r"^(?:\([^)]*\)\s*)?(?:\[[^\]]*\]\s*)?(?:[A-Z]+ \d\d-\d\d [\d:]+ (?:\[[^\]]*\] )?)?")


@dataclass(frozen=True, slots=True)
class ErrorPattern:
    """A text that an engine prints before it ends, and what it means.

    ``meaning`` may name groups of the pattern in braces; the class of the error says whether another start can
    help (``Engine.explain_failure``).
    """

    pattern: re.Pattern[str]
    error: type[IserveError]
    meaning: str


def explain(
    engine: str,
    spec: WorkerSpec,
    exit_code: int,
    log_tail: str,
    patterns: Sequence[ErrorPattern],
    dull: re.Pattern[str] | None = None,
) -> IserveError:
    """Return the error of the first pattern that is found; else the engine's last named error, else its last line.

    Args:
        dull: lines that only say that something else failed.
    """
    ended = f"worker {spec.worker_id} ({engine}) ended"
    if exit_code == PORT_IN_USE:
        return ConflictError(
            f"{ended}: port {spec.port} of {spec.host} is in use; choose another or let the daemon choose (port 0)"
        )
    for known in patterns:
        found = known.pattern.search(log_tail)
        if found is not None:
            meaning = known.meaning.format(**{name: text or "?" for name, text in found.groupdict().items()})
            return known.error(f"{ended}: {meaning}; it said: {_line_around(log_tail, found.start())}")
    lines = [line for line in log_tail.splitlines() if line.strip() and not (dull and dull.search(line))]
    named = [line for line in lines if _NAMED_ERROR.search(line)]
    said = f"last words: {_plain((named or lines)[-1])}" if lines else "it said nothing"
    return EngineError(f"{ended}: exit code {exit_code}; {said}")


def _line_around(text: str, at: int) -> str:
    begin = text.rfind("\n", 0, at) + 1
    end = text.find("\n", at)
    return _plain(text[begin : end if end >= 0 else len(text)])


def _plain(line: str) -> str:
    """Return the line without the logger's process name, time and place."""
    return _DECORATION.sub("", line.strip(), count=1).strip()[:_SHOWN]
