"""`foretick questions`: the standing questions of a running daemon."""

from __future__ import annotations

import sys
from collections.abc import Callable

import click

from daemon.api.client import QueryClient
from daemon.api.messages import QueryError, QuestionsReply
from daemon.cli.options import EXIT_FAILED

_endpoint = click.option(
    "--endpoint", default="tcp://127.0.0.1:7801", show_default=True, help="the daemon's query socket"
)


@click.group("questions")
def command() -> None:
    """List, add, change and remove the standing questions of a running daemon."""


@command.command("list")
@click.argument("session")
@_endpoint
def list_(session: str, endpoint: str) -> None:
    """The standing questions of SESSION."""
    _run(endpoint, lambda client: client.questions(session))


@command.command("set")
@click.argument("session")
@click.argument("name")
@click.argument("text")
@click.option("--choice", "choices", multiple=True, help="an allowed answer; give the option at least twice")
@click.option("--max-tokens", type=click.IntRange(min=1), default=8, show_default=True)
@_endpoint
def set_(
    session: str, name: str, text: str, choices: tuple[str, ...], max_tokens: int, endpoint: str
) -> None:
    """Give SESSION the question NAME, in place of the one with this name, if there is one.

    It stays until the daemon ends or reads its configuration again.
    """
    _run(endpoint, lambda client: client.set_question(session, name, text, choices, max_tokens))


@command.command("remove")
@click.argument("session")
@click.argument("name")
@_endpoint
def remove(session: str, name: str, endpoint: str) -> None:
    """Remove the question NAME of SESSION."""
    _run(endpoint, lambda client: client.remove_question(session, name))


def _run(endpoint: str, work: Callable[[QueryClient], QuestionsReply]) -> None:
    """Print the questions that the session then has."""
    try:
        with QueryClient(endpoint) as client:
            reply = work(client)
    except QueryError as error:
        click.echo(str(error), err=True)
        sys.exit(EXIT_FAILED)
    for question in reply.questions:
        how = " | ".join(question.choices) or f"text of at most {question.max_tokens} tokens"
        click.echo(f"{question.name}: {question.text} [{how}]")
