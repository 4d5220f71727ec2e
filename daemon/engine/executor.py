"""The scheduler's executor over the engine: the one place where the two floors' types meet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from daemon.engine.readers import StreamReader
from engine.engine import Engine, Work
from engine.memory import DeviceOutOfMemory
from engine.sampling import Choice
from regions.ephemeral import Fork
from regions.tape import Tape
from scheduler.types import Chunk, OutOfMemory, Row


class DeviceExecutor:
    """Runs the scheduler's batches as forward passes."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def execute(self, batch: Sequence[Chunk]) -> list[Row | None]:
        """One forward pass; see `scheduler.types.Executor`."""
        works = [Work(_target(c), c.tokens, c.sample, c.choices, c.sampling, c.drafts) for c in batch]
        try:
            choices = self._engine.forward(works)
        except DeviceOutOfMemory as error:
            raise OutOfMemory(str(error)) from error
        return [None if choice is None else _row(choice) for choice in choices]


def _target(chunk: Chunk) -> Tape | Fork:
    if isinstance(chunk.target, StreamReader):
        return chunk.target.fork
    return cast("Tape | Fork", chunk.target)


def _row(choice: Choice) -> Row:
    accepted = tuple(_row(each) for each in choice.accepted)
    return Row(choice.token, choice.top1, choice.top2, choice.error, accepted)
