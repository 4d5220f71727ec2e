"""How many sessions a running engine could have, and how many standing questions each of them.

Equations 15 and 16 of *Attention Once*, by the same code as `foretick plan` (`flash.capacity`). Here windows,
bars and questions are those of the open sessions, and passes take what they have taken so far.
"""

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from daemon.config.schema import SessionConfig
from daemon.engine.build import limits_of
from daemon.engine.service import ServedModel
from flash.capacity import MAX_SESSIONS, AskedTimes, Background, Shape, WithHost, asked_times, max_sessions
from regions.tape import Tape

SAMPLED = 16
"""Sessions that stand for all of a model: each heartbeat looks at them."""


class Load(NamedTuple):
    """A model's ``sessions``, each with an update every ``data`` seconds."""

    background: Background
    sessions: int
    data: float


def loads_of(models: Sequence[ServedModel]) -> list[Load]:
    """Those of the models that have read a bar. An interval of every session counts as a bar."""
    return [load for each in models if (load := _load_of(each)) is not None]


def questions_most(loads: Sequence[Load], others: float) -> int:
    """Return `k_max`, of several models the least; 0 without any. ``others``: share of other passes."""
    return min((load.background.k_max(load.sessions, load.data, others) for load in loads), default=0)


def sessions_most(loads: Sequence[Load], others: float) -> int:
    """Return how many sessions the device carries, of several models in their proportion; 0 without any."""
    now = sum(load.sessions for load in loads)

    def fits(n: int) -> bool:
        used = (load.background.used(round(n * load.sessions / now), load.data) for load in loads)
        return sum(used) + others < 1

    most = max_sessions(fits) if now else 0
    return MAX_SESSIONS if most is None else most


def _load_of(model: ServedModel) -> Load | None:
    """None where no session has a bar."""
    tapes = list(model.built.tapes.values())  # at once: sessions come and go on another thread
    every = -(-len(tapes) // SAMPLED) or 1
    read = [
        (tape, session)
        for tape in tapes[::every]
        if (session := model.sessions.settings(tape.name)) is not None and tape.live_records
    ]
    if not read:
        return None
    config, built = model.sessions.config, model.built
    context = fmean(len(tape.prefix) + tape.live_tokens for tape, _ in read)
    bar = fmean(tape.live_tokens / max(1, tape.live_records) for tape, _ in read)  # it may be emptied now
    intervals = [session.bars(config.bars).interval for _, session in read]
    questions = tuple(
        (tokens, answer, times / len(read))
        for (tape, session), interval in zip(read, intervals, strict=True)
        for tokens, answer, times in _asked(model, tape, session, interval)
    )
    ready = len(built.prompt.ready()) if config.flash.early_exit else 0
    shape = Shape(round(context), max(1, round(bar)), questions, ready)
    bars_per_s = fmean(
        len(session.symbols) * 1e9 / interval for (_, session), interval in zip(read, intervals, strict=True)
    )
    background = Background(WithHost(built.costs, built.costs.base), limits_of(config), shape)
    return Load(background, len(tapes), 1 / bars_per_s)


def _asked(model: ServedModel, tape: Tape, session: SessionConfig, interval: int) -> AskedTimes:
    standing = model.parts.registry.standing(session.name)
    return asked_times(standing, interval, lambda each: model.built.prefixes.tokens(each, tape.prefix))
