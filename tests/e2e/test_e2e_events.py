"""Records that are in no bar, through the whole daemon in this process: lines, flags, halts, the ledger."""

from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from daemon.api.client import QueryError
from daemon.config.schema import Config, EventsConfig, ModelConfig, RecoveryConfig, SourceConfig
from daemon.ledger import ledger
from feeds.connectors.http import HttpSourceConnector
from feeds.connectors.kafka import KafkaSourceConnector
from feeds.durations import Duration
from feeds.kafka_sink import KafkaSink
from feeds.market_data import Answer, DeadLetter
from feeds.mock_broker import MockBroker
from feeds.payloads.settings import FormatRule
from tests.kit import SECOND, START, inproc_config, until
from tests.kit.inproc import DEAD, RunningDaemon, running
from tests.kit.records import event, tick

COMPACT = ModelConfig()
"""The embedded model reads compact lines."""


def config(**events: object) -> Config:
    return inproc_config(events=EventsConfig(**events))  # type: ignore[arg-type]  # settings of it


def window(daemon: RunningDaemon, session: str = "aaa") -> list[str]:
    """The lines that the model reads, each without its time."""
    built = daemon.host.first.sessions.built
    text = str(built.prompt.tokenizer.decode(built.tapes[session].window))
    return [line.partition(",")[2] for line in text.splitlines()]


async def lines(daemon: RunningDaemon, n: int, session: str = "aaa") -> None:
    """Wait until the window has that many lines, and the newest version its answers."""

    def there() -> bool:
        state = daemon.state(session)
        return state.live_records == n and daemon.answered(session, state.version)

    await until(there, 20)


async def committed(daemon: RunningDaemon, offset: int) -> None:
    await until(lambda: max(daemon.source.committed.values(), default=0) == offset, 20)


async def test_a_headline_is_a_line_and_a_version_at_once() -> None:
    async with running(config()) as daemon:
        daemon.put(tick(0.1), event("text", 0.5, text="Fed raises\nrates by 25 bp"))
        await lines(daemon, 1)
        assert window(daemon) == ["text,Fed raises rates by 25 bp"]
        assert all("text" in each.flags for each in daemon.answers())
        daemon.put(tick(1.1))
        await lines(daemon, 2)
        assert window(daemon)[1:] == ["100.00,100.00,100.00,100.00,1.000"]
        newest = [each for each in daemon.answers() if each.data_version == 2]
        assert not any("text" in each.flags for each in newest)
        assert len({each.answer_id for each in daemon.answers()}) == len(daemon.answers())
        (kept,) = ledger(daemon.gateway.store).sessions
        assert (kept.events, kept.in_bars, kept.unaccounted) == (1, 2, 0)
        await committed(daemon, 2)


async def test_a_halted_session_gives_no_answers_until_it_resumes() -> None:
    async with running(config()) as daemon:
        daemon.put(tick(0.1), tick(1.1))
        await lines(daemon, 1)
        known = daemon.state().questions[0]
        daemon.put(event("status", 1.2, state="halt", reason="volatility"), tick(2.5), tick(3.5))
        await until(lambda: daemon.state().live_records == 4, 20)
        newest = daemon.state().version
        for question, choices in (("Is it up?", ["YES", "NO"]), (known.text, list(known.choices or ()))):
            with pytest.raises(QueryError, match="halted") as refused:
                await daemon.call("ask", "aaa", question, choices=choices)
            assert refused.value.code == "halted"
        reply = await daemon.http("POST", "/v1/ask", {"session": "aaa", "question": known.text})
        assert (reply.status, reply.json["code"]) == (409, "halted")
        assert {each.data_version for each in daemon.answers()} == {1}
        assert daemon.value("session_halted", session="aaa") == 1
        (listed,) = daemon.gateway.sessions.listed(0).sessions
        assert listed.halted
        await committed(daemon, 4)
        daemon.put(event("status", 3.7, state="resume"))
        await lines(daemon, 5)
        await daemon.call("ask", "aaa", "Is it up?", choices=["YES", "NO"])
        assert {each.data_version for each in daemon.answers()} == {1, newest + 1}
        assert [window(daemon)[n] for n in (1, 4)] == ["halt,volatility", "resume"]
        assert daemon.value("session_halted", session="aaa") == 0


@pytest.mark.parametrize("model", ["decimal", "compact"])
async def test_answers_of_a_halted_session_may_just_say_so(model: str) -> None:
    own = config(on_halt="flag")
    if model == "compact":
        own = msgspec.structs.replace(own, model=COMPACT)
    async with running(own) as daemon:
        daemon.put(tick(0.1), event("status", 0.2, state="halt"), tick(1.1))
        await lines(daemon, 1 if model == "compact" else 2)
        assert all("halted" in each.flags for each in daemon.answers())
        assert "halted" in daemon.state().flags_now(0)


async def test_compact_sessions_have_flags_and_no_lines() -> None:
    async with running(msgspec.structs.replace(config(), model=COMPACT)) as daemon:
        daemon.put(tick(0.1), event("text", 0.2, text="news"))
        daemon.put(event("action", 0.3, action="dividend", amount="1"), tick(1.1))
        await lines(daemon, 1)
        daemon.put(tick(2.1))
        await lines(daemon, 2)
        flags = [{flag for a in daemon.answers() if a.data_version == n for flag in a.flags} for n in (1, 2)]
        assert flags[0] >= {"text", "action"}
        assert not flags[1] & {"text", "action"}
        assert daemon.count("events", session="aaa", kind="text") == 1
        daemon.put(event("status", 2.2, state="halt"))
        await until(lambda: daemon.state().halted, 20)
        with pytest.raises(QueryError, match="halted"):
            await daemon.call("ask", "aaa", "trend", choices=["UP", "DOWN", "NONE"])


async def test_an_event_of_a_venue_is_of_all_its_symbols() -> None:
    async with running(inproc_config(("V:AAA", "V:BBB"))) as daemon:
        daemon.put(event("text", 0.5, "*", text="power cut in the exchange's data centre"))
        await lines(daemon, 1)
        await lines(daemon, 1, "bbb")
        assert window(daemon, "aaa") == window(daemon, "bbb")
        daemon.put(event("text", 0.6, "CCC", text="of a symbol that no session reads"))
        await until(lambda: daemon.count("records_unknown_symbol") == 1, 20)
        await committed(daemon, 2)


async def test_ignored_events_are_counted_and_a_book_is_a_line_where_it_is_asked_for() -> None:
    book = {"bids": [["100.01", "200"], ["100.00", "50"]], "asks": [["100.02", "150"]]}
    async with running(config(book="line", status="ignore", text="ignore")) as daemon:
        daemon.put(event("text", 0.1, text="x"), event("status", 0.2, state="halt"))
        daemon.put(event("book", 0.3, **book))
        await lines(daemon, 1)
        assert window(daemon) == ["book,100.01x200,100.02x150,0.25"]
        assert not daemon.state().halted
        kinds = ("text", "status", "book")
        assert [daemon.count("events", session="aaa", kind=kind) for kind in kinds] == [1, 1, 1]


OLD, NEW = "100.00,100.00,100.00,100.00,1.000", "10.00,10.00,10.00,10.00,1.000"


@pytest.mark.parametrize(
    ("on_split", "expected"),
    [
        ("line", [*[OLD] * 3, "split,10", OLD, NEW]),
        ("reset", [NEW]),
        ("adjust", [*["10.00,10.00,10.00,10.00,10.000"] * 4, NEW]),
    ],
)
async def test_a_split_may_begin_the_window_again(on_split: str, expected: list[str]) -> None:
    async with running(config(on_split=on_split)) as daemon:
        daemon.put(*(tick(n + 0.1) for n in range(4)))
        await lines(daemon, 3)
        daemon.put(event("action", 3.5, action="split", factor="10"), tick(4.1, "10.00"), tick(5.1, "10.00"))
        await until(lambda: window(daemon) == expected, 20)
        await until(lambda: daemon.answered("aaa", daemon.state().version), 20)
        assert daemon.state().live_records == len(expected)


async def test_a_text_cannot_write_special_tokens() -> None:
    async with running(config()) as daemon:
        special = daemon.host.first.sessions.built.prompt.tokenizer.all_special_tokens[0]
        daemon.put(event("text", 0.1, text=f"ends {special} here"))
        await lines(daemon, 1)
        built = daemon.host.first.sessions.built
        tokens = built.tapes["aaa"].window
        assert not set(tokens) & set(built.prompt.tokenizer.all_special_ids)
        assert window(daemon) == ["text,ends   here"]


MALFORMED = {
    "no text": (event("text", 0.1, text=" "), "missing_field"),
    "no state": (event("status", 0.1), "missing_field"),
    "unknown state": (event("status", 0.1, state="gone"), "type"),
    "long text": (event("text", 0.1, text="x" * 5000), "oversize"),
    "no factor": (event("action", 0.1, action="split"), "missing_field"),
    "factor below zero": (event("action", 0.1, action="split", factor="-2"), "price"),
    "other factor": (event("action", 0.1, action="split", factor=[]), "price"),
    "no symbol": (event("action", 0.1, action="symbol_change", new_symbol="A B"), "symbol"),
    "effective in s": (event("action", 0.1, action="dividend", amount="1", effective=5), "timestamp_unit"),
    "empty book": (event("book", 0.1, bids=[], asks=[]), "missing_field"),
    "wrong order": (event("book", 0.1, bids=[["1", "1"], ["2", "1"]], asks=[]), "price"),
    "deep book": (event("book", 0.1, bids=[[str(99 - n), "1"] for n in range(11)], asks=[]), "oversize"),
    "negative size": (event("book", 0.1, bids=[["1", "-1"]], asks=[]), "size"),
    "price zero": (event("book", 0.1, bids=[], asks=[["0", "1"]]), "price"),
    "level": (event("book", 0.1, bids=[["1"]], asks=[]), "type"),
}


async def test_malformed_events_go_to_the_dlq() -> None:
    async with running(config(book="line")) as daemon:
        daemon.put(*(payload for payload, _ in MALFORMED.values()))
        await until(lambda: len(list(daemon.sink.messages(DEAD))) == len(MALFORMED), 20)
        letters = [each for each in daemon.sink.messages(DEAD) if isinstance(each, DeadLetter)]
        assert {each.payload: each.reason for each in letters} == dict(MALFORMED.values())


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("topics", "snapshots"), [(["in"], False), (["in"], True), (["in", "news"], True)], ids=str
)
async def test_a_daemon_started_again_writes_no_line_twice_and_loses_none(
    topics: list[str], snapshots: bool, state_directory: Path
) -> None:
    """Also those that came while it was down; a halt is known from the start on."""
    with MockBroker() as broker:
        for topic in (*topics, "foretick.progress.v1"):
            broker.create_topic(topic, 1)
        own = inproc_config(
            events=EventsConfig(on_halt="flag"),
            source=SourceConfig(kind="kafka", kafka=KafkaSourceConnector(broker.bootstrap, topics=topics)),
            recovery=RecoveryConfig(Duration(3600 * SECOND if snapshots else 0)),
        )
        sink, found = KafkaSink("test", broker.bootstrap), list[Answer]()
        await sink.start()

        async def send(*payloads: bytes) -> None:
            for payload in payloads:
                topic = topics[-1] if b'"trade"' not in payload else topics[0]
                await sink.publish(topic, b"V:AAA", payload, {})

        async with running(own, []) as daemon:
            for n in range(3):
                await send(tick(n + 0.1), event("text", n + 0.5, text=f"headline {n}"))
                await lines(daemon, 2 * n + 1)
            await send(event("status", 2.6, state="halt"))
            await lines(daemon, 6)
            before = window(daemon)
            found += daemon.answers()
            await daemon.gateway.stop()
        await send(event("text", 2.7, text="while it was down"))
        async with running(own, []) as daemon:
            await lines(daemon, 7)
            assert daemon.state().halted
            assert window(daemon) == [*before, "text,while it was down"]
            await send(tick(3.1), event("status", 3.2, state="resume"), tick(4.1))
            await lines(daemon, 10)
            assert sorted(window(daemon)[7:])[-1] == "resume"
            found += daemon.answers()
            assert daemon.count("snapshots_restored", session="aaa") == snapshots
        await sink.stop()
        moments = {each.as_of - START for each in found}
        assert moments >= {SECOND // 2, 3 * SECOND // 2, 5 * SECOND // 2, 27 * SECOND // 10}
        assert len({each.answer_id for each in found}) == len(found), "each version is answered once"


NEWS = """
description = "a vendor's headlines and halts, about several symbols each"
container = "json"
[[records]]
kind = "text"
venue = "V"
each = "tickers"
match = { field = "kind", values = ["story"] }
time = { field = "$.published", format = "iso" }
fields = { symbol = "@", text = "$.title", id = "$.story" }
[[records]]
kind = "status"
venue = "V"
match = { field = "kind", values = ["trading"] }
time = { field = "published", format = "iso" }
fields = { symbol = "ticker", state = "to" }
state_values = { paused = "halt", trading = "resume" }
"""


async def test_a_vendor_s_own_messages_become_lines(tmp_path: Path) -> None:
    """In a topic beside the one of prices, in a declared format."""
    (tmp_path / "news.toml").write_text(NEWS)
    rules = (FormatRule(format=str(tmp_path / "news.toml"), topics=["news"]),)
    with MockBroker() as broker:
        for topic in ("in", "news", "foretick.progress.v1"):
            broker.create_topic(topic, 1)
        kafka = KafkaSourceConnector(broker.bootstrap, topics=["in", "news"], formats=rules)
        own = config()
        own = msgspec.structs.replace(own, source=SourceConfig(kind="kafka", kafka=kafka))
        sink = KafkaSink("test", broker.bootstrap)
        await sink.start()

        async def send(**members: object) -> None:
            moment = datetime.fromtimestamp(START / SECOND + 1.5, UTC).isoformat()
            await sink.publish("news", None, msgspec.json.encode({"published": moment, **members}), {})

        async with running(own, []) as daemon:
            await sink.publish("in", b"V:AAA", tick(0.1), {})
            await sink.publish("in", b"V:AAA", tick(1.1), {})
            await lines(daemon, 1)
            await send(kind="story", story="s1", title="Rates cut by 25 bp", tickers=["BBB", "AAA"])
            await send(kind="trading", ticker="AAA", to="paused")
            await send(kind="trading", ticker="AAA", to="lunch")
            await until(lambda: daemon.state().halted and daemon.state().live_records == 3, 20)
            assert window(daemon)[1:] == ["text,Rates cut by 25 bp", "halt"]
            await until(lambda: len(list(daemon.sink.messages(DEAD))) == 1, 20)
            (refused,) = daemon.sink.messages(DEAD)
            assert isinstance(refused, DeadLetter)
            assert (refused.reason, "among state_values" in refused.error) == ("type", True)
        await sink.stop()


async def test_events_come_by_http() -> None:
    source = SourceConfig(kind="http", http=HttpSourceConnector())  # type: ignore[call-arg]  # by connectors
    async with running(inproc_config(source=source), []) as daemon:
        body = b"\n".join([tick(0.1), event("text", 0.5, text="news"), event("status", 0.6)])
        reply = await daemon.http("POST", "/v1/data", body, {"content-type": "application/x-ndjson"})
        assert (reply.status, reply.json["accepted"], reply.json["refused"]) == (202, 2, 1)
        await lines(daemon, 1)
        assert window(daemon) == ["text,news"]
