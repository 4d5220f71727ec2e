"""The order of queued copies on a GPU, checked without one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from regions.allocator import Run
from regions.kv_tensors import KVPool, LayerShape
from regions.offload.copies import DirectCopies, StreamCopies, copies_for


class FakeEvent:
    """Of a copy that has not ended, and took 2.5 ms once it is awaited."""

    log: list[str]

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        self.log.append("host waits")

    def elapsed_time(self, ended: FakeEvent) -> float:
        assert ended is not self
        return 2.5


class FakeStream:
    """Records the calls."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def record_event(self, event: FakeEvent) -> FakeEvent:
        self.log.append(f"{self.name} records")
        event.log = self.log
        return event

    def wait_event(self, event: object) -> None:
        self.log.append(f"{self.name} waits for the event")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    log: list[str] = []
    computing = FakeStream(log, "computing")

    @contextlib.contextmanager
    def on(stream: FakeStream) -> Iterator[None]:
        log.append(f"on {stream.name}")
        yield
        log.append("off")

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream(log, "copying"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: computing)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    return log


def side(log: list[str], device: str) -> Any:
    """A pool on ``device`` that only says it was copied to."""
    return SimpleNamespace(device=torch.device(device), copy_from=lambda *_: log.append(f"copy to {device}"))


def test_a_copy_to_the_host_follows_what_was_computed_and_blocks_nothing(log: list[str]) -> None:
    copies = StreamCopies(torch.device("cuda"))
    transfer = copies(side(log, "cpu"), [Run(0, 1)], side(log, "cuda"), [Run(0, 1)])
    begun = ["copying waits for computing", "on copying", "copying records"]
    assert log == [*begun, "copy to cpu", "copying records", "off"]
    assert not transfer.query()
    transfer.synchronize()
    assert log[-1] == "host waits"
    assert transfer.took_ns == 2_500_000


def test_what_is_computed_next_waits_for_a_copy_to_the_device(log: list[str]) -> None:
    copies = StreamCopies(torch.device("cuda"))
    copies(side(log, "cuda"), [Run(0, 1)], side(log, "cpu"), [Run(0, 1)])
    assert log[-3:] == ["copying records", "off", "computing waits for the event"]


class Transfers(TorchDispatchMode):
    """Notes each copy to or from a pool, and whether both sides are contiguous."""

    def __init__(self, pool: KVPool) -> None:
        super().__init__()
        self._memory = {each.untyped_storage().data_ptr() for each in (*pool.keys, *pool.values)}
        self.contiguous: list[bool] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default:
            sides = args[:2]
            if any(side.untyped_storage().data_ptr() in self._memory for side in sides):
                self.contiguous.append(all(side.is_contiguous() for side in sides))
        return func(*args, **(kwargs or {}))


class OnDevice(KVPool):
    """A pool that says it is on a GPU; its memory is the host's."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda")


LAYERS = [LayerShape(3, 4, 2), LayerShape(2, 4, 4)]


@pytest.mark.parametrize(
    ("on_device", "on_host", "runs"),
    [
        ([Run(5, 9)], [Run(2, 6)], 1),
        ([Run(7, 8), Run(1, 3), Run(9, 10)], [Run(0, 4)], 1),
        ([Run(3, 7)], [Run(8, 10), Run(1, 2), Run(2, 3)], 2),
    ],
)
def test_a_request_takes_two_transfers_a_layer_and_run_of_the_host(
    on_device: list[Run], on_host: list[Run], runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    zeros = torch.zeros  # pinned memory needs CUDA
    monkeypatch.setattr(torch, "zeros", lambda *shape, pin_memory, **given: zeros(*shape, **given))
    device, host = OnDevice(LAYERS, 12, block_size=2), KVPool(LAYERS, 12, block_size=2, pin=True)
    for number, each in enumerate((*device.keys, *device.values, *host.keys, *host.values)):
        each.copy_(torch.arange(each.numel()).view(each.shape) + 1000 * number)
    tensors = [(*pool.keys, *pool.values) for pool in (device, host)]
    places = [[block for run in side for block in range(*run)] for side in (on_device, on_host)]
    for out in (True, False):
        to, of = (1, 0) if out else (0, 1)
        expected = [each.clone() for each in tensors[to]]
        for mine, theirs in zip(expected, tensors[of], strict=True):
            for block, other in zip(places[to], places[of], strict=True):
                for slot in range(2):
                    mine[:, 2 * block + slot] = theirs[:, 2 * other + slot]
        with Transfers(host) as transfers:
            if out:
                host.copy_from(device, on_device, on_host)
            else:
                device.copy_from(host, on_host, on_device)
        assert transfers.contiguous == [True] * (2 * len(LAYERS) * runs)
        assert all(map(torch.equal, tensors[to], expected))
        for each in tensors[to]:  # or the way back finds what is there
            each.mul_(3)


def test_the_device_decides_how_to_copy(log: list[str]) -> None:
    assert isinstance(copies_for(torch.device("cuda")), StreamCopies)
    assert isinstance(copies_for(torch.device("cpu")), DirectCopies)
