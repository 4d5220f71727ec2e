"""The memory of the largest pass is what a device has less behind it. A fake device, which counts."""

import gc
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import pytest
import torch

from engine import pass_memory
from engine.engine import Engine
from engine.graphs.runner import Capture
from engine.model.loaded import LoadedModel
from engine.pass_memory import measured_pass_bytes, pass_bytes
from engine.step import Chunk
from tests.engine.graphs.test_engine_graphs import Prepared, again
from tests.engine.oracle import tiny

ROW, LOGITS, GRAPH = 1000, 70, 333


class Device:
    """Its allocator keeps what the largest pass took; a captured pass takes memory of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capture: Capture | None) -> None:
        self.passes: list[tuple[int, int]] = []
        self.engines: WeakSet[Engine] = WeakSet()

        def made(*args: Any, **given: Any) -> Engine:
            engine = Engine(*args, **given, attention=Prepared(), capture=capture)
            run = engine.execute

            def execute(batch: Sequence[Chunk]) -> object:
                self.passes.append((sum(len(each.tokens) for each in batch), len(batch)))
                return run(batch)

            engine.execute = execute  # type: ignore[method-assign]  # counted
            self.engines.add(engine)
            return engine

        monkeypatch.setattr(pass_memory, "Engine", made)
        monkeypatch.setattr(pass_memory, "available_bytes", self.available)

    def available(self, device: torch.device) -> int:
        cached = max((ROW * rows + LOGITS * sampled for rows, sampled in self.passes), default=0)
        held = sum(
            each.pool.bytes + GRAPH * (each.graphs.captures if each.graphs else 0) for each in self.engines
        )
        return (1 << 30) - cached - held


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return tiny("llama", layers=1)


@pytest.mark.parametrize("rows", [40, 64, 1500])
def test_it_is_that_of_the_largest_pass_and_of_captures_beside_them(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    device = Device(monkeypatch, again)
    answers = min(rows, 64)
    largest = max(ROW * rows + LOGITS, answers * (ROW + LOGITS))
    assert measured_pass_bytes(model, rows, 16) == largest + 2 * GRAPH  # one sampled row, or all
    assert (rows, 1) in device.passes
    assert (answers, answers) in device.passes
    gc.collect()
    assert not device.engines


def test_on_a_cpu_it_is_counted(model: LoadedModel) -> None:
    assert 0 < pass_bytes(model, 16, 16) < pass_bytes(model, 1024, 16)
