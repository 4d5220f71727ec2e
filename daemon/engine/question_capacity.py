"""How many standing questions each session could have: equation 16 of *Attention Once*, of a running engine.

`foretick plan` has the same code (`flash.capacity`). Here windows, bars and questions are those of the open
sessions, and passes take what they have taken so far.
"""

from collections.abc import Sequence
from statistics import fmean

from daemon.config.schema import SessionConfig
from daemon.engine.build import limits_of
from daemon.engine.service import ServedModel
from flash.capacity import AskedTimes, Background, Shape, WithHost, asked_times
from regions.tape import Tape

SAMPLED = 16
"""Sessions that stand for all of a model: each heartbeat looks at them."""


def questions_most(models: Sequence[ServedModel], others: float) -> int:
    """Return `k_max`, of several models the least; 0 before a bar was read.

    ``others``: share of the time in passes for other work. An interval of every session counts as a bar.
    """
    found = (_of_model(each, others) for each in models)
    return min((most for most in found if most is not None), default=0)


def _of_model(model: ServedModel, others: float) -> int | None:
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
    return background.k_max(len(tapes), 1 / bars_per_s, others)


def _asked(model: ServedModel, tape: Tape, session: SessionConfig, interval: int) -> AskedTimes:
    standing = model.parts.registry.standing(session.name)
    return asked_times(standing, interval, lambda each: model.built.prefixes.tokens(each, tape.prefix))
