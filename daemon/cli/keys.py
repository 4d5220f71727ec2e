"""`foretick keys`: a pair of CURVE keys for a ZeroMQ feed or sink, or for one of its clients."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from daemon.cli.options import EXIT_CONFIG
from feeds.curve import make_keys


@click.command("keys")
@click.argument("name", type=click.Path(path_type=Path))
def command(name: Path) -> None:
    """Write NAME.public and NAME.secret, which only their owner can read; existing files are kept."""
    try:
        public, secret = make_keys(name)
    except OSError as error:
        click.echo(f"{error.filename}: {error.strerror}", err=True)
        sys.exit(EXIT_CONFIG)
    click.echo(f"{public} is for the other side, {secret} stays here")
