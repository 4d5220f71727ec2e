"""Words of records: their bytes cross the ring right before the record that has them, 48 in a WORDS record.

A text has a number, a hash of its bytes, so it is the same in every process. It is on one line: whatever is
no printable character is a blank, and blanks in a row are one. What is longer than `MAX_BYTES` is cut. Its
WORDS records have the number as `seq`, and count from 0 by `part`.
"""

import struct
from collections.abc import Collection, Iterable, Mapping
from hashlib import blake2b

from ingest.record import WORDS, Records

MAX_BYTES = 480
"""Most of one text, in UTF-8."""
LOST = "(lost)"
"""In place of a text whose bytes were overwritten in the ring."""
_CHUNK = struct.Struct("<6q")
_KEPT = 256
"""Texts above which those that no row has are forgotten."""

Chunk = tuple[int, int, int, int, int, int]
"""48 bytes as `a` to `e` and `x` of a record."""


def on_one_line(text: str) -> str:
    """``text`` as a line may have it."""
    plain = " ".join("".join(each if each.isprintable() else " " for each in text).split())
    return plain.encode("utf-8", "replace")[:MAX_BYTES].decode("utf-8", "ignore").rstrip()


def number_of(text: str) -> int:
    """Its number, 1 to 2^63 - 1; 0 of an empty text."""
    if not text:
        return 0
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1 or 1


def chunks_of(text: str) -> list[Chunk]:
    """The bytes of a text `on_one_line`."""
    data = text.encode()
    pieces = (data[at : at + _CHUNK.size] for at in range(0, len(data), _CHUNK.size))
    return [_CHUNK.unpack(piece.ljust(_CHUNK.size, b"\0")) for piece in pieces]


class Texts:
    """The texts of rows that are not encoded yet, by number. Not thread-safe."""

    def __init__(self) -> None:
        self._whole: dict[int, str] = {}
        """Those that came last are at the end."""
        self._begun: dict[int, bytes] = {}

    def take(self, records: Records) -> None:
        """Take the texts out of RECORD [n], in the order of the ring."""
        of_texts = records["kind"] == WORDS
        if not of_texts.any():
            return
        for record in records[of_texts]:
            number = int(record["seq"])
            if (known := self._whole.pop(number, None)) is not None:
                self._whole[number] = known
                continue
            before = self._begun.pop(number, b"") if record["part"] else b""
            data = before + _CHUNK.pack(*(int(record[name]) for name in "abcdex"))
            text = data.rstrip(b"\0").decode("utf-8", "ignore")
            if number_of(text) == number:
                self._whole[number] = text
            else:
                self._begun = {number: data}  # no two texts are mixed in the ring

    def find(self, number: int) -> str:
        """The text of this number; empty for 0."""
        return self._whole.get(number, LOST) if number else ""

    @property
    def many(self) -> bool:
        """Those that no row has are to be forgotten."""
        return len(self._whole) > _KEPT

    def forget(self, used: Collection[int]) -> None:
        """Forget the oldest ones that are not ``used``."""
        gone = [number for number in self._whole if number not in used][: len(self._whole) - _KEPT // 2]
        for number in gone:
            del self._whole[number]

    def cut(self, numbers: Iterable[int]) -> dict[int, str]:
        """The texts with these numbers."""
        return {number: self._whole[number] for number in numbers if number in self._whole}

    def restore(self, texts: Mapping[int, str]) -> None:
        """These are known, too."""
        self._whole |= texts
