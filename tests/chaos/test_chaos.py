"""Seeded faults on a real broker: none missing, only repeats that can be recognised, the same last state.

One seed is one case: ``pytest tests/chaos -k seed007`` runs it alone. Seeds from `SHORT` on are longer, and
run only when asked for: ``pytest tests/chaos -m long``. A daemon that a case leaves in order serves the next.
"""

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from feeds.kafka_client import quiet_client_log
from tests.chaos.checks import ahead, by_key, conflicts, different, gaps, missing, repeats
from tests.chaos.reading import read_to_end
from tests.chaos.rig import BROKER, NAMES, PARTITIONS, Pair, Rig
from tests.chaos.schedule import DECK, Schedule, draw
from tests.kit.daemon import committed
from tests.kit.kafka import KafkaServer
from tests.kit.kafka_proxy import KafkaProxy, ProxyThread
from tests.transactions.copying import hanging

SHORT, LONG = DECK.runs, 200
OUTAGE_BARS = 12


@dataclass
class Rigs:
    """The daemon of the next case, and an undisturbed one that reads the same feed."""

    broker: KafkaServer
    folder: Path
    proxy: KafkaProxy
    exactly_once: bool
    pair: bool = False
    disturbed: Rig | None = None
    undisturbed: Rig | None = None

    async def get(self) -> tuple[Rig, Rig]:
        if self.undisturbed is None:
            self.undisturbed = Rig(self.broker, self.folder / "undisturbed")
            await self.undisturbed.start()
        if self.disturbed is None:
            self.disturbed = (Pair if self.pair else Rig)(
                self.broker,
                self.folder / "disturbed",
                exactly_once=self.exactly_once,
                spare=not (self.exactly_once or self.pair),
                proxy=self.proxy,
            )
            await self.disturbed.start()
        return self.disturbed, self.undisturbed

    def drop(self) -> None:
        """The next case gets a daemon and topics of its own."""
        if self.disturbed is not None:
            self.disturbed.close()
            shutil.rmtree(self.folder / "disturbed", ignore_errors=True)
        self.disturbed = None

    def close(self) -> None:
        self.drop()
        if self.undisturbed is not None:
            self.undisturbed.close()


def rigs(factory: pytest.TempPathFactory, *, pair: bool) -> Iterator[tuple[Rigs, Rigs]]:
    """At least once, and exactly once."""
    quiet_client_log()
    with KafkaServer(more=BROKER, proxied=2) as broker, ExitStack() as stack:
        proxies = [stack.enter_context(ProxyThread(door.port, door.upstream)).proxy for door in broker.doors]
        made = (
            Rigs(broker, factory.mktemp("chaos"), proxies[0], exactly_once=False, pair=pair),
            Rigs(broker, factory.mktemp("chaos"), proxies[1], exactly_once=True, pair=pair),
        )
        yield made
        for each in made:
            each.close()


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Rigs, Rigs]]:
    yield from rigs(tmp_path_factory, pair=False)


@asynccontextmanager
async def playing(rigs: Rigs) -> AsyncIterator[tuple[Rig, Rig]]:
    """The disturbed daemon, which is kept if all goes well, and the undisturbed one."""
    disturbed, undisturbed = await rigs.get()
    try:
        yield disturbed, undisturbed
        fenced = {1} if rigs.exactly_once or rigs.pair else set()
        assert set(disturbed.exits) <= fenced, f"the daemon ended by itself: {disturbed.exits}"
    except BaseException as error:
        error.add_note(f"log of the daemon:\n{disturbed.daemon.log[-4000:]}")
        rigs.drop()
        raise


async def run(both: tuple[Rigs, Rigs], schedule: Schedule) -> None:
    """Play a schedule and check everything that the topic has."""
    print(schedule)  # of a case that fails, or with -s
    events = {event.bar: event for event in schedule.events}
    async with playing(both[schedule.exactly_once]) as (disturbed, undisturbed):
        async with disturbed.clients():
            for n in range(schedule.bars + 1):
                await disturbed.step(events.get(n))
        problems = await found_wrong(disturbed, undisturbed)
        assert not problems, "\n".join([str(schedule), *problems[:20]])


async def found_wrong(disturbed: Rig, undisturbed: Rig) -> list[str]:
    bootstrap = disturbed.broker.bootstrap
    async with undisturbed.clients():
        while undisturbed.next < disturbed.next:
            await undisturbed.step()
    open_for_ever = await asyncio.to_thread(hanging, disturbed.broker) if disturbed.exactly_once else []
    stored = await committed(bootstrap, disturbed.group, disturbed.trades, PARTITIONS)
    found = await read_to_end(bootstrap, disturbed.answers)
    reference = await read_to_end(bootstrap, undisturbed.answers)
    return [
        *missing(reference, NAMES, disturbed.next - 1),
        *repeats(reference, allowed=False),
        *missing(found, NAMES, disturbed.next - 1),
        *repeats(found, allowed=not disturbed.exactly_once),
        *ahead(found, stored, NAMES),
        *gaps(found),
        *conflicts(found),
        *different(found, {k: v[0] for k, v in by_key(reference).items()}),
        *(f"a transaction hangs: {each}" for each in open_for_ever),
    ]


@pytest.mark.kafka
@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(SHORT), ids="seed{:03}".format)
async def test_a_fault_loses_nothing(both: tuple[Rigs, Rigs], seed: int) -> None:
    await run(both, draw(seed, bars=2, faults=1))


@pytest.mark.kafka
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(SHORT, SHORT + LONG), ids="seed{:03}".format)
async def test_faults_lose_nothing(both: tuple[Rigs, Rigs], seed: int) -> None:
    await run(both, draw(seed, bars=8, faults=3))


@pytest.mark.kafka
@pytest.mark.sampled(1)
@pytest.mark.parametrize("exactly_once", [False, True], ids=["at_least_once", "exactly_once"])
async def test_each_bar_that_comes_during_an_outage_is_answered(
    both: tuple[Rigs, Rigs], exactly_once: bool
) -> None:
    """As if there had been none, and not the newest one alone."""
    async with playing(both[exactly_once]) as (disturbed, undisturbed):
        async with disturbed.clients():
            await disturbed.step()
            await disturbed.outage(OUTAGE_BARS)
            await disturbed.step()
        problems = await found_wrong(disturbed, undisturbed)
        assert not problems, "\n".join(problems[:20])
