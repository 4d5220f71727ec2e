"""The data plane in one process: records in, tape records out, and errors."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest

import ingest
from ingest.backlog import TapeWindow
from ingest.bar_kernel import EMPTY, GAP
from ingest.bars import BarPolicy, one_each
from ingest.compact import CompactSpec, Restart
from ingest.lines import LineSpec
from ingest.plane import DataPlane, Made, Phase, SessionSpec, TapeRecord
from ingest.record import RECORD, TRADE, Records, RecordWriter
from ingest.ring import Mode, Ring
from ingest.rollup import rollup_line
from metrics.store import MetricStore
from tests.ingest.building import SECOND, TOKENISER, Consumer, plane_on, text_of

NAMES = ["btc", "spx", "eur"]
STAGE = "foretick_stage_seconds"


def trade(session: int, second: float, price: int, offset: int = 0) -> tuple[int, int, int, int]:
    return session, int(second * SECOND), price * SECOND, offset


def packed(*items: tuple[int, int, int, int]) -> Records:
    writer = RecordWriter(len(items))
    for session, moment, price, offset in items:
        values = (price, SECOND, 0, 0, 0)
        writer.add(TRADE, session, moment, moment, values, stream=1, offset=offset, ts_source=moment + SECOND)
    return writer.records


def same_as_line(record: TapeRecord, spec: LineSpec) -> None:
    """The bar that a record brings along is the one that its line shows."""
    bar = record.bar
    summed = rollup_line(bar, spec, SECOND).split(",")
    assert ",".join(summed[1:7]) + "\n" == text_of(record.tokens)
    assert (bar.bars, bar.gap, bar.leg) == (1, bool(record.flags & GAP), 0)


class Harness(Consumer):
    """A plane of three sessions on a ring; the test controls its clock and engine."""

    plane: DataPlane
    ring: Ring
    metrics: MetricStore

    def __init__(self, specs: Sequence[SessionSpec]) -> None:
        super().__init__()
        self.specs = {spec.name: spec for spec in specs}
        self.now = 1000
        self.closes_idle, self.rebuilding = True, False

    def phase(self, session: str) -> Phase:
        return Phase.REBUILDING if self.rebuilding else Phase.LIVE

    def may_close_idle(self, session: str) -> bool:
        return self.closes_idle

    def submit(self, made: Made) -> None:
        for name, records in made:
            if isinstance(spec := self.specs[name].line, LineSpec):
                for record in records:
                    same_as_line(record, spec)
        super().submit(made)

    def take(self, *items: tuple[int, int, int, int], after_ns: int = 0) -> int:
        """Push these trades, and step ``after_ns`` later; returns the number of records that it read."""
        if items:
            self.ring.push(packed(*items))
        self.now += after_ns
        return self.plane.step()

    def count(self, name: str, session: str = "btc") -> float:
        return self.metrics.value(f"foretick_{name}_total", session=session)

    def texts(self, session: int = 0) -> list[str]:
        return [text_of(record.tokens) for record in self.records(NAMES[session])]

    def flags(self, session: int = 0) -> list[int]:
        return [record.flags for record in self.records(NAMES[session])]


Make = Callable[..., Harness]


@pytest.fixture
def make() -> Iterator[Make]:
    with ExitStack() as stack:

        def build(
            mode: Mode = "pause",
            policy: BarPolicy | None = None,
            line: LineSpec | CompactSpec = LineSpec(2, 0),  # noqa: B008  # frozen
            window: TapeWindow = TapeWindow(),  # noqa: B008  # frozen
            capacity: int = 16,
            **options: Any,
        ) -> Harness:
            btc, spx, eur = one_each(3, policy or BarPolicy(SECOND))
            specs = [
                SessionSpec("btc", btc, line, window),
                SessionSpec("spx", spx, LineSpec(0, 0)),
                SessionSpec("eur", eur, LineSpec(1, 1)),
            ]
            made = Harness(specs)
            opened = plane_on(specs, made, lambda: made.now, mode=mode, capacity=capacity, **options)
            made.plane, made.ring, made.metrics = stack.enter_context(opened)
            return made

        yield build


def test_ticks_become_lines_of_their_session(make: Make) -> None:
    harness = make()
    harness.ring.push(
        packed(trade(0, 1, 10), trade(1, 1, 5000), trade(0, 1.5, 12), trade(0, 2, 11), trade(1, 3, 5001))
    )
    harness.ring.push(packed(trade(2, 5, 1), trade(2, 6, 2)))
    assert harness.plane.step() == 7
    assert harness.texts() == ["000001,10.00,12.00,10.00,12.00,2\n"]
    assert harness.texts(1) == ["000001,5000,5000,5000,5000,1\n"]
    assert harness.texts(2) == ["000005,1.0,1.0,1.0,1.0,1.0\n"]
    assert harness.plane.step() == 0
    harness.plane.flush()
    assert harness.texts()[1:] == ["000002,11.00,11.00,11.00,11.00,1\n"]
    assert harness.count("bars") == 2
    assert harness.count("bars", "eur") == 2


def test_a_tape_record_says_where_it_comes_from_and_how_long_it_took(make: Make) -> None:
    harness = make()
    harness.ring.push(packed(trade(1, 1, 10, 70), trade(1, 1.25, 10, 71), trade(1, 2, 11, 72)))
    harness.now = 3000
    harness.plane.step()
    (record,) = harness.records("spx")
    assert (record.reads, record.low_watermarks) == (((1, 70, 71),), ((1, 72),))
    assert record.ts_last_event == 1_250_000_000
    assert (record.ts_source, record.ts_ring) == (2_250_000_000, 1000)
    assert (record.ring_wait_ns, record.flags) == (2000, 0)
    metrics = harness.metrics
    assert metrics.count(STAGE, stage="ring_wait") == 3
    assert metrics.quantile(STAGE, 0.5, stage="ring_wait") == pytest.approx(2e-6, rel=1 / 32)
    assert (metrics.count(STAGE, stage="bars"), metrics.count(STAGE, stage="tokenise")) == (1, 1)


def test_stage_times_are_taken_from_the_clock(make: Make) -> None:
    harness = make()
    ticking = iter(range(0, 10**9, 5000))
    harness.plane._clock = lambda: next(ticking)
    harness.take(trade(0, 1, 10), trade(0, 2, 10))
    (record,) = harness.records("btc")
    assert (record.bars_ns, record.tokenise_ns) == (5000, 5000)


def test_ring_loss_flags_the_next_bar_of_every_session(make: Make) -> None:
    harness = make("overwrite")
    harness.take(trade(0, 1, 10), trade(1, 1, 10))
    # Twenty records into sixteen slots: the oldest are gone when the plane comes back.
    burst = [trade(0, 2 + i / 100, 10) for i in range(18)] + [trade(0, 3, 10), trade(1, 3, 10)]
    harness.take(*burst)
    harness.take(trade(0, 4, 10), trade(0, 5, 10), trade(1, 5, 10), trade(1, 6, 10))
    # The bars open at the loss (second 1) may miss ticks, and so may the bar of the next record.
    assert harness.flags() == [GAP, GAP, 0, 0]
    assert harness.flags(1) == [GAP, GAP, 0]
    lost = harness.ring.lost
    assert lost >= 4
    assert harness.metrics.value("foretick_ring_dropped_total", source="ticks") == lost


def test_intervals_emptied_by_a_loss_are_flagged_too(make: Make) -> None:
    harness = make("overwrite", BarPolicy(SECOND, empty="fill"))
    harness.take(trade(0, 1, 10), trade(0, 2, 10))
    harness.take(*[trade(0, 3, 10)] * 4, *[trade(0, 5, 10)] * 14, trade(0, 6, 10))
    assert harness.flags() == [0, GAP, *[GAP | EMPTY] * 2, GAP]


def test_a_new_plane_on_an_old_ring_counts_only_new_loss(make: Make) -> None:
    harness = make("overwrite")
    for _ in range(2):
        harness.ring.push(packed(*[trade(0, 1, 10)] * 16))
    out = np.zeros(16, RECORD)
    harness.ring.pop(out)
    assert harness.ring.lost > 0
    metrics = MetricStore.local({"session": NAMES, "source": ["ticks"]})
    DataPlane(harness.ring, "ticks", TOKENISER, [*harness.specs.values()], harness, metrics).step()
    assert metrics.value("foretick_ring_dropped_total", source="ticks") == 0


def test_silent_sessions_are_closed_after_the_wall_clock_limit(make: Make) -> None:
    harness = make(policy=BarPolicy(SECOND, idle_close_ns=500))
    harness.take(trade(0, 1, 10))
    harness.take(after_ns=499)
    assert harness.texts() == []
    harness.take(after_ns=1)
    assert harness.texts() == ["000001,10.00,10.00,10.00,10.00,1\n"]


def test_a_session_is_not_idle_while_its_records_are_behind_others_in_the_ring(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ingest.plane._DRAIN", 2)
    harness = make(policy=BarPolicy(SECOND, idle_close_ns=500))
    harness.take(trade(0, 1, 10))
    harness.now += 400
    harness.ring.push(packed(trade(1, 1, 5), trade(1, 1, 5), trade(0, 1, 12)))
    harness.take(after_ns=200)
    assert harness.ring.fill > 0
    assert harness.texts() == []
    harness.plane.step()
    assert harness.texts() == []
    harness.take(after_ns=300)
    assert harness.texts() == ["000001,10.00,12.00,10.00,12.00,2\n"]


def test_a_session_is_not_idle_before_its_sources_were_read(make: Make) -> None:
    """They are away, or behind; then nothing came of them up to some time, which the writer tells."""
    harness = make(policy=BarPolicy(SECOND, idle_close_ns=500))
    harness.now = 1000
    harness.ring.tell_read(harness.now)
    harness.take(trade(0, 1, 10))
    harness.take(after_ns=10_000)
    assert harness.texts() == []
    harness.ring.tell_read(1499)
    harness.plane.step()
    assert harness.texts() == []
    harness.ring.tell_read(1500)
    harness.plane.step()
    assert harness.texts() == ["000001,10.00,10.00,10.00,10.00,1\n"]


def test_idle_bars_stay_open_while_they_must_and_then_count_from_there(make: Make) -> None:
    harness = make(policy=BarPolicy(SECOND, idle_close_ns=500))
    harness.closes_idle = False
    harness.take(trade(0, 1, 10))
    harness.take(after_ns=10_000)
    harness.closes_idle = True
    harness.plane.step()
    assert harness.texts() == []
    harness.take(after_ns=500)
    assert harness.texts() == ["000001,10.00,10.00,10.00,10.00,1\n"]


def test_back_pressure_reaches_the_writer_and_loses_nothing(make: Make) -> None:
    """The engine takes none of a session: its backlog fills, then the ring, and the writer waits."""
    harness = make(window=TapeWindow(records=8))
    harness.rooms["btc"] = 0
    burst = packed(*(trade(0, i, 1) for i in range(36)))
    assert harness.ring.push(burst[:16]) == 16
    assert harness.plane.step() == 16
    assert (harness.plane.full, harness.plane.waiting, len(harness.seen)) == (True, 15, 0)
    assert harness.metrics.value("foretick_bars_waiting", session="btc") == 15
    assert harness.ring.push(burst[16:]) == 16
    assert harness.plane.step() == 0
    harness.rooms["btc"] = 100
    assert harness.plane.step() == 0, "the full backlog goes first"
    assert harness.plane.step() == 16
    assert harness.metrics.value("foretick_ring_fill_ratio", source="ticks") == 1.0
    assert harness.ring.push(burst[32:]) == 4
    harness.plane.step()
    harness.plane.flush()
    assert len(harness.texts()) == 36
    assert not any(harness.flags())
    assert harness.count("bars_skipped") == 0
    assert harness.metrics.value("foretick_ring_dropped_total", source="ticks") == 0


def test_a_session_without_room_delays_no_other(make: Make) -> None:
    harness = make(skips=True)
    harness.rooms["spx"] = 0
    for second in range(1, 30):
        harness.ring.push(packed(*(trade(session, second, 5) for session in (0, 1))))
        harness.take(after_ns=SECOND)
    assert (len(harness.texts()), harness.texts(1), harness.plane.waits("spx")) == (28, [], True)
    harness.rooms["spx"] = 3
    harness.plane.step()
    assert [text[:6] for text in harness.texts(1)] == ["000001", "000002", "000003"]


def test_late_records_that_correct_nothing_take_no_bar_s_turn(make: Make) -> None:
    """They make no version, so nothing would say that there is room for the next bar."""
    harness = make(policy=BarPolicy(SECOND, late="amend"))
    harness.rooms["btc"] = 0
    seconds = [10.5, 11.5, 12.5, 1.0, 1.1, 1.2, 13.5]
    harness.take(*(trade(0, second, 100, n) for n, second in enumerate(seconds)))
    assert harness.plane.waiting == 6
    harness.rooms["btc"] = 1
    for bars in (1, 2, 3):
        harness.plane.step()
        assert len(harness.texts()) == bars


def test_what_the_window_could_not_show_is_passed_over_in_one_jump(make: Make) -> None:
    """Its inputs count as done with the version of the jump, which has a gap; others have none."""
    harness = make(window=TapeWindow(records=4), skips=True, capacity=64)
    harness.rooms["btc"] = 0
    harness.take(*(trade(n % 2, n, 5, n) for n in range(40)))
    assert harness.count("bars_skipped") == 15
    assert harness.count("bars") == 19
    harness.rooms["btc"] = 10
    harness.take(after_ns=SECOND)
    assert [record.reads[0].first for record in harness.records("btc")] == [30, 32, 34, 36]
    assert harness.flags() == [GAP, 0, 0, 0]
    assert not any(harness.flags(1))
    assert harness.records("btc")[0].low_watermarks == ((1, 32),), "all before it are in it, or skipped"


def test_a_session_that_catches_up_is_read_when_it_has(make: Make) -> None:
    """Its source had the bars a second apart, and they come at once: none is read before they slow down."""
    harness = make(window=TapeWindow(records=4), skips=True, capacity=64)
    for start in range(0, 200, 20):
        harness.take(*(trade(0, start + n, 5) for n in range(20)))
        harness.now += SECOND // 10
        assert not harness.seen
    assert harness.count("bars_skipped") == 195
    harness.take(after_ns=SECOND // 5)
    assert [text[3:6] for text in harness.texts()] == ["315", "316", "317", "318"]
    # from here on a bar a second, as the source has them
    for n in range(200, 203):
        harness.now += SECOND
        harness.take(trade(0, n, 5))
    assert len(harness.texts()) == 7


def test_bars_that_were_answered_before_are_all_read_one_by_one(make: Make) -> None:
    """Those of an outage behind them are passed over as ever."""
    harness = make(window=TapeWindow(records=4), skips=True, capacity=64)
    harness.rebuilding, harness.rooms["btc"] = True, 10
    harness.take(*(trade(0, n, 5) for n in range(20)))
    for bars in range(1, 10):
        assert len(harness.texts()) == bars
        harness.plane.step()
    harness.rebuilding = False
    harness.take(*(trade(0, n, 5) for n in range(20, 22)))
    assert harness.count("bars_skipped") == 21 - 10 - 4


def test_a_source_whose_times_run_too_fast_is_read_once_a_minute(make: Make) -> None:
    harness = make(window=TapeWindow(records=4), skips=True)
    versions = 0
    for n in range(1, 1300):
        harness.ring.push(packed(trade(0, 10 * n, 5)))
        harness.now += SECOND // 10
        before = len(harness.seen)
        harness.plane.step()
        versions += len(harness.seen) > before
    assert versions == 1 + 2


def test_run_serves_until_stopped_and_an_engine_error_leaves_it(make: Make) -> None:
    harness = make(wake_fd=os.eventfd(0, os.EFD_NONBLOCK))
    stop, served = threading.Event(), threading.Event()
    harness.submit = lambda made: served.set()
    thread = threading.Thread(target=harness.plane.run, args=(stop,))
    thread.start()
    harness.ring.push(packed(trade(2, 1, 1), trade(2, 2, 1)))
    assert served.wait(10)
    stop.set()
    harness.ring.wake()
    thread.join(10)
    assert not thread.is_alive()

    def refuse(made: list[tuple[str, list[TapeRecord]]]) -> None:
        raise RuntimeError("the engine is gone")

    harness.submit = refuse
    harness.ring.push(packed(trade(2, 3, 1), trade(2, 4, 1)))
    with pytest.raises(RuntimeError, match="engine is gone"):
        harness.plane.run(threading.Event())
    os.close(harness.ring.wake_fd)


def test_the_bars_of_all_sessions_are_submitted_together(make: Make) -> None:
    harness = make()
    harness.take(*(trade(session, second, 5) for second in (1, 2) for session in (2, 0, 1)))
    harness.plane.flush()
    assert harness.calls == [NAMES, NAMES]


def test_after_warm_up_the_first_tick_compiles_nothing(make: Make) -> None:
    from ingest import bar_kernel, plane, ring, tokens

    ingest.warm_up()
    kernels = [
        bar_kernel.update,
        bar_kernel.close_below,
        bar_kernel.mark_gap,
        plane.record_waits,
        tokens._fill_tokens,
        ring.push_pause,
        ring.pop_pause,
        ring.push_overwrite,
        ring.pop_overwrite,
        ring.reader_sleeps,
        ring.announce_sleep,
        ring.spin_for_records,
    ]
    before = [len(kernel.signatures) for kernel in kernels]  # type: ignore[attr-defined]  # numba's
    assert all(before)
    for mode in ("pause", "overwrite"):
        harness = make(mode)
        harness.take(trade(0, 1, 1), trade(0, 2, 1))
        harness.plane.flush()
        assert len(harness.seen) == 2
    assert [len(kernel.signatures) for kernel in kernels] == before  # type: ignore[attr-defined]  # numba's


def test_a_restart_comes_before_the_first_bar_around_its_anchor(make: Make) -> None:
    harness = make(line=CompactSpec(0, records=2))
    harness.take(*(trade(0, n, price, n) for n, price in enumerate((10, 11, 12, 900, 3000, 0))))
    assert harness.texts() == [
        "500500500500500\n",
        "501501501501500\n",
        "502502502502500\n",
        "589589589589500\n",
        "605605605605500\n",
    ]
    restarts = [(n, each) for n, (_, each) in enumerate(harness.seen) if isinstance(each, Restart)]
    assert [n for n, _ in restarts] == [0, 4, 6], "of three, one, and one more bar"
    windows = [[event for _, event in restart.window] for _, restart in restarts]
    assert windows == [[], [2 * SECOND], [3 * SECOND]]
    records = harness.records("btc")
    assert [record.anchor and record.anchor.unit // SECOND for record in records] == [1, 1, 1, 5, 10]
    assert [record.rounded for record in records] == [False, False, False, True, False]
    assert [record.reads[0].last for record in records] == [0, 1, 2, 3, 4]
    assert harness.count("anchors") == 3
    assert harness.count("anchors", "spx") == 0
    assert harness.count("bars_rounded") == 0
    assert harness.count("volumes_saturated") == 0


def test_changes_that_wait_have_the_outcome_of_one_by_one(make: Make) -> None:
    """Sessions that come, go, and come back, which begin again."""

    def outcome(toggles: Sequence[int], *, waiting: bool) -> tuple[list[list[str]], list[int]]:
        harness, called = make(), list[int]()
        specs, present = list(harness.specs.values()), set(range(3))
        harness.take(*(trade(number, 1, 10 + number) for number in range(3)))
        for step, number in enumerate(toggles):
            present ^= {number}
            done = partial(called.append, step)
            harness.plane.change([specs[each] for each in sorted(present)], done)
            if not waiting:
                harness.plane.step()
        harness.plane.step()
        for second in (2, 3):
            harness.take(*(trade(number, second, 20 + number) for number in range(3)))
        return [harness.texts(number) for number in range(3)], called

    for toggles in product(range(3), repeat=4):
        assert outcome(toggles, waiting=True) == outcome(toggles, waiting=False), toggles


def test_a_session_that_is_added_while_the_plane_steps_has_all_of_its_records(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come as soon as it is there, which may be right before the ring is read."""
    harness = make()
    specs = list(harness.specs.values())
    harness.plane.change(specs[:1])
    harness.take(trade(0, 1, 10))
    pop = harness.ring.pop

    def added(out: Records) -> int:
        monkeypatch.setattr(harness.ring, "pop", pop)
        harness.plane.change(specs)
        harness.ring.push(packed(trade(1, 1, 20), trade(1, 2, 21)))
        return pop(out)

    monkeypatch.setattr(harness.ring, "pop", added)
    harness.take()
    harness.take(trade(1, 3, 22))
    assert [text.split(",")[1][:2] for text in harness.texts(1)] == ["20", "21"]
