"""`foretick plan --group N`: which daemon gets which partition, what each carries, and what moves.

A session's cost is the device's time for its bars, by the plan's own costs: its bars a second, times the mean
time of a bar with its questions where the sessions of a daemon share passes. Each daemon has such a device.
"""

from collections.abc import Mapping, Sequence
from math import ceil

import msgspec

from feeds.placement import loads_of, moves, place
from feeds.source import Partition
from feeds.topic_sample import TopicSample
from lab.plan.capacity import background_s, session_bars_per_s, session_shape
from lab.plan.sources import Sources

FULL = 1.0
"""Share of its time in passes at which a daemon cannot keep up."""


class GroupDaemon(msgspec.Struct, frozen=True, kw_only=True):
    """What a daemon of the group has. ``utilisation_ratio``: of its device, predicted."""

    name: str
    partitions: tuple[Partition, ...]
    sessions: tuple[str, ...]
    records_per_s: float
    utilisation_ratio: float


class GroupPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A group at one rate.

    ``more``, ``fewer``: the partitions that move when it has one daemon more, and one fewer.
    ``split``: sessions with symbols in several partitions, which no placement brings together.
    """

    ticks: float
    daemons: tuple[GroupDaemon, ...]
    more: tuple[Partition, ...]
    fewer: tuple[Partition, ...]
    split: tuple[str, ...]
    overload: tuple[str, ...]


def keyed(symbols: Sequence[str], partitions: int, topic: str) -> dict[str, Partition]:
    """Where Kafka's default partitioner puts records whose key is their symbol."""
    from aiokafka.partitioner import DefaultPartitioner

    numbers, partitioner = list(range(partitions)), DefaultPartitioner()
    return {symbol: (topic, partitioner(symbol.encode(), numbers, numbers)) for symbol in symbols}


def sampled(
    sample: TopicSample, symbols: Sequence[str], ticks: float
) -> tuple[dict[str, Partition], dict[str, float]]:
    """Where the symbols' newest records are, and their rates, scaled so that all have ``ticks`` a second.

    Of a symbol in several partitions the first counts. Raises ValueError if it has no record of them.
    """
    where = {symbol: found[0] for symbol in symbols if (found := sample.partitions_of(symbol))}
    if missing := sorted(set(symbols) - where.keys()):
        raise ValueError(f"the topic's newest records have none of {', '.join(missing)}: try --partitions")
    rates = {symbol: sample.rates[partition][symbol] for symbol, partition in where.items()}
    total = sum(rates.values())
    return where, {symbol: rate / total * ticks for symbol, rate in rates.items()}


def group_plan(
    sources: Sources,
    daemons: int,
    partitions: Sequence[Partition],
    where: Mapping[str, Partition],
    rates: Mapping[str, float],
) -> GroupPlan:
    """Place ``partitions`` on ``daemons`` daemons. ``where``, ``rates``: each symbol's, in ticks a second."""
    sessions = sources.config.sessions
    together = ceil(len(sessions) / daemons)
    costs = {
        session.name: session_bars_per_s(session, interval, rates)
        * background_s(sources, session_shape(sources, session), together)
        for session, interval in zip(sessions, sources.intervals, strict=True)
    }
    home = {session.name: where[session.symbol] for session in sessions}
    weights = {
        partition: sum(costs[name] for name, at in home.items() if at == partition)
        for partition in partitions
    }
    # as a group that has grown to this number
    at = place(weights, _names(daemons), place(weights, _names(max(1, daemons - 1))))
    loads = loads_of(weights, at, _names(daemons))
    found = tuple(
        GroupDaemon(
            name=name,
            partitions=tuple(sorted(p for p, owner in at.items() if owner == name)),
            sessions=tuple(s for s, partition in home.items() if at[partition] == name),
            records_per_s=sum(rates[symbol] for symbol, partition in where.items() if at[partition] == name),
            utilisation_ratio=load,
        )
        for name, load in loads.items()
    )
    return GroupPlan(
        ticks=sum(rates.values()),
        daemons=found,
        more=tuple(moves(at, place(weights, _names(daemons + 1), at))),
        fewer=tuple(moves(at, place(weights, _names(max(1, daemons - 1)), at))),
        split=tuple(s.name for s in sessions if len({where[symbol] for symbol in s.symbols}) > 1),
        overload=tuple(_overload(found, len(partitions), weights)),
    )


def group_table(plan: GroupPlan) -> str:
    """A row for each daemon, and what moves."""
    rows = [("daemon", "partitions", "sessions", "records/s", "utilisation")]
    for each in plan.daemons:
        numbers = ",".join(str(number) for _, number in each.partitions) or "-"
        cells = (str(len(each.sessions)), f"{each.records_per_s:.4g}", f"{each.utilisation_ratio:.1%}")
        rows.append((each.name, numbers, *cells))
    wide = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, wide, strict=True)).rstrip() for row in rows
    ]
    lines.append("")
    for what, moved in (("one daemon more", plan.more), ("one daemon fewer", plan.fewer)):
        lines.append(f"{what} moves {len(moved)} partitions: {','.join(str(n) for _, n in moved) or '-'}")
    return "\n".join([f"{len(plan.daemons)} daemons, {plan.ticks:g} ticks a second", "", *lines])


def _names(daemons: int) -> list[str]:
    wide = len(str(daemons))
    return [f"daemon-{number:0{wide}}" for number in range(daemons)]


def _overload(
    daemons: Sequence[GroupDaemon], partitions: int, weights: Mapping[Partition, float]
) -> list[str]:
    said = []
    if partitions < len(daemons):
        said.append(f"partitions: {partitions} keep {partitions} of {len(daemons)} daemons busy")
    said += [
        f"compute: {each.name} would be {each.utilisation_ratio:.0%} busy"
        for each in daemons
        if each.utilisation_ratio >= FULL
    ]
    return said
