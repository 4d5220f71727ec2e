"""Records as rows of the ring, to find their faults without a daemon."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from daemon.ring_numbers import price_scale_for, prices_of, ring_values
from feeds.decimals import decimals_of
from feeds.market_data import AnyRecord
from feeds.record_identity import token_of
from ingest.record import Records, RecordWriter

DECODED = 10_000
"""Records that are kept as they were received."""
_DAY_NS = 86_400 * 10**9


@dataclass(frozen=True)
class Tape:
    """Records of one type, and some of them as they are received. The busiest symbol has number 0."""

    name: str
    rows: Records
    sample: Sequence[AnyRecord]

    @property
    def days(self) -> float:
        """Days that it covers, 1 at least."""
        return max(1.0, float(np.ptp(self.rows["ts_event"].astype(np.int64))) / _DAY_NS)


def taped(name: str, records: Sequence[AnyRecord]) -> Tape:
    """Records of any symbols as rows of the ring."""
    counts = Counter(each.key for each in records)
    numbers = {key: number for number, key in enumerate(sorted(counts, key=counts.__getitem__, reverse=True))}
    prices = [price for each in records for price in prices_of(each)]
    scale = price_scale_for(max(map(decimals_of, prices[: 3 * DECODED])), max(map(abs, prices)))
    writer = RecordWriter(len(records))
    for offset, each in enumerate(records):
        made = ring_values(each, scale)
        writer.add(
            made.kind, numbers[each.key], each.ts_event, each.ts_recv, made.values, x=made.x, seq=each.seq,
            stream=1, offset=offset, token=token_of(each, False),
            price_finer=made.price_finer, size_finer=made.size_finer,
        )  # fmt: skip
    return Tape(name, writer.records, records[:DECODED])
