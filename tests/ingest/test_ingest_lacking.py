"""Bars and windows say which records they lack, against a plain list of what was dropped and refused."""

import time

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ingest.backlog import TapeWindow
from ingest.bar_kernel import BAR, INCOMPLETE, LACKS_LATE, NEVER
from ingest.bars import BarPolicy, one_each
from ingest.plane import SessionSpec, TapeRecord
from ingest.record import REFUSAL, TRADE, Records, RecordWriter
from tests.ingest.building import Consumer, batches, builder_of, built, plane_on

UNIT = 10**9
INTERVAL = 10
START = 1000
items = st.lists(st.tuples(st.sampled_from([TRADE, TRADE, TRADE, REFUSAL]), st.integers(0, 80)), max_size=50)
Item = tuple[int, int]


def packed(found: list[Item], unit: int = 1) -> Records:
    writer = RecordWriter(max(1, len(found)))
    for number, (kind, second) in enumerate(found, 1):
        moment = (START + second) * unit
        values = (UNIT, UNIT, 0, 0, 0) if kind == TRADE else (0, 0, 0, 0, 0)
        writer.add(kind, 0, moment, moment, values, offset=number)
    return writer.records


def late_openings(found: list[Item], lateness: int) -> list[tuple[int, int]]:
    """Of each late trade, its place and its bar's opening."""
    newest, late = -1, []
    for number, (kind, second) in enumerate(found):
        if kind == TRADE:
            newest = max(newest, START + second)
            opened = (START + second) // INTERVAL * INTERVAL
            if opened + INTERVAL <= (newest - lateness) // INTERVAL * INTERVAL:
                late.append((number, opened))
    return late


@given(found=items, lateness=st.sampled_from([0, 10, 25]), cuts=st.lists(st.integers(0, 50), max_size=3))
@settings(max_examples=200)
def test_bars_know_the_newest_one_that_lacks_dropped_or_refused_records(
    found: list[Item], lateness: int, cuts: list[int]
) -> None:
    builder = builder_of(1, BarPolicy(INTERVAL, lateness))
    bars = [builder.update(batch, 0) for batch in batches(packed(found), cuts)]
    at_end = builder.flush()
    at_end["closed_by"] = len(found) + 1
    made = np.concatenate([np.zeros(0, BAR), *bars, at_end])
    late = late_openings(found, lateness)
    assert builder.counts("late") == [len(late)]
    trades = sum(kind == TRADE for kind, _ in found)
    assert int(made["n_ticks"].sum()) == builder.counts("taken")[0] == trades - len(late)
    refused = {(START + second) // INTERVAL * INTERVAL for kind, second in found if kind == REFUSAL}
    for bar in made:
        closed_by = int(bar["closed_by"])
        before = [opened for number, opened in late if number + 1 < closed_by]
        assert int(bar["late_open"]) == max(before, default=NEVER)
        opened = int(bar["ts_open"])
        assert not (bar["flags"] & INCOMPLETE) or opened in refused
        in_time = [n for n, (kind, second) in enumerate(found, 1) if kind == REFUSAL]
        own = [n for n in in_time if (START + found[n - 1][1]) // INTERVAL * INTERVAL == opened]
        # further ahead than bars are open, several intervals share one place: only the latest one's bar is
        # flagged, and the others are known to the session at once
        if any(n < closed_by for n in own):
            assert bar["flags"] & INCOMPLETE or int(bar["refused_open"]) >= opened
    known = [int(bar["refused_open"]) for bar in made]
    assert set(known) <= refused | {NEVER}
    assert known == sorted(known)


def test_a_record_refused_without_a_time_flags_the_open_bar_and_the_next_record_s() -> None:
    records = packed([(TRADE, 1), (REFUSAL, 2), (TRADE, 11), (TRADE, 21)])
    records["ts_event"][1] = 0
    bars = built(builder_of(1, BarPolicy(INTERVAL)), records)
    assert [bool(flags & INCOMPLETE) for flags in bars["flags"].tolist()] == [True, True, False]


def test_empty_bars_say_that_all_their_records_were_refused() -> None:
    records = packed([(TRADE, 1), (REFUSAL, 12), (TRADE, 31)])
    bars = built(builder_of(1, BarPolicy(INTERVAL, empty="fill")), records)
    assert [bool(flags & INCOMPLETE) for flags in bars["flags"].tolist()] == [False, True, False, False]
    assert bars["refused_open"].tolist() == [NEVER, 1010, 1010, 1010]


def windows(found: list[Item], bars: int, restart: int = 0) -> list[TapeRecord]:
    """The tape records of a plane whose window has so many bars; it is stored and restored in between."""
    records, state, consumer = packed(found, UNIT), None, Consumer()
    spec = SessionSpec("s", one_each(1, BarPolicy(INTERVAL * UNIT))[0], window=TapeWindow(10**6, bars))
    for part in (records[:restart], records[restart:]) if restart else (records,):
        with plane_on([spec], consumer, time.monotonic_ns, capacity=256) as (plane, ring, _):
            if state is not None:
                plane.restore("s", state[0], [False])
                plane.go_on(["s"])
            ring.push(part)
            plane.step()
            state = plane.cut("s")
    return consumer.records("s")


def test_a_window_lacks_records_while_it_has_the_bar_and_no_longer() -> None:
    """The record at 12 is late when the bar of 10 has closed, and the bar of 20 lacks a refused record."""
    found = [(TRADE, 1), (TRADE, 11), (TRADE, 21), (TRADE, 12), (REFUSAL, 25)]
    found += [(TRADE, second) for second in (31, 41, 51, 61)]
    flags = [(LACKS_LATE, INCOMPLETE)] * 6
    for restart in (0, 5, 7):
        made = windows(found, 3, restart)
        assert [record.bar.ts_open // UNIT for record in made] == [1000, 1010, 1020, 1030, 1040, 1050]
        lacks = [
            tuple(bool(record.flags & flag) for flag in each)
            for record, each in zip(made, flags, strict=True)
        ]
        assert lacks == [
            (False, False),
            (False, False),  # the record came after this bar had closed
            (True, True),
            (True, True),
            (False, True),
            (False, False),
        ]
