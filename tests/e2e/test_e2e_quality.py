"""Late records, wrong prices, silence and lost numbers, through the whole daemon in this process."""

import time

import msgspec
import pytest

from daemon.config.schema import (
    UNTRAINED,
    BarsConfig,
    ModelConfig,
    ProcessConfig,
    QuestionConfig,
    SourceConfig,
)
from daemon.engine.build import build
from feeds.connector import SettingError
from feeds.durations import Duration
from feeds.market_data import DeadLetter
from flash.question import PAPER_SIX
from tests.kit import SECOND, START, TOPIC, inproc_config, sessions, trade, until
from tests.kit.inproc import DEAD, RunningDaemon, running


def tick(at_s: float, price: str = "100.00", **more: object) -> bytes:
    return trade("V:AAA", START + int(at_s * SECOND), price, **more)


def beat(at_s: float, symbol: str = "AAA", **more: object) -> bytes:
    fields = {"type": "heartbeat", "venue": "V", "symbol": symbol, "ts_event": START + int(at_s * SECOND)}
    return msgspec.json.encode(fields | {"ts_recv": fields["ts_event"]} | more)


def bars(**settings: object) -> BarsConfig:
    return BarsConfig(interval=Duration(SECOND), **settings)  # type: ignore[arg-type]  # settings of it


def dead_letters(daemon: RunningDaemon) -> list[DeadLetter]:
    return [each for each in daemon.sink.messages(DEAD) if isinstance(each, DeadLetter)]


def flagged(daemon: RunningDaemon, flag: str) -> set[int]:
    """Versions with an answer that carries it."""
    return {a.data_version for a in daemon.answers() if flag in a.flags}


def on_tape(daemon: RunningDaemon) -> int:
    return daemon.state().live_records


async def test_a_late_record_is_refused_with_its_place_and_its_content():
    async with running(inproc_config(bars=bars(late="refuse"))) as daemon:
        late = tick(0.5, "100.50", seq=7)
        daemon.put(tick(0.1), tick(1.1), late, tick(2.2))
        await until(lambda: dead_letters(daemon) and on_tape(daemon) == 2)
        (found,) = dead_letters(daemon)
        assert (found.reason, found.offset, found.partition, found.payload) == ("late", 2, 0, late)
        assert "its bar has closed" in found.error
        assert (found.stage, found.rebuilt, found.whole) == ("process", False, True)
        assert daemon.count("records_refused", session="aaa", reason="late") == 1
        assert daemon.count("records_late", session="aaa") == 1
        assert daemon.count("dead_letters", stage="process") == 1


async def test_a_record_is_committed_once_its_letter_is_acknowledged():
    """While the DLQ is away, also as the daemon stops: it is read again, and has another DLQ record."""
    process = ProcessConfig(mode="inproc", drain=Duration(2 * SECOND))
    async with running(inproc_config(process=process)) as daemon:
        daemon.sink.holds = lambda payload: b'"dead_letter"' in payload
        daemon.put(b"{", tick(0.3), tick(1.1), tick(2.2))
        await until(lambda: daemon.source.committed == {(TOPIC, 0): 3})
        daemon.sink.acknowledging.clear()
        daemon.put(b"{", tick(3.1), tick(4.2))
        await until(lambda: any(each.last_offset == 5 for a in daemon.answers() for each in a.inputs))
        assert await daemon.gateway.stop() is False
    assert daemon.source.committed == {(TOPIC, 0): 4}


async def test_a_late_record_amends_a_bar_that_the_window_has():
    async with running(inproc_config(bars=bars(late="amend"))) as daemon:
        daemon.put(tick(0.1), tick(1.1))
        await until(lambda: on_tape(daemon) == 1)
        for version, late in ((2, tick(0.5, "100.50")), (3, tick(2.2))):
            daemon.put(late)
            await until(lambda version=version: daemon.answered("aaa", version))
        assert on_tape(daemon) == 3
        assert flagged(daemon, "amended") == {2}
        assert {a.as_of for a in daemon.answers() if a.data_version == 2} == {START + SECOND // 10}
        assert daemon.count("records_amended", session="aaa") == 1
        assert daemon.count("bars", session="aaa") == 2
        assert not dead_letters(daemon)
        await until(lambda: daemon.source.committed.get((TOPIC, 0)) == 3, what="commit")


async def test_a_price_a_hundred_times_the_last_is_flagged_and_counted():
    async with running(inproc_config()) as daemon:
        daemon.put(tick(0.1), tick(1.1, "10000"), tick(2.1), tick(3.1), tick(4.1))
        await until(lambda: on_tape(daemon) == 4 and flagged(daemon, "price_jump"))
        assert daemon.count("price_jumps", session="aaa") == 2  # there and back
        assert not dead_letters(daemon)


async def test_a_symbol_that_changes_its_decimals_is_refused_until_ten_prices_agree():
    async with running(inproc_config(bars=bars(on_price_jump="refuse"))) as daemon:
        daemon.put(tick(0.1), *(tick(1 + n / 10, "1.00") for n in range(10)), tick(2, "1"))
        await until(lambda: on_tape(daemon) == 2 and len(dead_letters(daemon)) == 9)
        assert {each.reason for each in dead_letters(daemon)} == {"price_jump"}
        assert daemon.count("records_refused", session="aaa", reason="price_jump") == 9
        assert daemon.count("price_jumps", session="aaa") == 10
        await until(lambda: flagged(daemon, "price_jump"))


@pytest.mark.parametrize(("setting", "value"), [("late", "amend"), ("empty", "emit")])
def test_compact_lines_have_no_words(setting: str, value: str):
    own = sessions("V:AAA", retention_tokens=1024, **{setting: value})
    with pytest.raises(SettingError, match="needs decimal lines") as raised:
        build(inproc_config(model=ModelConfig(), sessions=own), {})
    assert raised.value.key == f"sessions[0].{setting}"


async def test_an_empty_interval_is_said():
    async with running(inproc_config(bars=bars(empty="emit", max_fill=2))) as daemon:
        daemon.put(tick(0.1), tick(1.1))
        await until(lambda: on_tape(daemon) == 1)
        before = daemon.state().live_tokens
        daemon.put(tick(4.1))
        await until(lambda: daemon.count("bars", session="aaa") == on_tape(daemon) == 4)
        assert daemon.state().live_tokens > before


@pytest.mark.parametrize("symbol", ["AAA", "*"])
async def test_a_heartbeat_closes_the_bar_of_a_quiet_market(symbol: str):
    async with running(inproc_config()) as daemon:
        daemon.put(tick(0.1), beat(0.9, symbol), beat(1.0, symbol), beat(5, symbol))
        await until(lambda: on_tape(daemon) == 1 and len(daemon.answers()) == 6)
        assert {a.as_of for a in daemon.answers()} == {START + SECOND // 10}
        assert daemon.count("heartbeats", source="test") == 3
        assert daemon.count("records_late", session="aaa") == 0
        await until(lambda: daemon.source.committed.get((TOPIC, 0)) == 4, what="commit, heartbeats too")
        daemon.put(beat(6, "ZZZ"))
        await until(lambda: daemon.count("records_unknown_symbol") == 1)


@pytest.mark.parametrize("counts", ["symbol", "venue"])
async def test_a_number_that_a_heartbeat_shows_to_be_missing_is_a_gap(counts: str):
    config = inproc_config(source=SourceConfig(sequence=counts))  # type: ignore[call-arg]  # a field of its table
    async with running(config) as daemon:
        daemon.put(tick(0.1, seq=1), tick(0.2, seq=2), beat(1, seq=2))
        await until(lambda: len(daemon.answers()) == 6)
        assert not flagged(daemon, "gap"), "quiet"
        daemon.put(tick(1.1, seq=3), beat(2, seq=5), tick(2.1, seq=6), beat(3, seq=6))
        await until(lambda: on_tape(daemon) == 3)
        assert daemon.count("records_lost_upstream", source="test") == 2
        await until(lambda: flagged(daemon, "gap"))


async def test_a_silent_venue_is_told_from_a_quiet_one():
    own = sessions("V:AAA", retention_tokens=1024, silent_after=Duration(SECOND))
    async with running(inproc_config(sessions=own)) as daemon:
        daemon.put(tick(0.1), beat(1))
        await until(lambda: len(daemon.answers()) == 6)
        state = daemon.state()
        await until(lambda: state.is_silent)
        (listed,) = (await daemon.call("sessions")).sessions
        assert listed.silent
        assert listed.last_seen_age_ns > SECOND
        question = next(each for each in state.questions if each.choices)
        reply = await daemon.call("ask", "aaa", question.text, choices=question.choices)
        assert "silent" in reply.flags
        daemon.put(beat(2))
        await until(lambda: not state.is_silent)
        daemon.gateway.status.metrics()
        assert 0 <= daemon.value("venue_silence_seconds", session="aaa") < 20


@pytest.mark.parametrize(("model", "text"), [(UNTRAINED, PAPER_SIX[0].text), (ModelConfig().path, "trend")])
async def test_an_open_bar_is_shown_to_a_provisional_question_and_changes_nothing_else(model: str, text: str):
    """Beside a daemon without that question: the same tape, and the same answers to all other questions."""
    asked = PAPER_SIX[0]
    question = QuestionConfig(
        name="now", text=text, choices=asked.choices or (), max_tokens=1, provisional=True
    )
    seen = []
    for questions in ((), (question,)):
        async with running(inproc_config(model=ModelConfig(path=model), questions=questions)) as daemon:
            await daemon.advance(4)
            others = {
                (a.data_version, a.question): (a.text, a.reused_tokens, a.computed_tokens, a.as_of)
                for a in daemon.answers()
                if a.question != "now"
            }
            seen.append((daemon.state().live_tokens, on_tape(daemon), others))
            provisional = [a for a in daemon.answers() if a.question == "now"]
            assert {a.data_version for a in provisional} == (set(range(1, 5)) if questions else set())
            plain = {a.data_version: a for a in daemon.answers() if a.question == asked.name}
            for answer in provisional:
                beside = plain[answer.data_version]
                assert "provisional" in answer.flags
                assert "provisional" not in beside.flags
                assert answer.probability is None
                assert answer.computed_tokens > beside.computed_tokens
                assert (answer.reused_tokens, answer.as_of) == (beside.reused_tokens, beside.as_of)
    assert seen[0] == seen[1]


async def test_clocks_that_jump_close_nothing_and_make_nothing_late_that_is_not():
    """A year ahead is refused; a venue ten minutes ahead is read and flagged; an hour back is late."""
    now_s = (time.time_ns() - START) / SECOND
    async with running(inproc_config()) as daemon:
        daemon.put(tick(now_s), tick(now_s + 365 * 86400), tick(now_s + 0.001))
        await until(lambda: dead_letters(daemon))
        assert [(each.reason, each.offset) for each in dead_letters(daemon)] == [("clock", 1)]
        assert daemon.count("bars", session="aaa") == daemon.count("records_late", session="aaa") == 0
        daemon.put(tick(now_s + 600, ts_recv=time.time_ns()), tick(now_s - 3600))
        await until(lambda: on_tape(daemon) == 1 and len(daemon.answers()) == 6)
        await until(lambda: daemon.count("records_late", session="aaa") == 1)
        assert daemon.count("clock_skew_records", source="test") == 1
        daemon.put(tick(now_s + 602, ts_recv=time.time_ns()))
        await until(lambda: flagged(daemon, "skewed_clock"))
        assert len(dead_letters(daemon)) == 1
