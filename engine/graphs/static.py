"""Memory at fixed addresses, filled again for each pass, in few sizes.

A captured graph reads the same device memory every time. Sizes are rounded up, so that few different graphs
have to be captured, and all that a pass reads travels in one copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def round_up(n: int) -> int:
    """The next power of two, of ``n`` of at least 1."""
    return 1 << (int(n) - 1).bit_length()


class Staging:
    """``size`` numbers on the host, pinned for a GPU, and their copy on ``device``."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.host = torch.zeros(size, dtype=dtype, pin_memory=pinned)
        self.device = self.host.to(device)
        self._copied = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]  # untyped in torch

    @contextmanager
    def filling(self) -> Iterator[None]:
        """Write ``host`` inside; its copy is queued on the current stream at the end."""
        if self._copied is not None:
            self._copied.synchronize()  # the last copy may still be reading it
        yield
        self.device.copy_(self.host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
