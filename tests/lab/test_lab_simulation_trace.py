"""Traces round-trip; an invalid line is reported by its number."""

from collections.abc import Callable, Iterator

import pytest

from lab.simulation.inputs import Input, TraceError, read_trace, write_trace
from lab.simulation.workload import Load, anns, crawler, oneshot
from tests.kit.scheduler.simulated import piece

OPEN = '{"time_ns": 5, "request": 7, "op": "open", "segments": [[0, 4]]}'


@pytest.mark.parametrize("workload", [crawler, anns, oneshot])
def test_a_written_trace_reads_back_equal(workload: Callable[[Load], Iterator[Input]]) -> None:
    made = workload(Load(4, 40, max_tokens=2))
    inputs = [each._replace(tenant="desk", weight=0.5) if each.op == "open" else each for each in made]
    found = list(read_trace(write_trace(inputs)))
    assert [each[:5] for each in found] == [each[:5] for each in inputs]
    assert {each.max_tokens for each in found if each.op == "open"} == {2}
    assert {(each.tenant, each.weight) for each in found if each.op == "open"} == {("desk", 0.5)}


def test_requests_are_numbered_in_order_of_opening_and_tokens_may_be_listed() -> None:
    lines = [
        OPEN,
        "",
        '{"time_ns": 5, "request": 3, "op": "open", "tokens": [9, 8, 9], "last": true, "max_tokens": 4}',
        '{"time_ns": 6, "request": 7, "op": "update", "segments": [[0, 2], [7, 1]]}',
        '{"time_ns": 6, "request": 7, "op": "append", "segments": [], "last": true}',
        '{"time_ns": 9, "request": 7, "op": "open", "tokens": [1], "last": true}',
    ]
    assert list(read_trace(lines)) == [
        piece(5, 0, "open", (0, 4)),
        piece(5, 1, "open", (9, 1), (8, 2), last=True, max_tokens=4),
        piece(6, 0, "update", (0, 2), (7, 1)),
        piece(6, 0, "append", last=True),
        piece(9, 2, "open", (1, 1), last=True),
    ]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([OPEN, "{"], r"line 2: Input data was truncated"),
        ([OPEN, OPEN], r"line 2: request 7 is open already"),
        (['{"time_ns": 5, "request": 1, "op": "append", "tokens": [1]}'], r"line 1: request 1 is not open"),
        (
            [OPEN, '{"time_ns": 4, "request": 7, "op": "append", "tokens": [1]}'],
            r"line 2: time runs backwards",
        ),
        (
            ['{"time_ns": -1, "request": 1, "op": "open", "tokens": [1]}'],
            r"line 1: `time_ns` must be at least 0",
        ),
        (
            ['{"time_ns": 1, "request": 1, "op": "open", "tokens": [1], "max_tokens": 0}'],
            r"line 1: .*at least 1",
        ),
        (
            ['{"time_ns": 1, "request": 1, "op": "open", "tokens": [1], "weight": 0}'],
            r"line 1: a tenant's weight must be from",
        ),
        (['{"time_ns": 1, "request": 1, "op": "open"}'], r"line 1: needs either"),
        (['{"time_ns": 1, "request": 1, "op": "open", "segments": [[0, 0]]}'], r"line 1: a segment is"),
        (
            ['{"time_ns": 1, "request": 1, "op": "open", "tokens": [2147483648]}'],
            r"ids from 0 to 2147483647",
        ),
        (
            ['{"time_ns": 1, "request": 1, "op": "close", "tokens": [1]}'],
            r"line 1: Invalid enum value 'close'",
        ),
        (
            ['{"time_ns": 1, "request": 1, "op": "open", "tokens": [1], "x": 1}'],
            r"line 1: .*unknown field `x`",
        ),
        (
            [OPEN, '{"time_ns": 6, "request": 7, "op": "update", "tokens": [], "last": true}'],
            r"line 2: request 7 is finished without a token",
        ),
        ([OPEN], r"line 1: the trace ends with unfinished requests: \[7\]"),
        (["", " "], r"has no request"),
    ],
)
def test_lines_that_cannot_be_used_are_named(lines: list[str], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        list(read_trace(lines))


def test_a_trace_is_read_lazily() -> None:
    inputs = read_trace([OPEN, "broken"])
    assert next(inputs).time_ns == 5
    with pytest.raises(TraceError, match="line 2"):
        next(inputs)
