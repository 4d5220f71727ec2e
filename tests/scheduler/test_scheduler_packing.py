"""Many sessions with a bar each: how many rows the model's layers see in a pass (a row is a token)."""

import pytest

from daemon.config.schema import Config
from daemon.engine.build import limits_of
from engine.step import Chunk
from scheduler.interfaces import PriorityClass
from tests.kit.scheduler.fakes import FakeTape
from tests.kit.scheduler.harness import Harness

SESSIONS = 100
ENOUGH = 256
"""Rows from which a product runs at its full rate."""


def hundred(tokens: int) -> tuple[Harness, list[FakeTape]]:
    """The daemon's default limits, and a bar of so many tokens for each session, appended together."""
    h = Harness(blocks=4000, limits=limits_of(Config()), block_size=16)
    tapes = [h.tape(f"S{i:02d}", retention=1000) for i in range(SESSIONS)]
    h.scheduler.append(*((tape, h.items(range(1, tokens + 1))) for tape in tapes))
    return h, tapes


def rows(batch: list[Chunk]) -> int:
    return sum(len(chunk.tokens) for chunk in batch)


@pytest.mark.parametrize("tokens", [3, 4, 6, 12, 20, 23])
def test_short_appends_that_arrive_together_fill_passes(tokens: int) -> None:
    h, tapes = hundred(tokens)
    h.run()
    passes = [rows(batch) for batch in h.executor.batches]
    assert sum(passes) == SESSIONS * tokens
    assert all(found >= ENOUGH for found in passes[:-1])
    assert [tape.version for tape in tapes] == [1] * SESSIONS


@pytest.mark.parametrize("tokens", [6, 20])
@pytest.mark.parametrize("asked", [1, 5, 15])
def test_and_so_do_their_standing_questions(tokens: int, asked: int) -> None:
    h, tapes = hundred(tokens)
    by_name = {tape.name: tape for tape in tapes}

    def ask(tape: object, version: int, records: object) -> None:
        for question in range(6):
            prompt = range(100 * question, 100 * question + asked)
            h.ask(prompt, cls=PriorityClass.FLASH, tape=by_name[tape.name], forked=True)

    h.scheduler.subscribe(ask)
    h.run()
    assert len(h.done) == 6 * SESSIONS
    passes = [rows(batch) for batch in h.executor.batches]
    assert sum(passes) == SESSIONS * (tokens + 6 * asked)
    appending = [
        rows(batch) for batch in h.executor.batches if any(isinstance(c.target, FakeTape) for c in batch)
    ]
    assert all(found >= ENOUGH for found in appending[:-1])
    assert all(found >= ENOUGH for found in passes if found not in (appending[-1], passes[-1]))
