"""Faults of a daemon that reads and writes Kafka: of its feed, broker, engine, disks and clients."""

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from itertools import count

from confluent_kafka import Producer

from feeds.market_data import Answer
from tests.e2e.faults.desk import HELD_BACK, Desk
from tests.e2e.faults.fault import Fault, again
from tests.kit import trade
from tests.kit.http import head, request

Cause = Callable[[Desk], AsyncIterator[None]]
OFFSET_COMMIT, PRODUCE = 8, 0
GROUP_AUTHORIZATION_FAILED, TOPIC_AUTHORIZATION_FAILED = 30, 29
LARGE, WAITING = 550_000, 4
"""Bytes of a message, of which a fetch has one, and how many wait at least: the broker forgets what is more
than eight."""
OLD_S, SLOW_MS = 300.0, 500


def malformed(desk: Desk) -> contextlib.AbstractAsyncContextManager[None]:
    return again(lambda: desk.topics.produce([("V:AAA", b"{")]))


def gap(desk: Desk) -> contextlib.AbstractAsyncContextManager[None]:
    return again(lambda: desk.market.send(skip=3))


def zero_sizes(desk: Desk) -> contextlib.AbstractAsyncContextManager[None]:
    return again(lambda: desk.market.send(n=4, size="0"))


def clock_ahead(desk: Desk) -> contextlib.AbstractAsyncContextManager[None]:
    return again(lambda: desk.market.send(n=4, receipt_s=-0.1))


def late(desk: Desk) -> contextlib.AbstractAsyncContextManager[None]:
    return again(lambda: desk.market.send(n=4, event_s=-30))


def too_many_symbols(desk: Desk) -> contextlib.AbstractAsyncContextManager[None]:
    return again(lambda: desk.market.send("V:PB", 3))


@contextlib.asynccontextmanager
async def silent_symbol(desk: Desk) -> AsyncIterator[None]:
    desk.market.quiet.add("V:AAA")
    try:
        yield
    finally:
        desk.market.quiet.clear()


@contextlib.asynccontextmanager
async def unknown_table(desk: Desk) -> AsyncIterator[None]:
    desk.reload(desk.text + "\n[nothing]\nof = 1\n")
    try:
        yield
    finally:
        desk.reload(desk.text)


@contextlib.asynccontextmanager
async def key_needs_restart(desk: Desk) -> AsyncIterator[None]:
    desk.reload(desk.text.replace("[pool]\n", "[pool]\nblock_size = 32\n"))
    try:
        yield
    finally:
        desk.reload(desk.text)


@contextlib.asynccontextmanager
async def broker_down(desk: Desk) -> AsyncIterator[None]:
    desk.broker.set_down()
    try:
        yield
    finally:
        desk.broker.set_up()


@contextlib.asynccontextmanager
async def commits_refused(desk: Desk) -> AsyncIterator[None]:
    desk.broker.refuse(OFFSET_COMMIT, GROUP_AUTHORIZATION_FAILED)
    try:
        yield
    finally:
        desk.broker.accept(OFFSET_COMMIT)


@contextlib.asynccontextmanager
async def answers_refused(desk: Desk) -> AsyncIterator[None]:

    async def refuse() -> None:
        desk.broker.refuse_topic("answers.v1", PRODUCE, TOPIC_AUTHORIZATION_FAILED)

    async with again(refuse, 1.0):
        yield


@contextlib.asynccontextmanager
async def backlog(desk: Desk) -> AsyncIterator[None]:
    """What an outage held back comes at once, over a slow line: old, large records that nobody reads."""
    payload = trade("V:NOBODY", time.time_ns(), note="x" * LARGE)
    producer = Producer({"bootstrap.servers": desk.broker.bootstrap, "linger.ms": 1})
    lag = partial(desk.daemon.metric, "foretick_consumer_lag_records", partition=f"{HELD_BACK}/0")

    async def hold_back() -> None:
        for _ in range(max(0, WAITING - int(await asyncio.to_thread(lag)))):
            producer.produce(HELD_BACK, payload, timestamp=int((time.time() - OLD_S) * 1000))
        producer.poll(0)

    desk.broker.delay(SLOW_MS)
    try:
        async with again(hold_back, 1.0):
            yield
    finally:
        desk.broker.delay(0)
        await asyncio.to_thread(producer.flush, 30)


@contextlib.asynccontextmanager
async def gateway_stopped(desk: Desk) -> AsyncIterator[None]:
    desk.daemon.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        desk.daemon.signal(signal.SIGCONT)


@contextlib.asynccontextmanager
async def engine_killed(desk: Desk) -> AsyncIterator[None]:
    os.kill(desk.engine(), signal.SIGKILL)
    yield


@contextlib.asynccontextmanager
async def engine_hung(desk: Desk) -> AsyncIterator[None]:
    os.kill(desk.engine(), signal.SIGSTOP)
    yield


@contextlib.asynccontextmanager
async def engine_loads_slowly(desk: Desk) -> AsyncIterator[None]:
    """The engine dies with its spare, and the next one gets a twentieth of a core."""

    def send(number: signal.Signals) -> None:
        for each in desk.daemon.engines():
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, number)

    async def slow() -> None:
        send(signal.SIGSTOP)
        await asyncio.sleep(1.0)
        send(signal.SIGCONT)

    send(signal.SIGKILL)
    async with again(slow, 0.05):
        yield


@contextlib.asynccontextmanager
async def listener_too_slow(desk: Desk) -> AsyncIterator[None]:
    """A client that listens to all events and reads half of them: one that reads much less is cut off."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32_768)
        client.connect(("127.0.0.1", desk.daemon.http_port))
        client.sendall(head("GET", "/v1/events", {"host": f"127.0.0.1:{desk.daemon.http_port}"}))
        client.setblocking(False)

        async def read_a_little() -> None:
            with contextlib.suppress(BlockingIOError):
                assert client.recv(10_000), "it was cut off"

        async with again(read_a_little, 1.0):
            yield


@contextlib.asynccontextmanager
async def snapshots_read_only(desk: Desk) -> AsyncIterator[None]:
    await asyncio.to_thread(desk.disks.snapshots.freeze)
    try:
        yield
    finally:
        desk.disks.snapshots.thaw()


@contextlib.asynccontextmanager
async def snapshot_disk_full(desk: Desk) -> AsyncIterator[None]:
    async def fill() -> None:
        await asyncio.to_thread(desk.disks.snapshots.fill)

    try:
        async with again(fill):
            yield
    finally:
        desk.disks.snapshots.empty()


@contextlib.asynccontextmanager
async def idle_read_only(desk: Desk) -> AsyncIterator[None]:
    await asyncio.to_thread(desk.disks.idle.freeze)
    try:
        async with again(lambda: desk.market.send("V:IDLE", 3), 4.0):
            yield
    finally:
        desk.disks.idle.thaw()


def engine_slow(desk: Desk, share: float) -> contextlib.AbstractAsyncContextManager[None]:
    """Stopped again and again, so that this ``share`` of bars is late."""

    async def stop() -> None:
        late, bars = (desk.daemon.metric(f"foretick_{name}_total") for name in ("freshness_misses", "bars"))
        if late - begun[0] < share * (bars - begun[1]):
            engine = desk.engine()
            os.kill(engine, signal.SIGSTOP)
            await asyncio.sleep(STOPPED_S)
            os.kill(engine, signal.SIGCONT)
            await asyncio.sleep(1.0)

    begun = [desk.daemon.metric(f"foretick_{name}_total") for name in ("freshness_misses", "bars")]
    return again(stop, 0.1)


STOPPED_S = 4.5
"""An engine's stop, longer than the freshness objective of three bars."""


def engine_much_too_slow(desk: Desk) -> contextlib.AbstractAsyncContextManager[None]:
    return engine_slow(desk, 0.9)


def engine_a_little_too_slow(desk: Desk) -> contextlib.AbstractAsyncContextManager[None]:
    return engine_slow(desk, 0.085)


@contextlib.asynccontextmanager
async def too_many_prompts(desk: Desk) -> AsyncIterator[None]:
    """Long ones, each of its own, so that none is found in the cache."""
    numbers = count()

    async def ask() -> None:
        body = {"model": "chat", "max_tokens": 1}
        body |= {"messages": [{"role": "user", "content": f"{next(numbers)} why " + "the price " * 900}]}
        with contextlib.suppress(TimeoutError, OSError):
            await request(desk.daemon.http_port, "POST", "/v1/chat/completions", body)

    async with contextlib.AsyncExitStack() as stack:
        for _ in range(8):
            await stack.enter_async_context(again(ask, 0))
        yield


@contextlib.asynccontextmanager
async def wrong_labels(desk: Desk) -> AsyncIterator[None]:
    """Labels that say of one question's answers that another choice was right; then ones that agree."""

    async def label(right: bool, times: int) -> None:
        sent = 0
        for answer in reversed(desk.topics.answers("aaa")):
            if sent < times and answer.question == "trend" and (choice := chosen(answer, right)):
                body = {"session": "aaa", "question": answer.question, "choice": choice}
                body |= {"data_version": answer.data_version}
                reply = await request(desk.daemon.http_port, "POST", "/v1/labels", body)
                sent += reply.status == 200
        assert sent == times

    # each of the first asks for 0.0045 more than the target of 0.9, each of the others for 0.0005 less
    await label(False, 22)
    try:
        yield
    finally:
        await label(True, 30)


def chosen(answer: Answer, right: bool) -> str:
    """A choice in the answer's set, or one that is not; "" where there is none."""
    if answer.choice_set is None or answer.choice is None:
        return ""
    if right:
        return answer.choice if answer.choice in answer.choice_set else ""
    others = {"UP", "DOWN", "YES", "NO"} - {answer.choice}
    pair = ("UP", "DOWN") if answer.choice in ("UP", "DOWN") else ("YES", "NO")
    return next((each for each in pair if each in others and each not in answer.choice_set), "")


@contextlib.asynccontextmanager
async def another_market(desk: Desk) -> AsyncIterator[None]:
    desk.market.swing = 0
    try:
        yield
    finally:
        desk.market.swing = 4


FAULTS: tuple[Fault[Desk], ...] = (
    Fault("malformed", malformed, "ForetickDeadLetters", "stage read",
          "metrics.dead_letters_total", "stage read"),
    Fault("gap", gap, "ForetickFeedGap", "source kafka were lost",
          "metrics.records_lost_upstream_total", "source kafka"),
    Fault("zero-sizes", zero_sizes, "ForetickFeedFaults", "fault zero_size",
          "metrics.feed_faults_total", "zero_size"),
    Fault("clock-ahead", clock_ahead, "ForetickClockSkewed", "before their event",
          "metrics.clock_skew_records_total", "source kafka"),
    Fault("late", late, "ForetickRecordsLate", "session aaa",
          "metrics.records_late_total", "session aaa"),
    Fault("too-many-symbols", too_many_symbols, "ForetickSymbolsRefused", "limit",
          "metrics.records_unopened_total", "limit"),
    Fault("silent-symbol", silent_symbol, "ForetickFeedSilent", "1 symbols of source kafka are silent",
          "daemon.sessions", "silent: aaa"),
    Fault("unknown-table", unknown_table, "ForetickConfigurationRefused", "did not take",
          "configuration", "nothing"),
    Fault("key-needs-restart", key_needs_restart, "ForetickConfigurationRefused", "did not take",
          "metrics.config_reloads_total", "partly"),
    Fault("broker-down", broker_down, "ForetickSourceDown", "Source kafka",
          "source.kafka", "127.0.0.1"),
    Fault("commits-refused", commits_refused, "ForetickCheckpointStalled", "cannot commit",
          "metrics.checkpoints_total", "failed"),
    Fault("answers-refused", answers_refused, "ForetickPublishingFails", "cannot publish",
          "metrics.answers_failed_total", "publish"),
    Fault("backlog", backlog, "ForetickLagGrowing", f"{HELD_BACK}/0 more than a minute behind",
          "metrics.consumer_lag_seconds", HELD_BACK),
    Fault("gateway-stopped", gateway_stopped, "ForetickDown", "does not answer",
          "daemon", "does not reply"),
    Fault("engine-killed", engine_killed, "ForetickEngineRestarted", "was started again",
          "metrics.engine_restarts_total", "above 0", before_s=540.0),
    Fault("listener-too-slow", listener_too_slow, "ForetickListenersTooSlow", "too slowly",
          "metrics.events_dropped_total", "sse"),
    Fault("snapshots-read-only", snapshots_read_only, "ForetickSnapshotsFail", "disk",
          "recovery.directory", "cannot write"),
    Fault("snapshot-disk-full", snapshot_disk_full, "ForetickSnapshotDiskFull", "left",
          "recovery.directory", "free"),
    Fault("idle-read-only", idle_read_only, "ForetickIdleSessionsNotSpilled", "cannot write or read",
          "pool.spill_dir", "cannot write"),
    Fault("engine-much-too-slow", engine_much_too_slow, "ForetickFreshnessBurnsFast", "two days",
          "metrics.freshness_misses_total", "session", before_s=60.0,
          after=("ForetickFreshnessBurnsSlowly",)),
    Fault("engine-a-little-too-slow", engine_a_little_too_slow, "ForetickFreshnessBurnsSlowly", "five days",
          "metrics.freshness_misses_total", "above 0.01", before_s=300.0),
    Fault("too-many-prompts", too_many_prompts, "ForetickSaturated", "90 %",
          "metrics.utilisation_ratio", "above 0.9"),
    Fault("wrong-labels", wrong_labels, "ForetickCoverageLost", "session aaa",
          "metrics.adapted_coverage", "session aaa"),
    Fault("another-market", another_market, "ForetickConfidenceDrifts", "unlike those of the calibration",
          "metrics.gap_ratio", "session"),
    Fault("engine-hung", engine_hung, "ForetickEngineRestarted", "was started again",
          "metrics.engine_restarts_total", "above 0"),
    Fault("engine-loads-slowly", engine_loads_slowly, "ForetickEngineDown", "has no engine",
          "metrics.engine_up", "below 1"),
)  # fmt: skip
"""In this order: what an engine is away for is minutes by the fast clock."""
