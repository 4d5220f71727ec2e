"""`foretick dump`: a support bundle of a deployment, without its secrets."""

import os
from pathlib import Path

import click

from daemon.cli.doctor import examine, unit_option
from daemon.cli.options import config_option, read_config, refuse, set_option
from daemon.doctor.bundle import members_of, write_bundle


@click.command("dump")
@config_option
@set_option
@unit_option
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default=Path("foretick-dump.zip"),
    show_default=True,
    help="new file",
)
def command(config_path: Path, settings: tuple[str, ...], unit: str, output: Path) -> None:
    """Write what `foretick doctor` sees, the configuration, metrics and the log into a ZIP archive.

    A running daemon goes on. Secrets are removed. It still names hosts, sessions and symbols: look through it
    before it leaves your hands.
    """
    config = read_config(config_path, settings)
    facts, diagnoses = examine(config, unit)
    members = members_of(facts, diagnoses, config, os.environ)
    try:
        write_bundle(output, members)
    except OSError as error:
        refuse(OSError(f"{output} cannot be written: {error.strerror}"))
    click.echo(f"{output}: {', '.join(members)}")
