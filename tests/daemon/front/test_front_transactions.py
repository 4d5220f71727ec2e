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
        self.tried = 0
        self.member: Membership | None = None

    async def commit(
        self,
        messages: Sequence[Message],
        points: Mapping[Partition, CommitPoint],
        member: Callable[[], Membership | None],
    ) -> Written:
        self.tried += 1
        await self.held.wait()
        self.member = member()
        if self.fails is not None:
            raise self.fails
        self.got.append(([m.key or b"" for m in messages], {p: at.offset for p, at in points.items()}))
        return Written(1, 1, self.refused)


class Member:
    read_committed = None
    losses = 0
    membership = Membership("group", 1, "me", None, frozenset({IN}))


class Running:
    def __init__(self, store: MetricStore) -> None:
        self.broker, self.tracker = Broker(), OffsetTracker()
        self.delivery = Delivery([], [""], backlog=4)
        self.gates: list[bool] = []
        self.delivery.gate = self.gates.append
        self.outcomes: list[Outcome] = []
        route = Route(self.broker, "answers", "updates", "dlq")
        self.member = Member()
        self.transactions = Transactions(route, self.broker, self.member, self.tracker, store, self.delivery)
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
    assert running.transactions.stored == {IN: CommitPoint(6)}
    running.broker.fails = SinkStopped("away")
    running.tracker.skipped(IN, 6)
    assert not await running.transactions.settle()
    assert running.transactions.stored == {IN: CommitPoint(6)}


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


@pytest.mark.parametrize(("complete", "left"), [(True, [b"other"]), (False, [b"done", b"other"])])
async def test_what_a_session_that_begins_anew_will_make_again_is_dropped(
    running: Running, complete: bool, left: list[bytes]
) -> None:
    running.put("done", 1)
    running.put("half", 2)
    running.put("other", 1, session="b")
    running.transactions.complete("a", 1)
    running.transactions.complete("b", 1)
    running.transactions.drop("a", complete=complete)
    running.transactions.remove("a")
    assert await running.transactions.settle()
    assert [keys for keys, _ in running.broker.got] == [left]
    assert running.delivery.waiting == 0


async def one_under_way_and_one_behind(running: Running) -> None:
    """The broker answers the first transaction when it is no longer ``held``."""
    running.broker.held.clear()
    running.put("one", 1)
    running.transactions.complete("a", 1)
    await eventually(lambda: running.broker.tried == 1)
    running.put("two", 2)
    running.transactions.complete("a", 2)


async def test_a_stop_waits_for_the_transaction_under_way(running: Running) -> None:
    """Offsets of a later one would cover its messages."""
    await one_under_way_and_one_behind(running)
    running.task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running.task
    asyncio.get_running_loop().call_later(0.05, running.broker.held.set)
    await running.transactions.stop(5.0)
    assert [keys for keys, _ in running.broker.got] == [[b"one"], [b"two"]]
    assert running.outcomes == [Outcome.DELIVERED] * 2


async def test_nothing_more_is_committed_where_the_transaction_under_way_does_not_end(
    running: Running,
) -> None:
    await one_under_way_and_one_behind(running)
    running.task.cancel()
    await running.transactions.stop(0.05)
    running.broker.held.set()
    await asyncio.sleep(0.05)
    assert running.broker.tried == 1
    assert not running.broker.got
    assert running.delivery.waiting == 2


async def test_a_transaction_owns_nothing_once_its_partitions_were_lost_though_they_came_back(
    running: Running,
) -> None:
    """Its producer may have been away from its broker all the time, and tries again."""
    running.broker.held.clear()
    running.put("one", 1)
    running.transactions.complete("a", 1)
    await eventually(lambda: running.broker.tried == 1)
    running.member.losses += 1
    running.broker.held.set()
    await eventually(lambda: bool(running.outcomes))
    assert running.broker.member == Member.membership._replace(partitions=frozenset())
    running.put("two", 1)
    await eventually(lambda: len(running.outcomes) == 2)
    assert running.broker.member == Member.membership


async def test_what_is_dropped_with_its_engine_is_told(running: Running) -> None:
    running.put("half", 1)
    running.transactions.forget()
    assert running.outcomes == [Outcome.STOPPED]
    assert running.delivery.waiting == 0
