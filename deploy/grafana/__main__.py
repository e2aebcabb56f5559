"""Writes the chart's dashboards and rules."""

from .files import write

if __name__ == "__main__":
    write()
