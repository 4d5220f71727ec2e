"""Device memory at fixed addresses, refilled for each pass, in few sizes.

A captured graph reads the same device memory every time. Sizes are rounded up, so that few graphs are
captured, and everything a pass reads is copied at once.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch


def round_up(n: int) -> int:
    """The smallest power of two that is at least ``n`` (from 1 on)."""
    return 1 << (int(n) - 1).bit_length()


class Staging:
    """Named parts of one host array of numbers, pinned for a GPU, and their copies on ``device``.

    ``parts``: the device tensors, at constant addresses.
    """

    def __init__(self, sizes: Mapping[str, int], dtype: torch.dtype, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._host = torch.zeros(sum(sizes.values()), dtype=dtype, pin_memory=pinned)
        self._device = self._host.to(device)
        self._copied = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]  # untyped in torch
        lengths = list(sizes.values())
        self.parts = dict(zip(sizes, torch.split(self._device, lengths), strict=True))
        self._numpy = {
            name: part.numpy() for name, part in zip(sizes, torch.split(self._host, lengths), strict=True)
        }

    def fill(self, **values: tuple[npt.ArrayLike, int]) -> None:
        """Write each part: its first numbers, and the value of the rest. Queued on the current stream."""
        if self._copied is not None:
            self._copied.synchronize()  # the previous copy may still read it
        for name, (numbers, rest) in values.items():
            part, first = self._numpy[name], np.asarray(numbers)
            part[: first.size] = first
            part[first.size :] = rest
        self._device.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
