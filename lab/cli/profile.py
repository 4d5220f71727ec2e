"""`foretick profile`: measure prefill and swap times on this device, and write the cost profile."""

from pathlib import Path

import click

from daemon.cli.options import read_config, refuse, set_option
from feeds.connector import SettingError


@click.command("profile")
@click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    help="configuration with the model and device to measure",
)
@set_option
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="default: profiles/DEVICE.json")
@click.option("--quick", is_flag=True, help="small sizes only: checks that it runs")
def command(config_path: Path | None, settings: tuple[str, ...], out: Path | None, quick: bool) -> None:
    """Measure recompute, swap and the host on this device, and write the profile for the cost model."""
    from lab.plan.host_probe import HostFailed
    from lab.profile.device_profile import profile

    try:
        click.echo(profile(read_config(config_path, settings), out, quick=quick))
    except (SettingError, HostFailed) as error:
        refuse(error)
