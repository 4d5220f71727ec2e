"""`foretick init`: a format and a configuration for a file, a topic or a stream, made from a sample of it."""

import asyncio
import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import urlopen

import click
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from daemon.cli.options import bootstrap_option, refuse
from daemon.config.errors import ConfigError
from daemon.config.load import load_config
from feeds.codec import MAX_BYTES
from feeds.connector import SettingError
from feeds.connectors.websocket import WebSocketConnector
from feeds.connectors.zeromq import ZmqSourceConnector
from feeds.durations import Duration
from feeds.file_format import FormatError, load_format
from feeds.kafka_client import BrokerError
from feeds.payloads.format_decoder import FormatDecoder
from feeds.payloads.payload_decoder import PayloadDecoder, WireDecoder
from feeds.proposals.form import Given, Proposal, propose
from feeds.proposals.live_sample import newest_of, next_of
from feeds.proposals.observed import Observed, observe
from feeds.proposals.sample import ROWS, of_file, of_messages
from feeds.recorded_file import read_records
from feeds.source import Incoming
from feeds.timestamps import Instant
from support.durable_file import replacing

_MOST_READ = 50_000
_BARS = 5
_ANSWERS_S = 30.0
_OURS = 0.9
"""Part of the messages that are our own records where no format is needed."""


@dataclass(frozen=True)
class Read:
    """What was read, and by what: ``proposal`` None for our own records. ``source``: its table's lines."""

    observed: Observed
    proposal: Proposal | None
    source: str


@click.command("init")
@click.argument("source")
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), default=Path(), help="where to write"
)
@bootstrap_option("SOURCE is a topic of these brokers, host:port")
@click.option("--subscribe", multiple=True, help="message to send to a WebSocket; may be repeated")
@click.option("--seconds", type=float, default=10.0, help="how long to listen to a stream")
@click.option("--venue", default="", help="venue of all records, if no column tells it")
@click.option("--symbol", default="", help="symbol of all records, if no column tells it")
@click.option("--time-format", default="", help="how times are written, such as epoch-ms or %d/%m/%Y %H:%M")
@click.option("--zone", default="", help="zone of times that say none, such as Europe/Berlin")
@click.option("--sessions", "most", type=click.IntRange(min=1), default=8, help="sessions, at most")
@click.option("--force", is_flag=True, help="overwrite files that are there")
def command(source: str, out: Path, force: bool, most: int, **options: Any) -> None:
    """Read a sample of SOURCE and write a format and a configuration for it.

    SOURCE is a file, http:// or https:// of one, which is downloaded into --out, a topic (with --bootstrap),
    tcp:// or ipc:// of ZeroMQ, or ws:// or wss:// of a venue.
    """
    name = _name_of(source)
    form, config = out / f"{name}.toml", out / "foretick.toml"
    if not force and (there := [str(path) for path in (form, config) if path.exists()]):
        _stop(f"{' and '.join(there)} exist: --force overwrites them")
    given = Given(*(options[key] for key in ("venue", "symbol", "time_format", "zone")))
    try:
        found = _read(source, form, given, options)
    except (FormatError, BrokerError, SettingError, OSError) as error:
        _stop(f"{source}: {error}")
    if not found.observed.records:
        _say_refused(found.observed, Console(stderr=True))
        _stop(f"{source}: no record can be read; {form} is the format that was tried")
    symbols = found.observed.symbols[:most]
    config.write_text(_config(found, form, symbols, found.observed.interval()))
    _show(found, symbols)
    try:
        load_config(config, environment={})
    except ConfigError as error:
        _stop(f"{config} cannot be used: {error}")
    written = [str(config)] if found.proposal is None else [str(form), str(config)]
    click.echo(f"written: {', '.join(written)}. Next: foretick check --config {config}, then foretick run")


def _stop(why: str) -> NoReturn:
    refuse(FormatError(why))


def _name_of(source: str) -> str:
    """A name for the format's file."""
    last = re.split(r"[/\\]", source.partition("?")[0].rstrip("/"))[-1]
    return re.sub(r"[^a-z0-9_-]+", "_", last.partition(".")[0].lower()).strip("_") or "feed"


def _read(source: str, form: Path, given: Given, options: dict[str, Any]) -> Read:
    form.parent.mkdir(parents=True, exist_ok=True)
    named = json.dumps(source)
    if bootstrap := options["bootstrap"]:
        messages = asyncio.run(newest_of(bootstrap, source, ROWS, {}))
        table = f"[source.kafka]\nbootstrap = {json.dumps(bootstrap)}\ntopics = [{named}]"
        return _of_messages(messages, form, given, source, table)
    if source.startswith(("tcp://", "ipc://")):
        feed = ZmqSourceConnector(endpoint=source).open("init", 1.0)
        messages = asyncio.run(next_of(feed, ROWS, options["seconds"]))
        return _of_messages(messages, form, given, source, f"[source.zeromq]\nendpoint = {named}")
    if source.startswith(("ws://", "wss://")):
        connector = WebSocketConnector(url=source, subscribe=options["subscribe"])
        messages = asyncio.run(next_of(connector.open("init", 1.0), ROWS, options["seconds"]))
        sent = f"\nsubscribe = {json.dumps(options['subscribe'])}" if options["subscribe"] else ""
        table = f"[source.websocket]\nurl = {named}{sent}"
        return _of_messages(messages, form, given, source, table)
    is_url = source.startswith(("http://", "https://"))
    path = _download(source, form.parent) if is_url else Path(source)
    if not path.exists():
        raise FormatError("no such file; a topic needs --bootstrap")
    proposal = propose(of_file(path), given, path.name)
    form.write_text(proposal.text)
    observed = Observed()
    records = read_records(path, load_format(form), on_malformed=lambda _, error: observed.refuse(error))
    observed.add(islice(records, _MOST_READ))
    return Read(observed, proposal, f"[source.replay]\nfile = {json.dumps(str(path.resolve()))}\nspeed = 60")


def _download(url: str, folder: Path) -> Path:
    """The file at a URL, kept in ``folder`` under its own name; one that is there already is taken.

    Raises OSError.
    """
    path = folder / (Path(urlsplit(url).path).name or "download")
    if path.exists():
        return path
    try:
        with urlopen(url, timeout=_ANSWERS_S) as reply, replacing(path) as file:
            shutil.copyfileobj(reply, file)
    except HTTPError as error:
        error.close()
        raise
    click.echo(f"downloaded: {path}, {path.stat().st_size} bytes")
    return path


def _of_messages(messages: Sequence[Incoming], form: Path, given: Given, source: str, table: str) -> Read:
    if not messages:
        raise FormatError("no message came")
    ours: PayloadDecoder = WireDecoder(MAX_BYTES)
    observed = observe(messages, ours)
    usable = sum(map(len, observed.records.values()))
    if usable >= _OURS * (usable + observed.refused.total()):
        return Read(observed, None, table)
    proposal = propose(of_messages(messages), given, source)
    form.write_text(proposal.text)
    decoder = FormatDecoder(load_format(form, of_messages=True), MAX_BYTES)
    return Read(observe(messages, decoder), proposal, table)


def _config(found: Read, form: Path, symbols: Sequence[str], interval: int) -> str:
    lines = ["# Made by `foretick init`.", found.source]
    if found.proposal is not None:
        lines.append(f"format = {json.dumps(str(form.resolve()))}")
    lines += ["", "[bars]", f'interval = "{Duration(interval)}"']
    names = set[str]()
    for symbol in symbols:
        name = re.sub(r"[^a-z0-9_-]+", "-", symbol.partition(":")[2].lower()).strip("-") or "session"
        while name in names:
            name += "-2"
        names.add(name)
        decimals = found.observed.decimals(symbol)
        lines += [
            "",
            "[[sessions]]",
            f'name = "{name}"',
            f'symbol = "{symbol}"',
            f"price_decimals = {decimals}",
        ]
    return "\n".join(lines) + "\n"


def _show(found: Read, symbols: Sequence[str]) -> None:
    console, observed = Console(), found.observed
    if not console.is_terminal:
        console = Console(width=120)  # prices are whole
    if found.proposal is None:
        console.print("Foretick's own records: no format is needed")
    else:
        console.print(found.proposal.text.rstrip(), markup=False, highlight=False)
    interval = observed.interval()
    table = Table(
        title=f"symbols, and their first bars of {Duration(interval)}", box=SIMPLE, padding=(0, 1, 0, 0)
    )
    for column in ("symbol", "records", "opens (UTC)", "open", "high", "low", "close", "volume"):
        is_text = column in ("symbol", "opens (UTC)")
        table.add_column(column, justify="left" if is_text else "right", no_wrap=True)
    for symbol in symbols:
        for at, bar in enumerate(observed.bars(symbol, interval, _BARS)):
            first = (symbol, str(len(observed.records[symbol]))) if not at else ("", "")
            values = (str(each) for each in (bar.open, bar.high, bar.low, bar.close, bar.volume))
            table.add_row(*first, str(Instant(bar.opens))[:19].replace("T", " "), *values)
    console.print(table)
    if more := len(observed.symbols) - len(symbols):
        console.print(f"{more} more symbols: --sessions takes more")
    _say_refused(observed, console)
    for note in dict.fromkeys(() if found.proposal is None else found.proposal.notes):
        console.print(f"not certain: {note}", markup=False, highlight=False)


def _say_refused(observed: Observed, console: Console) -> None:
    for reason, count in observed.refused.items():
        what = f"{count} records are unusable, {reason}: {observed.examples[reason]}"
        console.print(what, markup=False, highlight=False)
