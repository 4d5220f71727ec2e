"""Shared by `foretick explain` and `foretick reproduce`: naming an answer and its records."""

import asyncio
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import click

from daemon.audit.broker import logs_of, of_sink
from daemon.audit.published_answers import NoSuchAnswer, by_id, in_file
from daemon.audit.reproduction import CannotReproduce
from daemon.cli.options import EXIT_CONFIG, EXIT_FAILED, all_of, config_option, read_config, set_option
from daemon.config.schema import Config, LogConfig
from daemon.logs import set_up_logging
from feeds.connector import SettingError
from feeds.kafka_client import BrokerError
from feeds.market_data import Answer, Basis
from feeds.source import Partition
from feeds.timestamps import parse_instant

T = TypeVar("T")
EXIT_CANNOT = 3


naming_an_answer = all_of(
    click.option("--json", "as_json", is_flag=True, help="one JSON object"),
    set_option,
    config_option,
    click.argument("answer"),
)
"""ANSWER, and the configuration that gave it."""


def configuration(path: Path, settings: tuple[str, ...]) -> Config:
    """The configuration; logs go to standard error, warnings only."""
    config = read_config(path, settings)
    set_up_logging(LogConfig(level="error"), "audit")
    return config


async def find(config: Config, name: str) -> Answer:
    """The answer of an id, or in FILE or FILE:LINE. Raises NoSuchAnswer, BrokerError and SettingError."""
    read = _from_file(name)
    if read is not None:
        return read
    try:
        broker, sink = of_sink(config)
    except SettingError:
        why = "and there is no [sink.kafka], whose topic would have an answer of this id"
        raise NoSuchAnswer(f"{name}: no such file, {why}") from None
    async with broker.reader() as reader:
        return await by_id(reader, sink.topic, name)


def _from_file(name: str) -> Answer | None:
    path, _, line = name.rpartition(":")
    if Path(name).is_file():
        return in_file(Path(name))
    return in_file(Path(path), int(line)) if line.isdecimal() and Path(path).is_file() else None


async def begin_at(config: Config, basis: Basis, text: str) -> dict[tuple[str, Partition], int]:
    """The offsets that ``--from`` names, an offset or a time with a zone, in the answer's partitions.

    Raises CannotReproduce for text that is neither, or a time after all records.
    """
    brokers, found = logs_of(config), {}
    for each in basis.window:
        partition = (each.topic, each.partition)
        if text.isdecimal():
            found[each.source, partition] = int(text)
            continue
        try:
            time_ns = int(parse_instant(text))
        except ValueError as error:
            raise CannotReproduce(f"--from {text!r} is neither an offset nor a time: {error}") from error
        broker = brokers[each.source] if each.source else next(iter(brokers.values()))
        async with broker.reader() as reader:
            offset = await reader.offset_at(partition, time_ns)
        if offset is None or offset > each.last_offset:
            raise CannotReproduce(f"--from {text}: the answer's records in {each.topic} are older")
        found[each.source, partition] = offset
    return found


def carry_out(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work``; prints an error and exits: 1 for the broker, 2 for settings, 3 for what cannot be."""
    try:
        return asyncio.run(work)
    except (BrokerError, SettingError, CannotReproduce, NoSuchAnswer) as error:
        click.echo(str(error), err=True)
        broker, setting = isinstance(error, BrokerError), isinstance(error, SettingError)
        sys.exit(EXIT_FAILED if broker else EXIT_CONFIG if setting else EXIT_CANNOT)
