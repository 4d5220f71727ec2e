"""How far the source of pushed records is read; what else it does, `tests.daemon.api` has."""

import asyncio
import time

from feeds.push_source import PushedSource, PushLimits


async def test_it_is_read_up_to_now_only_while_nothing_waits() -> None:
    source = PushedSource("in", PushLimits(), max_records=2)
    await source.start()
    source.push([b"1", b"2", b"3"])
    assert source.read_until_ns == 0
    batches = source.batches()
    for expected in (2, 1):
        assert len(await anext(batches)) == expected
        assert source.read_until_ns == 0, "it was not asked for the next one"
    now = time.monotonic_ns()
    waiting = asyncio.ensure_future(anext(batches))
    await asyncio.sleep(0)
    assert source.read_until_ns >= now
    source.push([b"4"])
    await waiting
    await batches.aclose()
