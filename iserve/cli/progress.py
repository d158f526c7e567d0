"""Long work in a terminal: one line per step, a bar for a profile. On stderr, so that pipes stay clean."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from iserve.cli.sanitized_console import SanitizedConsole

if TYPE_CHECKING:
    from iserve.api_documents import ProgressDocument

__all__ = ["StepDisplay"]


class StepDisplay:
    """Shows the step that runs; on a terminal as a live bar, else as a line per new step."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._live = sys.stderr.isatty() and not quiet
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._step = ""
        self._printed = -1

    def __enter__(self) -> StepDisplay:
        if self._live:
            self._bar = Progress(
                TextColumn("{task.description:<12}"),
                BarColumn(bar_width=30),
                TextColumn("{task.fields[detail]}"),
                TimeElapsedColumn(),
                console=SanitizedConsole(stderr=True),
                transient=True,
            )
            self._task = self._bar.add_task("accepted", total=None, detail="")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, step: str, progress: ProgressDocument | None) -> None:
        if self._quiet:
            return
        detail = "" if progress is None else f"{progress.done}/{progress.total}  {progress.step}"
        if self._bar is not None and self._task is not None:
            if progress is None:
                self._bar.tasks[0].total = None  # which update() takes for "as it was"
            self._bar.update(
                self._task,
                description=step,
                detail=detail,
                total=None if progress is None else progress.total,
                completed=0 if progress is None else progress.done,
            )
            return
        tenth = -1 if progress is None or not progress.total else 10 * progress.done // progress.total
        if step != self._step or tenth > self._printed:
            print(f"{step} {detail}".rstrip(), file=sys.stderr, flush=True)
            self._printed = tenth if step == self._step else -1
            self._step = step
