"""Publish/subscribe over real loopback sockets, and the counting of missing messages."""

import asyncio
import time
from collections.abc import AsyncIterator
from itertools import count

import msgspec
import pytest
import zmq
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st

from feeds.source import Incoming, PublishRefused, Sink, SinkStopped, Source
from feeds.zmq_feed import GapCounter, Header, ZmqSink, ZmqSource
from tests.kit import until

ANYWHERE = "tcp://127.0.0.1:*"


def header(seq: int, source: str = "p", epoch: int = 1) -> Header:
    return Header(seq, "json", "trade.v1", source, epoch)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("xy"), st.booleans()), max_size=200))
def test_lost_is_what_was_sent_between_the_first_and_last_arrival(sent: list[tuple[str, str, bool]]) -> None:
    counter, numbers = GapCounter(), dict[tuple[str, str], int]()
    arrived: dict[tuple[str, str], list[int]] = {}
    for source, topic, delivered in sent:
        stream = (source, topic)
        numbers[stream] = numbers.get(stream, 0) + 1
        if delivered:
            arrived.setdefault(stream, []).append(numbers[stream])
            counter.see(topic.encode(), header(numbers[stream], source))
    expected = sum(seqs[-1] - seqs[0] + 1 - len(seqs) for seqs in arrived.values())
    assert counter.lost == expected


def test_a_restarted_publisher_and_a_repetition_are_no_loss() -> None:
    counter = GapCounter()
    missing = [counter.see(b"t", h) for h in (header(5), header(8), header(8), header(9), header(1, epoch=2))]
    assert missing == [0, 2, 0, 0, 0]
    assert counter.see(b"t", header(3, epoch=2)) == 1
    assert counter.lost == 3


@pytest.fixture
async def context() -> AsyncIterator[zmq.asyncio.Context]:
    context = zmq.asyncio.Context()
    yield context
    context.destroy(linger=0)


async def collect(source: ZmqSource, count: int) -> list[Incoming]:
    got: list[Incoming] = []
    async with asyncio.timeout(60):
        async for batch in source.batches():
            got += batch
            if len(got) >= count:
                break
    return got


async def joined(source: ZmqSource, sink: ZmqSink, topic: str = "md.hello") -> None:
    """Publish until the subscription takes effect (a slow joiner misses earlier messages)."""
    batches = source.batches()
    first = asyncio.ensure_future(anext(batches))
    async with asyncio.timeout(60):
        while not first.done():
            await sink.publish(topic, None, b"", {})
            await asyncio.sleep(0.01)
        await first
    await batches.aclose()
    await sink.publish(topic, None, b"joined", {})
    while (await collect(source, 1))[-1].payload != b"joined":
        pass


async def collect_now(source: ZmqSource) -> list[Incoming]:
    try:
        async with asyncio.timeout(0.3):
            return await anext(source.batches())
    except TimeoutError:
        return []


@pytest.mark.parametrize("publisher_binds", [True, False])
async def test_messages_arrive_in_order_with_their_headers(
    context: zmq.asyncio.Context, publisher_binds: bool
) -> None:
    if publisher_binds:
        sink = ZmqSink("out", ANYWHERE, context=context)
        await sink.start()
        source = ZmqSource("in", sink.endpoint, ["md."], context=context, clock_ns=lambda: 42)
        await source.start()
    else:
        source = ZmqSource("in", ANYWHERE, ["md."], bind=True, context=context, clock_ns=lambda: 42)
        await source.start()
        sink = ZmqSink("out", source.endpoint, bind=False, context=context)
        await sink.start()
    assert isinstance(source, Source)
    assert isinstance(sink, Sink)
    await joined(source, sink)
    for n in range(1000):
        await sink.publish("other", None, b"not subscribed", {})
        await sink.publish("md.a", b"key", b"%d" % n, {"schema": b"trade.v1", "encoding": b"msgpack"})
    got = await collect(source, 1000)
    assert [message.payload for message in got] == [b"%d" % n for n in range(1000)]
    assert [message.offset - got[0].offset for message in got] == list(range(1000))
    assert got[0].topic == "md.a"
    assert got[0].ts_recv_ns == 42
    assert got[6].headers == {"schema": b"trade.v1", "encoding": b"msgpack", "source": b"out", "seq": b"7"}
    assert source.lost == 0  # the other topic's numbers do not look like a gap
    await source.stop()
    await sink.stop()


async def test_each_message_is_stamped_when_it_is_read(context: zmq.asyncio.Context) -> None:
    """One that comes while a batch is read was sent after the batch began."""
    clock = count(1)
    sink = ZmqSink("p", ANYWHERE, context=context)
    await sink.start()
    source = ZmqSource("in", sink.endpoint, context=context, topics=["md."], clock_ns=lambda: next(clock))
    await source.start()
    await joined(source, sink)
    for _ in range(3):
        await sink.publish("md.t", None, b"x", {})
    stamps = [each.ts_recv_ns for each in await collect(source, 3)]
    assert len(set(stamps)) == 3
    assert stamps == sorted(stamps)
    await sink.stop()
    await source.stop()


async def test_it_is_read_up_to_when_its_queue_was_empty(context: zmq.asyncio.Context) -> None:
    """What waits in the queue, or was not pushed on, came later."""
    sink = ZmqSink("out", "inproc://behind", context=context)
    await sink.start()
    source = ZmqSource("in", "inproc://behind", [""], context=context, max_records=2)
    await source.start()
    await joined(source, sink, "md.a")
    sent_ns = time.monotonic_ns()
    for n in range(5):
        await sink.publish("md.a", None, b"%d" % n, {})
    batches, sizes = source.batches(), []
    for _ in range(3):
        sizes.append(len(await anext(batches)))
        assert source.read_until_ns < sent_ns
    assert sizes == [2, 2, 1]
    waiting = asyncio.ensure_future(anext(batches))
    await until(lambda: source.read_until_ns > sent_ns)
    await sink.publish("md.a", None, b"more", {})
    await waiting
    await batches.aclose()
    await source.stop()
    await sink.stop()


async def test_a_subscriber_that_cannot_keep_up_counts_its_losses(context: zmq.asyncio.Context) -> None:
    sink = ZmqSink("out", "inproc://flood", sndhwm=10, context=context)
    await sink.start()
    source = ZmqSource("in", "inproc://flood", [""], rcvhwm=10, context=context)
    await source.start()
    await joined(source, sink, "md.a")
    before = source.lost
    for n in range(5000):
        await sink.publish("md.a", None, b"%d" % n, {})
    got, sent = [], 5000
    while not got or got[-1].payload != b"%d" % (sent - 1):
        await sink.publish("md.a", None, b"%d" % sent, {})
        sent += 1
        got += await collect_now(source)
    assert len(got) < 5000
    assert source.lost - before == sent - len(got)
    await source.stop()
    await sink.stop()


async def test_messages_of_another_shape_come_with_their_fault(context: zmq.asyncio.Context) -> None:
    raw = context.socket(zmq.XPUB)
    raw.bind("inproc://raw")
    source = ZmqSource("in", "inproc://raw", [""], context=context)
    await source.start()
    assert await raw.recv() == b"\x01", "it has subscribed to everything"
    for frames in (
        [b"t"],
        [b"t", b"no header", b"{}"],
        [b"t", b"{}"],
        [b"t", msgspec.msgpack.encode(header(1)), b"{}", b"more"],
        [b"t", msgspec.msgpack.encode(header(1)), b"[]"],
    ):
        await raw.send_multipart(frames)
    one, headless, bare, four, full = await collect(source, 5)
    assert (bare.payload, bare.headers, bare.fault) == (b"{}", {}, None)
    assert (full.payload, full.headers["schema"], full.fault) == (b"[]", b"trade.v1", None)
    faults = [each.fault for each in (one, headless, four)]
    assert [each.reason for each in faults if each] == ["frames"] * 3
    assert "not 1" in faults[0].message
    assert "no header" in faults[1].message
    assert "not 4" in faults[2].message
    assert [each.offset for each in (one, headless, bare, four, full)] == [0, 1, 2, 3, 4]
    await source.stop()
    raw.close(linger=0)


async def test_refusals_and_bounded_stop(context: zmq.asyncio.Context) -> None:
    sink = ZmqSink("out", ANYWHERE, max_bytes=10, context=context)
    with pytest.raises(SinkStopped):
        await sink.publish("t", None, b"", {})
    await sink.start()
    with pytest.raises(PublishRefused, match="11 bytes"):
        await sink.publish("t", None, b"x" * 11, {})
    source = ZmqSource("in", sink.endpoint, [""], context=context)
    await source.start()
    ended = asyncio.ensure_future(collect(source, 1))
    await asyncio.sleep(0.02)
    await asyncio.wait_for(source.stop(), 60)
    assert await asyncio.wait_for(ended, 60) == []
    with pytest.raises(zmq.ZMQError):
        await ZmqSource("in", sink.endpoint, [""], bind=True, context=context).start()
    await sink.stop()


def test_a_number_far_ahead_is_no_count_and_the_next_one_is_compared_with_the_one_before() -> None:
    counter = GapCounter()
    seen = [counter.see(b"t", header(n)) for n in (5, 2**63, 6, 2**64 - 1, 9)]
    assert seen == [0, 0, 0, 0, 2]
