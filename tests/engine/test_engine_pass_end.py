"""A pass ends when the device has run it: its time and its faults are its own. A fake device, own clock."""

from dataclasses import dataclass

import pytest
import torch

from engine import engine as module
from engine.engine import Engine
from engine.step import Chunk
from regions.tape import Retention, Tape
from scheduler.costs import LearningExecutor, OnlineCosts, guess
from tests.engine.oracle import tiny

BAR = [5, 6, 7, 8]
COSTS = guess(4)
TAKES = 3 * COSTS.batch_ns([(0, len(BAR))])


@dataclass
class Device:
    """Runs what is queued when it is awaited; ``fault``: what that raises, once."""

    now: int = 0
    fault: str = ""

    def finish(self, device: torch.device) -> None:
        self.now += TAKES
        if self.fault:
            message, self.fault = self.fault, ""
            raise RuntimeError(message)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    found = Device()
    monkeypatch.setattr(module, "finish", found.finish)
    return found


@pytest.fixture
def engine() -> Engine:
    return Engine(tiny("llama"), blocks=40, block_size=4)


def opened(engine: Engine) -> Tape:
    tape = engine.open_tape("t", [1, 2], Retention(40))
    engine.append(tape, [BAR])
    return tape


def test_costs_count_the_devices_time_where_nothing_is_sampled(device: Device, engine: Engine) -> None:
    tape, costs = opened(engine), OnlineCosts(COSTS)
    began, expected = device.now, TAKES / COSTS.batch_ns([(tape.live_tokens, len(BAR))])
    assert tape.acquire(len(BAR))
    LearningExecutor(engine, costs, lambda: device.now).execute([Chunk(tape, BAR, sample=False)])
    assert device.now == began + TAKES
    assert costs.factor == pytest.approx(expected)
    tape.release()


def test_a_fault_is_raised_by_its_own_pass_which_has_no_effect(device: Device, engine: Engine) -> None:
    twin = Engine(engine.model, blocks=40, block_size=4)
    tape, unharmed = opened(engine), opened(twin)
    device.fault = "CUDA error: an illegal memory access was encountered"
    assert tape.acquire(len(BAR))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        engine.execute([Chunk(tape, [9, 9, 9, 9], sample=False)])
    for owner, each in ((engine, tape), (twin, unharmed)):
        owner.append(each, [BAR])
    assert tape.version == unharmed.version
    assert engine.answer(tape, [3, 4], max_tokens=3) == twin.answer(unharmed, [3, 4], max_tokens=3)
    tape.release()
    unharmed.release()
