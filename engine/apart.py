"""Computing on the CPU away from the thread that will go on to do it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Found = TypeVar("Found")


def apart(work: Callable[[], Found]) -> Found:
    """Run ``work`` in a thread of its own, which has ended when this returns or raises what it raised.

    OpenMP gives every thread that ever computed a team of its own, for as long as the thread lives. Once the
    teams together have more threads than there are cores, all of them sleep between two operations instead of
    spinning, and a forward pass takes 1.7 times as long. So whoever loads a model or measures one, and then
    leaves the device to another thread, does it apart.
    """
    with ThreadPoolExecutor(1, "apart") as thread:
        return thread.submit(work).result()
