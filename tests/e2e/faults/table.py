"""The page docs/measurements/faults.md: what came of each fault, as a table."""

import os
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from tests.e2e.faults.watch import FASTER, IN_TIME_S, Outcome
from tests.kit.sampling import SEED

FILE = Path(__file__).parents[3] / ".cache" / "faults.md"
PAGE = """# Measured: faults

Faults of running daemons, one after the other, in `tests/e2e/faults`: what Alertmanager notified, when, and
what `foretick doctor` found meanwhile. Nothing else was notified. *Seen after*: from the fault until the
alert's condition held, by the machine's clock, for what the daemon does takes as long as ever. *Told after
that*: until the notification. The clock of alerts runs faster: windows, waits, scrapes and evaluations are
{faster:g} times as short. *Late* is the time from when the condition had held for as long as the alert waits
to the notification, by that clock: less than {limit:g} s is in time.

`make faults FASTER={faster:g}`, commit {commit}, {when}; load {load:.1f} on {cpus} CPUs.

{rows}
"""
COLUMNS = {
    "fault": "---",
    "alert": "---",
    "severity": "---",
    "seen after, s": "---:",
    "told after that, s": "---:",
    "late, s": "---:",
    "the doctor's finding and next step": "---",
}
"""With their alignment."""


class Table:
    """``rows``: what came of each fault, in order."""

    def __init__(self) -> None:
        self.rows: list[Outcome] = []

    def write(self) -> None:
        """Leave the page in `FILE`."""
        FILE.parent.mkdir(exist_ok=True)
        FILE.write_text(
            PAGE.format(
                faster=FASTER,
                limit=IN_TIME_S,
                commit=os.environ[SEED],
                when=datetime.now(UTC).isoformat(" ", "minutes"),
                load=os.getloadavg()[2],
                cpus=len(os.sched_getaffinity(0)),
                rows="\n".join([line(COLUMNS), line(COLUMNS.values()), *map(row, self.rows)]),
            )
        )


def row(found: Outcome) -> str:
    """One line of it."""
    cells = (
        found.fault,
        found.alert,
        found.severity,
        f"{found.held_s:.1f}",
        f"{found.told_s:.1f}",
        f"{found.late_s:.0f}",
        f"{found.check}: {found.step}" if found.finding else "-",
    )
    return line(cells)


def line(cells: Iterable[str]) -> str:
    """Cells of a table in Markdown."""
    return f"| {' | '.join(cells)} |"
