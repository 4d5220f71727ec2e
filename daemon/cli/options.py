"""Shared by several commands: options, exit statuses, signals."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click

from daemon.api.client import QueryClient
from daemon.api.messages import QueryError
from daemon.config.load import Config, ConfigError, load_config
from feeds.connector import SettingError
from feeds.curve import Keys, key_pair

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
_SECRET, _SERVER = "secret key file", "server key file"


def endpoint_option(command: C) -> C:
    """Where the daemon is, and the keys that it asks for; `connect` takes both."""

    def keep(key: str) -> Callable[[click.Context, click.Parameter, Path | None], None]:
        return lambda context, _, path: context.meta.update({key: path})

    path = click.Path(path_type=Path)
    options = (
        click.option(
            "--endpoint", default="tcp://127.0.0.1:7801", show_default=True, help="the daemon's query socket"
        ),
        click.option(
            "--secret-key", type=path, expose_value=False, callback=keep(_SECRET),
            help="your NAME.secret, where the daemon has tenants; its own makes you its operator",
        ),
        click.option(
            "--server-key", type=path, expose_value=False, callback=keep(_SERVER),
            help="the daemon's NAME.public  [default: the public part of --secret-key]",
        ),
    )  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def connect(endpoint: str, timeout_s: float = 30.0) -> QueryClient:
    """A client with the keys of the command's options. Raises QueryError."""
    return QueryClient(endpoint, timeout_s, keys=given_keys())


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
