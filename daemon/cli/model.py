"""`foretick model`: a model's weights from other formats."""

import sys
from pathlib import Path

import click

from daemon.cli.options import EXIT_CONFIG


@click.group("model")
def command() -> None:
    """Models from other formats."""


@command.command("import")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--dtype", type=click.Choice(["bfloat16", "float16", "float32"]), default="bfloat16", show_default=True,
    help="of the weights; quantised ones are expanded",
)  # fmt: skip
def import_(file: Path, directory: Path, dtype: str) -> None:
    """Write the GGUF FILE as a model DIRECTORY, for `model.path`."""
    from engine.model.architectures import ModelError  # imported here: it brings PyTorch
    from engine.model.gguf import import_gguf

    if directory.exists() and any(directory.iterdir()):
        click.echo(f"{directory} is not empty", err=True)
        sys.exit(EXIT_CONFIG)
    try:
        found = import_gguf(file, directory, dtype)
    except ModelError as error:
        click.echo(str(error), err=True)
        sys.exit(EXIT_CONFIG)
    click.echo(f"{directory}: {found}")
