"""`foretick history`: published answers as a table, beside their bars and what was right."""

import asyncio
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import click

from daemon.audit.bar_table import COLUMNS as BAR_FILE_COLUMNS
from daemon.audit.bar_table import BarTable
from daemon.audit.broker import Broker, of_sink
from daemon.audit.published import (
    BAR_COLUMNS,
    COLUMNS,
    RIGHT_COLUMNS,
    WRITERS,
    Row,
    Wanted,
    bar_row,
    published,
    right_row,
    row_of,
)
from daemon.cli.bars_file import lines_of
from daemon.cli.options import EXIT_CONFIG, bootstrap_option, instant, read_config, set_option
from daemon.config.schema import Config, LogConfig, SessionConfig
from daemon.logs import set_up_logging
from feeds.connector import SettingError
from feeds.containers import CorruptFile
from feeds.file_format import FormatError
from feeds.kafka_client import BrokerError
from feeds.market_data import Answer
from ingest.bar_kernel import Bars

SOURCES = "sources"
"""As ``--bars``: from the records of the configuration's sources."""


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
    "--bars",
    "bars_from",
    metavar="FILE|sources",
    help="beside each answer its bar: of a file of foretick replay --bars, or made again from the "
    "configuration's sources",
)
@click.option(
    "--rule",
    "rules",
    type=click.Path(path_type=Path),
    multiple=True,
    help="file of a question with the rule that says what was right, for answers to the question of its "
    "name; may be repeated",
)
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
    bars_from: str | None,
    rules: tuple[Path, ...],
    output: Path | None,
) -> None:
    """Write the answers of a Kafka TOPIC (default: the configuration's) as a table, each of them once.

    With --bars and --config also what was right, where a rule says so.

    Exit status 0, or 2 if the topic cannot be read.
    """
    try:
        config = None if config_path is None else read_config(config_path, settings)
        broker, name = _broker(topic, bootstrap, config)
        wanted = Wanted(frozenset(sessions), frozenset(questions), instant(since), instant(until))
        columns, row = _rows(config, bars_from, rules, sessions)
        with ExitStack() as stack:
            asyncio.run(_written(broker, name, wanted, row, _writer(output, columns, stack)))
    except ModuleNotFoundError as error:
        click.echo(f"--output: Parquet needs {error.name}: pip install 'foretick[parquet]'", err=True)
        sys.exit(EXIT_CONFIG)
    except BrokenPipeError:  # whoever reads it, such as `head`, has enough: click ends without a word
        raise
    except (SettingError, BrokerError, CorruptFile, FormatError, OSError, ValueError) as error:
        click.echo(str(error), err=True)
        sys.exit(EXIT_CONFIG)


def _rows(
    config: Config | None, bars_from: str | None, rules: Sequence[Path], sessions: Sequence[str]
) -> tuple[tuple[str, ...], Callable[[Answer], Row]]:
    """Columns, and what they have of an answer. Raises SettingError, and as bars and rules are read."""
    if rules and (config is None or bars_from is None):
        raise SettingError("--rule", "a rule reads bars, with the decimals of a session: --bars and --config")
    if bars_from is None:
        return COLUMNS, row_of
    bars = _bars_of(config, sessions) if bars_from == SOURCES else BarTable.read(bars_from)
    columns = COLUMNS + BAR_COLUMNS
    if config is None:
        return columns, lambda answer: row_of(answer) | bar_row(answer, bars)
    # imported here: PyTorch comes with it
    from daemon.audit.right_answers import RightAnswers

    right = RightAnswers(config, bars, rules).of
    return (
        columns + RIGHT_COLUMNS,
        lambda answer: row_of(answer) | bar_row(answer, bars) | right_row(answer, right(answer)),
    )


def _bars_of(config: Config | None, sessions: Sequence[str]) -> BarTable:
    """The bars that the configuration's sources made."""
    if config is None:
        raise SettingError("--bars", f"{SOURCES} are those of a configuration: name it with --config")
    # imported here: PyTorch comes with it
    from daemon.audit.made_bars import make_again

    # what makes bars has no trained model, which is nothing to tell
    set_up_logging(LogConfig(level="error"), "history")
    table = BarTable()
    for session in config.sessions:
        if sessions and session.name not in sessions:
            continue

        def write(bars: Bars, session: SessionConfig = session) -> None:
            for line in lines_of(session, bars):
                table.add(dict(zip(BAR_FILE_COLUMNS, line, strict=True)))

        asyncio.run(make_again(config, session.name, write))
    return table


async def _written(
    broker: Broker,
    topic: str,
    wanted: Wanted,
    row: Callable[[Answer], Row],
    write: Callable[[Row], None],
) -> None:
    count = 0
    async for answer in published(broker, topic, wanted):
        write(row(answer))
        count += 1
    is_bounded = wanted.since_ns is not None or wanted.until_ns is not None
    why = ": --since and --until are times of the data" if not count and is_bounded else ""
    click.echo(f"{count} answers{why}", err=True)


def _writer(output: Path | None, columns: Sequence[str], stack: ExitStack) -> Callable[[Row], None]:
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
    write: Callable[[Row], None] = stack.enter_context(WRITERS[suffix](target, columns))
    return write


def _broker(topic: str | None, bootstrap: str | None, config: Config | None) -> tuple[Broker, str]:
    """Where the topic is, and its name. Raises SettingError."""
    if bootstrap is not None and topic is not None:
        return Broker(bootstrap, {}), topic
    if config is None:
        raise SettingError("--bootstrap", "name the brokers and a topic, or a configuration with --config")
    broker, sink = of_sink(config)
    return broker, topic or sink.topic
