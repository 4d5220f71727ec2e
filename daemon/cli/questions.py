"""`foretick questions`: the standing questions of a running daemon."""

import os
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import click
from msgspec import inspect

from daemon.api.client import QueryClient
from daemon.api.messages import QueryError, QuestionInfo, QuestionsReply
from daemon.cli.options import endpoint_option, query
from daemon.config.errors import ConfigError
from daemon.config.key_reference import description
from daemon.config.load import load_table
from daemon.config.overrides import bare
from daemon.config.schema import QuestionConfig
from daemon.config.standing import question_of
from engine.model.question_pack import PackError, read_pack
from flash.question import Question

_NAMED = {"name", "text", "choices", "sessions"}
"""Keys of a standing question that `set` takes under other names."""


@click.group("questions")
def command() -> None:
    """List, add, change, install and remove the standing questions of a running daemon."""


@command.command("list")
@click.argument("session")
@endpoint_option
def list_(session: str, endpoint: str) -> None:
    """The standing questions of SESSION."""
    _run(endpoint, lambda client: client.questions(session))


def key_options(function: Callable[..., None]) -> Callable[..., None]:
    """An option for each key of a standing question, with its default and meaning in the configuration."""
    info = inspect.type_info(QuestionConfig)
    assert isinstance(info, inspect.StructType)
    for key in reversed(info.fields):
        if key.encode_name not in _NAMED:
            kind = bare(key.type)
            values = click.Choice(list(kind.values)) if isinstance(kind, inspect.LiteralType) else None
            function = click.option(
                f"--{key.encode_name.replace('_', '-')}",
                type=values or str,
                default="" if key.default is None else str(key.default),
                show_default=True,
                help=description(key.type),
            )(function)
    return function


@command.command("set")
@click.argument("session")
@click.argument("name")
@click.argument("text")
@click.option("--choice", "choices", multiple=True, help="an allowed answer; give the option at least twice")
@key_options
@endpoint_option
def set_(session: str, name: str, text: str, choices: tuple[str, ...], endpoint: str, **keys: str) -> None:
    """Give SESSION the question NAME, in place of the one with this name, if there is one.

    It stays until the daemon ends or reads its configuration again. The options are keys of [[questions]].
    """
    given = {key: value for key, value in keys.items() if value}
    question = question_from({"name": name, "text": text, "choices": choices, **given})
    members = asdict(question) | {"choices": choices}
    _run(endpoint, lambda client: client.set_question(session, **members))


@command.command("install")
@click.argument("pack", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("sessions", nargs=-1)
@click.option("--name", default="", help="its name in answers; default: the pack's")
@endpoint_option
def install(pack: Path, sessions: tuple[str, ...], name: str, endpoint: str) -> None:
    """Ask the question of PACK (see `foretick teach`) in SESSIONS, by default in all.

    The daemon reads the file by this path. A question of the same name is replaced; no other answer changes.
    It stays until the daemon ends or reads its configuration again: `pack` of [[questions]] is for longer.
    """
    try:
        head = read_pack(pack).head  # all of it, before a daemon is asked
    except PackError as error:
        raise click.ClickException(str(error)) from None
    asked = {"name": name or head.name, "text": head.text, "choices": head.choices}
    asked["pack"] = f"{pack.absolute()}@{head.revision}"

    def work(client: QueryClient) -> dict[str, str]:
        """Why each session refuses it, "" where it does not."""
        wanted = sessions or [each.name for each in client.sessions().sessions]
        return {session: _refusal(client, session, asked) for session in wanted}

    found = query(endpoint, work)
    for session, why in found.items():
        click.echo(f"{session}: {why or f'asks {head.text!r} from now on'}", err=bool(why))
    if any(found.values()) or not found:
        installed = sum(not why for why in found.values())
        raise click.ClickException(f"installed in {installed} of {len(found)} sessions")


def _refusal(client: QueryClient, session: str, asked: dict[str, Any]) -> str:
    try:
        client.set_question(session, **asked)
    except QueryError as error:
        return str(error)
    return ""


@command.command("pause")
@click.argument("session")
@click.argument("name", default="")
@endpoint_option
def pause(session: str, name: str, endpoint: str) -> None:
    """Pause the question NAME of SESSION, or all; the session goes on reading its data."""
    _run(endpoint, lambda client: client.pause(session, name))


@command.command("resume")
@click.argument("session")
@click.argument("name", default="")
@endpoint_option
def resume(session: str, name: str, endpoint: str) -> None:
    """Ask the question NAME of SESSION again, or all that are paused."""
    _run(endpoint, lambda client: client.pause(session, name, False))


@command.command("remove")
@click.argument("session")
@click.argument("name")
@endpoint_option
def remove(session: str, name: str, endpoint: str) -> None:
    """Remove the question NAME of SESSION."""
    _run(endpoint, lambda client: client.remove_question(session, name))


def question_from(keys: dict[str, Any]) -> Question:
    """The question that keys of the configuration declare, numbers as text. Raises click.UsageError."""
    if keys.get("pack"):
        keys = keys | {"pack": os.path.abspath(keys["pack"])}  # the daemon runs elsewhere
    try:
        return question_of(load_table(QuestionConfig, keys))
    except ConfigError as error:
        (problem,) = error.problems
        key = problem.key.upper() if problem.key in ("name", "text") else "--" + problem.key.replace("_", "-")
        raise click.BadParameter(problem.message, param_hint=key) from None
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def shown(question: QuestionInfo) -> str:
    """A question, and the keys that differ from their defaults."""
    how = " | ".join(question.choices) or f"text of at most {question.max_tokens} tokens"
    keys = [f for f in fields(Question) if f.name not in {*_NAMED, "max_tokens"}]
    changed = [(key.name, value) for key in keys if (value := getattr(question, key.name)) != key.default]
    paused = " (paused)" if question.paused else ""
    return f"{question.name}: {question.text} [{how}]{paused}" + "".join(f" {k}={v}" for k, v in changed)


def _run(endpoint: str, work: Callable[[QueryClient], QuestionsReply]) -> None:
    """Print the questions that the session then has."""
    for question in query(endpoint, work).questions:
        click.echo(shown(question))
