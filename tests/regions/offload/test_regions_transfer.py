"""The order of queued copies on a GPU, checked without one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from regions.allocator import Run
from regions.kv_tensors import KVPool, LayerShape
from regions.offload import snapshot_format, staging
from regions.offload.copies import DirectCopies, StreamCopies, copies_for
from regions.offload.host_tier import HostTier
from regions.offload.residency import Idleness, Residency
from regions.offload.snapshot_format import Identity, SnapshotHeader, write_snapshot
from regions.tape import Retention
from tests.regions.numbered import append, scribble, tape_of


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

    def synchronize(self) -> None:
        self.log.append(f"host waits for {self.name}")

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
    """Notes each copy to or from pinned memory, and whether both sides are contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.pinned: list[torch.Tensor] = []
        self.contiguous: list[bool] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default and sum(map(self._is_pinned, args[:2])) == 1:
            self.contiguous.append(all(side.is_contiguous() for side in args[:2]))
        return func(*args, **(kwargs or {}))

    def _is_pinned(self, side: torch.Tensor) -> bool:
        memory = side.untyped_storage().data_ptr()
        return any(memory == each.untyped_storage().data_ptr() for each in self.pinned)


@pytest.fixture
def transfers(log: list[str], monkeypatch: pytest.MonkeyPatch) -> Transfers:
    """Of pools `OnDevice`, whose streams are fakes; pinned memory, which needs CUDA, is the host's."""
    found = Transfers()

    def pins(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*shape: Any, pin_memory: bool = False, **given: Any) -> torch.Tensor:
            tensor = make(*shape, **given)
            if pin_memory:
                found.pinned.append(tensor)
            return tensor

        return made

    for name in ("zeros", "empty"):
        monkeypatch.setattr(torch, name, pins(getattr(torch, name)))
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: FakeStream(log, "computing"))
    return found


class OnDevice(KVPool):
    """A pool that says it is on a GPU; its memory is the host's."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda")


LAYERS = [LayerShape(3, 4, 2), LayerShape(2, 4, 4)]
TWO_A_LAYER = [True] * (2 * len(LAYERS))
APART = [Run(7, 8), Run(1, 3), Run(9, 10)]


def filled(blocks: int = 12) -> OnDevice:
    """A pool whose numbers all differ."""
    device = OnDevice(LAYERS, blocks, block_size=2)
    for number, each in enumerate(device.tensors):
        each.copy_(torch.arange(each.numel()).view(each.shape) + 1000 * number)
    return device


def numbers(pool: KVPool, blocks: Sequence[Run]) -> list[torch.Tensor]:
    slots = [slot for start, stop in blocks for slot in range(2 * start, 2 * stop)]
    return [each[:, slots].clone() for each in pool.tensors]


def test_a_swap_takes_two_transfers_a_layer_each_way_however_its_blocks_lie(transfers: Transfers) -> None:
    device = filled()
    host = HostTier(device, 12)
    expected = numbers(device, APART)
    with transfers:
        stored = host.put(APART)
    assert stored is not None
    assert transfers.contiguous == TWO_A_LAYER
    places = [Run(2, 3), Run(10, 12), Run(5, 6)]
    transfers.contiguous.clear()
    with transfers:
        stored.load(places)
    assert transfers.contiguous == TWO_A_LAYER
    assert all(map(torch.equal, numbers(device, places), expected))


def test_a_host_whose_free_blocks_are_apart_is_full_for_a_copy_in_one_transfer(transfers: Transfers) -> None:
    """It takes nothing then. Where copies are not queued, as on a CPU, blocks may be anywhere."""
    for device, fits in ((filled(), False), (KVPool(LAYERS, 12, block_size=2), True)):
        host = HostTier(device, 6)
        copies = [host.put([Run(at, at + 2)]) for at in (0, 2, 4)]
        for copy in (copies[0], copies[2]):
            assert copy is not None
            host._outgoing.reclaim(0)
            copy.release()
        assert host.pool.blocks.free_blocks == 4
        assert (host.put([Run(0, 4)]) is not None) == fits
        assert host.pool.blocks.free_blocks == (0 if fits else 4)
        assert host.put([Run(0, 2)]) is not None or fits


def test_a_file_takes_two_transfers_a_layer_each_way_through_pinned_memory(
    transfers: Transfers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot, a session that is spilled, and its return, in chunks smaller than a head."""
    for module in (staging, snapshot_format):
        monkeypatch.setattr(module, "CHUNK", 64)
    memory = OnDevice(LAYERS, 40, block_size=2)
    assert memory.take(40) is not None
    memory.blocks.release([Run(at, at + 2) for at in range(0, 40, 4)])
    tape, identity = tape_of(memory, Retention(30)), Identity.of(memory, model="m", tokenizer="t", frozen=[])
    assert append(memory, tape, range(1, 10), range(10, 22))
    assert tape.runs > 1
    expected = [torch.cat([t[:, slot : slot + n] for slot, n in tape.live_ranges], 1) for t in memory.tensors]

    with transfers:
        write_snapshot(
            tmp_path / "t", SnapshotHeader("t", identity, 2, tape.state, 0), memory, tape.live_ranges
        )
    assert transfers.contiguous == TWO_A_LAYER
    kv = b"".join(each.contiguous().view(torch.uint8).numpy().tobytes() for each in expected)
    assert (tmp_path / "t").read_bytes()[-32 - len(kv) : -32] == kv

    clock = iter(range(0, 1000, 10))
    residency = Residency(memory, Idleness(1, lambda: tmp_path), lambda: next(clock))
    residency.attach(tape, identity)
    for move in (residency.spill_idle, tape.bring_back):
        transfers.contiguous.clear()
        with transfers:
            assert move()
        assert transfers.contiguous == TWO_A_LAYER
        assert tape.resident == (move == tape.bring_back)
        scribble(memory)
    back = [torch.cat([t[:, slot : slot + n] for slot, n in tape.live_ranges], 1) for t in memory.tensors]
    assert all(map(torch.equal, back, expected))


def test_the_device_decides_how_to_copy(log: list[str]) -> None:
    assert isinstance(copies_for(torch.device("cuda")), StreamCopies)
    assert isinstance(copies_for(torch.device("cpu")), DirectCopies)
