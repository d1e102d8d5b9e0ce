"""Progress of long commands: one line on standard error, where that is a terminal."""

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

T = TypeVar("T")

_PAUSE_S: Final = 0.1
"""Least time between two updates: a terminal shows no more, and a command has better things to do."""


class ProgressBar:
    """How far a command is; nobody sees it, and it costs nothing."""

    def reach(self, done: int, share: float | None = None) -> None:
        """Say how many things are done, and which share of all that is, from 0 to 1, if it is known."""

    def watch(self, items: Iterable[T]) -> Iterable[T]:
        """Return the items; each one that is taken is one more that is done."""
        return items


class _Drawn(ProgressBar):
    """Progress on a terminal: what is done, how many a second, and how long the rest will take."""

    def __init__(self, drawing: "RichProgress", task: "TaskID", unit: str) -> None:
        self._drawing = drawing
        self._task = task
        self._unit = unit
        self._started = time.monotonic()
        self._shown = self._started

    def reach(self, done: int, share: float | None = None) -> None:
        now = time.monotonic()
        if now - self._shown < _PAUSE_S and share != 1:
            return
        self._shown = now
        rate = done / max(now - self._started, 1e-3)
        told = f"{done:,} {self._unit}, {rate:,.0f}/s" if rate >= 10 else f"{done:,} {self._unit}, {rate:.1f}/s"
        self._drawing.update(self._task, told=told, completed=share or 0.0, total=None if share is None else 1.0)

    def watch(self, items: Iterable[T]) -> Iterator[T]:
        for done, item in enumerate(items, start=1):
            yield item
            self.reach(done)


@contextmanager
def progress(label: str, unit: str, *, prints: bool = False) -> Iterator[ProgressBar]:
    """Draw the progress of what is done inside, and remove it at the end.

    Nothing is drawn where standard error is no terminal, nor beside what a command ``prints`` to a terminal meanwhile.
    """
    if not sys.stderr.isatty() or (prints and sys.stdout.isatty()):
        yield ProgressBar()
        return
    from rich.console import Console  # noqa: PLC0415 - for a terminal only
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn  # noqa: PLC0415
    from rich.progress import Progress as Drawing  # noqa: PLC0415

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[told]}"),
        TimeRemainingColumn(compact=True),
    )
    # Rich would send what is printed meanwhile to its own console, which is standard error.
    with Drawing(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False) as drawing:
        yield _Drawn(drawing, drawing.add_task(label, total=None, told=""), unit)
