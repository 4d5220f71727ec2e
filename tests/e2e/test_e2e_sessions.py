"""Sessions that come, change and go while a daemon runs."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from daemon.api.messages import QueryError
from daemon.config.errors import ConfigError, ConfigProblem
from daemon.config.schema import BarsConfig, Config, PoolConfig, QuestionConfig, SessionConfig
from feeds.durations import Duration
from tests.kit import SECOND, TOPIC, inproc_config, sessions, until
from tests.kit.daemon import invoke
from tests.kit.inproc import RunningDaemon, Tape, running

TREND = QuestionConfig(name="trend", text="Is it going up or down?", choices=("UP", "DOWN"))


def one_question(*symbols: str, **settings: object) -> Config:
    pool = PoolConfig(blocks=1024)
    settings = {"pool": pool} | settings
    return inproc_config(symbols, standing="none", questions=(TREND,), **settings)


def with_sessions(config: Config, *found: SessionConfig) -> Config:
    return msgspec.structs.replace(config, sessions=found)


async def read(daemon: RunningDaemon, session: str, bars: int) -> None:
    """Wait until a session has read so many bars in all, and its newest version is answered."""
    await until(lambda: daemon.state(session).live_records == bars, what=f"{bars} bars of {session}")
    newest = daemon.state(session).version
    await until(lambda: [a.data_version for a in daemon.answers(session)][-1:] == [newest])


async def test_one_symbol_feeds_several_sessions_and_one_session_reads_several() -> None:
    """Bars of 1 s and 2 s of one symbol, and a spread of two symbols whose lines say which is which."""
    config = one_question("V:AAA")
    slow = SessionConfig(name="slow", symbol="V:AAA", interval=Duration(2 * SECOND))
    spread = SessionConfig(name="spread", symbol="V:AAA", more_symbols=("W:BBB",))
    async with running(with_sessions(config, *config.sessions, slow, spread)) as daemon:
        daemon.source.put(*(daemon.tape.second(n) for n in range(1, 10)))
        for session, bars in (("aaa", 8), ("spread", 16), ("slow", 4)):
            await until(lambda name=session, n=bars: daemon.state(name).live_records == n)
        built = daemon.host.first.sessions.built
        lines = built.prompt.decode(built.tapes["spread"].window).split("\n")
        assert [line.split(",")[0] for line in lines[:4]] == ["AAA", "BBB", "AAA", "BBB"]
        listed = await daemon.call("sessions")
        assert listed.sessions[2].more_symbols == ("W:BBB",)
        await until(lambda: all(daemon.answers(name) for name in ("aaa", "slow", "spread")))
        assert await daemon.gateway.stop()
    assert daemon.source.committed[TOPIC, 0] > 0


async def test_sessions_come_change_and_go_at_a_reload_and_others_keep_their_windows() -> None:
    config = one_question("V:AAA")
    async with running(config, tape=Tape("V:AAA", "V:BBB")) as daemon:

        async def reload(*found: SessionConfig) -> None:
            await daemon.gateway.reload(lambda: with_sessions(config, *found))

        daemon.feed(4)
        await read(daemon, "aaa", 3)
        kept = daemon.host.first.sessions.built.tapes["aaa"]
        (new,) = sessions("V:BBB", retention_tokens=512)
        await reload(*config.sessions, new)
        daemon.feed(4)
        await read(daemon, "aaa", 7)
        await read(daemon, "bbb", 3)
        assert daemon.host.first.sessions.built.tapes["aaa"] is kept
        reused = [a.reused_tokens for a in daemon.answers()]
        assert reused == sorted(reused)
        assert daemon.count("bars", session="bbb") == 3
        assert b'foretick_bars_total{session="bbb"} 3.0' in daemon.gateway.status.metrics()
        # a longer window and lateness keep what is there; another interval begins again
        longer = msgspec.structs.replace(config.sessions[0], retention_tokens=2048, lateness=Duration(SECOND))
        await reload(longer, msgspec.structs.replace(new, interval=Duration(2 * SECOND)))
        assert daemon.host.first.sessions.built.tapes["aaa"] is kept
        assert kept.retention.tokens == 2048
        assert daemon.state("bbb").live_records == 0
        version = daemon.state("bbb").version
        assert version == daemon.answers("bbb")[-1].data_version
        daemon.feed(6)
        await until(lambda: daemon.state("bbb").version > version)
        await read(daemon, "aaa", 12)
        await reload(longer)
        assert list(daemon.gateway.sessions.states) == ["aaa"]
        assert b'session="bbb"' not in daemon.gateway.status.metrics()
        daemon.feed()
        await read(daemon, "aaa", 13)
        assert daemon.count("config_reloads", outcome="done") == 3
        (tracker,) = daemon.gateway.publisher._trackers.values()
        await until(lambda: tracker.outstanding() <= 16)  # of open bars, the other symbol between
        assert await daemon.gateway.stop()


async def test_a_bad_configuration_is_refused_whole_and_what_needs_a_restart_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = one_question("V:AAA")

    def bad() -> Config:
        raise ConfigError([ConfigProblem("sessions[0].name", "is missing")])

    async with running(config) as daemon:
        await daemon.gateway.reload(bad)
        assert "sessions[0].name" in caplog.text
        assert daemon.count("config_reloads", outcome="refused") == 1
        pool = msgspec.structs.replace(config.pool, blocks=9999)
        bars = BarsConfig(interval=Duration(60 * SECOND))
        await daemon.gateway.reload(lambda: msgspec.structs.replace(config, pool=pool, bars=bars))
        assert "pool.blocks stays as it is" in caplog.text
        running_now = daemon.gateway.config
        assert running_now.pool.blocks == 1024
        assert running_now.sessions[0].bars(running_now.bars).interval == 60 * SECOND
        assert daemon.count("config_reloads", outcome="partly") == 1
        assert await daemon.gateway.stop()


async def test_clients_add_change_and_remove_sessions() -> None:
    async with running(one_question("V:AAA"), tape=Tape("V:AAA", "V:BBB")) as daemon:

        async def typed(*arguments: str) -> str:
            done = await asyncio.to_thread(invoke, "sessions", *arguments, "--endpoint", daemon.endpoint)
            assert done.exit_code == 0, done.output
            return done.stdout

        assert "bbb" in await typed("add", "bbb", "V:BBB", "--set", "interval=2s")
        for method, name, settings, why in (
            ("add_session", "bbb", {}, "already a session"),
            ("add_session", "ccc", {"tokens": 7}, "no such key"),
            ("add_session", "ccc", {"retention_tokens": 100_000}, "frame_limit"),
            ("add_session", "ccc", {"retention_tokens": 5000, "semantics": "exact"}, "add blocks"),
        ):
            with pytest.raises(QueryError, match=why):
                await daemon.call(method, name, "V:BBB", **settings)
        daemon.feed(8)
        await read(daemon, "bbb", 4)
        reply = await daemon.call("change_session", "bbb", retention_records=2)
        assert [s.name for s in reply.sessions][:2] == ["aaa", "bbb"]
        daemon.feed(5)
        await until(lambda: daemon.state("bbb").live_records == 2)
        with pytest.raises(QueryError, match="no such key"):
            await daemon.call("change_session", "bbb", intervall="1s")
        assert "bbb" not in await typed("remove", "bbb")
        with pytest.raises(QueryError) as error:
            await daemon.call("ask", "bbb", "Up?")
        assert error.value.code == "unknown_session"
        assert "aaa" in await typed("list")
        assert await daemon.gateway.stop()


async def test_what_is_asked_of_a_session_that_is_removed_fails_and_the_daemon_goes_on() -> None:
    async with running(one_question("V:AAA", "V:BBB")) as daemon:
        daemon.feed(3)
        await read(daemon, "bbb", 2)
        asking = [
            asyncio.create_task(daemon.call("ask", "bbb", f"What happens next, {n}?", 60)) for n in range(4)
        ]
        waiting = asyncio.create_task(daemon.call("answers", "bbb", min_version=99, timeout_s=60))
        await asyncio.sleep(0.05)
        daemon.feed()
        await daemon.call("remove_session", "bbb")
        ended = await asyncio.wait_for(asyncio.gather(*asking, waiting, return_exceptions=True), 60)
        assert {each.code for each in ended if isinstance(each, QueryError)} == {"unknown_session"}
        assert isinstance(ended[-1], QueryError)
        daemon.feed()
        await read(daemon, "aaa", 4)
        assert daemon.count("integrity_failures") == 0
        assert await daemon.gateway.stop()


async def test_300_sessions_on_a_small_pool_go_to_disk_and_come_back(tmp_path: Path) -> None:
    """The answers are those of a pool that holds them all."""
    symbols = [f"V:S{n}" for n in range(300)]
    found = {}
    for blocks in (0, 1500):
        spill = Duration(50_000_000 if blocks else 0)
        folder = str(tmp_path / str(blocks))
        pool = PoolConfig(blocks=blocks, host_blocks=0, idle_spill=spill, spill_dir=folder)
        own = sessions(*symbols, retention_tokens=128)
        async with running(one_question(sessions=own, pool=pool)) as daemon:
            for n in range(5):
                daemon.feed(trades=1)
                await until(lambda n=n, to=daemon.sink: len(to.sent) >= 600 * n, 60)
            if blocks:
                await until(lambda of=daemon: of.count("restores", outcome="disk") > 100, 30)
                assert daemon.count("integrity_failures") == 0
            for name in ("s0", "s299"):
                reply = await daemon.call("ask", name, "Up?", choices=("YES", "NO"))
                assert reply.data_version == 4
            found[blocks] = {
                (a.session, a.data_version, a.question): (a.text, round(a.logit_gap, 3))
                for name in ("s0", "s7", "s150", "s299")
                for a in daemon.answers(name)
            }
            assert await daemon.gateway.stop()
    assert found[0] == found[1500]
    assert len(found[0]) == 16
