"""Sessions that patterns open: as records of their symbols come, with limits, and again after a restart."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from daemon.api.client import AsyncQueryClient
from daemon.api.messages import Answers, AnswersReply
from daemon.audit.completeness import Audit
from daemon.config.schema import (
    Config,
    PatternConfig,
    PoolConfig,
    QuestionConfig,
    RecoveryConfig,
    SymbolsConfig,
)
from daemon.gateway.gateway import Gateway
from daemon.ledger import ledger
from feeds.durations import Duration
from tests.e2e.test_e2e_group import Delivery, Group, grouped
from tests.kit import SECOND, START, QueueSource, inproc_config, trade, until
from tests.kit.fixtures import RealKafka
from tests.kit.inproc import RunningDaemon, Tape, running

TREND = QuestionConfig(name="trend", text="Is it going up or down?", choices=("UP", "DOWN"))
SYMBOLS = ("B:AUSDT", "B:BUSDT", "B:CEUR", "W:DUSDT", "B:EUSDT", "B:BULLUSDT")


def patterns(*found: PatternConfig, **settings: object) -> Config:
    defaults: dict[str, object] = {"pool": PoolConfig(blocks=4096), "standing": "none", "questions": (TREND,)}
    return msgspec.structs.replace(inproc_config((), patterns=found), **(defaults | settings))


def pattern(match: str = "B:*USDT", **settings: object) -> PatternConfig:
    return PatternConfig(match=match, retention_tokens=512, **settings)  # type: ignore[arg-type]  # a pattern's


async def read(daemon: RunningDaemon, session: str, bars: int) -> None:
    """Wait until a session has read this many bars, and the newest is answered."""
    await until(lambda: session in daemon.gateway.sessions.states, what=f"a session {session}")
    await until(lambda: daemon.state(session).live_records == bars, what=f"{bars} bars of {session}")
    newest = daemon.state(session).version
    await until(lambda: [a.data_version for a in daemon.answers(session)][-1:] == [newest])


def names(daemon: RunningDaemon) -> set[str]:
    return set(daemon.gateway.sessions.states)


def window(daemon: RunningDaemon, session: str) -> list[str]:
    """The lines of a session's bars."""
    built = daemon.host.first.sessions.built
    lines: list[str] = built.prompt.decode(built.tapes[session].window).split("\n")
    return lines


@pytest.mark.parametrize("trades", [1, 12], ids=["one_by_one", "as_columns"])
async def test_symbols_that_match_get_sessions_with_all_their_records(trades: int) -> None:
    """The tapes are those of sessions that were configured; all other records are counted."""
    alone = {symbol: f"B-{symbol.partition(':')[2]}" for symbol in ("B:AUSDT", "B:BUSDT", "B:EUSDT")}
    config = patterns(pattern(exclude=("*BULLUSDT",)))
    async with running(config, tape=Tape(*SYMBOLS)) as daemon:
        for _ in range(4):
            daemon.feed(1, trades)
        for name in alone.values():
            await read(daemon, name, 3)
        assert names(daemon) == set(alone.values())
        assert daemon.state("B-AUSDT").symbol == "B:AUSDT"
        found = ledger(daemon.gateway.store)
        assert (found.read.unknown_symbol, found.read.unopened) == (3 * 4 * trades, {})
        tapes = {name: window(daemon, name) for name in alone.values()}
        listed = await daemon.call("sessions")
        assert {each.name for each in listed.sessions} == set(alone.values())
        assert (await daemon.call("ask", "B-BUSDT", TREND.text, choices=TREND.choices)).choice in (
            "UP",
            "DOWN",
        )
    configured = msgspec.structs.replace(
        config, patterns=(), sessions=tuple(pattern().session(n, s, 2) for s, n in alone.items())
    )
    async with running(configured, tape=Tape(*SYMBOLS)) as daemon:
        for _ in range(4):
            daemon.feed(1, trades)
        for name in alone.values():
            await read(daemon, name, 3)
        assert {name: window(daemon, name) for name in alone.values()} == tapes


async def test_limits_decide_what_is_opened_and_why_not() -> None:
    """A session opens with its third record; a pattern has at most two; a record counts for one reason."""
    config = patterns(pattern(least_records=3, max_sessions=2), pattern("W:*", least_records=20))
    async with running(config, tape=Tape(*SYMBOLS)) as daemon:
        for _ in range(4):
            daemon.feed(1, 2)
        await until(lambda: daemon.count("records", source="test") == 4 * 2 * len(SYMBOLS))
        assert names(daemon) == {"B-AUSDT", "B-BUSDT"}
        unopened = ledger(daemon.gateway.store).read.unopened
        # two records of A, B, E and BULL before the limit was reached; all of W:DUSDT
        assert unopened == {"activity": 2 * 4 + 8, "limit": 2 * 6}
        await read(daemon, "B-AUSDT", 2)


async def test_decimals_come_from_the_instruments_file_or_the_first_records(tmp_path: Path) -> None:
    file = tmp_path / "instruments.csv"
    file.write_text("symbol,tick_size,lot_size,signed,base\nB:AUSDT,0.001,1,true,A\n")
    config = patterns(pattern(least_records=2), symbols=SymbolsConfig(instruments_file=str(file)))
    tape = Tape()
    async with running(config, tape=tape) as daemon:
        for n in range(6):
            second = START + n * SECOND
            daemon.put(
                trade("B:AUSDT", second, "-0.5", "3"), trade("B:BUSDT", second, "10.25" if n else "10")
            )
        await read(daemon, "B-AUSDT", 4)
        await read(daemon, "B-BUSDT", 4)
        of = {each.name: each for each in daemon.gateway.config.sessions}
        assert [of[name].price_decimals for name in ("B-AUSDT", "B-BUSDT")] == [3, 2]
        assert (of["B-AUSDT"].volume_decimals, of["B-AUSDT"].signed) == (0, True)
        assert "-0.500" in window(daemon, "B-AUSDT")[-1]
        daemon.put(trade("B:CUSDT", START + SECOND, "-1"))
        await until(lambda: daemon.count("records_malformed", reason="price") == 1)
        assert "B-CUSDT" not in names(daemon)


async def test_a_silent_session_is_closed_and_opens_again_with_its_numbers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = patterns(pattern(idle_timeout=Duration(SECOND)))
    async with running(config, tape=Tape("B:AUSDT"), commit_every_s=0.05) as daemon:
        daemon.feed(4)
        await read(daemon, "B-AUSDT", 3)
        before = daemon.answers("B-AUSDT")[-1]
        await until(lambda: not names(daemon), 60, "the end of the idle session")
        assert daemon.host.first.sessions.built.tapes == {}
        daemon.feed(4)
        await read(daemon, "B-AUSDT", 3)
        after = next(each for each in daemon.answers("B-AUSDT") if each.as_of > before.as_of)
        assert after.sequence == before.sequence + 1
        assert daemon.count("session_transitions_refused", process="gateway") == 0


async def test_what_the_engine_has_no_room_for_is_counted_and_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The daemon stays ready, and the source goes on."""
    monkeypatch.setattr("daemon.gateway.patterns.RETRY_NS", 0)
    config = patterns(pattern(), pool=PoolConfig(blocks=240))
    async with running(config, tape=Tape("B:AUSDT", "B:BUSDT")) as daemon:
        daemon.feed(4)
        await read(daemon, "B-AUSDT", 3)
        await until(lambda: daemon.count("records_unopened", reason="refused") > 0)
        assert names(daemon) == {"B-AUSDT"}
        assert daemon.gateway.status.not_ready() == []
        await until(lambda: daemon.source.committed.get(("md", 0), 0) >= 0)


async def test_a_reload_keeps_what_its_patterns_open_and_closes_the_rest() -> None:
    config = patterns(pattern(), pattern("W:*"))
    async with running(config, tape=Tape(*SYMBOLS)) as daemon:
        daemon.feed(4)
        await read(daemon, "B-AUSDT", 3)
        await read(daemon, "W-DUSDT", 3)
        kept = daemon.host.first.sessions.built.tapes["B-AUSDT"]
        given = pattern().session("mine", "B:BUSDT", 2)
        new = msgspec.structs.replace(config, patterns=(pattern(stale_after=Duration(1)),), sessions=(given,))
        await daemon.gateway.reload(lambda: new)
        assert names(daemon) == {"B-AUSDT", "B-EUSDT", "B-BULLUSDT", "mine"}
        assert daemon.host.first.sessions.built.tapes["B-AUSDT"] is kept
        assert daemon.state("B-AUSDT").stale_after_ns == 1
        daemon.feed(4)
        await read(daemon, "B-AUSDT", 7)
        await read(daemon, "mine", 3)
        wider = pattern(interval=Duration(2 * SECOND))
        await daemon.gateway.reload(lambda: msgspec.structs.replace(new, patterns=(wider,)))
        assert daemon.host.first.sessions.built.tapes["B-AUSDT"] is not kept
        daemon.feed(5)
        await read(daemon, "B-AUSDT", 2)
        assert daemon.count("config_reloads", outcome="done") == 2


async def test_without_a_log_sessions_are_there_again_after_a_restart(tmp_path: Path) -> None:
    """From the file of progress, with their windows, decimals and numbers, before any record comes."""
    recovery = RecoveryConfig(directory=str(tmp_path), interval=Duration(1))
    config = patterns(pattern(least_records=2), recovery=recovery)
    tape = Tape("B:AUSDT", "W:D")
    for run in range(2):
        async with running(config, QueueSource("dropping"), tape) as daemon:
            assert names(daemon) == ({"B-AUSDT"} if run else set())
            for n in range(4):
                daemon.feed()
                await until(lambda of=daemon, n=n: len(of.answers("B-AUSDT")) >= n)
            assert await daemon.gateway.stop()
        sequences = [each.sequence for each in daemon.answers("B-AUSDT")]
        assert sequences == list(range(sequences[0], sequences[0] + len(sequences)))
        assert (sequences[0] > 1) is bool(run)
        assert daemon.gateway.config.sessions[0].price_decimals == 2


class PatternGroup(Group):
    """Daemons whose sessions patterns open."""

    def config(self, member: str, **query: object) -> Config:
        found = super().config(member, **query)
        wanted = pattern("V:*", least_records=2)
        return msgspec.structs.replace(found, sessions=(), patterns=(wanted,))

    async def opened(self, gateway: Gateway) -> None:
        wanted = {"V-AAA", "V-BBB"}
        await until(lambda: set(gateway.sessions.states) == wanted, 60.0, "the sessions of the group")


@pytest.mark.sampled(1)
@pytest.mark.kafka
@pytest.mark.parametrize("delivery", ["at_least_once", "exactly_once"])
async def test_all_daemons_of_a_group_have_what_one_has_opened(
    real_kafka: RealKafka, tmp_path: Path, delivery: Delivery
) -> None:
    """They hand it over, forward what they are asked about it, and have it again after a restart."""
    async with grouped(PatternGroup(real_kafka, tmp_path, delivery)) as group:
        first = await group.join("one")
        assert first.sessions.states == {}
        await group.trade(5)
        await group.answered()
        second = await group.join("two")
        await group.opened(second)
        await group.trade(3)
        await group.shared()
        await group.trade(3)
        await group.answered()
        theirs = next(name for name in first.sessions.states if first.input.owner(name) is not None)
        assert first.query is not None
        async with AsyncQueryClient(first.query.endpoint) as client:
            reply = await client.request(Answers(1, theirs))
            assert isinstance(reply, AnswersReply), reply
        await second.stop()
        await group.trade(3)
        await group.answered()
        await first.stop()
        third = await group.join("one")
        await group.opened(third)  # before any record comes
        await group.trade(3)
        await group.answered()
        audit = Audit(whole=True)
        for answer in group.published:
            audit.take(answer)
        for each in audit.result():
            assert each.holds(exactly_once=delivery == "exactly_once"), each


async def test_records_keep_their_symbols_while_sessions_go_and_the_ring_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Columns that wait for room have keys of the symbols as they were."""
    from daemon.gateway.ring_flow import RingFlow

    config = inproc_config(
        ("V:AAA", "V:BBB"), pool=PoolConfig(blocks=2048), standing="none", questions=(TREND,)
    )
    make_room: Callable[[RingFlow, int], object] = RingFlow.make_room
    async with running(config, tape=Tape("V:AAA", "V:BBB")) as daemon:
        daemon.feed(3, 12)
        await read(daemon, "bbb", 2)
        gone = asyncio.Event()

        async def waits(flow: RingFlow, records: int = 1) -> None:
            if not gone.is_set():
                gone.set()
                only = msgspec.structs.replace(config, sessions=config.sessions[1:])
                await daemon.gateway.reload(lambda: only)
            await make_room(flow, records)  # type: ignore[misc]  # it is awaitable

        monkeypatch.setattr(RingFlow, "make_room", waits)
        prices = {"V:AAA": "1", "V:BBB": "105"}
        for n in range(4, 8):
            batch = [trade(s, START + n * SECOND + i, prices[s]) for i in range(12) for s in prices]
            daemon.put(*batch)
        await read(daemon, "bbb", 6)
        assert gone.is_set()
        assert not [line for line in window(daemon, "bbb")[2:] if ",1.00" in line]
