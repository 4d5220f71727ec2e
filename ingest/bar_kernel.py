"""The numba half of `ingest.bars`: state arrays and the loop over records.

A session's open bars are in a ring of K slots; a bar's slot is its interval number modulo K. Open bars end
after the watermark and start at or before the newest event, so with K = lateness // interval + 2 no two of
them share a slot.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ingest.record import BAR as READY_BAR
from ingest.record import FLAG_GAP, FLAG_REPLAY, QUOTE, Records
from metrics.kernel import kernel

SKEWED, GAP, EMPTY, REPLAYED = 1, 2, 4, FLAG_REPLAY
_OF_RECORD = SKEWED | REPLAYED

BAR = np.dtype(
    [
        ("session", "i4"),
        ("flags", "u4"),
        ("n_ticks", "i8"),
        ("ts_open", "i8"),
        ("interval", "i8"),
        ("o", "i8"),
        ("h", "i8"),
        ("l", "i8"),
        ("c", "i8"),
        ("v", "i8"),
        ("ts_last_event", "i8"),
        ("ts_source", "i8"),
        ("ts_ring", "i8"),
        ("ts_closed", "i8"),  # when the record that closed it entered the ring
        ("ring_wait", "i8"),
        ("first_offset", "i8"),
        ("last_offset", "i8"),
        ("low_watermark", "i8"),
    ]
)
# An open bar, with what closing it needs.
OPEN = np.dtype([("bar", BAR), ("index", "i8"), ("ts_first_event", "i8")])
SESSION = np.dtype(
    [
        ("newest_event", "i8"),
        ("next_index", "i8"),  # every interval below is closed
        ("last_offset", "i8"),
        ("last_ring", "i8"),
        ("kind", "i4"),  # the record kind that makes this session's bars; 0 before its first record
        ("closed_any", "i4"),
        ("gap", "i4"),
        ("empty_run", "i4"),  # empty bars emitted since the last real one
        ("late", "u8"),
        ("ignored", "u8"),
        ("last", BAR),  # the last closed bar
    ]
)
NEVER = np.iinfo(np.int64).min
_MOST = np.iinfo(np.int64).max

Bars = npt.NDArray[np.void]
Slots = npt.NDArray[np.void]
Row = Any  # one element of a structured array


@kernel
def _low_watermark(slots: Slots, fallback: int) -> int:
    """Smallest offset an open bar depends on, at most `fallback`."""
    lowest = fallback
    for slot in range(slots.shape[0]):
        if slots[slot].index != NEVER:
            lowest = min(lowest, slots[slot].bar.first_offset)
    return lowest


@kernel
def _emit(session: Row, bar: Row, out: Bars, at: int) -> None:
    """Write `bar` to `out[at]` and keep it as the session's last."""
    bar["ts_closed"] = session["last_ring"]
    out[at] = bar
    session["last"] = bar
    session["closed_any"] = 1


@kernel
def _emit_empty(session: Row, index: int, low_watermark: int, out: Bars, at: int) -> None:
    """A flat bar at the last close for an interval without ticks."""
    last = session["last"]
    last["ts_open"] = index * last["interval"]
    last["o"] = last["c"]
    last["h"] = last["c"]
    last["l"] = last["c"]
    last["v"] = 0
    last["n_ticks"] = 0
    last["flags"] = EMPTY | (GAP if session["gap"] else 0) | (last["flags"] & np.uint32(REPLAYED))
    last["low_watermark"] = low_watermark
    last["ts_closed"] = session["last_ring"]
    out[at] = last


@kernel
def mark_gap(session: Row, slots: Slots) -> None:
    """Records were lost: flag the open bars, the empty ones up to the next record, and that record's bar."""
    session["gap"] = 1
    for slot in range(slots.shape[0]):
        slots[slot].bar.flags |= np.uint32(GAP)


@kernel
def close_below(
    session: Row, slots: Slots, limit: int, max_fill: int, fallback: int, out: Bars, at: int
) -> int:
    """Close the intervals below number `limit` in order, filling empty ones; returns the new end of `out`."""
    while True:
        slot = -1
        for candidate in range(slots.shape[0]):
            index = slots[candidate].index
            if index != NEVER and index < limit and (slot < 0 or index < slots[slot].index):
                slot = candidate
        end = limit if slot < 0 else slots[slot].index
        if session["closed_any"]:
            index = session["next_index"]
            while index < end and session["empty_run"] < max_fill:
                _emit_empty(session, index, _low_watermark(slots, fallback), out, at)
                session["empty_run"] += 1
                index += 1
                at += 1
        session["next_index"] = max(session["next_index"], end)
        if slot < 0:
            return at
        slots[slot].index = NEVER
        slots[slot].bar.low_watermark = _low_watermark(slots, fallback)
        _emit(session, slots[slot].bar, out, at)
        at += 1
        session["empty_run"] = 0
        session["next_index"] = end + 1


@kernel
def _start(slot: Row, session: Row, record: Row, index: int, interval: int) -> None:
    """An open bar without ticks."""
    slot["index"] = index
    slot["ts_first_event"] = _MOST
    bar = slot["bar"]
    bar["session"] = record["session"]
    bar["flags"] = 0
    bar["n_ticks"] = 0
    bar["ts_open"] = index * interval
    bar["interval"] = interval
    bar["v"] = 0
    bar["ts_last_event"] = NEVER
    bar["first_offset"] = _MOST
    bar["last_offset"] = NEVER


@kernel
def _add(slot: Row, record: Row, price: int, volume: int, now: int) -> None:
    """Add one tick to an open bar: open and close go by (event time, arrival)."""
    event: Any = np.int64(record["ts_event"])
    bar = slot["bar"]
    if bar["n_ticks"] == 0:
        bar["h"] = price
        bar["l"] = price
    if event < slot["ts_first_event"]:
        slot["ts_first_event"] = event
        bar["o"] = price
    if event >= bar["ts_last_event"]:
        bar["ts_last_event"] = event
        bar["c"] = price
    bar["h"] = max(bar["h"], price)
    bar["l"] = min(bar["l"], price)
    bar["v"] = bar["v"] + min(volume, _MOST - bar["v"])
    bar["n_ticks"] += np.uint32(1)
    bar["flags"] |= np.uint32(record["flags"] & _OF_RECORD)
    bar["ts_source"] = np.int64(record["ts_source"])
    bar["ts_ring"] = np.int64(record["ts_ring"])
    bar["ring_wait"] = now - np.int64(record["ts_ring"])
    bar["first_offset"] = min(bar["first_offset"], record["offset"])
    bar["last_offset"] = max(bar["last_offset"], record["offset"])


@kernel
def _pass_through(session: Row, record: Row, now: int, out: Bars, at: int) -> int:
    """Pass a ready-made bar through if it opens after the one before it; else it is late."""
    opened = np.int64(record["ts_event"])
    if session["closed_any"] and opened <= session["last"]["ts_open"]:
        session["late"] += np.uint64(1)
        return at
    bar = session["last"]
    bar["session"] = record["session"]
    bar["flags"] = np.uint32(record["flags"] & _OF_RECORD) | np.uint32(GAP if session["gap"] else 0)
    bar["n_ticks"] = 1
    bar["ts_open"] = opened
    bar["interval"] = record["x"]
    bar["o"] = record["a"]
    bar["h"] = record["b"]
    bar["l"] = record["c"]
    bar["c"] = record["d"]
    bar["v"] = record["e"]
    bar["ts_last_event"] = opened
    bar["ts_source"] = np.int64(record["ts_source"])
    bar["ts_ring"] = np.int64(record["ts_ring"])
    bar["ts_closed"] = np.int64(record["ts_ring"])
    bar["ring_wait"] = now - np.int64(record["ts_ring"])
    bar["first_offset"] = record["offset"]
    bar["last_offset"] = record["offset"]
    bar["low_watermark"] = record["offset"] + 1
    session["closed_any"] = 1
    session["gap"] = 0
    out[at] = bar
    return at + 1


@kernel
def _tick(
    session: Row, slots: Slots, record: Row, interval: int, lateness: int, max_fill: int,
    now: int, out: Bars, at: int,
) -> int:  # fmt: skip
    """Take a trade or quote: advance the watermark, close bars below it, add the tick or count it late."""
    event: Any = np.int64(record["ts_event"])
    if event > session["newest_event"]:
        session["newest_event"] = event
        limit = (event - lateness) // interval
        at = close_below(session, slots, limit, max_fill, record["offset"], out, at)
    index = event // interval
    if index < session["next_index"]:
        session["late"] += np.uint64(1)
        return at
    slot = slots[index % slots.shape[0]]
    if slot["index"] == NEVER:
        _start(slot, session, record, index, interval)
    if session["gap"]:
        slot["bar"]["flags"] |= np.uint32(GAP)
        session["gap"] = 0
    if record["kind"] == QUOTE:
        # the mid, rounded down; in this form the sum cannot overflow
        mid = (record["a"] & record["b"]) + ((record["a"] ^ record["b"]) >> 1)
        _add(slot, record, mid, 0, now)
    else:
        _add(slot, record, record["a"], record["b"], now)
    return at


@kernel
def update(
    records: Records, start: int, sessions: Slots, slots: Slots, interval: int, lateness: int,
    max_fill: int, now: int, out: Bars, room: int,
) -> tuple[int, int]:  # fmt: skip
    """Take records from `start` while `out` has `room` left; returns (next record, bars in `out`)."""
    at = 0
    i = start
    while i < records.shape[0] and at + room <= out.shape[0]:
        record = records[i]
        i += 1
        if record["session"] >= sessions.shape[0]:
            continue
        session = sessions[record["session"]]
        kind = np.int32(record["kind"])
        if session["kind"] == 0:
            session["kind"] = kind
        session["last_offset"] = record["offset"]
        session["last_ring"] = np.int64(record["ts_ring"])
        if record["flags"] & FLAG_GAP:
            mark_gap(session, slots[record["session"]])
        if kind != session["kind"]:
            session["ignored"] += np.uint64(1)
        elif kind == READY_BAR:
            at = _pass_through(session, record, now, out, at)
        else:
            own = slots[record["session"]]
            at = _tick(session, own, record, interval, lateness, max_fill, now, out, at)
    return i, at
