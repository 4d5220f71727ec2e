"""`foretick sessions`: the sessions of a running daemon."""

from collections.abc import Callable

import click

from daemon.api.client import QueryClient
from daemon.api.messages import SessionInfo, SessionsReply
from daemon.cli.options import endpoint_option, overrides_of, query

settings_option = click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE", help="a key of [[sessions]], such as interval=1m"
)


@click.group("sessions")
def command() -> None:
    """List, add, change and remove the sessions of a running daemon."""


@command.command("list")
@endpoint_option
def list_(endpoint: str) -> None:
    """All sessions."""
    _run(endpoint, lambda client: client.sessions())


@command.command("add")
@click.argument("name")
@click.argument("symbol")
@settings_option
@endpoint_option
def add(name: str, symbol: str, settings: tuple[str, ...], endpoint: str) -> None:
    """Open the session NAME on SYMBOL (VENUE:SYMBOL).

    It stays until the daemon ends or reads its configuration again.
    """
    _run(endpoint, lambda client: client.add_session(name, symbol, **_texts(settings)))


@command.command("change")
@click.argument("name")
@settings_option
@endpoint_option
def change(name: str, settings: tuple[str, ...], endpoint: str) -> None:
    """Give the session NAME other settings.

    Another interval, other symbols or other lines empty its window; all else keeps it.
    """
    _run(endpoint, lambda client: client.change_session(name, **_texts(settings)))


@command.command("remove")
@click.argument("name")
@endpoint_option
def remove(name: str, endpoint: str) -> None:
    """Close the session NAME."""
    _run(endpoint, lambda client: client.remove_session(name))


def _texts(settings: tuple[str, ...]) -> dict[str, str | list[str]]:
    """Values by key, as text; a list is separated by commas."""
    texts = {key: str(value) for key, value in overrides_of(settings).items()}
    return {key: text.split(",") if key == "more_symbols" else text for key, text in texts.items()}


def _shown(session: SessionInfo) -> str:
    symbols = " ".join((session.symbol, *session.more_symbols))
    by = f" read by {session.model}" if session.model else ""
    return (
        f"{session.name}: {symbols}{by}, version {session.data_version}, {session.live_records} bars of "
        f"{session.live_tokens} tokens, {len(session.questions)} standing questions"
    )


def _run(endpoint: str, work: Callable[[QueryClient], SessionsReply]) -> None:
    """Print the sessions that there then are."""
    for session in query(endpoint, work).sessions:
        click.echo(_shown(session))
