"""`foretick replay`: play a recorded file to Kafka, to ZeroMQ, or through a daemon in this process."""

import asyncio
import logging
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, asynccontextmanager
from datetime import date as Date
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np
import uvloop
from rich.console import Console
from rich.progress import Progress

from daemon.cli.bars_file import BarsFile
from daemon.cli.options import read_config, refuse, set_option, stopping_on_signals
from daemon.cli.replay_summary import answered_line, summary_lines, too_late
from daemon.config.checks import tables_of
from daemon.config.schema import (
    OFF,
    BarsConfig,
    Config,
    HttpConfig,
    LogConfig,
    QueryConfig,
    RecoveryConfig,
    SessionConfig,
)
from daemon.config.symbol_checks import symbol_problems
from daemon.config.symbols import Names
from daemon.gateway.gateway import Gateway
from daemon.gateway.wiring import make_gateway
from daemon.ledger import ledger
from daemon.logs import set_up_logging
from daemon.ring_numbers import price_scale_for, prices_of
from feeds.backoff import until
from feeds.connector import SinkRoute
from feeds.decimals import decimals_of
from feeds.durations import Duration
from feeds.file_format import FileFormat, FormatError, load_format
from feeds.kafka_sink import KafkaSink
from feeds.market_data import Answer, AnyRecord, Bar, Recorded
from feeds.merged_files import files_of
from feeds.recorded_file import read_records
from feeds.replay_source import ReplaySource
from feeds.source import Incoming, PublishRefused, Sink
from feeds.timestamps import parse_instant
from feeds.zmq_feed import ZmqSink

log = logging.getLogger(__name__)

MAX_SYMBOLS = 8
MAX_LATE = 1.0
"""Percent of a session's records."""
_LOOKED_AT = 20_000
"""Records of a file in which its symbols and their decimals are looked for."""
JOIN_S = 0.5
"""Time for subscribers to join a PUB socket before the first message."""


PROGRESS_EVERY_S = 0.25


class ReplayError(Exception):
    """The replay cannot run with these options."""


@click.command("replay")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--format", "format_name", required=True, help="name of a built-in format, or a TOML file")
@click.option("--to", "target", type=click.Choice(["kafka", "zmq", "inproc"]), required=True)
@click.option(
    "--speed",
    type=click.FloatRange(min=0),
    default=1.0,
    show_default=True,
    help="seconds of event time per second; 0 does not wait",
)
@click.option("--from", "from_", metavar="TIME", help="first event time to play, with a zone")
@click.option("--until", metavar="TIME", help="event time at which to stop, with a zone")
@click.option(
    "--date",
    metavar="YYYY-MM-DD",
    help="day of a file whose times count from midnight, instead of the one in its name",
)
@click.option("--bootstrap", help="brokers, host:port (kafka)")
@click.option("--topic", default="md.trades.v1", show_default=True, help="topic to send to (kafka, zmq)")
@click.option("--endpoint", help="endpoint to bind (zmq)")
@click.option(
    "--config", "config_path", type=click.Path(path_type=Path), help="configuration of the daemon (inproc)"
)
@click.option(
    "--symbols",
    type=click.IntRange(1),
    default=MAX_SYMBOLS,
    show_default=True,
    help="how many of the file's symbols get a session, unless a configuration has sessions (inproc)",
)
@click.option(
    "--json", "as_json", is_flag=True, help="print answers as they are published, one a line (inproc)"
)
@click.option(
    "--every-bar",
    is_flag=True,
    help="answer every bar by itself, as for a backtest: the file waits for the answers (inproc)",
)
@click.option(
    "--max-late",
    type=click.FloatRange(0, 100),
    default=MAX_LATE,
    show_default=True,
    help="percent of a session's records that may miss their bar because they came late, with exit status 0 "
    "(inproc)",
)
@click.option(
    "--bars",
    "bars_path",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="write the bars that are made to this CSV file (inproc)",
)
@set_option
def command(file: Path, format_name: str, target: str, **options: Any) -> None:
    """Play a recorded file as if it were live."""
    settings = options.pop("settings")
    config_path = options.pop("config_path")
    config = read_config(config_path, settings) if target == "inproc" else None
    try:
        sys.exit(replay(file, format_name, target, config=config, **options))
    except ReplayError as error:
        refuse(error)


def replay(
    file: Path,
    format_name: str,
    target: str,
    *,
    speed: float,
    from_: str | None = None,
    until: str | None = None,
    date: str | None = None,
    bootstrap: str | None = None,
    topic: str = "",
    endpoint: str | None = None,
    config: Config | None = None,
    symbols: int = MAX_SYMBOLS,
    as_json: bool = False,
    every_bar: bool = False,
    max_late: float = MAX_LATE,
    bars_path: Path | None = None,
    make: Callable[..., Gateway] = make_gateway,
) -> int:
    """Play ``file`` to the target; returns the exit status. Raises ReplayError. ``make``: for "inproc"."""
    try:
        form = load_format(format_name)
        times = [None if text is None else int(parse_instant(text)) for text in (from_, until)]
        day = None if date is None else Date.fromisoformat(date)
    except (FormatError, ValueError) as error:
        raise ReplayError(str(error)) from error
    try:
        files_of(file, form.members)[0].stat()
    except OSError as error:
        raise ReplayError(str(error)) from error
    source = ReplaySource("replay", file, form, speed, from_ns=times[0], until_ns=times[1], day=day)
    if target == "inproc":
        config = config or Config()
        if not config.sessions:
            config = _config_for(file, form, config, symbols, day)
        # the numbers of a file's records are those of its lines
        unnumbered = msgspec.structs.replace(config.source, sequence="none")
        config = msgspec.structs.replace(config, source=unnumbered)
        if every_bar:
            every = msgspec.structs.replace(config.flash, every_bar=True)
            config = msgspec.structs.replace(config, flash=every)
        with ExitStack() as opened:
            if bars_path is not None:
                made = opened.enter_context(_bars_file(bars_path, config))
                make = partial(make, watch=made.write)
            return uvloop.run(_through_daemon(source, config, as_json, max_late, make))
    set_up_logging(LogConfig(level="warning"), "replay")
    if target == "kafka":
        if not bootstrap:
            raise ReplayError("--to kafka needs --bootstrap host:port")
        return uvloop.run(_publish(source, KafkaSink("replay", bootstrap), topic, 0.0))
    if not endpoint:
        raise ReplayError("--to zmq needs --endpoint tcp://host:port")
    return uvloop.run(_publish(source, ZmqSink("replay", endpoint), topic, JOIN_S))


def _config_for(file: Path, form: FileFormat, config: Config, most: int, day: Date | None) -> Config:
    """A session for each of the first ``most`` symbols; bars of the file's own interval if it holds bars."""
    prices: dict[str, tuple[int, int]] = {}  # of each symbol: most decimals, and the highest magnitude
    signed = set[str]()
    bars = None
    wrong: list[str] = []
    records = read_records(
        file, form, day=day, on_malformed=lambda line, error: wrong.append(f"line {line}: {error}")
    )
    names = Names(config.symbols)
    for named in _readable(islice(records, _LOOKED_AT)):
        record = names.renamed(named)
        if not isinstance(record, AnyRecord):  # events open no session
            continue
        if bars is None:
            own = BarsConfig(interval=Duration(record.interval_ns)) if isinstance(record, Bar) else None
            bars = own or config.bars
        if record.key in prices or len(prices) < most:
            decimals, highest = prices.get(record.key, (0, 0))
            seen = prices_of(record)
            prices[record.key] = max(decimals, *map(decimals_of, seen)), max(highest, *map(abs, seen))
            if form.signed_prices:
                signed.add(record.key)
    if bars is None:
        why = f"; {wrong[0]}" if wrong else ""
        raise ReplayError(f"{file} holds no record of this format{why}")
    sessions = tuple(
        SessionConfig(
            name=_name(key, prices),
            symbol=key,
            price_decimals=decimals,
            price_scale=price_scale_for(decimals, highest),
            signed=key in signed,
        )
        for key, (decimals, highest) in prices.items()
    )
    made = msgspec.structs.replace(
        config,
        sessions=sessions,
        bars=bars,
        query=QueryConfig(endpoint=""),
        http=HttpConfig(port=0),
        recovery=RecoveryConfig(interval=OFF),
        process=msgspec.structs.replace(config.process, mode="inproc"),
        log=LogConfig(level="warning"),
    )
    for key, why in symbol_problems(made, tables_of(made)):
        raise ReplayError(f"{key}: {why}")
    return made


def _readable(records: Iterable[Recorded]) -> Iterator[Recorded]:
    try:
        yield from records
    except FormatError as error:
        raise ReplayError(str(error)) from error


def _name(key: str, among: Collection[str]) -> str:
    """A session's name: the symbol, after its venue's where another venue has the same."""
    venue, _, symbol = key.partition(":")
    alone = sum(other.partition(":")[2].lower() == symbol.lower() for other in among) == 1
    return symbol.lower() if alone else f"{venue}-{symbol}".lower()


async def _publish(source: ReplaySource, sink: Sink, topic: str, join_s: float) -> int:
    stop = asyncio.Event()
    outcome: Counter[str] = Counter()

    async def one(message: Incoming) -> None:
        try:
            await sink.publish(topic, message.key, message.payload, message.headers)
            outcome["sent"] += 1
        except PublishRefused as error:
            outcome["refused"] += 1
            log.error("refused: %s", error)

    with stopping_on_signals(stop):
        await until(stop, sink.start())
        await asyncio.sleep(join_s)
        await source.start()

        async def play() -> None:
            async for batch in source.batches():
                await asyncio.gather(*(one(message) for message in batch if message.fault is None))

        try:
            async with showing_progress(source):
                await until(stop, play())
        except FormatError as error:
            raise ReplayError(str(error)) from error
        await source.stop()
        await sink.stop()
    malformed = source.malformed_lines
    print(f"{outcome['sent']} records sent, {outcome['refused']} refused, {malformed} malformed lines")
    _tell_unused(source)
    return 1 if outcome["refused"] else 0


def _bars_file(path: Path, config: Config) -> BarsFile:
    """The file of ``--bars``. Raises ReplayError."""
    if config.process.mode != "inproc":
        raise ReplayError('--bars needs process.mode = "inproc"')
    symbols = {session.name: session.symbols for session in config.sessions}
    try:
        return BarsFile(path, symbols, {session.name: session.scale for session in config.sessions})
    except OSError as error:
        raise ReplayError(f"--bars: {error}") from error


async def _through_daemon(
    source: ReplaySource, config: Config, as_json: bool, max_late: float, make: Callable[..., Gateway]
) -> int:
    set_up_logging(config.log, "replay")
    stop = asyncio.Event()
    # the progress bar replaces sys.stdout while it is shown
    printer = AnswerPrinter(lambda text: sys.stdout.write(text), as_json)
    with stopping_on_signals(stop):
        gateway = make(config, source=source, routes=[SinkRoute(printer, "answers")])
        try:
            await gateway.start()
            async with showing_progress(source, shown=not as_json):
                await until(stop, gateway.finish())
        except Exception as error:
            raise ReplayError(f"{type(error).__name__}: {error}") from error
        finally:
            clean = await gateway.stop()
            found = ledger(gateway.store)
    if found.read.unknown_symbol:
        read = ", ".join(session.symbol for session in config.sessions)
        click.echo(f"{found.read.unknown_symbol} records of other symbols than {read} were skipped", err=True)
    out = sys.stderr if as_json else sys.stdout
    print("\n".join(summary_lines(found)), file=out)
    print(answered_line(gateway.store), file=out)
    print(f"{printer.count} answers, {source.malformed_lines} malformed lines", file=out)
    _tell_unused(source)
    late = {session.name: session.bars(config.bars).late for session in config.sessions}
    complaints = too_late(found, max_late, late)
    for complaint in complaints:
        click.echo(complaint, err=True)
    return 1 if complaints or not clean else 0


def _tell_unused(source: ReplaySource) -> None:
    """Say what else the file holds, and the first thing that is wrong with it."""
    for notice in source.notices:
        click.echo(notice, err=True)
    if source.passed_over:
        names = ", ".join(f"{n} {name.replace('_', ' ')}" for name, n in source.passed_over.most_common())
        click.echo(f"lines without a record: {names}", err=True)
    if source.first_malformed:
        click.echo(f"first malformed line: {source.first_malformed}", err=True)


@asynccontextmanager
async def showing_progress(source: ReplaySource, shown: bool = True) -> AsyncIterator[None]:
    """A progress bar of the file on standard error, if that is a terminal."""
    if not (shown and sys.stderr.isatty()):
        yield
        return
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("replay", total=1.0)

        async def follow() -> None:
            while True:
                bar.update(task, completed=source.progress)
                await asyncio.sleep(PROGRESS_EVERY_S)

        following = asyncio.ensure_future(follow())
        try:
            yield
        finally:
            following.cancel()


class AnswerPrinter:
    """A sink that prints one line per answer, as text or as it is published."""

    name = "print"

    def __init__(self, write: Callable[[str], object], as_json: bool = False) -> None:
        self._write, self._as_json = write, as_json
        self.count = 0

    async def start(self) -> None:
        """Nothing to connect."""

    async def publish(self, topic: str, key: bytes | None, payload: bytes, headers: object) -> None:
        """Print the answer."""
        answer = _answers.decode(payload)
        self.count += 1
        if self._as_json:
            self._write(f"{payload.decode()}\n")
            return
        flags = f" [{' '.join(answer.flags)}]" if answer.flags else ""
        sure = "" if answer.probability is None else f"probability {answer.probability:.3f}, "
        version = f"{np.datetime64(answer.as_of // 1000, 'us')}Z v{answer.data_version}"
        self._write(
            f"{answer.symbol} {version} {answer.question}: {answer.text} "
            f"({sure}gap {answer.logit_gap:.3f}){flags}\n"
        )

    async def stop(self) -> None:
        """Nothing to close."""


_answers = msgspec.json.Decoder(Answer)
