"""From a source's messages to ring records: decode, find the sessions, push.

Every message ends in the ring, or is counted and, if malformed, sent to the DLQ. A full ring pauses
a source that can wait. Other sources are never paused: their ring overwrites.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from daemon import protocol
from daemon.ages import VenueClock
from daemon.config.symbols import NO_NAMES, Names, Period, SymbolRoute
from daemon.gateway.checkpoint.offsets import OffsetTracker, Stream
from daemon.gateway.dead_letters import unreadable
from daemon.gateway.discovery import Discoverer, Discovery
from daemon.gateway.gap_flags import GapFlags
from daemon.gateway.intake_counters import SKIPPED, IntakeCounters
from daemon.gateway.originals import Originals
from daemon.gateway.patterns import Unopened
from daemon.gateway.record_links import RecordLinks
from daemon.gateway.ring_flow import COLUMNS_SLICE, SLICE, RingFlow
from daemon.gateway.sequence_gaps import Sequence as SequenceKind
from daemon.gateway.sequence_gaps import Sequences
from daemon.ring_numbers import RingValues, event_values, ring_values, words_of
from feeds.codec import REPLAY, MalformedRecord, check_prices
from feeds.columns import Columns
from feeds.columns.record_columns import ColumnBatch
from feeds.decimals import NANO
from feeds.market_data import (
    EVERY_SYMBOL,
    AnyRecord,
    Bar,
    DeadLetter,
    Event,
    Received,
    VenueHeartbeat,
)  # fmt: skip
from feeds.payloads.payload_decoder import PayloadDecoder, PayloadRecord, malformed
from feeds.quality.silence import SilenceMonitor
from feeds.record_identity import token_of
from feeds.source import Incoming, SeekingSource, Source
from feeds.subjects import Subject
from ingest.record import (
    BAR,
    FLAG_GAP,
    FLAG_REPLAY,
    FLAG_SKEWED,
    HEARTBEAT,
    QUOTE,
    REFUSAL,
    SIDE_BUY,
    SIDE_SELL,
    SIDE_UNKNOWN,
    TRADE,
    WORDS,
    stream_number,
)
from ingest.ring import Ring
from ingest.words import chunks_of, number_of
from metrics.store import MetricStore

log = logging.getLogger(__name__)

FEW = 16
"""Records below which decoding one by one is faster than as columns."""
Integers = npt.NDArray[np.int64]

_KINDS = np.array([0, TRADE, QUOTE, BAR], np.uint8)
_SIDES_OF = np.array([SIDE_UNKNOWN, SIDE_BUY, SIDE_SELL], np.int64)
"""Ring codes by those of `feeds.columns`."""
NEVER_NS = 2**63 - 1
UNKNOWN, OUTSIDE = -1, -2
"""Keys of columns: of a symbol that no session reads, and of a name that is of no symbol at its time."""
_OF_TIMES = ("clock", "timestamp_unit")
"""Reasons of records whose times are wrong."""


class Opener(Protocol):
    """Opens sessions whose first record has come."""

    def closed(self, sessions: Iterable[str]) -> set[str]:
        """Those of them that are not open here."""

    async def open(self, sessions: Collection[str]) -> set[str]:
        """Open them; returns those that cannot be now."""


class RingTurns:
    """The order in which records of all sources enter the ring: a turn at a time.

    ``kept_bytes``: see `Originals`.
    """

    def __init__(self, kept_bytes: int = 16 << 20) -> None:
        self.turn = asyncio.Lock()
        self.originals, self.links = Originals(kept_bytes), RecordLinks()
        self._read_until: dict[str, int] = {}
        """Monotonic time, ns, by source."""

    def has_read(self, source: str, until_ns: int | None, ring: Ring) -> None:
        """All that ``source`` had at this monotonic time is in the ring; None: it has ended."""
        if until_ns is None:
            self._read_until.pop(source, None)
        else:
            self._read_until[source] = max(until_ns, self._read_until.get(source, 0))
        ring.tell_read(min(self._read_until.values(), default=NEVER_NS))


class Routes:
    """Which sessions read a symbol, and its number in the ring: by VENUE:SYMBOL, and by the columns' keys.

    ``unread``: symbols that are known, and that no session reads; their keys are those behind. Those of other
    ``names`` come last, until `rename`.
    """

    def __init__(
        self, by_symbol: Mapping[str, SymbolRoute], unread: Collection[str] = (), names: Names = NO_NAMES
    ) -> None:
        self.by_symbol, self.names = by_symbol, names
        self.symbols, self.unread = [*by_symbol, *unread, *names.periods], len(unread)
        self.read = by_symbol.keys() | names.periods.keys()
        """Symbols, and their other names, that are read."""
        self.venues = {symbol.partition(":")[0] for symbol in (*by_symbol, *names.periods)}
        self.numbers = np.array([route.number for route in by_symbol.values()], np.uint32)
        self.readers = [route.sessions for route in by_symbol.values()]
        # prices of the others are not in the columns' units; the last ones are of no session
        self.in_nano = np.array([*(route.price_scale == NANO for route in by_symbol.values()), True, True])
        self.positions = {symbol: at for at, symbol in enumerate(self.symbols)}
        self._first_name = len(self.symbols) - len(names.periods)
        self._into = [self._keys_of(periods) for periods in names.periods.values()]

    def _keys_of(self, periods: Sequence[Period]) -> tuple[Integers, Integers]:
        """Of one name: event times, ns, and the key before the first, between them, and from the last on."""
        times = [moment for each in periods for moment in (each.start, each.end)]
        keys = [OUTSIDE, *(key for each in periods for key in (self._position(each.symbol), OUTSIDE))]
        return np.array(times, np.int64), np.array(keys, np.int64)

    def _position(self, symbol: str) -> int:
        return self.positions.get(symbol, UNKNOWN)

    def rename(self, columns: Columns) -> None:
        """Give records of other names the keys of their symbols, `UNKNOWN` or `OUTSIDE`, in place."""
        if not self._into:
            return
        keys = columns["key"]
        found = np.flatnonzero((keys >= self._first_name) & (keys < len(self.symbols)))
        of_names, events = keys[found], columns["ts_event"][found]
        for key in np.unique(of_names).tolist():
            own = of_names == key
            times, into = self._into[key - self._first_name]
            keys[found[own]] = into[np.searchsorted(times, events[own], side="right")]

    def routes_of(self, names: Iterable[str], ts_event: int) -> list[SymbolRoute]:
        """Where records of these names go; at 0, a time that is not known, wherever they may go."""
        found = dict.fromkeys(symbol for name in names for symbol in self.names.symbols(name, ts_event))
        return [self.by_symbol[symbol] for symbol in found if symbol in self.by_symbol]

    def names_in(self, venue: str) -> list[str]:
        """The symbols of a venue that are read, and other names there."""
        return [name for name in (*self.by_symbol, *self.names.periods) if name.startswith(f"{venue}:")]


class RecordDecoder:
    """Feeds one source into one ring, to which others may write in turn (``order``).

    ``routes``: by symbol (VENUE:SYMBOL), which may have other ``names``; `reroute` replaces both.
    ``clocks``: of the venues, by session. ``dead_letter`` gets malformed messages, ``name_stream`` each
    stream before its first record is pushed. A source that can wait is paused while the ``gate`` is not set.
    ``opener``: None where all sessions are open from the start. ``discoverer``: of sessions that records of
    other symbols open.
    """

    def __init__(
        self,
        source: Source,
        ring: Ring,
        routes: Mapping[str, SymbolRoute],
        tracker: OffsetTracker,
        store: MetricStore,
        dead_letter: Callable[[DeadLetter], None],
        *,
        payloads: PayloadDecoder,
        max_ahead_ns: int,
        names: Names = NO_NAMES,
        clocks: Mapping[str, VenueClock] | None = None,
        order: RingTurns | None = None,
        sequence: SequenceKind = "none",
        name_stream: Callable[[protocol.NameStream], None] = lambda stream: None,
        opener: Opener | None = None,
        discoverer: Discoverer | None = None,
        gate: asyncio.Event | None = None,
        silence: SilenceMonitor | None = None,
    ) -> None:
        self.flow = RingFlow(source, ring, store, gate, silence)
        self._source, self._tracker, self._store = source, tracker, store
        self._dead_letter, self._opener = dead_letter, opener
        self._discovery = Discovery(discoverer, payloads, tracker, self._check) if discoverer else None
        self._payloads, self._max_ahead_ns = payloads, max_ahead_ns
        self._clocks = defaultdict(VenueClock) if clocks is None else clocks
        self.venues: defaultdict[str, VenueClock] = defaultdict(VenueClock)
        """Clocks by venue, as live records of this source show them."""
        self._counters = IntakeCounters(source, store)
        self._order = order or RingTurns()
        self._name_stream = name_stream
        self._numbers: dict[Stream, int] = {}
        """Of the streams that have a name, in the ring."""
        self._gaps = GapFlags()
        self._missed = set[str]()
        """Sessions whose records went nowhere."""
        self._sequences = Sequences(sequence)
        self._waiting: dict[tuple[int, int], tuple[Stream, SymbolRoute, Callable[[bool], None]]] = {}
        """Packs heartbeats and refusals of the record before, by symbol and time (0: unknown)."""
        self._routes = Routes({}, names=names)
        self.reroute(routes)

    async def run(self) -> None:
        """Until the source ends."""
        async for batch in self._source.batches():
            self._note_loss()
            if not isinstance(batch, ColumnBatch):
                await self._payloads.prepare(batch)
            size = COLUMNS_SLICE if isinstance(batch, ColumnBatch) else SLICE
            for start in range(0, len(batch), size):
                async with self._order.turn:
                    await self._pack_all(batch[start : start + size])
                    await self.flow.flush()
                await asyncio.sleep(0)
            await self.flow.wait_for_gate()
        self._note_loss()

    def reroute(self, routes: Mapping[str, SymbolRoute], names: Names | None = None) -> None:
        """Other sessions read the records from now on, perhaps by other names."""
        unread = () if self._discovery is None else self._discovery.unmatched
        self._routes = Routes(routes, unread, self._routes.names if names is None else names)
        self._counters.forget_sessions()
        if self.flow.silence is not None:
            self.flow.silence.read({symbol: route.number for symbol, route in routes.items()})
        self._payloads.read_symbols(self._routes.symbols)

    def extend(self, more: Mapping[str, SymbolRoute]) -> None:
        """These symbols are read, too."""
        self.reroute({**self._routes.by_symbol, **more})

    async def _open_for(self, stream: Stream, sessions: Iterable[str]) -> None:
        """As `_open`, unless the stream is another daemon's: some of it was read before it went."""
        if self._tracker.is_ours(stream):
            await self._open(sessions)

    async def _open(self, sessions: Iterable[str]) -> None:
        """Open those that are closed; call it right before their records are packed.

        The records of one that cannot be opened go nowhere, but their offsets are not committed. If it is
        open later, its next record follows a gap.
        """
        if self._opener is None or not (closed := self._closed(sessions)):
            return
        failed = await self._opener.open(closed)
        late, self._missed = self._missed & (closed - failed), (self._missed - closed) | failed
        for route in self._routes.by_symbol.values() if late else ():
            if late.intersection(route.sessions):
                self._gaps.note([route.number])

    async def _open_readers(self, messages: Sequence[Incoming], keys: Integers) -> None:
        """The same of messages that were decoded as columns."""
        if self._opener is None:
            return
        found = set[int]()
        for stream, start, end in _streams(messages):
            if self._tracker.is_ours(stream):
                found.update(np.unique(keys[start:end]).tolist())
        await self._open({name for key in found if key >= 0 for name in self._routes.readers[key]})

    def _closed(self, sessions: Iterable[str]) -> set[str]:
        return set() if self._opener is None else self._opener.closed(sessions)

    def _parts(self, message: Incoming) -> Sequence[PayloadRecord]:
        """What a message holds; nothing if it was read before, is empty, or could not be read."""
        stream = (message.topic, message.partition)
        if message.fault is not None and message.fault.is_line:
            self._counters.received.inc()
            self._store.inc("foretick_records_malformed_total", reason=message.fault.reason)
            subjects = [Subject(message.key.decode(), message.fault.ts_event)] if message.key else []
            self._note_refused(message, message.fault.reason, subjects)
            return ()
        if self._source.kind == "pausing" and self._tracker.repeats(stream, message.offset):
            self._counters.received.inc()
            self._store.inc("foretick_records_repeated_total", source=self._source.name)
            return ()
        found: Sequence[PayloadRecord] = ()
        if message.fault is not None:
            self._counters.received.inc()
            error = MalformedRecord(message.fault.reason, message.fault.message)
            self._refuse(message, error, self._payloads.subjects(message))
            if message.last_offset > message.offset:  # whose records they were is not known
                self._note_jump(stream, message.last_offset - message.offset + 1)
        elif not message.payload:
            self._counters.received.inc()
            kind = "tombstone" if message.null else "empty"
            self._store.inc("foretick_messages_empty_total", source=self._source.name, kind=kind)
        else:
            found, passed_over = self._payloads.parts(message)
            self._counters.received.inc(len(found) + passed_over)
            if passed_over:
                self._store.inc("foretick_records_passed_over_total", passed_over, source=self._source.name)
        if not found:
            self._tracker.skipped(stream, message.last_offset)
        return found

    def _number(self, stream: Stream) -> int:
        """The number of a stream in the ring; the engine hears its name first."""
        number = self._numbers.get(stream)
        if number is None:
            number = self._numbers[stream] = stream_number(self._source.name, *stream)
            reread = isinstance(self._source, SeekingSource)
            self._name_stream(protocol.NameStream(self._source.name, *stream, reread=reread))
        return number

    async def _pack(self, message: Incoming, found: PayloadRecord, part: int = 0, more: bool = False) -> None:
        """Pack one record if it is usable, else count it. ``part``: its number in its message."""
        stream, record = (message.topic, message.partition), found.record
        route: SymbolRoute | Unopened = Unopened.UNMATCHED
        try:
            if isinstance(record, MalformedRecord):
                raise record
            self._check(record, message)
            if isinstance(record, Event):
                await self._pack_event(record, message, part, more)
                return
            renamed = self._routes.names.renamed(record)
            if renamed is None:
                route = Unopened.OUTSIDE
            elif not isinstance(renamed, VenueHeartbeat):
                route = await self._route(renamed, stream, message.offset, part)
            self._note_missing(record)  # by its own name
            if isinstance(route, SymbolRoute) and not isinstance(record, VenueHeartbeat):
                self._write(record, route, message, part, more)
        except Exception as error:  # whatever one message provokes is its own fault
            subjects = found.subjects
            if not isinstance(record, MalformedRecord):
                subjects = [Subject(record.key, record.ts_event)]
            self._refuse(message, malformed(error), subjects, part)
            self._tracker.skipped(stream, message.offset)
            return
        if isinstance(record, VenueHeartbeat) and renamed is not None:
            self._take_heartbeat(record, message)
            return
        if isinstance(route, Unopened):
            if route is Unopened.UNMATCHED:
                self._store.inc("foretick_records_unknown_symbol_total")
            else:
                self._store.inc("foretick_records_unopened_total", reason=route)
            self._tracker.skipped(stream, message.offset)
            return
        self._order.originals.keep(self._source.name, (message,), part)
        if message.headers:
            self._order.links.keep(self._tracker.source, (message,))
        self._counters.passed.inc()
        for name in route.sessions:
            self._counters.passed_to(name).inc()
            self._tracker.passed_on(name, stream, (message.offset,))
        if record.skewed:
            self._counters.skewed.inc()
        if self._gaps.take(route.number, stream):
            self.flow.writer.records[-1]["flags"] |= FLAG_GAP
        self._hear(route.sessions)
        if REPLAY not in message.headers and record.clock == "exchange":
            for clock in self._clocks_of(record.venue, route.sessions):
                clock.observe(record.ts_event, message.ts_recv_ns)

    async def _route(
        self, record: AnyRecord, stream: Stream, offset: int, part: int
    ) -> SymbolRoute | Unopened:
        """Where a record goes, whose sessions are open by then, or why nowhere.

        Raises MalformedRecord for prices that its sessions do not take.
        """
        route = self._routes.by_symbol.get(record.key)
        if route is not None:
            if not route.signed:
                check_prices(record)
            await self._open_for(stream, route.sessions)
            route = self._routes.by_symbol.get(record.key)  # none is left where the engine refuses it
        if route is not None:
            return route
        if self._discovery is None:
            return Unopened.UNMATCHED
        return self._discovery.why(record.key, (stream, offset, part))

    def _write(self, record: AnyRecord, route: SymbolRoute, message: Incoming, part: int, more: bool) -> None:
        """Write a record for the ring. Raises what its values provoke, and then nothing is written."""
        self._add(record, ring_values(record, route.price_scale), route, message, part, more)

    def _add(
        self,
        record: AnyRecord | Event,
        numbers: RingValues,
        route: SymbolRoute,
        message: Incoming,
        part: int,
        more: bool,
    ) -> None:
        self.flow.writer.add(
            numbers.kind,
            route.number,
            record.ts_event,
            record.ts_recv,
            numbers.values,
            x=numbers.x,
            price_finer=numbers.price_finer,
            size_finer=numbers.size_finer,
            seq=record.seq,
            ts_source=message.ts_source_ns or message.ts_recv_ns,
            replay=REPLAY in message.headers,
            stream=self._number((message.topic, message.partition)),
            offset=message.offset,
            part=part,
            more=more,
            token=token_of(record, self._sequences.counts != "none"),
        )

    async def _pack_event(self, event: Event, message: Incoming, part: int, more: bool) -> None:
        """Pack a record that is in no bar, for each symbol that it is about, behind its words.

        Raises MalformedRecord, with nothing packed.
        """
        stream = (message.topic, message.partition)
        made = [(route, self._event_values(event, route)) for route in self._about(event)]
        self._note_missing(event)
        await self._open_for(stream, {name for route, _ in made for name in route.sessions})
        open_now = {route.number for route in self._about(event)}  # none where the engine refuses it
        made = [each for each in made if each[0].number in open_now]
        if not made:
            self._store.inc("foretick_records_unknown_symbol_total")
            self._tracker.skipped(stream, message.offset)
            return
        self._counters.passed.inc()
        if event.skewed:
            self._counters.skewed.inc()
        words = words_of(event)
        for route, values in made:
            await self._add_words(words, event, route, message)
            self._add(event, values, route, message, part, more)
            if self._gaps.take(route.number, stream):
                self.flow.writer.records[-1]["flags"] |= FLAG_GAP
            self._hear(route.sessions)
            for name in route.sessions:
                self._counters.passed_to(name).inc()
                self._tracker.passed_on(name, stream, (message.offset,))

    @staticmethod
    def _event_values(event: Event, route: SymbolRoute) -> RingValues:
        if not route.signed:
            check_prices(event)
        return event_values(event, route.price_scale)

    async def _add_words(self, words: str, event: Event, route: SymbolRoute, message: Incoming) -> None:
        """Write the words of the record that follows, for which there is room, too."""
        chunks, text = chunks_of(words), number_of(words)
        await self.flow.make_room(len(chunks) + 1)
        for part, chunk in enumerate(chunks):
            self.flow.writer.add(
                WORDS,
                route.number,
                event.ts_event,
                event.ts_recv,
                chunk[:5],
                x=chunk[5],
                seq=text,
                part=part,
                stream=self._number((message.topic, message.partition)),
                offset=message.offset,
                more=True,
            )

    def _about(self, record: Event | VenueHeartbeat) -> list[SymbolRoute]:
        """The symbols of sessions that a record of one symbol, or of a whole venue, is about."""
        names = self._routes.names_in(record.venue) if record.symbol == EVERY_SYMBOL else [record.key]
        return self._routes.routes_of(names, record.ts_event)

    def _take_heartbeat(self, beat: VenueHeartbeat, message: Incoming) -> None:
        """No answer covers a heartbeat, so its offset is done here."""
        self._tracker.skipped((message.topic, message.partition), message.offset)
        if found := self._about(beat):
            self._store.inc("foretick_heartbeats_total", source=self._source.name)
            found = [route for route in found if not self._closed(route.sessions)]
        else:
            self._store.inc("foretick_records_unknown_symbol_total")
        for route in found:
            pack = partial(self._pack_heartbeat, beat, route, message)
            self._waiting[route.number, beat.ts_event] = (message.topic, message.partition), route, pack

    def _pack_heartbeat(
        self, beat: VenueHeartbeat, route: SymbolRoute, message: Incoming, more: bool
    ) -> None:
        self._hear(route.sessions)
        self.flow.writer.add(
            HEARTBEAT,
            route.number,
            beat.ts_event,
            beat.ts_recv,
            (0, 0, 0, 0, 0),
            seq=beat.seq,
            gap=self._gaps.take(route.number),
            ts_source=message.ts_source_ns or message.ts_recv_ns,
            stream=self._number((message.topic, message.partition)),
            offset=message.offset,
            more=more,
        )

    def _pack_refusal(
        self, route: SymbolRoute, ts_event: int, message: Incoming, part: int, more: bool
    ) -> None:
        """A record of this symbol is missing from its bar."""
        is_line = message.fault is not None and message.fault.is_line
        self.flow.writer.add(
            REFUSAL,
            route.number,
            ts_event,
            message.ts_recv_ns,
            (0, 0, 0, 0, 0),
            ts_source=message.ts_recv_ns,  # the message's own may be what is wrong with it
            stream=0 if is_line else self._number((message.topic, message.partition)),
            offset=message.offset,
            part=part,
            more=more,
        )

    def _hear(self, sessions: tuple[str, ...]) -> None:
        now = time.monotonic_ns()
        for name in sessions:
            self._clocks[name].touch(now)

    def _note_missing(self, record: Received) -> None:
        """Count records missing from the venue's numbering; the next ones of its symbols follow a gap."""
        by_venue = self._sequences.counts == "venue"
        routes, of = self._routes, record.venue if by_venue else record.key
        known = of in (routes.venues if by_venue else routes.read)
        missing = self._sequences.missing(record) if known else 0
        if not missing:
            return
        if found := routes.routes_of(routes.names_in(of) if by_venue else [of], record.ts_event):
            self._store.inc("foretick_records_lost_upstream_total", missing, source=self._source.name)
            log.warning("%d records of %s are missing before number %d", missing, of, record.seq)
            self._gaps.note(route.number for route in found)

    async def _pack_all(self, messages: Sequence[Incoming]) -> None:
        """Pack messages in order: runs of plain records as columns, all others one by one."""
        done = 0
        while done < len(messages):
            done += await self._pack_some(messages[done:])

    async def _pack_some(self, messages: Sequence[Incoming]) -> int:
        """Pack the first of these messages, up to one at which other symbols are read; returns how many."""
        if len(messages) < FEW or self._sequences.counts != "none":
            await self._pack_each(messages)
            return len(messages)
        try:
            columns, received, source = self._decoded(messages)
        except Exception:  # one by one, only the message that provokes it is refused
            log.exception("%s: %d messages are read one by one", self._source.name, len(messages))
            await self._pack_each(messages)
            return len(messages)
        routes = self._routes
        borders = (np.flatnonzero(np.diff(columns["taken"])) + 1).tolist()
        for start, end in pairwise([0, *borders, len(messages)]):
            if self._routes is not routes:
                return int(start)  # keys are those of other symbols now
            if end - start < FEW or not columns["taken"][start]:
                await self._pack_each(messages[start:end])
                continue
            await self.flow.make_room(end - start)
            await self._open_readers(messages[start:end], columns["key"][start:end])
            if self._routes is not routes:
                return int(start)
            self._pack_columns(
                messages[start:end], columns[start:end], received[start:end], source[start:end]
            )
        return len(messages)

    async def _pack_each(self, messages: Sequence[Incoming]) -> None:
        if self._discovery is not None:
            names = self._routes.names
            await self._open(self._discovery.look(messages, lambda: self._routes.by_symbol, names))
            self._discovery.note_opened(self._routes.by_symbol)
        for message in messages:
            parts = self._parts(message)
            for number, part in enumerate(parts):
                await self.flow.make_room()  # a message may have many records
                more, own = number + 1 < len(parts), message
                if part.payload is not message.payload:
                    own = msgspec.structs.replace(message, payload=part.payload)
                await self._pack(own, part, number, more)
                await self._pack_waiting(more)
            await self._pack_waiting()
            self.flow.writer.end_message()

    async def _pack_waiting(self, more: bool = False) -> None:
        for stream, route, pack in self._waiting.values():
            await self.flow.make_room()
            await self._open_for(stream, route.sessions)
            pack(more)
        self._waiting.clear()

    def _decoded(self, messages: Sequence[Incoming]) -> tuple[Columns, Integers, Integers]:
        """The messages as columns, taken where nothing is wrong with them.

        And when they were received, and when their source had them, ns, both of [messages].
        """
        if self._discovery is not None and len(self._discovery.unmatched) > self._routes.unread:
            self.reroute(self._routes.by_symbol)
        if isinstance(messages, ColumnBatch):
            columns = messages.columns.rows.copy()
            columns["key"] = messages.columns.keys.numbers(self._routes.positions)[columns["key"]]
            received = np.full(len(messages), messages.received_ns, np.int64)
            source = np.zeros(len(messages), np.int64)
        else:
            received = np.array([message.ts_recv_ns for message in messages], np.int64)
            source = np.array([message.ts_source_ns for message in messages], np.int64)
            columns = self._payloads.columns(messages)
        self._routes.rename(columns)
        columns["taken"] &= columns["ts_event"] - received <= self._max_ahead_ns
        if self._discovery is not None:
            columns["taken"] &= columns["key"] != UNKNOWN  # the others may open sessions
            columns["key"][columns["key"] >= len(self._routes.numbers)] = UNKNOWN
        columns["taken"] &= self._routes.in_nano[columns["key"]]
        return columns, received, source

    def _pack_columns(
        self, messages: Sequence[Incoming], columns: Columns, received: Integers, source: Integers
    ) -> None:
        """Pack messages that were decoded as columns. The outcome is that of `_pack` on each."""
        offsets = _offsets(messages)
        keep = np.zeros(len(messages), np.bool_)
        numbers = np.zeros(len(messages), np.uint64)
        for stream, start, end in _streams(messages):
            numbers[start:end] = self._number(stream)
            keep[start:end] = self._account(stream, offsets[start:end], columns["key"][start:end])
        rows = columns if keep.all() else columns[keep]
        if not len(rows):
            return
        self._order.originals.keep(self._source.name, messages)
        received, source = received[keep], source[keep]
        headers = _headers(messages)
        if headers:
            self._order.links.keep(self._tracker.source, messages)
        replay = _replayed(messages, headers)[keep]
        skewed = rows["ts_recv"] < rows["ts_event"]
        self._counters.skewed.inc(int(np.count_nonzero(skewed)))
        self._observe_clocks(rows, received, ~replay & (rows["received"] == 0))
        for key in np.unique(rows["key"]).tolist():
            self._hear(self._routes.readers[key])
        packed = self.flow.writer.extend(len(rows))
        for name in ("token", "seq", "ts_event", "ts_recv", "a", "b", "c", "d", "e", "x"):
            packed[name] = rows[name]
        packed["kind"] = _KINDS[rows["kind"]]
        trades = packed["kind"] == TRADE
        packed["x"][trades] = _SIDES_OF[rows["x"][trades]]
        packed["symbol"] = self._routes.numbers[rows["key"]]
        packed["stream"], packed["offset"] = numbers[keep], offsets[keep]
        packed["ts_source"] = np.where(source == 0, received, source)
        packed["flags"] = skewed * FLAG_SKEWED + replay * FLAG_REPLAY
        self._gaps.flag(packed)

    def _account(self, stream: Stream, offsets: Integers, keys: Integers) -> npt.NDArray[np.bool_]:
        """Note the offsets of a stream's records; which of them go to the ring."""
        keep = np.ones(len(offsets), np.bool_)
        self._counters.received.inc(len(offsets))
        if self._source.kind == "pausing":
            newest = np.maximum.accumulate(np.append(self._tracker.next_offset(stream) - 1, offsets[:-1]))
            keep = offsets > newest
            repeated = len(offsets) - int(np.count_nonzero(keep))
            self._store.inc("foretick_records_repeated_total", repeated, source=self._source.name)
        unknown = int(np.count_nonzero(keep & (keys == UNKNOWN)))
        self._store.inc("foretick_records_unknown_symbol_total", unknown)
        outside = int(np.count_nonzero(keep & (keys == OUTSIDE)))
        self._store.inc("foretick_records_unopened_total", outside, reason=Unopened.OUTSIDE)
        if not keep.any():
            return keep
        last = int(offsets[keep][-1])
        keep &= keys >= 0
        kept, of_kept = offsets[keep], keys[keep]
        self._counters.passed.inc(len(kept))
        for key in np.unique(of_kept).tolist():
            own = kept[of_kept == key].tolist()
            self._gaps.note_first(int(self._routes.numbers[key]), stream, self._number(stream), own[0])
            for name in self._routes.readers[key]:
                self._counters.passed_to(name).inc(len(own))
                self._tracker.passed_on(name, stream, own)
        self._tracker.skipped(stream, last)
        return keep

    def _observe_clocks(self, rows: Columns, received: Integers, live: npt.NDArray[np.bool_]) -> None:
        """Measure venues' clocks by their records' least latency; the last record tells the time."""
        events, received, keys = rows["ts_event"][live], received[live], rows["key"][live]
        for key in np.unique(keys).tolist():
            own = np.flatnonzero(keys == key)
            for row in (own[np.argmin(received[own] - events[own])], own[-1]):
                venue = self._routes.symbols[key].partition(":")[0]
                for clock in self._clocks_of(venue, self._routes.readers[key]):
                    clock.observe(int(events[row]), int(received[row]))

    def is_read(self, symbol: str) -> bool:
        """Whether a session of a symbol is open here, so that its records come to this process."""
        route = self._routes.by_symbol.get(symbol)
        if route is None or self._opener is None:
            return route is not None
        return len(self._opener.closed(route.sessions)) < len(route.sessions)

    def _clocks_of(self, venue: str, sessions: Iterable[str]) -> list[VenueClock]:
        return [self.venues[venue], *(self._clocks[name] for name in sessions)]

    def _check(self, record: Received, message: Incoming) -> None:
        """Raises MalformedRecord for one that no session can read."""
        _check_width(record)
        ahead = record.ts_event - message.ts_recv_ns
        if ahead > self._max_ahead_ns:
            raise MalformedRecord(
                "clock", f"ts_event is {ahead / 1e9:.0f} s ahead of this machine's clock (source.max_ahead)"
            )

    def _note_loss(self) -> None:
        """Count records missing upstream. Their symbols are unknown: flag every symbol's next record."""
        if self._counters.follow():
            self._gaps.note(self._routes.numbers.tolist())
        for stream, offsets, metric in self._counters.jumps():
            self._note_jump(stream, offsets, metric)

    def _note_jump(self, stream: Stream, offsets: int, metric: str = SKIPPED) -> None:
        """Count offsets that are not read; each symbol's next record from the stream follows a gap."""
        self._store.inc(metric, offsets, source=self._source.name)
        self._gaps.note_jump(stream, self._routes.numbers.tolist())

    def _note_refused(
        self, message: Incoming, reason: str, subjects: Iterable[Subject], part: int = 0
    ) -> None:
        """Note which bars lack a refused record. Its time is unknown if ``reason`` speaks of times."""
        for key, ts_event in subjects:
            moment = 0 if reason in _OF_TIMES else ts_event
            for route in self._routes.routes_of([key], moment):
                pack = partial(self._pack_refusal, route, moment, message, part)
                self._waiting[route.number, moment] = (message.topic, message.partition), route, pack

    def _refuse(
        self, message: Incoming, error: MalformedRecord, subjects: Iterable[Subject], part: int = 0
    ) -> None:
        self._store.inc("foretick_records_malformed_total", reason=error.reason)
        self._note_refused(message, error.reason, subjects, part)
        if self._tracker.is_stored((message.topic, message.partition), message.offset):
            return  # its record was sent when it was read first
        self._dead_letter(unreadable(message, error))


def _check_width(record: Received) -> None:
    """Check that integers fit the ring's 64 bits; those of JSON are unbounded."""
    if not 0 <= record.seq < 1 << 64:
        raise MalformedRecord("type", f"seq must be an unsigned 64-bit integer, got {record.seq}")
    if isinstance(record, Bar) and record.interval_ns >= 1 << 62:
        raise MalformedRecord("type", f"interval_ns is longer than 146 years: {record.interval_ns}")


def _offsets(messages: Sequence[Incoming]) -> Integers:
    if isinstance(messages, ColumnBatch):
        return messages.columns.rows["seq"].astype(np.int64) - 1
    return np.array([message.offset for message in messages], np.int64)


def _headers(messages: Sequence[Incoming]) -> list[Mapping[str, bytes]]:
    """Of each message; none where no message has any."""
    found = [] if isinstance(messages, ColumnBatch) else [message.headers for message in messages]
    return found if any(found) else []


def _replayed(messages: Sequence[Incoming], headers: Sequence[Mapping[str, bytes]]) -> npt.NDArray[np.bool_]:
    if isinstance(messages, ColumnBatch):  # only files have columns
        return np.ones(len(messages), np.bool_)
    if not headers:
        return np.zeros(len(messages), np.bool_)
    return np.array([REPLAY in each for each in headers], np.bool_)


def _streams(messages: Sequence[Incoming]) -> Iterator[tuple[Stream, int, int]]:
    """Runs of messages of one topic and partition: which, from where to where."""
    if isinstance(messages, ColumnBatch):
        yield messages.stream, 0, len(messages)
        return
    topics = [message.topic for message in messages]
    changes = np.diff(np.array([message.partition for message in messages], np.int64)) != 0
    if topics.count(topics[0]) < len(topics):
        changes |= np.array([a != b for a, b in pairwise(topics)], np.bool_)
    for start, end in pairwise([0, *(np.flatnonzero(changes) + 1).tolist(), len(messages)]):
        yield (topics[start], messages[start].partition), start, end
