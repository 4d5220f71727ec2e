"""SIGTERM and Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator

from daemon.cli.options import EXIT_FORCED


@contextlib.contextmanager
def stopping_on_signals(stop: asyncio.Event) -> Iterator[None]:
    """SIGTERM and Ctrl-C set ``stop``; a second one ends the process at once."""
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(EXIT_FORCED)
        stop.set()

    signals = (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
