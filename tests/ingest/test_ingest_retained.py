"""What a window retains, against a list from which records leave one by one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ingest.backlog import Window
from ingest.retained import Retained

Row = tuple[int, int, int]


def expected(rows: list[Row], window: Window) -> list[Row]:
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


@given(
    steps=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 5)), max_size=40),
    window=st.builds(Window, st.integers(1, 40), st.sampled_from([0, 1, 5]), st.sampled_from([0, 1, 12])),
    border=st.integers(0, 40),
)
def test_records_leave_as_they_would_one_by_one(
    steps: list[tuple[int, int]], window: Window, border: int
) -> None:
    rows = [(n, tokens, sum(step for _, step in steps[:n])) for n, (tokens, _) in enumerate(steps)]
    made: Retained[int] = Retained(window)
    gone: list[int] = []
    for part in (rows[:border], rows[border:]):
        if part:
            gone += made.extend(part)
        made.restore(made.rows())
    assert made.rows() == expected(rows, window)
    assert [*gone, *made] == [n for n, _, _ in rows]
