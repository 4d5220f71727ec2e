"""Records that came before are dropped, against plain Python sets, in any batches and over restarts."""

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feeds.columns import ColumnDecoder
from feeds.decimals import Fixed
from feeds.market_data import Quote, Trade, VenueHeartbeat
from feeds.record_identity import token_of
from ingest.bars import BarPolicy, one_each
from ingest.identity import IDENTITY, REMEMBERED, UNRELIABLE_AFTER, unpacked_tables
from ingest.record import TRADE, Records, RecordWriter
from tests.ingest.building import builder_of

HOUR = 3600 * 10**9
POLICY = BarPolicy(HOUR)


class Tick(NamedTuple):
    token: int
    event: int
    price: int
    side: int = 0


ticks = st.builds(Tick, st.integers(0, 40), st.integers(0, 1), st.integers(1, 2), st.integers(0, 1))


def packed(items: list[Tick]) -> Records:
    writer = RecordWriter(max(1, len(items)))
    for number, (token, event, price, side) in enumerate(items, 1):
        at, values = HOUR + event, (price, 1, 0, 0, 0)
        writer.add(TRADE, 0, at, at, values, x=side, offset=number, token=token)
    return writer.records


def expected(items: list[Tick]) -> tuple[int, int]:
    """Volume and repeats, with all identities known; `UNRELIABLE_AFTER` contents of one token in a row end
    it.
    """
    seen: set[Tick] = set()
    taken = repeats = run = 0
    unsure, before = False, None
    for item in items:
        if item.token:
            if before is None or before.token != item.token:
                run = 1
            elif before != item:
                run += 1
            before = item
            unsure = unsure or run >= UNRELIABLE_AFTER
            if not unsure and item in seen:
                repeats += 1
                continue
            seen.add(item)
        taken += 1
    return taken, repeats


@given(items=st.lists(ticks, max_size=60), border=st.integers(0, 60), restarts=st.booleans())
@settings(max_examples=200)
def test_repeats_are_those_of_plain_sets_in_any_batches_and_over_restarts(
    items: list[Tick], border: int, restarts: bool
) -> None:
    builder = builder_of(1, POLICY)
    records = packed(items)
    closed = [builder.update(records[:border], 0)]
    repeats = builder.counts("duplicates")[0]
    if restarts:
        state = builder.cut(0)
        builder = builder_of(1, POLICY)
        builder.restore(0, state, [False], 0)
    else:
        repeats = 0
    closed += [builder.update(records[border:], 0), builder.flush()]
    assert (int(np.concatenate(closed)["v"].sum()), repeats + builder.counts("duplicates")[0]) == expected(
        items
    )


def test_at_least_the_newest_identities_are_remembered_and_the_memory_is_bounded() -> None:
    """Oracle: two generations of plain sets."""
    rng = np.random.default_rng(5)
    builder = builder_of(1, POLICY)
    fresh = [Tick(n, 0, 1) for n in range(1, 6 * REMEMBERED)]
    items: list[Tick] = []
    for n, tick in enumerate(fresh):
        items.append(tick)
        if n % 3 == 0:
            items.append(fresh[max(0, n - int(rng.integers(0, 3 * REMEMBERED)))])
    older, newer, repeats, recent = set[Tick](), set[Tick](), 0, []
    for item in items:
        if item in older or item in newer:
            repeats += 1
            continue
        assert item not in recent[-REMEMBERED:]
        recent.append(item)
        if len(newer) == REMEMBERED:
            older, newer = newer, set()
        newer.add(item)
    builder.update(packed(items), 0)
    assert builder.counts("duplicates") == [repeats]


def test_a_record_that_was_refused_or_late_is_no_repeat_when_it_is_sent_again() -> None:
    builder = builder_of(1, BarPolicy(10, late="refuse", price_jump=10, refuse_jumps=True))
    items = [Tick(1, 0, 100), Tick(2, 1, 9000), Tick(2, 1, 9000), Tick(3, 25, 100), Tick(4, 2, 100)]
    builder.update(packed([*items, items[-1]]), 0)
    assert builder.counts("duplicates") == [0]
    assert [each.reason for each in builder.take_refused()] == ["price_jump"] * 2 + ["late"] * 2


def test_sessions_that_stay_keep_what_they_know_when_others_come() -> None:
    builder = builder_of(1, POLICY)
    builder.update(packed([Tick(1, 0, 1)]), 0)
    builder.change(list(reversed(one_each(2, POLICY))), [None, 0])
    builder.update(packed([Tick(1, 0, 1)]), 0)
    assert builder.counts("duplicates") == [0, 1]


@given(number=st.integers(0, 2**64 - 1), name=st.text(max_size=8))
def test_a_number_goes_before_an_id_and_both_are_told_apart(number: int, name: str) -> None:
    one = Fixed(1)
    trade = Trade(venue="V", symbol="S", ts_event=1, ts_recv=1, price=one, size=one, id=name, seq=number)
    assert (token_of(trade, numbered=False) != 0) == bool(name)
    assert (token_of(trade, numbered=True) != 0) == bool(number or name)
    if number and name:
        assert token_of(trade, numbered=True) != token_of(trade, numbered=False)


def test_quotes_have_numbers_only_and_heartbeats_nothing() -> None:
    quote = Quote(venue="V", symbol="S", ts_event=1, ts_recv=1, bid=Fixed(1), ask=Fixed(2), seq=7)
    assert token_of(quote, numbered=True)
    assert not token_of(quote, numbered=False)
    assert not token_of(VenueHeartbeat(venue="V", symbol="S", ts_event=1, ts_recv=1, seq=7), numbered=True)


def test_a_quote_s_id_identifies_nothing_in_columns_either() -> None:
    payload = (
        b'{"type":"quote","venue":"V","symbol":"S","ts_event":1723075200000000000,'
        b'"ts_recv":1723075200000000000,"bid":"1","ask":"2","id":"7"}'
    )
    (row,) = ColumnDecoder(["V:S"]).decode([payload])
    assert row["taken"]
    assert row["token"] == 0


@pytest.mark.parametrize("name", ["feed", "table"])
def test_stored_identities_of_other_symbols_are_refused(name: str) -> None:
    rows = np.zeros(1, IDENTITY)
    rows[name] = 9
    with pytest.raises(ValueError, match="stored identities"):
        unpacked_tables(rows, 1)
