"""What to do so that a running daemon does as another configuration says."""

from dataclasses import dataclass

import msgspec

from daemon.config.schema import Config, SessionConfig
from daemon.config.standing import questions_of
from daemon.config.symbols import Rolls, rolls_of
from flash.question import Question

WINDOW = (
    "model",
    "symbol",
    "more_symbols",
    "price_decimals",
    "scale",
    "volume_decimals",
    "lines",
    "unit",
    "prices_in",
    "volumes_in",
    "interval",
    "dates",
    "rollup",
    "rollup_tokens",
)
"""Keys of a session that its window depends on: with another value it begins again, empty."""
LIVE = ("sessions", "patterns", "symbols", "questions", "standing", "bars")
"""Tables that change while the daemon runs; `foretick` takes the others at its start."""


@dataclass(frozen=True, slots=True)
class Changes:
    """The steps from one configuration to another, in this order.

    A session that begins again is in ``removed`` and ``added``. Those ``changed`` keep their windows.
    ``questions`` are those of sessions that stay, where they differ. ``fixed``: keys with other values that
    need a restart, and stay as they are.
    """

    removed: tuple[str, ...]
    added: tuple[SessionConfig, ...]
    changed: tuple[SessionConfig, ...]
    questions: dict[str, tuple[Question, ...]]
    fixed: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.removed or self.added or self.changed or self.questions)


def changes(old: Config, new: Config) -> Changes:
    """The steps from ``old`` to ``new``; both are valid."""
    before, after = ({s.name: s for s in resolved(config)} for config in (old, new))
    again = {
        name
        for name in after.keys() & before.keys()
        if any(getattr(before[name], key) != getattr(after[name], key) for key in WINDOW)
    }
    staying = [s for name, s in after.items() if name in before and name not in again]
    asked = questions_by_session(old), questions_by_session(new)
    return Changes(
        removed=tuple(name for name in before if name not in after or name in again),
        added=tuple(s for name, s in after.items() if name not in before or name in again),
        changed=tuple(
            s for s in staying if s != before[s.name] or rolls_among(old, s) != rolls_among(new, s)
        ),
        questions={s.name: asked[1][s.name] for s in staying if asked[0][s.name] != asked[1][s.name]},
        fixed=tuple(_fixed(old, new)),
    )


def of_known_models(old: Config, new: Config) -> Config:
    """``new``, whose sessions and patterns of models that come with a restart stay as in ``old``,
    or do not come yet."""
    known = {"", old.model.name, *(each.name for each in old.models)}
    before = {each.name: each for each in old.sessions}
    sessions = (each if each.model in known else before.get(each.name) for each in new.sessions)
    there = {each.match for each in new.patterns if each.model in known}
    matched = {each.match: each for each in old.patterns if each.match not in there}
    patterns = (each if each.model in known else matched.get(each.match) for each in new.patterns)
    return msgspec.structs.replace(
        new,
        sessions=tuple(each for each in sessions if each is not None),
        patterns=tuple(each for each in patterns if each is not None),
    )


def live(old: Config, new: Config) -> Config:
    """``new`` as far as a daemon that began with ``old`` can follow."""
    return msgspec.structs.replace(old, **{name: getattr(new, name) for name in LIVE})


def resolved(config: Config) -> tuple[SessionConfig, ...]:
    """The sessions, with every setting of `bars` as their own."""
    return tuple(
        msgspec.structs.replace(each, **msgspec.structs.asdict(each.bars(config.bars)))
        for each in config.sessions
    )


def rolls_among(config: Config, session: SessionConfig) -> dict[str, Rolls]:
    """Of the session's symbols that are continuous contracts."""
    return {symbol: own for symbol, own in rolls_of(config.symbols).items() if symbol in session.symbols}


def questions_by_session(config: Config) -> dict[str, tuple[Question, ...]]:
    """Each session's standing questions, in the order they are asked."""
    found: dict[str, list[Question]] = {session.name: [] for session in config.sessions}
    for asked in questions_of(config):
        found[asked.session].append(asked.question)
    return {name: tuple(questions) for name, questions in found.items()}


def _fixed(old: Config, new: Config) -> list[str]:
    """Dotted keys outside the live tables that differ."""
    found = []
    for table in (field.name for field in msgspec.structs.fields(Config)):
        ours, theirs = getattr(old, table), getattr(new, table)
        if table in LIVE or ours == theirs:
            continue
        if isinstance(ours, tuple):
            found.append(table)
            continue
        keys = [field.name for field in msgspec.structs.fields(ours)]
        found += [f"{table}.{key}" for key in keys if getattr(ours, key) != getattr(theirs, key)]
    return found
