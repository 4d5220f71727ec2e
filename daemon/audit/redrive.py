"""The DLQ topic: what is in it, and sending originals again, each once.

Who sends records again first writes a claim into the DLQ topic, reads that, and goes on only
where its claim of a record is the first. After the sending it writes that it is sent. So of two people who
redrive at the same time one sends a record, and a redrive that broke off can be recognised: its records
may or may not have arrived. A record that was read again after a restart has several records; what is
noted of the first one holds for all.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from feeds.codec import MalformedRecord, decode_message, encode, header_encoding, make_headers
from feeds.kafka_range import KafkaRange, OffsetsGone
from feeds.market_data import DeadLetter, Redriven
from feeds.source import Incoming, PublishRefused, Sink

REDRIVEN = "redriven"
"""Header of a record that was a DLQ record: `TOPIC/PARTITION@OFFSET` of the record."""
State = Literal["new", "claimed", "sent"]


class Place(NamedTuple):
    """Where a record is in the DLQ topic; written PARTITION:OFFSET."""

    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.partition}:{self.offset}"

    @classmethod
    def parse(cls, text: str) -> Place:
        """Raises ValueError."""
        partition, colon, offset = text.partition(":")
        if not (colon and partition.isdecimal() and offset.isdecimal()):
            raise ValueError(f"{text!r} is not PARTITION:OFFSET, such as 0:17")
        return cls(int(partition), int(offset))


@dataclass(frozen=True)
class DeadLetterEntry:
    """A record and its place. ``state``: whether it was sent again."""

    place: Place
    dead_letter: DeadLetter
    state: State = "new"
    failed_at: int = 0
    """Its own time, or Kafka's of a record without one; ns."""
    repeats: Place | None = None
    """The first record of the same original, where this is another."""

    @property
    def first(self) -> Place:
        """Where notes on its original are."""
        return self.repeats or self.place


@dataclass(frozen=True)
class RecordFilter:
    """Which records; what is empty or 0 does not matter. Times in ns: from ``after`` to before ``before``."""

    reasons: Sequence[str] = ()
    stages: Sequence[str] = ()
    topics: Sequence[str] = ()
    after: int = 0
    before: int = 0

    def __call__(self, dead_letter: DeadLetterEntry) -> bool:
        """Whether it is one of them."""
        it, at = dead_letter.dead_letter, dead_letter.failed_at
        return (
            (not self.reasons or it.reason in self.reasons)
            and (not self.stages or it.stage in self.stages)
            and (not self.topics or it.topic in self.topics)
            and at >= self.after
            and (not self.before or at < self.before)
        )


@dataclass
class Contents:
    """A DLQ topic as it is. ``unreadable``: messages in it that are no records."""

    dead_letters: dict[Place, DeadLetterEntry] = field(default_factory=dict)
    claims: dict[Place, str] = field(default_factory=dict)
    """The first claim of each original, by its first record."""
    unreadable: int = 0


async def contents(reader: KafkaRange, topic: str) -> Contents:
    """Read all of ``topic``. Raises BrokerError."""
    found = Contents()
    notes: list[Redriven] = []
    for (name, partition), span in (await reader.spans([topic])).items():
        async for batch in reader.read((name, partition), span):
            for message in batch:
                _take(found, notes, message)
    firsts = _firsts(found.dead_letters)
    states: dict[Place, State] = {}
    for note in notes:
        place = Place(note.partition, note.offset)
        place = firsts.get(place, place)
        found.claims.setdefault(place, note.claim)
        if note.state == "sent":
            states[place] = "sent"
        else:
            states.setdefault(place, "claimed")
    for place, dead_letter in found.dead_letters.items():
        first = firsts[place]
        repeats = None if first == place else first
        found.dead_letters[place] = replace(dead_letter, state=states.get(first, "new"), repeats=repeats)
    return found


def _firsts(dead_letters: Mapping[Place, DeadLetterEntry]) -> dict[Place, Place]:
    """By each record's place, that of the first one of the same original; an answer is one by itself."""
    known: dict[tuple[str, str, int, int, bytes, int], Place] = {}
    found = {}
    for place, each in sorted(dead_letters.items()):
        it = each.dead_letter
        original = it.source, it.topic, it.partition, it.offset, it.payload, it.size
        found[place] = place if it.offset < 0 else known.setdefault(original, place)
    return found


def _take(found: Contents, notes: list[Redriven], message: Incoming) -> None:
    try:
        read = decode_message(message.payload, header_encoding(message.headers))
    except MalformedRecord:
        found.unreadable += 1
        return
    if isinstance(read, DeadLetter):
        place = Place(message.partition, message.offset)
        found.dead_letters[place] = DeadLetterEntry(
            place, read, failed_at=read.failed_at or message.ts_source_ns
        )
    elif isinstance(read, Redriven):
        notes.append(read)
    else:
        found.unreadable += 1


class RedriveOutcome(NamedTuple):
    """What became of one record: sent to ``to``, or why not."""

    place: Place
    to: str
    sent: bool
    why: str = ""


def obstacle(dead_letter: DeadLetterEntry, again: bool) -> str:
    """Why a record must not be sent; "" if it may. ``again``: although it was sent, or may have been."""
    if dead_letter.dead_letter.reason == "corrupt" and not dead_letter.dead_letter.payload:
        return "what was received could not be read, so there is nothing to send"
    if dead_letter.state == "sent" and not again:
        return "it was sent again before (--again sends it once more)"
    if dead_letter.state == "claimed" and not again:
        return "an earlier redrive broke off, so it may have been sent (--again sends it once more)"
    return ""


async def original(reader: KafkaRange, dead_letter: DeadLetter) -> tuple[bytes, str]:
    """The whole payload, or b"" and why there is none: a cut one is read again from its topic."""
    if dead_letter.whole:
        return dead_letter.payload, ""
    short = f"the record keeps {len(dead_letter.payload)} of {dead_letter.size} bytes"
    if dead_letter.partition < 0:
        return b"", f"{short}, and it is in no other topic"
    try:
        where = (dead_letter.topic, dead_letter.partition)
        async for batch in reader.read(where, range(dead_letter.offset, dead_letter.offset + 1)):
            if batch[0].payload.startswith(dead_letter.payload) and len(batch[0].payload) == dead_letter.size:
                return batch[0].payload, ""
    except OffsetsGone as error:
        return b"", f"{short}, and {error}"
    return b"", f"{short}, and {dead_letter.topic} has something else at its offset"


class Cluster(NamedTuple):
    """Where originals are read again and sent to."""

    reader: KafkaRange
    sink: Sink


async def redrive(
    dlq: Cluster,
    topic: str,
    dead_letters: Sequence[DeadLetterEntry],
    *,
    origin: Callable[[DeadLetterEntry], Cluster | str] | None = None,
    to: str = "",
    again: bool = False,
    dry_run: bool = False,
) -> list[RedriveOutcome]:
    """Send the originals of ``dead_letters`` back to their topics, or to ``to``, each once.

    ``topic`` is the DLQ topic, in ``dlq``, which gets the claims. ``origin``: the cluster of a record's
    original, or why it is not known; without it the same. ``dry_run`` sends nothing. Raises BrokerError and
    SinkStopped; what was not reported then is claimed, but may not be sent.
    """
    outcomes, taken = list[RedriveOutcome](), set[Place]()
    wanted: list[tuple[DeadLetterEntry, bytes, Sink]] = []
    for each in dead_letters:
        home = dlq if origin is None else origin(each)
        why = f"the record at {each.first} has the same original" if each.first in taken else ""
        taken.add(each.first)
        payload, why = b"", why or obstacle(each, again)
        if isinstance(home, str):
            why = why or home
        elif not why:
            payload, why = await original(home.reader, each.dead_letter)
        if isinstance(home, str) or why or dry_run:
            outcomes.append(RedriveOutcome(each.place, to or each.dead_letter.topic, False, why))
        else:
            wanted.append((each, payload, home.sink))
    if not wanted:
        return outcomes
    sender = _Sender(dlq.sink, topic, to)
    for each, _, _ in wanted:
        await sender.note(each, "claimed")
    claims = (await contents(dlq.reader, topic)).claims
    for each, payload, sink in wanted:
        is_ours = again or claims.get(each.first) == sender.claim
        why = await sender.send(each, payload, sink) if is_ours else "somebody else is sending it"
        outcomes.append(RedriveOutcome(each.place, to or each.dead_letter.topic, not why, why))
    return outcomes


@dataclass(frozen=True)
class _Sender:
    """Sends originals, and writes notes of that into the DLQ ``topic`` by the ``dlq`` sink."""

    dlq: Sink
    topic: str
    to: str
    claim: str = field(default_factory=lambda: uuid.uuid4().hex)

    async def note(self, entry: DeadLetterEntry, state: Literal["claimed", "sent"]) -> None:
        partition, offset = entry.first
        note = Redriven(
            partition=partition,
            offset=offset,
            to=self.to or entry.dead_letter.topic,
            claim=self.claim,
            state=state,
            at=time.time_ns(),
        )
        # one key, so one partition, so one order of a record's claims
        key, headers = f"redriven:{entry.first}".encode(), make_headers(note, "json", "foretick", 0)
        await self.dlq.publish(self.topic, key, encode(note), headers)

    async def send(self, entry: DeadLetterEntry, payload: bytes, sink: Sink) -> str:
        """Returns why the sink refuses it, or ""."""
        it, place = entry.dead_letter, entry.place
        headers = it.headers | {REDRIVEN: f"{self.topic}/{place.partition}@{place.offset}".encode()}
        try:
            await sink.publish(self.to or it.topic, it.key, payload, headers)
        except PublishRefused as error:
            return str(error)
        await self.note(entry, "sent")
        return ""
