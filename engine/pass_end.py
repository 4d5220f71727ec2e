"""The end of a pass: an event behind all that it has queued, with its one transfer back in front of it."""

import torch


class PassEnd:
    """Ends each pass on ``device``, and knows what the device took for it.

    On a CPU a pass has ended once its calls have returned, and nothing is copied.
    """

    def __init__(self, device: torch.device) -> None:
        self.took_ns: int | None = None
        """The device's time of the newest pass that has ended, ns; None on a CPU, and where none was run."""
        self._device = device
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if device.type == "cuda":
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # untyped in torch
            self._events = began, ended
        self._begun = False

    def expect(self) -> None:
        """A pass is laid out, of which the device knows nothing yet."""
        self.took_ns, self._begun = None, False

    def begin(self) -> None:
        """What is queued next is its first kernel; later calls of the same pass count for nothing."""
        if self._events is not None and not self._begun:
            self._events[0].record(torch.cuda.current_stream(self._device))
            self._begun = True

    def fetch(self, found: torch.Tensor) -> torch.Tensor:
        """What a pass has ``found``, on the host, at its end."""
        if self._events is None:
            return found
        host = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
        host.copy_(found, non_blocking=True)
        self.wait()
        return host

    def wait(self) -> None:
        """Block until the device has run the pass; its faults are raised here."""
        if self._events is None:
            return
        began, ended = self._events
        ended.record(torch.cuda.current_stream(self._device))
        ended.synchronize()
        if self._begun:
            self.took_ns = round(began.elapsed_time(ended) * 1e6)
