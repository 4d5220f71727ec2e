"""Sessions that are opened, reset and closed while partitions, clients and engines come and go.

The gateway is the daemon's own; the test answers its commands as an engine would.
"""

import asyncio
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from daemon import protocol
from daemon.api import messages
from daemon.api.generation import Failed
from daemon.config.schema import PatternConfig
from daemon.gateway.checkpoint.offsets import OffsetTracker
from daemon.gateway.checkpoint.state import ProgressStore
from daemon.gateway.standby import Standby
from daemon.gateway.wiring import make_gateway
from daemon.progress import Opened, Progress, StoredProgress, encode_stored
from daemon.session_life import Event, State
from feeds.durations import Duration
from feeds.source import CommitPoint
from metrics.store import MetricStore
from tests.daemon.gateway.test_gateway_patterns import tick
from tests.kit.config import inproc_config, log_source
from tests.kit.gateway import Broker, Commands, Log, SourceEvents, inputs_of
from tests.kit.records import SECOND

PARTITION = ("t", 0)
PATTERN = PatternConfig(match="V:*", idle_timeout=Duration(SECOND), retention_tokens=1024)
NO_ROOM = "the pool has no room"


async def pass_on() -> None:
    """Let tasks run that wait for nothing."""
    for _ in range(30):
        await asyncio.sleep(0)


async def given_up(work: Coroutine[Any, Any, object]) -> None:
    """Begin this, and cancel it while it waits."""
    task = asyncio.create_task(work)
    await pass_on()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


class Daemon:
    """A gateway without a source and an engine."""

    def __init__(self, symbols: tuple[str, ...], **more: Any) -> None:
        self.gateway = make_gateway(
            inproc_config(symbols, source=log_source(), **more),
            source=Log({PARTITION: CommitPoint(0)}),
            routes=[],
            connect=lambda ring, wake_fd: None,  # type: ignore[arg-type,return-value]  # it is never called
        )
        self.sent = Commands()
        engine = self.gateway.engine
        engine._client = self.sent  # type: ignore[assignment]  # as much of it as is used
        engine.ready.set()
        self.live, self.runner = self.gateway.live, self.gateway.input.runners[0]
        self.group, self.tracker = self.runner.group, self.runner.tracker
        self.gateway.input.engine_starts()

    def state(self, name: str) -> State:
        return self.gateway.input.runners[0].group._lives.state(name)

    @property
    def names(self) -> list[str]:
        return list(self.gateway.sessions.states)

    def of(self, kind: type[Any]) -> list[Any]:
        return [each for each in self.sent if isinstance(each, kind)]

    def reply(self, command: Any, why_not: str = "") -> None:
        """As the engine does."""
        if why_not:
            self.gateway._on_event(Failed(command.id, "bad_request", why_not))
        elif isinstance(command, protocol.OpenSession):
            self.gateway._on_event(protocol.SessionAdded(command.id, {}, ()))
        elif hasattr(command, "id"):
            self.gateway._on_event(protocol.Done(command.id))

    async def until_done(self, task: "asyncio.Task[Any]", **why_not: str) -> Any:
        """Reply to everything; ``why_not``: to commands of these kinds."""
        while not task.done():
            commands, self.sent[:] = list(self.sent), []
            for each in commands:
                self.reply(each, why_not.get(type(each).__name__, ""))
            await pass_on()
        return await task


@contextmanager
def daemon(*symbols: str, **more: Any) -> Iterator[Daemon]:
    made = Daemon(symbols, **more)
    try:
        yield made
    finally:
        made.gateway.store.unlink()


def point(offset: int, name: str, progress: Progress, epoch: int = 1) -> CommitPoint:
    """What another daemon has committed."""
    state = {name: progress, "": Progress()}
    stored = {
        f"other/{n}": encode_stored(StoredProgress(each, epoch, "tcp://b")) for n, each in state.items()
    }
    return CommitPoint(offset, stored)


async def test_a_reset_that_is_cancelled_goes_on_and_the_next_one_waits_for_it() -> None:
    with daemon("V:AAA") as d:
        at = {PARTITION: point(10, "aaa", Progress(1, 5, 2, (SECOND,)))}
        d.group.claims(at)
        await given_up(d.group.on_assigned(at))  # the source is opened again
        d.group.claims(at)
        again = asyncio.create_task(d.group.on_assigned(at))
        await pass_on()
        (opening,) = d.of(protocol.OpenSession)
        assert not again.done(), "the engine has not replied yet"
        await d.until_done(again)
        assert opening.session.name == "aaa"
        assert d.state("aaa") is State.REPLAYING
        assert not d.live.closed(["aaa"])


async def test_a_reset_that_ends_after_the_next_claim_is_made_again() -> None:
    """Its tape is that of an older progress."""
    with daemon("V:AAA") as d:
        old = {PARTITION: point(10, "aaa", Progress(1, 5, 2, (SECOND,)))}
        d.group.claims(old)
        await given_up(d.group.on_assigned(old))
        new = {PARTITION: point(20, "aaa", Progress(2, 9, 4, (2 * SECOND,)), epoch=2)}
        d.group.claims(new)
        d.reply(d.sent.pop())  # the first one's
        await pass_on()
        again = asyncio.create_task(d.group.on_assigned(new))
        await pass_on()
        sent = [type(each) for each in d.sent]
        await d.until_done(again)
        assert sent == [protocol.CloseSession], "and then it is opened"
        assert d.state("aaa") is State.REPLAYING


async def test_a_session_that_could_not_be_opened_behind_its_owner_is_opened_by_its_next_record() -> None:
    with daemon("V:AAA") as d:
        at = {PARTITION: point(10, "aaa", Progress(1, 5, 2, (SECOND,)))}
        following = asyncio.create_task(d.group.follows(at))
        await d.until_done(following, OpenSession=NO_ROOM)
        d.group.claims(at)
        assigned = asyncio.create_task(d.group.on_assigned(at))
        await d.until_done(assigned, OpenSession=NO_ROOM)
        d.group.begins(PARTITION, 10)
        assert d.live.closed(["aaa"]) == {"aaa"}
        d.live._retry_at.clear()  # later
        assert await d.until_done(asyncio.create_task(d.live.open({"aaa"}))) == set()
        assert d.state("aaa") is State.REPLAYING


async def test_what_the_source_gave_up_to_follow_is_not_held() -> None:
    with daemon("V:AAA") as d:
        at = {PARTITION: point(10, "aaa", Progress(1, 5, 2, (SECOND,)))}
        following = asyncio.create_task(d.group.follows(at))
        await pass_on()
        assert d.group.holds("aaa")
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        assert not d.group.holds("aaa")


@pytest.mark.parametrize("pattern", [False, True])
async def test_an_engine_that_dies_while_it_opens_a_session_has_not_refused_it(pattern: bool) -> None:
    with daemon(*([] if pattern else ["V:AAA"]), patterns=(PATTERN,) if pattern else ()) as d:
        if pattern:
            assert d.live.discover(tick("V:AAA")) is None
        (name,) = d.names
        opening = asyncio.create_task(d.live.open({name}))
        await pass_on()
        d.gateway.pending.engine_gone("the engine process ended")
        assert await opening == {name}
        d.sent.clear()
        d.gateway.input.engine_starts()
        assert await d.until_done(asyncio.create_task(d.live.open({name}))) == set()
        assert d.state(name) is State.REPLAYING


@pytest.mark.parametrize("waits_for", ["its turn", "the engine"])
async def test_a_session_that_comes_back_is_not_over_by_its_former_life(waits_for: str) -> None:
    with daemon(patterns=(PATTERN,)) as d:
        long_ago = Progress(1, 7, 3, (time.time_ns() - 3600 * SECOND,))
        stored = StoredProgress(long_ago, 1, "", opened=Opened("V:AAA", 2))
        d.live._progress.read({PARTITION: CommitPoint(0, {"other/V-AAA": encode_stored(stored)})})
        d.live.adopt()
        assert d.names == []
        assert d.live.discover(tick("V:AAA")) is None
        other = None
        if waits_for == "its turn":
            turn = asyncio.Event()
            other = asyncio.create_task(d.live._queue.run(turn.wait))
            await pass_on()
        opening = asyncio.create_task(d.live.open({"V-AAA"}))
        await pass_on()
        d.live.adopt()  # once a second
        assert d.names == ["V-AAA"]
        if other is not None:
            turn.set()
            await other
        assert await d.until_done(opening) == set()
        assert d.state("V-AAA") is State.REPLAYING


async def test_a_session_whose_record_comes_while_others_are_closed_as_idle_stays() -> None:
    with daemon(patterns=(PATTERN,)) as d:
        for symbol in ("V:AAA", "V:BBB"):
            assert d.live.discover(tick(symbol)) is None
        first, second = d.names
        await d.until_done(asyncio.create_task(d.live.open(d.names)))
        at = {PARTITION: CommitPoint(0)}
        d.group.claims(at)
        await d.group.on_assigned(at)
        d.group.begins(PARTITION, 0)
        for offset, name in enumerate((first, second)):
            d.tracker.passed_on(name, PARTITION, [offset])
            d.tracker.acknowledge(name, PARTITION, offset + 1)
            d.gateway.sessions.clocks[name].last_seen_ns = time.monotonic_ns() - 5 * SECOND
        closing = asyncio.create_task(d.live.close_idle())
        await pass_on()
        assert [each.name for each in d.sent] == [first]
        d.tracker.passed_on(second, PARTITION, [7])
        d.gateway.sessions.clocks[second].touch(time.monotonic_ns())
        await d.until_done(closing)
        assert d.names == [second]
        assert d.tracker.to_commit()[PARTITION].offset == 7


async def test_a_change_goes_on_where_its_client_has_gone() -> None:
    with daemon("V:AAA") as d:
        await d.until_done(asyncio.create_task(d.live.open({"aaa"})))
        asked = messages.ChangeSession(1, "aaa", {"interval": "5s"})
        await given_up(d.live.change(asked))
        await d.until_done(asyncio.create_task(d.live._queue.run(pass_on)))  # behind it
        assert d.names == ["aaa"]
        assert [str(each.interval) for each in d.live.config.sessions] == ["5s"]


async def test_a_session_that_is_added_twice_by_an_impatient_client_is_there_once() -> None:
    with daemon("V:AAA") as d:
        asked = messages.AddSession(2, {"name": "bbb", "symbol": "V:BBB"})
        await given_up(d.live.add(asked))
        with pytest.raises(messages.QueryError):
            await d.until_done(asyncio.create_task(d.live.add(asked)))
        assert d.names == ["aaa", "bbb"]
        assert d.state("bbb") is State.REPLAYING


def test_answers_that_are_dropped_with_a_reset_are_made_again() -> None:
    """Exactly once: those that were complete and in no transaction yet."""
    config = inproc_config(["V:AAA", "V:BBB"])
    store = MetricStore.local({"session": ["aaa", "bbb"], "source": ["kafka"], "sink": ["kafka"]})
    progress = ProgressStore(store)
    tracker, events = OffsetTracker(progress.describe), SourceEvents()
    log, standby = Log({PARTITION: CommitPoint(0)}), Standby(store)
    _, runner = inputs_of(config, log, tracker, store, progress, events, standby=standby, sink=Broker())
    progress.start(["aaa", "bbb"])
    runner.group.claims({PARTITION: CommitPoint(0)})
    runner.group.begins(PARTITION, 0)
    for name in ("aaa", "bbb"):
        tracker.passed_on(name, PARTITION, [0, 1])
        events.lives.on(Event.OPENED, [name])
    progress.acknowledge("aaa", 1, [progress.number("aaa")], (SECOND,))
    # another daemon had the partition, and answered the other session alone
    runner.group.claims({PARTITION: point(0, "bbb", Progress(9, 4, 2, (SECOND,)), epoch=9)})
    assert ({"aaa"}, True) in events.dropped
    assert progress.resumed("aaa").closed == ()
    assert not progress.is_history("aaa", (SECOND,))
