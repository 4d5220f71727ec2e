"""The scheduler's executor over the engine: the one place where the two floors' types meet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from engine.engine import Engine, Work
from engine.memory import DeviceOutOfMemory
from regions.fork import Fork
from regions.tape import Tape
from scheduler.types import Chunk, OutOfMemory, Row


class DeviceExecutor:
    """Runs the scheduler's batches as forward passes."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def execute(self, batch: Sequence[Chunk]) -> list[Row | None]:
        """One forward pass; see `scheduler.types.Executor`."""
        works = [
            Work(cast("Tape | Fork", c.target), c.tokens, c.sample, c.choices, c.sampling) for c in batch
        ]
        try:
            choices = self._engine.forward(works)
        except DeviceOutOfMemory as error:
            raise OutOfMemory(str(error)) from error
        return [None if c is None else Row(c.token, c.top1, c.top2, c.error) for c in choices]
