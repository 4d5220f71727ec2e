"""`foretick install`: the unit, a configuration and a place for secrets; and their removal."""

import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import click

from daemon.cli.options import refuse
from daemon.install.applied import Step, install, install_steps, read_manifest, undo, undo_steps
from daemon.install.planned import CONFIG, EXAMPLES, InstallError, planned, usable

_SYSTEMD_RUNS = Path("/run/systemd/system")
_DONE = {"write": "written", "update": "updated", "remove": "removed", "keep": "kept", "leave": "unchanged"}


@click.command("install")
@click.option(
    "--root",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="write below this directory, for an image or a package  [default: /, where systemd runs]",
)
@click.option("--instance", is_flag=True, help="the unit for several daemons, foretick@.service")
@click.option(
    "--example",
    type=click.Choice(EXAMPLES),
    default="kafka",
    show_default=True,
    help=f"the configuration that {CONFIG} begins as",
)
@click.option(
    "--program", type=click.Path(path_type=Path), help="what the unit runs  [default: this program]"
)
@click.option("--force", is_flag=True, help="replace a unit that was changed; never the configuration")
@click.option("--undo", "undoing", is_flag=True, help="remove what was installed and has not changed")
@click.option("--dry-run", is_flag=True, help="print what would be done")
def command(
    root: Path | None,
    instance: bool,
    example: str,
    program: Path | None,
    force: bool,
    undoing: bool,
    dry_run: bool,
) -> None:
    """Install a systemd unit for this program, a configuration and a directory for secrets.

    Nothing is started. Another run changes nothing; after an upgrade it writes the new unit. Files that were
    changed since are kept.
    """
    try:
        if root is None and not _SYSTEMD_RUNS.is_dir():
            raise InstallError("systemd does not run here: --root DIR writes the files for another machine")
        below = root or Path("/")
        manifest = read_manifest(below)
        if undoing:
            steps = undo_steps(below, manifest)
        else:
            runs = _this_program() if program is None else usable(program)
            steps = install_steps(below, planned(runs, example, instance=instance), manifest, force=force)
        if undoing and not dry_run:
            undo(below, steps)
        elif not dry_run:
            install(below, steps, manifest)
    except (InstallError, OSError) as error:
        refuse(_readable(error))
    _report(steps, dry_run)
    if not dry_run and any(each.action in ("write", "update", "remove") for each in steps):
        click.echo(f"next: {'systemctl daemon-reload' if undoing else _next(instance)}")


def _this_program() -> Path:
    """The `foretick` of this environment, if a unit can run it."""
    program = Path(sysconfig.get_path("scripts"), "foretick")
    if not program.is_file():
        raise InstallError(f"{program} is not there: name the program (--program)")
    usable(Path(sys.executable).resolve())
    return usable(program)


def _readable(error: Exception) -> Exception:
    if isinstance(error, OSError):
        hint = ": run it as root" if isinstance(error, PermissionError) else ""
        return InstallError(f"{error.filename}: {error.strerror}{hint}")
    return error


def _report(steps: Sequence[Step], dry_run: bool) -> None:
    for step in steps:
        click.echo(f"{_DONE[step.action]:<9} {step.path}{f': {step.why}' if step.why else ''}")
        if step.diff:
            click.echo(step.diff)
    if all(step.action in ("keep", "leave") for step in steps):
        click.echo("nothing is changed")
    elif dry_run:
        click.echo("nothing was done: without --dry-run it would be")


def _next(instance: bool) -> str:
    unit = "foretick@NAME" if instance else "foretick"
    checked = f"edit {CONFIG}, foretick check --config {CONFIG}"
    return f"{checked}, systemd-sysusers, systemctl daemon-reload, systemctl enable --now {unit}"
