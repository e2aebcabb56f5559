"""What a starting cluster shows: its stage, and a bar for each replica that loads."""

from collections.abc import Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from ..cluster.messages import StartupNote


class StartupDisplay:
    """Live bars on a terminal, one line per stage elsewhere."""

    def __init__(self, console: Console, num_replicas: int) -> None:
        self._console = console
        self._num_replicas = num_replicas
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[amount]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}
        self._shown: dict[str, str] = {}

    def __enter__(self) -> "StartupDisplay":
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def stage(self, text: str) -> None:
        """The launcher is at a new stage."""
        self._console.print(f"[dim]{text}[/]")

    def update(self, notes: Mapping[str, StartupNote]) -> None:
        """Show how far each replica is."""
        for number, (replica, note) in enumerate(notes.items(), start=1):
            title = f"replica {number} of {self._num_replicas}: {note.stage}"
            if replica not in self._tasks:
                self._tasks[replica] = self._progress.add_task(title, amount="")
            total = note.total or None
            self._progress.update(
                self._tasks[replica], description=title, completed=note.done, total=total, amount=_amount(note)
            )
            if self._shown.get(replica) != note.stage and not self._console.is_terminal:
                self._console.print(title)
            self._shown[replica] = note.stage


def _amount(note: StartupNote) -> str:
    return f"{note.done / 2**20:,.0f} of {note.total / 2**20:,.0f} MiB" if note.total > 2**20 else ""
