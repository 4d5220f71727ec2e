"""What it takes to store where sessions stand, beside a bare producer of the same records."""

import asyncio
import logging
from collections.abc import Iterator
from statistics import median
from time import perf_counter_ns

import uvloop
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

from bench.data.broker import embedded_broker
from bench.figures import Figure
from bench.run import SuiteRun
from daemon.gateway.checkpoint.state import ProgressStore
from feeds.backoff import ConnectionLog
from feeds.kafka_client import Clients
from feeds.kafka_progress import TOPIC, ProgressTopic
from feeds.source import CommitPoint
from metrics.store import MetricStore


def measure(run: SuiteRun) -> Iterator[Figure]:
    """A version of one session of a partition, or of all, was acknowledged: until the embedded broker has
    their records, median of the repeats. The offset that is committed behind them is not in it.
    """
    repeats = run.sized(20, 2)
    for sessions in run.sized((30, 300, 2000), (3,)):
        for changed in (1, sessions):
            ours, bare, size = uvloop.run(_stored(sessions, changed, repeats))
            at = {"sessions": sessions, "of these changed": changed, "bytes": size}
            yield Figure("checkpoint", ours, "ms", "", {**at}, "bare producer", bare, n=repeats)


async def _stored(sessions: int, changed: int, repeats: int) -> tuple[float, float, int]:
    names, partition = [f"session-{n}" for n in range(sessions)], ("ticks", 0)
    progress = ProgressStore(MetricStore.local({"session": [], "source": [], "sink": []}))
    progress.start(names)
    with embedded_broker(1) as broker:
        settings = {"bootstrap_servers": broker}
        connection = ConnectionLog("progress", broker, logging.getLogger(__name__))
        clients, took = Clients(AIOKafkaConsumer, connection, settings, 5.0), list[tuple[int, int]]()
        topic = ProgressTopic(TOPIC, "g", settings, clients)
        async with AIOKafkaProducer(**settings, enable_idempotence=True, linger_ms=5) as producer:
            for version in range(repeats + 1):  # the first connects
                for name in names[:changed]:
                    progress.acknowledge(name, version, [progress.number(name)], (version * 10**9,))
                began = perf_counter_ns()
                points = {partition: CommitPoint(version, progress.describe(names))}
                messages = topic.changes(points)
                await topic.write(points, 60.0)
                stored = perf_counter_ns()
                await asyncio.gather(*[await producer.send(TOPIC, m.payload, m.key) for m in messages])
                took.append((stored - began, perf_counter_ns() - stored))
        await topic.stop()
    ours, bare = (median(each) / 1e6 for each in zip(*took[1:], strict=True))
    return ours, bare, sum(len(m.key or b"") + len(m.payload or b"") for m in messages)
