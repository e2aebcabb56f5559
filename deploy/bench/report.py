"""How a benchmark speaks: tables for people as it goes, one JSON object at the end for programs."""

import json
import math
import os
import platform
import sys
from collections.abc import Iterable, Mapping
from contextlib import redirect_stdout
from dataclasses import asdict, is_dataclass
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.table import Table

from .metrics import Bar, Summary

_CPU_FLAGS = ("avx2", "f16c", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "asimddp")

_WIDTH = 110
"""Columns where there is no terminal."""


def machine_facts() -> dict[str, Any]:
    """What the figures depend on."""
    info = _cpu_info()
    return {
        "cpu": info.get("model name", platform.processor()),
        "cpu_family": f"{info.get('cpu family', '?')}/{info.get('model', '?')}",
        "cores": os.cpu_count(),
        "flags": [flag for flag in _CPU_FLAGS if flag in info.get("flags", info.get("Features", "")).split()],
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("warmroot", "torch", "ray", "transformers")},
        "load_average": os.getloadavg(),
    }


def _cpu_info() -> dict[str, str]:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().split("\n\n")[0].splitlines() if path.exists() else []
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


class Report:
    """Collects a benchmark's result while it prints tables; a context manager.

    With ``json_only`` the tables, and whatever else is printed until it is closed, go to stderr.
    """

    def __init__(self, name: str, parameters: Mapping[str, Any], *, json_only: bool) -> None:
        output = sys.stderr if json_only else sys.stdout
        self._stdout = sys.stdout
        self._redirection = redirect_stdout(output)
        self.console = Console(file=output, highlight=False, width=None if output.isatty() else _WIDTH)
        self.result: dict[str, Any] = {"bench": name, "parameters": dict(parameters), "machine": machine_facts()}
        self._bars: dict[str, Bar] = {}

    def __enter__(self) -> "Report":
        # Ray prints what its processes say on the driver's stdout.
        self._redirection.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._redirection.__exit__(kind, error, trace)

    def note(self, text: str) -> None:
        """One line about what goes on."""
        self.console.print(text, style="dim", markup=False)

    def table(self, title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
        """Print a table: names left, figures right."""
        table = Table(title=title, title_justify="left")
        for number, column in enumerate(columns):
            table.add_column(column, justify="right" if number else "left", no_wrap=not number)
        for row in rows:
            table.add_row(*row)
        self.console.print(table)

    def summaries(self, title: str, by_name: Mapping[str, Summary]) -> None:
        """Print runs side by side."""
        columns = ("", "output tok/s", "decode tok/s", "TTFT p50 ms", "p90 ms", "ITL p50 ms", "p99 ms", "cached")
        self.table(title, columns, [_row(name, summary) for name, summary in by_name.items()])

    def bar(self, name: str, value: float, wanted: float, *, at_least: bool = True) -> None:
        """Hold a figure against its bound."""
        self._bars[name] = Bar(value, wanted, at_least)

    def finish(self) -> int:
        """Print the bars and the JSON object. The exit status: 0, or 1 if a bar does not hold."""
        if self._bars:
            rows = [
                (
                    name,
                    f"{bar.value:.3f}",
                    f"{'>=' if bar.at_least else '<='} {bar.wanted:g}",
                    "yes" if bar.holds else "NO",
                )
                for name, bar in self._bars.items()
            ]
            self.table("Bars", ("", "value", "wanted", "holds"), rows)
        self.result["bars"] = {name: bar.to_json() for name, bar in self._bars.items()}
        print(json.dumps(_plain(self.result), separators=(",", ":")), file=self._stdout, flush=True)
        return 0 if all(bar.holds for bar in self._bars.values()) else 1


def _row(name: str, run: Summary) -> tuple[str, ...]:
    milliseconds = (run.ttft_p50_s, run.ttft_p90_s, run.itl_p50_s, run.itl_p99_s)
    return (
        name,
        f"{run.output_tokens_per_s:.1f}",
        f"{run.decode_tokens_per_s:.1f}",
        *(f"{value * 1e3:.1f}" for value in milliseconds),
        f"{run.cached_token_rate:.0%}",
    )


def _plain(value: Any) -> Any:
    """JSON has no NaN: it becomes null. Floats keep six digits."""
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
