"""`foretick dlq`: list, show and send again what ended in the DLQ."""

import asyncio
import json
import sys
from base64 import b64encode
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec
from rich.console import Console
from rich.table import Table

from daemon.audit.broker import Broker, any_sources, of_sink
from daemon.audit.redrive import (
    Cluster,
    Contents,
    DeadLetterEntry,
    Place,
    RecordFilter,
    RedriveOutcome,
    contents,
    redrive,
)
from daemon.cli.options import EXIT_FAILED, Parsed, all_of, bootstrap_option, read_config, refuse, set_option
from daemon.config.schema import Config
from feeds.codec import header_encoding
from feeds.connector import SettingError
from feeds.kafka_client import BrokerError
from feeds.kafka_range import KafkaRange
from feeds.market_data import DeadLetter
from feeds.source import SinkStopped
from feeds.timestamps import parse_instant

T = TypeVar("T")
_ROW = 16


_TIME = Parsed("TIME", lambda text: int(parse_instant(text)))
_PLACE = Parsed("PARTITION:OFFSET", Place.parse)
_where = all_of(
    click.option("--json", "as_json", is_flag=True, help="one JSON object a line"),
    click.option("--dlq", help="DLQ topic; default the configuration's, or dlq.v1"),
    bootstrap_option("brokers, host:port, instead of a configuration"),
    set_option,
    click.option(
        "--config", "config_path", type=click.Path(path_type=Path), help="configuration with [sink.kafka]"
    ),
)
"""Options that name the broker and the DLQ topic."""
_which = all_of(
    click.option("--until", "before", type=_TIME, default=0, help="only before this time, with a zone"),
    click.option("--from", "after", type=_TIME, default=0, help="only from this time on, with a zone"),
    click.option("--topic", "topics", multiple=True, help="only originals of this topic; may be repeated"),
    click.option(
        "--stage",
        "stages",
        multiple=True,
        type=click.Choice(["read", "process", "produce"]),
        help="only of this stage; may be repeated",
    ),
    click.option("--reason", "reasons", multiple=True, help="only of this reason; may be repeated"),
)
"""Options that choose records."""


@click.group("dlq")
def command() -> None:
    """List, show and send again what ended in the DLQ."""


@command.command("list")
@_which
@_where
@click.option("--all", "also_sent", is_flag=True, help="also records that were sent again")
def list_(also_sent: bool, as_json: bool, **options: Any) -> None:
    """Records, oldest first; those that were sent again are left out."""
    broker, topic, _ = _broker_of(options)
    wanted = RecordFilter(**options)
    found = _run(broker, lambda reader: contents(reader, topic))
    dead_letters = [each for each in _chosen(found, wanted) if also_sent or each.state != "sent"]
    if as_json:
        for each in dead_letters:
            click.echo(json.dumps(_row(each)))
    else:
        _print_table(dead_letters, found, topic)


@command.command("show")
@click.argument("place", type=_PLACE)
@_where
def show(place: Place, as_json: bool, **options: Any) -> None:
    """The record at PARTITION:OFFSET of the DLQ topic: all it says, its payload readable and raw."""
    broker, topic, _ = _broker_of(options)
    found = _run(broker, lambda reader: contents(reader, topic))
    dead_letter = found.dead_letters.get(place)
    if dead_letter is None:
        click.echo(f"{topic} has no record at {place}", err=True)
        sys.exit(EXIT_FAILED)
    if as_json:
        whole = msgspec.to_builtins(dead_letter.dead_letter, builtin_types=())
        click.echo(json.dumps(_row(dead_letter) | {"record": whole, "readable": readable(dead_letter)}))
        return
    for name, value in _row(dead_letter).items():
        click.echo(f"{name + ':':<11}{value}")
    for name, header in dead_letter.dead_letter.headers.items():
        click.echo(f"{'header:':<11}{name} = {_text(header)}")
    click.echo("\n" + (readable(dead_letter) or "(not readable)"))
    click.echo("\n" + hexdump(dead_letter.dead_letter.payload))


@command.command("redrive")
@click.argument("places", type=_PLACE, nargs=-1)
@_which
@_where
@click.option("--to", default="", help="send to this topic instead of the one each came from")
@click.option("--again", is_flag=True, help="also records that were sent, or may have been")
@click.option("--dry-run", is_flag=True, help="say what would be sent")
@click.option("--every", is_flag=True, help="all records, if neither places nor filters are given")
def redrive_(
    places: Sequence[Place], to: str, again: bool, dry_run: bool, every: bool, as_json: bool, **options: Any
) -> None:
    """Send originals back to their sources and topics, each once, with the header `redriven`.

    Which: those at PLACES (PARTITION:OFFSET of the DLQ topic), or those that the filters choose. A
    claim in the DLQ topic remembers what was sent, so a record is not sent twice by accident, whoever
    redrives and from wherever.
    """
    broker, topic, config = _broker_of(options)
    sources, others = _sources_of(config, broker)
    wanted = RecordFilter(**options)
    if not (places or every or wanted != RecordFilter()):
        raise click.UsageError("name records by PARTITION:OFFSET or by filters, or say --every")

    async def work(reader: KafkaRange) -> list[RedriveOutcome]:
        chosen = _to_redrive(await contents(reader, topic), topic, wanted, places, again)
        homes = {each.place: home_of(each.dead_letter, sources, others, to) for each in chosen}
        async with AsyncExitStack() as opened:
            clusters: dict[str, Cluster] = {}
            for name in {"", *(name for name, _ in homes.values())}:
                where = sources[name] if name else broker
                reads = await opened.enter_async_context(where.reader()) if name else reader
                clusters[name] = Cluster(reads, where.sink())
                opened.push_async_callback(clusters[name].sink.stop)
                if not dry_run:
                    await clusters[name].sink.start()

            def origin(entry: DeadLetterEntry) -> Cluster | str:
                name, why = homes[entry.place]
                return why or clusters[name]

            dlq = clusters[""]
            return await redrive(dlq, topic, chosen, origin=origin, to=to, again=again, dry_run=dry_run)

    outcomes = _run(broker, work)
    sent = sum(each.sent for each in outcomes)
    for each in outcomes:
        if as_json:
            click.echo(json.dumps(each._asdict() | {"place": str(each.place)}))
        elif each.why:
            click.echo(f"{each.place} not sent: {each.why}")
        else:
            click.echo(f"{each.place} {'sent' if each.sent else 'would be sent'} to {each.to}")
    if not as_json:
        click.echo(f"{sent} sent, {len(outcomes) - sent} not")
    sys.exit(EXIT_FAILED if any(each.why for each in outcomes) else 0)


def _to_redrive(
    found: Contents, topic: str, wanted: RecordFilter, places: Sequence[Place], again: bool
) -> list[DeadLetterEntry]:
    """Those at ``places``; filters choose among records not yet redriven. Raises BrokerError."""
    missing = [place for place in places if place not in found.dead_letters]
    if missing:
        raise BrokerError(f"{topic} has no record at {', '.join(map(str, missing))}")
    if places:
        return [each for each in _chosen(found, wanted) if each.place in places]
    return [each for each in _chosen(found, wanted) if again or each.state != "sent"]


def home_of(
    dead_letter: DeadLetter, sources: Collection[str], others: Collection[str], to: str
) -> tuple[str, str]:
    """Whose cluster the original goes to: a source's, or the sink's (""); and why that is not known.

    ``sources``: those of Kafka; ``others``: those that are not. ``to``: where it was asked to go.
    """
    if dead_letter.stage == "produce":
        return "", ""
    if dead_letter.source in sources:
        return dead_letter.source, ""
    if len(sources) == 1 and dead_letter.source not in others:
        return next(iter(sources)), ""
    if to:
        return "", ""
    if dead_letter.source in others:
        why = f"its source {dead_letter.source} is not Kafka"
    else:
        named = (
            f"its source {dead_letter.source} is not configured"
            if dead_letter.source
            else "it names no source"
        )
        why = f"{named}, and there are {len(sources)} Kafka sources"
    return "", f"{why} (--to sends it to a topic beside the DLQ)"


def readable(dead_letter: DeadLetterEntry) -> str:
    """The payload for people: indented JSON of JSON and msgpack, or its text; "" if it is neither."""
    payload = dead_letter.dead_letter.payload
    if header_encoding(dead_letter.dead_letter.headers) == "msgpack":
        try:
            payload = msgspec.json.encode(msgspec.msgpack.decode(payload))
        except (msgspec.DecodeError, ValueError, TypeError, RecursionError):
            return ""
    try:
        return msgspec.json.format(payload).decode()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    try:
        text = payload.decode()
    except UnicodeDecodeError:
        return ""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def hexdump(payload: bytes) -> str:
    """Lines of offset, 16 bytes in hexadecimal, and those that are printable ASCII."""
    lines = []
    for at in range(0, len(payload), _ROW):
        row = payload[at : at + _ROW]
        shown = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        lines.append(f"{at:08x}  {row.hex(' '):<{3 * _ROW}} {shown}")
    return "\n".join(lines)


def _broker_of(options: dict[str, Any]) -> tuple[Broker, str, Config | None]:
    """The DLQ's broker, its topic, and the configuration, if any. Takes its options out.

    Exits with status 2 where they do not name a broker.
    """
    path, settings = options.pop("config_path"), options.pop("settings")
    bootstrap, topic = options.pop("bootstrap"), options.pop("dlq")
    if bootstrap:
        return Broker(bootstrap, {}), topic or "dlq.v1", None
    if path is None and not settings:
        raise click.UsageError("name a broker: --bootstrap host:port, or --config FILE")
    try:
        config = read_config(path, settings)
        broker, sink = of_sink(config)
    except SettingError as error:
        refuse(error)
    return broker, topic or sink.dlq, config


def _sources_of(config: Config | None, broker: Broker) -> tuple[dict[str, Broker], set[str]]:
    """Kafka sources by name, and the names of others; without a configuration, ``broker`` is all there is."""
    if config is None:
        return {"": broker}, set()
    try:
        found = any_sources(config)
    except SettingError as error:
        refuse(error)
    return found, {name for name, _ in config.feeds.values()} - found.keys()


def _run(broker: Broker, work: Callable[[KafkaRange], Awaitable[T]]) -> T:
    """Run ``work`` with an open reader; on an error of the broker, exit with status 1."""

    async def with_reader() -> T:
        async with broker.reader() as reader:
            return await work(reader)

    try:
        return asyncio.run(with_reader())
    except (BrokerError, SinkStopped) as error:
        click.echo(str(error), err=True)
        sys.exit(EXIT_FAILED)


def _chosen(found: Contents, wanted: RecordFilter) -> list[DeadLetterEntry]:
    return sorted(filter(wanted, found.dead_letters.values()), key=lambda each: (each.failed_at, each.place))


def _row(each: DeadLetterEntry) -> dict[str, Any]:
    it = each.dead_letter
    return {
        "place": str(each.place),
        "time": _time(each.failed_at),
        "stage": it.stage,
        "reason": it.reason,
        "source": it.source,
        "topic": it.topic,
        "partition": it.partition,
        "offset": it.offset,
        "key": None if it.key is None else _text(it.key),
        "bytes": it.size if it.size >= 0 else len(it.payload),
        "state": each.state,
        "error": it.error,
    }


def _time(ns: int) -> str:
    return datetime.fromtimestamp(ns / 1e9, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _text(value: bytes) -> str:
    """Bytes as text, or in base64 where they are none."""
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return f"base64 {b64encode(value).decode()}"
    return text if text.isprintable() else f"base64 {b64encode(value).decode()}"


def _print_table(dead_letters: Sequence[DeadLetterEntry], found: Contents, topic: str) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    table = Table(title=f"{len(dead_letters)} of {len(found.dead_letters)} records in {topic}")
    for column in ("place", "time", "stage", "reason", "from", "key", "bytes", "state", "error"):
        table.add_column(column, overflow="fold" if column == "error" else "ellipsis")
    for each in dead_letters:
        row = _row(each)
        came = row["topic"] if row["partition"] < 0 else f"{row['topic']}/{row['partition']}@{row['offset']}"
        cells = (row["place"], row["time"], row["stage"], row["reason"], came, row["key"] or "")
        table.add_row(*map(_plain, cells), str(row["bytes"]), row["state"], _plain(row["error"]))
    console.print(table)
    if found.unreadable:
        console.print(f"{found.unreadable} messages in {topic} are no DLQ records")


def _plain(text: str) -> str:
    """Text of others, without what a terminal or rich would take for a command."""
    return "".join(c if c.isprintable() else "?" for c in text).replace("[", r"\[")
