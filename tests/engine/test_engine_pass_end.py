"""A pass ends when the device has run it: its time and its faults are its own. A fake device, own clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from engine.attention.metadata import AttentionMetadata
from engine.engine import Engine
from engine.model.loaded import LoadedModel
from engine.pass_end import PassEnd
from engine.seeding import Sampling
from engine.step import Chunk, SampledToken
from regions.tape import Retention, Tape
from scheduler.costs import LearningExecutor, OnlineCosts, guess
from scheduler.interfaces import Limits, PriorityClass
from scheduler.observer import Observer
from scheduler.request import Request, RequestSpec
from scheduler.scheduler import Scheduler
from tests.engine.graphs.test_engine_graphs import Prepared, again
from tests.engine.oracle import tiny

BAR = [5, 6, 7, 8]
COSTS = guess(4)
TAKES = 3 * COSTS.batch_ns([(0, len(BAR))])
LAYOUT = 1_000_000
"""What the host takes before it queues anything, ns."""


class Event:
    """Reached when the device gets there."""

    device: Device

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at = 0

    def record(self, stream: object) -> None:
        self.at = max(self.device.now, self.device.ends)

    def synchronize(self) -> None:
        self.device.catch_up(self.at)

    def elapsed_time(self, ended: Event) -> float:
        return (ended.at - self.at) / 1e6


@dataclass
class Device:
    """Runs what is queued while the host goes on; ``fault``: what is raised when it is awaited, once."""

    now: int = 0
    ends: int = 0
    """When all that is queued has run."""
    fault: str = ""
    fetched: list[int] = field(default_factory=list)
    """Numbers of each transfer back."""
    waits: int = 0

    def catch_up(self, at: int) -> None:
        self.waits += 1
        self.now = max(self.now, at)
        if self.fault:
            message, self.fault = self.fault, ""
            raise RuntimeError(message)

    def layout(self) -> None:
        self.now += LAYOUT

    def queue(self) -> None:
        self.ends = max(self.now, self.ends) + TAKES


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    found, empty = Device(), torch.empty
    Event.device = found
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)

    def pinned(*shape: Any, pin_memory: bool = False, **given: Any) -> torch.Tensor:
        tensor = empty(*shape, **given)
        if pin_memory:
            found.fetched.append(tensor.numel())
        return tensor

    monkeypatch.setattr(torch, "empty", pinned)
    monkeypatch.setattr("engine.sampling.FEW", 0)  # or a CPU's rows are chosen by other code
    return found


@pytest.fixture
def model() -> LoadedModel:
    return tiny("llama")


def on(device: Device, model: LoadedModel, **given: Any) -> Engine:
    """An engine whose passes run on the fake device."""
    engine = Engine(model, blocks=40, block_size=4, **given)
    engine._end = PassEnd(torch.device("cuda"))
    return engine


@pytest.fixture
def engine(device: Device, model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> Engine:
    lay_out, forward = AttentionMetadata.__init__, LoadedModel.forward

    def laid_out(*args: Any, **given: Any) -> None:
        device.layout()
        lay_out(*args, **given)

    def queued(*args: Any, **given: Any) -> torch.Tensor:
        device.queue()
        return forward(*args, **given)

    monkeypatch.setattr(AttentionMetadata, "__init__", laid_out)
    monkeypatch.setattr(LoadedModel, "forward", queued)
    return on(device, model)


def opened(engine: Engine) -> Tape:
    tape = engine.open_tape("t", [1, 2], Retention(40))
    engine.append(tape, [BAR])
    return tape


@pytest.mark.parametrize("sample", [False, True])
def test_costs_count_the_devices_time_alone(device: Device, engine: Engine, sample: bool) -> None:
    tape, costs = opened(engine), OnlineCosts(COSTS)
    began, expected = device.now, TAKES / COSTS.batch_ns([(tape.live_tokens, len(BAR))])
    assert tape.acquire(len(BAR))
    LearningExecutor(engine, costs, lambda: device.now).execute([Chunk(tape, BAR, sample=sample)])
    assert device.now == began + LAYOUT + TAKES
    assert engine.took_ns == TAKES
    assert costs.factor == pytest.approx(expected)
    tape.release()


def test_a_captured_pass_has_the_time_of_its_replay(device: Device, engine: Engine) -> None:
    captured = on(device, engine.model, attention=Prepared(), capture=again)
    tape = opened(captured)
    for _ in range(2):
        captured.append(tape, [BAR])
    assert captured.graphs is not None
    assert captured.graphs.replays > 0
    assert captured.took_ns == TAKES
    tape.release()


def test_utilisation_and_what_a_request_took_count_the_devices_time(device: Device, engine: Engine) -> None:
    took: list[int] = []

    class Seen(Observer):
        def batch(self, tokens: Any, rows: int, forward_ns: int) -> None:
            took.append(forward_ns)

    tape, observer = opened(engine), Seen()
    executor = LearningExecutor(engine, OnlineCosts(COSTS), lambda: device.now)
    scheduler = Scheduler(executor, engine.pool, Limits(), lambda: device.now, observer)
    done: list[Request] = []
    spec = RequestSpec(
        cls=PriorityClass.SESSION,
        session="t",
        prompt=[3, 4, 9],
        max_tokens=1,
        on_done=done.append,
        open_prompt=engine.open_prompt,
    )
    scheduler.submit(Request(spec))
    while scheduler.step():
        pass
    assert took == [TAKES]
    assert [each.engine_ns for each in done] == [TAKES]
    tape.release()


def test_a_pass_waits_once_and_brings_back_all_it_found_in_one_transfer(
    device: Device, engine: Engine
) -> None:
    """Chosen tokens, logits of choices and log probabilities, with and without drawing; drafts, too."""
    tape = opened(engine)
    forks = [tape.fork() for _ in range(3)]
    assert all(fork.acquire(3) for fork in forks)
    device.waits = 0
    device.fetched.clear()
    found = engine.execute(
        [
            Chunk(forks[0], [3, 4], choices=(5, 9, 11), top_logprobs=2),
            Chunk(forks[1], [3, 4], sampling=Sampling(0.7, 3, 0, top_k=5)),
            Chunk(forks[2], [3, 4, 8], drafts=1, top_logprobs=0),
        ]
    )
    assert all(isinstance(each, SampledToken) for each in found)
    assert (device.waits, len(device.fetched)) == (1, 1)
    for fork in forks:
        fork.release()
    tape.release()


def test_a_fault_is_raised_by_its_own_pass_which_has_no_effect(device: Device, engine: Engine) -> None:
    twin = on(device, engine.model)
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
