"""A session's life: the table itself, and a walk of gateway and engine through it that crashes anywhere.

One session of one partition, whose bars are records: bar number n is offset n. Another daemon of the group
answers whenever this one does not own the partition. The gateway's side is `GroupMember`, the engine's is
`History`.
"""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from typing import Any, Literal, get_args

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from daemon.config.schema import RecoveryConfig, SourceConfig
from daemon.engine.replayed_bars import History
from daemon.gateway.checkpoint.offsets import OffsetTracker
from daemon.gateway.checkpoint.state import ProgressStore
from daemon.gateway.standby import Standby
from daemon.progress import Position, Progress
from daemon.session_life import (
    CLOSED,
    FOLLOWING,
    STALE,
    TRANSITIONS,
    VOID,
    Event,
    Life,
    Lives,
    State,
    Transition,
    count_illegal,
    table,
)
from feeds.durations import Duration
from feeds.source import CommitPoint
from metrics.store import MetricStore
from tests.kit import SECOND, inproc_config, log_source
from tests.kit.gateway import Broker, Log, SourceEvents, assigned, inputs_of
from tests.kit.progress import stored

P = ("t", 0)
Fails = Literal["late", "dead"]
"""The source gives up an assignment that takes too long; the engine dies meanwhile."""


def test_each_state_is_reached_and_left() -> None:
    reached, edge = {State.ABSENT}, [State.ABSENT]
    while edge:
        at = edge.pop()
        for (state, _), end in TRANSITIONS.items():
            if state is at and end.to not in reached:
                reached.add(end.to)
                edge.append(end.to)
    assert reached == set(State)


@pytest.mark.parametrize("state", State)
def test_an_engine_s_start_and_a_removal_are_possible_anywhere(state: State) -> None:
    assert TRANSITIONS[state, Event.ENGINE_STARTED] == Transition(State.REPLAYING)
    assert TRANSITIONS[state, Event.REMOVED] == Transition(State.ABSENT)


def test_what_is_stale_is_opened_again() -> None:
    """By a reset here, or from a snapshot of the daemon that answers it."""
    assert all("reopen" in TRANSITIONS[state, Event.RESET].actions for state in STALE)
    assert all("reopen" in TRANSITIONS[state, Event.FOLLOWED].actions for state in VOID)


def test_what_is_not_in_the_table_is_counted_and_changes_nothing() -> None:
    store = MetricStore.local({"session": ["aaa"], "source": [], "sink": []})
    lives = Lives(count_illegal(store, "engine"))
    assert lives.on(Event.OPENED, ["aaa"]) == {}
    assert lives.state("aaa") is State.ABSENT
    assert store.value("foretick_session_transitions_refused_total", process="engine") == 1
    assert store.value("foretick_session_transitions_refused_total", process="gateway") == 0


def test_the_table_shows_each_transition_that_does_something() -> None:
    shown, event = set[tuple[str, str]](), ""
    for row in table().partition("| event |")[2].splitlines()[2:]:
        title, states, *_ = row.removeprefix("| ").split(" | ")
        event = title.split("**")[1] if title else event
        shown.update((state, event) for state in states.split(", "))
    assert shown == {
        (state, event) for (state, event), end in TRANSITIONS.items() if end != Transition(state)
    }


class Daemon(SourceEvents):
    """Gateway and engine. ``fails``: what becomes of the next command."""

    def __init__(self, walk: "Walk") -> None:
        super().__init__()
        self.walk = walk
        store = MetricStore.local({"session": ["aaa"], "source": ["kafka"], "sink": ["kafka"]})
        self.progress, self.log = ProgressStore(store), Log({P: walk.point})
        self.tracker = OffsetTracker(self.progress.describe)
        self.standby = Standby(store, configured=walk.standby, clock=lambda: 0)
        self.store = store
        self.input, self.runner = inputs_of(
            inproc_config(
                ["V:AAA"],
                recovery=RecoveryConfig(Duration(SECOND), standby=walk.standby),
                source=SourceConfig() if walk.opens_all else log_source(),
            ),
            self.log,
            self.tracker,
            store,
            self.progress,
            self,
            standby=self.standby,
            sink=Broker() if walk.exactly_once else None,
        )
        self.fails: Fails | None = None
        self.bars, self.events = list[int](), list[tuple[int, bool]]()
        self.engine_is_up = False

    @property
    def state(self) -> State:
        return self.standby.lives.state("aaa")

    # The engine.

    def start_engine(self, base: int | None) -> None:
        """``base``: where its snapshot ends; None without one."""
        self.life = Life("aaa")
        known = self.progress.start(["aaa"])["aaa"]
        self.input.engine_starts()
        self.bars.clear()
        self.events.clear()
        self.engine_is_up = True
        if not self.walk.opens_all:
            self.input.engine_ready({})
            return
        self.life.on(Event.ENGINE_STARTED)
        if self.walk.standby:
            self.life.on(Event.STANDBY)
        self._open(known, base)
        self.input.engine_ready({} if base is None else self._positions(base))

    def _positions(self, base: int) -> Mapping[str, Mapping[str, Position]]:
        return {"aaa": {"V:AAA": Position("", *P, base)}}

    def _open(self, known: Progress, base: int | None) -> None:
        restored = () if base is None else (base - 1,)
        self.history = History(self.life, 1, known.closed, restored)

    def work(self) -> None:
        """Take a bar; those of the window of a snapshot are on the tape already."""
        bar = self.bars.pop(0)
        if bar > self.history.seen[0]:
            self.events.append((bar, self.history.take(0, bar)))

    # The gateway.

    def get(self) -> None:
        """Take what the engine says of a bar."""
        bar, answered = self.events.pop(0)
        if self.state in VOID | FOLLOWING or answered or self.progress.is_history("aaa", (bar,)):
            return
        if self.state is State.REPLAYING:
            self.standby.lives.on(Event.CAUGHT_UP, ["aaa"])
        self.walk.publish(bar)

    def _drain(self) -> None:
        """Commands and events are in order."""
        while self.bars:
            self.work()
        while self.events:
            self.get()

    def _send(self) -> bool:
        """Whether a command reaches an engine; raises what the source does when it takes too long."""
        fails, self.fails = self.fails, None
        if fails == "late":
            raise TimeoutError
        if fails == "dead" and self.engine_is_up:
            self.walk.engine_dies()
        if not self.engine_is_up:
            return False
        self._drain()
        return True

    def _reaches(self) -> bool:
        if self.fails == "late":
            self.fails = None
        return self._send()

    async def resume(self, sessions: Collection[str]) -> Mapping[str, Mapping[str, Position]]:
        for name in sessions:
            assert name == "aaa"
            if not self._send():
                self.lives.on(Event.FAILED, [name])
                return {}
            if self.life.state is State.ABSENT:
                self.life.on(Event.ADDED)
            else:
                self.life.on(Event.RESET)
                self.life.on(Event.REOPENING)
            self.life.on(Event.FOLLOWED if self.state in FOLLOWING else Event.OPENED)
            known = self.progress.resumed("aaa")
            base = self.walk.snapshot
            self._open(known, base)
            self.lives.on(Event.OPENED, [name])
            return self._positions(base)
        return {}

    def closed(self, sessions: Iterable[str]) -> set[str]:
        return self.lives.among(sessions, CLOSED)

    async def open(self, sessions: Collection[str]) -> set[str]:
        """Without a snapshot that is newer than its record. The source waits as long as it takes."""
        if self._reaches():
            self.lives.on(Event.ADDED, sessions)
            self.life.on(Event.ADDED)
            self.life.on(Event.OPENED)
            self._open(self.progress.resumed("aaa"), None)
            self.lives.on(Event.OPENED, sessions)
        return self.closed(sessions)

    def adopt(self) -> set[str]:
        return set()

    async def close_idle(self) -> None:
        pass

    async def close_unused(self, is_elsewhere: Callable[[str], bool]) -> None:
        gone = self.state in (State.OUTDATED, State.REVOKED) or is_elsewhere("aaa")
        if gone and self.state is not State.ABSENT and not self.input.holds("aaa"):
            self.lives.on(Event.CLOSED, ["aaa"])
            if self._reaches():
                self.life.on(Event.REMOVED)
                self.events.clear()

    async def promote(self, sessions: Collection[str]) -> None:
        """It waits for an engine, and the source gives up if none comes."""
        known = self.progress.resumed("aaa").closed
        if not (self._send() or self._send()):
            raise TimeoutError
        self.history.promote(known)

    def drop(self, sessions: Collection[str], *, complete: bool) -> None:
        assert set(sessions) == {"aaa"}

    def partitions_assigned(self, sessions: Collection[str]) -> None:
        if self.engine_is_up and sessions:
            self.life.on(Event.ASSIGNED)
            self.history.settle()

    def partitions_revoked(self, sessions: Collection[str]) -> None:
        if self.engine_is_up and sessions:
            self.life.on(Event.REVOKED)


class Walk(RuleBasedStateMachine):
    """What the broker knows, and one daemon that anything may happen to."""

    exactly_once = standby = False
    opens_all = True

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.made, self.committed, self.others_epoch = 1, 1, 1
        self.point = CommitPoint(1, stored(1, {"aaa": Progress(1, 1, 1, (0,))}, "tcp://other"))
        self.is_ours = self.reads = self.follows = self.reopened = False
        self.published = {0}
        self.at = 0

    def teardown(self) -> None:
        """Whatever has happened, the daemon answers all once it is left in peace."""
        if hasattr(self, "daemon"):
            self.daemon.fails = None
            self._settle()
            assert self.committed == self.made
            assert self.daemon.state is self.daemon.life.state is State.LIVE
        self.loop.close()

    def _settle(self) -> None:
        if not self.daemon.engine_is_up:
            self.daemon.start_engine(self.snapshot)
        self._reopen()
        if not self.reads:
            self.comes()
        self.record(2)
        while self._can_read:
            self.read()
        self.daemon._drain()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The result; None where the source gave up."""
        try:
            return self.loop.run_until_complete(work)
        except TimeoutError:
            return None

    @property
    def snapshot(self) -> int:
        """Where the newest snapshot ends that goes with what is committed."""
        return max(0, self.committed - 2)

    def publish(self, bar: int) -> None:
        """With what is committed, in one step."""
        daemon = self.daemon
        assert self.is_ours, "it is another daemon's"
        assert bar not in self.published, "it was answered twice"
        self.published.add(bar)
        daemon.progress.acknowledge("aaa", bar + 1, [daemon.progress.number("aaa")], (bar,))
        self._commit(bar + 1, daemon.progress.describe(["aaa"]))
        daemon.runner.checkpoint.stored[P] = self.point
        daemon.progress.stored([self.point])

    def _commit(self, offset: int, state: Mapping[str, bytes]) -> None:
        assert self.published.issuperset(range(offset))
        self.committed, self.point = offset, CommitPoint(offset, state)
        self.daemon.log.points[P] = self.point

    def _reopen(self) -> None:
        """The source is read again: see `Inputs.reopen`."""
        if not self.reopened:
            self.daemon.progress.go_on()
            self.daemon.tracker.clear()
            self.daemon.runner.group.clear()
            self.daemon.standby.wait()
            self.reopened = True
            self.follows = False
            self.is_ours = self.is_ours and not self.standby

    @initialize(base=st.booleans())
    def starts(self, base: bool) -> None:
        self.daemon = Daemon(self)
        self.run(self.daemon.input.recover())
        self.daemon.start_engine(self.snapshot if base else None)
        self.reopened = False
        self._reopen()
        self.is_ours = self.reads = self.follows = False

    # The market, and the other daemon.

    @rule(bars=st.integers(1, 3))
    def record(self, bars: int) -> None:
        self.made += bars

    @precondition(lambda self: not self.is_ours and self.committed < self.made)
    @rule(bars=st.integers(1, 3))
    def other_answers(self, bars: int) -> None:
        offset = min(self.made, self.committed + bars)
        self.published.update(range(offset))
        epoch = max(self.others_epoch, self.daemon.progress.epoch + 1)
        self.others_epoch = epoch
        self._commit(
            offset, stored(epoch, {"aaa": Progress(epoch, offset, offset, (offset - 1,))}, "tcp://other")
        )

    # Partitions come and go.

    @precondition(lambda self: not self.is_ours and self.reopened)
    @rule()
    def looks(self) -> None:
        found = self.run(self.daemon.log.listener.follows({P: self.point}))
        if found is not None and not self.follows:
            self.follows, self.at = True, found[P].offset

    @rule()
    def looks_around(self) -> None:
        """Nothing stays open that is another daemon's, and not followed."""
        daemon = self.daemon
        daemon.log.others = {} if self.is_ours else {P: self.point}
        self.run(daemon.runner.group.look_around())
        if not (self.opens_all or self.is_ours or self.follows or not daemon.engine_is_up):
            assert daemon.state is daemon.life.state is State.ABSENT

    @precondition(lambda self: self.follows)
    @rule()
    def looks_no_longer(self) -> None:
        self.daemon.log.listener.follows_no_longer([P])
        self.follows = False

    @precondition(lambda self: not self.reads and self.reopened)
    @rule()
    def comes(self) -> None:
        """Again, where the source gave up before."""
        self.is_ours = True
        found = self.run(assigned(self.daemon.log.listener, {P: self.point}))
        if found is None:
            return
        self.at, self.reads, self.follows = found[P].offset, self.daemon.engine_is_up, False
        self.daemon.log.listener.begins(P, self.at)

    @precondition(lambda self: self.is_ours)
    @rule()
    def goes(self) -> None:
        self.is_ours = self.reads = False
        self.daemon.log.listener.on_revoked([P])

    # Records and answers.

    @property
    def _can_read(self) -> bool:
        until = self.made if self.reads else self.committed if self.follows else 0
        return self.reopened and self.daemon.engine_is_up and self.at < until

    @precondition(lambda self: self._can_read)
    @rule()
    def read(self) -> None:
        if not self.daemon.tracker.repeats(P, self.at):
            if self.daemon.closed(["aaa"]) and self.run(self.daemon.open(["aaa"])):
                return  # its engine has died
            self.daemon.tracker.passed_on("aaa", P, [self.at])
            self.daemon.bars.append(self.at)
        self.at += 1

    @precondition(lambda self: self.daemon.bars)
    @rule()
    def engine_works(self) -> None:
        self.daemon.work()

    @precondition(lambda self: self.daemon.events)
    @rule()
    def gateway_gets(self) -> None:
        self.daemon.get()

    # What goes wrong.

    @rule(how=st.sampled_from(get_args(Fails)))
    def next_command_fails(self, how: Fails) -> None:
        self.daemon.fails = how

    @precondition(lambda self: self.daemon.engine_is_up)
    @rule()
    def engine_dies(self) -> None:
        """Reading stops; what it has sent is still taken."""
        self.daemon.engine_is_up = self.reads = self.reopened = False
        self.daemon.bars.clear()

    @precondition(lambda self: not self.daemon.engine_is_up)
    @rule(base=st.booleans())
    def engine_starts(self, base: bool) -> None:
        self.daemon.start_engine(self.snapshot if base else None)
        self.follows = False

    @precondition(lambda self: self.daemon.engine_is_up and not self.reopened)
    @rule()
    def source_is_reopened(self) -> None:
        self._reopen()

    @rule(base=st.booleans())
    def daemon_dies(self, base: bool) -> None:
        self.starts(base)

    @invariant()
    def nothing_was_refused(self) -> None:
        for process in ("gateway", "engine"):
            if hasattr(self, "daemon"):
                found = self.daemon.store.value("foretick_session_transitions_refused_total", process=process)
                assert not found

    @invariant()
    def what_is_published_has_no_gap(self) -> None:
        assert self.published.issuperset(range(self.committed))


class _Standby(Walk):
    standby = True


class _ExactlyOnce(Walk):
    exactly_once = True


class _StandbyExactlyOnce(_ExactlyOnce):
    standby = True


class _ByPartition(Walk):
    opens_all = False


class _ByPartitionExactlyOnce(_ByPartition):
    exactly_once = True


_SETTINGS = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestMember, TestStandby = Walk.TestCase, _Standby.TestCase
TestExactlyOnce, TestStandbyExactlyOnce = _ExactlyOnce.TestCase, _StandbyExactlyOnce.TestCase
TestMember.settings = TestStandby.settings = _SETTINGS
TestByPartition, TestByPartitionExactlyOnce = _ByPartition.TestCase, _ByPartitionExactlyOnce.TestCase
TestByPartition.settings = TestByPartitionExactlyOnce.settings = _SETTINGS
TestExactlyOnce.settings = TestStandbyExactlyOnce.settings = _SETTINGS
