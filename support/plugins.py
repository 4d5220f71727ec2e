"""Plug-ins: what other packages add by entry points, loaded only where there are any.

A plug-in runs with the rights of the program that loads it.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TypeGuard, TypeVar

T = TypeVar("T")
OWN = "foretick"
"""The distribution whose entry points are no plug-ins."""
COMMANDS, FORMATS = "foretick.commands", "foretick.formats"
QUESTIONS, SINKS, SOURCES = "foretick.questions", "foretick.sinks", "foretick.sources"
GROUPS = {
    COMMANDS: "command",
    FORMATS: "format",
    QUESTIONS: "questions",
    SINKS: "sink",
    SOURCES: "source",
}
"""Groups of entry points, and what one of each adds."""
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")


class PluginError(Exception):
    """A plug-in that cannot be used: one sentence, which names its package."""


@dataclass(frozen=True)
class Plugin:
    """An installed package, and what it adds, such as ``source lattice``."""

    package: str
    version: str
    adds: tuple[str, ...]


def own(group: str) -> Mapping[str, EntryPoint]:
    """Foretick's own entry points of a group, by name."""
    return {each.name: each for each in _every() if each.group == group and _package(each) == OWN}


def found(group: str, taken: Collection[str]) -> Mapping[str, EntryPoint]:
    """Those of other packages, by name, not loaded. ``taken``: names that are Foretick's own.

    Raises PluginError for a name that is taken, by us or by another package, or that cannot be one.
    """
    names: dict[str, EntryPoint] = {}
    for each in _every():
        if each.group != group or (package := _package(each)) == OWN:
            continue
        what = f"the package {package} has the {GROUPS[group]} {each.name!r}"
        if _NAME.fullmatch(each.name) is None:
            raise PluginError(f"{what}: a name is of a to z, _ and, but for its beginning, digits")
        if each.name in taken or each.name in names:
            other = _package(names[each.name]) if each.name in names else OWN
            raise PluginError(f"{what}, which {other} has already: uninstall one of them")
        names[each.name] = each
    return names


def load(
    group: str, taken: Collection[str], kind: str, fits: Callable[[object], TypeGuard[T]]
) -> Mapping[str, T]:
    """The same, loaded; each is to be a ``kind``, as ``fits`` finds. Raises PluginError."""
    return {name: loaded(each, kind, fits) for name, each in found(group, taken).items()}


def loaded(entry: EntryPoint, kind: str, fits: Callable[[object], TypeGuard[T]]) -> T:
    """What an entry point refers to. Raises PluginError where its code fails, whatever it raises."""
    what = f"the {GROUPS[entry.group]} {entry.name} of the package {_package(entry)}"
    try:
        value: object = entry.load()
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise PluginError(f"{what} cannot be loaded ({entry.value}): {why[:500]}") from error
    if not fits(value):
        raise PluginError(f"{what} is no {kind} ({entry.value})")
    return value


def installed() -> tuple[Plugin, ...]:
    """All packages with plug-ins, by name; nothing is loaded."""
    adds: dict[tuple[str, str], list[str]] = {}
    for each in _every():
        if each.dist is not None and _package(each) != OWN:
            what = f"{GROUPS[each.group]} {each.name}"
            adds.setdefault((_package(each), each.dist.version), []).append(what)
    return tuple(Plugin(*who, tuple(sorted(names))) for who, names in sorted(adds.items()))


@cache
def _every() -> tuple[EntryPoint, ...]:
    """Of all packages, in our groups: each call of `entry_points` reads the metadata of every one again."""
    found = entry_points()
    return tuple(each for group in GROUPS for each in found.select(group=group))


def _package(entry: EntryPoint) -> str:
    return "" if entry.dist is None else entry.dist.name
