"""Compaction: windows that lie in several runs of blocks are copied to one, while nothing else is to be done.

Attention reads each run with one call, and a growing tape among others is torn into several.
"""

from __future__ import annotations

from collections.abc import Iterable

from regions.tape import Tape


def compact(tapes: Iterable[Tape]) -> bool:
    """Gather the window in the most runs, the next one when that cannot move; False when none could.

    At most one window is copied. Readers keep the old blocks until they go. Nothing is taken from caches
    for it: only a run that is free serves.
    """
    torn = sorted((tape for tape in tapes if tape.runs > 1), key=lambda tape: -tape.runs)
    return any(tape.gather() for tape in torn)
