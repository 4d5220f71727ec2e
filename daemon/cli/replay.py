"""`foretick replay`: play a recorded file to Kafka, to ZeroMQ, or through a daemon in this process."""

import asyncio
import logging
import re
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence
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
import zmq
from rich.console import Console
from rich.progress import Progress

from daemon.cli.bars_file import BarsFile
from daemon.cli.options import (
    Parsed,
    bootstrap_option,
    read_config,
    reason_of,
    refuse,
    set_option,
    stopping_on_signals,
    tell_if_cold,
)
from daemon.cli.replay_summary import answered_line, summary_lines, too_late
from daemon.config.checks import tables_of
from daemon.config.schema import (
    OFF,
    PATTERNS,
    BarsConfig,
    Config,
    LogConfig,
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
from feeds.connector import SOCKET, SinkRoute
from feeds.decimals import decimals_of
from feeds.durations import Duration
from feeds.file_format import FileFormat, FormatError, load_format
from feeds.kafka_sink import KafkaSink
from feeds.market_data import Answer, AnyRecord, Bar, Recorded, Signal
from feeds.merged_files import files_of
from feeds.recorded_file import read_records
from feeds.replay_source import ReplaySource
from feeds.source import Incoming, PublishRefused, Sink
from feeds.timestamps import parse_instant
from feeds.zmq_feed import ZmqSink
from ingest.bar_kernel import Bars
from ingest.lines import decimal

log = logging.getLogger(__name__)

MAX_SYMBOLS = 8
SIGNALS = "signals"
"""The topic of what is printed as signals."""
MAX_LATE = 1.0
"""Percent of a session's records."""
_LOOKED_AT = 20_000
"""Records of a file in which its symbols and their decimals are looked for."""
JOIN_S = 0.5
"""Time for subscribers to join a PUB socket before the first message."""


PROGRESS_EVERY_S = 0.25
_CLOSES = 1 << 14
"""Bars of a session of which the close is kept until their answers come."""


class ReplayError(Exception):
    """The replay cannot run with these options."""


def _endpoint(text: str) -> str:
    """Raises ValueError."""
    if re.match(SOCKET, text) is None:
        raise ValueError(f"{text!r} is no endpoint: write {PATTERNS[SOCKET]}")
    return text


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
@bootstrap_option("brokers, host:port (kafka)")
@click.option("--topic", default="md.trades.v1", show_default=True, help="topic to send to (kafka, zmq)")
@click.option("--endpoint", type=Parsed("endpoint", _endpoint), help="endpoint to bind (zmq)")
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
    "--serve",
    is_flag=True,
    help="serve HTTP and the query socket where the configuration says; without it no port is bound (inproc)",
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
    serve: bool = False,
    max_late: float = MAX_LATE,
    bars_path: Path | None = None,
    make: Callable[..., Gateway] = make_gateway,
) -> int:
    """Play ``file`` to the target; returns the exit status. Raises ReplayError. ``make``: for "inproc"."""
    form, begin, end, day = _read_options(file, format_name, from_, until, date)
    source = ReplaySource("replay", file, form, speed, from_ns=begin, until_ns=end, day=day)
    if target == "inproc":
        config = config or Config()
        if not config.sessions:
            config = _config_for(file, form, config, symbols, day)
        config = _alone(config, every_bar=every_bar)
        # the progress bar replaces sys.stdout while it is shown
        printer = AnswerPrinter(lambda text: sys.stdout.write(text), as_json)
        watching = [printer.watch]
        with ExitStack() as opened:
            if bars_path is not None:
                watching.append(opened.enter_context(_bars_file(bars_path)).write)
            make = partial(make, serves=serve)
            return uvloop.run(_through_daemon(source, config, printer, watching, max_late, make))
    set_up_logging(LogConfig(level="warning"), "replay")
    if target == "kafka":
        if not bootstrap:
            raise ReplayError("--to kafka needs --bootstrap host:port")
        return uvloop.run(_publish(source, KafkaSink("replay", bootstrap), bootstrap, topic, 0.0))
    if not endpoint:
        raise ReplayError("--to zmq needs --endpoint tcp://host:port")
    return uvloop.run(_publish(source, ZmqSink("replay", endpoint), endpoint, topic, JOIN_S))


def _read_options(
    file: Path, format_name: str, from_: str | None, until: str | None, date: str | None
) -> tuple[FileFormat, int | None, int | None, Date | None]:
    """The format, the event times at which to begin and to end, ns, and the day. Raises ReplayError."""
    try:
        form = load_format(format_name)
        begin, end = (None if text is None else int(parse_instant(text)) for text in (from_, until))
    except (FormatError, ValueError) as error:
        raise ReplayError(str(error)) from error
    try:
        day = None if date is None else Date.fromisoformat(date)
    except ValueError:
        raise ReplayError(f"--date {date} is no day such as 2024-08-08") from None
    try:
        for each in files_of(file, form.members):
            each.open("rb").close()
    except OSError as error:
        why = f"cannot read {file}: {error.strerror}" if error.strerror else str(error)
        raise ReplayError(why) from error
    if begin is not None and end is not None and begin >= end:
        raise ReplayError(f"--from {from_} is not before --until {until}: nothing would be played")
    return form, begin, end, day


def _alone(config: Config, *, every_bar: bool) -> Config:
    """In this process, and apart from a daemon of this configuration: its snapshots are left alone."""
    # the numbers of a file's records are those of its lines
    source = msgspec.structs.replace(config.source, sequence="none")
    flash = msgspec.structs.replace(config.flash, every_bar=config.flash.every_bar or every_bar)
    recovery = msgspec.structs.replace(config.recovery, interval=OFF)
    process = msgspec.structs.replace(config.process, mode="inproc")
    return msgspec.structs.replace(config, source=source, flash=flash, recovery=recovery, process=process)


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


async def _publish(source: ReplaySource, sink: Sink, where: str, topic: str, join_s: float) -> int:
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
        try:
            await until(stop, sink.start())
        except (OSError, zmq.ZMQError) as error:
            raise ReplayError(f"cannot send to {where}: {error.strerror or error}") from error
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


def _bars_file(path: Path) -> BarsFile:
    """The file of ``--bars``. Raises ReplayError."""
    try:
        return BarsFile(path)
    except OSError as error:
        raise ReplayError(f"--bars: cannot write {path}: {error.strerror}") from error


async def _through_daemon(
    source: ReplaySource,
    config: Config,
    printer: "AnswerPrinter",
    watching: Sequence[Callable[[SessionConfig, Bars], None]],
    max_late: float,
    make: Callable[..., Gateway],
) -> int:
    set_up_logging(config.log, "replay")
    tell_if_cold()
    stop = asyncio.Event()

    def sessions() -> dict[str, SessionConfig]:
        """Also those that patterns have opened."""
        return {session.name: session for session in gateway.live.config.sessions}

    def watch(session: str, bars: Bars) -> None:
        settings = sessions()[session]
        for each in watching:
            each(settings, bars)

    with stopping_on_signals(stop):
        route = SinkRoute(printer, "answers", signals=SIGNALS)
        gateway = make(config, source=source, routes=[route], watch=watch)
        try:
            await gateway.start()
            async with showing_progress(source, shown=not printer.as_json):
                await until(stop, gateway.finish())
        except Exception as error:
            raise ReplayError(reason_of(error)) from error
        finally:
            clean = await gateway.stop()
            found = ledger(gateway.store)
    if found.read.unknown_symbol:
        read = ", ".join(session.symbol for session in config.sessions)
        click.echo(f"{found.read.unknown_symbol} records of other symbols than {read} were skipped", err=True)
    out = sys.stderr if printer.as_json else sys.stdout
    print("\n".join(summary_lines(found)), file=out)
    print(answered_line(gateway.store, found), file=out)
    print(f"{printer.count} answers, {source.malformed_lines} malformed lines", file=out)
    _tell_unused(source)
    late = {name: session.bars(config.bars).late for name, session in sessions().items()}
    complaints = too_late(found, max_late, late)
    if not (found.read.received or stop.is_set()):
        complaints.append("nothing was played: no record of the file is between --from and --until")
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
    """A sink that prints one line per answer and signal, as text or as it is published.

    A line has the opening and the close of the newest bar, as far as `watch` has seen it: of each session the
    newest ones are kept.
    """

    name = "print"

    def __init__(self, write: Callable[[str], object], as_json: bool = False) -> None:
        self._write, self.as_json = write, as_json
        self._closes: defaultdict[str, OrderedDict[int, str]] = defaultdict(OrderedDict)
        self.count = 0

    def watch(self, session: SessionConfig, bars: Bars) -> None:
        """Note the closes of BAR [n] of a session. The data plane's thread, before they are answered."""
        closes = self._closes[session.name]
        for bar in bars[bars["leg"] == 0]:
            price = decimal(int(bar["c"]), session.price_decimals, session.scale)
            closes[int(bar["ts_open"])] = price
            if len(closes) > _CLOSES:
                closes.popitem(last=False)

    async def start(self) -> None:
        """Nothing to connect."""

    async def publish(self, topic: str, key: bytes | None, payload: bytes, headers: object) -> None:
        """Print the answer, or the signal."""
        self.count += topic != SIGNALS
        if self.as_json:
            self._write(f"{payload.decode()}\n")
            return
        if topic == SIGNALS:
            self._signal(_signals.decode(payload))
            return
        answer = _answers.decode(payload)
        flags = f" [{' '.join(answer.flags)}]" if answer.flags else ""
        sure = "" if answer.probability is None else f"probability {answer.probability:.3f}, "
        self._write(
            f"{answer.symbol} {self._bar(answer)}v{answer.data_version} {answer.question}: {answer.text} "
            f"({sure}gap {answer.logit_gap:.3f}){flags}\n"
        )

    def _signal(self, signal: Signal) -> None:
        because = ", ".join(f"{each.session} {each.question}: {each.text}" for each in signal.answers)
        opened = signal.as_of if signal.bar < 0 else signal.bar
        at = self._at(signal.session, opened, signal.as_of)
        self._write(f"{signal.symbol} {at}v{signal.data_version} SIGNAL {signal.name} ({because})\n")

    def _bar(self, answer: Answer) -> str:
        """Its newest bar; of a line that is none, and of bars that were not watched, just its time."""
        openings = answer.answer_id.rpartition(":")[2].split(",")
        opened = max((int(each) for each in openings if each.isdecimal()), default=answer.as_of)
        return self._at(answer.session, opened, answer.as_of)

    def _at(self, session: str, opened: int, as_of: int) -> str:
        closes = self._closes.get(session)
        price = None if closes is None else closes.get(opened)
        at = np.datetime64(opened if price is not None else as_of, "ns")
        text = str(at)
        for end in (".000000000", "000000", "000"):
            text = text.removesuffix(end) if "." in text else text
        return f"{text}Z {'' if price is None else f'{price} '}"

    async def stop(self) -> None:
        """Nothing to close."""


_answers, _signals = msgspec.json.Decoder(Answer), msgspec.json.Decoder(Signal)
