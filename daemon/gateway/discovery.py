"""Records of symbols that come for the first time: what they open is known before a batch is packed."""

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import Protocol

from daemon.config.symbols import Names, SymbolRoute
from daemon.gateway.checkpoint.offsets import OffsetTracker
from daemon.gateway.patterns import Unopened
from feeds.codec import MalformedRecord
from feeds.market_data import AnyRecord
from feeds.payloads.payload_decoder import PayloadDecoder
from feeds.source import Incoming, Partition

Check = Callable[[AnyRecord, Incoming], None]
"""Raises MalformedRecord for a record that is not usable, whoever would read it."""
Place = tuple[Partition, int, int]
"""Stream, offset and part of a record."""


class Discoverer(Protocol):
    """Decides what opens a session."""

    @property
    def unmatched(self) -> Collection[str]:
        """Symbols that came and that no pattern of sessions matches."""

    def discover(self, record: AnyRecord) -> Unopened | None:
        """A record of a symbol that no session reads: why none does, or None if one does from now on."""


class Discovery:
    """What records of one batch open, so that their sessions can be opened together."""

    def __init__(
        self, sessions: Discoverer, payloads: PayloadDecoder, tracker: OffsetTracker, check: Check
    ) -> None:
        self._sessions, self._payloads, self._tracker, self._check = sessions, payloads, tracker, check
        self._why: dict[Place, Unopened | MalformedRecord] = {}
        self._new = set[str]()
        self._refused: Set[str] = frozenset()
        """Symbols whose sessions the engine has refused."""

    @property
    def unmatched(self) -> Collection[str]:
        """See `Discoverer`."""
        return self._sessions.unmatched

    def look(
        self, messages: Sequence[Incoming], routes: Callable[[], Mapping[str, SymbolRoute]], names: Names
    ) -> set[str]:
        """Sessions that records of these messages open. ``routes()``: of the symbols that are read."""
        self._why.clear()
        self._new.clear()
        for message in messages:
            stream = message.topic, message.partition
            if message.fault is not None or not message.payload or not self._tracker.is_ours(stream):
                continue
            if self._tracker.is_stored(stream, message.offset):
                continue  # an earlier daemon has opened what was to be opened
            found, _ = self._payloads.parts(message)
            for number, record in enumerate(part.record for part in found):
                if not isinstance(record, AnyRecord):
                    continue
                renamed = names.renamed(record)
                if renamed is not None and renamed.key not in routes():
                    self._consider(renamed, message, (stream, message.offset, number))
        known = routes()
        return {name for symbol in self._new for name in known[symbol].sessions}

    def _consider(self, record: AnyRecord, message: Incoming, place: Place) -> None:
        try:
            self._check(record, message)
            why: Unopened | MalformedRecord | None = self._sessions.discover(record)
        except MalformedRecord as error:
            why = error
        if why is None:
            self._new.add(record.key)
        else:
            self._why[place] = why

    def note_opened(self, routes: Mapping[str, SymbolRoute]) -> None:
        """They were opened, but for those whose symbols have no route any more."""
        self._refused = self._new - routes.keys()

    def why(self, symbol: str, place: Place) -> Unopened:
        """Why a record of the batch goes nowhere. Raises MalformedRecord."""
        found = self._why.get(place, Unopened.UNMATCHED)
        if isinstance(found, MalformedRecord):
            raise found
        return Unopened.REFUSED if symbol in self._refused else found
