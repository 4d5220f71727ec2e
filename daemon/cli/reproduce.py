"""`foretick reproduce`: derive a published answer again from its records in Kafka."""

import json
import sys
from pathlib import Path

import click
import msgspec

from daemon.audit.reproduction import ReproductionVerdict, basis_of, compare, derive, deterministic, plan
from daemon.cli.audited import begin_at, carry_out, configuration, find, naming_an_answer
from daemon.cli.options import EXIT_FAILED
from feeds.market_data import Answer


@click.command("reproduce")
@naming_an_answer
@click.option(
    "--from", "from_", metavar="OFFSET|TIME", help="read from here instead of where the answer's state began"
)
@click.option(
    "--bits",
    is_flag=True,
    help="equal to the last bit, with one thread on the CPU, as the daemon must have run (model.threads = 1)",
)
def command(
    answer: str, config_path: Path, settings: tuple[str, ...], as_json: bool, from_: str | None, bits: bool
) -> None:
    """Derive ANSWER again: from its records in Kafka, with the same model and settings.

    ANSWER is an answer's id, from the answers topic, or FILE or FILE:LINE with answers in JSON. Bars, tokens
    and KV are made again by the daemon's own code, one bar a version. The text must be equal, and the logit
    gap within rounding. Exit status: 0 reproduced, or agrees with what could be repeated; 1 differs; 2 a
    setting is wrong; 3 it cannot be derived.
    """
    config = configuration(config_path, settings)
    config = deterministic(config) if bits else config

    async def work() -> tuple[Answer, ReproductionVerdict]:
        published = await find(config, answer)
        session, basis = basis_of(config, published)
        start = None if from_ is None else await begin_at(config, basis, from_)
        planned = plan(basis, session, start=start)
        derived = await derive(config, published, planned)
        return published, compare(published, derived, bits=bits)

    published, verdict = carry_out(work())
    if as_json:
        told = msgspec.to_builtins(verdict)
        told["apart"] = verdict.apart if verdict.apart != float("inf") else None
        click.echo(json.dumps({"answer_id": published.answer_id, **told}))
    else:
        click.echo(
            f"{verdict.says}: {published.session}, {published.question}, version {published.data_version}"
        )
        click.echo(f"  text  {published.text!r} published, {verdict.text!r} derived")
        exact = ", equal to the last bit" if verdict.bits else ""
        click.echo(
            f"  gap   {published.logit_gap:.9g} published, {verdict.gap:.9g} derived: "
            f"{verdict.apart:.2g} apart, {verdict.tolerance:.2g} is rounding{exact}"
        )
        if verdict.snapshot:
            click.echo(f"  from  the snapshot {verdict.snapshot}: the log has less than its state depends on")
        for note in verdict.notes:
            click.echo(f"  note  {note}")
    sys.exit(EXIT_FAILED if verdict.says == "differs" else 0)
