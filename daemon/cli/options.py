"""Shared by several commands: options, exit statuses, signals."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click

from daemon.api.client import QueryClient
from daemon.api.messages import QueryError
from daemon.config.checks import check_brokers
from daemon.config.load import Config, ConfigError, load_config
from feeds.connector import SettingError
from feeds.curve import Keys, key_pair
from feeds.durations import parse_duration
from feeds.timestamps import parse_instant
from support import numba_kernel

EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_FORCED = 130

config_option = click.option(
    "--config", "config_path", type=click.Path(path_type=Path), required=True, help="configuration file"
)
set_option = click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE", help="override one configuration key"
)


C = TypeVar("C", bound=Callable[..., Any])
T = TypeVar("T")
_SECRET, _SERVER = "secret key file", "server key file"


def all_of(*options: Callable[[Callable[..., Any]], Any]) -> Callable[[C], C]:
    """Several options as one decorator."""

    def apply(command: C) -> C:
        for option in reversed(options):
            command = option(command)
        return command

    return apply


class Parsed(click.ParamType[T]):
    """A value that ``parse`` reads from text, or raises ValueError with the reason."""

    def __init__(self, name: str, parse: Callable[[str], T]) -> None:
        self.name, self._parse = name, parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> T:
        """As click calls it; a default is not text."""
        try:
            return self._parse(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(str(error), param, ctx)


def bootstrap_option(about: str) -> Callable[[C], C]:
    """``--bootstrap``, the names of brokers."""
    return click.option("--bootstrap", type=Parsed("host:port", check_brokers), help=about)


def _keep(key: str) -> Callable[[click.Context, click.Parameter, Path | None], None]:
    return lambda context, _, path: context.meta.update({key: path})


endpoint_option = all_of(
    click.option(
        "--endpoint", default="tcp://127.0.0.1:7801", show_default=True, help="the daemon's query socket"
    ),
    click.option(
        "--secret-key", type=click.Path(path_type=Path), expose_value=False, callback=_keep(_SECRET),
        help="your NAME.secret, where the daemon has tenants; its own makes you its operator",
    ),
    click.option(
        "--server-key", type=click.Path(path_type=Path), expose_value=False, callback=_keep(_SERVER),
        help="the daemon's NAME.public  [default: the public part of --secret-key]",
    ),
)  # fmt: skip
"""Where the daemon is, and the keys that it asks for; `query` takes both."""


def query(endpoint: str, work: Callable[[QueryClient], T], timeout_s: float = 30.0) -> T:
    """What a running daemon replies to ``work``; a refusal is printed, and ends with exit status 1."""
    with exiting_on_refusal(), QueryClient(endpoint, timeout_s, keys=given_keys()) as client:
        return work(client)


def given_keys() -> Keys | None:
    """The keys of the command's options. Raises QueryError."""
    given = click.get_current_context().meta
    secret, server = given.get(_SECRET), given.get(_SERVER)
    try:
        return None if secret is None else key_pair("--secret-key", secret, server)
    except SettingError as error:
        raise QueryError("unauthenticated", str(error)) from None


def read_config(path: Path | None, settings: tuple[str, ...]) -> Config:
    """Load the configuration; on error, print each problem by key and exit with status 2."""
    try:
        return load_config(path, None, overrides_of(settings))
    except ConfigError as error:
        refuse(error)


def overrides_of(settings: tuple[str, ...]) -> dict[str, object]:
    """The values of ``--set`` by key."""
    overrides: dict[str, object] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise click.BadParameter(f"{setting!r} is not KEY=VALUE", param_hint="--set")
        overrides[key] = value
    return overrides


def instant(text: str) -> int | None:
    """The time, in ns, of a text with a zone, or so long ago (2h) by our clock; None of an empty one.

    Raises ValueError.
    """
    if not text:
        return None
    try:
        return time.time_ns() - parse_duration(text)
    except ValueError:
        return int(parse_instant(text))


def tell_if_cold() -> None:
    """Say on standard error why the first start takes long."""
    if not numba_kernel.compiled_before():
        click.echo("compiling, once for this version and place: this takes a minute or more", err=True)


def reason_of(error: Exception) -> str:
    """In words, without the number of a system's error where these say what failed."""
    if isinstance(error, OSError) and error.strerror and error.strerror.startswith("cannot "):
        return error.strerror
    return f"{type(error).__name__}: {error}"


def refuse(error: Exception) -> NoReturn:
    """Print the error and exit with status 2."""
    click.echo(str(error), err=True)
    sys.exit(EXIT_CONFIG)


@contextlib.contextmanager
def exiting_on_refusal() -> Iterator[None]:
    """Print the error of a query that a running daemon refused, and exit with status 1."""
    try:
        yield
    except QueryError as error:
        click.echo(str(error), err=True)
        sys.exit(EXIT_FAILED)


@contextlib.contextmanager
def stopping_on_signals(stop: asyncio.Event) -> Iterator[None]:
    """SIGTERM and Ctrl-C set ``stop``; a second one ends the process at once."""
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(EXIT_FORCED)
        stop.set()

    signals = (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


@contextlib.contextmanager
def calling_on_hangup(callback: Callable[[], Coroutine[None, None, None]]) -> Iterator[None]:
    """SIGHUP runs ``callback`` as a task."""
    loop = asyncio.get_running_loop()
    running: set[asyncio.Task[None]] = set()

    def on_signal() -> None:
        task = loop.create_task(callback())
        running.add(task)
        task.add_done_callback(running.discard)

    loop.add_signal_handler(signal.SIGHUP, on_signal)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
        for task in running:
            task.cancel()


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """A line for each row: its name, and numbers in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([name.ljust(widths[0]), *map(str.rjust, numbers, widths[1:])]).rstrip()
        for name, *numbers in rows
    ]
