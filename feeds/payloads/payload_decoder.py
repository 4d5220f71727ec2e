"""The protocol of decoders of messages, and the decoder of our own wire form."""

import logging
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from feeds.array_frames import elements
from feeds.codec import MalformedRecord, check_version, decode_record, header_encoding, is_foreign
from feeds.columns import ENCODINGS, OTHER, ColumnDecoder, Columns
from feeds.decoding import shortened
from feeds.market_data import Received
from feeds.moments import in_order
from feeds.source import Incoming
from feeds.subjects import Subject, subjects_of

log = logging.getLogger(__name__)


class PayloadRecord(NamedTuple):
    """One record of a message, or why there is none. ``payload``: the bytes that it was read from.

    ``subjects``: what an unusable one speaks of.
    """

    payload: bytes
    record: Received | MalformedRecord
    subjects: Sequence[Subject] = ()


class Decoded(NamedTuple):
    """What a message holds, by event time. ``passed_over``: rows that are known to hold no record."""

    parts: Sequence[PayloadRecord]
    passed_over: int = 0


class PayloadDecoder(Protocol):
    """Decodes messages of one source: many at a time where they are plain, and any one by itself.

    Prices may be zero and below: whether they may of a symbol is for its sessions to say. A row of
    ``columns`` that is taken holds what ``parts`` would return; one it would refuse is never taken.
    """

    @property
    def failed(self) -> int:
        """Requests for schemas that failed so far, and are made again."""

    def read_symbols(self, symbols: Sequence[str]) -> None:
        """The symbols, VENUE:SYMBOL, that the column ``key`` counts from now on."""

    async def prepare(self, messages: Sequence[Incoming]) -> None:
        """Get what decoding these needs, such as schemas; waits while they cannot be had."""

    def columns(self, messages: Sequence[Incoming]) -> Columns:
        """COLUMNS [messages]."""

    def parts(self, message: Incoming) -> Decoded:
        """The records of a message that has a payload. Never raises."""

    def subjects(self, message: Incoming) -> Sequence[Subject]:
        """What a message speaks of that its source could not read."""


class WireDecoder:
    """Our own wire form: JSON or msgpack, as a message's header says. ``max_bytes``: of a message."""

    failed = 0

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._columns = ColumnDecoder(())

    def read_symbols(self, symbols: Sequence[str]) -> None:
        """See `PayloadDecoder`."""
        self._columns = ColumnDecoder(symbols)

    async def prepare(self, messages: Sequence[Incoming]) -> None:
        """There is nothing to get."""

    def columns(self, messages: Sequence[Incoming]) -> Columns:
        """See `PayloadDecoder`."""
        payloads = [message.payload for message in messages]
        columns = self._columns.decode(payloads, _encodings(messages))
        sizes = np.fromiter(map(len, payloads), np.int64, len(payloads))
        columns["taken"] &= sizes <= self._max_bytes
        return columns

    def parts(self, message: Incoming) -> Decoded:
        """See `PayloadDecoder`."""
        encoding = header_encoding(message.headers)
        try:
            check_version(message.headers)
            found = in_order(elements(message.payload, encoding, self._max_bytes), encoding)
        except Exception as error:
            return Decoded([PayloadRecord(message.payload, malformed(error), self.subjects(message))])
        return Decoded([self._part(payload, encoding, message) for payload in found])

    def _part(self, payload: bytes, encoding: str, message: Incoming) -> PayloadRecord:
        try:
            return PayloadRecord(payload, decode_record(payload, encoding, self._max_bytes, any_price=True))
        except Exception as error:  # whatever one record provokes is its own fault
            return PayloadRecord(payload, malformed(error), subjects_of(payload, encoding, message.key))

    def subjects(self, message: Incoming) -> Sequence[Subject]:
        """See `PayloadDecoder`."""
        return subjects_of(message.payload, header_encoding(message.headers), message.key)


def malformed(error: Exception) -> MalformedRecord:
    """The refusal of a message that made a decoder, or a check, raise ``error``."""
    if isinstance(error, MalformedRecord):
        return error
    log.error("a message provokes an error of the daemon's own code", exc_info=error)
    return MalformedRecord("internal", shortened(repr(error)))


def _encodings(messages: Sequence[Incoming]) -> npt.NDArray[np.uint8] | None:
    """Of each message, `OTHER` of another version; None if none has headers, hence all are JSON."""
    headers = [message.headers for message in messages]
    if not any(headers):
        return None
    known = (OTHER if is_foreign(each) else ENCODINGS.get(header_encoding(each), OTHER) for each in headers)
    return np.fromiter(known, np.uint8, len(headers))
