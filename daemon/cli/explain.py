"""`foretick explain`: what a published answer was read from."""

import json
import sys
from pathlib import Path
from typing import Any

import click
import msgspec

from daemon.api.client import QueryClient
from daemon.api.messages import PromptShown, QueryError
from daemon.audit.reproduction import basis_of, derive, window_plan
from daemon.audit.session_replay import ReplayedVersion
from daemon.cli.audited import carry_out, configuration, find, naming_an_answer
from daemon.cli.options import EXIT_FAILED, query
from daemon.config.fingerprint import settings_of
from daemon.config.standing import questions_of
from feeds.codec import is_name
from feeds.market_data import Answer

_TRIES = 8


@click.command("explain")
@naming_an_answer
def command(answer: str, config_path: Path, settings: tuple[str, ...], as_json: bool) -> None:
    """Show what ANSWER saw: its records (offsets), data version, regions with their tokens, and settings.

    ANSWER is an answer's id, from the answers topic, or FILE or FILE:LINE with answers in JSON. The window's
    lines are made again from its records, in Kafka or in the file of a replay. SESSION/QUESTION is the newest
    answer of a running daemon, which shows what it reads: also where its source keeps no records.
    """
    config = configuration(config_path, settings)
    session, _, question = answer.partition("/")
    # ids of answers have a colon; a pattern or a client may have opened the session
    if is_name(session) and is_name(question) and not Path(answer).exists():
        newest, prompt = query(config.query.endpoint, lambda client: live(client, session, question))
        _print_live(newest, prompt, as_json=as_json)
        return

    async def work() -> tuple[Answer, ReplayedVersion | None, dict[str, Any]]:
        published = await find(config, answer)
        session, basis = basis_of(config, published)
        derived = await derive(config, published, window_plan(basis, session))
        asked = [each.question for each in questions_of(config) if each.session == session.name]
        return published, derived.version, settings_of(config, session, asked)

    published, version, known = carry_out(work())
    if version is None:
        click.echo("differs: the records make no bar that ends as the answer's did", err=True)
        sys.exit(EXIT_FAILED)
    if as_json:
        click.echo(json.dumps(shown(published, version, known)))
    else:
        _print(published, version, known)


def live(client: QueryClient, session: str, question: str) -> tuple[Answer, PromptShown]:
    """The newest answer to a standing question, and what the model reads then. Raises QueryError."""
    for _ in range(_TRIES):
        found = client.answers(session, question, 1).answers
        prompt = client.show_prompt(session, question)
        for answer in found:
            if answer.data_version == prompt.data_version:
                return answer, prompt
    raise QueryError("timeout", f"{session} has newer data than its answers, {_TRIES} times in a row")


def _print_live(answer: Answer, prompt: PromptShown, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(msgspec.to_builtins({"answer": answer, "prompt": prompt})))
        return
    _print_answer(answer)
    for name in ("frozen", "sliding", "question"):
        region = getattr(prompt, name)
        if region is not None:
            click.echo(f"\n{name} region, {region.tokens} tokens\n")
            click.echo(region.text)


def shown(published: Answer, version: ReplayedVersion, known: dict[str, Any]) -> dict[str, Any]:
    """The explanation as JSON has it."""
    return {
        "answer": msgspec.to_builtins(published),
        "frozen": {"text": version.prefix_text, "tokens": list(version.prefix)},
        "window": [
            {"text": line.text, "tokens": list(line.tokens), "ts_event": line.ts_event}
            for line in version.window
        ],
        "question": {"text": version.question_text, "tokens": list(version.question)},
        "settings": known,
    }


def _print(published: Answer, version: ReplayedVersion, known: dict[str, Any]) -> None:
    basis = published.basis
    assert basis is not None  # it was checked
    _print_answer(published)
    say = click.echo
    for name, ranges, bars in (
        ("new", published.inputs, basis.bars),
        ("window", basis.window, basis.window_bars),
        ("state", basis.state, basis.state_bars),
    ):
        where = ", ".join(
            f"{each.topic}/{each.partition} {each.first_offset} to {each.last_offset}" for each in ranges
        )
        say(f"{name:<10}{bars} bars: {where or 'not known'}")
    say(f"\nfrozen region, {len(version.prefix)} tokens\n")
    say(version.prefix_text)
    say(_tokens(version.prefix))
    say(f"\nwindow, {len(version.window)} lines, {sum(len(line.tokens) for line in version.window)} tokens\n")
    for line in version.window:
        say(f"{line.text.rstrip()}    {_tokens(line.tokens)}")
    say(f"\nquestion, {len(version.question)} tokens\n")
    say(version.question_text)
    say(_tokens(version.question))
    say(f"\nsettings, hash {basis.config}\n")
    for key, value in known.items():
        say(f"{key} = {value}")


def _print_answer(published: Answer) -> None:
    bars = "" if published.basis is None else f", {published.basis.bars} new bars"
    say = click.echo
    say(f"answer    {published.answer_id}")
    say(f"          {published.question} of {published.session} ({published.symbol}): {published.text!r}")
    say(f"          logit gap {published.logit_gap:.9g}, flags {' '.join(published.flags) or '-'}")
    say(f"version   {published.data_version}, as of {published.as_of}{bars}")
    say(f"model     {published.model}, revision {published.model_revision}")


def _tokens(tokens: tuple[int, ...]) -> str:
    return "[" + " ".join(map(str, tokens)) + "]"
