"""What the daemon keeps with every record that it appends to a tape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from daemon.protocol import Inputs
from ingest.bars import GAP
from ingest.plane import TapeRecord
from scheduler.tapes import Record


class Appended(NamedTuple):
    """A bar as the data plane made it, and the number of bars that its session got before."""

    record: TapeRecord
    ordinal: int


def newest(records: Sequence[Record[Appended]]) -> TapeRecord:
    """The last of a version's records."""
    return records[-1].payload.record


def has_gap(payload: Appended) -> bool:
    """Data was lost before this record."""
    return bool(payload.record.flags & GAP)


def inputs_of(payloads: Sequence[Appended]) -> Inputs:
    """The feed's records that ``payloads``, oldest first, were made from."""
    records = [payload.record for payload in payloads]
    return Inputs(
        min(record.first_offset for record in records),
        max(record.last_offset for record in records),
        records[-1].low_watermark,
    )
