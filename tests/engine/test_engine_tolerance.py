"""The bound on rounding separates mistakes from rounding: the smallest memory errors are far beyond it."""

from collections.abc import Sequence

import pytest
import torch

from engine.engine import Engine
from regions.ephemeral import Fork
from regions.extents import Extent
from regions.frozen import Context
from regions.tape import Retention
from tests.engine.oracle import ARCHITECTURES, tiny
from tests.kit import tolerance
from tests.kit.engine import ask

FAR = 25
"""A mistake exceeds the bound by at least this factor."""
FROZEN = [11, 12, 13, 14, 15]
RECORDS = [[21, 22, 23, 24, 25, 26], [31, 32, 33, 34, 35]]
QUESTION = [41, 42, 43]


class Session:
    """A frozen prefix, two records in two position frames, and the logits of a question to them."""

    def __init__(self, architecture: str) -> None:
        self.model = tiny(architecture, layers=2)
        self.engine = Engine(self.model, blocks=16, block_size=4)
        self.tape = self.engine.open_tape("tape", FROZEN, Retention(90))
        for record in RECORDS:
            self.engine.append(self.tape, [record])
            self.tape.new_frame(at=2)

    def ask(self, extents: Sequence[Extent]) -> torch.Tensor:
        """Logits of the question after ``extents``."""
        written = sum(map(len, RECORDS))
        context = Context(tuple(extents), coord=written, origin=self.tape.extents[-1].origin)
        fork = Fork(self.engine.pool, frame_limit=1 << 20, context=context)
        logits = ask(self.engine, fork, QUESTION)
        fork.release()
        return logits


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_rotation_off_by_one_position_and_a_lost_extent_are_far_beyond_rounding(architecture: str) -> None:
    session = Session(architecture)
    extents = session.tape.extents
    assert len(extents) == 3
    right = session.ask(extents)
    bound = tolerance.of_model(session.model, tolerance.largest(right))
    last = extents[-1]
    for wrong in (
        (*extents[:-1], last._replace(origin=last.origin + 1)),
        extents[:-1],
        (*extents[:-1], last._replace(length=last.length - 1)),
    ):
        assert tolerance.apart(session.ask(wrong), right) > FAR * bound
    session.tape.release()
