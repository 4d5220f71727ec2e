"""Payloads of records to columns of integers, many at a time."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from feeds.columns.decode_kernel import JSON, MSGPACK, decode, fill_table, tokens_of_numbers, tokens_of_texts
from feeds.columns.json_scanner import scan_json
from feeds.columns.msgpack_scanner import scan_msgpack
from feeds.columns.places import Places
from feeds.columns.protobuf_scanner import COLUMNS as PLAN_COLUMNS
from feeds.columns.protobuf_scanner import ProtobufPlan
from feeds.columns.text_kernel import warm_up as warm_up_texts

COLUMNS = np.dtype(
    [
        ("taken", "u1"),  # 0: not decoded here, and nothing else in the row counts
        ("kind", "u1"),  # TRADE, QUOTE or BAR
        ("received", "u1"),  # 1: ts_event is by the receiver's clock, not the exchange's
        ("key", "i4"),  # index among the decoder's keys, -1 for another
        ("ts_event", "i8"),
        ("ts_recv", "i8"),
        ("token", "u4"),  # see `feeds.record_identity`; of its id
        ("seq", "u8"),
        ("a", "i8"),  # price, bid or open
        ("b", "i8"),  # size, ask or high
        ("c", "i8"),  # bid size or low
        ("d", "i8"),  # ask size or close
        ("e", "i8"),  # volume
        ("x", "i8"),  # side: 0 unknown, 1 buy, 2 sell; of a bar, its interval in ns
    ],
    align=True,
)
"""A record; prices and sizes in units of 1e-9, times in ns."""

Columns = npt.NDArray[np.void]

ENCODINGS = {"json": JSON, "msgpack": MSGPACK}
OTHER = 255
"""An encoding that no row is taken in."""


class ColumnDecoder:
    """Decodes plain records in compiled code, and leaves all others to `feeds.codec.decode_record`.

    A row that is taken holds what `decode_record` would return; one it would refuse is never taken.
    ``keys``: the symbols, VENUE:SYMBOL, that the column ``key`` counts.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        encoded = [key.encode() for key in keys]
        self._names = np.frombuffer(b"".join(encoded) or b"\0", np.uint8)
        self._name_ends = _ends(encoded)
        self._table = np.full(1 << (2 * len(keys) + 1).bit_length(), -1, np.int32)
        fill_table(self._names, self._name_ends, self._table)

    def decode(self, payloads: Sequence[bytes], encodings: npt.NDArray[np.uint8] | None = None) -> Columns:
        """COLUMNS [n]; ``encodings`` uint8 [n] are values of `ENCODINGS`, all JSON by default."""
        out = np.empty(len(payloads), COLUMNS)
        if encodings is None:
            encodings = np.zeros(len(payloads), np.uint8)
        data = np.frombuffer(b"".join(payloads) or b"\0", np.uint8)
        decode(data, _ends(payloads), encodings, self._names, self._name_ends, self._table, out)
        return out


def warm_up() -> None:
    """Compile the kernels, or load them from the cache."""
    ColumnDecoder(["V:S"]).decode([b"{}"])
    tokens = np.zeros(1, np.uint32)
    tokens_of_texts(np.zeros(1, np.uint8), np.zeros(1, np.int64), np.zeros(1, np.int64), tokens)
    tokens_of_numbers(np.zeros(1, np.int64), tokens)
    warm_up_texts()
    places, ends = Places.compile([""]), np.ones(1, np.int64)
    if places is not None:
        scan_json(b"{", ends, places)
        scan_msgpack(b"{", ends, places)
    plan = ProtobufPlan(1, np.zeros((1, 2), np.int64), np.zeros((0, PLAN_COLUMNS), np.int64), {})
    plan.scan(b"{", ends, b"")


def _ends(pieces: Sequence[bytes]) -> npt.NDArray[np.int64]:
    return np.cumsum(np.fromiter(map(len, pieces), np.int64, len(pieces)))
