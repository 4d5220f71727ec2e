"""The gateway around an engine that dies: acknowledged records are not read again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

import pytest

from daemon import protocol
from daemon.api.generation import Failed, ModelEntry
from daemon.gateway.gateway import Gateway
from daemon.gateway.wiring import make_gateway
from feeds.connector import SinkRoute
from feeds.durations import Duration
from feeds.source import CommitFailed, CommitPoint, Partition
from flash.question import PAPER_SIX, Question
from tests.kit import (
    SECOND,
    START,
    TOPIC,
    MemorySink,
    QueueSource,
    incoming,
    inproc_config,
    sessions,
    trade,
    until,
)
from tests.kit.engine_events import answered

RECORDS = [incoming(trade("V:AAA", START + n), n) for n in range(5)]


class Engines:
    """Engines without behaviour: the test decides when one is up, what it sends, and when it dies."""

    def __init__(self) -> None:
        self.started = 0
        self.sent: list[protocol.Command] = []
        self.emit: Callable[[protocol.EngineEvent], None]
        self.die: Callable[[str], None]

    def __call__(self, *_: object) -> Engines:
        return self

    async def start(
        self, on_event: Callable[[protocol.EngineEvent], None], on_gone: Callable[[str], None]
    ) -> None:
        self.started += 1
        self.emit, self.die = on_event, on_gone

    def send(self, command: protocol.Command) -> None:
        self.sent.append(command)
        if isinstance(command, protocol.StopEngine):
            self.emit(protocol.EngineStopped(drained=True))

    async def close(self, timeout_s: float) -> None:
        pass

    def up(self) -> None:
        self.emit(protocol.EngineReady((ModelEntry("m", "r"),)))

    def answer(self, version: int, low_watermark: int, questions: int = 6) -> None:
        for question in PAPER_SIX[:questions]:
            self.emit(answered("aaa", version, low_watermark, question=question.name))


class Committed(QueueSource):
    """A source that yields everything from the committed offset on at each start."""

    def __init__(self) -> None:
        super().__init__()
        self.open = False
        self.refusals = 0
        """Number of commits that fail from now on."""
        self.reachable = asyncio.Event()
        """Until it is set, starting waits for the broker."""
        self.reachable.set()
        self.starting = self.starting_at_once = 0

    async def start(self) -> None:
        self.starting += 1
        self.starting_at_once = max(self.starting_at_once, self.starting)
        await self.reachable.wait()
        self.starting -= 1
        await super().start()
        self.open = True
        self.put(RECORDS[self.committed.get((TOPIC, 0), 0) :])

    async def commit(self, points: Mapping[Partition, CommitPoint]) -> None:
        await asyncio.sleep(0.01)
        if not self.open or self.refusals:
            self.refusals -= 1
            raise CommitFailed("closed, or the group rebalances")
        await super().commit(points)

    async def stop(self) -> None:
        self.open = False


@pytest.fixture
async def up() -> AsyncIterator[tuple[Gateway, Engines, Committed, MemorySink]]:
    """A gateway that read all records and whose engine answered nothing; it commits only when it must."""
    engines, source, sink = Engines(), Committed(), MemorySink()
    gateway = make_gateway(
        inproc_config(standing="paper_six"),
        source=source,
        routes=[SinkRoute(sink, "answers.v1")],
        connect=engines,
        commit_every_s=3600.0,
        restart_after_s=(0.0,),
    )
    starting = asyncio.create_task(gateway.start())
    await until(lambda: engines.started == 1)
    engines.up()
    await asyncio.wait_for(starting, 60)
    await until(lambda: gateway.input.runners[0].tracker.outstanding() == len(RECORDS))
    yield gateway, engines, source, sink
    if not gateway.stopping:  # the test has not reached this point
        await gateway.stop()


async def test_what_was_answered_when_the_engine_died_is_not_read_again(up):
    """Its acknowledgements arrive after the death."""
    gateway, engines, source, sink = up
    sink.acknowledging.clear()
    engines.answer(1, 3)
    await until(lambda: len(sink.sent) == 6)
    engines.die("killed")
    await until(lambda: engines.started == 2)
    sink.acknowledging.set()
    await until(lambda: gateway.store.value("foretick_answers_total", session="aaa") == 6)
    engines.up()
    await until(lambda: source.starts == 2)
    assert source.committed == {(TOPIC, 0): 3}
    await until(lambda: gateway.input.runners[0].tracker.outstanding() == 2)
    engines.answer(2, 4)
    await until(lambda: gateway.input.runners[0].tracker.outstanding() == 1)
    assert await gateway.stop()
    assert source.committed == {(TOPIC, 0): 4}


async def test_a_commit_that_fails_when_the_engine_died_is_tried_again_before_the_source_is_read_again(up):
    """Otherwise a bar that is answered and acknowledged is read and answered a second time."""
    gateway, engines, source, _ = up
    engines.answer(1, 3)
    await until(lambda: gateway.input.runners[0].tracker.outstanding() == 2)
    source.refusals = 2
    engines.die("killed")
    await until(lambda: engines.started == 2)
    engines.up()
    await until(lambda: source.starts == 2)
    assert source.committed == {(TOPIC, 0): 3}
    await until(lambda: gateway.input.runners[0].tracker.outstanding() == 2)


async def test_a_second_death_while_the_source_is_opened_again_opens_it_once_more_and_never_twice_at_once(up):
    gateway, engines, source, _ = up
    source.reachable.clear()
    engines.die("killed")
    await until(lambda: engines.started == 2)
    engines.up()
    await until(lambda: source.starting == 1)
    assert gateway.status.not_ready() == ["the source is not connected"]
    engines.die("killed again")
    await asyncio.sleep(0.05)
    assert engines.started == 2, "the third engine waits for the first restart"
    source.reachable.set()
    await until(lambda: engines.started == 3)
    engines.up()
    await until(lambda: source.starts == 3)
    await until(lambda: gateway.status.not_ready() == [])
    assert source.starting_at_once == 1
    await until(lambda: gateway.input.runners[0].tracker.outstanding() == len(RECORDS))


async def test_what_the_dead_engine_answered_in_part_is_read_again(up):
    gateway, engines, source, sink = up
    engines.answer(1, 2)
    engines.answer(2, 4, questions=5)
    await until(lambda: len(sink.sent) == 11)
    engines.die("killed")
    await until(lambda: engines.started == 2)
    engines.up()
    await until(lambda: source.starts == 2)
    await until(lambda: gateway.input.runners[0].tracker.outstanding() == 3)
    assert source.committed == {(TOPIC, 0): 2}
    engines.answer(3, 3)
    await until(
        lambda: gateway.input.runners[0].tracker.outstanding() == 2, what="nothing of version 2 is in the way"
    )


async def test_a_commit_under_way_ends_before_the_source_is_closed(up):
    """The one who closes the source has nothing left to commit: a commit is in progress."""
    gateway, engines, source, _ = up
    engines.answer(1, 3)
    await until(lambda: gateway.input.runners[0].tracker.outstanding() == 2)
    other = asyncio.create_task(gateway.input.runners[0].checkpoint.commit())
    await asyncio.sleep(0)
    await gateway.stop()
    await other
    assert source.committed == {(TOPIC, 0): 3}


async def needs_reset(gateway: Gateway, engines: Engines) -> asyncio.Task[object]:
    """Another daemon answered the session; it is removed from the engine, and about to be added again."""
    engines.sent.clear()
    resuming = asyncio.ensure_future(gateway.live.resume(["aaa"]))
    await until(lambda: bool(engines.sent))
    removal = engines.sent.pop()
    assert isinstance(removal, protocol.CloseSession)
    engines.emit(protocol.Done(removal.id))
    await until(lambda: bool(engines.sent))
    return resuming


async def test_a_session_that_begins_anew_keeps_the_questions_that_clients_set(up):
    gateway, engines, _, _ = up
    state = gateway.sessions.states["aaa"]
    mine = Question("mine", "Is it rising?", ("yes", "no"))
    gateway.sessions.questions_set("aaa", [*state.questions[1:], mine])
    state.ask_these(state.questions, state.questions[:1])
    asked, paused = state.questions, state.paused
    resuming = await needs_reset(gateway, engines)
    addition = engines.sent.pop()
    assert addition.questions == tuple(asked)
    engines.emit(protocol.SessionAdded(addition.id, {}))
    await resuming
    found = gateway.sessions.states["aaa"]
    assert found is not state
    assert (found.questions, found.paused) == (asked, paused)


@pytest.mark.parametrize("serves", [False, True])
async def test_another_daemon_s_session_that_is_removed_leaves_its_progress_and_files(up, serves):
    """As of one that stands by, where both are reloaded."""
    gateway, engines, _, _ = up
    gateway.input.serves = lambda name: serves
    gateway.publisher.progress.acknowledge("aaa", 10, [1], (5,))
    before = gateway.publisher.progress.of("aaa")
    engines.sent.clear()
    reloading = asyncio.ensure_future(gateway.live.reload(inproc_config(["V:BBB"])))
    await until(lambda: bool(engines.sent))
    removal = engines.sent.pop()
    assert isinstance(removal, protocol.CloseSession)
    assert removal.serves == serves
    engines.emit(protocol.Done(removal.id))
    await until(lambda: bool(engines.sent))
    assert (gateway.publisher.progress.of("aaa") == before) is not serves
    reloading.cancel()


async def test_a_session_outlives_an_engine_that_dies_before_it_began_anew(up):
    gateway, engines, _, sink = up
    resuming = await needs_reset(gateway, engines)
    engines.die("killed")
    assert await resuming == {}
    await until(lambda: engines.started == 2)
    engines.up()
    await until(
        lambda: (
            gateway.engine.ready.is_set() and gateway.input.runners[0].tracker.outstanding() == len(RECORDS)
        )
    )
    assert [each.name for each in gateway.config.sessions] == ["aaa"]
    engines.answer(1, 3)
    await until(lambda: len(sink.sent) == 6)


async def test_a_session_that_a_reload_begins_again_outlives_an_engine_that_dies_meanwhile(up):
    gateway, engines, source, _ = up
    new = inproc_config(sessions=sessions("V:AAA", interval=Duration(5 * SECOND)), standing="paper_six")
    engines.sent.clear()
    reloading = asyncio.ensure_future(gateway.live.reload(new))
    await until(lambda: bool(engines.sent))
    removal = engines.sent.pop()
    assert isinstance(removal, protocol.CloseSession)
    engines.emit(protocol.Done(removal.id))
    await until(lambda: bool(engines.sent))
    engines.die("killed")
    await until(lambda: engines.started == 2)
    engines.sent.clear()
    engines.up()
    await until(lambda: source.starts == 2)
    await until(lambda: any(isinstance(each, protocol.OpenSession) for each in engines.sent))
    (addition,) = (each for each in engines.sent if isinstance(each, protocol.OpenSession))
    engines.emit(protocol.SessionAdded(addition.id, {}))
    await reloading
    assert [(each.name, each.interval) for each in gateway.config.sessions] == [("aaa", 5 * SECOND)]
    assert list(gateway.sessions.states) == ["aaa"]


async def test_a_session_that_was_cut_short_as_it_began_anew_begins_anew_the_next_time(up):
    gateway, engines, _, sink = up
    resuming = await needs_reset(gateway, engines)
    resuming.cancel()
    first = engines.sent.pop()
    assert isinstance(first, protocol.OpenSession)
    engines.emit(protocol.SessionAdded(first.id, {}))
    again = await needs_reset(gateway, engines)
    second = engines.sent.pop()
    assert isinstance(second, protocol.OpenSession)
    engines.emit(protocol.SessionAdded(second.id, {}))
    await again
    assert [each.name for each in gateway.config.sessions] == list(gateway.sessions.states) == ["aaa"]
    engines.answer(1, 3)
    await until(lambda: len(sink.sent) == 6)


async def test_a_session_that_the_engine_refuses_to_open_again_stays_closed_and_says_why(up):
    gateway, engines, _, _ = up
    resuming = await needs_reset(gateway, engines)
    addition = engines.sent.pop()
    assert isinstance(addition, protocol.OpenSession)
    engines.emit(Failed(addition.id, "bad_request", "the pool is full"))
    await resuming
    assert gateway.status.not_ready() == ["session aaa is not open: the pool is full"]
    assert [session.name for session in gateway.config.sessions] == ["aaa"]
