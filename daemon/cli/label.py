"""`foretick label`: the right choice of a past answer."""

import click

from daemon.cli.options import endpoint_option, query


@click.command("label")
@click.argument("session")
@click.argument("question")
@click.argument("version", type=click.IntRange(min=1))
@click.argument("choice")
@endpoint_option
def command(session: str, question: str, version: int, choice: str, endpoint: str) -> None:
    """Tell that CHOICE was the right answer to the standing QUESTION of SESSION at VERSION.

    Choice sets of the question then ask for as much coverage as keeps model.coverage in the long run. A
    question without a calibration learns one from its labels, from the 400th on.
    """
    reply = query(endpoint, lambda client: client.label(session, question, version, choice))
    answer = "right" if reply.right else "wrong"
    if reply.covered is None:
        click.echo(f"the answer was {answer}; it had no choice set")
        return
    covered = "in the choice set" if reply.covered else "not in the choice set"
    click.echo(f"the answer was {answer}, {choice} {covered}; coverage {reply.coverage:.4f} from now on")
