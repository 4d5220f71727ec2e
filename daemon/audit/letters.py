"""The dead letter topic: what is in it, and sending originals again, each once.

Who sends letters again first writes a claim into the dead letter topic, reads that, and goes on only
where its claim of a letter is the first. After the sending it writes that it is sent. So of two people who
redrive at the same time one sends a letter, and a redrive that broke off is told apart: its letters
may or may not have arrived. A record that was read again after a restart has several letters; what is
noted of the first one holds for all.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from feeds.codec import MalformedRecord, decode_message, encode, header_encoding, make_headers
from feeds.kafka_range import KafkaRange, OffsetsGone, Span
from feeds.messages import DeadLetter, Redriven
from feeds.source import Incoming, PublishRefused, Sink

REDRIVEN = "redriven"
"""Header of a record that was a dead letter: `TOPIC/PARTITION@OFFSET` of the letter."""
State = Literal["new", "claimed", "sent"]


class Place(NamedTuple):
    """Where a letter is in the dead letter topic; written PARTITION:OFFSET."""

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
class Letter:
    """A letter and its place. ``state``: whether it was sent again."""

    place: Place
    letter: DeadLetter
    state: State = "new"
    failed_at: int = 0
    """Its own time, or Kafka's of a letter without one; ns."""
    repeats: Place | None = None
    """The first letter of the same original, where this is another."""

    @property
    def first(self) -> Place:
        """Where notes on its original are."""
        return self.repeats or self.place


@dataclass(frozen=True)
class Filter:
    """Which letters; what is empty or 0 does not matter. Times in ns: from ``after`` to before ``before``."""

    reasons: Sequence[str] = ()
    stages: Sequence[str] = ()
    topics: Sequence[str] = ()
    after: int = 0
    before: int = 0

    def __call__(self, letter: Letter) -> bool:
        """Whether it is one of them."""
        it, at = letter.letter, letter.failed_at
        return (
            (not self.reasons or it.reason in self.reasons)
            and (not self.stages or it.stage in self.stages)
            and (not self.topics or it.topic in self.topics)
            and at >= self.after
            and (not self.before or at < self.before)
        )


@dataclass
class Contents:
    """A dead letter topic as it is. ``unreadable``: messages in it that are no letters."""

    letters: dict[Place, Letter] = field(default_factory=dict)
    claims: dict[Place, str] = field(default_factory=dict)
    """The first claim of each original, by its first letter."""
    unreadable: int = 0


async def contents(reader: KafkaRange, topic: str) -> Contents:
    """Read all of ``topic``. Raises BrokerError."""
    found = Contents()
    notes: list[Redriven] = []
    for (name, partition), span in (await reader.spans([topic])).items():
        async for batch in reader.read((name, partition), span):
            for message in batch:
                _take(found, notes, message)
    firsts = _firsts(found.letters)
    states: dict[Place, State] = {}
    for note in notes:
        place = Place(note.partition, note.offset)
        place = firsts.get(place, place)
        found.claims.setdefault(place, note.claim)
        if note.state == "sent":
            states[place] = "sent"
        else:
            states.setdefault(place, "claimed")
    for place, letter in found.letters.items():
        first = firsts[place]
        repeats = None if first == place else first
        found.letters[place] = replace(letter, state=states.get(first, "new"), repeats=repeats)
    return found


def _firsts(letters: Mapping[Place, Letter]) -> dict[Place, Place]:
    """By each letter's place, that of the first one of the same original; an answer is one by itself."""
    known: dict[tuple[str, str, int, int, bytes, int], Place] = {}
    found = {}
    for place, each in sorted(letters.items()):
        it = each.letter
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
        found.letters[place] = Letter(place, read, failed_at=read.failed_at or message.ts_source_ns)
    elif isinstance(read, Redriven):
        notes.append(read)
    else:
        found.unreadable += 1


class Outcome(NamedTuple):
    """What became of one letter: sent to ``to``, or why not."""

    place: Place
    to: str
    sent: bool
    why: str = ""


def obstacle(letter: Letter, again: bool) -> str:
    """Why a letter must not be sent; "" if it may. ``again``: although it was sent, or may have been."""
    if letter.letter.reason == "corrupt" and not letter.letter.payload:
        return "what was received could not be read, so there is nothing to send"
    if letter.state == "sent" and not again:
        return "it was sent again before (--again sends it once more)"
    if letter.state == "claimed" and not again:
        return "an earlier redrive broke off, so it may have been sent (--again sends it once more)"
    return ""


async def original(reader: KafkaRange, letter: DeadLetter) -> tuple[bytes, str]:
    """The whole payload, or b"" and why there is none: a cut one is read again from its topic."""
    if letter.whole:
        return letter.payload, ""
    short = f"the letter keeps {len(letter.payload)} of {letter.size} bytes"
    if letter.partition < 0:
        return b"", f"{short}, and it is in no other topic"
    try:
        where = (letter.topic, letter.partition)
        async for batch in reader.read(where, Span(letter.offset, letter.offset + 1)):
            if batch[0].payload.startswith(letter.payload) and len(batch[0].payload) == letter.size:
                return batch[0].payload, ""
    except OffsetsGone as error:
        return b"", f"{short}, and {error}"
    return b"", f"{short}, and {letter.topic} has something else at its offset"


class Cluster(NamedTuple):
    """Where originals are read again and sent to."""

    reader: KafkaRange
    sink: Sink


async def redrive(
    reader: KafkaRange,
    sink: Sink,
    topic: str,
    letters: Sequence[Letter],
    *,
    origin: Callable[[DeadLetter], Cluster | str] | None = None,
    now_ns: Callable[[], int],
    to: str = "",
    again: bool = False,
    dry_run: bool = False,
) -> list[Outcome]:
    """Send the originals of ``letters`` back to their topics, or to ``to``, each once.

    ``topic`` is the dead letter topic, of ``reader`` and ``sink``, which gets the claims. ``origin``: the
    cluster of a letter's original, or why it is not known; without it the same. ``dry_run`` sends nothing.
    Raises BrokerError and SinkStopped; what was not reported then is claimed, but may not be sent.
    """
    claim, outcomes = uuid.uuid4().hex, []
    wanted: list[tuple[Letter, bytes, Sink]] = []
    taken: set[Place] = set()
    for each in letters:
        payload, why = b"", obstacle(each, again)
        where = Cluster(reader, sink) if origin is None else origin(each.letter)
        if each.first in taken:
            why = f"the letter at {each.first} has the same original"
        taken.add(each.first)
        if isinstance(where, str):
            outcomes.append(Outcome(each.place, to or each.letter.topic, False, why or where))
            continue
        if not why:
            payload, why = await original(where.reader, each.letter)
        if why or dry_run:
            outcomes.append(Outcome(each.place, to or each.letter.topic, False, why))
        else:
            wanted.append((each, payload, where.sink))
    if not wanted:
        return outcomes

    async def note(letter: Letter, state: Literal["claimed", "sent"]) -> None:
        said = Redriven(
            partition=letter.first.partition,
            offset=letter.first.offset,
            to=to or letter.letter.topic,
            claim=claim,
            state=state,
            at=now_ns(),
        )
        # one key, so one partition, so one order of a letter's claims
        await sink.publish(
            topic,
            f"redriven:{letter.first}".encode(),
            encode(said),
            make_headers(said, "json", "foretick", 0),
        )

    for each, _, _ in wanted:
        await note(each, "claimed")
    claims = (await contents(reader, topic)).claims
    for each, payload, home in wanted:
        target = to or each.letter.topic
        if not again and claims.get(each.first) != claim:
            outcomes.append(Outcome(each.place, target, False, "somebody else is sending it"))
            continue
        headers = {
            **each.letter.headers,
            REDRIVEN: f"{topic}/{each.place.partition}@{each.place.offset}".encode(),
        }
        try:
            await home.publish(target, each.letter.key, payload, headers)
        except PublishRefused as error:
            outcomes.append(Outcome(each.place, target, False, str(error)))
            continue
        await note(each, "sent")
        outcomes.append(Outcome(each.place, target, True))
    return outcomes
