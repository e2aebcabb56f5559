"""Bars on a terminal while something takes long; who shows them says what is printed elsewhere."""

from types import TracebackType
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn

Shown = TypeVar("Shown", bound="ProgressDisplay")


class ProgressDisplay:
    """To be entered. Each task has its description, a bar and the ``columns``; nothing is left of them at the end."""

    def __init__(self, console: Console, *columns: ProgressColumn, before: tuple[ProgressColumn, ...] = ()) -> None:
        self.console = console
        self._progress = Progress(
            *before,
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            *columns,
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )

    def __enter__(self: Shown) -> Shown:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
