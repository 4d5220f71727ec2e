"""The newest lines of the daemon's log in the journal of systemd."""

import subprocess
from collections.abc import Sequence

from daemon.doctor.diagnosis import Diagnosis, of_outcome, skipped
from daemon.doctor.machine import Run, run_program

LINES = 200
_LEVELS = ("warning", "error", "critical")
_WORRYING = (*(f" {level.upper()} " for level in _LEVELS), *(f'"level": "{level}"' for level in _LEVELS))
"""As `daemon.logs` writes them, in text and in JSON."""


def read_log(unit: str, run: Run = run_program) -> tuple[str, ...] | None:
    """The lines of a unit; None where there is no journal, or it has none of that unit."""
    options = ("--lines", str(LINES), "--no-pager", "--output", "short-iso", "--quiet")
    try:
        return tuple(run(("journalctl", "--unit", unit, *options)).splitlines()) or None
    except (OSError, subprocess.SubprocessError):
        return None


def judge_log(lines: Sequence[str] | None) -> Diagnosis:
    """How many of them are warnings and errors, and the last one."""
    if lines is None:
        return skipped(
            "log", "the journal has no such unit", "name it by --unit, or read the log where it goes"
        )
    worrying = [line for line in lines if any(level in line for level in _WORRYING)]
    last = f"; the last: {worrying[-1].strip()}" if worrying else ""
    seen = f"{len(worrying)} of the newest {len(lines)} lines are warnings or errors{last}"
    return of_outcome("log", not worrying, seen, "read what came before it (journalctl -u)")
