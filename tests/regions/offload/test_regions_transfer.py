"""The order of queued copies on a GPU, checked without one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from regions.allocator import Run
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


def test_the_device_decides_how_to_copy(log: list[str]) -> None:
    assert isinstance(copies_for(torch.device("cuda")), StreamCopies)
    assert isinstance(copies_for(torch.device("cpu")), DirectCopies)
