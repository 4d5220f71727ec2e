"""Three brokers: the coordinators of a daemon's group and of its transactions are killed and move."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError

from feeds.kafka_client import quiet_client_log
from tests.chaos.rig import Rig, closing
from tests.chaos.test_chaos import found_wrong
from tests.kit.kafka import KafkaCluster

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(600)]

GROUP, TRANSACTION = 0, 1
"""Kinds of coordinator, by Kafka's protocol."""
MOVED_S = 60.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[KafkaCluster]:
    quiet_client_log()
    with KafkaCluster() as running:
        yield running


async def coordinator(bootstrap: str, name: str, kind: int, but: int | None = None) -> int:
    """The broker that coordinates a group or transactional id; waits until it is another than ``but``."""
    deadline = asyncio.get_running_loop().time() + MOVED_S
    while True:
        admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
        try:
            await admin.start()
            found = int(await admin.find_coordinator(name, kind))
            if found != but:
                return found
        except KafkaError:  # nobody knows yet
            pass
        finally:
            await admin.close()
        assert asyncio.get_running_loop().time() < deadline, f"{name}: the coordinator did not move"
        await asyncio.sleep(0.2)


@pytest.mark.rotated(1, "pairs and clusters")
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "exactly_once",
    [pytest.param(False, id="at_least_once"), pytest.param(True, id="exactly_once")],
)
async def test_a_coordinator_that_moves_loses_nothing(
    tmp_path: Path, cluster: KafkaCluster, exactly_once: bool
) -> None:
    rig = Rig(cluster, tmp_path / "disturbed", exactly_once=exactly_once)
    undisturbed = Rig(cluster, tmp_path / "undisturbed")
    with closing(rig), closing(undisturbed):
        await asyncio.gather(rig.start(), undisturbed.start())
        async with rig.clients():
            await rig.step()
            await rig.step()
            moving = [(rig.group, GROUP)] + [(rig.transactional_id, TRANSACTION)] * exactly_once
            for name, kind in moving:
                node = await coordinator(cluster.bootstrap, name, kind)
                await asyncio.to_thread(cluster.kill, node)
                await rig.step()
                assert await coordinator(cluster.bootstrap, name, kind, but=node) != node
                await rig.step()
                await asyncio.to_thread(cluster.start, node)
                await rig.step()
        problems = await found_wrong(rig, undisturbed)
        assert not problems, "\n".join(problems[:20])
        assert not rig.exits, "the daemon stayed"
