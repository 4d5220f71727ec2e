"""Engines that are killed and come back from snapshots give the answers of one that was not."""

import os
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
import pytest
from msgspec.structs import replace

from daemon import protocol
from daemon.ages import ages
from daemon.api.generation import Failed, Finished, Generate, GenerateAll, Turn
from daemon.config.schema import (
    UNTRAINED,
    BarsConfig,
    Config,
    EventsConfig,
    ModelConfig,
    PoolConfig,
    QuestionConfig,
    RecoveryConfig,
    RollupConfig,
    SchedulerConfig,
    SessionConfig,
    SourceConfig,
)
from daemon.config.standing import questions_of
from daemon.engine.assembly import wire_engine
from daemon.engine.build import build
from daemon.engine.request_runner import SESSION_RESET
from daemon.engine.snapshot_store import SnapshotFiles, SnapshotNoRoom
from daemon.progress import Position, Progress
from engine.model.question_pack import write_pack
from feeds.connector import SettingError
from feeds.connectors.zeromq import ZmqSourceConnector
from feeds.durations import Duration
from feeds.market_data import Answer
from flash.late_labels import AdaptationState
from flash.question import PAPER_SIX
from flash.repeats import AGAIN_S
from ingest.record import (
    ACTION,
    HALT,
    RESUME,
    SPLIT,
    STATUS,
    TEXT,
    TRADE,
    WORDS,
    RecordWriter,
    stream_number,
)  # fmt: skip
from ingest.ring import Ring
from ingest.words import chunks_of, number_of
from metrics.store import MetricStore
from regions.offload.snapshot_format import Identity, SnapshotHeader, read_header, write_snapshot
from regions.tape import Retention
from support.durable_file import replacing
from tests.kit import log_source, tolerance
from tests.kit.models import terse_directory
from tests.kit.packs import CHOICES, random_pack
from tests.kit.packs import TEXT as NEAR
from tests.regions.numbered import append, pool, tape_of

SECOND = 10**9
START = 1_723_161_600 * SECOND
STREAM = protocol.NameStream("kafka", "ticks", 0, True)
Trade = tuple[int, int, int]
"""Symbol, ns since the start, price in cents; below zero, one of `EVENTS`."""
SIZE = 48 * SECOND
"""Of a trade, 1e-9: a bar's volume, 1e-18, has more than 64 bits."""
EVENTS = {
    -1: (TEXT, 0, "a headline that takes more than one record of words"),
    -2: (STATUS, HALT, ""),
    -3: (STATUS, RESUME, ""),
    -4: (ACTION, SPLIT, ""),
}
"""Kind, `x` and words of an event."""
TIERS = (RollupConfig(Duration(4 * SECOND), 3), RollupConfig(Duration(16 * SECOND), 1000))
HIGH = QuestionConfig("high", "What was the highest price?", ("YES", "NO"))


@pytest.fixture(scope="module")
def terse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return terse_directory(tmp_path_factory.mktemp("terse") / "model")


def log_of(symbols: int, seconds: int, seed: int) -> list[Trade]:
    """Trades, some of them out of order."""
    rng, prices, trades = random.Random(seed), [10_000] * symbols, []
    for second in range(seconds):
        for _ in range(3):
            symbol = rng.randrange(symbols)
            prices[symbol] += rng.randint(-9, 9) * (20 if rng.random() < 0.03 else 1)
            trades.append((symbol, second * SECOND + rng.randrange(SECOND), prices[symbol]))
    return trades


def chat(number: int, *, exact: bool = False) -> GenerateAll:
    """With the session; ``exact``: an ask."""
    turns, choices = (Turn("user", "trend"),), ("UP", "DOWN", "NONE")
    return GenerateAll((Generate(id=number, session="s", turns=turns, choices=choices, exact=exact),))


def config(path: Path | None, directory: Path, *sessions: SessionConfig, **bars: object) -> Config:
    return Config(
        model=ModelConfig(path=str(path) if path else UNTRAINED, layers="torch", dtype="float32", threads=1),
        sessions=sessions,
        questions=() if path else (HIGH,),
        standing="paper_six" if path else "none",
        bars=BarsConfig(interval=Duration(SECOND), **bars),  # type: ignore[arg-type]  # its own
        pool=PoolConfig(frame_limit=2048),
        scheduler=SchedulerConfig(chunk_min=64, max_prompt_tokens=128, max_new_tokens=32),
        recovery=RecoveryConfig(interval=Duration(1), directory=str(directory)),
    )


RINGS: list[Ring] = []


@pytest.fixture(autouse=True)
def rings() -> Iterator[None]:
    """Removes the rings of all engines."""
    yield
    while RINGS:
        ring = RINGS.pop()
        ring.close()
        ring.unlink()


E = TypeVar("E")


class Engine:
    """The engine of a daemon, stepped by the test, on a log of trades; no test has to stop it.

    Snapshots are taken when the test says so; of a ``busy`` one after every bar.
    """

    def __init__(
        self,
        config: Config,
        progress: dict[str, Progress] | None = None,
        stream: protocol.NameStream = STREAM,
        busy: bool = False,
    ):
        self.events: list[protocol.EngineEvent] = []
        names = ["s", *(each.name for each in config.sessions if each.name != "s")]
        self.store = MetricStore.local({"session": names, "source": ["kafka"], "sink": ["k"]})
        self.ring = Ring.create(1024, "pause")
        RINGS.append(self.ring)
        built = build(config, progress or {})
        self.host = wire_engine(config, built, self.ring, self.store, self.events.append)
        self.loaded = built.loaded
        self.host.handle(stream)
        self.stream = stream_number(stream.source, stream.topic, stream.partition)
        self.given = 0
        self.now = 0
        self._positions = self.host.ready.positions
        for session in config.sessions if config.opens_by_partition else ():
            known = (progress or {}).get(session.name, Progress())
            self.do(replace(adding(known, CHANGES, session), questions=PAPER_SIX))
            self._positions = {session.name: self.of(protocol.SessionAdded)[-1].positions}
        if not busy:
            self.host.first.snapshots.clock = lambda: self.now
            for session in config.sessions:
                self.host.first.snapshots.set(session, built.tapes[session.name])

    @property
    def positions(self) -> dict[str, dict[str, Position]]:
        return self._positions

    @property
    def version(self) -> int:
        return self.host.first.sessions.built.tapes["s"].version

    def give(self, offset: int, *trades: Trade) -> None:
        """Trades from this offset on, each of which is answered before the next."""
        for at, trade in enumerate(trades, offset):
            self.put(at, trade)
            self.rest()

    def do(self, *commands: protocol.Command) -> None:
        for command in commands:
            self.host.handle(command)
        self.rest()

    def go_on(self) -> None:
        """The records of the session are read from now on."""
        self.host.input.partitions_assigned(["s"])

    def of(self, kind: type[E]) -> list[E]:
        """The events of a kind."""
        return [event for event in self.events if isinstance(event, kind)]

    def put(self, offset: int, trade: Trade) -> None:
        symbol, moment, cents = trade
        writer = RecordWriter(4)
        self.given += 1
        at = START + moment
        kind, values, x, words = TRADE, (cents * SECOND // 100, SIZE, 0, 0, 0), 0, ""
        if cents in EVENTS:
            kind, x, words = EVENTS[cents]
            values = (11 * SECOND // 10, 0, 0, number_of(words), 0)  # prices fit this factor of a split
        for number, chunk in enumerate(chunks_of(words)):
            writer.add(WORDS, symbol, at, at, chunk[:5], x=chunk[5], seq=number_of(words), part=number)
        writer.add(kind, symbol, at, at, values, x=x, ts_source=at, stream=self.stream, offset=offset)
        assert self.ring.push(writer.records) == len(writer)

    def rest(self) -> None:
        """Let it do all it has to."""
        while True:
            self.host.input.plane.step()
            if not self.host.scheduler.step() and not self.ring.fill:
                break

    def snapshot(self) -> None:
        """Take the snapshots of what changed."""
        deadline = time.monotonic() + 60
        self.now += 2 * SECOND
        while self.host.first.snapshots() is not None or self.host.first.snapshots._writing is not None:
            self.rest()
            assert time.monotonic() < deadline
        self.rest()

    def progress(self) -> dict[str, Progress]:
        """As if everything so far were acknowledged."""
        newest = {e.session: e for e in self.of(protocol.Committed)}
        return {
            name: Progress(1, each.version, 0, each.inputs.closed, written=each.inputs.written)
            for name, each in newest.items()
        }

    def answers(self) -> list[Answer]:
        return [event.answer for event in self.of(protocol.Answered)]

    def value(self, name: str, **labels: str) -> float:
        return self.store.value(f"foretick_{name}", **labels)


Key = tuple[str, str, int, int]


def keyed(answers: Sequence[Answer]) -> dict[Key, tuple[str, float, list[str]]]:
    """What an answer says, by session, question and version's newest event; the same ones must agree."""
    found: dict[Key, tuple[str, float, list[str]]] = {}
    counts: dict[tuple[str, str, int], int] = {}
    for answer in answers:
        name = answer.session, answer.question, answer.as_of
        counts[name] = counts.get(name, 0) + 1
        found[(*name, counts[name])] = answer.text, answer.logit_gap, sorted(answer.flags)
    return found


def killed(made: Config, log: list[Trade], seed: int, kills: int) -> tuple[list[Answer], list[bool]]:
    """Answers of engines that are killed now and then, and whether each came back from a snapshot.

    What is acknowledged at a kill is some version before the newest.
    """
    rng = random.Random(seed)
    deaths = sorted(rng.sample(range(len(log) // 3, len(log)), kills))
    engine, answers, restored, at = Engine(made), list[Answer](), list[bool](), 0
    known = [{"s": Progress()}]
    for death in [*deaths, len(log)]:
        while at < death:
            engine.give(at, log[at])
            at += 1
            if rng.random() < 0.2:
                engine.snapshot()
            if (found := engine.progress()) and found != known[-1]:
                known.append(found)
        if death == len(log):
            break
        acknowledged = rng.choice(known[-3:])
        known = [acknowledged]
        answers += [
            each for each in engine.answers() if each.data_version <= acknowledged[each.session].version
        ]
        engine = Engine(made, acknowledged)
        positions = engine.positions.get("s", {}).values()
        restored.append("s" in engine.positions)
        at = min((each.offset for each in positions), default=0)  # without a snapshot from the beginning
    answers += engine.answers()
    return answers, restored


def session(name: str, symbol: str = "X:a", **settings: object) -> SessionConfig:
    return SessionConfig(name=name, symbol=symbol, retention_tokens=256, **settings)  # type: ignore[arg-type]  # its own


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        ("compact", 1),
        ("compact", 2),
        ("compact exact", 2),
        ("decimal", 2),
        ("several", 2),
        ("rollup", 1),
        ("lateness", 2),
        ("corrections", 1),
        ("corrections", 3),
        ("events", 1),
        ("events", 4),
        ("compact events", 1),
        ("corrections events", 2),
        ("reset events", 1),
        ("compact reset events", 1),
        ("adjust events", 1),
        ("adjust corrections events", 2),
        ("compact adjust events", 1),
    ],
)
def test_killed_engines_answer_as_one_that_was_not(kind: str, seed: int, terse: Path, tmp_path: Path) -> None:
    settings: dict[str, dict[str, object]] = {
        "compact": {"retention_records": 6},
        "compact events": {"retention_records": 6},
        "compact exact": {"retention_records": 6, "semantics": "exact", "refresh_every": 2},
        "several": {"more_symbols": ("X:b",)},
        "rollup": {"retention_records": 8, "rollup": TIERS, "rollup_every": 2},
    }
    bars: dict[str, dict[str, object]] = {
        "lateness": {"lateness": Duration(SECOND), "late": "amend"},
        "corrections": {"late": "amend"},
        "corrections events": {"late": "amend"},
        "adjust corrections events": {"late": "amend"},
    }
    path = terse if "compact" in kind else None
    made = config(path, tmp_path / "on", session("s", **settings.get(kind, {})), **bars.get(kind, {}))
    log = log_of(2 if kind == "several" else 1, 30, seed)
    for on_split in ("reset", "adjust"):
        if on_split in kind:
            made = replace(made, events=EventsConfig(on_split=on_split))  # type: ignore[arg-type]
    if "events" in kind:
        for n, event in enumerate((-1, -2, -1, -3, -4, -1, -2, -3, -1)):
            at = 5 + 11 * n
            log.insert(at, (0, log[at - 1][1], event))
    if "corrections" in kind:  # every other trade comes two seconds late
        log = [(leg, max(0, at - n % 2 * 2 * SECOND), price) for n, (leg, at, price) in enumerate(log)]
    whole = Engine(replace(made, recovery=RecoveryConfig(interval=Duration(0))))
    whole.give(0, *log)
    expected = keyed(whole.answers())
    bound = tolerance.of_gap(whole.loaded, 10.0)
    answers, restored = killed(made, log, seed, 3)
    found = keyed(answers)
    assert found.keys() == expected.keys()
    for key, (text, gap, flags) in expected.items():
        assert (found[key][0], found[key][2]) == (text, flags), key
        # the same sums in another order: the window lies in other blocks, the prefix was prefilled at once
        assert found[key][1] == tolerance.near(gap, bound), key
    assert any(restored)


COMPACT = session("s", retention_records=6)


def test_killed_engines_answer_by_question_packs_as_one_that_was_not(terse: Path, tmp_path: Path) -> None:
    """Each reads the pack anew."""
    write_pack(tmp_path / "near.pack", random_pack(terse, tokens=2))
    near = QuestionConfig("near", NEAR, CHOICES, pack=str(tmp_path / "near.pack"))
    made = replace(config(terse, tmp_path / "on", COMPACT), questions=(near,), standing="none")
    log = log_of(1, 30, 1)
    whole = Engine(replace(made, recovery=RecoveryConfig(interval=Duration(0))))
    whole.give(0, *log)
    expected = keyed(whole.answers())
    answers, restored = killed(made, log, 1, 3)
    found = keyed(answers)
    assert found.keys() == expected.keys()
    bound = tolerance.of_gap(whole.loaded, 40.0)
    for key, (text, gap, flags) in expected.items():
        assert (found[key][0], found[key][2]) == (text, flags), key
        assert found[key][1] == tolerance.near(gap, bound), key
    assert any(restored)


ADAPTED = AdaptationState(ModelConfig().coverage, {"a question's hash": 0.93})


@pytest.fixture
def left(terse: Path, tmp_path: Path) -> tuple[Config, dict[str, Progress], list[Trade]]:
    """An engine that was killed behind its second snapshot, with all of its answers acknowledged."""
    made, log = config(terse, tmp_path / "on", COMPACT), log_of(1, 12, 3)
    engine = Engine(made)
    engine.host.first.parts.confidence.restore("s", ADAPTED)
    for first, last in ((0, 19), (19, 31), (31, 36)):
        engine.give(first, *log[first:last])
        if last < len(log):
            engine.snapshot()
    assert engine.value("snapshots_written_total", session="s") == 2
    engine.host.first.snapshots.note()
    assert 0 < engine.value("snapshot_age_seconds", session="s") < 60
    files = sorted((tmp_path / "on").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    assert [path.name for path in files] == ["s.0.snapshot", "s.1.snapshot"]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    progress = engine.progress()
    return made, progress, log


Left = tuple[Config, dict[str, Progress], list[Trade]]


def offset_of(engine: Engine) -> int | None:
    """Where the session is read on."""
    found = engine.positions.get("s", {}).get("X:a")
    return None if found is None else found.offset


def test_the_newest_snapshot_that_is_whole_and_acknowledged_is_used(left: Left) -> None:
    made, progress, _ = left
    directory = Path(made.recovery.directory)
    (newest, older), raw = (directory / f"s.{n}.snapshot" for n in (1, 0)), b""

    def again(progress: dict[str, Progress], made: Config = made) -> tuple[int | None, dict[str, float]]:
        engine = Engine(made, progress)
        reasons = {
            reason: engine.value("snapshots_refused_total", reason=reason)
            for reason in ("torn", "foreign", "newer", "no_room")
        }
        offset, version = offset_of(engine), engine.version
        used = {31: newest, 19: older}.get(offset or 0)
        stored = 0 if used is None else read_header(used).state.version
        assert version == max(stored, progress["s"].version)
        assert engine.value("snapshots_restored_total", session="s") == (offset is not None)
        return offset, {reason: n for reason, n in reasons.items() if n}

    assert again(progress) == (31, {})
    # the bar that closed last before the second one
    second = START + 6 * SECOND
    behind = {"s": Progress(1, progress["s"].version, 0, (second,))}
    assert again(behind) == (19, {"newer": 1})
    # another engine has answered the same bars since, under lower numbers
    assert again({"s": Progress(2, 3, 0, progress["s"].closed)}) == (31, {})
    assert again({"s": Progress(2, 3, 0, (second,))}) == (19, {"newer": 1})
    assert again({"s": Progress(1, 100)}) == (None, {"newer": 2})
    raw = newest.read_bytes()
    newest.write_bytes(raw[:-1])
    assert again(progress) == (19, {"torn": 1})
    newest.write_bytes(raw[:200] + bytes([raw[200] ^ 1]) + raw[201:])
    assert again(progress) == (19, {"torn": 1})
    newest.write_bytes(raw)
    shorter = replace(made, sessions=(replace(COMPACT, retention_records=5),))
    assert again(progress, shorter) == (None, {"foreign": 2})
    other = replace(made, sessions=(replace(COMPACT, name="other"),))
    (directory / "other.0.snapshot").write_bytes(raw)
    engine = Engine(other, {"other": progress["s"]})
    assert engine.value("snapshots_refused_total", reason="foreign") == 1
    older.unlink()
    off = recovering(made, interval=Duration(0))
    assert again(progress, off) == (None, {})


def test_the_last_snapshot_that_a_restart_can_use_stays(terse: Path, tmp_path: Path) -> None:
    """Acknowledgements are not stored for a while, as where a broker is away."""
    made, log = config(terse, tmp_path / "on", COMPACT), log_of(1, 24, 3)
    engine = Engine(made)

    def until(end: int) -> int | None:
        """Where a restart would read on, after a snapshot behind the record before ``end``."""
        engine.give(engine.given, *log[engine.given : end])
        engine.snapshot()
        return offset_of(Engine(made, dict(stored)))

    stored = {"s": Progress()}

    def store_all() -> None:
        stored.update(engine.progress())
        engine.host.handle(protocol.NoteProgress(dict(stored)))

    assert until(12) is None
    store_all()
    assert [until(end) for end in (18, 24, 30, 36)] == [12] * 4
    store_all()
    assert [until(end) for end in (42, 48, 54)] == [36] * 3
    store_all()
    raw = max((tmp_path / "on").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    raw.write_bytes(raw.read_bytes()[:-1])
    assert until(60) == 36, "the torn one was written over"


def test_what_was_answered_goes_to_the_tape_and_is_not_asked(left: Left) -> None:
    """Bars after the snapshot, up to the newest acknowledged one, version by version."""
    made, progress, log = left
    engine = Engine(recovering(made, while_rebuilding="refuse"), progress)
    engine.do(chat(1, exact=True), chat(2))
    assert [e.code for e in engine.of(Failed)] == ["rebuilding"] * 2
    engine.give(31, *log[31:])
    committed = engine.of(protocol.Committed)
    first = progress["s"].version + 1
    assert [(e.version, e.history) for e in committed] == [(first + n, True) for n in range(len(committed))]
    # so that the gateway can acknowledge their records
    assert [e.version for e in engine.of(protocol.NotDue)] == [e.version for e in committed]
    assert {event.inputs.closed for event in committed} == {progress["s"].closed}
    assert engine.answers() == []
    engine.host.handle(chat(2, exact=True))
    engine.give(len(log), (0, 13 * SECOND, 10_000))
    assert len(engine.of(Finished)) == 1
    engine.do(chat(3))
    _, answered = engine.of(Finished)
    assert "warm_up" not in answered.metadata.flags
    assert len(engine.answers()) == 6
    newest = engine.of(protocol.Committed)[-1]
    assert not newest.history
    assert newest.inputs.closed > progress["s"].closed


@pytest.mark.parametrize("behind", [0, 5])
def test_answers_given_before_are_ready_again_and_not_news(behind: int, terse: Path, tmp_path: Path) -> None:
    """Once no bar that was answered is to come; ``behind``: records since the snapshot."""
    made, log = config(terse, tmp_path / "on", COMPACT), log_of(1, 12, 3)
    engine = Engine(made)
    engine.give(0, *log[: len(log) - behind])
    engine.snapshot()
    engine.give(len(log) - behind, *log[len(log) - behind :])
    given = [each for each in engine.answers() if each.data_version == engine.version]
    assert len(given) == 6
    again = Engine(made, engine.progress())
    again.go_on()
    idle = again.host.first.parts.answers.idle
    if behind:
        assert idle() == AGAIN_S
        assert again.of(protocol.Repeated) == []
        again.give(offset_of(again) or 0, *log[offset_of(again) :])
    while idle() is not None:
        again.rest()
    repeated = [event.answer for event in again.of(protocol.Repeated)]
    assert keyed(repeated).keys() == keyed(given).keys()
    for name, (text, gap, _) in keyed(given).items():
        assert keyed(repeated)[name][0] == text
        assert keyed(repeated)[name][1] == tolerance.near(gap, tolerance.of_gap(engine.loaded, 10.0))
    assert again.answers() == []
    again.give(len(log), (0, 13 * SECOND, 10_000))
    assert {each.data_version for each in again.answers()} == {again.version}
    assert idle() is None


def recovering(made: Config, **settings: object) -> Config:
    return replace(made, recovery=replace(made.recovery, **settings))


def adding(progress: Progress, number: int = 2, session: SessionConfig = COMPACT) -> protocol.OpenSession:
    return protocol.OpenSession(number, session, (), {"X:a": 0}, progress, "")


def asked_both_ways(engine: Engine) -> tuple[Finished, Finished]:
    """What it replies to an ask and to a chat with the session, as it is."""
    engine.do(chat(1, exact=True), chat(2))
    by_id = {event.id: event for event in engine.of(Finished)}
    return by_id[1], by_id[2]


@pytest.mark.parametrize("rereads", [True, False])
def test_a_session_without_snapshot_has_no_data_until_its_window_is_there(left: Left, rereads: bool) -> None:
    """Where a log is read again, that begins long after questions come: the group has to form."""
    made, progress, _ = left
    zeromq = ZmqSourceConnector("tcp://127.0.0.1:1")
    source = log_source() if rereads else SourceConfig(kind="zeromq", zeromq=zeromq)
    made = recovering(replace(made, source=source), interval=Duration(0))
    engine = Engine(made, progress)
    engine.do(chat(1, exact=True), chat(2))
    assert [event.code for event in engine.of(Failed)] == ["no_data", "no_data"]
    engine = Engine(recovering(made, while_rebuilding="refuse"), progress)
    engine.do(chat(1, exact=True))
    assert [event.code for event in engine.of(Failed)] == ["rebuilding" if rereads else "no_data"]


def test_a_restored_session_answers_questions_before_its_first_record(left: Left) -> None:
    """And has the coverage that its labels had adapted."""
    made, progress, _ = left
    engine = Engine(made, progress)
    found = engine.host.first.parts.confidence.cut("s")
    assert (found.target, found.asked) == (ADAPTED.target, ADAPTED.asked)
    for each in asked_both_ways(engine):
        assert "warm_up" in each.metadata.flags  # newer bars are read again
        assert each.metadata.data_version == progress["s"].version
        assert each.times is not None
        assert each.times.as_of <= START + progress["s"].closed[0]
        # received by another process, whose monotonic clock may be another: as old as since its source had it
        assert ages(each.times, 0, time.time_ns(), time.monotonic_ns()).daemon > (time.time_ns() - START) // 2


def test_a_session_that_is_added_goes_on_from_its_snapshot_and_a_removed_one_has_none(left: Left) -> None:
    made, progress, log = left
    files = Path(made.recovery.directory)
    engine = Engine(replace(made, sessions=(replace(COMPACT, name="other", symbol="X:b"),)))
    engine.do(protocol.OpenSession(1, COMPACT, (), {"X:a": 1}, progress["s"], ""))
    (added,) = engine.of(protocol.SessionAdded)
    assert added.positions == {"X:a": Position("kafka", "ticks", 0, 31)}
    engine.give(25, *((1, at, price) for _, at, price in log[25:]))
    assert engine.value("records_in_snapshot_total", session="s") == 6
    newest = engine.of(protocol.Committed)[-1]
    assert (newest.history, newest.inputs.closed) == (True, progress["s"].closed)
    assert len(list(files.iterdir())) == 2
    engine.do(protocol.CloseSession(2, "s"))
    assert list(files.iterdir()) == []


def test_a_session_that_begins_anew_does_not_take_what_was_read_before(left: Left) -> None:
    """Records of the old session are still in the ring; they are read again from the snapshot."""
    made, progress, log = left
    engine, whole = Engine(made, progress), Engine(made, progress)
    for each in (engine, whole):
        each.go_on()
        for offset in range(31, len(log)):
            each.put(offset, log[offset])
        each.rest()
    more = [(0, (12 + n) * SECOND, 10_000 + n) for n in range(4)]
    for offset, trade in enumerate(more, len(log)):
        engine.put(offset, trade)
        whole.give(offset, trade)
    engine.host.handle(protocol.CloseSession(1, "s", keeps=True))
    removed = False
    while not removed:  # the ring is not read meanwhile
        engine.host.scheduler.step()
        while engine.host.input.plane._changes:
            engine.host.input.plane._change_next()
        removed = bool(engine.of(protocol.Done))
    assert engine.ring.fill == len(more) / 1024
    engine.store.add_session("s")
    engine.host.handle(adding(progress["s"]))
    engine.host.scheduler.step()
    added = engine.of(protocol.SessionAdded)[0]
    assert added.positions == {"X:a": Position("kafka", "ticks", 0, 31)}
    engine.go_on()
    engine.give(31, *log[31:], *more)
    assert engine.progress() == whole.progress()
    again, expected = (
        [(e.version, e.live_tokens, e.inputs.closed) for e in each.of(protocol.Committed)]
        for each in (engine, whole)
    )
    assert again[-4:] == expected[-4:]


@pytest.mark.parametrize("serves", [True, False])
def test_a_session_that_is_removed_takes_its_files_along_unless_another_daemon_answers_it(
    terse: Path, tmp_path: Path, serves: bool
) -> None:
    engine = Engine(config(terse, tmp_path, COMPACT))
    engine.give(0, *log_of(1, 5, 3))
    engine.snapshot()
    files = list(tmp_path.rglob("s.*.snapshot"))
    assert files
    engine.do(protocol.CloseSession(1, "s", serves=serves))
    assert engine.of(protocol.Done)
    assert [each.exists() for each in files] == [not serves] * len(files)


@pytest.mark.parametrize("since", [0, 25], ids=["no snapshot", "a snapshot"])
def test_a_session_that_begins_anew_answers_as_before_around_new_anchors(
    terse: Path, tmp_path: Path, since: int
) -> None:
    """Its window stands behind the same prefix, whether its questions came with its settings or later."""
    made, log = config(terse, tmp_path, COMPACT), log_of(1, 15, 3)
    prices = [(symbol, moment, cents * (1 + n // 12)) for n, (symbol, moment, cents) in enumerate(log)]
    whole, engine = Engine(made), Engine(made)
    whole.give(0, *prices)
    engine.give(0, *prices[:since])
    engine.snapshot()
    progress = engine.progress().get("s", Progress())
    engine.do(protocol.CloseSession(1, "s", keeps=True))
    asked = tuple(each.question for each in questions_of(made))
    engine.do(replace(adding(progress), questions=asked))
    assert engine.value("snapshots_restored_total", session="s") == (since > 0)
    engine.go_on()
    engine.give(since, *prices[since:])
    assert whole.value("anchors_total", session="s") == 3
    expected, found = keyed(whole.answers()), keyed(engine.answers())
    assert found.keys() == expected.keys()
    bound = tolerance.of_gap(whole.loaded, 10.0)
    for key, (text, gap, _) in expected.items():
        assert found[key][:2] == (text, tolerance.near(gap, bound)), key
    engine.snapshot()
    again = Engine(made, engine.progress())
    assert again.value("snapshots_refused_total", reason="foreign") == 0
    assert again.value("snapshots_restored_total", session="s") == 1


CHANGES = 100
"""Ids of commands that change something, from this one on."""


def asks(engine: Engine) -> list[tuple[int, str | int]]:
    """Id of each question, and the version of its answer or why it failed, in order."""
    return [
        (event.id, event.code if isinstance(event, Failed) else event.metadata.data_version or 0)
        for event in engine.events
        if isinstance(event, Finished | Failed) and event.id < CHANGES
    ]


def test_questions_are_answered_from_the_old_window_until_a_session_that_begins_anew_has_another(
    left: Left,
) -> None:
    """Before it is added again; from then on, and what was not answered by then, from the new window."""
    made, progress, log = left
    engine = Engine(made, progress)
    first = progress["s"].version
    engine.go_on()
    engine.give(31, *log[31:], (0, 13 * SECOND, 10_000))
    old = engine.version
    assert old > first

    engine.do(protocol.CloseSession(101, "s", keeps=True))
    assert isinstance(engine.events[-1], protocol.Done)
    engine.give(len(log) + 1, (0, 15 * SECOND, 10_000))
    engine.do(chat(1, exact=True))
    assert asks(engine) == [(1, old)]
    engine.host.handle(protocol.SetQuestions(109, "s", ()))
    assert engine.events[-1] == Failed(109, "rebuilding", SESSION_RESET.message)
    added = adding(progress["s"], 102)
    engine.do(chat(2, exact=True), chat(3), added, chat(4, exact=True), chat(5))
    assert sorted(asks(engine)[1:]) == [(2, first), (3, first), (4, first), (5, first)]
    assert engine.of(protocol.SessionAdded)
    engine.give(31, *log[31:], (0, 13 * SECOND, 10_000))
    assert engine.version == old


@pytest.mark.parametrize("behind", ["wait", "skip"])
def test_all_bars_behind_an_old_snapshot_are_read_again(
    terse: Path, tmp_path: Path, behind: Literal["wait", "skip"]
) -> None:
    """More than a window holds, and faster than their source had them: they left traces in the window."""
    made = config(terse, tmp_path / "on", session("s", retention_records=6))
    log = [(0, n * SECOND // 2, 10_000 + n % 7) for n in range(60)]
    first = Engine(replace(made, source=log_source()))
    first.give(0, *log[:21])
    first.snapshot()
    first.give(21, *log[21:])
    again = Engine(replace(made, source=log_source(behind)), first.progress())
    begin = again.positions["s"]["X:a"].offset
    again.go_on()
    for offset in range(begin, len(log)):
        again.put(offset, log[offset])
    again.rest()
    versions = [(e.bars, e.history) for e in again.of(protocol.Committed)]
    assert versions == [(1, True)] * 19
    assert again.value("bars_skipped_total", session="s") == 0


@pytest.mark.parametrize("closing", [{"keeps": True}, {"releases": True}], ids=str)
def test_the_metrics_of_a_session_that_is_opened_again_go_on(
    left: Left, monkeypatch: pytest.MonkeyPatch, closing: dict[str, bool]
) -> None:
    """In another process, and each time: another daemon may join and leave again and again."""
    made, progress, log = left
    gateway = MetricStore.create({"session": ["s"], "source": ["kafka"], "sink": ["k"]})
    monkeypatch.setattr(MetricStore, "local", lambda labels: MetricStore.attach(gateway.blocks))
    engine = Engine(made, progress)
    try:
        for again in range(3):
            if again:
                engine.do(protocol.CloseSession(1, "s", **closing), adding(progress["s"]))
            engine.go_on()
            engine.give(31, *log[31:])
            assert gateway.value("foretick_bars_total", session="s") == 1 + again
    finally:
        gateway.unlink()
        gateway.close()


def test_a_session_that_is_closed_takes_no_memory_and_keeps_its_snapshots(left: Left) -> None:
    """Questions that it was asked end; opened again, it goes on from its snapshot."""
    made, progress, log = left
    engine = Engine(made, progress)
    built = engine.host.first.sessions.built
    empty = built.engine.pool.total_blocks - built.engine.pool.free_blocks
    engine.host.handle(chat(1))
    engine.do(protocol.CloseSession(101, "s", releases=True), chat(2))
    assert sorted(asks(engine)) == [(1, "rebuilding"), (2, "unknown_session")]
    assert not built.tapes
    assert built.engine.pool.total_blocks - built.engine.pool.free_blocks < empty
    engine.do(adding(progress["s"], 102))
    assert engine.version == progress["s"].version
    assert engine.value("snapshots_restored_total", session="s") == 2
    engine.go_on()
    engine.give(31, *log[31:])
    assert engine.version > progress["s"].version


def test_a_session_that_cannot_begin_anew_is_closed_and_may_be_opened_again(left: Left) -> None:
    made, progress, _ = left
    engine = Engine(made, progress)
    engine.do(protocol.CloseSession(101, "s", keeps=True))
    engine.host.handle(chat(1, exact=True))
    longer = replace(COMPACT, retention_tokens=10**9)
    engine.do(adding(progress["s"], 102, longer))
    refused = [event.id for event in engine.of(Failed) if event.id >= CHANGES]
    assert (refused, asks(engine)) == ([102], [(1, "unknown_session")])
    engine.do(adding(progress["s"], 3))
    assert [event.id for event in engine.of(protocol.SessionAdded)] == [3]


def test_a_source_without_a_log_goes_on_with_a_gap(terse: Path, tmp_path: Path) -> None:
    made, log = config(terse, tmp_path, COMPACT), log_of(1, 15, 3)
    live = protocol.NameStream("zeromq", "ticks", 0, False)
    first = Engine(made, stream=live)
    for begin, end in ((0, 16), (16, 30)):
        first.give(begin, *log[begin:end])
        first.snapshot()
    progress = first.progress()
    anew = Engine(made, stream=live)
    assert anew.value("snapshots_refused_total", reason="newer") == 2
    second = Engine(made, progress, live)
    assert second.positions == {"s": {}}
    assert second.version == progress["s"].version
    # its offsets begin again: nothing is taken for what it had
    second.give(0, *log[30:])
    gaps = [("gap" in answer.flags) for answer in second.answers() if answer.question == "trend"]
    assert gaps[0]
    assert not gaps[-1]
    assert second.value("records_in_snapshot_total", session="s") == 0


def test_a_busy_engine_takes_snapshots_and_no_room_is_reported_once(
    terse: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its idle hook is never called: the snapshots begin at commits."""
    log = log_of(1, 20, 5)
    made = config(terse, tmp_path / "a", COMPACT)
    small = recovering(made, directory=str(tmp_path / "b"), max_bytes=1000)
    for each, written in ((made, True), (small, False)):
        engine = Engine(each, busy=True)
        engine.give(0, *log)
        deadline = time.monotonic() + 60
        while engine.host.first.snapshots._writing is not None:
            engine.rest()
            assert time.monotonic() < deadline
        assert (engine.value("snapshots_written_total", session="s") > 3) == written
        unwritten = engine.value("snapshot_write_failures_total", reason="no_room")
        assert (unwritten > 3) != written
    assert caplog.text.count("has no new snapshot") == 1


def test_an_engine_that_stops_leaves_its_newest_state(terse: Path, tmp_path: Path) -> None:
    made = config(terse, tmp_path, COMPACT)
    made = recovering(made, interval=Duration(3600 * SECOND))
    log = log_of(1, 12, 3)
    engine = Engine(made)
    engine.host.start()
    for offset, trade in enumerate(log):
        engine.put(offset, trade)
    engine.host.stop(20)
    progress = engine.progress()
    assert engine.value("snapshots_written_total", session="s") == 1
    after = Engine(made, progress)
    assert offset_of(after) == len(log)
    assert not after.host.input.rebuilding("s")


def test_sessions_outside_the_pool_have_snapshots_too(terse: Path, tmp_path: Path) -> None:
    """While the engine serves, and as it stops."""
    made = config(terse, tmp_path, COMPACT)
    made = replace(made, pool=replace(made.pool, host_blocks=64))
    log = log_of(1, 12, 3)
    engine = Engine(made)
    residency = engine.host.first.snapshots.built.tiers.residency
    assert residency is not None
    for written, take in enumerate((engine.snapshot, lambda: engine.host.first.snapshots.close(10)), 1):
        engine.give(engine.given, *log[engine.given : written * 6])
        residency.reclaim(made.pool.frame_limit)
        while engine.host.first.snapshots.built.tapes["s"].resident:
            engine.rest()
        take()
        assert engine.value("snapshots_written_total", session="s") == written
    after = Engine(made, engine.progress())
    assert not after.host.input.rebuilding("s")


def test_a_session_that_left_is_written_by_its_new_owner_alone(terse: Path, tmp_path: Path) -> None:
    """Neither while this daemon serves nor as it stops, nor is it removed; back here it is written again."""
    made, log = config(terse, tmp_path, COMPACT), log_of(1, 24, 3)
    engine = Engine(made)
    engine.give(0, *log[:12])
    engine.snapshot()
    engine.host.handle(protocol.PartitionsRevoked(("s",)))
    engine.give(12, *log[12:24])
    engine.snapshot()
    engine.host.first.snapshots.close(10)
    assert engine.value("snapshots_written_total", session="s") == 1
    engine.host.handle(protocol.PartitionsAssigned(("s",)))
    engine.snapshot()
    assert engine.value("snapshots_written_total", session="s") == 2
    engine.host.handle(protocol.PartitionsRevoked(("s",)))
    engine.do(protocol.CloseSession(1, "s"))
    assert isinstance(engine.events[-1], protocol.Done)
    assert len(list(tmp_path.iterdir())) == 2


def generation(path: Path, epoch: int, version: int, written_ns: int) -> None:
    """A snapshot of an epoch and version."""
    memory = pool()
    tape = tape_of(memory, Retention(20))
    append(memory, tape, [1, 2, 3])
    state = replace(tape.state, version=version)
    identity = Identity.of(memory, model="m", tokenizer="t", frozen=[])
    header = SnapshotHeader("a", identity, 4, state, 0, msgspec.msgpack.encode({"epoch": epoch, "more": 1}))
    write_snapshot(path, header, memory, tape.live_ranges)
    tape.release()
    os.utime(path, ns=(written_ns, written_ns))


def test_the_newest_snapshot_is_that_of_the_newest_epoch_and_version(tmp_path: Path) -> None:
    """Not the one written last, which may be a former owner's. A file that is not whole is refused first."""
    one, other = (tmp_path / f"a.{n}.snapshot" for n in (0, 1))
    files = SnapshotFiles(tmp_path, 10**6)
    for of_one, of_other in (((1, 7), (1, 6)), ((2, 3), (1, 9)), ((2, 9), (2, 3))):
        generation(one, *of_one, written_ns=1000)
        generation(other, *of_other, written_ns=2000)
        assert files.newest_first("a") == [one, other]
        assert files.oldest_first("a") == [other, one]
    SnapshotFiles(tmp_path, one.stat().st_size + 10).make_room(tmp_path / "b.0.snapshot", 10)
    assert list(tmp_path.iterdir()) == [one]
    other.write_bytes(one.read_bytes()[:-1])
    assert files.newest_first("a") == [other, one]
    assert files.oldest_first("a") == [other, one]


def test_files_give_way_to_newer_ones_of_their_session_only(tmp_path: Path) -> None:
    files = SnapshotFiles(tmp_path, 300)
    for age, name in enumerate(["a.0", "b.0", "a.1", "b.1"]):
        path = tmp_path / f"{name}.snapshot"
        path.write_bytes(bytes(60))
        os.utime(path, ns=(age, age))
    assert [path.name for path in files.newest_first("a")] == ["a.1.snapshot", "a.0.snapshot"]
    assert [path.name for path in files.oldest_first("a")] == ["a.0.snapshot", "a.1.snapshot"]
    assert [path.name for path in files.oldest_first("c")] == ["c.0.snapshot", "c.1.snapshot"]
    files.make_room(files.oldest_first("a")[0], 120)
    assert len(list(tmp_path.iterdir())) == 4
    with pytest.raises(SnapshotNoRoom, match=r"recovery\.max_bytes is 300"):
        files.make_room(files.oldest_first("c")[0], 200)
    assert len(list(tmp_path.iterdir())) == 4
    files.make_room(files.oldest_first("c")[0], 100)
    assert {path.name for path in tmp_path.iterdir()} == {f"{n}.snapshot" for n in ("a.1", "b.0", "b.1")}
    files.remove("b")
    assert [path.name for path in tmp_path.iterdir()] == ["a.1.snapshot"]


def test_what_a_killed_engine_left_unfinished_is_removed_at_start_and_takes_room_before(
    tmp_path: Path,
) -> None:
    """Its lock ends with it; the file that another daemon is writing to the shared directory stays."""
    files = SnapshotFiles(tmp_path, 300)
    left = tmp_path / ".a.0.snapshot.4711.tmp"
    left.write_bytes(bytes(200))
    files.prepare()
    assert not left.exists()
    with replacing(tmp_path / "b.0.snapshot") as file:
        file.write(bytes(200))
        file.flush()
        SnapshotFiles(tmp_path, 300).prepare()
        assert len(list(tmp_path.iterdir())) == 1
        with pytest.raises(SnapshotNoRoom, match=r"recovery\.max_bytes is 300"):
            files.make_room(tmp_path / "a.0.snapshot", 200)
        files.make_room(tmp_path / "a.0.snapshot", 100)
    left.write_bytes(bytes(200))
    files.make_room(tmp_path / "a.0.snapshot", 100)
    assert [path.name for path in tmp_path.iterdir()] == ["b.0.snapshot"]


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SettingError, match=r"recovery\.directory: cannot make"):
        SnapshotFiles(tmp_path / "file" / "x", 0).prepare()
