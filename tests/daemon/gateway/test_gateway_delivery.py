"""Sinks do not wait for each other; messages that cannot wait are dropped, oldest first."""

from collections.abc import Callable

import pytest

from daemon.gateway.checkpoint.delivery import Delivery, DeliveryOutcome, RefusedMessage
from daemon.supervision import Tasks
from feeds.connector import SinkRoute
from feeds.market_data import DataUpdated
from tests.kit import MemorySink, until


def update(version: int) -> DataUpdated:
    return DataUpdated(session="aaa", data_version=version, as_of=1, bars=1)


def versions(sink: MemorySink) -> list[int]:
    return [message.data_version for message in sink.messages("u")]  # type: ignore[union-attr]  # all updates


def settled(refused: RefusedMessage, settle: Callable[[], None]) -> None:
    settle()


async def test_a_sink_that_is_away_holds_up_neither_the_other_nor_its_later_messages():
    away, there = MemorySink("away"), MemorySink("there")
    away.acknowledging.clear()
    outcomes: list[DeliveryOutcome] = []
    d = Delivery([SinkRoute(away, "a", "u"), SinkRoute(there, "a", "u")], ["aaa"], settled)
    d.start(Tasks())
    for version in range(3):
        d.put("aaa", update(version), "aaa", {}, outcomes.append)
        await until(lambda: len(versions(there)) == version + 1)  # noqa: B023  # awaited in this round
    assert d.waiting == 3
    assert outcomes == []
    away.acknowledging.set()
    await until(lambda: len(outcomes) == 3)
    assert versions(away) == versions(there) == [0, 1, 2]
    assert await d.stop(1.0) == 0


async def test_the_worst_outcome_of_a_message_counts_once():
    refusing, there = MemorySink("refusing"), MemorySink("there")
    refusing.refuses = lambda payload: True
    outcomes: list[DeliveryOutcome] = []
    d = Delivery([SinkRoute(refusing, "a", "u"), SinkRoute(there, "a", "u")], ["aaa"], settled)
    d.start(Tasks())
    d.put("aaa", update(1), "aaa", {}, outcomes.append)
    await until(lambda: bool(outcomes))
    assert outcomes == [DeliveryOutcome.REFUSED]
    assert versions(there) == [1]
    assert await d.stop(1.0) == 0


async def test_a_message_no_sink_carries_is_settled_at_once():
    outcomes: list[DeliveryOutcome] = []
    d = Delivery([SinkRoute(MemorySink(), "a")], ["aaa"], settled)
    d.put("aaa", update(1), "aaa", {}, outcomes.append)
    assert outcomes == [DeliveryOutcome.DELIVERED]
    assert d.waiting == 0


@pytest.mark.parametrize("lossless", [True, False])
async def test_only_messages_that_cannot_be_read_again_are_dropped(lossless: bool):
    """With a dead sink, a feed that cannot wait keeps a bounded number of messages, the newest."""
    sink = MemorySink()
    sink.acknowledging.clear()
    outcomes: list[DeliveryOutcome] = []
    d = Delivery([SinkRoute(sink, "a", "u")], ["aaa"], settled, lossless=lossless, backlog=4)
    d.start(Tasks())
    d.put("aaa", update(0), "aaa", {}, outcomes.append)
    await until(lambda: versions(sink) == [0])  # in flight: the sink has it, unacknowledged
    for version in range(1, 11):
        d.put("aaa", update(version), "aaa", {}, outcomes.append)
    assert outcomes == ([] if lossless else [DeliveryOutcome.REFUSED] * 6)
    sink.acknowledging.set()
    await until(lambda: d.waiting == 0)
    assert versions(sink) == [0, *range(1 if lossless else 7, 11)]
    assert await d.stop(1.0) == 0
