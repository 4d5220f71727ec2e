"""A daemon that stands by: what it notes of the one that answers, and where it goes on."""

from collections.abc import Awaitable, Callable, Collection, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.api.health import FILLING, STANDBY, health_of, state_of
from daemon.config.schema import RecoveryConfig
from daemon.gateway.checkpoint.offsets import OffsetTracker
from daemon.gateway.checkpoint.state import ProgressStore
from daemon.gateway.group_member import MEASURED_S, GroupMember
from daemon.gateway.standby import Standby
from daemon.progress import Position, Progress
from daemon.session_life import State
from feeds.durations import Duration
from feeds.source import CommitPoint, Partition, StartPosition
from ingest.ring import Ring
from metrics.store import MetricStore
from tests.kit import SECOND, inproc_config
from tests.kit.gateway import Log, SourceEvents, assigned, inputs_of
from tests.kit.progress import stored

P, Q = ("t", 0), ("t", 1)


class Waiting(Log):
    """A log that can stand by."""

    def __init__(self, points: Mapping[Partition, CommitPoint]) -> None:
        super().__init__(points)
        self.behind: dict[Partition, int] | None = None
        self.is_standby = False

    def stand_by(self, before_serving: Callable[[], Awaitable[None]] | None = None) -> None:
        self.is_standby = True


class Rig(SourceEvents):
    """``told``: progress that the engine was given at a take-over."""

    def __init__(
        self, points: Mapping[Partition, CommitPoint], interval: int = SECOND, *, standby: bool = True
    ) -> None:
        super().__init__()
        self.store = MetricStore.local({"session": ["aaa", "bbb"], "source": ["kafka"], "sink": []})
        self.log = Waiting(points)
        self.progress = ProgressStore(self.store)
        self.tracker = OffsetTracker(self.progress.describe)
        self.standby = Standby(self.store, configured=standby, clock=lambda: 0)
        self.told: list[dict[str, Progress]] = []
        self.places = {name: {f"V:{name.upper()}": Position("kafka", *P, 90)} for name in ("aaa", "bbb")}
        recovery = RecoveryConfig(Duration(interval), standby=standby)
        self.input, self.runner = inputs_of(
            inproc_config(["V:AAA", "V:BBB"], recovery=recovery),
            self.log,
            self.tracker,
            self.store,
            self.progress,
            self,
            standby=self.standby,
        )

    async def promote(self, sessions: Collection[str]) -> None:
        self.told.append({name: self.progress.resumed(name) for name in sorted(sessions)})

    def states(self) -> list[State]:
        return [self.standby.lives.state(name) for name in ("aaa", "bbb")]

    async def start(self, restored: Mapping[str, Mapping[str, Position]] | None = None) -> None:
        """``restored``: sessions that the engine found a snapshot of, by default both."""
        await self.input.recover()
        self.progress.start(["aaa", "bbb"])
        self.input.engine_ready({"aaa": {}, "bbb": {}} if restored is None else restored)
        self.standby.wait()


def told(
    epoch: int, version: int, sequence: int, closed: int, owner: str = "tcp://other"
) -> dict[str, bytes]:
    return stored(epoch, {"aaa": Progress(epoch, version, sequence, (closed,))}, owner)


async def test_it_commits_nothing_and_sends_requests_to_the_one_that_answers() -> None:
    rig = Rig({P: CommitPoint(100, told(4, 10, 60, 5))})
    await rig.start()
    assert rig.log.is_standby
    assert rig.input.owner("aaa") == "tcp://other", "as it is stored"
    offset = rig.log.points[P].offset
    assert await rig.log.listener.follows(rig.log.points) == {P: StartPosition(offset, offset, 5)}
    assert (rig.input.owner("aaa"), rig.input.owner("bbb")) == ("tcp://other", "")
    rig.tracker.passed_on("aaa", P, [97, 98])
    assert rig.tracker.is_stored(P, 98)
    assert rig.tracker.is_stored(P, 99)
    assert rig.tracker.to_commit() == {}
    assert await rig.runner.checkpoint.commit()
    assert rig.log.committed == {}
    assert rig.standby.reasons() == [STANDBY, FILLING]


async def test_it_goes_on_where_it_has_read_behind_what_is_committed() -> None:
    rig = Rig({P: CommitPoint(100, told(4, 10, 60, 5))})
    await rig.start()
    await rig.log.listener.follows(rig.log.points)
    rig.tracker.passed_on("aaa", P, [97, 98])
    # the other one answered two more bars, after an engine of its own died
    rig.log.points[P] = CommitPoint(130, told(6, 12, 72, 7))
    assert await assigned(rig.log.listener, rig.log.points) == {P: StartPosition(99, None, 7)}
    assert rig.told == [{"aaa": Progress(7, 12, 72, (7,)), "bbb": Progress(7)}]
    rig.log.listener.begins(P, 99)
    assert rig.standby.answers
    assert (rig.input.owner("aaa"), rig.progress.number("aaa"), rig.progress.epoch) == (None, 73, 7)
    rig.tracker.passed_on("aaa", P, [129, 130])
    assert [rig.tracker.is_stored(P, offset) for offset in (129, 130)] == [True, False]
    assert rig.tracker.outstanding() == 1
    # a version from before tells of older bars
    rig.progress.acknowledge("aaa", 11, [], (6,))
    assert rig.progress.of("aaa").closed == (7,)
    assert await rig.runner.checkpoint.commit()
    assert rig.log.committed == {P: 130}
    assert rig.store.value("foretick_promotion_seconds") != 0


async def test_a_session_without_a_snapshot_begins_anew_before_it_is_read() -> None:
    rig = Rig({P: CommitPoint(100, told(4, 10, 60, 5))})
    await rig.start({"bbb": {}})
    assert await rig.log.listener.follows(rig.log.points) == {P: StartPosition(90, 100, 5)}, (
        "where its snapshot ends"
    )
    rig.log.points[P] = CommitPoint(130, told(4, 12, 72, 7))
    await rig.log.listener.follows(rig.log.points)
    assert rig.resumed == [{"aaa"}]
    assert await assigned(rig.log.listener, rig.log.points) == {P: StartPosition(90, 130, 7)}
    assert rig.resumed == [{"aaa"}]


async def test_nor_does_it_take_over_without_having_looked_for_one() -> None:
    rig = Rig({P: CommitPoint(100, told(4, 10, 60, 5))})
    await rig.start({})
    await assigned(rig.log.listener, rig.log.points)
    assert rig.resumed == [{"aaa"}], "nothing was ever answered of the other one"
    assert len(rig.told) == 1


async def test_a_session_that_was_read_is_not_reset() -> None:
    """Its first progress comes after its first records."""
    rig = Rig({P: CommitPoint(100, stored(4, {"": Progress()}))})
    await rig.start({})
    await rig.log.listener.follows(rig.log.points)
    rig.tracker.passed_on("aaa", P, [97, 98])
    rig.log.points[P] = CommitPoint(130, told(4, 12, 72, 7))
    await rig.log.listener.follows(rig.log.points)
    assert rig.resumed == []


async def test_it_serves_what_it_reads_once_it_answers() -> None:
    rig = Rig({P: CommitPoint(100, told(4, 10, 60, 5))})
    await rig.start()
    await rig.log.listener.follows(rig.log.points)
    rig.tracker.passed_on("aaa", P, [97, 98])
    assert not rig.input.serves("aaa")
    await assigned(rig.log.listener, rig.log.points)
    rig.log.listener.begins(P, 99)
    assert (rig.input.serves("aaa"), rig.input.serves("bbb")) == (True, False)


async def test_without_snapshots_none_are_looked_for() -> None:
    rig = Rig({P: CommitPoint(100, told(4, 10, 60, 5))}, interval=0)
    await rig.start({})
    await rig.log.listener.follows(rig.log.points)
    assert rig.resumed == []


steps = st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=12)
"""How much further the other one commits, and whether the standby looks and reads up to there."""


@given(steps)
async def test_whatever_the_other_one_commits_nothing_is_left_out_or_outstanding_before(
    script: list[tuple[int, bool]],
) -> None:
    rig = Rig({P: CommitPoint(0, told(1, 0, 0, -1))})
    await rig.start()
    committed = read = 0
    for step, looks in script:
        committed += step
        rig.log.points[P] = CommitPoint(committed, told(1, committed, committed, committed))
        if looks:
            await rig.log.listener.follows({P: rig.log.points[P]})
            for offset in range(read, committed):
                rig.tracker.passed_on("aaa", P, [offset])
                assert rig.tracker.is_stored(P, offset)
            read = committed
    at = (await assigned(rig.log.listener, rig.log.points))[P]
    begin = at.offset if at.lookback_end is None else 0  # the window's beginning
    assert begin == read
    rig.log.listener.begins(P, begin)
    for offset in range(begin, committed + 5):
        rig.tracker.passed_on("aaa", P, [offset])
    assert rig.tracker.outstanding() == 5
    assert rig.tracker.to_commit()[P].offset == committed
    assert rig.progress.number("aaa") == committed + 1


async def test_a_partition_costs_what_was_answered_since_it_began_once_that_is_known() -> None:
    rig = Rig({P: CommitPoint(100, told(4, 10, 60, 5)), Q: BBB}, standby=False)
    await rig.start()
    await assigned(rig.log.listener, rig.log.points)
    for partition in (P, Q):
        rig.log.listener.begins(partition, 0)
    listener = rig.log.listener
    assert isinstance(listener, GroupMember)
    assert listener.costs() == {}, "it has just begun"
    for partition, begun in listener._mine.items():
        listener._mine[partition] = begun._replace(since_s=begun.since_s - 2 * MEASURED_S)
    answers = [rig.progress.number("aaa") for _ in range(90)]
    rig.progress.acknowledge("aaa", 11, answers, (6,))
    assert listener.costs() == {P: 1.5, Q: 0.0}


BBB = CommitPoint(50, stored(4, {"bbb": Progress(4, 7, 42, (3,))}))


async def following() -> Rig:
    """A daemon that answers ``bbb`` of Q, and follows the owner of P, which has ``aaa``."""
    rig = Rig({P: CommitPoint(100, told(4, 10, 60, 5)), Q: BBB}, standby=False)
    await rig.start()
    assert not rig.log.is_standby
    await assigned(rig.log.listener, {Q: BBB})
    rig.log.listener.begins(Q, 50)
    assert await rig.log.listener.follows({P: rig.log.points[P]}) == {P: StartPosition(90, None, 5)}
    return rig


async def test_it_is_warm_when_bars_of_what_it_follows_wait_no_longer_for_their_windows() -> None:
    rig = await following()
    waiting = [(0, 9, True), (1, 9, True), (2, 0, False), (40, 0, False), (1, 0, True)]
    for theirs, ours, warm in waiting:
        rig.store.set("foretick_bars_waiting", theirs, session="aaa")
        rig.store.set("foretick_bars_waiting", ours, session="bbb")
        assert rig.log.listener.is_warm() is warm
    rig.store.set("foretick_bars_waiting", 40, session="aaa")
    rig.input.change(inproc_config(["V:BBB"]).sessions)
    rig.store.remove_session("aaa")
    assert rig.log.listener.is_warm(), "one that is gone is not waited for"


async def test_one_that_answers_follows_the_sessions_of_single_partitions() -> None:
    rig = await following()
    assert rig.resumed == [{"aaa"}], "it begins at the owner's snapshot"
    assert rig.states() == [State.WARMING, State.REPLAYING]
    assert [rig.input.owner(name) for name in ("aaa", "bbb")] == ["tcp://other", None]
    rig.tracker.passed_on("aaa", P, [97, 98])
    rig.tracker.passed_on("bbb", Q, [50])
    assert rig.tracker.is_stored(P, 98)
    assert await rig.runner.checkpoint.commit()
    assert rig.log.committed == {Q: 50}
    rig.log.points[P] = CommitPoint(130, told(4, 12, 72, 7))
    await rig.log.listener.follows({P: rig.log.points[P]})
    assert rig.resumed == [{"aaa"}], "and goes on from there"
    epoch = rig.progress.epoch
    assert epoch > 4, "theirs"
    assert await assigned(rig.log.listener, {P: rig.log.points[P]}) == {P: StartPosition(99, None, 7)}
    assert rig.told == [{"aaa": Progress(epoch, 12, 72, (7,))}]
    assert rig.resumed == [{"aaa"}], "where its tape is already"
    rig.log.listener.begins(P, 99)
    assert [rig.input.owner(name) for name in ("aaa", "bbb")] == [None, None]
    assert rig.states() == [State.REPLAYING] * 2
    rig.tracker.passed_on("aaa", P, [129, 130])
    assert [rig.tracker.is_stored(P, offset) for offset in (129, 130)] == [True, False]
    assert await rig.runner.checkpoint.commit()
    assert rig.log.committed == {Q: 50, P: 130}


async def test_what_is_followed_no_longer_begins_from_what_is_committed() -> None:
    rig = await following()
    rig.log.listener.follows_no_longer([P])
    assert rig.states()[0] is State.OUTDATED, "its engine does not answer it yet"
    assert await assigned(rig.log.listener, {P: rig.log.points[P]}) == {P: StartPosition(90, None, 5)}
    assert (rig.resumed, rig.told) == ([{"aaa"}, {"aaa"}], [])
    assert rig.states()[0] is State.REPLAYING


async def test_a_partition_that_was_left_is_followed_from_its_owner_s_snapshot() -> None:
    rig = await following()
    await assigned(rig.log.listener, {P: rig.log.points[P]})
    rig.log.listener.begins(P, 90)
    rig.tracker.passed_on("aaa", P, [100, 220])
    rig.log.listener.on_revoked([P])
    rig.log.points[P] = CommitPoint(150, told(9, 14, 84, 8))
    assert await rig.log.listener.follows({P: rig.log.points[P]}) == {P: StartPosition(90, None, 8)}
    assert rig.resumed == [{"aaa"}, {"aaa"}]
    assert rig.states()[0] is State.WARMING


async def test_another_engine_follows_nobody_yet() -> None:
    rig = await following()
    rig.input.engine_starts()
    assert rig.states()[0] is State.REPLAYING
    await rig.log.listener.follows({P: rig.log.points[P]})
    assert rig.resumed == [{"aaa"}, {"aaa"}]


@pytest.mark.parametrize(("planned", "kind"), [(True, "planned"), (False, "unplanned")])
async def test_hand_overs_are_counted_by_their_kind(planned: bool, kind: str) -> None:
    rig = await following()
    rig.log.listener.handed_over(P, planned=planned, silent_ns=SECOND)
    assert rig.store.value("foretick_hand_overs_total", kind=kind) == 1


async def test_it_stands_by_again_when_it_begins_to_read_again() -> None:
    rig = Rig({P: CommitPoint(100, told(4, 10, 60, 5)), Q: CommitPoint(7)})
    await rig.start()
    await assigned(rig.log.listener, rig.log.points)
    assert rig.store.value("foretick_standby") == 0
    rig.standby.wait()
    assert rig.store.value("foretick_standby") == 1
    rig.log.behind = {P: 3, Q: 0}
    gauges = rig.input.gauges()
    assert gauges["foretick_standby_lag_records"] == {"t/0": 3.0, "t/1": 0.0}
    ring = Ring.create(64, "pause")
    try:
        await rig.input.start(ring)
        assert not rig.standby.answers
    finally:
        await rig.input.stop_reading()
        ring.unlink()
        ring.close()


def test_health_tells_a_standby_from_a_daemon_that_waits() -> None:
    assert state_of([STANDBY]) == health_of([STANDBY], [], "", spare=False).status == "standby"
    assert state_of([STANDBY, FILLING]) == "waiting"
    assert health_of(["the engine is not up"], [], "", spare=False).status == "waiting"
