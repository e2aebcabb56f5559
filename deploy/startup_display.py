"""What a starting cluster shows: its stage, and a bar for each replica that loads."""

from collections.abc import Mapping

from rich.console import Console
from rich.progress import SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from ..cluster.messages import StartupNote
from .progress_display import ProgressDisplay


class StartupDisplay(ProgressDisplay):
    """Live bars on a terminal, one line per stage elsewhere."""

    def __init__(self, console: Console, num_replicas: int) -> None:
        amount = TextColumn("{task.fields[amount]}")
        super().__init__(console, amount, TimeElapsedColumn(), before=(SpinnerColumn(),))
        self._num_replicas = num_replicas
        self._tasks: dict[str, TaskID] = {}
        self._shown: dict[str, str] = {}

    def stage(self, text: str) -> None:
        """The launcher is at a new stage."""
        self.console.print(f"[dim]{text}[/]")

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
            if self._shown.get(replica) != note.stage and not self.console.is_terminal:
                self.console.print(title)
            self._shown[replica] = note.stage


def _amount(note: StartupNote) -> str:
    return f"{note.done / 2**20:,.0f} of {note.total / 2**20:,.0f} MiB" if note.total > 2**20 else ""
