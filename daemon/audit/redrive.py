"""The DLQ topic: what is in it, and sending originals again, each once.

Who sends records again first writes a claim into the DLQ topic, reads that, and goes on only
where its claim of a record is the first. After the sending it writes that it is sent. So of two people who
redrive at the same time one sends a record, and a redrive that broke off can be recognised: its records
may or may not have arrived. A record that was read again after a restart has several records; what is
noted of the first one holds for all.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from feeds.codec import MalformedRecord, decode_message, encode, header_encoding, make_headers
from feeds.kafka_range import KafkaRange, OffsetsGone, Span
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
        async for batch in reader.read(where, Span(dead_letter.offset, dead_letter.offset + 1)):
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
    reader: KafkaRange,
    sink: Sink,
    topic: str,
    dead_letters: Sequence[DeadLetterEntry],
    *,
    origin: Callable[[DeadLetter], Cluster | str] | None = None,
    now_ns: Callable[[], int],
    to: str = "",
    again: bool = False,
    dry_run: bool = False,
) -> list[RedriveOutcome]:
    """Send the originals of ``dead_letters`` back to their topics, or to ``to``, each once.

    ``topic`` is the DLQ topic, of ``reader`` and ``sink``, which gets the claims. ``origin``: the
    cluster of a record's original, or why it is not known; without it the same. ``dry_run`` sends nothing.
    Raises BrokerError and SinkStopped; what was not reported then is claimed, but may not be sent.
    """
    claim, outcomes = uuid.uuid4().hex, []
    wanted: list[tuple[DeadLetterEntry, bytes, Sink]] = []
    taken: set[Place] = set()
    for each in dead_letters:
        payload, why = b"", obstacle(each, again)
        where = Cluster(reader, sink) if origin is None else origin(each.dead_letter)
        if each.first in taken:
            why = f"the record at {each.first} has the same original"
        taken.add(each.first)
        if isinstance(where, str):
            outcomes.append(RedriveOutcome(each.place, to or each.dead_letter.topic, False, why or where))
            continue
        if not why:
            payload, why = await original(where.reader, each.dead_letter)
        if why or dry_run:
            outcomes.append(RedriveOutcome(each.place, to or each.dead_letter.topic, False, why))
        else:
            wanted.append((each, payload, where.sink))
    if not wanted:
        return outcomes

    async def note(dead_letter: DeadLetterEntry, state: Literal["claimed", "sent"]) -> None:
        said = Redriven(
            partition=dead_letter.first.partition,
            offset=dead_letter.first.offset,
            to=to or dead_letter.dead_letter.topic,
            claim=claim,
            state=state,
            at=now_ns(),
        )
        # one key, so one partition, so one order of a record's claims
        await sink.publish(
            topic,
            f"redriven:{dead_letter.first}".encode(),
            encode(said),
            make_headers(said, "json", "foretick", 0),
        )

    for each, _, _ in wanted:
        await note(each, "claimed")
    claims = (await contents(reader, topic)).claims
    for each, payload, home in wanted:
        target = to or each.dead_letter.topic
        if not again and claims.get(each.first) != claim:
            outcomes.append(RedriveOutcome(each.place, target, False, "somebody else is sending it"))
            continue
        headers = {
            **each.dead_letter.headers,
            REDRIVEN: f"{topic}/{each.place.partition}@{each.place.offset}".encode(),
        }
        try:
            await home.publish(target, each.dead_letter.key, payload, headers)
        except PublishRefused as error:
            outcomes.append(RedriveOutcome(each.place, target, False, str(error)))
            continue
        await note(each, "sent")
        outcomes.append(RedriveOutcome(each.place, target, True))
    return outcomes
