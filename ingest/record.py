"""One market data record as it crosses the ring: 120 bytes, integers only.

Times are ns. Prices are integers of 10^-(9 + `price_finer`), the same for all records of a symbol; sizes and
volumes are of 10^-(9 + `size_finer`), which is each record's own. So 18 digits of any number from 1e-18 to
9.2e18 cross exactly. What `a` to `e` and `x` hold depends on `kind`:

| kind  | a    | b    | c        | d        | e      | x                             |
|-------|------|------|----------|----------|--------|-------------------------------|
| TRADE | price| size |          |          |        | side: 0 unknown, 1 buy, 2 sell|
| QUOTE | bid  | ask  | bid size | ask size |        |                               |
| BAR   | open | high | low      | close    | volume | interval in ns                |
| HEARTBEAT | |    |          |          |        |                               |
| REFUSAL | |      |          |          |        |                               |
| TEXT  |      |      |          | words    |        |                               |
| STATUS|      |      |          | words    |        | HALT, RESUME, AUCTION ...     |
| ACTION| factor or amount in 1e-9 | effective, ns | | words |  | SPLIT, DIVIDEND ...  |
| BOOK  | bid  | ask  | bid size | ask size | imbalance in 1e-9 | sides: BIDS, ASKS  |
| WORDS |      |      |          |          |        |                               |

A REFUSAL stands for a record of its symbol that could not be used; its `ts_event` is 0 if it is not known.
Words are the number of a text (`ingest.words`), whose bytes came right before in WORDS; 0: none.
"""

import struct
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

TRADE, QUOTE, BAR, HEARTBEAT, REFUSAL = 1, 2, 3, 4, 5
TEXT, STATUS, ACTION, BOOK = 6, 7, 8, 9
"""Events: they are in no bar."""
WORDS = 10
HALT, RESUME, AUCTION, CLOSE, OPEN = 1, 2, 3, 4, 5
SPLIT, DIVIDEND, SYMBOL_CHANGE = 1, 2, 3
BIDS, ASKS = 1, 2
SIDE_UNKNOWN, SIDE_BUY, SIDE_SELL = 0, 1, 2
FLAG_SKEWED = 1  # received before its exchange time by this machine's clock
FLAG_GAP = 2  # by the feed's numbering, records right before this one are missing
FLAG_MORE = 4  # its message has more records
FLAG_REPLAY = 8  # sent again from a recording

RECORD = np.dtype(
    [
        ("seq", "u8"),  # the source's sequence number, 0 if none
        ("ts_event", "u8"),  # exchange time; for a bar, its opening
        ("ts_recv", "u8"),  # wall clock on receipt by this process
        ("ts_ring", "u8"),  # monotonic clock at ring entry, written by the ring
        ("kind", "u1"),
        ("flags", "u1"),
        ("price_finer", "i1"),  # decimals of its prices beyond nine, -9 to 9
        ("size_finer", "i1"),  # the same of its sizes
        ("symbol", "u4"),  # its number, agreed on by both ends of the ring
        ("a", "i8"),
        ("b", "i8"),
        ("c", "i8"),
        ("d", "i8"),
        ("e", "i8"),
        ("x", "i8"),
        ("ts_source", "u8"),  # wall clock when the broker or socket had it
        # where it was read from
        ("stream", "u8"),  # see `stream_number`; 0: unknown
        ("offset", "i8"),  # of its message in the stream
        ("part", "u4"),  # number of the record in its message
        ("token", "u4"),  # identifies it among its symbol's: see `feeds.record_identity`; 0: nothing does
    ]
)
WORDS = RECORD.itemsize // 8
TS_RING_WORD = 3
_LAYOUT = struct.Struct("<4Q2B2bI6q2Qq2I")

Records = npt.NDArray[np.void]


class ReadRange(NamedTuple):
    """Records of one stream, by its number in the ring: first to last offset."""

    stream: int
    first: int
    last: int


LowWatermarks = tuple[tuple[int, int], ...]
"""Offsets by the stream's number."""


def stream_number(source: str, topic: str, partition: int) -> int:
    """The number of a stream in the ring, the same in every process and at every start: 64 bits of a hash."""
    name = f"{source}\0{topic}\0{partition}".encode()
    return int.from_bytes(blake2b(name, digest_size=8).digest(), "little") or 1


class RecordWriter:
    """Packs records into a reused buffer, one to two microseconds each.

    The views from `records` are valid until `clear`; the ring copies what it accepts.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._bytes = bytearray(capacity * RECORD.itemsize)
        self._array = np.frombuffer(self._bytes, RECORD)
        self._used = 0

    def __len__(self) -> int:
        return self._used

    @property
    def records(self) -> Records:
        """The records packed so far, RECORD [len]."""
        return self._array[: self._used]

    def clear(self) -> None:
        """Forget the records packed so far."""
        self._used = 0

    def end_message(self) -> None:
        """The newest record is the last one of its message."""
        if self._used:
            self._array[self._used - 1]["flags"] &= ~np.uint8(FLAG_MORE)

    def extend(self, count: int) -> Records:
        """Add ``count`` records of zeros and return them, RECORD [count], to be filled in.

        Raises IndexError when the buffer has less room.
        """
        if self._used + count > self.capacity:
            raise IndexError(f"the record buffer holds {self.capacity} records")
        added = slice(self._used, self._used + count)
        self._array.view(np.uint64)[WORDS * added.start : WORDS * added.stop] = 0
        self._used += count
        return self._array[added]

    def add(
        self,
        kind: int,
        symbol: int,
        ts_event: int,
        ts_recv: int,
        values: tuple[int, int, int, int, int],
        *,
        x: int = 0,
        seq: int = 0,
        gap: bool = False,
        ts_source: int = 0,
        replay: bool = False,
        stream: int = 0,
        offset: int = -1,
        part: int = 0,
        more: bool = False,
        token: int = 0,
        price_finer: int = 0,
        size_finer: int = 0,
    ) -> None:
        """Pack one record; `values` are `a` to `e`. Sets the skewed flag itself.

        Raises IndexError when the buffer is full and struct.error for a value outside its field.
        """
        if self._used == self.capacity:
            raise IndexError(f"the record buffer holds {self.capacity} records")
        flags = (FLAG_SKEWED if ts_recv < ts_event else 0) | (FLAG_GAP if gap else 0)
        flags |= (FLAG_REPLAY if replay else 0) | (FLAG_MORE if more else 0)
        at = self._used * RECORD.itemsize
        _LAYOUT.pack_into(
            self._bytes, at, seq, ts_event, ts_recv, 0, kind, flags, price_finer, size_finer, symbol, *values,
            x, ts_source, stream, offset, part, token,
        )  # fmt: skip
        self._used += 1
