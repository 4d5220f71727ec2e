"""The numba half of `ingest.bars`: state arrays and the loop over records.

One row of SESSION is a session with its policy, one row of FEED is one symbol of one session. A session's
feeds are adjacent, and so are the open bars of its feeds. A feed's open bars are in a ring of K slots; a
bar's slot is its interval number modulo K. Open bars end after the watermark and start at or before the
newest event, so with K = lateness // interval + 2 no two of them share a slot.

Routes from symbols to feeds are in compressed rows: those of symbol s are `routes[starts[s]:starts[s + 1]]`.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from ingest.feed_rules import (
    BAD_TICK,
    DEAD_LETTER,
    DROP,
    DUPLICATE,
    HOLD,
    QUALITY,
    SPLIT,
    SUSPECT,
    VENUE_BEHIND,
    action_of,
    announce_split,
    flags_of,
    judge,
    repeats,
    rolls_between,
)
from ingest.identity import Tables, identity_of, is_known, remember
from ingest.record import (
    ACTION,
    BOOK,
    FLAG_GAP,
    FLAG_MORE,
    FLAG_REPLAY,
    HALT,
    HEARTBEAT,
    QUOTE,
    RECORD,
    REFUSAL,
    RESUME,
    STATUS,
    TEXT,
    WORDS,
    Records,
)
from ingest.record import BAR as READY_BAR
from ingest.record import OPEN as OPENED
from ingest.record import SPLIT as SPLIT_ACTION
from ingest.volumes import add_volume, is_volume, no_volume
from support.numba_kernel import kernel

SKEWED, GAP, EMPTY, REPLAYED, JUMP, AMENDS = 1, 2, 4, FLAG_REPLAY, 16, 32
LATE, REFUSED = 64, 128
"""Not bars, but records in their place among the bars: late ones, for `ingest.late_updates`, and refused
ones.
"""
LACKS_LATE, INCOMPLETE = 256, 512
"""The bar, or a window that ends with it, lacks records: late ones that were dropped, or refused ones."""
OTHER_INTERVAL = 1024
"""With REFUSED: a ready-made bar of another interval than the session's."""
SPREAD = 2048
"""The bar has records of more than `SPANS` streams: where those of the others were read is not known."""
EVENT = 1 << 26
"""Not a bar, but a record that is in none, in its place among the bars: see `ingest.events`."""
HALTED, NEWS, ACTED = 1 << 27, 1 << 28, 1 << 29
"""A symbol of the session is halted; a headline, an action came since the row before."""
RESETS = 1 << 30
"""The window begins again before this row."""
ROLLED = 1 << 31
"""The first bar of its symbol that is of another contract than the bar before it."""
OF_MOMENT = EVENT | HALTED | NEWS | ACTED | RESETS | ROLLED
"""Flags of a row by when it came: a correction of the bar does not have them."""
AS_LINE, AS_FLAG, IGNORED = 0, 1, 2
"""What is done about an event."""
STAYS, EMPTIED, ADJUSTED = 0, 1, 2
"""What becomes of the window with the first bar behind a split."""
KINDS_OF_EVENT = 4
SPANS = 4
"""Streams that a bar, and a feed, remember."""
_OF_RECORD = SKEWED | REPLAYED
DROP_LATE, AMEND, REFUSE = 0, 1, 2
"""What becomes of a late record."""
CONFIRMED = 10
"""This many refused prices in a row, each near the one before, are a new price level."""

BAR = np.dtype(
    [
        ("session", "i4"),
        ("leg", "i4"),  # number of its symbol among the session's
        ("flags", "u4"),
        ("record", "u4"),  # REFUSED only: its index in the batch
        ("n_ticks", "i8"),  # LATE: 1, or 0 for a ready-made bar; EVENT: the record's kind
        ("ts_open", "i8"),  # EVENT: its time
        ("interval", "i8"),
        # prices are in units of 10^-`price_scale` of the session; EVENT: `a` to `e` and `x` of the record and
        # its `size_finer` are in `o` to `v_low`
        ("o", "i8"),
        ("h", "i8"),
        ("l", "i8"),
        ("c", "i8"),
        ("v", "i8"),  # the volume in 1e-9, with `v_high` and `v_low`: see `ingest.volumes`
        ("ts_first_event", "i8"),
        ("ts_last_event", "i8"),
        ("ts_source", "i8"),
        ("ts_ring", "i8"),
        ("ts_closed", "i8"),  # when the record that closed it entered the ring
        ("ring_wait", "i8"),
        ("closed_by", "i8"),  # which of the session's records closed it
        # first and last offset of its records by stream, see `ingest.record`; stream 0: no more
        ("streams", "u8", (SPANS,)),
        ("firsts", "i8", (SPANS,)),
        ("lasts", "i8", (SPANS,)),
        # openings of the newest closed intervals of the session that lack records: late ones, refused ones
        ("late_open", "i8"),
        ("refused_open", "i8"),
        ("v_high", "i8"),
        ("v_low", "i8"),
        ("split", "f8"),  # the factor by which it adjusts the window before it; 0: by none
    ]
)
# An open bar, with what closing it needs.
# `marked`: number of an interval without ticks so far of which records were refused; NEVER: none.
OPEN = np.dtype([("bar", BAR), ("index", "i8"), ("marked", "i8")])
SESSION = np.dtype(
    [
        # the policy; times in ns
        ("interval", "i8"),
        ("lateness", "i8"),
        ("max_fill", "i8"),
        ("idle_close", "i8"),
        ("late", "i8"),
        ("price_jump", "f8"),  # factor; 0: no limit
        ("refuses_jumps", "i8"),
        ("any_interval", "i8"),  # ready-made bars of other intervals are taken
        ("actions", "i8"),  # of `ingest.feed_rules`, as is the band of prices
        ("bad_tick_band", "f8"),
        ("venue_lag", "i8"),  # how far behind a venue is waited for; 0: there is one venue, or none waits
        ("price_finer", "i8"),  # of its symbols' records; see `ingest.record`
        ("events", "i8"),  # what is done about events, two bits for each kind
        ("on_split", "i8"),  # what becomes of the window then: `STAYS` and following
        ("roll_resets", "i8"),  # a roll resets the window
        # its rows of FEED and OPEN
        ("first_feed", "i8"),
        ("end_feed", "i8"),
        ("first_slot", "i8"),
        ("end_slot", "i8"),
        ("since", "i8"),  # what entered the ring earlier is not its
        ("newest_event", "i8"),
        ("late_open", "i8"),  # as in BAR; NEVER: none
        ("refused_open", "i8"),
        ("late_event", "i8"),  # time of the newest late record
        ("records", "i8"),  # that it had so far
        ("last_ring", "i8"),
        ("halted", "i8"),  # symbols that are
        ("marks", "i8"),  # flags of its next row
    ]
)
FEED = np.dtype(
    [
        ("session", "i4"),
        ("leg", "i4"),
        ("first_slot", "i8"),
        ("end_slot", "i8"),
        ("next_index", "i8"),  # every interval below is closed
        ("kind", "i4"),  # the record kind that makes this feed's bars; 0 before its first record
        ("closed_any", "i4"),
        ("gap", "i4"),
        ("incomplete", "i4"),  # records of an unknown time were refused: the next record's bar lacks them
        ("empty_run", "i4"),  # empty bars emitted since the last real one
        ("late", "u8"),
        ("ignored", "u8"),
        ("jumps", "u8"),
        ("duplicates", "u8"),
        ("taken", "u8"),  # into bars
        # see `ingest.identity`
        ("identity", "u8"),  # of the newest record
        ("token", "u4"),
        ("same_token", "u4"),  # records in a row with this token, no two of them equal
        ("unreliable", "i4"),
        ("table", "i4"),  # the newer one
        ("remembered", "i8"),  # identities in it
        ("price", "i8"),  # the newest one taken; 0: none
        ("price_event", "i8"),
        ("refused_price", "i8"),  # the newest one refused
        ("refused_run", "i8"),  # refused in a row, each near the one before
        # streams and offset of the newest record of each, but for heartbeats: the newest one comes first
        ("streams", "u8", (SPANS,)),
        ("offsets", "i8", (SPANS,)),
        ("part", "i8"),  # of the newest record of all
        ("more", "i8"),  # that message has more records
        # the same of the newest records that it had taken before it was restored
        ("had_streams", "u8", (SPANS,)),  # 0: none
        ("had_offsets", "i8", (SPANS,)),
        ("had_part", "i8"),
        ("repeated", "u8"),  # records ignored because it had taken them
        ("last", BAR),  # the last closed bar
        ("quality", QUALITY),
        ("dropped", "u8"),  # records with a fault that were dropped
        ("venue", "i8"),  # number of the first symbol of its venue, whose feed has the venue's newest event
        ("venue_event", "i8"),
        ("holds", "i4"),  # `held` may be a bad tick: its bar is held open for it until the next record
        ("held_marks", "i4"),  # flags of its bar, once it is taken
        ("held", RECORD),
        ("events", "u8", (KINDS_OF_EVENT,)),  # by kind
        ("halted", "i4"),
    ]
)
NEVER = np.iinfo(np.int64).min
_MOST = np.iinfo(np.int64).max

Bars = npt.NDArray[np.void]
Slots = npt.NDArray[np.void]
Numbers = npt.NDArray[np.int64]
Masks = npt.NDArray[np.uint32]
Row = Any  # one element of a structured array


@kernel
def _close(session: Row, bar: Row) -> None:
    """Note in a bar that closes, and in its session, which of the bars so far lack records."""
    if bar["flags"] & np.uint32(INCOMPLETE):
        session["refused_open"] = max(session["refused_open"], bar["ts_open"])
    bar["late_open"] = session["late_open"]
    bar["refused_open"] = session["refused_open"]


@kernel
def _mark(session: Row, row: Row) -> None:
    """Note in a row, which is not refused or late, what came before it that has no row."""
    row["flags"] |= np.uint32(session["marks"]) | np.uint32(HALTED if session["halted"] > 0 else 0)
    session["marks"] = 0


@kernel
def _roll(session: Row) -> int:
    """Flags of the first bar of another contract."""
    return ROLLED | (RESETS if session["roll_resets"] else 0)


@kernel
def _split(session: Row, feed: Row, bar: Row) -> None:
    """Note in a bar that closes whether it is the first one behind a split, and what that does."""
    quality = feed["quality"]
    if quality["behind_factor"] > 0 and bar["ts_last_event"] >= quality["behind_at"]:
        if session["on_split"] != STAYS:
            bar["flags"] |= np.uint32(RESETS)
        if session["on_split"] == ADJUSTED:
            bar["split"] = quality["behind_factor"]
        quality["behind_factor"] = 0


@kernel
def _emit_empty(session: Row, feed: Row, index: int, marks: int, out: Bars, at: int) -> None:
    """A flat bar at the last close for an interval without ticks."""
    last = feed["last"]
    last["ts_open"] = index * last["interval"]
    last["o"] = last["c"]
    last["h"] = last["c"]
    last["l"] = last["c"]
    no_volume(last)
    last["n_ticks"] = 0
    last["split"] = 0
    last["flags"] = (
        EMPTY
        | (GAP if feed["gap"] else 0)
        | np.uint32(marks)
        | (last["flags"] & np.uint32(REPLAYED | SPREAD))
    )
    _close(session, last)
    _mark(session, last)
    last["ts_closed"] = session["last_ring"]
    last["closed_by"] = session["records"]
    out[at] = last


@kernel
def mark_gap(feed: Row, slots: Slots) -> None:
    """Records were lost: flag the open bars, the empty ones up to the next record, and that record's bar."""
    feed["gap"] = 1
    for slot in range(feed["first_slot"], feed["end_slot"]):
        slots[slot].bar.flags |= np.uint32(GAP)


@kernel
def mark_refused(session: Row, feed: Row, slots: Slots, event: Any) -> None:
    """A record of this time was refused: flag its bar; without a time (0) open bars and the next record's."""
    own = slots[feed["first_slot"] : feed["end_slot"]]
    if event == 0:
        feed["incomplete"] = 1
        for at in range(own.shape[0]):
            own[at].bar.flags |= np.uint32(INCOMPLETE)
        return
    if feed["kind"] == READY_BAR:
        session["refused_open"] = max(session["refused_open"], event)
        return
    index = event // session["interval"]
    slot = own[index % own.shape[0]]
    if index < feed["next_index"]:
        session["refused_open"] = max(session["refused_open"], index * session["interval"])
    elif slot["index"] == index:
        slot["bar"]["flags"] |= np.uint32(INCOMPLETE)
    else:  # of two intervals that share the slot, the later one is marked
        earlier = min(slot["marked"], index)
        slot["marked"] = max(slot["marked"], index)
        if NEVER < earlier < slot["marked"]:
            session["refused_open"] = max(session["refused_open"], earlier * session["interval"])


@kernel
def _unmark(session: Row, slot: Row, end: int) -> None:
    """An interval below number `end` had no tick, and records of it were refused."""
    if slot["marked"] != NEVER and slot["marked"] < end:
        session["refused_open"] = max(session["refused_open"], slot["marked"] * session["interval"])
        slot["marked"] = NEVER


@kernel
def _fill(session: Row, feed: Row, slots: Slots, end: int, out: Bars, at: int) -> int:
    """Close the feed's intervals below number `end`, which have no ticks."""
    own = slots[feed["first_slot"] : feed["end_slot"]]
    if feed["closed_any"]:
        index = feed["next_index"]
        while index < end and feed["empty_run"] < session["max_fill"]:
            if rolls_between(feed["quality"], feed["last"]["ts_open"], index * session["interval"]):
                break  # the last close is another contract's
            marks = INCOMPLETE if own[index % own.shape[0]].marked == index else 0
            _emit_empty(session, feed, index, marks, out, at)
            feed["empty_run"] += 1
            index += 1
            at += 1
    for number in range(own.shape[0]):
        _unmark(session, own[number], end)
    feed["next_index"] = max(feed["next_index"], end)
    return at


@kernel
def close_below(session: Row, feeds: Slots, slots: Slots, limit: int, out: Bars, at: int) -> int:
    """Close the session's intervals below number `limit`, in order; returns the new end of `out`.

    Bars of one interval come in the order of the session's symbols. Empty ones are filled in.
    """
    own = slots[session["first_slot"] : session["end_slot"]]
    for number in range(session["first_feed"], session["end_feed"]):
        if feeds[number].holds:
            release(session, feeds[number], slots, limit)
    while True:
        slot = -1
        for candidate in range(own.shape[0]):
            index = own[candidate].index
            if index != NEVER and index < limit and (slot < 0 or index < own[slot].index):
                slot = candidate
        if slot < 0:
            break
        feed = feeds[session["first_feed"] + own[slot].bar.leg]
        end = own[slot].index
        at = _fill(session, feed, slots, end, out, at)
        bar = own[slot]["bar"]
        own[slot]["index"] = NEVER
        if feed["closed_any"] and rolls_between(feed["quality"], feed["last"]["ts_open"], bar["ts_open"]):
            bar["flags"] |= np.uint32(_roll(session))
            _note_before(bar, feed["last"])
        _split(session, feed, bar)
        _close(session, bar)
        _mark(session, bar)
        bar["ts_closed"] = session["last_ring"]
        bar["closed_by"] = session["records"]
        out[at] = bar
        feed["last"] = bar
        feed["closed_any"] = 1
        at += 1
        feed["empty_run"] = 0
        feed["next_index"] = end + 1
    for number in range(session["first_feed"], session["end_feed"]):
        at = _fill(session, feeds[number], slots, limit, out, at)
    return at


@kernel
def _forget_reads(bar: Row) -> None:
    """The bar has no record yet."""
    for at in range(SPANS):
        bar["streams"][at] = 0
        bar["firsts"][at] = 0
        bar["lasts"][at] = 0


@kernel
def _keep_newest(bar: Row) -> None:
    """Of the bar before a rolled one, in its place: see `_note_before`."""
    for at in range(SPANS):
        bar["firsts"][at] = bar["lasts"][at]


@kernel
def _start(slot: Row, feed: Row, index: int, interval: int) -> None:
    """An open bar without ticks."""
    slot["index"] = index
    bar = slot["bar"]
    bar["ts_first_event"] = _MOST
    bar["session"] = feed["session"]
    bar["leg"] = feed["leg"]
    bar["flags"] = 0
    bar["n_ticks"] = 0
    bar["split"] = 0
    bar["ts_open"] = index * interval
    bar["interval"] = interval
    no_volume(bar)
    bar["ts_last_event"] = NEVER
    _forget_reads(bar)


@kernel
def _note_read(bar: Row, stream: Any, offset: int) -> None:
    """Widen a bar's span of a stream."""
    streams, firsts, lasts = bar["streams"], bar["firsts"], bar["lasts"]
    at = 0
    while at < SPANS and streams[at] != stream and streams[at] != 0:
        at += 1
    if at == SPANS:
        bar["flags"] |= np.uint32(SPREAD)
    elif streams[at] == 0:
        streams[at] = stream
        firsts[at] = offset
        lasts[at] = offset
    else:
        firsts[at] = min(firsts[at], offset)
        lasts[at] = max(lasts[at], offset)


@kernel
def _note_before(bar: Row, before: Row) -> None:
    """What a rolled bar is depends on there being one before it: whoever reads its records again has that."""
    for at in range(SPANS):
        if before["streams"][at] != 0:
            _note_read(bar, before["streams"][at], before["lasts"][at])


@kernel
def _note_newest(feed: Row, record: Row) -> None:
    """Note in a feed where its newest record was read."""
    stream, streams, offsets = record["stream"], feed["streams"], feed["offsets"]
    if streams[0] != stream:
        at = 1
        while at < SPANS - 1 and streams[at] != stream and streams[at] != 0:
            at += 1
        while at > 0:
            streams[at] = streams[at - 1]
            offsets[at] = offsets[at - 1]
            at -= 1
        streams[0] = stream
    offsets[0] = record["offset"]
    feed["part"] = record["part"]
    feed["more"] = record["flags"] & FLAG_MORE


@kernel
def _add(slot: Row, record: Row, price: int, volume: int, now: int) -> None:
    """Add one tick to an open bar: open and close go by (event time, arrival)."""
    event: Any = np.int64(record["ts_event"])
    bar = slot["bar"]
    if bar["n_ticks"] == 0:
        bar["h"] = price
        bar["l"] = price
    if event < bar["ts_first_event"]:
        bar["ts_first_event"] = event
        bar["o"] = price
    if event >= bar["ts_last_event"]:
        bar["ts_last_event"] = event
        bar["c"] = price
    bar["h"] = max(bar["h"], price)
    bar["l"] = min(bar["l"], price)
    add_volume(bar, volume, record["size_finer"])
    bar["n_ticks"] += np.uint32(1)
    bar["flags"] |= np.uint32(record["flags"] & _OF_RECORD)
    bar["ts_source"] = np.int64(record["ts_source"])
    bar["ts_ring"] = np.int64(record["ts_ring"])
    bar["ring_wait"] = now - np.int64(record["ts_ring"])
    _note_read(bar, record["stream"], record["offset"])


@kernel
def _copy_ready(bar: Row, record: Row) -> None:
    """Give a bar the numbers of a ready-made one."""
    bar["interval"] = record["x"]
    bar["o"] = record["a"]
    bar["h"] = record["b"]
    bar["l"] = record["c"]
    bar["c"] = record["d"]
    no_volume(bar)
    add_volume(bar, record["e"], record["size_finer"])


@kernel
def _copy_origin(session: Row, bar: Row, record: Row, now: int) -> None:
    """Say of a row that one record makes where that came from."""
    bar["ts_source"] = np.int64(record["ts_source"])
    bar["ts_ring"] = np.int64(record["ts_ring"])
    bar["ts_closed"] = np.int64(record["ts_ring"])
    bar["ring_wait"] = now - np.int64(record["ts_ring"])
    _note_read(bar, record["stream"], record["offset"])
    bar["closed_by"] = session["records"]


@kernel
def _put_aside(
    session: Row, feed: Row, record: Row, number: int, marks: int, now: int, out: Bars, at: int
) -> int:
    """Put a late or refused record, as its `marks` say, among the bars; returns the new end of `out`.

    `number`: the record's index in the batch.
    """
    row = out[at]
    row["session"] = feed["session"]
    row["leg"] = feed["leg"]
    row["flags"] = np.uint32(marks) | np.uint32(record["flags"] & _OF_RECORD)
    row["flags"] |= np.uint32(HALTED if session["halted"] > 0 else 0)
    row["record"] = number
    row["ts_open"] = np.int64(record["ts_event"])
    if record["kind"] == READY_BAR:
        row["n_ticks"] = 0
        _copy_ready(row, record)
    else:
        row["n_ticks"] = 1
        row["interval"] = feed["last"]["interval"]
        price = _price(record)
        row["o"] = price
        row["h"] = price
        row["l"] = price
        row["c"] = price
        no_volume(row)
        add_volume(row, 0 if record["kind"] == QUOTE else record["b"], record["size_finer"])
    row["split"] = 0
    row["ts_first_event"] = np.int64(record["ts_event"])
    row["ts_last_event"] = feed["last"]["ts_last_event"]  # the version's newest event stays what it was
    _forget_reads(row)
    _copy_origin(session, row, record, now)
    _close(session, row)
    return at + 1


@kernel
def _late(session: Row, feed: Row, record: Row, number: int, marks: int, now: int, out: Bars, at: int) -> int:
    """Count a late record, and do with it what the policy says."""
    event: Any = np.int64(record["ts_event"])
    feed["late"] += np.uint64(1)
    session["late_event"] = event
    opened = event if record["kind"] == READY_BAR else event - event % session["interval"]
    if session["late"] == DROP_LATE:
        session["late_open"] = max(session["late_open"], opened)
        return at
    if session["late"] == REFUSE:
        session["refused_open"] = max(session["refused_open"], opened)
        return _put_aside(session, feed, record, number, marks | LATE | REFUSED, now, out, at)
    marks |= LATE
    return _put_aside(session, feed, record, number, marks, now, out, at)


@kernel
def _price(record: Row) -> int:
    """Of a trade, or the mid of a quote, rounded down."""
    if record["kind"] == QUOTE:  # in this form the sum cannot overflow
        mid: int = (record["a"] & record["b"]) + ((record["a"] ^ record["b"]) >> 1)
        return mid
    price: int = record["a"]
    return price


@kernel
def _apart(a: int, b: int, factor: float) -> bool:
    """Whether one of two prices is more than `factor` times the other."""
    apart: bool = a > b * factor or b > a * factor
    return apart


@kernel
def _judge_price(session: Row, feed: Row, record: Row) -> int:
    """Marks of a record: JUMP if its price is too far from the one before it, with REFUSED if it is refused.

    A level that `CONFIRMED` refused records agree on is accepted: a split, or other decimals.
    """
    event: Any = np.int64(record["ts_event"])
    factor, before = session["price_jump"], feed["price"]
    if rolls_between(feed["quality"], feed["price_event"], event):
        before = 0  # of another contract
    low = high = price = _price(record)
    if record["kind"] == READY_BAR:
        low, high, price = record["c"], record["b"], record["d"]
    marks = 0
    is_measured = factor > 0 and before > 0 and low > 0  # of prices around zero, a ratio says nothing
    if is_measured and (_apart(low, before, factor) or _apart(high, before, factor)):
        feed["jumps"] += np.uint64(1)
        marks = JUMP
        if session["refuses_jumps"]:
            near = feed["refused_run"] > 0 and not _apart(price, feed["refused_price"], factor)
            feed["refused_run"] = feed["refused_run"] + 1 if near else 1
            feed["refused_price"] = price
            if feed["refused_run"] < CONFIRMED:
                return JUMP | REFUSED
    feed["refused_run"] = 0
    feed["price"] = price
    feed["price_event"] = event
    return marks


@kernel
def _is_same(bar: Row, record: Row) -> bool:
    """Whether a ready-made bar says what this one says."""
    same: bool = (
        bar["interval"] == record["x"]
        and bar["o"] == record["a"]
        and bar["h"] == record["b"]
        and bar["l"] == record["c"]
        and bar["c"] == record["d"]
        and is_volume(bar, record["e"], record["size_finer"])
    )
    return same


@kernel
def _pass_through(
    session: Row, feed: Row, record: Row, number: int, marks: int, now: int, out: Bars, at: int
) -> int:
    """Pass a ready-made bar through if it opens after the one before it; else it is late."""
    opened: Any = np.int64(record["ts_event"])
    if feed["closed_any"] and opened <= feed["last"]["ts_open"]:
        if opened == feed["last"]["ts_open"] and _is_same(feed["last"], record):
            feed["duplicates"] += np.uint64(1)
            return at
        return _late(session, feed, record, number, marks, now, out, at)
    bar = feed["last"]
    if feed["closed_any"] and rolls_between(feed["quality"], bar["ts_open"], opened):
        marks |= _roll(session)
        _keep_newest(bar)
    else:
        _forget_reads(bar)
    bar["session"] = feed["session"]
    bar["leg"] = feed["leg"]
    bar["flags"] = (
        np.uint32(record["flags"] & _OF_RECORD) | np.uint32(GAP if feed["gap"] else 0) | np.uint32(marks)
    ) | np.uint32(INCOMPLETE if feed["incomplete"] else 0)
    bar["n_ticks"] = 1
    bar["split"] = 0
    bar["ts_open"] = opened
    _copy_ready(bar, record)
    bar["ts_first_event"] = opened
    bar["ts_last_event"] = opened
    _copy_origin(session, bar, record, now)
    feed["closed_any"] = 1
    feed["gap"] = feed["incomplete"] = 0
    feed["taken"] += np.uint64(1)
    _split(session, feed, bar)
    _close(session, bar)
    _mark(session, bar)
    out[at] = bar
    return at + 1


@kernel
def _advance(session: Row, feed: Row, feeds: Slots, slots: Slots, record: Row, out: Bars, at: int) -> int:
    """Advance the watermark to a record's time, if that is newer, and close the bars below it."""
    event: Any = np.int64(record["ts_event"])
    newest = session["newest_event"]
    if session["venue_lag"] != 0:
        own = feeds[session["first_feed"] + feed["venue"]]
        if event <= own["venue_event"]:
            return at
        own["venue_event"] = event
        session["newest_event"] = max(newest, event)
        event = _slowest(session, feeds)
    elif event <= newest:
        return at
    else:
        session["newest_event"] = event
    limit = (event - session["lateness"]) // session["interval"]
    return close_below(session, feeds, slots, limit, out, at)


@kernel
def _slowest(session: Row, feeds: Slots) -> int:
    """The newest event of the slowest venue, but at most `venue_lag` before that of the fastest."""
    slowest = session["newest_event"]
    least = slowest - session["venue_lag"]
    for number in range(session["first_feed"], session["end_feed"]):
        feed = feeds[number]
        if feed["venue"] == feed["leg"]:
            slowest = min(slowest, feed["venue_event"])
    found: int = max(slowest, least)
    return found


@kernel
def _tick(
    session: Row, feed: Row, feeds: Slots, slots: Slots, record: Row, number: int, marks: int, now: int,
    masks: Masks, out: Bars, at: int,
) -> int:  # fmt: skip
    """Take a trade or quote: advance the watermark, close bars below it, add the tick or count it late."""
    event: Any = np.int64(record["ts_event"])
    at = _advance(session, feed, feeds, slots, record, out, at)
    if event // session["interval"] < feed["next_index"]:
        own = feeds[session["first_feed"] + feed["venue"]]
        if session["venue_lag"] != 0 and event >= own["venue_event"]:
            masks[number] |= np.uint32(VENUE_BEHIND)
        return _late(session, feed, record, number, marks, now, out, at)
    _put(session, feed, slots, record, marks, now)
    return at


@kernel
def release(session: Row, feed: Row, slots: Slots, limit: int) -> None:
    """Take a held record into its bar, if that is below number `limit`: as far as is known it is right."""
    held = feed["held"]
    if np.int64(held["ts_event"]) // session["interval"] < limit:
        feed["holds"] = 0
        _put(session, feed, slots, held, feed["held_marks"], session["last_ring"])


@kernel
def _put(session: Row, feed: Row, slots: Slots, record: Row, marks: int, now: int) -> None:
    """Add a trade or quote to its bar, which is not closed."""
    interval = session["interval"]
    index = np.int64(record["ts_event"]) // interval
    slot = slots[feed["first_slot"] + index % (feed["end_slot"] - feed["first_slot"])]
    if slot["index"] == NEVER:
        _start(slot, feed, index, interval)
    if feed["gap"]:
        slot["bar"]["flags"] |= np.uint32(GAP)
        feed["gap"] = 0
    if slot["marked"] == index or feed["incomplete"]:
        slot["bar"]["flags"] |= np.uint32(INCOMPLETE)
        slot["marked"] = NEVER if slot["marked"] == index else slot["marked"]
        feed["incomplete"] = 0
    slot["bar"]["flags"] |= np.uint32(marks)
    feed["taken"] += np.uint64(1)
    _add(slot, record, _price(record), 0 if record["kind"] == QUOTE else record["b"], now)


@kernel
def _had(feed: Row, record: Row) -> bool:
    """Whether the feed had taken this record before it was restored."""
    stream, offset = record["stream"], record["offset"]
    for at in range(SPANS):
        if stream != 0 and feed["had_streams"][at] == stream:
            before = feed["had_offsets"][at]
            # only of the newest message of all there may be more
            had_part = at > 0 or record["part"] <= feed["had_part"]
            return bool(offset < before or (offset == before and had_part))
    return False


@kernel
def _event(
    session: Row, feed: Row, feeds: Slots, slots: Slots, record: Row, now: int, out: Bars, at: int
) -> int:
    """Take a record that is in no bar: bars that end by its time are closed, and then its row follows."""
    if feed["kind"] != READY_BAR:
        at = _advance(session, feed, feeds, slots, record, out, at)
    kind, which = np.int32(record["kind"]) - TEXT, record["x"]
    feed["events"][kind] += np.uint64(1)
    what = session["events"] >> (2 * kind) & 3
    halted = feed["halted"]
    if kind == STATUS - TEXT and what != IGNORED:
        if which == HALT:
            halted = 1
        elif which in (RESUME, OPENED):
            halted = 0
    session["halted"] += halted - feed["halted"]
    feed["halted"] = halted
    marks = 0
    if kind == 0:
        marks = NEWS
    elif kind == ACTION - TEXT:
        marks = ACTED
        if which == SPLIT_ACTION:
            announce_split(feed["quality"], max(np.int64(record["ts_event"]), record["b"]), record["a"])
    if what == IGNORED:
        return at
    if what == AS_FLAG:
        session["marks"] |= marks
        return at
    row = out[at]
    row["session"] = feed["session"]
    row["leg"] = feed["leg"]
    row["flags"] = np.uint32(EVENT | marks) | np.uint32(record["flags"] & _OF_RECORD)
    row["flags"] |= np.uint32(GAP if record["flags"] & FLAG_GAP else 0)
    row["n_ticks"] = record["kind"]
    row["ts_open"] = np.int64(record["ts_event"])
    row["interval"] = session["interval"]
    row["o"] = record["a"]
    row["h"] = record["b"]
    row["l"] = record["c"]
    row["c"] = record["d"]
    row["v"] = record["e"]
    row["v_high"] = which
    row["v_low"] = record["size_finer"]
    row["split"] = 0
    row["ts_first_event"] = np.int64(record["ts_event"])
    row["ts_last_event"] = max(np.int64(record["ts_event"]), feed["last"]["ts_last_event"])
    _copy_origin(session, row, record, now)
    _close(session, row)
    _mark(session, row)
    return at + 1


@kernel
def _take(
    session: Row, feed: Row, feeds: Slots, slots: Slots, tables: Tables, own_tables: Any, record: Row,
    number: int, now: int, masks: Masks, out: Bars, at: int,
) -> int:  # fmt: skip
    """Take a record for one feed; `number` is its index in the batch, `own_tables` the feed's in `tables`."""
    kind = np.int32(record["kind"])
    if kind == WORDS:
        return at
    if kind != HEARTBEAT and _had(feed, record):
        feed["repeated"] += np.uint64(kind != REFUSAL)
        return at
    if kind < HEARTBEAT or kind > REFUSAL:
        _note_newest(feed, record)
    if feed["kind"] == 0 and kind < HEARTBEAT:
        feed["kind"] = kind
    session["records"] += 1
    session["last_ring"] = np.int64(record["ts_ring"])
    if record["flags"] & FLAG_GAP:
        mark_gap(feed, slots)
    if kind == HEARTBEAT:
        return _advance(session, feed, feeds, slots, record, out, at)
    if kind == REFUSAL:
        mark_refused(session, feed, slots, np.int64(record["ts_event"]))
        return at
    finer = np.int64(record["price_finer"]) != session["price_finer"]
    if (kind == BOOK and finer) or (kind < HEARTBEAT and (kind != feed["kind"] or finer)):
        feed["ignored"] += np.uint64(1)
        return at
    identity, faults = identity_of(record), 0
    if is_known(feed, tables, own_tables, record, identity) or (
        identity == 0 and kind != READY_BAR and repeats(feed["quality"], record)
    ):
        faults = DUPLICATE
        if action_of(session["actions"], faults) == DROP:
            masks[number] |= np.uint32(faults)
            feed["duplicates"] += np.uint64(1)
            return at
    if kind > REFUSAL:
        masks[number] |= np.uint32(faults)
        remember(feed, tables, own_tables, identity)
        return _event(session, feed, feeds, slots, record, now, out, at)
    price = record["d"] if kind == READY_BAR else _price(record)
    faults |= judge(feed["quality"], record, price, session["actions"], session["bad_tick_band"])
    if feed["holds"] or faults:
        masks[number] |= np.uint32(faults & ~SUSPECT)
        faults = _resolve(session, feed, slots, faults)
        action = action_of(session["actions"], faults)
        if action >= DROP:
            marks = (faults & ~SUSPECT) | REFUSED if action == DEAD_LETTER else 0
            return _leave_out(session, feed, slots, record, number, marks, now, out, at)
    late, taken = feed["late"], feed["taken"]
    at = _judged(session, feed, feeds, slots, record, number, faults, now, masks, out, at)
    if feed["taken"] != taken or feed["holds"] or (feed["late"] != late and session["late"] == AMEND):
        remember(feed, tables, own_tables, identity)
    return at


@kernel
def _resolve(session: Row, feed: Row, slots: Slots, faults: int) -> int:
    """Do what a bad tick before this record calls for; returns the other faults."""
    if feed["holds"]:
        if faults & BAD_TICK:
            feed["holds"] = 0
            feed["price"] = 0  # no price to compare the next one with
            feed["dropped"] += np.uint64(1)
            mark_refused(session, feed, slots, np.int64(feed["held"]["ts_event"]))
        else:
            release(session, feed, slots, _MOST)
    elif faults & BAD_TICK and flags_of(session["actions"], BAD_TICK):
        event = feed["quality"]["suspect_event"]
        slot = slots[
            feed["first_slot"] + event // session["interval"] % (feed["end_slot"] - feed["first_slot"])
        ]
        if slot["index"] == event // session["interval"]:
            slot["bar"]["flags"] |= np.uint32(BAD_TICK)
            faults &= ~BAD_TICK
    return faults


@kernel
def _leave_out(
    session: Row, feed: Row, slots: Slots, record: Row, number: int, marks: int, now: int, out: Bars, at: int
) -> int:
    """Drop a record with a fault, or with `marks` refuse it: its bar lacks it."""
    mark_refused(session, feed, slots, np.int64(record["ts_event"]))
    if marks:
        return _put_aside(session, feed, record, number, marks, now, out, at)
    feed["dropped"] += np.uint64(1)
    return at


@kernel
def _judged(
    session: Row, feed: Row, feeds: Slots, slots: Slots, record: Row, number: int, faults: int, now: int,
    masks: Masks, out: Bars, at: int,
) -> int:  # fmt: skip
    """Take a record whose faults are known, unless its interval or its price is refused."""
    kind = record["kind"]
    marks = OTHER_INTERVAL | REFUSED
    if kind != READY_BAR or session["any_interval"] or record["x"] == session["interval"]:
        if faults & SPLIT:
            feed["price"] = 0  # a level of before
        marks = _judge_price(session, feed, record)
        masks[number] |= np.uint32(marks & JUMP)
    if marks & REFUSED:
        return _leave_out(session, feed, slots, record, number, marks, now, out, at)
    marks |= flags_of(session["actions"], faults)
    if kind == READY_BAR:
        return _pass_through(session, feed, record, number, marks, now, out, at)
    if faults & SUSPECT and action_of(session["actions"], BAD_TICK) == HOLD:
        at = _advance(session, feed, feeds, slots, record, out, at)
        if np.int64(record["ts_event"]) // session["interval"] >= feed["next_index"]:
            feed["held"] = record
            feed["held_marks"] = marks
            feed["holds"] = 1
            return at
    return _tick(session, feed, feeds, slots, record, number, marks, now, masks, out, at)


@kernel
def update(
    records: Records, start: int, sessions: Slots, feeds: Slots, slots: Slots, tables: Tables,
    starts: Numbers, routes: Numbers, masks: Masks, now: int, out: Bars, room: int,
) -> tuple[int, int]:  # fmt: skip
    """Take records from `start` while `out` has `room` left; returns (next record, bars in `out`).

    `masks`, uint32 [records], gets the faults of each record, and JUMP.
    """
    at = 0
    i = start
    while i < records.shape[0] and at + room <= out.shape[0]:
        record = records[i]
        i += 1
        symbol: Any = np.int64(record["symbol"])
        if symbol + 1 >= starts.shape[0]:
            continue
        for route in range(starts[symbol], starts[symbol + 1]):
            own: Any = routes[route]
            feed = feeds[own]
            session = sessions[feed["session"]]
            if np.int64(record["ts_ring"]) < session["since"]:
                continue
            at = _take(session, feed, feeds, slots, tables, own, record, i - 1, now, masks, out, at)
    return i, at
