"""What a step gives the device is queued: no copy makes the host wait. On PyTorch's device without values."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.attention.last_layer import LastLayer, Trimmed, Written
from engine.attention.metadata import AttentionMetadata, PackedRows
from engine.device import queued, to_device
from engine.sampling import choose
from engine.seeding import Sampling
from regions.extents import Placement

DEVICE = torch.device("meta")
_COPIES = torch.ops.aten._to_copy.default, torch.ops.aten.to.dtype_layout
"""The latter in inference mode."""


class Copies(TorchDispatchMode):
    """Notes, of each copy from the host to the device, whether the host goes on meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.queued: list[bool] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _COPIES and args[0].device.type == "cpu":
            self.queued.append(bool(kwargs.get("non_blocking")))
        return func(*args, **kwargs)


@pytest.fixture(autouse=True)
def pinning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned memory needs CUDA."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)


def test_a_copy_that_blocks_is_noticed() -> None:
    with Copies() as copies:
        torch.tensor([1, 2], device=DEVICE)
        torch.tensor([1, 2]).to(DEVICE)
        queued(DEVICE, torch.tensor([1, 2]))
    assert copies.queued[-2:] == [False, True]


def test_rows_are_chosen_without_waiting_up_to_all_that_is_read_at_the_end() -> None:
    fetched: list[torch.Tensor] = []

    def fetch(found: torch.Tensor) -> torch.Tensor:
        fetched.append(found)
        return torch.zeros(found.shape)

    logits = torch.empty(3, 512, device=DEVICE)
    drawn = [Sampling(0.8, seed=row, index=3, top_p=0.9, top_k=50) for row in range(3)]
    with Copies() as copies:
        chosen = choose(logits, [(1, 2), None, None], drawn, [None, 3, 1], fetch)
    assert [len(each.logits) for each in chosen] == [2, 0, 0]
    assert [len(each.top) for each in chosen] == [0, 3, 1]
    assert len(fetched) == 1
    assert copies.queued == [True] * 5


def test_positions_and_the_rows_of_the_last_layer_are_queued() -> None:
    placement = Placement((), ((0, 4),), 0, 0)
    metadata = AttentionMetadata([PackedRows(0, 4, placement)], DEVICE)
    last = LastLayer([3], metadata)

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        if not last.reading:
            raise Written
        return hidden

    with Copies() as copies:
        assert metadata.positions().shape == (4,)
        found = Trimmed(forward, lambda: last)(torch.empty(1, 4, 8, device=DEVICE))
        rows, slots = to_device(DEVICE, [1, 2], [3])
    assert found.shape == (1, 1, 8)
    assert (rows.shape, slots.shape) == ((2,), (1,))
    assert copies.queued == [True] * 3
