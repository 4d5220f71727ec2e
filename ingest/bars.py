"""Bars from trades, quotes or ready-made bars, in event time.

A session has one symbol or several; a symbol may feed several sessions, each with intervals of its own. A
bar covers [open, open + interval) of exchange time, aligned to the epoch. A session's watermark is the newest
event time of all its symbols less the lateness. Of several venues it is the slowest one's, but at most
`venue_lag_ns` behind the fastest one's: no record is late because its venue is slower. A bar closes when the
watermark reaches its end, so with lateness several bars are open at once. A tick for a closed bar is late:
counted, and then dropped, refused, or passed on to amend its bar. Where several symbols have a bar of one
interval, these close together, in the order of the session's symbols.

Within a bar, open and close go by (event time, arrival): among equal times the first arrival opens and the
last one closes, in whatever order the times came. Quotes make bars of the mid, rounded down to a unit of
their prices, without volume. Volumes have no limit (`ingest.volumes`). Empty intervals are skipped, or filled
flat at the last close. A ready-made bar passes through if it opens after the one before of its symbol; its
own times and interval stay. A symbol's first record decides which kind makes its bars in a session; other
kinds are ignored and counted.

A record is known by its stream and its offset there; those of a stream come in order. A bar remembers its
records' spans of offsets in up to `SPANS` streams: several where a symbol comes from several sources or
topics. Event times are trusted: one tick stamped far in the future makes the following ones late.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from ingest import bar_kernel
from ingest.bar_kernel import (
    ADJUSTED,
    AMEND,
    BAR,
    DROP_LATE,
    EMPTIED,
    EMPTY,
    FEED,
    LATE,
    NEVER,
    OPEN,
    OTHER_INTERVAL,
    REFUSE,
    REFUSED,
    SESSION,
    SPREAD,
    STAYS,
    Bars,
)
from ingest.feed_rules import BITS, ROLLS, SPLITS, actions_code
from ingest.identity import IDENTITY, no_tables, packed_tables, unpacked_tables
from ingest.plane_state import BuilderState, Rows, Taken
from ingest.record import ReadRange, Records
from ingest.words import Texts
from metrics.feed_faults import RULED

_MAX_OPEN = 4096
_POLICY = (
    "interval", "lateness", "max_fill", "idle_close", "late", "price_jump", "refuses_jumps", "any_interval",
    "price_finer", "actions", "bad_tick_band", "venue_lag", "events", "on_split",
)  # fmt: skip
Integers = npt.NDArray[np.int64]
_LACKING = ("late_open", "refused_open", "late_event")
_FAULT_BITS = np.array(list(BITS.values()), np.uint32)
_OF_STATE = ("newest_event", "records", "halted", "marks", *_LACKING)
"""What a session knows beside its feeds and its open bars."""
OnSplit = Literal["line", "reset", "adjust"]
_ON_SPLIT: dict[OnSplit, int] = {"line": STAYS, "reset": EMPTIED, "adjust": ADJUSTED}
_LATE = {"drop": DROP_LATE, "amend": AMEND, "refuse": REFUSE}


@dataclass(frozen=True, slots=True)
class BarPolicy:
    """How a session's ticks become bars; times in ns.

    `max_fill` caps the empty bars after one real bar (the first ones are filled). `idle_close_ns` (0: never)
    closes the open bars of a session without a record for so long.

    ``late``: records of closed bars are dropped; or stand among the bars as LATE rows, for
    `ingest.late_updates`; or are refused. `price_jump`: a price more than that many times the one before, or
    less than that part of it, flags its bar or, with `refuse_jumps`, is refused; 0 is no limit. ``ready``:
    ready-made bars of another interval are refused ("same"), or taken as they are ("any").

    ``actions``: what is done about faults, see `ingest.feed_rules.actions_code`. `bad_tick_band`: in typical
    moves. `venue_lag_ns`, of a session with several venues: how long a bar stays open for one that is
    behind; 0: it does not.

    ``events``: what is done about records that are in no bar, see `ingest.events.events_code`. ``on_split``:
    the window stays as it is, or is reset, or its bars are adjusted.
    """

    interval_ns: int
    lateness_ns: int = 0
    empty: Literal["skip", "fill"] = "skip"
    max_fill: int = 60
    idle_close_ns: int = 0
    late: Literal["drop", "amend", "refuse"] = "drop"
    price_jump: float = 0.0
    refuse_jumps: bool = False
    ready: Literal["same", "any"] = "same"
    actions: int = actions_code({})
    bad_tick_band: float = 30.0
    venue_lag_ns: int = 0
    events: int = 0
    on_split: OnSplit = "line"

    def __post_init__(self) -> None:
        others = self.lateness_ns, self.max_fill, self.idle_close_ns, self.venue_lag_ns
        if self.interval_ns <= 0 or min(others) < 0:
            raise ValueError(
                "a bar's interval must be above 0 ns; lateness, max_fill, idle_close and venue_lag must not "
                "be negative"
            )
        if self.price_jump != 0 and not self.price_jump > 1:
            raise ValueError(f"price_jump must be above 1, or 0 for no limit, not {self.price_jump:g}")
        if self.open_bars > _MAX_OPEN:
            raise ValueError(f"the lateness and venue_lag span more than {_MAX_OPEN} intervals")

    @property
    def open_bars(self) -> int:
        """Most bars a symbol has open at once."""
        return (self.lateness_ns + self.venue_lag_ns) // self.interval_ns + 2

    @property
    def fill(self) -> int:
        """Most empty bars after a real one."""
        return self.max_fill if self.empty == "fill" else 0

    @property
    def room(self) -> int:
        """Most rows of one symbol that a record can make: its open bars, empty ones after each, itself."""
        return self.open_bars + (self.open_bars + 1) * self.fill + 2


@dataclass(frozen=True, slots=True)
class Feeds:
    """What a session is made of: the numbers of its symbols in the ring, and its policy.

    ``price_scale``: decimals of the unit of its prices, 0 to 18; records of another one are ignored and
    counted.

    ``venues``, of a session with several: of each symbol, the number of the first one of its venue.
    ``splits``: of each symbol, when it is split, ns, and how many new units are one old unit; the newest ones
    count. ``rolls``: of each symbol, event times, ns, from which its records are another contract's; the
    newest `ROLLS` count. No bar lies on both sides of one. ``roll_resets``: it resets the window.

    ``since_ns``: of a new session, the monotonic clock when it was opened. Records that entered the ring
    earlier are not its: they were read for a session of that name before it, and are read again.
    """

    symbols: tuple[int, ...]
    policy: BarPolicy
    since_ns: int = 0
    price_scale: int = 9
    venues: tuple[int, ...] = ()
    splits: tuple[tuple[tuple[int, float], ...], ...] = ()
    rolls: tuple[tuple[int, ...], ...] = ()
    roll_resets: bool = False


Count = Literal["late", "jumps", "taken", "ignored", "duplicates", "repeated", "dropped"]
COUNTS: tuple[Count, ...] = get_args(Count)
"""See `BarBuilder.counts`."""


@dataclass(frozen=True, slots=True)
class RefusedRecord:
    """A record that a session refused: RECORD, and the number of its symbol among the session's.

    ``reason``: "late", "price_jump", "interval", or a kind of `metrics.feed_faults`.
    """

    session: int
    leg: int
    reason: str
    record: np.void


def received_before(bars: Bars, session: int, now_ns: int) -> None:
    """Change bars of records that an earlier engine had, in place.

    ``now_ns``, of the monotonic clock, is when they all came: the earlier one's may be another.
    """
    bars["session"] = session
    for name in ("ts_ring", "ts_closed"):
        bars[name] = now_ns


def reads_of(bars: Bars) -> list[tuple[ReadRange, ...]]:
    """Where the records of each bar were read; of an empty bar, those of the bar before it."""
    streams, firsts, lasts = bars["streams"], bars["firsts"], bars["lasts"]
    if streams[:, 0].all() and not streams[:, 1].any():  # as usual: each is of one stream
        rows = zip(streams[:, 0].tolist(), firsts[:, 0].tolist(), lasts[:, 0].tolist(), strict=True)
        return [(ReadRange(*each),) for each in rows]
    return [
        tuple(ReadRange(*each) for each in zip(*of_bar, strict=True) if each[0])
        for of_bar in zip(streams.tolist(), firsts.tolist(), lasts.tolist(), strict=True)
    ]


def hold_back(lows: dict[int, int], reads: Iterable[ReadRange], flags: int) -> None:
    """Take low watermarks, in place, below the records of a bar that is not closed, or not on the tape.

    A stream is left out where the bar may have records of it that it does not remember.
    """
    if flags & EMPTY:
        return
    for stream, first, _ in reads:
        if lows.get(stream, first) > first:
            lows[stream] = first
    if flags & SPREAD:
        for stream in lows.keys() - {each.stream for each in reads}:
            del lows[stream]


def hold_all_back(lows: dict[int, int], bars: Bars) -> None:
    """As `hold_back`, for all of these bars."""
    flags = bars["flags"]
    if (flags & np.uint32(SPREAD)).any():
        for reads, each in zip(reads_of(bars), flags.tolist(), strict=True):
            hold_back(lows, reads, each)
        return
    streams, firsts = bars["streams"], bars["firsts"]
    filled = (flags & np.uint32(EMPTY) == 0)[:, np.newaxis]
    for stream, low in lows.items():
        lows[stream] = int(firsts.min(initial=low, where=filled & (streams == np.uint64(stream))))


def one_each(n: int, policy: BarPolicy) -> list[Feeds]:
    """`n` sessions; session i reads symbol i."""
    return [Feeds((number,), policy) for number in range(n)]


def _rows_of(sessions: Sequence[Feeds], n_feeds: Integers, n_slots: Integers) -> npt.NDArray[Any]:
    """SESSION [sessions], of sessions that begin, with this many symbols and open bars."""
    own, policies = np.zeros(len(sessions), SESSION), [each.policy for each in sessions]
    own["newest_event"] = own["late_open"] = own["refused_open"] = NEVER
    for kind, counts in (("feed", n_feeds), ("slot", n_slots)):
        ends = np.cumsum(counts, dtype=np.int64)
        own[f"end_{kind}"], own[f"first_{kind}"] = ends, ends - counts
    own["interval"] = [each.interval_ns for each in policies]
    own["lateness"] = [each.lateness_ns for each in policies]
    own["max_fill"] = [each.fill for each in policies]
    own["idle_close"] = [each.idle_close_ns for each in policies]
    own["late"] = [_LATE[each.late] for each in policies]
    own["price_jump"] = [each.price_jump for each in policies]
    own["refuses_jumps"] = [each.refuse_jumps for each in policies]
    own["any_interval"] = [each.ready == "any" for each in policies]
    for name in ("actions", "bad_tick_band"):
        own[name] = [getattr(each, name) for each in policies]
    own["events"] = [each.events for each in policies]
    own["on_split"] = [_ON_SPLIT[each.on_split] for each in policies]
    own["venue_lag"] = [each.venue_lag_ns for each in policies]
    own["since"] = [each.since_ns for each in sessions]
    own["roll_resets"] = [each.roll_resets for each in sessions]
    own["price_finer"] = [each.price_scale - 9 for each in sessions]
    return own


def _spans(firsts: Integers, counts: Integers) -> Integers:
    """All numbers from each of ``firsts`` on, as many as its count, int64 [sum of counts]."""
    starts: Integers = firsts - (np.cumsum(counts) - counts)
    found: Integers = np.arange(int(counts.sum())) + np.repeat(starts, counts)
    return found


class BarBuilder:
    """Open bars of sessions, which are numbered as given. Not thread-safe."""

    def __init__(self, sessions: Sequence[Feeds]) -> None:
        self._sessions = np.zeros(0, SESSION)
        self._feeds = np.zeros(0, FEED)
        self._slots = np.zeros(0, OPEN)
        self._tables = no_tables(0)
        self._refused: list[RefusedRecord] = []
        self._told = np.zeros((0, 0), np.int64)
        """The totals at the last call of `grown`; of other sessions after a change."""
        self.texts = Texts()
        """Of the rows that are made."""
        self.faults = np.zeros(len(RULED), np.int64)
        """Records so far with a fault of each kind, in the order of `metrics.feed_faults.RULED`."""
        self.newest_faults = np.zeros(0, np.uint32)
        """Of the records of the newest `update`: bits of `ingest.feed_rules`, and JUMP."""
        self.change(sessions, [None] * len(sessions))

    def change(self, sessions: Sequence[Feeds], kept: Sequence[int | None]) -> None:
        """Have these sessions from now on. `kept`: the number that each had until now, None for a new one.

        A kept session goes on with its open bars and counts; it has the symbols and the interval that it had,
        or ValueError is raised, with nothing changed. Open bars of a session that is not kept, or that gets
        another lateness, are dropped: `close` them first.
        """
        n_feeds = np.array([len(each.symbols) for each in sessions], np.int64)
        open_bars = np.array([each.policy.open_bars for each in sessions], np.int64)
        own = _rows_of(sessions, n_feeds, n_feeds * open_bars)
        feeds, slots = np.zeros(int(n_feeds.sum()), FEED), np.zeros(int(n_feeds @ open_bars), OPEN)
        tables = no_tables(len(feeds))
        feeds["next_index"] = feeds["venue_event"] = slots["index"] = slots["marked"] = NEVER
        at = np.array([number for number, old in enumerate(kept) if old is not None], np.int64)
        was = self._sessions[[old for old in kept if old is not None]]
        theirs = was["end_feed"] - was["first_feed"]
        if (was["interval"] != own["interval"][at]).any() or (theirs != n_feeds[at]).any():
            raise ValueError("a session that is kept has the same symbols and interval")
        for name in ("since", "last_ring", *_OF_STATE):
            own[name][at] = was[name]
        to, of = _spans(own["first_feed"][at], theirs), _spans(was["first_feed"], theirs)
        feeds[to] = self._feeds[of]
        used = self._feeds["token"][of] != 0  # unused tables take no memory
        tables[to[used]] = self._tables[of[used]]
        feeds["session"] = np.repeat(np.arange(len(sessions)), n_feeds)
        feeds["last"]["session"][to] = feeds["session"][to]
        feeds["leg"] = np.arange(len(feeds)) - np.repeat(own["first_feed"], n_feeds)
        feeds["venue"] = [venue for each in sessions for venue in each.venues or (0,) * len(each.symbols)]
        _set_splits(feeds, sessions)
        _set_rolls(feeds, sessions)
        per_feed = np.repeat(open_bars, n_feeds)
        feeds["first_slot"] = np.repeat(own["first_slot"], n_feeds) + feeds["leg"] * per_feed
        feeds["end_slot"] = feeds["first_slot"] + per_feed
        bars = was["end_slot"] - was["first_slot"]
        alike = bars == (own["end_slot"] - own["first_slot"])[at]
        at, was, bars = at[alike], was[alike], bars[alike]
        to = _spans(own["first_slot"][at], bars)
        slots[to] = self._slots[_spans(was["first_slot"], bars)]
        slots["bar"]["session"][to] = np.repeat(at, bars)
        self._sessions, self._feeds, self._slots, self._tables = own, feeds, slots, tables
        self._told = np.zeros((0, 0), np.int64)
        self._route(sessions)

    def _route(self, sessions: Sequence[Feeds]) -> None:
        reading: dict[int, list[int]] = {}
        rooms: dict[int, int] = {}
        feed = 0
        for each in sessions:
            for symbol in each.symbols:
                reading.setdefault(symbol, []).append(feed)
                # a record closes bars of all symbols of its sessions
                rooms[symbol] = rooms.get(symbol, 0) + each.policy.room * len(each.symbols)
                feed += 1
        last = max(reading, default=-1)
        counts = [len(reading.get(symbol, ())) for symbol in range(last + 1)]
        self._starts = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))
        routes = [feed for symbol in range(last + 1) for feed in reading.get(symbol, ())]
        self._routes = np.array(routes, np.int64)
        self._room = max(rooms.values(), default=1)
        self._out = np.zeros(max(1024, 2 * self._room), BAR)

    def update(self, records: Records, now_ns: int) -> Bars:
        """Take RECORD [n] in arrival order; returns the bars this closed, BAR [m], in order within a session.

        `now_ns` is the monotonic clock; bars record how long their newest tick waited in the ring. The bars
        do not depend on how records are batched. Records of symbols that no session reads are skipped.
        """
        self.texts.take(records)
        closed, start = [], 0
        self.newest_faults = masks = np.zeros(len(records), np.uint32)
        while True:
            start, n = bar_kernel.update(
                records,
                start,
                self._sessions,
                self._feeds,
                self._slots,
                self._tables,
                self._starts,
                self._routes,
                masks,
                now_ns,
                self._out,
                self._room,
            )
            closed.append(self._without_refused(self._out[:n], records))
            if start >= len(records):
                if masks.any():
                    self.faults += np.count_nonzero(masks[:, np.newaxis] & _FAULT_BITS, axis=0)
                return closed[0] if len(closed) == 1 else np.concatenate(closed)

    def take_refused(self) -> list[RefusedRecord]:
        """The records refused since the last call, in order."""
        refused, self._refused = self._refused, []
        return refused

    def _without_refused(self, rows: Bars, records: Records) -> Bars:
        """A copy of the other rows; the refused ones are kept for `take_refused`."""
        refused = (rows["flags"] & REFUSED) != 0
        if not refused.any():
            return rows.copy()
        for row in rows[refused]:
            reason = _reason(int(row["flags"]))
            record = records[int(row["record"])].copy()
            self._refused.append(RefusedRecord(int(row["session"]), int(row["leg"]), reason, record))
        others: Bars = rows[~refused]
        return others

    @property
    def closes_idle(self) -> bool:
        """Whether any session's bars are closed when it is idle."""
        return bool((self._sessions["idle_close"] > 0).any())

    def close_idle(self, now_ns: int) -> Bars:
        """Close the open bars, BAR [m], of sessions without a record for as long as their policies say.

        `now_ns` is the monotonic clock. Later ticks for those bars are late.
        """
        limits = self._sessions["idle_close"]
        idle = (limits > 0) & (now_ns - self._sessions["last_ring"] >= limits)
        closed = self.close(np.flatnonzero(idle).tolist())
        closed["ts_closed"] = now_ns
        return closed

    def restart_idle_clock(self, now_ns: int, sessions: Sequence[int]) -> None:
        """Idle times of these sessions count from now, on the monotonic clock."""
        self._sessions["last_ring"][list(sessions)] = now_ns

    def flush(self, until_ns: int = 0) -> Bars:
        """Close every open bar, BAR [m], at the end of the input; ``until_ns``: see `close`."""
        return self.close(range(len(self._sessions)), until_ns)

    def close(self, sessions: Iterable[int], until_ns: int = 0) -> Bars:
        """Close the open bars, BAR [m], of these sessions.

        Where there are any, empty bars follow up to the one that opens at ``until_ns``, as the policy says.
        """
        closed = [np.zeros(0, BAR)]
        for number in sessions:
            session = self._sessions[number]
            for feed in range(session["first_feed"], session["end_feed"]):
                if self._feeds[feed]["holds"]:
                    bar_kernel.release(session, self._feeds[feed], self._slots, np.iinfo(np.int64).max)
            own = self._slots[session["first_slot"] : session["end_slot"]]
            if (own["index"] != NEVER).any():
                newest = max(int(own["index"].max()), until_ns // int(session["interval"]))
                n = bar_kernel.close_below(session, self._feeds, self._slots, newest + 1, self._out, 0)
                closed.append(self._out[:n].copy())
        return np.concatenate(closed)

    def open_bars(self, session: int) -> Bars:
        """The open bars of a session as they are now, BAR [m], in the order in which they would close."""
        row = self._sessions[session]
        own = self._slots[row["first_slot"] : row["end_slot"]]
        bars: Bars = own["bar"][own["index"] != NEVER]
        ordered: Bars = bars[np.lexsort((bars["leg"], bars["ts_open"]))]
        return ordered

    def low_watermarks(self, session: int) -> dict[int, int]:
        """By stream, the offset below which each record so far is in no open bar of the session.

        Streams are left out where that is not known: see `hold_back`.
        """
        row = self._sessions[session]
        feeds = self._feeds[row["first_feed"] : row["end_feed"]]
        ends = feeds["offsets"] + 1
        # of the message before a cut other records may be still to come
        cut = (feeds["had_streams"][:, 0] == feeds["streams"][:, 0]) & (
            feeds["had_offsets"][:, 0] == feeds["offsets"][:, 0]
        )
        ends[cut & (feeds["more"] != 0), 0] -= 1
        lows: dict[int, int] = {}
        for stream, end in zip(feeds["streams"].ravel().tolist(), ends.ravel().tolist(), strict=True):
            if stream:
                lows[stream] = max(end, lows.get(stream, 0))
        own = self._slots[row["first_slot"] : row["end_slot"]]
        is_open = own["index"] != NEVER
        if is_open.any():
            hold_all_back(lows, own["bar"][is_open])
        for held in feeds["held"][feeds["holds"] != 0]:
            hold_back(lows, [ReadRange(int(held["stream"]), int(held["offset"]), 0)], 0)
        return lows

    def cut(self, session: int) -> BuilderState:
        """A session's rows as they are now."""
        row = self._sessions[session : session + 1]
        feeds = self._feeds[row["first_feed"][0] : row["end_feed"][0]]
        slots = self._slots[row["first_slot"][0] : row["end_slot"][0]]
        tables = self._tables[row["first_feed"][0] : row["end_feed"][0]]
        return BuilderState(Rows.of(row), Rows.of(feeds), Rows.of(slots), Rows.of(packed_tables(tables)))

    def positions(self, session: int) -> list[Taken]:
        """Where the newest record of each of its symbols was read."""
        row = self._sessions[session]
        return [
            Taken(
                int(feed["streams"][0]),
                int(feed["offsets"][0]),
                int(feed["part"]),
                bool(feed["more"]),
                tuple(
                    (stream, offset)
                    for stream, offset in zip(
                        feed["streams"][1:].tolist(), feed["offsets"][1:].tolist(), strict=True
                    )
                    if stream
                ),
            )
            for feed in self._feeds[row["first_feed"] : row["end_feed"]]
        ]

    def restore(self, session: int, cut: BuilderState, reread: Sequence[bool], now_ns: int) -> None:
        """Go on from a cut of a session with the same policy and symbols.

        ``reread``: see `DataPlane.restore`. ``now_ns``: see `received_before`. Raises ValueError, with
        nothing changed, where the rows do not fit.
        """
        was, feeds, slots = cut.session.array(SESSION), cut.feeds.array(FEED), cut.slots.array(OPEN)
        row = self._sessions[session]
        tables = unpacked_tables(cut.identities.array(IDENTITY), len(feeds))
        mine = self._feeds[row["first_feed"] : row["end_feed"]]
        own = self._slots[row["first_slot"] : row["end_slot"]]
        same = len(was) == 1 and len(feeds) == len(mine) == len(reread) and len(slots) == len(own)
        if not same or any(was[0][name] != row[name] for name in _POLICY):
            raise ValueError("the stored session had other symbols or another policy")
        row["last_ring"] = now_ns
        for name in _OF_STATE:
            row[name] = was[0][name]
        for name in ("session", "leg", "first_slot", "end_slot", "venue"):
            feeds[name] = mine[name]
        for name in ("split_at", "split_factor", "rolls", "roll_at"):
            feeds["quality"][name] = mine["quality"][name]
        mine[:], own[:] = feeds, slots
        self._tables[row["first_feed"] : row["end_feed"]] = tables
        for bars in (own["bar"], mine["last"]):
            received_before(bars, session, now_ns)
        mine["held"]["ts_ring"] = now_ns
        again = np.asarray(reread)
        mine["had_streams"] = np.where(again[:, np.newaxis], mine["streams"], 0)
        mine["had_offsets"], mine["had_part"] = mine["offsets"], mine["part"]
        for name in (*COUNTS, "events"):
            mine[name] = 0
        for number in np.flatnonzero(~again & (mine["streams"][:, 0] != 0)).tolist():
            bar_kernel.mark_gap(mine[number], self._slots)

    def mark_gap(self, sessions: Iterable[int] | None = None) -> None:
        """Records of these sessions (all) may be lost: flag their open bars and those of their next records.

        A record with the gap flag does the same for its own symbol.
        """
        for session in range(len(self._sessions)) if sessions is None else sessions:
            row = self._sessions[session]
            for feed in range(row["first_feed"], row["end_feed"]):
                bar_kernel.mark_gap(self._feeds[feed], self._slots)

    def counts(self, name: Count) -> list[int]:
        """Records since the start, by session.

        ``late``; ``dropped``: with a fault whose action is that; ``jumps``: with a price beyond the limit;
        ``taken``: that are in bars, open ones included; ``ignored``: of an ignored kind; ``duplicates``: that
        their symbol had before (`ingest.identity`); ``repeated``: that the session had taken before it was
        restored.
        """
        found: list[int] = self.totals[:, COUNTS.index(name)].tolist()
        return found

    @property
    def totals(self) -> npt.NDArray[np.int64]:
        """Records since the start by session, int64 [sessions, COUNTS and EVENTS], in this order."""
        columns = *(self._feeds[name] for name in COUNTS), self._feeds["events"]
        of_feeds, firsts = np.column_stack(columns).astype(np.int64), self._sessions["first_feed"]
        return np.add.reduceat(of_feeds, firsts) if len(firsts) else of_feeds

    def grown(self) -> list[tuple[int, list[int]]]:
        """The sessions whose `totals` are not those of the last call, by number, and their totals."""
        totals, told = self.totals, self._told
        alike = totals.shape == told.shape
        rows = np.flatnonzero((totals != told).any(axis=1)) if alike else np.arange(len(totals))
        self._told = totals
        return list(zip(rows.tolist(), totals[rows].tolist(), strict=True))

    @property
    def halted(self) -> list[bool]:
        """By session, whether any of its symbols is."""
        found: list[bool] = (self._sessions["halted"] > 0).tolist()
        return found

    @property
    def late_events(self) -> list[int]:
        """Event time of the newest late record, by session; 0 before the first one."""
        found: list[int] = self._sessions["late_event"].tolist()
        return found


def _set_splits(feeds: npt.NDArray[Any], sessions: Sequence[Feeds]) -> None:
    """Set the announced splits of FEED [symbols of these sessions], in place."""
    found = [own for each in sessions for own in each.splits or ((),) * len(each.symbols)]
    quality = feeds["quality"]
    quality["split_factor"] = 0
    for number, splits in enumerate(found):
        for at, (moment, factor) in enumerate(sorted(splits)[-SPLITS:]):
            quality["split_at"][number, at], quality["split_factor"][number, at] = moment, factor


def _set_rolls(feeds: npt.NDArray[Any], sessions: Sequence[Feeds]) -> None:
    """Set the rolls of FEED [symbols of these sessions], in place."""
    found = [own for each in sessions for own in each.rolls or ((),) * len(each.symbols)]
    quality = feeds["quality"]
    quality["rolls"] = 0
    for number, moments in enumerate(found):
        newest = sorted(moments)[-ROLLS:]
        quality["rolls"][number] = len(newest)
        quality["roll_at"][number, : len(newest)] = newest


def _reason(flags: int) -> str:
    """Of a row that was refused."""
    if flags & OTHER_INTERVAL:
        return "interval"
    if flags & LATE:
        return "late"
    return next((name for name, bit in BITS.items() if flags & bit), "price_jump")
