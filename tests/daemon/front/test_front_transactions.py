"""What goes into a transaction, and when: whole versions, in order, with the offsets that cover them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

import pytest

from daemon.front.delivery import Delivery, Outcome
from daemon.front.offsets import OffsetTracker
from daemon.front.transactions import Transactions
from feeds.connector import Route
from feeds.messages import DataUpdated, DeadLetter
from feeds.source import CommitPoint, Membership, Partition, SinkStopped
from feeds.transactions import Fenced, KafkaTransactions, Message, Written
from metrics.store import MetricStore
from tests.feeds.waiting import eventually

LABELS = {name: ["x"] for name in ("session", "source", "sink", "policy", "eviction")}
IN = ("in", 0)


class Broker(KafkaTransactions):
    """Keeps what was committed. ``held``: commits wait; ``fails``: the next one raises this."""

    def __init__(self) -> None:
        self.name = "kafka"
        self.got: list[tuple[list[bytes], dict[Partition, int]]] = []
        self.held = asyncio.Event()
        self.held.set()
        self.fails: Exception | None = None
        self.refused: frozenset[int] = frozenset()

    async def commit(
        self,
        messages: Sequence[Message],
        points: Mapping[Partition, CommitPoint],
        member: Callable[[], Membership | None],
    ) -> Written:
        await self.held.wait()
        if self.fails is not None:
            raise self.fails
        self.got.append(([m.key or b"" for m in messages], {p: at.offset for p, at in points.items()}))
        return Written(1, 1, self.refused)


class Member:
    read_committed = None
    membership = Membership("group", 1, "me", None, frozenset({IN}))


class Running:
    def __init__(self, store: MetricStore) -> None:
        self.broker, self.tracker = Broker(), OffsetTracker()
        self.delivery = Delivery([], [""], backlog=4)
        self.gates: list[bool] = []
        self.delivery.gate = self.gates.append
        self.outcomes: list[Outcome] = []
        route = Route(self.broker, "answers", "updates", "dlq")
        self.transactions = Transactions(route, self.broker, Member(), self.tracker, store, self.delivery)
        self.task = asyncio.create_task(self.transactions.run())

    def put(self, key: str, version: int, session: str = "a") -> None:
        message = DataUpdated(session=session, data_version=version, as_of=0, bars=[])
        self.transactions.put(session, message, key, {}, self.outcomes.append)


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    store = MetricStore.create(LABELS)
    made = Running(store)
    yield made
    made.task.cancel()
    with contextlib.suppress(asyncio.CancelledError, Fenced):
        await made.task
    store.unlink()
    store.close()


async def test_versions_go_out_whole_and_in_order(running: Running) -> None:
    running.tracker.all_passed_on("a", (0, 1), IN, (10, 11))
    running.put("second", 2)
    running.put("first", 1)
    running.put("third", 3)
    assert not running.broker.got
    running.tracker.acknowledge("a", 1)
    running.transactions.complete("a", 1)
    running.transactions.complete("a", 2)
    await eventually(lambda: len(running.outcomes) == 2)
    assert running.broker.got == [([b"first", b"second"], {IN: 11})]
    assert running.outcomes == [Outcome.DELIVERED] * 2
    assert running.delivery.waiting == 1


async def test_offsets_alone_and_dead_letters_need_no_version(running: Running) -> None:
    running.tracker.skipped(IN, 4)
    letter = DeadLetter(topic="in", partition=0, offset=4, error="e", reason="json", payload=b"")
    running.transactions.put("", letter, "letter", {}, running.outcomes.append)
    await eventually(lambda: running.outcomes == [Outcome.DELIVERED])
    assert running.broker.got == [([b"letter"], {IN: 5})]
    running.tracker.skipped(IN, 5)
    assert await running.transactions.settle()
    assert running.broker.got[1:] == [([], {IN: 6})]


async def test_what_is_not_complete_is_forgotten_with_its_engine(running: Running) -> None:
    running.broker.held.clear()
    running.put("done", 1)
    running.put("half", 2)
    running.transactions.complete("a", 1)
    running.transactions.forget()
    assert running.delivery.waiting == 1
    assert not await running.transactions.settle(within_s=0.05)
    # the next engine may begin before what is about to be committed
    running.put("once more", 1)
    running.broker.held.set()
    assert await running.transactions.settle()
    running.put("again", 2)
    running.transactions.complete("a", 2)
    assert await running.transactions.settle()
    assert [keys for keys, _ in running.broker.got] == [[b"done"], [b"once more", b"again"]]


async def test_a_session_that_is_removed_leaves_nothing_behind(running: Running) -> None:
    running.put("last", 7)
    running.transactions.remove("a")
    await eventually(lambda: running.outcomes == [Outcome.DELIVERED])


async def test_a_refused_message_is_told(running: Running) -> None:
    running.broker.refused = frozenset({1})
    running.put("one", 1)
    running.put("large", 1)
    running.transactions.complete("a", 1)
    await eventually(lambda: running.outcomes == [Outcome.DELIVERED, Outcome.REFUSED])


async def test_too_many_waiting_close_the_gate(running: Running) -> None:
    running.broker.held.clear()
    for n in range(4):
        running.put(str(n), 1)
    assert running.gates == [False]
    running.transactions.complete("a", 1)
    running.broker.held.set()
    await eventually(lambda: running.gates[-1])


async def test_a_fenced_producer_ends_the_task_and_nothing_more_is_committed(running: Running) -> None:
    running.broker.fails = Fenced("another process")
    running.put("one", 1)
    running.transactions.complete("a", 1)
    with pytest.raises(Fenced):
        await running.task
    running.broker.fails = None
    assert await running.transactions.settle()
    await running.transactions.stop(1.0)
    assert not running.broker.got


async def test_stopping_commits_what_is_complete(running: Running) -> None:
    running.task.cancel()
    running.put("one", 1)
    running.transactions.complete("a", 1)
    await running.transactions.stop(1.0)
    assert [keys for keys, _ in running.broker.got] == [[b"one"]]
    running.broker.fails = SinkStopped("late")
    running.put("two", 1)
    await running.transactions.stop(1.0)
    assert running.delivery.waiting == 1
