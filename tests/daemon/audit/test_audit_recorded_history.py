"""Partitions are merged by Kafka's times, as they are read."""

import asyncio
from collections.abc import AsyncGenerator, Collection
from heapq import merge
from itertools import accumulate
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from daemon.audit import recorded_history
from daemon.audit.broker import Broker
from daemon.audit.recorded_history import of_config, of_partitions
from feeds.kafka_range import OffsetsGone
from feeds.source import Incoming, Partition
from tests.kit import incoming, inproc_config, log_source

GONE = 2
"""The first offset that retention has left of each partition."""


class Reader:
    """What partitions have, in batches of three."""

    def __init__(self, has: dict[Partition, list[Incoming]]) -> None:
        self._has = has

    async def __aenter__(self) -> "Reader":
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def spans(self, topics: Collection[str]) -> dict[Partition, range]:
        return {partition: range(GONE, len(own)) for partition, own in self._has.items()}

    async def offset_at(self, partition: Partition, time_ns: int) -> int | None:
        found = (n for n, each in enumerate(self._has[partition]) if each.ts_source_ns >= time_ns)
        return next(found, None)

    async def read(self, partition: Partition, span: range) -> AsyncGenerator[list[Incoming], None]:
        found = self._has[partition][span.start : span.stop]
        for at in range(0, len(found), 3):
            yield found[at : at + 3]


class Given:
    """The brokers of all sources."""

    def __init__(self, has: dict[Partition, list[Incoming]]) -> None:
        self._has = has

    def reader(self) -> Reader:
        return Reader(self._has)


TIMES = st.lists(st.sampled_from([0, *range(1, 12)]), max_size=12)


@given(st.lists(TIMES, min_size=1, max_size=4))
def test_the_order_is_that_of_a_merge_of_all(times: list[list[int]]) -> None:
    """One whose time is unknown stays behind the one before it; of equal times the first partition goes."""
    has = {
        ("in", number): [replace(incoming(b"", n, number), ts_source_ns=at) for n, at in enumerate(own)]
        for number, own in enumerate(times)
    }
    streams = [
        [(at, number, n) for n, at in enumerate(accumulate(own, lambda before, at: at or before))]
        for number, own in enumerate(times)
    ]
    expected = [(number, n) for _, number, n in merge(*streams, key=lambda each: each[:2])]

    async def read() -> list[tuple[int, int]]:
        spans: Any = {("", partition): range(len(own)) for partition, own in has.items()}
        batches = of_partitions(lambda source: cast(Broker, Given(has)), spans)
        return [(each.partition, each.offset) async for _, batch in batches for each in batch]

    assert asyncio.run(read()) == expected


def test_a_history_whose_first_records_are_deleted_needs_a_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a state had absorbed from them cannot be known; a tape may begin behind them."""
    has = {("in", 0): [replace(incoming(b"", n), ts_source_ns=n + 1) for n in range(8)]}
    monkeypatch.setattr(recorded_history, "any_sources", lambda config: {"kafka": Given(has)})
    config = inproc_config(source=log_source())

    async def offsets(begin_ns: int | None) -> list[int]:
        return [each.offset async for _, batch in of_config(config, begin_ns) for each in batch]

    with pytest.raises(OffsetsGone, match="no offsets before 2"):
        asyncio.run(offsets(None))
    assert asyncio.run(offsets(5)) == [4, 5, 6, 7]
    assert asyncio.run(offsets(100)) == []
