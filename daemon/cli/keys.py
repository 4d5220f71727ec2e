"""`foretick keys`: a pair of CURVE keys for a ZeroMQ socket or one of its clients, or an API key."""

import sys
from pathlib import Path

import click

from daemon.cli.options import EXIT_CONFIG
from daemon.tenants import hash_of, new_key
from feeds.curve import make_keys


@click.command("keys")
@click.argument("name", type=click.Path(path_type=Path))
@click.option(
    "--api", is_flag=True, help="print a new API key for the tenant NAME instead; nothing is written"
)
def command(name: Path, api: bool) -> None:
    """Write NAME.public and NAME.secret, which only their owner can read; existing files are kept."""
    if api:
        key = new_key()
        click.echo(f"# give {name} this key; it is shown only now:\n# {key}\n# in the tenants file:")
        click.echo(f'[[tenants]]\nname = "{name}"\nsessions = ["*"]\napi_keys = ["{hash_of(key)}"]')
        return
    try:
        public, secret = make_keys(name)
    except OSError as error:
        click.echo(f"{error.filename}: {error.strerror}", err=True)
        sys.exit(EXIT_CONFIG)
    click.echo(f"{public} is for the other side, {secret} stays here")
