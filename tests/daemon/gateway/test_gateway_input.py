"""Where a log is read on after a start: from snapshots, from its window, or where it was left."""

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest
from msgspec.structs import replace

from daemon import protocol
from daemon.config.fingerprint import window_settings
from daemon.config.schema import RecoveryConfig
from daemon.gateway.checkpoint.offsets import OffsetTracker
from daemon.gateway.checkpoint.outbox import Outbox
from daemon.gateway.checkpoint.state import ProgressStore
from daemon.gateway.inputs import Inputs
from daemon.gateway.record_decoder import RingTurns
from daemon.gateway.standby import Standby
from daemon.progress import Position, Progress, StoredProgress, WindowStart, decode_stored
from daemon.session_life import VOID
from daemon.supervision import Tasks
from feeds.connector import SinkRoute
from feeds.market_data import DataUpdated
from feeds.source import (
    CommitPoint,
    Partition,
    StartPosition,
)
from ingest.ring import Ring
from metrics.store import MetricStore
from tests.kit import inproc_config, until
from tests.kit.gateway import Broker, Commands, Log, SourceEvents, assigned, inputs_of
from tests.kit.progress import stored

P, Q = ("t", 0), ("t", 1)
CONFIG = inproc_config(["V:AAA", "V:BBB"], recovery=RecoveryConfig(reread_records=80))
SETTINGS = {each.name: window_settings(CONFIG, each) for each in CONFIG.sessions}


FOREIGN = {"made by hand": b"at noon"}


def told(*sessions: str, **begins: Position) -> dict[str, bytes]:
    """``begins``: where a session's window begins."""
    windows = {name: WindowStart(SETTINGS[name], (begins[name],)) for name in begins}
    return stored(4, {name: Progress(4, 10, 60, (5,), windows.get(name, WindowStart())) for name in sessions})


class Rig(SourceEvents):
    """``again``: the log's past was asked for. ``address``: this daemon's.

    ``outbox``: messages are put by hand. ``silent``: sessions whose
    messages are dropped until they are reset.
    """

    def __init__(
        self,
        points: Mapping[Partition, CommitPoint],
        again: bool = False,
        address: str = "",
        directory: Path | None = None,
        exactly_once: bool = False,
    ) -> None:
        super().__init__()
        store = self.store = MetricStore.local(
            {"session": ["aaa", "bbb"], "source": ["kafka"], "sink": ["kafka"]}
        )
        self.log = Log(points)
        self.log.again = again
        self.progress = ProgressStore(store, directory, address)
        self.tracker = OffsetTracker(self.progress.describe)
        self.sent = Commands()
        self.broker = Broker()
        self.log.owns(P, Q)
        routes = [SinkRoute(self.broker, "answers", "updates", "dlq")] if exactly_once else []
        self.outbox = Outbox(routes, ["", "aaa", "bbb"], store, self.tracker.source_of)
        self.input, self.runner = inputs_of(
            CONFIG,
            self.log,
            self.tracker,
            store,
            self.progress,
            self,
            send=self.sent.send,
            outbox=self.outbox,
            sink=self.broker if exactly_once else None,
        )
        self.commit = self.runner.checkpoint.commit

    @property
    def silent(self) -> set[str]:
        return self.lives.among(("aaa", "bbb"), VOID)

    def drop(self, sessions: Collection[str], *, complete: bool) -> None:
        super().drop(sessions, complete=complete)
        for name in sessions:
            self.outbox.drop(name, complete=complete)

    def answer(self, session: str, number: int, stream: Partition) -> None:
        """One message, of the record with the offset ``number``."""
        self.tracker.passed_on(session, stream, [number])
        message = DataUpdated(session=session, data_version=number, as_of=0, bars=[])
        self.outbox.put(session, message, f"{session}{number}", {})
        self.tracker.acknowledge(session, stream, number + 1)
        self.progress.acknowledge(session, number, [self.progress.number(session)], (number,))
        self.outbox.complete(session, number)

    async def start(self) -> dict[str, Progress]:
        await self.input.recover()
        return self.progress.start(["aaa", "bbb"], again=self.input.again)

    async def assign(self) -> Mapping[Partition, StartPosition]:
        begin = await assigned(self.log.listener, self.log.points)
        self.answered_ns = {partition: each.answered_ns for partition, each in begin.items()}
        return {partition: each._replace(answered_ns=0) for partition, each in begin.items()}


def at(partition: Partition, offset: int, source: str = "kafka") -> Position:
    return Position(source, *partition, offset)


async def test_what_is_committed_is_what_an_engine_goes_on_from() -> None:
    rig = Rig({P: CommitPoint(100, told("aaa")), Q: CommitPoint(50, FOREIGN)})
    assert await rig.start() == {"aaa": Progress(5, 10, 60, (5,)), "bbb": Progress(5)}


@pytest.mark.parametrize(
    ("positions", "begin"),
    [
        ({}, {P: StartPosition(100, lookback_end=100)}),  # no snapshot: as far back as windows span
        (
            {"aaa": {"V:AAA": at(P, 80)}},
            {P: StartPosition(80, lookback_end=100)},
        ),  # the other session has none
        ({"aaa": {"V:AAA": at(P, 80)}, "bbb": {"V:BBB": at(P, 90)}}, {P: StartPosition(80)}),
        ({"aaa": {"V:AAA": at(P, 80, "other")}, "bbb": {"V:BBB": at(Q, 3)}}, {P: StartPosition(100)}),
        ({"aaa": {"V:AAA": at(P, 120)}, "bbb": {"V:BBB": at(P, 110)}}, {P: StartPosition(100)}),
        (
            {"aaa": {"V:AAA": at(Q, 7), "kafka/t/0": at(P, 70)}, "bbb": {"V:BBB": at(P, 90)}},
            {P: StartPosition(70)},
        ),  # events of a symbol in a topic of their own
    ],
)
async def test_a_partition_is_read_from_the_least_position_of_its_sessions(
    positions: dict[str, dict[str, Position]], begin: dict[Partition, StartPosition]
) -> None:
    rig = Rig({P: CommitPoint(100, told("aaa", "bbb"))})
    await rig.start()
    rig.input.engine_ready(positions)
    assert await rig.assign() == begin
    assert rig.answered_ns == {P: 5}


@pytest.mark.parametrize(
    ("begins", "positions", "begin"),
    [
        ({"aaa": at(P, 40), "bbb": at(P, 60)}, {}, StartPosition(40)),
        ({"aaa": at(P, 40, ""), "bbb": at(P, 60)}, {"aaa": {"V:AAA": at(P, 90)}}, StartPosition(60)),
        (
            {"aaa": at(P, 40), "bbb": at(P, 60)},
            {"aaa": {"V:AAA": at(Q, 7)}, "bbb": {"V:BBB": at(P, 90)}},
            StartPosition(40),
        ),  # the first one came behind the snapshot
        ({"aaa": at(P, 40)}, {}, StartPosition(40, lookback_end=100)),  # of the other window it is not known
        ({"aaa": at(P, 10), "bbb": at(P, 60)}, {}, StartPosition(60, lookback_end=100)),  # too far back
    ],
)
async def test_without_a_snapshot_reading_begins_where_the_window_does(
    begins: dict[str, Position], positions: dict[str, dict[str, Position]], begin: StartPosition
) -> None:
    rig = Rig({P: CommitPoint(100, told("aaa", "bbb", **begins))})
    await rig.start()
    rig.input.engine_ready(positions)
    assert await rig.assign() == {P: begin}


@pytest.mark.parametrize("begins", [{"aaa": at(Q, 40), "bbb": at(P, 60, "other")}, {"aaa": at(P, 2)}])
async def test_a_window_that_begins_elsewhere_or_too_early_is_filled(begins: dict[str, Position]) -> None:
    rig = Rig({P: CommitPoint(100, told(*begins, **begins))})
    await rig.start()
    rig.input.engine_ready({})
    assert await rig.assign() == {P: StartPosition(100, lookback_end=100)}


async def test_a_new_session_and_one_with_other_settings_have_their_windows_filled() -> None:
    rig = Rig({P: CommitPoint(100, told("aaa", aaa=at(P, 40)))})
    await rig.start()
    rig.input.engine_ready({})
    assert await rig.assign() == {P: StartPosition(40, lookback_end=100)}
    rig.input.change([replace(each, retention_tokens=2048) for each in CONFIG.sessions])
    assert await rig.assign() == {P: StartPosition(100, lookback_end=100)}


async def test_a_partition_whose_sessions_are_not_known_is_read_from_its_window() -> None:
    rig = Rig({P: CommitPoint(100), Q: CommitPoint(100, FOREIGN)})
    await rig.start()
    rig.input.engine_ready({"aaa": {"V:AAA": at(P, 80)}, "bbb": {"V:BBB": at(Q, 80)}})
    assert await rig.assign() == dict.fromkeys((P, Q), StartPosition(100, lookback_end=100))


async def test_a_start_commits_its_epoch_before_a_record_is_read() -> None:
    rig = Rig({P: CommitPoint(100, told("aaa"))})
    await rig.start()
    await rig.assign()
    rig.log.listener.begins(P, 70)
    assert await rig.commit()
    assert rig.log.committed == {P: 100}
    assert [decode_stored(record) for record in rig.log.state[P].values()] == [
        StoredProgress(Progress(), 5),
        StoredProgress(Progress(4, 10, 60, (5,)), 5),
    ]
    assert rig.tracker.next_offset(P) == 70
    assert rig.tracker.is_stored(P, 99)


async def test_the_engine_hears_whose_records_are_read_as_soon_as_they_are() -> None:
    """Sessions of a partition that another daemon has may be restored, too: they wait."""
    rig = Rig({P: CommitPoint(100, told("aaa")), Q: CommitPoint(7, told("bbb"))})
    await rig.start()
    await rig.assign()
    assert not rig.assigned
    rig.log.listener.begins(P, 70)
    assert rig.assigned == [{"aaa"}]


async def test_the_engine_hears_which_sessions_left_until_their_partition_comes_back() -> None:
    """Also those that no commit tells of; the next engine begins without any of them."""
    rig = Rig({P: CommitPoint(100, told("aaa")), Q: CommitPoint(7)})
    await rig.start()
    await rig.assign()
    rig.log.listener.begins(P, 70)
    rig.log.listener.begins(Q, 7)
    rig.tracker.passed_on("bbb", Q, [7])
    rig.tracker.passed_on("aaa", Q, [8])
    rig.assigned.clear()
    rig.log.listener.on_revoked([Q])
    assert rig.revoked == [{"bbb"}], "the other one reads from a partition that stays"
    rig.log.listener.on_revoked([P])
    assert rig.revoked[1:] == [{"aaa"}]
    rig.log.listener.begins(Q, 8)
    assert rig.assigned == [{"aaa", "bbb"}]
    rig.log.listener.begins(P, 70)
    assert rig.assigned[1:] == [{"aaa"}]
    rig.log.listener.on_revoked([Q])
    rig.tracker.clear()
    rig.input.engine_ready({})
    rig.log.listener.begins(Q, 8)
    assert rig.assigned[2:] == []


async def test_an_engine_knows_what_a_restart_of_the_daemon_would_find() -> None:
    """Not what is acknowledged, but what is committed; each engine is told once."""
    rig = Rig({P: CommitPoint(100, told("aaa"))})
    await rig.start()
    await rig.assign()
    stored, newer = Progress(4, 10, 60, (5,)), Progress(5, 11, 60, (6,))
    rig.log.listener.begins(P, 100)
    assert rig.sent == [protocol.NoteProgress({"aaa": stored})]
    assert await rig.commit()
    rig.progress.acknowledge("aaa", 11, [], (6,))
    rig.tracker.skipped(P, 101)
    rig.log.fails = True
    assert not await rig.commit()
    assert rig.sent[1:] == []
    rig.log.fails = False
    assert await rig.commit()
    assert await rig.commit()
    assert rig.sent[1:] == [protocol.NoteProgress({"aaa": newer})]
    outcomes = ("done", "failed")
    counted = [rig.store.value("foretick_checkpoints_total", source="kafka", outcome=o) for o in outcomes]
    assert counted == [3, 1]
    rig.input.engine_ready({})
    assert rig.sent[2:] == [protocol.NoteProgress({"aaa": newer})]


async def test_what_is_committed_while_an_engine_loads_reaches_it_once_it_is_up() -> None:
    rig = Rig({P: CommitPoint(100, told("aaa"))})
    await rig.start()
    await rig.assign()
    rig.log.listener.begins(P, 100)
    await rig.start()  # another engine
    rig.progress.acknowledge("aaa", 11, [], (6,))
    rig.tracker.skipped(P, 101)
    assert await rig.commit()
    rig.sent.clear()  # it reached no engine
    rig.input.engine_ready({})
    assert await rig.commit()
    assert rig.sent == [protocol.NoteProgress({"aaa": Progress(6, 11, 60, (6,))})]


async def test_a_commit_goes_on_where_who_waits_for_it_is_cancelled() -> None:
    """As an assignment that takes too long is. The next one comes behind it, and has what is new."""
    rig = Rig({P: CommitPoint(100, told("aaa"))})
    await rig.start()
    await rig.assign()
    rig.log.listener.begins(P, 100)
    commit, acknowledged, tried = rig.log.commit, asyncio.Event(), list[int]()

    async def slow(points: Mapping[Partition, CommitPoint]) -> None:
        tried.append(points[P].offset)
        await acknowledged.wait()
        await commit(points)

    rig.log.commit = slow  # type: ignore[method-assign]  # the test's
    cancelled = asyncio.create_task(rig.commit())
    await until(lambda: tried == [100])
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    rig.tracker.skipped(P, 109)
    waiting = [asyncio.create_task(rig.commit()) for _ in range(2)]
    await asyncio.sleep(0)
    assert rig.log.committed == {}
    acknowledged.set()
    assert await asyncio.gather(*waiting) == [True, True]
    assert tried == [100, 110]
    assert rig.log.committed == {P: 110}


async def test_progress_that_cannot_be_written_is_not_what_a_restart_finds(tmp_path: Path) -> None:
    rig = Rig({}, directory=tmp_path / "state")
    rig.log.kind = "dropping"
    await rig.start()
    rig.log.listener.begins(P, 0)
    (tmp_path / "state").touch()
    rig.tracker.passed_on("aaa", P, [0])
    rig.tracker.acknowledge("aaa", P, 1)
    rig.progress.acknowledge("aaa", 1, [], (6,))
    assert await rig.commit()
    assert rig.sent == []
    (tmp_path / "state").unlink()
    rig.tracker.skipped(P, 1)
    assert await rig.commit()
    assert rig.sent == [protocol.NoteProgress({"aaa": Progress(1, 1, 0, (6,))})]


async def test_a_session_that_could_not_begin_anew_in_time_does_at_the_next_assignment() -> None:
    """The source gives up an assignment that takes too long, and tries again."""
    rig = Rig({P: CommitPoint(100, told("aaa"))})
    await rig.start()
    await rig.assign()
    rig.log.points = {P: CommitPoint(120, stored(6, {"aaa": Progress(6, 12, 72, (7,))}))}
    resume = rig.resume

    async def first_fails(sessions: Collection[str]) -> Mapping[str, Mapping[str, Position]]:
        if not rig.resumed:
            rig.resumed.append(set(sessions))
            raise TimeoutError
        return await resume(sessions)

    rig.resume = first_fails  # type: ignore[method-assign]  # the test's
    with pytest.raises(TimeoutError):
        await rig.assign()
    await rig.assign()
    await rig.assign()
    assert rig.resumed == [{"aaa"}, {"aaa"}]


async def test_a_past_that_was_asked_for_is_not_history() -> None:
    rig = Rig({P: CommitPoint(100, told("aaa"))}, again=True)
    assert (await rig.start())["aaa"] == Progress(5, 10, 60)
    await rig.assign()
    rig.log.listener.begins(P, 0)
    assert not rig.tracker.is_stored(P, 0)


async def test_a_past_that_was_asked_for_is_answered_on_by_the_next_engine() -> None:
    """From where the one before had answered, though more is committed; once that is reached, no further."""
    rig = Rig({P: CommitPoint(100, told("aaa"))}, again=True)
    await rig.start()
    await rig.assign()
    rig.log.listener.begins(P, 0)
    rig.log.again = False
    rig.tracker.passed_on("aaa", P, range(40))
    rig.tracker.acknowledge("aaa", P, 30)
    assert rig.input.again
    rig.progress.start(["aaa"], again=rig.input.again)
    rig.progress.go_on()
    rig.tracker.clear()
    assert await rig.assign() == {P: StartPosition(30, lookback_end=30)}
    rig.log.listener.begins(P, 20)
    assert [rig.tracker.is_stored(P, offset) for offset in (29, 30)] == [True, False]
    assert not rig.progress.knows_history("aaa"), "what is committed says more"
    rig.tracker.passed_on("aaa", P, range(20, 110))
    rig.tracker.acknowledge("aaa", P, 110)
    assert rig.tracker.to_commit()[P].offset == 110
    assert not rig.input.again
    rig.progress.start(["aaa"], again=rig.input.again)
    rig.progress.go_on()
    assert rig.progress.knows_history("aaa")


async def test_a_past_that_was_asked_for_goes_on_where_the_source_is_opened_again() -> None:
    rig = Rig({P: CommitPoint(100, told("aaa"))}, again=True)
    await rig.start()
    await rig.assign()
    rig.log.listener.begins(P, 0)
    rig.log.again = False
    rig.tracker.passed_on("aaa", P, range(40))
    assert await rig.assign() == {P: StartPosition(40)}
    rig.log.listener.begins(P, 40)
    assert not rig.tracker.is_stored(P, 40)


async def test_a_partition_that_comes_back_unanswered_begins_again_in_another_epoch() -> None:
    """What was published and not committed has numbers that are given once more."""
    rig = Rig({P: CommitPoint(100, told("aaa"))})
    await rig.start()
    await rig.assign()
    epoch, number = rig.progress.epoch, rig.progress.number("aaa")
    rig.log.listener.begins(P, 100)
    rig.tracker.passed_on("aaa", P, [119])
    rig.log.listener.on_revoked([P])
    assert await rig.assign() == {P: StartPosition(100, lookback_end=100)}
    assert (rig.progress.epoch, rig.progress.number("aaa")) == (epoch + 1, number)


async def test_offsets_of_a_truncated_log_are_read_and_committed_again() -> None:
    rig = Rig({P: CommitPoint(100, told("aaa"))})
    await rig.start()
    await rig.assign()
    rig.log.listener.begins(P, 100)
    rig.tracker.passed_on("aaa", P, [119])
    rig.log.listener.on_revoked([P])
    rig.log.points[P] = CommitPoint(0, told("aaa"))
    rig.log.listener.truncated([P])
    await rig.assign()
    rig.log.listener.begins(P, 0)
    assert not rig.tracker.repeats(P, 0)
    assert not rig.tracker.is_stored(P, 0)
    rig.tracker.passed_on("aaa", P, [0, 1, 2])
    rig.tracker.acknowledge("aaa", P, 2)
    assert rig.tracker.to_commit()[P].offset == 2


@pytest.mark.parametrize(
    ("place", "begin"),
    [(110, {P: StartPosition(110, lookback_end=300)}), (None, {P: StartPosition(300, lookback_end=300)})],
    ids=["snapshot", "window"],
)
async def test_sessions_that_others_answered_begin_anew(
    place: int | None, begin: dict[Partition, StartPosition]
) -> None:
    rig = Rig({P: CommitPoint(100, told("aaa"))})
    resumed: list[set[str]] = []

    async def resume(names: Collection[str]) -> Mapping[str, Mapping[str, Position]]:
        resumed.append(set(names))
        return {} if place is None else {"aaa": {"V:AAA": at(P, place)}}

    rig.resume = resume  # type: ignore[method-assign]  # the test's
    await rig.start()
    await rig.assign()
    rig.log.listener.begins(P, 100)
    rig.tracker.passed_on("aaa", P, [119])
    rig.log.listener.on_revoked([P])
    rig.log.points[P] = CommitPoint(300, stored(6, {"aaa": Progress(6, 30, 180, (9,))}))
    assert await rig.assign() == begin
    assert resumed == [{"aaa"}]
    assert rig.dropped == [({"aaa"}, True)] * 2, "as it went, and as it came"
    rig.log.listener.begins(P, 110)
    assert rig.tracker.next_offset(P) == 110  # behind what was read before
    assert rig.tracker.is_stored(P, 299)
    assert (rig.progress.epoch, rig.progress.number("aaa")) == (7, 181)


async def test_a_session_is_asked_here_as_soon_as_its_partition_is_ours() -> None:
    """While it is reset, its former owner is not asked any more."""
    theirs = CommitPoint(300, stored(6, {"aaa": Progress(6, 30, 180, (9,))}, owner="tcp://there"))
    rig = Rig({P: CommitPoint(100, told("aaa"))})
    await rig.start()

    async def peer_offsets() -> Mapping[Partition, CommitPoint]:
        return {P: theirs}

    rig.log.peer_offsets = peer_offsets  # type: ignore[method-assign]  # the test's
    await rig.runner.group.look_around()
    assert rig.input.owner("aaa") == "tcp://there"
    owners: list[str | None] = []

    async def resume(names: Collection[str]) -> Mapping[str, Mapping[str, Position]]:
        owners.append(rig.input.owner("aaa"))
        return {}

    rig.resume = resume  # type: ignore[method-assign]  # the test's
    rig.log.points = {P: theirs}
    await rig.assign()
    assert owners == [None]


@pytest.mark.parametrize(
    ("found", "elsewhere"),
    [
        (told("aaa"), False),
        (stored(4, {"aaa": Progress(4, 13, 78, (8,))}, owner="tcp://there"), False),
        (stored(5, {"aaa": Progress(5, 11, 66, (6,))}), True),
        (stored(6, {"bbb": Progress(2, 1, 6, (1,))}, owner="tcp://there"), True),
        (FOREIGN, False),
    ],
    ids=["earlier", "before our claim", "at the same number", "since our claim", "foreign"],
)
async def test_what_others_have_answered_is_told_from_what_is_ours(
    found: dict[str, bytes], elsewhere: bool
) -> None:
    rig = Rig({P: CommitPoint(100, told("aaa"))}, address="tcp://here")
    await rig.start()
    assert rig.progress.epoch == 5
    rig.progress.acknowledge("aaa", 12, range(61, 73), (7,))
    found |= rig.progress.describe(["aaa"])
    assert rig.log.listener.answered_elsewhere({P: CommitPoint(110, found)}) == ({P} if elsewhere else set())


@asynccontextmanager
async def committing(rig: Rig) -> AsyncIterator[Rig]:
    """A rig of both partitions, read to 100, whose transactions run."""
    running = asyncio.create_task(rig.runner.checkpoint.run())
    await rig.start()
    await rig.assign()
    rig.log.listener.begins(P, 100)
    rig.log.listener.begins(Q, 100)
    rig.runner.connected = True
    assert await rig.commit()
    yield rig
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def both() -> Rig:
    return Rig({P: CommitPoint(100, told("aaa")), Q: CommitPoint(100, told("bbb"))}, exactly_once=True)


async def test_with_transactions_what_was_not_committed_of_a_partition_that_left_is_made_again() -> None:
    """Also where nobody has answered it meanwhile, for then nobody else makes it."""
    async with committing(both()) as rig:
        stored = rig.progress.of("aaa")
        rig.broker.held.clear()
        rig.answer("aaa", 101, P)
        rig.answer("bbb", 101, Q)
        assert rig.progress.of("aaa") != stored
        rig.log.owns(Q)
        rig.log.listener.on_revoked([P])
        assert rig.silent == {"aaa"}
        assert rig.progress.of("aaa") == stored
        rig.broker.held.set()
        assert await rig.commit()
        keys, points = rig.broker.got[-1]
        assert (keys, points.keys()) == ([b"bbb101"], {Q})
        del rig.log.points[Q]
        assert await rig.assign() == {P: StartPosition(100, lookback_end=100)}
        assert rig.resumed == [{"aaa"}]
        assert rig.tracker.next_offset(P) == 0
        rig.log.listener.begins(P, 100)
        rig.log.owns(P, Q)
        assert await rig.commit()
        assert rig.broker.got[-1][1] == {P: 100}


async def test_a_session_waits_for_its_own_partition_to_come_back() -> None:
    async with committing(both()) as rig:
        rig.answer("aaa", 101, P)
        rig.answer("bbb", 101, Q)
        rig.log.listener.on_revoked([P, Q])
        stored = rig.log.points
        await assigned(rig.log.listener, {P: stored[P]})
        assert (rig.resumed, rig.silent) == ([{"aaa"}], {"bbb"})
        await assigned(rig.log.listener, {Q: CommitPoint(0)})
        assert (rig.resumed[1:], rig.silent) == ([{"bbb"}], set())


@pytest.mark.parametrize("when", ["before", "while"])
async def test_an_engine_that_began_with_what_was_then_dropped_begins_again_from_what_is_committed(
    monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """A partition leaves after an engine ended, when nobody reads; "before": before the next one begins."""
    async with committing(both()) as rig:
        rig.broker.held.clear()
        rig.answer("aaa", 101, P)
        rig.log.owns(Q)
        if when == "before":
            rig.broker.held.set()
            assert await rig.commit()
        began = rig.progress.start(["aaa", "bbb"])  # the next engine
        rig.input.engine_starts()
        rig.broker.held.set()

        async def starts(ring: Ring) -> None:
            pass

        monkeypatch.setattr(rig.input, "start", starts)
        await rig.input.reopen(cast("Ring", None), lambda: None)
        assert not any(b"aaa101" in keys for keys, _ in rig.broker.got)
        assert (began["aaa"].version == 10) is (when == "before")
        await rig.assign()
        assert rig.resumed == ([] if when == "before" else [{"aaa"}])


async def test_leaving_does_not_wait_for_a_membership_that_nobody_renews(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where the source's client was being opened again when the engine ended."""
    async with committing(both()) as rig:
        rig.log.membership = None
        rig.answer("aaa", 101, P)
        with monkeypatch.context() as patched:
            patched.setattr("daemon.gateway.checkpoint.checkpoint.SETTLE_S", 0.1)
            async with asyncio.timeout(60):
                await rig.runner.leave()
        rig.log.owns(P, Q)
        rig.answer("bbb", 101, Q)
        assert await rig.commit()
        assert rig.broker.got[-1][0] == [b"bbb101"]


async def test_a_daemon_without_a_source_goes_on_when_it_stops_reading() -> None:
    """It stops its sources' tasks; the engine's own must still tell that it has drained."""
    store, tasks = MetricStore.local({}), Tasks()
    inputs = Inputs(inproc_config(), RingTurns(), Standby(store), store, tasks)
    tasks.start("engine events", asyncio.Event().wait)
    await inputs.stop_reading()
    assert tasks.names() == ["engine events"]
    await tasks.stop()


async def test_what_is_read_followed_or_about_to_be_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session is not closed between its partition's assignment and its first record."""
    points = {P: CommitPoint(5, told("aaa")), Q: CommitPoint(7, told("bbb"))}
    rig = Rig(points)
    await rig.start()
    listener, begins = rig.log.listener, dict[Partition, StartPosition]()

    def held() -> list[bool]:
        return [rig.input.holds(name) for name in ("aaa", "bbb")]

    async def meanwhile() -> Mapping[Partition, CommitPoint]:
        """It comes while commits of others are looked up, which it was one of."""
        begins.update(await assigned(listener, {P: points[P]}))
        return {P: points[P]}

    assert held() == [False, False]
    monkeypatch.setattr(rig.log, "peer_offsets", meanwhile)
    await rig.runner.group.look_around()
    assert held() == [True, False]
    assert not rig.input.reads("aaa")
    listener.begins(P, begins[P].offset)
    assert rig.input.reads("aaa")
    await listener.follows({Q: points[Q]})
    assert held() == [True, True]
    listener.follows_no_longer([Q])
    listener.on_revoked([P])
    assert held() == [False, False]


async def test_sessions_that_are_opened_one_by_one_to_be_followed_are_held_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another daemon answers them, so what is not held is closed; it would be opened as ours."""
    points = {Q: CommitPoint(7, told("bbb"))}
    rig = Rig(points)
    await rig.start()
    held, resume = list[bool](), rig.resume

    async def looks(sessions: Collection[str]) -> Mapping[str, Mapping[str, Position]]:
        held.extend(rig.input.holds(name) for name in sessions)
        return await resume(sessions)

    monkeypatch.setattr(rig, "resume", looks)
    await rig.log.listener.follows(points)
    assert held == [True]


async def test_a_partition_that_goes_before_it_begins_holds_no_session() -> None:
    points = {P: CommitPoint(5, told("aaa"))}
    rig = Rig(points)
    await rig.start()
    rig.log.listener.claims(points)
    rig.log.others = points
    await rig.runner.group.look_around()
    assert not rig.input.holds("aaa")
