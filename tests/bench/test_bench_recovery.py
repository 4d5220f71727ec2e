"""What `foretick bench recovery` makes of its rounds."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from bench.figures import Goal
from bench.recovery.kept import KEPT, NAMES, Kept, Took, figures_of, place
from bench.recovery.restart import RestartPlan
from bench.recovery.service import ENDS, End


def test_the_row_with_a_goal_has_ten_rounds_and_every_way_is_measured() -> None:
    assert RestartPlan().rounds >= 10
    assert get_args(Kept) == KEPT
    assert get_args(End) == ENDS


def test_rounds_become_medians_with_the_slowest_and_the_fastest() -> None:
    ours, log = [Took(1, 2, 3), Took(3, 3, 9), Took(2, 4, 4)], [Took(4, 8, 8)]
    first, whole, live = figures_of(ours, log, {}, "from the log alone", {NAMES[0]: Goal(2.0, of="ours")})
    assert (first.name, first.ours, first.reference, first.low, first.high) == (NAMES[0], 2, 4, 3, 1)
    assert first.verdict == "undecided", "the slowest round was slower"
    assert (whole.ours, live.ours, live.n, live.samples) == (3, 4, 3, [3, 9, 4])
    assert (whole.goal, live.goal) == (None, None)


@pytest.mark.parametrize("kept", KEPT)
def test_snapshots_are_kept_where_the_row_says(kept: Kept) -> None:
    mounts = {line.split()[1]: line.split()[2] for line in Path("/proc/self/mounts").read_text().splitlines()}
    with place(kept) as folder:
        path = Path(folder)
        where = next(str(each) for each in (path, *path.parents) if str(each) in mounts)
        assert (mounts[where] == "tmpfs") == (kept == "in memory")
    assert not path.exists()
