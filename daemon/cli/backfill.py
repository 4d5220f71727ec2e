"""`foretick backfill`: ask the past."""

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import click
import uvloop
from numpy import datetime64

from daemon.audit.backfill import Asked, Backfill, CannotBackfill, Span, asked_of, identity_of
from daemon.audit.backfill_output import AnswerOutput, ParquetOutput, TopicOutput
from daemon.audit.broker import of_sink
from daemon.audit.recorded_history import is_file, of_config
from daemon.cli.audited import configuration
from daemon.cli.options import (
    EXIT_CONFIG,
    EXIT_FAILED,
    config_option,
    instant,
    set_option,
    stopping_on_signals,
)
from daemon.config.schema import Config, ModelConfig
from daemon.config.standing import questions_of
from daemon.engine.build import Loaded, load_all, load_on_cpu
from feeds.connector import SettingError
from feeds.containers import CorruptFile
from feeds.file_format import FormatError
from feeds.kafka_client import BrokerError
from feeds.kafka_range import OffsetsGone

_OF_RECORDS = BrokerError, OffsetsGone, FormatError, CorruptFile
_ERRORS = (CannotBackfill, SettingError, *_OF_RECORDS, OSError, ValueError)


@click.command("backfill")
@click.argument("question")
@config_option
@set_option
@click.option("--choices", default="", help="of a question that is none of [[questions]]: UP,DOWN")
@click.option("--alone", "is_alone", is_flag=True, help="without the session's other questions: see below")
@click.option(
    "--session", "sessions", multiple=True, help="of this session; may be repeated; default: all that have it"
)
@click.option("--from", "from_", required=True, help="time of the data: with a zone, or how long ago (30d)")
@click.option("--to", "to", default="0s", show_default=True, help="the same, where it ends")
@click.option("--begin", default="", help="where the tapes begin; default: with the history")
@click.option("--file", "file", help="a recorded file, instead of the configuration's sources")
@click.option("--format", "format_name", help="its format: name of a built-in one, or a TOML file")
@click.option("--output", type=click.Path(path_type=Path), help="a directory for Parquet files")
@click.option("--topic", help="a Kafka topic of the configuration's sink")
def command(
    question: str,
    config_path: Path,
    settings: tuple[str, ...],
    choices: str,
    is_alone: bool,
    sessions: tuple[str, ...],
    from_: str,
    to: str,
    begin: str,
    file: str | None,
    format_name: str | None,
    output: Path | None,
    topic: str | None,
) -> None:
    """Ask QUESTION, the name of a standing one or a text, of every version that the past made.

    The answers are those that a daemon would have given, to the last bit, as it asks all its questions in one
    pass; with --alone, which is faster, within rounding.

    What is there already is not asked again: the same command goes on. Exit status 0; 1 if it was stopped;
    2 if it cannot be asked, or the answers cannot be written.
    """
    try:
        config = configuration(config_path, (*settings, *_source(file, format_name)))
        span = _span(from_, to, begin)
        named = tuple(filter(None, choices.split(",")))
        asked = _asked(config, sessions, question, named, is_alone=is_alone)
        status = uvloop.run(_carry_out(config, asked, span, output, topic))
    except ModuleNotFoundError as error:
        click.echo(f"--output: Parquet needs {error.name}: pip install 'foretick[parquet]'", err=True)
        sys.exit(EXIT_CONFIG)
    except _ERRORS as error:
        click.echo(str(error), err=True)
        sys.exit(EXIT_CONFIG)
    sys.exit(status)


def _source(file: str | None, format_name: str | None) -> tuple[str, ...]:
    """Settings that read ``file``. Raises SettingError."""
    if file is None and format_name is None:
        return ()
    if file is None or format_name is None:
        raise SettingError("--file", "goes with --format")
    return ("source.kind=replay", f"source.replay.file={file}", f"source.replay.format={format_name}")


def _span(from_: str, to: str, begin: str) -> Span:
    """Raises SettingError."""
    times: dict[str, int | None] = {}
    for option, text in (("--from", from_), ("--to", to), ("--begin", begin)):
        try:
            times[option] = instant(text)
        except ValueError as error:
            raise SettingError(option, str(error)) from error
    first, last = times["--from"] or 0, times["--to"] or 0
    if first >= last:
        raise SettingError("--from", f"{from_} is not before --to {to}")
    return Span(first, last, times["--begin"])


def _asked(
    config: Config, names: Sequence[str], question: str, choices: tuple[str, ...], *, is_alone: bool
) -> list[Asked]:
    """By session; without ``names`` of all sessions that have the question. Raises SettingError."""
    known = [session.name for session in config.sessions]
    for name in names:
        if name not in known:
            raise SettingError("--session", f"there is no session {name!r}: {', '.join(known) or 'none'}")
    having = [each.session for each in questions_of(config) if each.question.name == question]
    wanted = names or having or known
    if not wanted:
        raise SettingError("sessions", "the configuration has none")
    return [asked_of(config, name, question, choices, is_alone=is_alone) for name in wanted]


async def _carry_out(
    config: Config, asked: Sequence[Asked], span: Span, directory: Path | None, topic: str | None
) -> int:
    """The exit status."""
    stop, status = asyncio.Event(), 0
    is_file(config)  # or it raises
    with stopping_on_signals(stop):
        async with _output(config, directory, topic) as output:
            models: dict[ModelConfig, Loaded] = {}
            for each in asked:
                settings = each.listed.model
                if settings not in models:
                    (models[settings],) = load_on_cpu(each.listed) or load_all(each.listed)
                model = models[settings]
                reached = await output.reached(identity_of(each, model, span))
                backfill = Backfill(each, span, reached)
                try:
                    await _written(backfill, model, output, stop)
                finally:
                    await output.flush()
                if stop.is_set():
                    click.echo("stopped: the same command goes on from here", err=True)
                    return EXIT_FAILED
                try:
                    click.echo(_told(backfill), err=True)
                except CannotBackfill as error:  # there may be other sessions
                    click.echo(str(error), err=True)
                    status = EXIT_CONFIG
    return status


async def _written(backfill: Backfill, model: Loaded, output: AnswerOutput, stop: asyncio.Event) -> None:
    config = backfill.asked.listed
    batches = of_config(config, backfill.span.begin_ns)
    answers = backfill.answers(backfill.build(model), batches, ends=is_file(config))
    async with aclosing(answers):
        async for answer in answers:
            if answer is not None:
                await output.write(answer)
            elif stop.is_set():
                return


@asynccontextmanager
async def _output(config: Config, directory: Path | None, topic: str | None) -> AsyncIterator[AnswerOutput]:
    """Raises SettingError, and as `ParquetOutput`."""
    if (directory is None) == (topic is None):
        raise SettingError("--output", "name a directory, or a topic with --topic")
    if directory is not None:
        yield ParquetOutput(directory)
        return
    assert topic is not None  # one of them
    broker, sink = of_sink(config)
    if topic == sink.topic:
        why = f"the daemon publishes to {topic}: its readers would take these answers for new ones"
        raise SettingError("--topic", why)
    async with TopicOutput(broker, topic) as output:
        yield output


def _told(backfill: Backfill) -> str:
    """How it went. Raises CannotBackfill where there was nothing to ask."""
    span, versions = backfill.span, backfill.versions
    (session,) = backfill.asked.listed.sessions
    if not versions:
        raise CannotBackfill(f"{session.name}: the history has no bar of {', '.join(session.symbols)}")
    first, newest = (f"{datetime64(at, 'ns')}Z" for at in (backfill.first, backfill.newest))
    begins = f"the history begins with data of {first}"
    if not backfill.answered and not backfill.reached.version:
        raise CannotBackfill(f"{session.name}: {begins} and ends with {newest}: nothing is in the range")
    behind = f" behind version {backfill.reached.version}" if backfill.reached.version else ""
    rate = f"{versions} versions in {backfill.took_s:.1f} s, {versions / backfill.took_s:.1f}/s"
    late = f"; {begins}" if span.from_ns < backfill.first and span.begin_ns is None else ""
    return f"{session.name}: {backfill.answered} answers{behind}; {rate}{late}"
