"""Integers of one pass on their way to the device: one copy for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch


def to_device(device: torch.device, *lists: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Each list as an int64 tensor [len(list)] on ``device``; together they are one block of memory there.

    For a GPU the host side is pinned, so that the copy is queued and not waited for.
    """
    pin = device.type == "cuda"
    packed = torch.tensor(list(chain.from_iterable(lists)), dtype=torch.int64, pin_memory=pin)
    return torch.split(packed.to(device, non_blocking=pin), [len(values) for values in lists])
