"""Which daemon of a group has which partition, so that none is far busier than the others and few move.

A pure rule of weights, which may be counts, records a second or shares of a device's time. Longest processing
time first (Graham, 1969) stays within 4/3 - 1/(3m) of the best maximum that m members can have. It says
nothing about moves, so owners keep their partitions up to the maximum that it reaches, and as few move as
leave no member without any.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence, Sized
from typing import TypeVar

__all__ = ["loads_of", "moves", "place"]

P = TypeVar("P", bound=tuple[str, int])
SETTLED = 1.1
"""While the busiest member has at most this many times what it would have after moves, nothing moves."""
_STEPS = 16
_ROUNDING = 1e-9


def place(
    weights: Mapping[P, float], members: Sequence[str], owners: Mapping[P, str] | None = None
) -> dict[P, str]:
    """A member for each partition; ``weights``: at least 0. ``owners``: who has which now, if anyone.

    Equal arguments give equal results, in any order. Raises ValueError without members, and for a weight that
    is negative or no number.
    """
    if not members or len(set(members)) < len(members):
        raise ValueError("members must be named, each once")
    if bad := [partition for partition, weight in weights.items() if not 0 <= weight < float("inf")]:
        raise ValueError(f"weights must be at least 0, unlike those of {sorted(bad)}")
    names = sorted(members)
    kept = {p: name for p, name in (owners or {}).items() if p in weights and name in names}
    spread = _longest_first(weights, names, kept, {})
    most = max(loads_of(weights, spread, names).values())
    if _is_settled(weights, names, kept, most):
        return kept
    found = [spread]
    for step in range(_STEPS):
        # keeping less than the maximum leaves room for what is put behind it
        held = _held(weights, names, kept, most * (1 - step / _STEPS))
        placed = _longest_first(weights, names, kept, held)
        busiest = max(loads_of(weights, placed, names).values())
        if busiest <= most * (1 + _ROUNDING) and not _idle(weights, names, placed):
            found.append(placed)
    return min(found, key=lambda placed: len(moves(kept, placed)))


def moves(before: Mapping[P, str], after: Mapping[P, str]) -> dict[P, tuple[str, str]]:
    """The partitions that have another owner ``after`` than ``before``: the old one, and the new one."""
    return {p: (before[p], name) for p, name in sorted(after.items()) if before.get(p, name) != name}


def loads_of(weights: Mapping[P, float], placed: Mapping[P, str], members: Iterable[str]) -> dict[str, float]:
    """The weight that each member has."""
    loads = dict.fromkeys(members, 0.0)
    for partition, name in placed.items():
        loads[name] += weights[partition]
    return loads


def _is_settled(
    weights: Mapping[P, float], names: Collection[str], kept: Mapping[P, str], most: float
) -> bool:
    """Whether every partition has an owner already, every member that can has one, and moves gain little."""
    if len(kept) < len(weights) or _idle(weights, names, kept):
        return False
    now = max(loads_of(weights, kept, names).values())
    heaviest = sorted(weights.values(), reverse=True)
    pairs = sum(heaviest[len(names) - 1 : len(names) + 1]) if len(heaviest) > len(names) else 0.0
    least = max(sum(heaviest) / len(names), heaviest[0], pairs)
    bound = (4 / 3 - 1 / (3 * len(names))) * least
    return now <= max(most, min(SETTLED * most, bound)) * (1 + _ROUNDING)


def _idle(weights: Sized, names: Sized, placed: Mapping[P, str]) -> bool:
    """Whether some member has nothing, though there are partitions for all."""
    return len(set(placed.values())) < min(len(names), len(weights))


def _held(
    weights: Mapping[P, float], names: Iterable[str], kept: Mapping[P, str], most: float
) -> dict[P, str]:
    """What owners keep: the heaviest first, while they carry at most ``most``."""
    loads, held = dict.fromkeys(names, 0.0), {}
    for partition in _heaviest(weights):
        name = kept.get(partition)
        if name is not None and loads[name] + weights[partition] <= most * (1 + _ROUNDING):
            loads[name] += weights[partition]
            held[partition] = name
    return held


def _longest_first(
    weights: Mapping[P, float], names: Sequence[str], kept: Mapping[P, str], held: Mapping[P, str]
) -> dict[P, str]:
    """What is not ``held``, the heaviest first, to who has least; among equals, to its owner."""
    placed, loads = dict(held), loads_of(weights, held, names)
    counts = {name: sum(1 for each in held.values() if each == name) for name in names}
    for partition in _heaviest(weights):
        if partition not in placed:
            owner = kept.get(partition)
            # weights of 0 are spread by number
            name = min(names, key=lambda each: (loads[each], counts[each], each != owner, each))
            placed[partition] = name
            loads[name] += weights[partition]
            counts[name] += 1
    return placed


def _heaviest(weights: Mapping[P, float]) -> list[P]:
    return sorted(weights, key=lambda partition: (-weights[partition], partition))
