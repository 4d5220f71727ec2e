"""Which bars a version shows as they are and which summed up, and that the model reads just that."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.config.checks import cross_check
from daemon.config.schema import (
    UNTRAINED,
    Config,
    FlashConfig,
    ModelConfig,
    PoolConfig,
    RollupConfig,
    SchedulerConfig,
    SessionConfig,
)
from daemon.engine.assembly import refresher_of, scheduler_of
from daemon.engine.build import Built, build
from daemon.engine.metrics import EngineObserver
from daemon.engine.pool_size import PoolSizes
from daemon.engine.rollups import Rollups, leaving
from engine.model.canary import dense_logits
from engine.step import Chunk
from feeds.connector import SettingError
from feeds.durations import Duration
from flash.question import Question
from flash.registry import Registry
from ingest.lines import LineSpec, clock_text, decimal
from ingest.plane import TapeRecord
from ingest.rollup import END, SummedBar, introduction
from metrics.store import MetricStore
from regions.tape import Tape
from scheduler.request import Failure
from scheduler.tapes import TapeItem, TapeItems
from tests.kit import tolerance
from tests.kit.models import terse_directory

SECOND, NANO = 10**9, 10**9
START = 1_723_161_600 * SECOND
TIERS = (RollupConfig(Duration(4 * SECOND), 3), RollupConfig(Duration(16 * SECOND), 1000))
NAMES = ("a", "b", "plain")
QUESTION = Question("high", "What was the highest price?")


def session(name: str, **settings: object) -> SessionConfig:
    known = {"retention_tokens": 700, "retention_records": 16, "rollup": TIERS, "rollup_every": 4}
    return SessionConfig(name=name, symbol=f"X:{name}", **known | settings)  # type: ignore[arg-type]  # its own


def config(*sessions: SessionConfig) -> Config:
    return Config(
        model=ModelConfig(path=UNTRAINED, layers="torch", dtype="float32"),
        sessions=sessions,
        pool=PoolConfig(frame_limit=4096),
        scheduler=SchedulerConfig(chunk_min=64, max_prompt_tokens=128, max_new_tokens=32),
        flash=FlashConfig(placement="frozen"),
        standing="none",
    )


@pytest.fixture(scope="module")
def built() -> Built:
    return build(config(*map(session, NAMES[:2]), session("plain", rollup=())), {})


class World:
    """Sessions of a daemon's engine, stepped by the test; each has prices of its own."""

    def __init__(self, built: Built) -> None:
        self.config = config(*map(session, NAMES[:2]), session("plain", rollup=()))
        self.built, self.rng = built, random.Random(3)
        self.store = MetricStore.local({"session": list(NAMES), "source": ["s"], "sink": ["k"]})
        observer = EngineObserver(self.store, built.engine.pool)
        self.scheduler = scheduler_of(self.config, built, observer)
        registry = Registry(built.prepare)
        self.refresher = refresher_of(self.config, built, self.scheduler, registry, observer)
        self.rollups = Rollups(self.config, built, self.scheduler, self.store)
        self.scheduler.subscribe(self.check)
        self.bars: dict[str, list[SummedBar]] = {name: [] for name in NAMES}
        self.committed = dict.fromkeys(NAMES, 0)
        self.read: dict[str, list[int]] = {}
        """What a question about the newest version reads before it."""
        self.versions = self.full = 0
        """Versions that were checked, and those that show all bars."""

    def value(self, name: str, session: str = "a") -> float:
        return self.store.value(f"foretick_rollup_{name}", session=session)

    def feed(self, name: str, n: int) -> None:
        tape, own = self.built.tapes[name], self.bars[name]
        items = []
        for _ in range(n):
            after = own[-1].ts_open if own else START
            low = self.rng.randrange(100, 200) + 1000 * NAMES.index(name)
            prices = [low * NANO, (low + self.rng.randrange(9)) * NANO, low * NANO, low * NANO]
            own.append(SummedBar(after + self.rng.choice([1, 1, 1, 3]) * SECOND, *prices, NANO))
            items.append(TapeItem(self.tokens(own[-1]), record(own[-1]), own[-1].ts_open))
        self.scheduler.append((tape, items))

    def tokens(self, bar: SummedBar) -> list[int]:
        numbers = [decimal(value, 2) for value in bar[1:5]] + [decimal(bar.volume, 3)]
        return self.built.prompt.encode(",".join([clock_text(bar.ts_open, SECOND), *numbers]) + "\n")

    def run(self, steps: int = 10_000) -> None:
        for _ in range(steps):
            if not self.scheduler.step():
                return

    def lines(self, tape: Tape) -> tuple[list[list[str]], list[list[str]]]:
        """The rollup and the window of the newest version, as a reader sees them."""
        decode = self.built.prompt.tokenizer.decode
        _, begins, rollup = decode(tape.prefix).rpartition(introduction(LineSpec()))
        assert rollup.endswith(END) == bool(begins)
        summed = [line.split(",") for line in rollup.removesuffix(END).splitlines()] if begins else []
        return summed, [line.split(",") for line in decode(tape.window).splitlines()]

    def check(self, tape: Tape, version: int, records: TapeItems) -> None:
        """Every bar is in one line; what is missing is counted; nothing is of another session."""
        self.committed[tape.name] += len(records)
        self.read[tape.name] = [*tape.prefix, *tape.window]
        fed = self.bars[tape.name][: self.committed[tape.name]]
        rollup, window = self.lines(tape)
        summed = sum(int(line[7]) for line in rollup)
        if tape.name == "plain":
            assert not rollup
            return
        missing = len(fed) - summed - len(window)
        assert missing == self.value("missing_bars", tape.name)
        shown = fed[:summed] + fed[summed + missing :]
        highs = [float(line[3]) for line in rollup] + [float(line[2]) for line in window]
        assert max(highs) == max(bar.high for bar in shown) / NANO
        volumes = [float(line[6]) for line in rollup] + [float(line[5]) for line in window]
        assert sum(volumes) == len(shown)
        low = 1000 * NAMES.index(tape.name)
        assert all(low < high < low + 1000 for high in highs)
        self.versions += 1
        self.full += not missing

    def assert_dense(self, tape: Tape) -> None:
        """A question gets the dense model's logits behind frozen prefix, rollup and window."""
        question = self.built.prompt.question(QUESTION.text)
        fork = tape.fork()
        assert fork.acquire(len(question))
        logits = self.built.engine.logits([Chunk(fork, question)])
        fork.release()
        expected = dense_logits(self.built.loaded, self.read[tape.name] + question)[-len(question) :]
        tolerance.assert_logits(self.built.loaded, logits, expected)


def record(bar: SummedBar) -> TapeRecord:
    return TapeRecord((), bar.ts_open, 0, 0, 0, 0, 0, 0, 0, bar)


def test_every_version_shows_every_bar_once_or_counts_it_as_missing(built: Built) -> None:
    """At the pace of the data nothing is missing; a burst leaves a hole, which the next rollup closes."""
    world = World(built)
    a, b = built.tapes["a"], built.tapes["b"]
    for n in range(50):  # one by one, with time for the refresh between
        for name in NAMES:
            world.feed(name, 1)
        world.run()
        assert world.value("missing_bars") == world.value("missing_bars", "b") == 0
        assert a.live_records <= 16
        if n in (20, 35):
            world.assert_dense(a)
    assert world.versions == world.full == 100
    # other numbered questions do not take a rollup back, nor bars that are on their way there
    built.prefixes.number("b", [QUESTION], lambda prefix: world.scheduler.refresh(b, prefix))
    for _ in range(12):
        world.feed("b", 1)
        world.run(3)
    world.run()
    world.feed("b", 1)
    world.run()
    assert QUESTION.text in built.prompt.tokenizer.decode(b.prefix)
    world.assert_dense(b)
    # bursts: older bars are evicted before their rollup is there
    full = world.full
    for _ in range(8):
        world.feed("a", 7)
        world.run(1)
    world.run()
    assert world.full < full + 8
    for _ in range(2):
        world.feed("a", 1)
        world.run()
    assert world.value("missing_bars") == 0
    world.assert_dense(a)
    # bars that never reached the tape are told from a quiet market
    world.rollups.on_drop(a, [], Failure("test", "lost"))
    world.feed("a", 20)
    world.run()
    world.feed("a", 1)
    world.run()
    rollup, _ = world.lines(a)
    assert [line[8:] for line in rollup].count(["gap"]) == 1
    world.rollups.forget(a)
    world.feed("a", 1)
    world.run()
    world.scheduler.close()


@given(
    live=st.integers(1, 200), room=st.integers(0, 200), outside=st.integers(0, 199), every=st.integers(1, 99)
)
def test_bars_move_in_lots_before_the_window_is_full(live: int, room: int, outside: int, every: int) -> None:
    outside = min(outside, live - 1)
    moved = leaving(live, room, outside, every)
    lot = max(1, min(every, (live + room) // 4))
    assert 0 <= moved < live
    if room >= lot and outside < lot:
        assert moved == 0
    elif live > lot:
        assert moved >= lot
        assert room + moved >= lot  # there is room until the next lot is prefilled
    if outside >= lot:
        assert moved >= outside


def test_a_session_with_compact_lines_has_no_rollup(
    built: Built, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Neither by the file nor where the model decides: levels of three digits cannot say a day's prices."""
    (problem,) = cross_check(config(session("a", lines="compact")))
    assert (problem.key, "compact lines have no room" in problem.message) == ("sessions[0].rollup", True)
    path = terse_directory(tmp_path_factory.mktemp("terse") / "model")
    automatic = Config(model=ModelConfig(path=str(path)), sessions=(session("a"),))
    assert not cross_check(automatic)
    with pytest.raises(SettingError, match="decimal lines") as refused:
        build(automatic, {})
    assert refused.value.key == "sessions[0].rollup"


@pytest.mark.parametrize(
    ("lengths", "key"),
    [
        ((60, 900), None),
        ((1,), "rollup[0].interval"),
        ((90, 100), "rollup[1].interval"),
        ((60, 60), "rollup[1].interval"),
        ((0,), "rollup[0].interval"),
    ],
)
def test_each_length_of_bar_is_a_multiple_of_the_one_before(
    lengths: tuple[int, ...], key: str | None
) -> None:
    rollup = tuple(RollupConfig(Duration(length * SECOND), 4) for length in lengths)
    found = config(session("a", rollup=rollup))
    assert [p.key for p in cross_check(found)] == ([f"sessions[0].{key}"] if key else [])


def test_pool_and_positions_have_room_for_the_longest_rollup(built: Built) -> None:
    without, rolled = config(session("a", rollup=())), config(session("a", rollup_tokens=1000))
    assert PoolSizes(rolled, 0).all(()) >= PoolSizes(without, 0).all(()) + 2 * 1000 // 16 - 1
    assert [p.key for p in cross_check(config(session("a", rollup_tokens=3500)))] == ["pool.frame_limit"]
    numbered = len(built.prompt.frozen(None, [built.prompt.briefly(QUESTION.text)]))
    assert built.prefixes.longest("a", [QUESTION]) == numbered + session("a").rollup_tokens
    assert built.prefixes.longest("plain", [QUESTION]) == numbered
