"""aiokafka and librdkafka as transactional producers, under the same seeded faults on a real Apache Kafka.

`python -m tests.transactions.compare --seeds 5` prints a table in Markdown (docs/delivery.md).
"""

import asyncio
import logging
import random
import warnings
from collections import Counter
from collections.abc import Awaitable, Callable

import click

from feeds.kafka_client import quiet_client_log
from feeds.kafka_transactions import (
    CommittedOffsets,
    Fenced,
    GroupOffsets,
    OutgoingMessage,
    TransactionFailed,
)
from feeds.librdkafka import StableOffsets
from feeds.source import CommitPoint, Membership
from tests.kit.kafka import KafkaServer
from tests.kit.kafka_proxy import Api, KafkaProxy
from tests.transactions.aiokafka_producer import AiokafkaProducer, ByOffsets
from tests.transactions.chaos import Requests, killed_now_and_then
from tests.transactions.copying import TIMEOUT_S, Copy, NewProducer, Verdict, librdkafka

Scenario = Callable[[Copy, KafkaServer, KafkaProxy, int], Awaitable[None]]
WITHIN_S = 40.0
"""A run that takes longer counts as hung."""


def aiokafka(bootstrap: str, transactional_id: str) -> AiokafkaProducer:
    return AiokafkaProducer(bootstrap, transactional_id, TIMEOUT_S)


class AiokafkaCopy(Copy):
    """Of a client that cannot commit the transactions' numbers."""

    def committed_offsets(self, stable: StableOffsets) -> CommittedOffsets:
        return ByOffsets(stable, self.identity, self.member().group, self.input, self.batch)


async def end_txn(copy: Copy, _server: KafkaServer, proxy: KafkaProxy, seed: int) -> None:
    """EndTxn arrives after it was given up, or its reply is lost."""
    faults = Requests(proxy, seed, 0.3, (Api.END_TXN,), ("delay", "drop_reply"))
    await copy.run_to_the_end(faults, WITHIN_S)


async def offsets(copy: Copy, _server: KafkaServer, proxy: KafkaProxy, seed: int) -> None:
    """TxnOffsetCommit is lost, or its connection is cut."""
    faults = Requests(proxy, seed, 0.3, (Api.TXN_OFFSET_COMMIT,), ("drop", "cut_after"))
    await copy.run_to_the_end(faults, WITHIN_S)


async def any_request(copy: Copy, _server: KafkaServer, proxy: KafkaProxy, seed: int) -> None:
    """Any request is delayed, lost or doubled; the copier is killed twice."""
    await asyncio.wait_for(killed_now_and_then(copy, seed, 2, Requests(proxy, seed)), WITHIN_S)


async def broker(copy: Copy, server: KafkaServer, _proxy: KafkaProxy, seed: int) -> None:
    """The broker, and with it both coordinators, stops or is killed, and comes back."""
    running = asyncio.create_task(copy.run_to_the_end(within_s=WITHIN_S))
    await asyncio.sleep(random.Random(seed).uniform(0.3, 1.5))
    await asyncio.to_thread(server.kill if seed % 2 else server.stop)
    await asyncio.sleep(1.0)
    await asyncio.to_thread(server.start)
    await running


async def zombie(copy: Copy, server: KafkaServer, _proxy: KafkaProxy, _seed: int) -> None:
    """A member that is none any more commits its batch, while its successor copies all."""
    await copy.run_to_the_end(within_s=WITHIN_S)
    late = copy.new_producer(server.bootstrap, "zombie")
    await late.open()
    member = Membership(copy.member().group, 1, "gone-1", None, frozenset({copy.input}))
    try:
        batch = [OutgoingMessage(copy.output, None, b"0")]
        await late.transact(batch, [GroupOffsets(member, {copy.input: CommitPoint(1)})])
    except (Fenced, TransactionFailed):
        copy.outcomes["zombie refused"] += 1
    await late.close()


SCENARIOS: dict[str, Scenario] = {
    "EndTxn delayed, or its reply lost": end_txn,
    "TxnOffsetCommit lost, or its connection cut": offsets,
    "any request delayed, lost or doubled; process killed": any_request,
    "broker stopped or killed": broker,
    "zombie of an older generation": zombie,
}


async def compare(seeds: int) -> list[str]:
    rows = []
    # the group's and our own offsets have coordinators of their own
    with KafkaServer(more={"offsets.topic.num.partitions": 8}) as server:
        proxy = KafkaProxy(server.proxy_port, server.behind_port)
        await proxy.start()
        clients: dict[str, tuple[type[Copy], NewProducer]] = {
            "librdkafka": (Copy, librdkafka),
            "aiokafka": (AiokafkaCopy, aiokafka),
        }
        for scenario, work in SCENARIOS.items():
            for client, (kind, new) in clients.items():
                total: Counter[str] = Counter()
                for seed in range(seeds):
                    proxy.faults.clear()
                    copy = kind(server, f"{client}.{work.__name__}.{seed}", new, records=200)
                    await copy.prepare()
                    try:
                        await work(copy, server, proxy, seed)
                    except TimeoutError:
                        copy.outcomes["hung"] += 1
                    verdict = Verdict.of(await copy.read(), copy.records)
                    total += copy.outcomes
                    total.update(lost=verdict.lost, doubled=verdict.doubled, disorder=not verdict.ordered)
                shown = ("lost", "doubled", "disorder", "hung", "aborted", "Fenced")
                rows.append(f"| {scenario} | {client} | {' | '.join(str(total[each]) for each in shown)} |")
                click.echo(rows[-1])
        await proxy.stop()
    return rows


@click.command()
@click.option("--seeds", default=5, help="runs of each scenario and client")
def main(seeds: int) -> None:
    """Print what was lost, doubled and hung."""
    quiet_client_log()
    logging.basicConfig(level=logging.CRITICAL)
    warnings.simplefilter("ignore")
    head = "| faults | client | lost | doubled | out of order | hung runs | aborted | fenced |"
    click.echo(f"{head}\n|{'---|' * 8}")
    asyncio.run(compare(seeds))


if __name__ == "__main__":
    main()
