"""The command line. Heavy modules are imported by the command that needs them."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any

import click

from daemon.cli.simulate import simulate

EXIT_CONFIG = 2


class Commands(click.Group):
    """Our commands, and those of packages above the daemon's floor, found by their entry points."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names."""
        return sorted({*super().list_commands(ctx), *(p.name for p in _plugins())})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, loaded when first asked for."""
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        for plugin in _plugins():
            if plugin.name == cmd_name:
                loaded: click.Command = plugin.load()
                return loaded
        return None


def _plugins() -> Any:
    return entry_points(group="foretick.commands")


@click.group(cls=Commands)
@click.version_option(version("foretick"))
def main() -> None:
    """Foretick: answers before the question."""


main.add_command(simulate)


def _config(path: Path | None, settings: tuple[str, ...]) -> Any:
    """The configuration, or exit status 2 with what is wrong by key name."""
    from daemon.config.load import ConfigError, load_config

    overrides: dict[str, object] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise click.BadParameter(f"{setting!r} is not KEY=VALUE", param_hint="--set")
        overrides[key] = value
    try:
        return load_config(path, None, overrides)
    except ConfigError as error:
        click.echo(str(error), err=True)
        sys.exit(EXIT_CONFIG)


config_option = click.option(
    "--config", "config_path", type=click.Path(path_type=Path), required=True, help="configuration file"
)
set_option = click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="override one key")


@main.command()
@config_option
@set_option
def run(config_path: Path, settings: tuple[str, ...]) -> None:
    """Run the daemon until SIGTERM."""
    config = _config(config_path, settings)
    from daemon.cli.serve import serve

    sys.exit(serve(config))


@main.command()
@config_option
@set_option
def check(config_path: Path, settings: tuple[str, ...]) -> None:
    """Validate file, model, tokenizer, topics and sockets; exit status 2 if anything is wrong."""
    config = _config(config_path, settings)
    from daemon.cli.check import check_all

    problems = 0
    for found in check_all(config):
        click.echo(str(found))
        problems += not found.ok
    sys.exit(EXIT_CONFIG if problems else 0)


@main.command()
@click.option("--forever", is_flag=True, help="go on until Ctrl-C; a second Ctrl-C forces")
@click.option("--seconds", type=click.IntRange(min=5), default=40, show_default=True, help="live seconds")
@click.option("--seed", type=int, default=7, show_default=True, help="of the synthetic tape")
def demo(forever: bool, seconds: int, seed: int) -> None:
    """The whole way on embedded defaults: no broker, no GPU, no download."""
    from daemon.cli.demo import demo as run_demo

    sys.exit(run_demo(None if forever else seconds, seed))


@main.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--format", "format_name", required=True, help="built-in format name, or a TOML file")
@click.option("--to", "target", type=click.Choice(["kafka", "zmq", "inproc"]), required=True)
@click.option("--speed", type=click.FloatRange(min=0), default=1.0, show_default=True, help="0: no waiting")
@click.option("--from", "from_", metavar="TIME", help="first event time, with a zone")
@click.option("--until", metavar="TIME", help="event time at which to end, with a zone")
@click.option("--bootstrap", help="brokers, for kafka")
@click.option("--topic", default="md.trades.v1", show_default=True, help="topic, for kafka and zmq")
@click.option("--endpoint", help="socket to bind, for zmq")
@click.option("--config", "config_path", type=click.Path(path_type=Path), help="daemon settings, for inproc")
@set_option
def replay(file: Path, format_name: str, target: str, **options: Any) -> None:
    """Play a recorded file as if it were live."""
    from daemon.cli.replay import ReplayError
    from daemon.cli.replay import replay as run_replay

    settings = options.pop("settings")
    config = _config(options["config_path"], settings) if target == "inproc" else None
    try:
        sys.exit(run_replay(file, format_name, target, config=config, **options))
    except ReplayError as error:
        click.echo(str(error), err=True)
        sys.exit(EXIT_CONFIG)


@main.command()
@click.argument("trace", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--ttft", type=float, required=True, help="the bound T, in the time one token takes")
@click.option("--percentile", "p", type=float, required=True, help="p, what may be late: 0.05 is P95")
@click.option("--c-attn", type=float, default=0.0, show_default=True, help="attention's share of a token")
@click.option("--json", "as_json", is_flag=True, help="one JSON object")
def feasible(trace: Path, ttft: float, p: float, c_attn: float, as_json: bool) -> None:
    """A schedule of TRACE whose (1 - p) percentile TTFT meets a bound, or that none meets it for all.

    Exit status 0 with a schedule, 1 with the certificate only, 2 when there is no answer.
    """
    from daemon.cli.feasible import answer

    try:
        found = answer(trace, ttft, p, c_attn)
    except ValueError as error:
        click.echo(str(error), err=True)
        sys.exit(EXIT_CONFIG)
    click.echo(found.json() if as_json else found.table())
    sys.exit(0 if found.order is not None else 1)


@main.command()
@click.option(
    "--config", "config_path", type=click.Path(path_type=Path), help="whose model and device to measure"
)
@set_option
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="default: profiles/DEVICE.json")
@click.option("--quick", is_flag=True, help="small sizes only, to see that it works")
def profile(config_path: Path | None, settings: tuple[str, ...], out: Path | None, quick: bool) -> None:
    """Measure recompute and swap on this device, and write the profile the cost model reads."""
    config = _config(config_path, settings)
    from daemon.cli.profile import profile as run_profile
    from daemon.engine.spec import SettingError

    try:
        click.echo(run_profile(config, out, quick=quick))
    except SettingError as error:
        click.echo(str(error), err=True)
        sys.exit(EXIT_CONFIG)


@main.command()
@click.argument("session")
@click.argument("question")
@click.option("--endpoint", default="tcp://127.0.0.1:7801", show_default=True, help="the query socket")
@click.option("--choice", "choices", multiple=True, help="an allowed answer; give it twice or more")
@click.option("--max-tokens", type=click.IntRange(min=1), default=16, show_default=True)
@click.option("--timeout", type=float, default=30.0, show_default=True, help="seconds")
def ask(
    session: str, question: str, endpoint: str, choices: tuple[str, ...], max_tokens: int, timeout: float
) -> None:
    """Ask a running daemon; the answer names its data version."""
    from daemon.api.client import QueryClient
    from daemon.api.messages import QueryError

    try:
        with QueryClient(endpoint, timeout) as client:
            reply = client.ask(session, question, max_tokens, choices)
    except QueryError as error:
        click.echo(str(error), err=True)
        sys.exit(1)
    source = "answered ahead" if reply.cached else "computed now"
    untrained = ", untrained model" if reply.untrained else ""
    click.echo(
        f"{reply.text}\n  version {reply.data_version}, logit gap {reply.logit_gap:.3f}, "
        f"stale {reply.staleness_ns / 1e9:.3f} s, {reply.latency_ns / 1e6:.2f} ms, {source}{untrained}"
    )
