"""Faults of running daemons, each with the one alert that an operator is told of, and what the doctor finds.

Prometheus and Alertmanager are real, with the rules and the routes that ship. `make faults` runs them all,
and leaves the table of docs/measurements/faults.md in `.cache`.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from feeds.kafka_client import quiet_client_log
from tests.e2e.faults import desk_faults, floor
from tests.e2e.faults.day import DAY_S, quiet_day
from tests.e2e.faults.desk import Desk, desk
from tests.e2e.faults.fault import Fault
from tests.e2e.faults.floor import Floor
from tests.e2e.faults.table import Table
from tests.e2e.faults.watch import FASTER, IN_TIME_S, B, Watch, watching

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.long,
    pytest.mark.prometheus,
    pytest.mark.timeout(1800),
]


@pytest.fixture(scope="module")
def watch() -> Iterator[Watch]:
    quiet_client_log()
    with watching() as made:
        yield made


@pytest.fixture(scope="module")
def table() -> Iterator[Table]:
    """What came of each fault; written at the end."""
    made = Table()
    yield made
    made.write()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def at_desk(tmp_path_factory: pytest.TempPathFactory, watch: Watch) -> AsyncIterator[Desk]:
    async with desk(tmp_path_factory.mktemp("desk")) as made:
        await watch.learn(made)
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def on_floor(tmp_path_factory: pytest.TempPathFactory, watch: Watch) -> AsyncIterator[Floor]:
    async with floor.floor(tmp_path_factory.mktemp("floor"), 90) as made:
        await watch.learn(made)
        yield made


@pytest.mark.parametrize("fault", desk_faults.FAULTS, ids=lambda each: each.name)
async def test_a_fault_at_the_desk(fault: Fault[Desk], at_desk: Desk, watch: Watch, table: Table) -> None:
    await judge(fault, at_desk, watch, table)


@pytest.mark.parametrize("fault", floor.FAULTS, ids=lambda each: each.name)
async def test_a_fault_on_the_floor(fault: Fault[Floor], on_floor: Floor, watch: Watch, table: Table) -> None:
    await judge(fault, on_floor, watch, table)


@pytest.mark.parametrize("days", floor.CERTIFICATES)
async def test_a_certificate_that_ends(days: int, tmp_path: Path, watch: Watch, table: Table) -> None:
    async with floor.floor(tmp_path, days) as made:
        await judge(floor.CERTIFICATES[days], made, watch, table)


async def test_a_quiet_day(tmp_path: Path, watch: Watch) -> None:
    """Whatever the hour: it opens, has lunch, closes, trades at night and is silent, and nobody is told."""
    async with quiet_day(tmp_path, FASTER) as made:
        await watch.look_at(made, "quiet-day")
        for _ in range(int(DAY_S)):
            await asyncio.sleep(1.0)
            watch.check()
        watch.leave()


async def judge(fault: Fault[B], bench: B, watch: Watch, table: Table) -> None:
    found = await watch.see(fault, bench)
    table.rows.append(found)
    print(found)
    assert found.late_s < IN_TIME_S
    assert found.finding
    assert found.step
