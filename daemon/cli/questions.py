"""`foretick questions`: the standing questions of a running daemon."""

from __future__ import annotations

from collections.abc import Callable

import click

from daemon.api.client import QueryClient
from daemon.api.messages import QuestionsReply
from daemon.cli.options import endpoint_option, exiting_on_refusal


@click.group("questions")
def command() -> None:
    """List, add, change and remove the standing questions of a running daemon."""


@command.command("list")
@click.argument("session")
@endpoint_option
def list_(session: str, endpoint: str) -> None:
    """The standing questions of SESSION."""
    _run(endpoint, lambda client: client.questions(session))


@command.command("set")
@click.argument("session")
@click.argument("name")
@click.argument("text")
@click.option("--choice", "choices", multiple=True, help="an allowed answer; give the option at least twice")
@click.option("--max-tokens", type=click.IntRange(min=1), default=8, show_default=True)
@endpoint_option
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
@endpoint_option
def remove(session: str, name: str, endpoint: str) -> None:
    """Remove the question NAME of SESSION."""
    _run(endpoint, lambda client: client.remove_question(session, name))


def _run(endpoint: str, work: Callable[[QueryClient], QuestionsReply]) -> None:
    """Print the questions that the session then has."""
    with exiting_on_refusal(), QueryClient(endpoint) as client:
        reply = work(client)
    for question in reply.questions:
        how = " | ".join(question.choices) or f"text of at most {question.max_tokens} tokens"
        click.echo(f"{question.name}: {question.text} [{how}]")
