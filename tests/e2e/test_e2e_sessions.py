"""Sessions that come, change and go while a daemon runs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from daemon.api.messages import QueryError
from daemon.config.errors import ConfigError, ConfigProblem
from daemon.config.schema import BarsConfig, Config, PoolConfig, QuestionConfig, SessionConfig
from daemon.gateway.gateway import Gateway
from feeds.durations import Duration
from tests.kit import SECOND, MemorySink, QueueSource, inproc_config, sessions, until
from tests.kit.daemon import invoke
from tests.kit.inproc import Tape, answers, ask_gateway, count, running

TREND = QuestionConfig(name="trend", text="Is it going up or down?", choices=("UP", "DOWN"))


def one_question(*symbols: str, **settings: object) -> Config:
    pool = PoolConfig(blocks=1024)
    settings = {"pool": pool} | settings
    return inproc_config(symbols, standing="none", questions=(TREND,), **settings)


def with_sessions(config: Config, *found: SessionConfig) -> Config:
    return msgspec.structs.replace(config, sessions=found)


async def reload(gateway: Gateway, config: Config) -> None:
    await gateway.reload(lambda: config)


async def read(gateway: Gateway, sink: MemorySink, name: str, bars: int) -> None:
    """Wait until a session has read so many bars in all, and its newest version is answered."""
    await until(lambda: gateway.sessions.states[name].live_records == bars, what=f"{bars} bars of {name}")
    newest = gateway.sessions.states[name].version
    await until(lambda: [a.data_version for a in answers(sink, name)][-1:] == [newest])


async def test_one_symbol_feeds_several_sessions_and_one_session_reads_several() -> None:
    """Bars of 1 s and 2 s of one symbol, and a spread of two symbols whose lines say which is which."""
    source, sink, tape = QueueSource(), MemorySink(), Tape("V:AAA", "W:BBB")
    config = one_question("V:AAA")
    slow = SessionConfig(name="slow", symbol="V:AAA", interval=Duration(2 * SECOND))
    spread = SessionConfig(name="spread", symbol="V:AAA", more_symbols=("W:BBB",))
    config = msgspec.structs.replace(config, sessions=(*config.sessions, slow, spread))
    async with running(config, source, sink) as gateway:
        for n in range(1, 10):
            source.put(tape.second(n))
        await until(lambda: gateway.sessions.states["aaa"].live_records == 8)
        await until(lambda: gateway.sessions.states["spread"].live_records == 16)
        assert gateway.sessions.states["slow"].live_records == 4
        host = gateway.engine._client._host  # type: ignore[union-attr]
        tokens = host.sessions.built.tapes["spread"].window
        lines = host.sessions.built.prompt.decode(tokens).split("\n")
        assert [line.split(",")[0] for line in lines[:4]] == ["AAA", "BBB", "AAA", "BBB"]
        listed = await ask_gateway(gateway, "sessions")
        assert listed.sessions[2].more_symbols == ("W:BBB",)
        await until(lambda: all(answers(sink, name) for name in ("aaa", "slow", "spread")))
        assert await gateway.stop()
    assert source.committed[("md.trades.v1", 0)] > 0


async def test_sessions_come_change_and_go_at_a_reload_and_others_keep_their_windows() -> None:
    source, sink, tape = QueueSource(), MemorySink(), Tape("V:AAA", "V:BBB")
    config = one_question("V:AAA")
    async with running(config, source, sink) as gateway:
        for n in range(4):
            source.put(tape.second(n))
        await read(gateway, sink, "aaa", 3)
        host = gateway.engine._client._host  # type: ignore[union-attr]
        kept = host.sessions.built.tapes["aaa"]
        more = with_sessions(config, *config.sessions, *sessions("V:BBB", retention_tokens=512))
        await reload(gateway, more)
        for n in range(4, 8):
            source.put(tape.second(n))
        await read(gateway, sink, "aaa", 7)
        await read(gateway, sink, "bbb", 3)
        assert host.sessions.built.tapes["aaa"] is kept
        reused = [a.reused_tokens for a in answers(sink)]
        assert reused == sorted(reused)
        assert count(gateway, "bars", session="bbb") == 3
        assert b'foretick_bars_total{session="bbb"} 3.0' in gateway.status.metrics()
        # a longer window and lateness keep what is there; another interval begins again
        longer = msgspec.structs.replace(config.sessions[0], retention_tokens=2048, lateness=Duration(SECOND))
        again = msgspec.structs.replace(more.sessions[1], interval=Duration(2 * SECOND))
        await reload(gateway, with_sessions(config, longer, again))
        assert host.sessions.built.tapes["aaa"] is kept
        assert kept.retention.tokens == 2048
        assert gateway.sessions.states["bbb"].live_records == 0
        version = gateway.sessions.states["bbb"].version
        assert version == answers(sink, "bbb")[-1].data_version
        for n in range(8, 14):
            source.put(tape.second(n))
        await until(lambda: gateway.sessions.states["bbb"].version > version)
        await read(gateway, sink, "aaa", 12)
        await reload(gateway, with_sessions(config, longer))
        assert list(gateway.sessions.states) == ["aaa"]
        assert b'session="bbb"' not in gateway.status.metrics()
        source.put(tape.second(14))
        await read(gateway, sink, "aaa", 13)
        assert count(gateway, "config_reloads", outcome="done") == 3
        await until(lambda: gateway.publisher._tracker.outstanding() <= 8)  # those of open bars
        assert await gateway.stop()


async def test_a_bad_configuration_is_refused_whole_and_what_needs_a_restart_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source, sink = QueueSource(), MemorySink()
    config = one_question("V:AAA")

    def bad() -> Config:
        raise ConfigError([ConfigProblem("sessions[0].name", "is missing")])

    async with running(config, source, sink) as gateway:
        await gateway.reload(bad)
        assert "sessions[0].name" in caplog.text
        assert count(gateway, "config_reloads", outcome="refused") == 1
        pool = msgspec.structs.replace(config.pool, blocks=9999)
        bars = BarsConfig(interval=Duration(60 * SECOND))
        await reload(gateway, msgspec.structs.replace(config, pool=pool, bars=bars))
        assert "pool.blocks stays as it is" in caplog.text
        assert gateway.config.pool.blocks == 1024
        assert gateway.config.sessions[0].bars(gateway.config.bars).interval == 60 * SECOND
        assert count(gateway, "config_reloads", outcome="partly") == 1
        assert await gateway.stop()


async def test_clients_add_change_and_remove_sessions() -> None:
    source, sink, tape = QueueSource(), MemorySink(), Tape("V:AAA", "V:BBB")
    async with running(one_question("V:AAA"), source, sink) as gateway:
        assert gateway.query is not None
        endpoint = ("--endpoint", gateway.query.endpoint)
        added = await asyncio.to_thread(
            invoke, "sessions", "add", "bbb", "V:BBB", "--set", "interval=2s", *endpoint
        )
        assert added.exit_code == 0, added.output
        assert "bbb" in added.stdout
        with pytest.raises(QueryError, match="already a session"):
            await ask_gateway(gateway, "add_session", "bbb", "V:BBB")
        with pytest.raises(QueryError, match="no such key"):
            await ask_gateway(gateway, "add_session", "ccc", "V:BBB", tokens=7)
        with pytest.raises(QueryError, match="frame_limit"):
            await ask_gateway(gateway, "add_session", "ccc", "V:BBB", retention_tokens=100_000)
        with pytest.raises(QueryError, match="add blocks"):
            await ask_gateway(
                gateway, "add_session", "ccc", "V:BBB", retention_tokens=5000, semantics="exact"
            )
        for n in range(8):
            source.put(tape.second(n))
        await read(gateway, sink, "bbb", 4)
        reply = await ask_gateway(gateway, "change_session", "bbb", retention_records=2)
        assert [s.name for s in reply.sessions][:2] == ["aaa", "bbb"]
        for n in range(8, 13):
            source.put(tape.second(n))
        await until(lambda: gateway.sessions.states["bbb"].live_records == 2)
        with pytest.raises(QueryError, match="no such key"):
            await ask_gateway(gateway, "change_session", "bbb", intervall="1s")
        removed = await asyncio.to_thread(invoke, "sessions", "remove", "bbb", *endpoint)
        assert "bbb" not in removed.stdout
        with pytest.raises(QueryError) as error:
            await ask_gateway(gateway, "ask", "bbb", "Up?")
        assert error.value.code == "unknown_session"
        listed = await asyncio.to_thread(invoke, "sessions", "list", *endpoint)
        assert "aaa" in listed.stdout
        assert await gateway.stop()


async def test_what_is_asked_of_a_session_that_is_removed_fails_and_the_daemon_goes_on() -> None:
    source, sink, tape = QueueSource(), MemorySink(), Tape("V:AAA", "V:BBB")
    async with running(one_question("V:AAA", "V:BBB"), source, sink) as gateway:
        for n in range(3):
            source.put(tape.second(n))
        await read(gateway, sink, "bbb", 2)
        asking = [
            asyncio.create_task(ask_gateway(gateway, "ask", "bbb", f"What happens next, {n}?", 60))
            for n in range(4)
        ]
        waiting = asyncio.create_task(ask_gateway(gateway, "answers", "bbb", min_version=99, timeout_s=60))
        await asyncio.sleep(0.05)
        source.put(tape.second(3))
        await ask_gateway(gateway, "remove_session", "bbb")
        ended = await asyncio.wait_for(asyncio.gather(*asking, waiting, return_exceptions=True), 20)
        assert {each.code for each in ended if isinstance(each, QueryError)} == {"unknown_session"}
        assert isinstance(ended[-1], QueryError)
        source.put(tape.second(4))
        await read(gateway, sink, "aaa", 4)
        assert gateway.store.value("foretick_integrity_failures_total") == 0
        assert await gateway.stop()


async def test_300_sessions_on_a_small_pool_go_to_disk_and_come_back(tmp_path: Path) -> None:
    """The answers are those of a pool that holds them all."""
    symbols = [f"V:S{n}" for n in range(300)]
    found = {}
    for blocks in (0, 1500):
        source, sink, tape = QueueSource(), MemorySink(), Tape(*symbols)
        spill = tmp_path / str(blocks)
        pool = PoolConfig(
            blocks=blocks, idle_spill=Duration(50_000_000 if blocks else 0), spill_dir=str(spill)
        )
        own = sessions(*symbols, retention_tokens=128)
        async with running(one_question(sessions=own, pool=pool), source, sink) as gateway:
            for n in range(5):
                source.put(tape.second(n, trades=1))
                await until(lambda n=n, sink=sink: len(sink.sent) >= 600 * n, 60)
            if blocks:
                await until(lambda gateway=gateway: count(gateway, "restores", outcome="disk") > 100, 30)
                assert gateway.store.value("foretick_integrity_failures_total") == 0
            for name in ("s0", "s299"):
                reply = await ask_gateway(gateway, "ask", name, "Up?", choices=("YES", "NO"))
                assert reply.data_version == 4
            found[blocks] = {
                (a.session, a.data_version, a.question): (a.text, round(a.logit_gap, 3))
                for name in ("s0", "s7", "s150", "s299")
                for a in answers(sink, name)
            }
            assert await gateway.stop()
    assert found[0] == found[1500]
    assert len(found[0]) == 16
