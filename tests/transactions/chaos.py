"""Seeded faults for a copier: requests lost, late or twice, connections cut, processes killed."""

import asyncio
import random
from contextlib import suppress
from dataclasses import dataclass

from feeds.kafka_transactions import Fenced, PartitionsMoved
from tests.kit.kafka_proxy import Act, Api, Fault, KafkaProxy
from tests.transactions.copying import TIMEOUT_S, Copy

APIS = (
    Api.END_TXN,
    Api.TXN_OFFSET_COMMIT,
    Api.ADD_OFFSETS,
    Api.ADD_PARTITIONS,
    Api.PRODUCE,
    Api.INIT_PRODUCER_ID,
)
ACTS: tuple[Act, ...] = ("delay", "drop", "drop_reply", "duplicate", "cut", "cut_after")


@dataclass
class Requests:
    """Faults of requests. ``share``: of the transactions that meet one."""

    proxy: KafkaProxy
    seed: int
    share: float = 0.3
    apis: tuple[Api, ...] = APIS
    acts: tuple[Act, ...] = ACTS

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def __call__(self, _number: int) -> None:
        if self._random.random() < self.share:
            seconds = self._random.choice((0.2, 1.0, TIMEOUT_S + 1.0))
            self.proxy.faults.append(
                Fault(self._random.choice(self.apis), self._random.choice(self.acts), seconds)
            )


async def killed_now_and_then(copy: Copy, seed: int, kills: int, before: Requests | None = None) -> None:
    """Run it to the end; ``kills`` times the process is killed at some moment and started again."""
    choice = random.Random(seed)
    for _ in range(kills):
        task = asyncio.create_task(copy.run(before or (lambda _number: None)))
        await asyncio.wait([task], timeout=choice.uniform(0.2, 2.0))
        copy.outcomes["killed"] += not task.done()
        task.cancel()
        with suppress(asyncio.CancelledError, Fenced, PartitionsMoved):
            await task
    await copy.run_to_the_end(before or (lambda _number: None))
