"""`foretick audit`: whether a topic holds every answer, and each once."""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

from daemon.audit.broker import Broker, Group, groups_of, of_sink
from daemon.audit.completeness import Audit, SessionAudit
from daemon.cli.options import (
    EXIT_CONFIG,
    EXIT_FAILED,
    aligned,
    bootstrap_option,
    instant,
    read_config,
    set_option,
)
from daemon.progress import Progress, order
from feeds.codec import decode_message
from feeds.connector import SettingError
from feeds.kafka_client import BrokerError
from feeds.kafka_range import OffsetsGone
from feeds.market_data import Answer

_SHOWN = 5
"""Ranges of lost numbers in a row of the table."""


class Report(msgspec.Struct, frozen=True):
    """``unreadable``: messages of the topic that are no answers.

    ``groups``: consumer groups whose committed progress the end of the topic was compared with.
    """

    topic: str
    complete: bool
    unreadable: int
    sessions: list[SessionAudit]
    groups: list[str] = []


@click.command("audit")
@click.argument("topic")
@bootstrap_option("brokers, host:port, instead of a configuration")
@click.option(
    "--config", "config_path", type=click.Path(path_type=Path), help="configuration with the sink's brokers"
)
@set_option
@click.option("--since", default="", help="a time with a zone, or how long ago (2h); default: all")
@click.option(
    "--group",
    default="",
    help="consumer group of the daemon, whose progress tells what is missing at the end; with --config, "
    "that of the configuration, if TOPIC is its answers topic",
)
@click.option("--exactly-once", is_flag=True, help="an answer that is there twice is a fault, too")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
def command(
    topic: str,
    bootstrap: str | None,
    config_path: Path | None,
    settings: tuple[str, ...],
    since: str,
    group: str,
    exactly_once: bool,
    as_json: bool,
) -> None:
    """Read the answers of a Kafka TOPIC, and prove by their numbers that none is missing.

    Answers missing behind the newest one of their session show only in comparison with a consumer group's
    progress (--group, or --config).

    Exit status 0 if every session is complete, 1 if an answer is missing or contradicts another (with
    --exactly-once also if one is repeated), 2 if the topic cannot be read.
    """
    try:
        broker, groups = _brokers(topic, bootstrap, config_path, settings, group)
        report = asyncio.run(_audited(broker, groups, topic, instant(since) or 0, exactly_once))
    except (SettingError, BrokerError, OffsetsGone, ValueError) as error:
        click.echo(str(error), err=True)
        sys.exit(EXIT_CONFIG)
    click.echo(msgspec.json.encode(report).decode() if as_json else table(report))
    sys.exit(0 if report.complete else EXIT_FAILED)


async def _audited(
    broker: Broker, groups: Sequence[Group], topic: str, since_ns: int, exactly_once: bool
) -> Report:
    """``groups``: consumer groups to compare with."""
    unreadable, progress = 0, dict[str, Progress]()
    for group in groups:  # before the topic's end is looked up, so that all it tells of is there
        for name, each in (await group.progress()).items():
            progress[name] = max(each, progress.get(name, each), key=order)
    async with broker.reader() as reader:
        spans = await reader.spans([topic])
        if since_ns:
            for partition, span in spans.items():
                first = await reader.offset_at(partition, since_ns)
                spans[partition] = range(span.stop if first is None else first, span.stop)
        audit = Audit(whole=not since_ns and not any(span.start for span in spans.values()))
        for partition, span in spans.items():
            async for batch in reader.read(partition, span):
                for record in batch:
                    try:
                        message = decode_message(record.payload)
                    except ValueError:
                        unreadable += 1
                        continue
                    if isinstance(message, Answer):
                        audit.take(message)
    sessions = audit.result(progress)
    complete = all(session.holds(exactly_once) for session in sessions)
    return Report(topic, complete, unreadable, sessions, [group.name for group in groups])


def table(report: Report) -> str:
    """A row for each session, then the verdict."""
    head = ("session", "answers", "epochs", "first", "newest", "lost", "repeated", "conflicts")
    lines = aligned([head, *map(_row, report.sessions)])
    for each in report.sessions:
        if each.lost:
            shown = ", ".join(f"{a}-{b}" if a < b else f"{a}" for a, b in each.lost[:_SHOWN])
            more = f" and {len(each.lost) - _SHOWN} more ranges" if len(each.lost) > _SHOWN else ""
            lines.append(f"{each.session} lacks {shown}{more}")
    if report.unreadable:
        lines.append(f"{report.unreadable} messages are not readable")
    answers, missing = sum(each.answers for each in report.sessions), sum(s.missing for s in report.sessions)
    verdict = "complete" if report.complete else "NOT complete"
    lines.append(f"{report.topic}: {verdict}; {answers} answers, {missing} missing")
    if not report.groups:
        lines.append("what is missing at the end does not show: no consumer group to compare with (--group)")
    return "\n".join(lines)


def _row(each: SessionAudit) -> tuple[str, ...]:
    numbers = (
        *(each.answers, each.epochs, each.first, each.newest),
        *(each.missing, each.repeated, each.conflicts),
    )
    return each.session, *map(str, numbers)


def _brokers(
    topic: str, bootstrap: str | None, config_path: Path | None, settings: tuple[str, ...], group: str
) -> tuple[Broker, list[Group]]:
    """Where the topic is, and the consumer groups to compare it with. Raises SettingError."""
    if bootstrap is not None:
        broker = Broker(bootstrap, {})
        return broker, [Group(broker, group)] if group else []
    if config_path is None:
        raise SettingError("--bootstrap", "name the brokers, or a configuration with --config")
    config = read_config(config_path, settings)
    broker, sink = of_sink(config)
    if not group and topic != sink.topic:
        return broker, []
    return broker, groups_of(config, group)
