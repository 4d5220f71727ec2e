"""The order of a file and of arrays in it: newest first is turned round, and anything else is left alone."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feeds import record_order
from feeds.replay_source import ReplaySource
from tests.feeds.declared import TRADES, declared, pushed, read, read_file, with_symbols

START = 1_709_632_800
FORM = with_symbols(TRADES.replace('"iso"', '"epoch-s"'))
ARRAY = """
container = "jsonl"
{order}
[[records]]
kind = "trade"
venue = "T"
symbol = "S"
each = "$"
time = {{ field = "t", format = "epoch-s" }}
fields = {{ price = "p", size = "p", id = "i" }}
"""

Ticks = list[tuple[int, str]]
"""Seconds and symbol of each line."""


def lines(ticks: Ticks) -> str:
    rows = [f"{START + second},1,1,{number},{symbol}" for number, (second, symbol) in enumerate(ticks)]
    return "\n".join(["time,price,size,id,s", *rows, ""])


def form(order: str = "auto") -> str:
    return f'order = "{order}"\n{FORM}'


def numbers(found: object) -> list[int]:
    return [int(each.id) for each in found]  # type: ignore[attr-defined]  # trades


TICKS = st.lists(st.tuples(st.integers(0, 400), st.sampled_from("AB")), max_size=120)


@given(TICKS)
def test_a_file_newest_first_is_read_from_its_end(ticks: Ticks) -> None:
    newest_first = sorted(ticks, reverse=True, key=lambda tick: tick[0])
    found = read(form("newest_first"), lines(newest_first))
    assert numbers(found.trades) == list(range(len(ticks)))[::-1]
    assert [each.seq for each in found.records] == list(range(1, len(ticks) + 1))
    seen = read(form(), lines(newest_first))
    falls = any(a > b for symbol in "AB" for a, b in _steps(newest_first, symbol))
    assert numbers(seen.trades) == (numbers(found.trades) if falls else list(range(len(ticks))))


@given(TICKS)
def test_a_file_oldest_first_is_read_as_it_stands(ticks: Ticks) -> None:
    oldest_first = sorted(ticks, key=lambda tick: tick[0])
    for order in ("auto", "oldest_first"):
        found = read(form(order), lines(oldest_first))
        assert numbers(found.trades) == list(range(len(ticks)))
        assert found.notices == []


@given(TICKS)
def test_no_order_loses_a_record(ticks: Ticks) -> None:
    for order in ("auto", "oldest_first", "newest_first"):
        assert sorted(numbers(read(form(order), lines(ticks)).trades)) == list(range(len(ticks)))


def _steps(ticks: Ticks, symbol: str) -> list[tuple[int, int]]:
    own = [second for second, each in ticks if each == symbol]
    return list(pairwise(own))


def test_a_few_ticks_out_of_order_do_not_turn_a_file_round() -> None:
    ticks = [(second + (3 if second % 10 == 0 else 0), "A") for second in range(400)]
    assert numbers(read(form(), lines(ticks)).trades) == list(range(400))
    backwards = [each.ts_event for each in read(form(), lines(ticks[::-1])).trades]
    assert backwards == sorted((START + second) * 10**9 for second, _ in ticks)


def test_a_file_by_symbol_is_in_order() -> None:
    ticks = [(second, symbol) for symbol in "BA" for second in range(100)]
    assert numbers(read(form(), lines(ticks)).trades) == list(range(200))


@given(st.lists(st.integers(1, 60), min_size=1, max_size=9), st.booleans(), st.integers(0, 2))
def test_pages_newest_first_are_read_by_time(pages: list[int], ascending: bool, jitter: int) -> None:
    """A collector's pages, each newest first, in whichever order, and a few ticks out of order."""
    ends = [sum(pages[: n + 1]) for n in range(len(pages))]
    order = list(zip(ends, pages, strict=True))[:: 1 if ascending else -1]
    ticks = [(end - n - jitter * (n % 7 == 3), "A") for end, page in order for n in range(page)]
    found = read(form("newest_first"), lines(ticks))
    times = [each.ts_event for each in found.trades]
    assert times == sorted(times)
    assert sorted(numbers(found.trades)) == list(range(len(ticks)))
    if pages[0] > 40:
        assert [each.id for each in read(form(), lines(ticks)).trades] == [each.id for each in found.trades]


@pytest.mark.parametrize("rows", [1, 7, 5000])
def test_more_than_is_held_in_memory_goes_through_a_file(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(record_order, "IN_MEMORY", 1000)
    ticks = [(rows - n, "A") for n in range(rows)]
    found = read(form("newest_first"), lines(ticks) + "x,1,1,1,A\n")
    assert numbers(found.trades) == list(range(rows))[::-1]
    assert found.refused == [(rows + 2, "timestamp_unit")]
    assert found.notices == ["newest first: read in time order"]


def test_members_of_a_record_come_through_it_exactly() -> None:
    row = "1709632800.000000001,0.000000000000000001,999999999999999,x,A\n"
    declaration = form("newest_first")
    once = read(declaration, f"time,price,size,id,s\n{row}").records
    assert once == read(form("oldest_first"), f"time,price,size,id,s\n{row}").records
    assert type(once[0]) is type(read(FORM, f"time,price,size,id,s\n{row}").records[0])


@given(st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=10), max_size=8), st.booleans())
def test_elements_of_an_array_are_ordered_by_time(arrays: list[list[int]], newest_first: bool) -> None:
    """Within a line always; lines only where the file is newest first."""
    text = "".join(
        json.dumps([{"t": START + t, "p": 1, "i": f"{n}"} for t in times]) + "\n"
        for n, times in enumerate(arrays)
    )
    order = "newest_first" if newest_first else "oldest_first"
    found = read(ARRAY.format(order=f'order = "{order}"'), text)
    places = list(range(len(arrays)))
    if newest_first:
        places.sort(key=lambda place: (min(arrays[place]), -place))
    expected = [START + t for place in places for t in sorted(arrays[place])]
    assert [each.ts_event // 10**9 for each in found.records] == expected


def test_equal_times_of_an_array_newest_first_are_turned_round_too() -> None:
    text = json.dumps([{"t": START + t, "p": 1, "i": f"{n}"} for n, t in enumerate((2, 2, 1, 1, 1))])
    assert numbers(read(ARRAY.format(order=""), text).trades) == [4, 3, 2, 1, 0]


def test_a_body_newest_first_is_read_in_time_order() -> None:
    body = pushed(form(), lines([(5, "A"), (4, "A"), (3, "B"), (2, "A")]))
    assert body.usable == 4
    times = [json.loads(payload)["ts_event"] // 10**9 - START for payload in body.payloads]
    assert times == [2, 3, 4, 5]


async def test_offsets_and_notices_of_a_replay_follow_the_order(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(lines([(9 - n, "A") for n in range(10)]) + "x,1,1,1,A\n")
    source = ReplaySource("tape", path, declared(FORM), 0)
    await source.start()
    found = [message async for batch in source.batches() for message in batch if message.fault is None]
    assert [message.offset for message in found] == list(range(10))
    assert [json.loads(message.payload)["id"] for message in found] == [str(9 - n) for n in range(10)]
    assert source.notices == ["newest first: read in time order"]
    assert source.malformed_reasons == {"timestamp_unit": 1}
    assert source.first_malformed.startswith("line 12: timestamp_unit")
    assert [each.seq for each in read_file(FORM, path).records] == list(range(1, 11))
