"""The order of queued copies on a GPU, checked without one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from regions.allocator import Run
from regions.offload.copies import StreamCopies, copies_for, copy_at_once


class FakeStream:
    """Records the calls."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> SimpleNamespace:
        self.log.append(f"{self.name} records")
        return SimpleNamespace(query=lambda: False, synchronize=lambda: self.log.append("host waits"))

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
    return log


def side(log: list[str], device: str) -> Any:
    """A pool on ``device`` that only says it was copied to."""
    return SimpleNamespace(device=torch.device(device), copy_from=lambda *_: log.append(f"copy to {device}"))


def test_a_copy_to_the_host_follows_what_was_computed_and_blocks_nothing(log: list[str]) -> None:
    copies = StreamCopies(torch.device("cuda"))
    transfer = copies(side(log, "cpu"), [Run(0, 1)], side(log, "cuda"), [Run(0, 1)])
    assert log == ["copying waits for computing", "on copying", "copy to cpu", "copying records", "off"]
    assert not transfer.query()
    transfer.synchronize()
    assert log[-1] == "host waits"


def test_what_is_computed_next_waits_for_a_copy_to_the_device(log: list[str]) -> None:
    copies = StreamCopies(torch.device("cuda"))
    copies(side(log, "cuda"), [Run(0, 1)], side(log, "cpu"), [Run(0, 1)])
    assert log[-3:] == ["copying records", "off", "computing waits for the event"]


def test_the_device_decides_how_to_copy(log: list[str]) -> None:
    assert isinstance(copies_for(torch.device("cuda")), StreamCopies)
    assert copies_for(torch.device("cpu")) is copy_at_once
