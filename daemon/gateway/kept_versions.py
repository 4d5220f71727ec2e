"""The newest data versions of a session, with their prices and answers, for clients that come later.

They are kept in memory, packed: about 35 bytes an answer. A change of a version has a number, its revision,
so that a client asks for what has changed since it asked last: new versions, answers that came late, labels.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
from msgspec.structs import astuple, replace

from daemon.api.messages import PastAnswer, PastVersion
from feeds.market_data import Answer
from ingest.lines import decimal

_Flat = tuple[str, str, float, float | None, tuple[str, ...] | None, tuple[str, ...], str | None]
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[int, int, str | None, tuple[_Flat, ...]]).decode
_ENTRY_BYTES = 250
"""Of a version beside what is packed: its place in the table, its number and revision."""


class KeptVersions:
    """At most ``most`` versions, in rising order of their numbers.

    ``revision``: of the newest change; it begins with the time, so that no earlier daemon's is as large.
    """

    def __init__(self, most: int) -> None:
        self._most, self._decimals, self._scale = most, 2, 9
        self._versions: dict[int, tuple[int, bytes]] = {}
        """By number: revision, and what is packed."""
        self._newest = 0
        self._packed_bytes = 0
        self._as_of = self._known_until = -1
        """Event times: of the newest version there was, and up to which there may be the same ones again."""
        self.revision = time.time_ns() // 1_000_000

    @property
    def span(self) -> tuple[int, int]:
        """The oldest and the newest version that are kept; 0 and 0 where none is."""
        return (next(iter(self._versions)), self._newest) if self._versions else (0, 0)

    @property
    def size_bytes(self) -> int:
        """About what they take."""
        return self._packed_bytes + _ENTRY_BYTES * len(self._versions)

    def priced(self, decimals: int, scale: int) -> None:
        """Closes are units of 10^-``scale``, written with ``decimals`` decimals."""
        self._decimals, self._scale = decimals, scale

    def packed(self) -> list[bytes]:
        """All of them, for `restore`."""
        return [packed for _, packed in self._versions.values()]

    def restore(self, packed: Sequence[bytes]) -> None:
        """Begin with what an earlier daemon kept. Raises ValueError, with nothing changed."""
        found = sorted(map(_unpack, packed), key=lambda each: each.data_version)
        for each in found[-self._most :] if self._most else ():
            self._newest, self._as_of = each.data_version, max(self._as_of, each.as_of)
            self._put(each)

    def again(self) -> None:
        """The session is read again, from somewhere before its newest version."""
        self._known_until = self._as_of

    def committed(self, version: int, as_of: int, close: int | None, *, history: bool = False) -> None:
        """There is a version. ``close`` and ``history``: as in `daemon.protocol.Committed`.

        An engine that starts again may begin with a lower number: those from there on are made again.
        What is read again and was answered before is kept, under the number that it had.
        """
        if as_of > self._known_until:
            self._known_until = -1
        elif history:
            return
        else:
            self._forget(as_of)
        self._as_of = max(self._as_of, as_of)
        if not self._most:
            return
        for number in [n for n in self._versions if n >= version] if version <= self._newest else ():
            self._drop(number)
        text = None if close is None else decimal(close, self._decimals, self._scale)
        self._newest = version
        self._put(PastVersion(version, as_of, text))
        while len(self._versions) > self._most:
            self._drop(next(iter(self._versions)))

    def answered(self, answer: Answer) -> None:
        """A standing question has an answer; of a version that is not kept it is left out."""
        made = PastAnswer(
            question=answer.question,
            text=answer.text,
            logit_gap=answer.logit_gap,
            probability=answer.probability,
            choice_set=answer.choice_set,
            flags=answer.flags,
        )
        self._change(answer.data_version, partial(_with, made))

    def labelled(self, question: str, version: int, choice: str) -> None:
        """The right choice of an answer is known; ``question``: its name."""
        self._change(version, partial(_labelled, question, choice))

    def since(self, revision: int) -> tuple[PastVersion, ...]:
        """The versions with a change behind this revision, the oldest first; all where it is not ours."""
        after = revision if revision <= self.revision else 0
        return tuple(_unpack(packed) for number, packed in self._versions.values() if number > after)

    def _forget(self, as_of: int) -> None:
        """Versions from this event time on are made again, perhaps under other numbers."""
        known = ((number, _unpack(packed)) for number, (_, packed) in self._versions.items())
        for number in [number for number, each in known if each.as_of >= as_of]:
            self._drop(number)

    def _change(self, version: int, change: Callable[[PastVersion], PastVersion]) -> None:
        if version in self._versions:
            self._put(change(_unpack(self._versions[version][1])))

    def _put(self, version: PastVersion) -> None:
        packed, number = _pack(version), version.data_version
        self.revision += 1
        self._packed_bytes += len(packed) - len(self._versions.get(number, (0, b""))[1])
        self._versions[number] = self.revision, packed

    def _drop(self, number: int) -> None:
        self._packed_bytes -= len(self._versions.pop(number)[1])


def _pack(version: PastVersion) -> bytes:
    """Without the names of members, which are longer than what they name."""
    answers = tuple(map(astuple, version.answers))
    return _encode((version.data_version, version.as_of, version.close, answers))


def _unpack(packed: bytes) -> PastVersion:
    number, as_of, close, answers = _decode(packed)
    return PastVersion(number, as_of, close, tuple(PastAnswer(*each) for each in answers))


def _with(answer: PastAnswer, version: PastVersion) -> PastVersion:
    others = (each for each in version.answers if each.question != answer.question)
    return replace(version, answers=(*others, answer))


def _labelled(question: str, choice: str, version: PastVersion) -> PastVersion:
    answers = (replace(each, label=choice) if each.question == question else each for each in version.answers)
    return replace(version, answers=tuple(answers))
