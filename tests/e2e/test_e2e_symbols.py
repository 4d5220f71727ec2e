"""Aliases and continuous contracts in a daemon: bars over a roll, flags, reload and restart."""

import csv
import uuid
from collections.abc import Iterable
from decimal import Decimal
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from daemon.config.schema import (
    OFF,
    UNTRAINED,
    AliasConfig,
    Config,
    ContinuousConfig,
    ContractConfig,
    ModelConfig,
    PatternConfig,
    PoolConfig,
    QuestionConfig,
    RecoveryConfig,
    SourceConfig,
    SymbolsConfig,
)
from daemon.ledger import ledger
from feeds.connectors.http import HttpSourceConnector
from feeds.durations import Duration
from feeds.kafka_source import KafkaSource
from feeds.timestamps import Instant
from tests.kit import SECOND, START, QueueSource, inproc_config, sessions, trade, until
from tests.kit.daemon import invoke
from tests.kit.fixtures import RealKafka
from tests.kit.http import request
from tests.kit.inproc import RunningDaemon, running
from tests.kit.kafka import create_topics, producing

ROLL = 6
LAST = 12
ES, OLD, NEW = "C:ES", "C:ESZ6", "D:ESH7"
TREND = QuestionConfig(name="trend", text="Is it going up or down?", choices=("UP", "DOWN"))
Roll = Literal["line", "reset"]
Trades = dict[str, list[tuple[int, Decimal, int]]]
"""By contract: moment, price and size."""


def moment(second: int) -> Instant:
    return Instant(START + second * SECOND)


def rolled(roll: Roll = "line", *, until_second: int | None = ROLL) -> SymbolsConfig:
    contracts = (ContractConfig(OLD, moment(0)),)
    if until_second is not None:
        contracts += (ContractConfig(NEW, moment(until_second)),)
    return SymbolsConfig(continuous=(ContinuousConfig(ES, contracts, roll),))


def config_of(symbols: SymbolsConfig, **settings: object) -> Config:
    given: dict[str, object] = {
        "sessions": sessions(ES, retention_tokens=1024, warm_up_records=0),
        "symbols": symbols,
        "standing": "none",
        "questions": (TREND,),
    }
    return msgspec.structs.replace(inproc_config(()), **(given | settings))


def traded(n: int, count: int) -> Trades:
    """Of second ``n``: both contracts are traded before and behind the roll, at very different prices."""
    found: Trades = {}
    for name, level in ((OLD, 100), (NEW, 2000)):
        if name == NEW and n == ROLL:
            continue  # the new contract's first bar is not at the roll
        found[name] = [
            (START + n * SECOND + i * 1000, Decimal(level * 100 + (n * 7 + i * 3) % 11) / 100, i + 1)
            for i in range(count)
        ]
    return found


def payloads(given: Trades) -> list[bytes]:
    items = [(name, *each) for name, own in given.items() for each in own]
    return [
        trade(name, at, f"{price}", f"{size}") for name, at, price, size in sorted(items, key=lambda i: i[1])
    ]


def line(n: int, own: list[tuple[int, Decimal, int]]) -> str:
    clock = (START // SECOND + n) % 86400
    prices = [price for _, price, _ in own]
    numbers = prices[0], max(prices), min(prices), prices[-1]
    time = f"{clock // 3600:02d}{clock // 60 % 60:02d}{clock % 60:02d}"
    return ",".join([time, *(f"{each:.2f}" for each in numbers), f"{sum(size for *_, size in own)}.000"])


def expected(roll: Roll, seconds: Iterable[int], count: int) -> list[str]:
    """The tape of a session that began at the first of these seconds."""
    lines: list[str] = []
    for n in seconds:
        if (own := traded(n, count).get(OLD if n < ROLL else NEW)) is None:
            continue
        if n == ROLL + 1:
            lines = [] if roll == "reset" else [*lines, "roll,ESH7"]
        lines.append(line(n, own))
    return lines


def window(daemon: RunningDaemon, session: str = "es") -> list[str]:
    built = daemon.host.first.sessions.built
    if session not in built.tapes:  # the front knows of a session before the engine has built it
        return []
    text: str = built.prompt.decode(built.tapes[session].window)
    return text.removesuffix("\n").split("\n")


async def feed(daemon: RunningDaemon, seconds: Iterable[int], count: int) -> None:
    """Each second closes the bar of the one before, which is answered."""
    for n in seconds:
        daemon.put(*payloads(traded(n, count)))
        closed = max(n - (n >= ROLL), 0)  # one second has no trade
        await until(lambda bars=closed: len(daemon.answers("es")) == bars)  # type: ignore[misc]  # a default binds it


@pytest.mark.sampled(3)
@pytest.mark.parametrize("roll", ["line", "reset"])
@pytest.mark.parametrize("count", [2, 12], ids=["one by one", "as columns"])
@pytest.mark.parametrize("by_pattern", [False, True])
async def test_bars_over_a_roll_are_those_of_the_active_contract(
    roll: Roll, count: int, by_pattern: bool
) -> None:
    config, session = config_of(rolled(roll)), "es"
    if by_pattern:
        wanted, session = PatternConfig(match="C:E*", retention_tokens=1024, price_decimals=2), "C-ES"
        config = msgspec.structs.replace(
            config, sessions=(), patterns=(wanted,), pool=PoolConfig(blocks=4096)
        )
    async with running(config) as daemon:
        for n in range(LAST):
            daemon.put(*payloads(traded(n, count)))
        bars = LAST - 2  # the last one is open, and one second has no trade
        await until(lambda: session in daemon.gateway.sessions.states)
        await until(lambda: daemon.count("bars", session=session) == bars)
        await until(lambda: window(daemon, session) == expected(roll, range(LAST - 1), count), 20)
        assert set(daemon.gateway.sessions.states) == {session}
        found = ledger(daemon.gateway.store)
        outside = sum(len(traded(n, count).get(NEW if n < ROLL else OLD, ())) for n in range(LAST))
        assert found.read.unopened == {"outside": outside}
        assert (found.unaccounted, found.read.unknown_symbol) == ({}, 0)
        assert daemon.state(session).symbol == ES


@pytest.mark.parametrize("roll", ["line", "reset"])
async def test_the_answer_about_the_first_bar_of_a_contract_says_so_and_no_fault(roll: Roll) -> None:
    async with running(config_of(rolled(roll))) as daemon:
        await feed(daemon, range(LAST), 3)
        flags = [set(each.flags) - {"untrained"} for each in daemon.answers("es")]
        assert flags == [{"rolled"} if n == ROLL else set() for n in range(LAST - 2)]
        assert {each.symbol for each in daemon.answers("es")} == {ES}
        assert daemon.count("price_jumps", session="es") == 0
        assert window(daemon) == expected(roll, range(LAST - 1), 3)
        for kind in ("split_like", "bad_tick", "split"):
            assert daemon.count("feed_faults", source="test", kind=kind) == 0


async def test_compact_lines_begin_anew_around_the_new_contract() -> None:
    """As of a session that has read nothing else."""
    tapes = []
    for first in (0, ROLL + 1):
        config = config_of(rolled("reset"), model=ModelConfig(), standing="paper_six", questions=())
        async with running(config) as daemon:
            for n in range(first, LAST):
                daemon.put(*payloads(traded(n, 3)))
            await until(lambda: daemon.state("es").live_records == LAST - 1 - (ROLL + 1))
            version = daemon.state("es").version
            await until(lambda v=version: [a.data_version for a in daemon.answers("es")][-1:] == [v])  # type: ignore[misc]  # as above
            prefix = list(daemon.host.first.sessions.built.tapes["es"].prefix)
            tapes.append((prefix, window(daemon), daemon.answers("es")[-1].basis))
    assert tapes[0][:2] == tapes[1][:2]
    assert [basis and (basis.anchor, basis.state_bars) for *_, basis in tapes] == [
        (tapes[0][2].anchor, LAST - 1 - (ROLL + 1))
    ] * 2


@pytest.mark.parametrize("roll", ["line", "reset"])
async def test_a_reload_brings_new_contracts_and_names_to_sessions_that_run(roll: Roll) -> None:
    config = config_of(rolled(roll, until_second=None))
    async with running(config) as daemon:
        await feed(daemon, range(3), 2)
        tape = daemon.host.first.sessions.built.tapes["es"]
        assert daemon.count("records_unknown_symbol") == 6
        new = rolled(roll)
        other = AliasConfig(ES, ("X:ES",), from_=moment(LAST - 1))
        await daemon.gateway.reload(
            lambda: msgspec.structs.replace(config, symbols=msgspec.structs.replace(new, alias=(other,)))
        )
        assert daemon.host.first.sessions.built.tapes["es"] is tape
        for n in range(3, LAST - 1):
            daemon.put(*payloads(traded(n, 2)))
        own = traded(LAST - 1, 2)[NEW]
        daemon.put(*payloads({"X:ES": own, OLD: own}), *payloads({"X:ES": traded(0, 1)[OLD]}))
        daemon.put(*payloads({NEW: traded(LAST, 1)[NEW]}))
        wanted = expected(roll, range(LAST), 2)
        await until(lambda: window(daemon) == wanted, 20)
        assert daemon.count("config_reloads", outcome="done") == 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize("roll", ["line", "reset"])
@pytest.mark.parametrize("stop", [ROLL - 1, ROLL + 1, ROLL + 3])
async def test_a_restart_from_a_snapshot_goes_on_over_the_roll(tmp_path: Path, roll: Roll, stop: int) -> None:
    config = config_of(rolled(roll), recovery=RecoveryConfig(Duration(3600 * SECOND), str(tmp_path)))
    async with running(config, QueueSource("dropping")) as daemon:
        for n in range(stop):
            daemon.put(*payloads(traded(n, 2)))
        closed = range(stop - 1 - (stop == ROLL + 1))  # one second has no trade
        await until(lambda: window(daemon) == expected(roll, closed, 2), 20)
        await daemon.gateway.stop()
    async with running(config, QueueSource("dropping")) as daemon:
        assert daemon.count("snapshots_restored", session="es") == 1
        for n in range(stop, LAST):
            daemon.put(*payloads(traded(n, 2)))
        await until(lambda: window(daemon) == expected(roll, range(LAST - 1), 2), 20)
        await daemon.gateway.stop()


@pytest.mark.sampled(2)
@pytest.mark.kafka
@pytest.mark.parametrize("roll", ["line", "reset"])
@pytest.mark.parametrize("stop", [ROLL + 2, ROLL + 3, ROLL + 5])
async def test_a_window_that_is_read_again_from_the_log_is_as_it_was(
    real_kafka: RealKafka, roll: Roll, stop: int
) -> None:
    """Without a snapshot; the first bar of the new contract is open, or the newest or oldest one it has."""
    topic, group = f"md.{uuid.uuid4().hex[:8]}", uuid.uuid4().hex
    await create_topics(real_kafka.bootstrap, {topic: 1})
    kept = sessions(ES, retention_tokens=1024, retention_records=3)
    config = config_of(rolled(roll), sessions=kept, recovery=RecoveryConfig(OFF))
    async with producing(real_kafka.bootstrap) as producer:
        for seconds in (range(stop), range(stop, LAST)):
            wanted = newest_of(roll, range(seconds.stop - 1), 3)
            source = KafkaSource("kafka", real_kafka.bootstrap, [topic], group)
            async with running(config, source) as daemon:
                if seconds.start:
                    before = newest_of(roll, range(stop - 1), 3)
                    await until(lambda b=before: window(daemon) == b)  # type: ignore[misc]  # as above
                for n in seconds:
                    for each in payloads(traded(n, 2)):
                        await producer.send_and_wait(topic, each, key=b"es")
                await until(lambda w=wanted: window(daemon) == w)  # type: ignore[misc]  # as above
                version = daemon.state("es").version
                await until(lambda v=version: [a.data_version for a in daemon.answers("es")][-1:] == [v])  # type: ignore[misc]  # as above
                assert await daemon.gateway.stop()


def newest_of(roll: Roll, seconds: range, count: int) -> list[str]:
    """The lines of the newest records of a tape: one each, or two at a roll."""
    found: list[list[str]] = []
    for each in expected(roll, seconds, 2):
        if found and found[-1][-1].startswith("roll"):
            found[-1].append(each)
        else:
            found.append([each])
    return [line for own in found[-count:] for line in own]


async def test_pushed_records_of_a_contract_are_taken_and_late_as_those_of_its_symbol() -> None:
    """Prices below zero, because the session of the symbol takes them."""
    config = config_of(
        rolled(),
        sessions=sessions(ES, retention_tokens=1024, signed=True),
        source=SourceConfig(kind="http", http=HttpSourceConnector()),  # type: ignore[call-arg]  # by connectors
    )

    async def push(daemon: RunningDaemon, *records: bytes) -> dict[str, int]:
        kind, path = {"content-type": "application/x-ndjson"}, "/v1/data?replay=true"
        found: dict[str, int] = (await request(daemon.port, "POST", path, b"\n".join(records), kind)).json
        return found

    async with running(config, []) as daemon:
        said = await push(daemon, *(trade(OLD, START + n * SECOND, "-1.25") for n in range(4)))
        assert (said["accepted"], said["refused"], said["late"]) == (4, 0, 0)
        await until(lambda: len(daemon.answers("es")) > 0 and daemon.state("es").live_records == 3)
        said = await push(daemon, trade(OLD, START, "-1.25"), trade(NEW, START, "-1.25"))
        assert (said["accepted"], said["refused"], said["late"]) == (2, 0, 1)
        await until(lambda: daemon.count("records_unopened", reason="outside") == 1)


async def test_sessions_that_patterns_opened_for_what_is_now_another_name_are_closed() -> None:
    wanted = PatternConfig(match="[CD]:E*", retention_tokens=512, price_decimals=2)
    config = config_of(SymbolsConfig(), sessions=(), patterns=(wanted,), pool=PoolConfig(blocks=4096))
    async with running(config) as daemon:
        daemon.put(*payloads(traded(0, 2)))
        await until(lambda: set(daemon.gateway.sessions.states) == {"C-ESZ6", "D-ESH7"})
        await daemon.gateway.reload(lambda: msgspec.structs.replace(config, symbols=rolled()))
        assert daemon.gateway.sessions.states == {}
        for n in range(1, 4):
            daemon.put(*payloads(traded(n, 2)))
        await until(lambda: set(daemon.gateway.sessions.states) == {"C-ES"})
        await until(lambda: window(daemon, "C-ES") == expected("line", range(1, 3), 2))


FORM = """
description = "made up"
container = "csv"
[[records]]
kind = "trade"
venue = "C"
time = { field = "t", format = "epoch-ns" }
fields = { symbol = "s", price = "p", size = "q" }
"""


def test_a_file_is_replayed_by_the_symbols_of_its_names(tmp_path: Path) -> None:
    """Without sessions in a configuration, each symbol gets one."""
    rows = ["t,s,p,q"]
    for n in range(LAST):
        given = (
            (at, name.partition(":")[2], *rest) for name, own in traded(n, 2).items() for at, *rest in own
        )
        rows += [",".join(map(str, each)) for each in sorted(given)]
    (tmp_path / "ticks.csv").write_text("\n".join(rows) + "\n")
    (tmp_path / "form.toml").write_text(FORM)
    contracts = (
        f'{{ symbol = "{OLD}", from = "{moment(0)}" }}, {{ symbol = "C:ESH7", from = "{moment(ROLL)}" }}'
    )
    (tmp_path / "symbols.toml").write_text(
        f'[[continuous]]\nsymbol = "{ES}"\nroll = "reset"\ncontracts = [{contracts}]\n'
    )
    command = [
        *("replay", str(tmp_path / "ticks.csv"), "--format", str(tmp_path / "form.toml"), "--to", "inproc"),
        *("--speed", "0", "--set", f"model.path={UNTRAINED}", "--bars", str(tmp_path / "bars.csv")),
        *("--set", f"symbols.file={tmp_path / 'symbols.toml'}"),
    ]
    done = invoke(*command)
    assert done.exit_code == 0, done.output
    assert "of symbols without a session (outside " in done.output
    with (tmp_path / "bars.csv").open() as file:
        made = [
            (row["symbol"], Decimal(row["open"]), "rolled" in row["flags"]) for row in csv.DictReader(file)
        ]
    wanted = [(n, own) for n in range(LAST) if (own := traded(n, 2).get(OLD if n < ROLL else NEW))]
    assert made == [(ES, own[0][1], n == ROLL + 1) for n, own in wanted]
    odd = invoke(*command, "--set", "bars.interval=7s")
    assert odd.exit_code == 2
    assert "is inside a bar of" in odd.output
