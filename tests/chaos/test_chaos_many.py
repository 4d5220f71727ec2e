"""Thousands of sessions: in one partition, and shared by five daemons, each of which has memory for its own.

``pytest tests/chaos/test_chaos_many.py -m long -s`` prints what it took.
"""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from feeds.kafka_client import quiet_client_log
from tests.chaos.checks import gaps, repeats, unread
from tests.chaos.feed import as_of
from tests.chaos.members import QUESTIONS, Members, offsets_of, symbols_of
from tests.chaos.reading import read_to_end
from tests.kit import until_slowly
from tests.kit.daemon import Daemon
from tests.kit.kafka import KafkaServer

pytestmark = [pytest.mark.kafka, pytest.mark.long, pytest.mark.timeout(1800)]
LIMIT_S = 600.0
FIVE, LEFT = 5, 3


@pytest.fixture(scope="module")
def broker() -> Iterator[KafkaServer]:
    quiet_client_log()
    with KafkaServer() as running:
        yield running


@asynccontextmanager
async def members(
    broker: KafkaServer, folder: Path, sessions: int, partitions: int
) -> AsyncIterator[Members]:
    """No daemon yet, and clients."""
    symbols = symbols_of(sessions, partitions)
    made = Members(broker, folder, symbols, exactly_once=False, partitions=partitions)
    await made.create()
    try:
        async with made.clients():
            yield made
    finally:
        made.close()


async def trade(made: Members, *bars: int) -> None:
    for bar in bars:
        await made.send(bar)


async def answered(made: Members, bar: int) -> None:
    assert made.reader is not None
    reader = made.reader
    await until_slowly(lambda: reader.to() >= as_of(bar), LIMIT_S, f"answers to bar {bar}")


def value(daemon: Daemon, name: str) -> float:
    """A gauge without labels, or the sum over its labels."""
    lines = daemon.get("/metrics")[1].splitlines()
    return sum(float(line.split()[-1]) for line in lines if re.match(rf"{name}(\{{| )", line))


def own_bytes(daemon: Daemon) -> int:
    """Memory that no other process shares."""
    found = Path(f"/proc/{daemon.pid}/smaps_rollup").read_text()
    return 1024 * sum(int(each) for each in re.findall(r"Private_\w+: +(\d+)", found))


async def test_two_thousand_sessions_of_one_partition_restart_without_a_repeat(
    broker: KafkaServer, tmp_path: Path
) -> None:
    sessions = 2000
    async with members(broker, tmp_path / "m", sessions, 1) as made:
        made.add()
        await until_slowly(made.all_hold, LIMIT_S, "a daemon")
        began = time.monotonic()
        await trade(made, 0, 1, 2)
        await answered(made, 1)
        print(f"{sessions} sessions opened and answered within {time.monotonic() - began:.1f} s")
        await asyncio.sleep(3.0)  # a commit
        daemon = made.daemons[0]
        print(f"own memory {own_bytes(daemon) / 2**20:.0f} MiB")
        began = time.monotonic()
        await made.leave(daemon, kill=False)
        print(f"stopped within {time.monotonic() - began:.1f} s")
        began = time.monotonic()
        made.add()
        await until_slowly(made.all_hold, LIMIT_S, "the next daemon")
        await trade(made, 3)
        await answered(made, 2)
        print(f"started again and answered within {time.monotonic() - began:.1f} s")
        assert value(made.daemons[0], "foretick_sessions_open") == sessions
    found = await read_to_end(broker.bootstrap, made.answers)
    problems = [
        *unread(found, list(QUESTIONS), offsets_of(made.sessions, 3, 1)),
        *repeats(found, allowed=False),
        *gaps(found),
    ]
    assert not problems, problems[:20]


async def test_five_daemons_have_memory_for_a_fifth_of_a_thousand_sessions(
    broker: KafkaServer, tmp_path: Path
) -> None:
    """And for more once some have left."""
    sessions, partitions = 1000, 20
    async with members(broker, tmp_path / "m", sessions, partitions) as made:
        made.add(FIVE)
        await until_slowly(made.all_hold, LIMIT_S, "five owners")
        await trade(made, 0, 1, 2)
        await answered(made, 1)
        await shared(made, sessions, FIVE)
        for daemon in list(made.daemons)[: FIVE - LEFT]:
            await made.leave(daemon, kill=False)
        await until_slowly(made.all_hold, LIMIT_S, "three owners")
        await trade(made, 3)
        await answered(made, 2)
        await shared(made, sessions, LEFT)
    found = await read_to_end(broker.bootstrap, made.answers)
    problems = [
        *unread(found, list(QUESTIONS), offsets_of(made.sessions, 3, partitions)),
        *repeats(found, allowed=True),
        *gaps(found),
    ]
    assert not problems, problems[:20]


async def shared(made: Members, sessions: int, count: int) -> None:
    """Wait until each session is open in one daemon, and each daemon has its share of blocks."""

    def opened() -> list[int]:
        return [int(value(each, "foretick_sessions_open")) for each in made.daemons]

    await until_slowly(lambda: sum(opened()) == sessions, LIMIT_S, "each session in one daemon")
    blocks = [int(value(each, "foretick_pool_blocks")) for each in made.daemons]
    for own, pool, daemon in zip(opened(), blocks, made.daemons, strict=True):
        print(
            f"{count} daemons: {own} sessions, {pool} blocks, own memory {own_bytes(daemon) / 2**20:.0f} MiB"
        )
    assert max(opened()) <= 1.5 * sessions / count
    assert max(blocks) <= 1.6 * sum(blocks) / count
