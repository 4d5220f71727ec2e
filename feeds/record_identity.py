"""What identifies a record among its symbol's: the number or the id that its venue gave it, as 32 bits.

The rest of its identity is its content: see `ingest.identity`.
"""

import zlib

from feeds.market_data import Received, Text, Trade, VenueHeartbeat


def token_of(record: Received, numbered: bool) -> int:
    """CRC-32 of its number, if the source is ``numbered`` and the record has one, or of its id; 0: neither.

    `feeds.columns` computes the same of ids.
    """
    if isinstance(record, VenueHeartbeat):
        return 0
    if numbered and record.seq:
        return zlib.crc32(b"\0" + record.seq.to_bytes(8, "little")) or 1
    found = record.id if isinstance(record, Trade | Text) else ""
    return (zlib.crc32(found.encode()) or 1) if found else 0
