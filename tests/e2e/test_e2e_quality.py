"""Late records, wrong prices, silence and lost numbers, through the whole daemon in this process."""

from __future__ import annotations

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
from daemon.gateway.gateway import Gateway
from feeds.connector import SettingError
from feeds.durations import Duration
from feeds.market_data import DeadLetter
from feeds.source import Incoming
from flash.question import PAPER_SIX
from tests.kit import (
    SECOND,
    START,
    TOPIC,
    MemorySink,
    QueueSource,
    inproc_config,
    sessions,
    trade,
    until,
)
from tests.kit.inproc import DEAD, Tape, answers, ask_gateway, count, running


def tick(tape: Tape, at_s: float, price: str = "100.00", **more: object) -> Incoming:
    return tape.message(trade("V:AAA", START + int(at_s * SECOND), price, **more))


def dead_letters(sink: MemorySink) -> list[DeadLetter]:
    return [each for each in sink.messages(DEAD) if isinstance(each, DeadLetter)]


def bars(**settings: object) -> BarsConfig:
    return BarsConfig(interval=Duration(SECOND), **settings)  # type: ignore[arg-type]  # settings of it


def on_tape(gateway: Gateway) -> int:
    return gateway.sessions.states["aaa"].live_records


async def test_a_late_record_is_refused_with_its_place_and_its_content():
    source, sink, tape = QueueSource(), MemorySink(), Tape("V:AAA")
    async with running(inproc_config(bars=bars(late="refuse")), source, sink) as gateway:
        source.put([tick(tape, 0.1), tick(tape, 1.1), tick(tape, 0.5, "100.50", seq=7), tick(tape, 2.2)])
        await until(lambda: dead_letters(sink) and on_tape(gateway) == 2)
        (dead_letter,) = dead_letters(sink)
        assert (dead_letter.reason, dead_letter.offset, dead_letter.partition) == ("late", 2, 0)
        assert "its bar has closed" in dead_letter.error
        assert dead_letter.payload == trade("V:AAA", START + SECOND // 2, "100.50", seq=7)  # as it came
        assert (dead_letter.stage, dead_letter.rebuilt, dead_letter.whole) == ("process", False, True)
        assert count(gateway, "records_refused", session="aaa", reason="late") == 1
        assert count(gateway, "records_late", session="aaa") == 1
        assert count(gateway, "dead_letters", stage="process") == 1


async def test_a_record_is_committed_once_its_letter_is_acknowledged():
    """While the DLQ is away, also as the daemon stops: it is read again, and has another DLQ record."""
    source, sink, tape = QueueSource(), MemorySink(), Tape("V:AAA")
    sink.holds = lambda payload: b'"dead_letter"' in payload
    process = ProcessConfig(mode="inproc", drain=Duration(2 * SECOND))
    async with running(inproc_config(process=process), source, sink) as gateway:
        bad = msgspec.structs.replace(tick(tape, 0.2), payload=b"{")
        source.put([bad, tick(tape, 0.3), tick(tape, 1.1), tick(tape, 2.2)])
        await until(lambda: source.committed == {(TOPIC, 0): 3})
        sink.acknowledging.clear()
        source.put([msgspec.structs.replace(tick(tape, 2.3), payload=b"{"), tick(tape, 3.1), tick(tape, 4.2)])
        await until(lambda: any(each.last_offset == 5 for a in answers(sink) for each in a.inputs))
        assert await gateway.stop() is False
    assert source.committed == {(TOPIC, 0): 4}


async def test_a_late_record_amends_a_bar_that_the_window_has():
    source, sink, tape = QueueSource(), MemorySink(), Tape("V:AAA")
    async with running(inproc_config(bars=bars(late="amend")), source, sink) as gateway:
        source.put([tick(tape, 0.1), tick(tape, 1.1)])
        await until(lambda: on_tape(gateway) == 1)
        source.put([tick(tape, 0.5, "100.50")])
        await until(lambda: on_tape(gateway) == 2 and [a for a in answers(sink) if a.data_version == 2])
        source.put([tick(tape, 2.2)])
        await until(lambda: on_tape(gateway) == 3 and [a for a in answers(sink) if a.data_version == 3])
        flagged = {a.data_version for a in answers(sink) if "amended" in a.flags}
        assert flagged == {2}
        assert {a.as_of for a in answers(sink) if a.data_version == 2} == {START + SECOND // 10}
        assert count(gateway, "records_amended", session="aaa") == 1
        assert count(gateway, "bars", session="aaa") == 2
        assert not dead_letters(sink)
        await until(lambda: source.committed.get(("md.trades.v1", 0)) == 3, what="commit")


async def test_a_price_a_hundred_times_the_last_is_flagged_and_counted():
    source, sink, tape = QueueSource(), MemorySink(), Tape("V:AAA")
    async with running(inproc_config(), source, sink) as gateway:
        source.put(
            [tick(tape, 0.1), tick(tape, 1.1, "10000"), tick(tape, 2.1), tick(tape, 3.1), tick(tape, 4.1)]
        )
        await until(lambda: on_tape(gateway) == 4 and answers(sink))
        assert count(gateway, "price_jumps", session="aaa") == 2  # there and back
        await until(lambda: [a for a in answers(sink) if "price_jump" in a.flags])
        assert not dead_letters(sink)


async def test_a_symbol_that_changes_its_decimals_is_refused_until_ten_prices_agree():
    source, sink, tape = QueueSource(), MemorySink(), Tape("V:AAA")
    async with running(inproc_config(bars=bars(on_price_jump="refuse")), source, sink) as gateway:
        source.put(
            [tick(tape, 0.1), *(tick(tape, 1 + n / 10, "1.00") for n in range(10)), tick(tape, 2, "1")]
        )
        await until(lambda: on_tape(gateway) == 2 and len(dead_letters(sink)) == 9)
        assert {dead_letter.reason for dead_letter in dead_letters(sink)} == {"price_jump"}
        assert count(gateway, "records_refused", session="aaa", reason="price_jump") == 9
        assert count(gateway, "price_jumps", session="aaa") == 10
        await until(lambda: [a for a in answers(sink) if "price_jump" in a.flags])


@pytest.mark.parametrize(("setting", "value"), [("late", "amend"), ("empty", "emit")])
def test_compact_lines_have_no_words(setting: str, value: str):
    config = inproc_config(
        model=ModelConfig(), sessions=sessions("V:AAA", retention_tokens=1024, **{setting: value})
    )
    with pytest.raises(SettingError, match="needs decimal lines") as raised:
        build(config, {})
    assert raised.value.key == f"sessions[0].{setting}"


async def test_an_empty_interval_is_said():
    source, sink, tape = QueueSource(), MemorySink(), Tape("V:AAA")
    async with running(inproc_config(bars=bars(empty="emit", max_fill=2)), source, sink) as gateway:
        source.put([tick(tape, 0.1), tick(tape, 1.1)])
        await until(lambda: on_tape(gateway) == 1)
        before = gateway.sessions.states["aaa"].live_tokens
        source.put([tick(tape, 4.1)])
        await until(lambda: count(gateway, "bars", session="aaa") == 4)
        await until(lambda: gateway.sessions.states["aaa"].live_records == 4)
        assert gateway.sessions.states["aaa"].live_tokens > before


def beat(tape: Tape, at_s: float, symbol: str = "AAA", **more: object) -> Incoming:
    fields = {"type": "heartbeat", "venue": "V", "symbol": symbol, "ts_event": START + int(at_s * SECOND)}
    return tape.message(msgspec.json.encode(fields | {"ts_recv": fields["ts_event"]} | more))


@pytest.mark.parametrize("symbol", ["AAA", "*"])
async def test_a_heartbeat_closes_the_bar_of_a_quiet_market(symbol: str):
    source, sink, tape = QueueSource(), MemorySink(), Tape("V:AAA")
    async with running(inproc_config(), source, sink) as gateway:
        source.put([tick(tape, 0.1), beat(tape, 0.9, symbol), beat(tape, 1.0, symbol), beat(tape, 5, symbol)])
        await until(lambda: on_tape(gateway) == 1 and len(answers(sink)) == 6)
        assert {a.as_of for a in answers(sink)} == {START + SECOND // 10}
        assert count(gateway, "heartbeats", source="test") == 3
        assert count(gateway, "records_late", session="aaa") == 0
        await until(lambda: source.committed.get(("md.trades.v1", 0)) == 4, what="commit, heartbeats too")
        source.put([beat(tape, 6, "ZZZ")])
        await until(lambda: count(gateway, "records_unknown_symbol") == 1)


@pytest.mark.parametrize("counts", ["symbol", "venue"])
async def test_a_number_that_a_heartbeat_shows_to_be_missing_is_a_gap(counts: str):
    source, sink, tape = QueueSource(), MemorySink(), Tape("V:AAA")
    config = inproc_config(source=SourceConfig(sequence=counts))  # type: ignore[call-arg]  # a field of its table
    async with running(config, source, sink) as gateway:
        source.put([tick(tape, 0.1, seq=1), tick(tape, 0.2, seq=2), beat(tape, 1, seq=2)])
        await until(lambda: len(answers(sink)) == 6)
        assert all("gap" not in a.flags for a in answers(sink)), "quiet"
        source.put(
            [tick(tape, 1.1, seq=3), beat(tape, 2, seq=5), tick(tape, 2.1, seq=6), beat(tape, 3, seq=6)]
        )
        await until(lambda: on_tape(gateway) == 3)
        assert count(gateway, "records_lost_upstream", source="test") == 2
        await until(lambda: [a for a in answers(sink) if "gap" in a.flags])


async def test_a_silent_venue_is_told_from_a_quiet_one():
    source, sink, tape = QueueSource(), MemorySink(), Tape("V:AAA")
    config = inproc_config(sessions=sessions("V:AAA", retention_tokens=1024, silent_after=Duration(SECOND)))
    async with running(config, source, sink) as gateway:
        source.put([tick(tape, 0.1), beat(tape, 1)])
        await until(lambda: len(answers(sink)) == 6)
        state = gateway.sessions.states["aaa"]
        await until(lambda: state.is_silent)
        (listed,) = (await ask_gateway(gateway, "sessions")).sessions
        assert listed.silent
        assert listed.last_seen_age_ns > SECOND
        question = next(each for each in state.questions if each.choices)
        reply = await ask_gateway(gateway, "ask", "aaa", question.text, choices=question.choices)
        assert "silent" in reply.flags
        source.put([beat(tape, 2)])
        await until(lambda: not state.is_silent)
        gateway.status.metrics()
        assert 0 <= gateway.store.value("foretick_venue_silence_seconds", session="aaa") < 20


@pytest.mark.parametrize(("model", "text"), [(UNTRAINED, PAPER_SIX[0].text), (ModelConfig().path, "trend")])
async def test_an_open_bar_is_shown_to_a_provisional_question_and_changes_nothing_else(model: str, text: str):
    """Beside a daemon without that question: the same tape, and the same answers to all other questions."""
    asked = PAPER_SIX[0]
    question = QuestionConfig(
        name="now", text=text, choices=asked.choices or (), max_tokens=1, provisional=True
    )
    seen = []
    for questions in ((), (question,)):
        source, sink, tape = QueueSource(), MemorySink(), Tape("V:AAA")
        config = inproc_config(model=ModelConfig(path=model), questions=questions)
        async with running(config, source, sink) as gateway:
            for n in range(5):
                source.put(tape.second(n))
                expected = (6 + len(questions)) * n
                await until(lambda wanted=expected, to=sink: len(answers(to)) == wanted)
            state = gateway.sessions.states["aaa"]
            others = {
                (a.data_version, a.question): (a.text, a.reused_tokens, a.computed_tokens, a.as_of)
                for a in answers(sink)
                if a.question != "now"
            }
            seen.append((state.live_tokens, state.live_records, others))
            provisional = [a for a in answers(sink) if a.question == "now"]
            assert {a.data_version for a in provisional} == (set(range(1, 5)) if questions else set())
            plain = {a.data_version: a for a in answers(sink) if a.question == asked.name}
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
    source, sink, tape = QueueSource(), MemorySink(), Tape("V:AAA")
    now_s = (time.time_ns() - START) / SECOND
    async with running(inproc_config(), source, sink) as gateway:
        source.put([tick(tape, now_s), tick(tape, now_s + 365 * 86400), tick(tape, now_s + 0.001)])
        await until(lambda: dead_letters(sink))
        assert [(dead_letter.reason, dead_letter.offset) for dead_letter in dead_letters(sink)] == [
            ("clock", 1)
        ]
        assert (count(gateway, "bars", session="aaa"), count(gateway, "records_late", session="aaa")) == (
            0,
            0,
        )
        source.put([tick(tape, now_s + 600, ts_recv=time.time_ns()), tick(tape, now_s - 3600)])
        await until(lambda: on_tape(gateway) == 1 and len(answers(sink)) == 6)
        await until(lambda: count(gateway, "records_late", session="aaa") == 1)
        assert count(gateway, "clock_skew_records", source="test") == 1
        source.put([tick(tape, now_s + 602, ts_recv=time.time_ns())])
        await until(lambda: [a for a in answers(sink) if "skewed_clock" in a.flags])
        assert len(dead_letters(sink)) == 1
