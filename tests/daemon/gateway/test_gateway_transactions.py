"""What goes into a transaction, and when: whole versions, in order, with the offsets that cover them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection

import pytest

from daemon.gateway.checkpoint.delivery import DeliveryOutcome, RefusedMessage
from daemon.gateway.checkpoint.offsets import OffsetTracker
from daemon.gateway.checkpoint.outbox import Outbox
from daemon.supervision import Tasks
from feeds.connector import SinkRoute
from feeds.kafka_transactions import Fenced
from feeds.market_data import DataUpdated, DeadLetter
from feeds.source import CommitPoint, Membership, Partition, SinkStopped
from metrics.store import MetricStore
from tests.kit import MemorySink, until
from tests.kit.gateway import Broker, Member, make_checkpoint

LABELS = {name: ["x", "test"] for name in ("session", "source", "sink", "policy", "eviction")}
IN, OTHER = ("in", 0), ("in", 1)


class Running:
    def __init__(self, store: MetricStore) -> None:
        self.broker, self.tracker = Broker(), OffsetTracker()
        self.outcomes: list[DeliveryOutcome] = []
        route = SinkRoute(self.broker, "answers", "updates", "dlq")
        self.outbox = Outbox([route], ["", "a", "b"], store, self.tracker.source_of, backlog=4)
        self.delivery = self.outbox.delivery
        self.member = Member(IN, OTHER)
        self.checkpoint = make_checkpoint(
            self.member,
            self.tracker,
            self.outbox,
            store,
            sink=self.broker,
            on_revoked=self.leave,
            is_held=lambda: self.held,
        )
        self.gone: list[Partition] = []
        self.held = False
        self.task = asyncio.create_task(self.checkpoint.run())

    def leave(self, partitions: Collection[Partition]) -> None:
        self.gone += partitions
        for partition in partitions:
            self.tracker.leave(partition)

    def answer(self, session: str, version: int, stream: Partition) -> None:
        """One message of a version, whose record has its offset, and all of it is complete."""
        self.tracker.passed_on(session, stream, [version])
        self.put(f"{session}{version}", version, session)
        self.tracker.acknowledge(session, stream, version + 1)
        self.outbox.complete(session, version)

    def put(self, key: str, version: int, session: str = "a") -> None:
        message = DataUpdated(session=session, data_version=version, as_of=0, bars=[])
        self.outbox.put(session, message, key, {}, delivered=self.outcomes.append)


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    store = MetricStore.create(LABELS)
    made = Running(store)
    yield made
    made.task.cancel()
    with contextlib.suppress(asyncio.CancelledError, Fenced, ValueError):
        await made.task
    store.unlink()
    store.close()


async def test_versions_go_out_whole_and_in_order(running: Running) -> None:
    running.tracker.passed_on("a", IN, (10, 11))
    running.put("second", 2)
    running.put("first", 1)
    running.put("third", 3)
    assert not running.broker.got
    running.tracker.acknowledge("a", IN, 11)
    running.outbox.complete("a", 1)
    running.outbox.complete("a", 2)
    await until(lambda: len(running.outcomes) == 2)
    assert running.broker.got == [([b"first", b"second"], {IN: 11})]
    assert running.outcomes == [DeliveryOutcome.DELIVERED] * 2
    assert running.delivery.waiting == 1


async def test_offsets_alone_and_dead_letters_need_no_version(running: Running) -> None:
    running.tracker.skipped(IN, 4)
    dead_letter = DeadLetter(topic="in", partition=0, offset=4, error="e", reason="json", payload=b"")
    running.outbox.put("", dead_letter, "rejected", {}, delivered=running.outcomes.append)
    await until(lambda: running.outcomes == [DeliveryOutcome.DELIVERED])
    assert running.broker.got == [([b"rejected"], {IN: 5})]
    running.tracker.skipped(IN, 5)
    assert await running.checkpoint.commit()
    assert running.broker.got[1:] == [([], {IN: 6})]
    assert running.checkpoint.stored == {IN: CommitPoint(6)}
    running.broker.fails = SinkStopped("away")
    running.tracker.skipped(IN, 6)
    assert not await running.checkpoint.commit()
    assert running.checkpoint.stored == {IN: CommitPoint(6)}


async def test_what_is_not_complete_is_forgotten_with_its_engine(running: Running) -> None:
    running.broker.held.clear()
    running.put("done", 1)
    running.put("half", 2)
    running.outbox.complete("a", 1)
    running.outbox.forget()
    assert running.delivery.waiting == 1
    assert not await running.checkpoint.commit(within_s=0.05)
    # the next engine may begin before what is about to be committed
    running.put("once more", 1)
    running.broker.held.set()
    assert await running.checkpoint.commit()
    running.put("again", 2)
    running.outbox.complete("a", 2)
    assert await running.checkpoint.commit()
    assert [keys for keys, _ in running.broker.got] == [[b"done"], [b"once more", b"again"]]


async def test_a_session_that_is_removed_leaves_nothing_behind(running: Running) -> None:
    running.put("last", 7)
    running.outbox.remove("a")
    await until(lambda: running.outcomes == [DeliveryOutcome.DELIVERED])


async def test_a_refused_message_is_told_and_its_letter_goes_with_the_offsets_that_cover_it(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[RefusedMessage] = []

    def refused(found: RefusedMessage, settle: Callable[[], None]) -> None:
        told.append(found)
        dead_letter = DeadLetter(topic="in", partition=0, offset=4, error="e", reason="json", payload=b"")
        running.outbox.put("", dead_letter, "rejected", {}, delivered=running.outcomes.append)

    running.outbox._refused = refused  # type: ignore[method-assign]  # the test's
    running.broker.refuses = frozenset({b"large"})
    running.tracker.passed_on("a", IN, [1])
    running.put("one", 1)
    running.put("large", 1)
    running.tracker.acknowledge("a", IN, 2)
    running.outbox.complete("a", 1)
    await until(lambda: len(running.outcomes) == 3)
    assert running.outcomes == [DeliveryOutcome.REFUSED, DeliveryOutcome.DELIVERED, DeliveryOutcome.DELIVERED]
    assert running.broker.got == [([b"one", b"rejected"], {IN: 2})]
    assert [(each.topic, each.key, each.reason) for each in told] == [("updates", b"large", "too_large")]
    assert isinstance(told[0].message, DataUpdated)
    assert running.delivery.waiting == 0
    running.broker.refuses = frozenset({b"rejected"})
    refused(told[0], lambda: None)
    await until(lambda: len(running.outcomes) == 4)
    assert (len(told), running.delivery.waiting) == (2, 0), "of a letter there is no letter"
    assert "refused a DLQ record" in caplog.text


async def test_too_many_waiting_close_the_gate(running: Running) -> None:
    running.broker.held.clear()
    for n in range(4):
        running.put(str(n), 1)
    assert not running.delivery.gate.is_set()
    running.outbox.complete("a", 1)
    running.broker.held.set()
    await until(running.delivery.gate.is_set)


async def test_a_fenced_producer_ends_the_task_and_nothing_more_is_committed(running: Running) -> None:
    running.broker.fails = Fenced("another process")
    running.put("one", 1)
    running.outbox.complete("a", 1)
    with pytest.raises(Fenced):
        await running.task
    running.broker.fails = None
    assert await running.checkpoint.commit()
    await running.checkpoint.stop(1.0)
    assert not running.broker.got


async def test_stopping_commits_what_is_complete(running: Running) -> None:
    running.task.cancel()
    running.put("one", 1)
    running.outbox.complete("a", 1)
    await running.checkpoint.stop(1.0)
    assert [keys for keys, _ in running.broker.got] == [[b"one"]]
    running.broker.fails = SinkStopped("late")
    running.put("two", 1)
    await running.checkpoint.stop(1.0)
    assert running.delivery.waiting == 1


@pytest.mark.parametrize(("complete", "left"), [(True, [b"other"]), (False, [b"done", b"other"])])
async def test_what_a_session_that_begins_anew_will_make_again_is_dropped(
    running: Running, complete: bool, left: list[bytes]
) -> None:
    running.put("done", 1)
    running.put("half", 2)
    running.put("other", 1, session="b")
    running.outbox.complete("a", 1)
    running.outbox.complete("b", 1)
    running.outbox.drop("a", complete=complete)
    running.outbox.remove("a")
    assert await running.checkpoint.commit()
    assert [keys for keys, _ in running.broker.got] == [left]
    assert running.delivery.waiting == 0


async def one_under_way_and_one_behind(running: Running) -> None:
    """The broker answers the first transaction when it is no longer ``held``."""
    running.broker.held.clear()
    running.put("one", 1)
    running.outbox.complete("a", 1)
    await until(lambda: running.broker.tried == 1)
    running.put("two", 2)
    running.outbox.complete("a", 2)


async def test_a_stop_waits_for_the_transaction_under_way(running: Running) -> None:
    """Offsets of a later one would cover its messages."""
    await one_under_way_and_one_behind(running)
    running.task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running.task
    asyncio.get_running_loop().call_later(0.05, running.broker.held.set)
    await running.checkpoint.stop(60.0)
    assert [keys for keys, _ in running.broker.got] == [[b"one"], [b"two"]]
    assert running.outcomes == [DeliveryOutcome.DELIVERED] * 2


async def test_nothing_more_is_committed_where_the_transaction_under_way_does_not_end(
    running: Running,
) -> None:
    await one_under_way_and_one_behind(running)
    running.task.cancel()
    await running.checkpoint.stop(0.05)
    running.broker.held.set()
    await asyncio.sleep(0.05)
    assert running.broker.tried == 1
    assert not running.broker.got
    assert running.delivery.waiting == 2


@pytest.mark.parametrize("floor", [0, 99], ids=["offsets", "messages"])
async def test_what_went_to_another_member_is_dropped_and_the_rest_goes_out(
    running: Running, floor: int
) -> None:
    """Its new owner makes it again. The refused transaction has no effect, so nothing of it is in doubt.

    Below ``floor`` no offset is committed: an answer alone needs its partition, too.
    """
    running.tracker.begin(IN, 0, floor, again=True)
    running.broker.held.clear()
    running.answer("a", 1, IN)
    await until(lambda: running.broker.tried == 1)
    running.answer("a", 2, IN)
    running.answer("b", 1, OTHER)
    running.member.owns(OTHER)
    running.broker.held.set()
    assert await running.checkpoint.commit()
    assert running.broker.got == [([b"b1"], {OTHER: 2})]
    assert running.gone == [IN]
    assert running.outcomes == [DeliveryOutcome.STOPPED, DeliveryOutcome.STOPPED, DeliveryOutcome.DELIVERED]
    assert running.delivery.waiting == 0
    assert await running.checkpoint.commit(), "nothing names what has left"
    assert len(running.broker.got) == 1


async def test_a_transaction_waits_until_it_is_known_what_others_have_answered(running: Running) -> None:
    running.member.owns(placing=[IN])
    running.answer("a", 1, IN)
    assert not await running.checkpoint.commit(within_s=0.1)
    running.answer("b", 1, OTHER)
    running.member.owns(IN, OTHER)
    assert await running.checkpoint.commit()
    assert running.broker.got == [([b"a1"], {IN: 2}), ([b"b1"], {OTHER: 2})]
    assert not running.gone


@pytest.mark.parametrize("member", [None, Membership("g", placing=frozenset({IN}))])
async def test_a_source_that_nobody_reads_does_not_learn_what_is_its_own(
    running: Running, member: Membership | None
) -> None:
    """As where an engine ended in a rebalance: what is not known to be ours is made again."""
    running.member.membership = member
    running.answer("a", 1, IN)
    assert not await running.checkpoint.commit(within_s=0.1)
    with running.checkpoint.giving_up():
        assert await running.checkpoint.commit()
    assert running.gone == [IN]
    assert running.outcomes == [DeliveryOutcome.STOPPED]
    assert not running.broker.got


async def test_nor_does_one_that_is_not_read_until_transactions_are_committed(running: Running) -> None:
    """Where it could not be learnt in a rebalance whether others had the partition, only reading tells."""
    running.member.membership = Membership("g", placing=frozenset({IN}))
    running.answer("a", 1, IN)
    assert not await running.checkpoint.commit(within_s=0.1)
    running.held = True
    assert await running.checkpoint.commit()
    assert running.gone == [IN]
    running.member.membership = None
    running.answer("b", 1, OTHER)
    assert not await running.checkpoint.commit(within_s=0.1), "a new generation is joined without a read"


async def test_a_transaction_that_others_have_overtaken_is_dropped_though_its_partition_is_back(
    running: Running,
) -> None:
    """Its producer may have been away from its broker all the time, and tries again."""
    running.broker.held.clear()
    running.answer("a", 1, IN)
    running.answer("b", 1, IN)
    await until(lambda: running.broker.tried == 1)
    # others have answered "a"; "b" goes on behind what is complete of it
    running.outbox.drop("a", complete=True)
    running.outbox.drop("b", complete=False)
    running.checkpoint.rewind(IN)
    running.tracker.begin(IN, 0, 9)
    running.broker.held.set()
    assert await running.checkpoint.commit()
    assert running.broker.got == [([b"b1"], {IN: 9})]
    assert not running.gone, "it is ours"
    running.answer("a", 10, IN)
    assert await running.checkpoint.commit()
    assert running.broker.got[1:] == [([b"a10"], {IN: 11})]


@pytest.mark.parametrize("error", [Fenced("another process"), ValueError("a defect")])
async def test_nobody_waits_for_what_will_not_be_committed(running: Running, error: Exception) -> None:
    running.broker.held.clear()
    running.broker.fails = error
    running.answer("a", 1, IN)
    await until(lambda: running.broker.tried == 1)
    settling = [asyncio.create_task(running.checkpoint.commit(within_s=600.0)) for _ in range(2)]
    await asyncio.sleep(0)
    running.broker.held.set()
    with pytest.raises(type(error)):
        await running.task
    async with asyncio.timeout(10):
        await asyncio.gather(*settling)


async def test_a_stop_tells_those_that_wait(running: Running) -> None:
    running.broker.held.clear()
    settling = asyncio.create_task(running.checkpoint.commit(within_s=600.0))
    running.answer("a", 1, IN)
    await until(lambda: running.broker.tried == 1)
    running.task.cancel()
    running.broker.held.set()
    await running.checkpoint.stop(60.0)
    async with asyncio.timeout(10):
        await settling


async def test_what_is_dropped_with_its_engine_is_told(running: Running) -> None:
    running.put("half", 1)
    running.outbox.forget()
    assert running.outcomes == [DeliveryOutcome.STOPPED]
    assert running.delivery.waiting == 0


async def test_a_dead_letter_is_settled_once_the_sinks_have_it_that_take_it_by_themselves() -> None:
    """As answers are. The transaction has it with the offset that covers its message, or before."""
    other, settled = MemorySink("other"), list[int]()
    other.acknowledging.clear()
    routes = [SinkRoute(Broker(), "answers", "updates", "dlq"), SinkRoute(other, "", dead_letters="dlq")]
    store = MetricStore.local(LABELS)
    outbox = Outbox(routes, [""], store)
    outbox.delivery.start(Tasks())
    dead_letter = DeadLetter(topic="in", partition=0, offset=4, error="e", reason="json", payload=b"")
    outbox.dead_letter(dead_letter, lambda: settled.append(1))
    await until(lambda: other.messages("dlq"))
    assert [each.message.topic for each in outbox.take()] == ["dlq"]
    assert settled == []
    other.acknowledging.set()
    await until(lambda: settled == [1])
    await outbox.delivery.stop(1.0)
