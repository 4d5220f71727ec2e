"""What a window retains, against a list from which records leave one by one."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingest import retained
from ingest.backlog import TapeWindow
from ingest.retained import Retained

Row = tuple[int, int, int]


def expected(rows: list[Row], window: TapeWindow) -> list[Row]:
    kept: list[Row] = []
    for row in rows:
        while kept and (
            sum(tokens for _, tokens, _ in kept) + row[1] > window.tokens
            or (window.records and len(kept) + 1 > window.records)
            or (window.span_ns and kept[0][2] < row[2] - window.span_ns)
        ):
            kept.pop(0)
        kept.append(row)
    return kept


steps_of = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 5)), max_size=40)
windows = st.builds(TapeWindow, st.integers(1, 40), st.sampled_from([0, 1, 5]), st.sampled_from([0, 1, 12]))


def rows_of(steps: list[tuple[int, int]]) -> list[Row]:
    return [(n, tokens, sum(step for _, step in steps[:n])) for n, (tokens, _) in enumerate(steps)]


@given(steps_of, windows)
def test_records_leave_one_by_one(steps: list[tuple[int, int]], window: TapeWindow) -> None:
    rows, gone = rows_of(steps), []
    made: Retained[int] = Retained(window)
    for row in rows:
        gone += made.add(*row)
    assert made.rows() == expected(rows, window)
    assert [*gone, *made] == [n for n, _, _ in rows]


@given(
    steps_of, windows, st.lists(st.integers(0, 40)), st.integers(1, 9), st.sampled_from(["add", "rows", ""])
)
def test_deferred_records_leave_as_they_would_one_by_one(
    steps: list[tuple[int, int]], window: TapeWindow, borders: list[int], most: int, between: str
) -> None:
    rows = rows_of(steps)
    made: Retained[int] = Retained(window)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retained, "_MAX_DEFERRED", most)
        for start, end in pairwise([0, *sorted(borders), len(rows)]):
            if between == "add" and start % 2:
                for row in rows[start:end]:
                    made.add(*row)
            elif rows[start:end]:
                made.defer(*zip(*rows[start:end], strict=True))
            if between == "rows":
                made.restore(made.rows())
    assert made.rows() == expected(rows, window)
