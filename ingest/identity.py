"""Which records of a symbol came before: a collector that reconnects sends the last ones again.

A record's identity is its token (the venue's number or id, see `ingest.record`) together with its content, so
that a venue which uses a number or an id again for something else loses nothing. Records without a token
have no identity. A feed where `UNRELIABLE_AFTER` records in a row had the same token and other contents, such
as the id of an order instead of a trade, has no identities from then on.

Of each symbol of a session at least the newest `REMEMBERED` identities are known, in two tables: when one
holds that many, it becomes the older one, and the one before it is forgotten. It takes 64 KiB a symbol.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from support.numba_kernel import kernel

REMEMBERED = 2048
SLOTS = 2 * REMEMBERED
"""Of one table: open addressing, half full at most."""
UNRELIABLE_AFTER = 3

Tables = npt.NDArray[np.uint64]
"""Of one feed, [2, SLOTS]: the older and the newer one by turns; 0 is a free slot."""

IDENTITY = np.dtype([("feed", "u4"), ("table", "u4"), ("identity", "u8")])
"""An identity in a table, to be stored."""
_MIX, _MASK = np.uint64(0x9E3779B97F4A7C15), np.uint64(SLOTS - 1)


def no_tables(feeds: int) -> Tables:
    """Empty tables of each feed, [feeds, 2, SLOTS]. They take memory when they are used."""
    return np.zeros((feeds, 2, SLOTS), np.uint64)


def packed_tables(tables: Tables) -> npt.NDArray[np.void]:
    """The identities in the tables of some feeds as IDENTITY [n]."""
    feed, table, slot = np.nonzero(tables)
    packed = np.zeros(len(feed), IDENTITY)
    packed["feed"], packed["table"], packed["identity"] = feed, table, tables[feed, table, slot]
    return packed


def unpacked_tables(packed: npt.NDArray[np.void], feeds: int) -> Tables:
    """Tables of ``feeds`` with these identities. Raises ValueError for those of other feeds."""
    tables = no_tables(feeds)
    if len(packed) and not ((packed["feed"] < feeds).all() and (packed["table"] < 2).all()):
        raise ValueError("the stored identities are of other symbols")
    if len(packed) and np.unique(packed[["feed", "table"]], return_counts=True)[1].max() > REMEMBERED:
        raise ValueError("more identities are stored than a table holds")
    for feed, table, identity in packed.tolist():
        _enter(tables, feed, table, np.uint64(identity))
    return tables


@kernel
def _mixed(state: Any, value: Any) -> Any:
    state = (state ^ np.uint64(value)) * _MIX
    return state ^ (state >> np.uint64(29))


@kernel
def identity_of(record: Any) -> Any:
    """64 bits of a record's token and content; 0 for a record without a token."""
    return content_of(record) if record["token"] != 0 else np.uint64(0)


@kernel
def content_of(record: Any) -> Any:
    """64 bits of a record's token and content; never 0."""
    state = _mixed(_mixed(_MIX, record["token"]), record["ts_event"])
    for value in (record["a"], record["b"], record["c"], record["d"], record["e"], record["x"]):
        state = _mixed(state, value)
    state = _mixed(_mixed(state, record["kind"]), record["size_finer"])
    return state if state != 0 else np.uint64(1)


@kernel
def _has(tables: Any, own: Any, which: Any, identity: Any) -> bool:
    slot = identity & _MASK
    while tables[own, which, slot] != 0:
        if tables[own, which, slot] == identity:
            return True
        slot = (slot + np.uint64(1)) & _MASK
    return False


@kernel
def _enter(tables: Any, own: Any, which: Any, identity: Any) -> None:
    slot = identity & _MASK
    while tables[own, which, slot] != 0:
        slot = (slot + np.uint64(1)) & _MASK
    tables[own, which, slot] = identity


@kernel
def is_known(feed: Any, tables: Any, own: Any, record: Any, identity: Any) -> bool:
    """Whether the feed took a record with this identity before. Call it for each record, in order.

    ``own``: the place of the feed's two tables in ``tables``, [feeds, 2, SLOTS].
    """
    if identity == 0:
        return False
    token = record["token"]
    if token != feed["token"]:
        feed["same_token"] = 1
    elif identity != feed["identity"]:
        feed["same_token"] += 1
    feed["token"], feed["identity"] = token, identity
    if feed["same_token"] >= UNRELIABLE_AFTER:
        feed["unreliable"] = 1
    if feed["unreliable"]:
        return False
    return _has(tables, own, 0, identity) or _has(tables, own, 1, identity)


@kernel
def remember(feed: Any, tables: Any, own: Any, identity: Any) -> None:
    """The feed has taken a record with this identity, which was not known."""
    if identity == 0 or feed["unreliable"]:
        return
    if feed["remembered"] == REMEMBERED:
        feed["table"] = 1 - feed["table"]
        feed["remembered"] = 0
        tables[own, feed["table"]] = 0
    _enter(tables, own, feed["table"], identity)
    feed["remembered"] += 1
