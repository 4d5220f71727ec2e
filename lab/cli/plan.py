"""`foretick plan`: what a device carries of a configuration, before it runs."""

import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

import click

from daemon.cli.options import EXIT_FAILED, config_option, read_config, refuse, set_option
from daemon.config.schema import Config
from feeds.connector import SettingError
from feeds.kafka_client import BrokerError
from scheduler.costs import CostModel

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([KMGT]i?B)?")
_UNITS = {
    "B": 1,
    **{f"{p}{i}B": (1024 if i else 1000) ** (n + 1) for n, p in enumerate("KMGT") for i in ("", "i")},
}


_least = partial(click.FloatRange, 0)
_option = partial(click.option, show_default=True)


@click.command("plan")
@config_option
@set_option
@_option(
    "--rate",
    "rates",
    default="100",
    help="ticks a second over all symbols; separate several with commas: 100,1000",
)
@_option("--asks", type=_least(), default=0.0, help="asks a second")
@_option("--asks-standing", type=_least(1), default=0.7, help="share of the asks that are standing questions")
@_option(
    "--asks-ready",
    type=_least(1),
    default=0.0,
    help="share of the asks that exit at the ready position (flash.early_exit)",
)
@_option("--prompts", type=_least(), default=0.0, help="prompts a second")
@_option("--prompt-tokens", type=click.IntRange(min=1), default=512, help="of each prompt")
@_option("--answer-tokens", type=click.IntRange(min=1), default=16, help="of its answer")
@click.option(
    "--profile",
    help="cost profile, a name or a file; default: scheduler.profile, or the device's file in profiles/",
)
@click.option("--memory", help="the device's memory, such as 141GB; default: this machine's")
@click.option("--seconds", type=_least(), default=0.0, help="virtual time to simulate; default: 30 bars")
@click.option(
    "--search", is_flag=True, help="find by simulation how many such sessions meet their freshness objective"
)
@click.option(
    "--group",
    type=click.IntRange(min=1),
    help="place the partitions on N daemons: what each carries, and what one more or fewer moves",
)
@click.option(
    "--partitions",
    type=click.IntRange(min=1),
    help="with --group: partitions of the topic, to which symbols belong by Kafka's default partitioner; "
    "default: the newest records of the configured topic say which symbol is where, and how busy",
)
@_option("--seed", type=int, default=0)
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
def command(
    config_path: Path,
    settings: tuple[str, ...],
    rates: str,
    profile: str | None,
    memory: str | None,
    search: bool,
    as_json: bool,
    group: int | None,
    partitions: int | None,
    **load: float,
) -> None:
    """Say how many symbols, questions and asks a device carries, by formula and by simulation.

    Exit status 0 when the configuration fits at every rate, 1 when it does not, 2 for a wrong argument.
    """
    config = read_config(config_path, settings)
    import msgspec

    from lab.plan.load import Load
    from lab.plan.plan import plans
    from lab.plan.report import overloads, tables
    from lab.plan.sources import device_memory
    from scheduler.costs import load as load_profile

    try:
        if profile is None and not config.scheduler.profile:
            measured = Path("profiles") / _profile_of(config.model.device)
            profile = str(measured) if measured.is_file() else None
        costs = load_profile(profile) if profile else None
        if costs is not None and costs.block_size != config.pool.block_size:
            raise ValueError(
                f"{profile} was measured with blocks of {costs.block_size} tokens, but pool.block_size is "
                f"{config.pool.block_size}"
            )
        if group is not None:
            if config.models:
                raise SettingError("models", "--group places the sessions of one model: leave it out")
            _place(config, costs, _rates(rates), group, partitions, as_json)
        available = bytes_of(memory) if memory else device_memory(config)
        found = [
            each
            for rate in _rates(rates)
            for each in plans(config, Load(ticks=rate, **load), available, costs, search=search)  # type: ignore[arg-type]  # click converts each
        ]
    except (ValueError, SettingError, BrokerError) as error:
        refuse(error)
    click.echo(msgspec.json.encode(found).decode() if as_json else tables(found))
    if not costs and not config.scheduler.profile:
        click.echo("the profile is a guess: measure this device with `foretick profile`", err=True)
    beyond = overloads(found)
    for line in beyond:
        click.echo(f"beyond capacity at {line}", err=True)
    sys.exit(EXIT_FAILED if beyond else 0)


def _place(
    config: Config,
    costs: CostModel | None,
    rates: Sequence[float],
    group: int,
    partitions: int | None,
    as_json: bool,
) -> NoReturn:
    """Print the plan of a group at each rate, and exit. Raises ValueError, SettingError, BrokerError."""
    import msgspec

    from daemon.config.symbols import Names
    from feeds.connectors.kafka import KafkaSourceConnector
    from lab.plan.group import group_plan, group_table, keyed, sampled
    from lab.plan.sources import sources_of

    sources = sources_of(config, costs)
    symbols = list(sources.symbols)
    read = [each for _, each in config.feeds.values() if isinstance(each, KafkaSourceConnector)]
    if partitions is None and len(read) != 1:
        raise ValueError("--group needs one Kafka source, whose topic is read, or --partitions")
    sample = read[0].sample().renamed(Names(config.symbols).newest) if partitions is None else None
    found = []
    for rate in rates:
        if sample is not None:
            where, ticks = sampled(sample, symbols, rate)
            known = sorted(sample.rates)
        else:
            topic = read[0].topics[0] if read else "topic"
            where = keyed(symbols, partitions or 1, topic)
            ticks = dict.fromkeys(symbols, rate / len(symbols))
            known = [(topic, number) for number in range(partitions or 1)]
        found.append(group_plan(sources, group, known, where, ticks))
    click.echo(
        msgspec.json.encode(found).decode() if as_json else "\n\n".join(group_table(each) for each in found)
    )
    for each in found:
        for why in each.overload:
            click.echo(f"beyond capacity at {each.ticks:g} ticks a second, {why}", err=True)
        for name in each.split:
            click.echo(f"session {name} has symbols in several partitions: give them one key", err=True)
    sys.exit(EXIT_FAILED if any(each.overload or each.split for each in found) else 0)


def bytes_of(text: str) -> int:
    """The bytes that ``text`` says, such as 141GB or 24GiB. Raises ValueError."""
    found = _SIZE.fullmatch(text.strip())
    if found is None or float(found[1]) <= 0:
        raise ValueError(f"--memory: {text!r} is not a size above 0, such as 141GB or 24GiB")
    return int(float(found[1]) * _UNITS[found[2] or "B"])


def _rates(text: str) -> list[float]:
    try:
        return [float(rate) for rate in text.split(",")]
    except ValueError:
        raise ValueError(f"--rate: {text!r} is not a number, or numbers separated by commas") from None


def _profile_of(device: str) -> str:
    import torch

    from engine.device import device_name, resolve_device
    from lab.profile.cost_model import file_name

    return file_name(device_name(torch.device(resolve_device(device))))
