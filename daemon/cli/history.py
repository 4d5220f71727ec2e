"""`foretick history`: published answers as a table."""

import asyncio
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import click

from daemon.audit.broker import Broker, of_sink
from daemon.audit.published import WRITERS, Row, Wanted, published, row_of
from daemon.cli.options import EXIT_CONFIG, bootstrap_option, instant, read_config, set_option
from feeds.connector import SettingError
from feeds.kafka_client import BrokerError


@click.command("history")
@click.argument("topic", required=False)
@bootstrap_option("brokers, host:port, instead of a configuration")
@click.option(
    "--config", "config_path", type=click.Path(path_type=Path), help="configuration with the sink's brokers"
)
@set_option
@click.option("--session", "sessions", multiple=True, help="only of this session; may be repeated")
@click.option("--question", "questions", multiple=True, help="only to this question; may be repeated")
@click.option("--since", default="", help="time of the data: with a zone, or how long ago (2h); default: all")
@click.option("--until", default="", help="the same, where it ends")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="a file that ends in .csv, .jsonl or .parquet; default: CSV to the terminal",
)
def command(
    topic: str | None,
    bootstrap: str | None,
    config_path: Path | None,
    settings: tuple[str, ...],
    sessions: tuple[str, ...],
    questions: tuple[str, ...],
    since: str,
    until: str,
    output: Path | None,
) -> None:
    """Write the answers of a Kafka TOPIC (default: the configuration's) as a table, each of them once.

    Exit status 0, or 2 if the topic cannot be read.
    """
    try:
        broker, name = _broker(topic, bootstrap, config_path, settings)
        wanted = Wanted(frozenset(sessions), frozenset(questions), instant(since), instant(until))
        with ExitStack() as stack:
            asyncio.run(_written(broker, name, wanted, _writer(output, stack)))
    except ModuleNotFoundError as error:
        click.echo(f"--output: Parquet needs {error.name}: pip install 'foretick[parquet]'", err=True)
        sys.exit(EXIT_CONFIG)
    except (SettingError, BrokerError, OSError, ValueError) as error:
        click.echo(str(error), err=True)
        sys.exit(EXIT_CONFIG)


async def _written(broker: Broker, topic: str, wanted: Wanted, write: Callable[[Row], None]) -> None:
    count = 0
    async for answer in published(broker, topic, wanted):
        write(row_of(answer))
        count += 1
    click.echo(f"{count} answers", err=True)


def _writer(output: Path | None, stack: ExitStack) -> Callable[[Row], None]:
    """Raises ValueError for a name of another kind."""
    suffix = ".csv" if output is None else output.suffix
    if suffix not in WRITERS:
        raise ValueError(f"--output {output}: a name that ends in {', '.join(WRITERS)}")
    if suffix == ".parquet":
        target: object = output
    else:
        target = (
            sys.stdout
            if output is None
            else stack.enter_context(output.open("w", encoding="utf-8", newline=""))
        )
    write: Callable[[Row], None] = stack.enter_context(WRITERS[suffix](target))
    return write


def _broker(
    topic: str | None, bootstrap: str | None, config_path: Path | None, settings: tuple[str, ...]
) -> tuple[Broker, str]:
    """Where the topic is, and its name. Raises SettingError."""
    if bootstrap is not None and topic is not None:
        return Broker(bootstrap, {}), topic
    if config_path is None:
        raise SettingError("--bootstrap", "name the brokers and a topic, or a configuration with --config")
    broker, sink = of_sink(read_config(config_path, settings))
    return broker, topic or sink.topic
