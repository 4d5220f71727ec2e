"""How figures are written: Markdown tables, and numbers in cells."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bench.figures import Latency, Rates
from bench.machine import Machine


def head(command: str, started: str, machine: Machine, threads: int, load_at_end: float) -> str:
    """The line that says what was run, when, and on what."""
    packages = ", ".join(f"{name} {version}" for name, version in machine.packages.items())
    return (
        f"`{command}`, {started}: {machine.processor}, {machine.cores} cores, "
        f"{threads} torch threads, Python {machine.python}, {packages}. Load average "
        f"{machine.load:.1f} at the start, {load_at_end:.1f} at the end."
    )


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; all columns but the first are numbers."""
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def ms(value: float) -> str:
    """Milliseconds."""
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def pair(latency: Latency | None) -> str:
    """p50 / p99 in ms; an empty cell for what did not occur."""
    return "" if latency is None else f"{ms(latency.p50_ms)} / {ms(latency.p99_ms)}"


def median_and_range(rates: Rates) -> tuple[str, str]:
    """Things a second: the median run, and from the slowest to the fastest."""
    return f"{rates.median:,.0f}", f"{rates.low:,.0f} to {rates.high:,.0f}"


def ratio(value: float, reference: float) -> str:
    """How many times the reference."""
    return f"{value / reference:.2f}"
