"""`foretick ask`: one question to a running daemon."""

import click

from daemon.api.messages import KEPT_REPLY, AskReply
from daemon.cli.options import endpoint_option, query
from flash.confidence import UNCALIBRATED


@click.command("ask")
@click.argument("session")
@click.argument("question")
@endpoint_option
@click.option(
    "--choice",
    "choices",
    multiple=True,
    help="an allowed answer; give the option at least twice. A standing question has its own",
)
@click.option("--max-tokens", type=click.IntRange(min=1), default=16, show_default=True)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=30.0,
    show_default=True,
    help="seconds",
)
@click.option(
    "--early-exit",
    type=click.FloatRange(min=0),
    help="logit gap in place of flash.early_exit, where that is on; 0: compute the answer",
)
@click.option(
    "--max-age",
    "max_age_s",
    type=click.FloatRange(min=0),
    help="seconds since the event that a standing question's ready answer may be old, or else it is computed;"
    " 0: of the newest data version  [default: any]",
)
def command(
    session: str,
    question: str,
    endpoint: str,
    choices: tuple[str, ...],
    max_tokens: int,
    timeout: float,
    early_exit: float | None,
    max_age_s: float | None,
) -> None:
    """Ask a running daemon a QUESTION, or a standing one by its name; the answer names its data version."""
    asked = session, question, max_tokens, choices, early_exit, max_age_s
    click.echo(shown(query(endpoint, lambda client: client.ask(*asked), timeout), session))


def shown(reply: AskReply, session: str) -> str:
    """The answer, and below it what it is worth, and who answered where that is not the ``session`` asked."""
    other = f"{reply.session} answered, by {reply.model}: " if reply.session != session else ""
    source = "answered ahead" if reply.cached else "computed now"
    if KEPT_REPLY in reply.flags:
        source = "kept from the same ask"
    untrained = ", untrained model" if reply.untrained else ""
    judged = ""
    if reply.probability is not None and reply.choice_set is not None:
        judged = f"probability {reply.probability:.3f}, choice set {{{', '.join(reply.choice_set)}}}, "
    elif reply.choice is not None and reply.uncalibrated in UNCALIBRATED:
        judged = f"no probability ({reply.uncalibrated}: {UNCALIBRATED[reply.uncalibrated]}), "
    if reply.act is not None:
        judged += "act, " if reply.act else f"do not act ({reply.abstain_reason}), "
    return (
        f"{reply.text}\n  {other}version {reply.data_version}, logit gap {reply.logit_gap:.3f}, {judged}"
        f"{reply.staleness_ns / 1e9:.3f} s since the event, {reply.latency_ns / 1e6:.2f} ms, "
        f"{source}{untrained}"
    )
