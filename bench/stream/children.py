"""A child process with a pipe, ready before anything is measured and gone afterwards."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

_READY_S = 120.0
_END_S = 10.0


@contextlib.contextmanager
def child(work: Callable[..., None], *arguments: object) -> Iterator[Connection]:
    """Run ``work(*arguments, pipe)``, a module's function, in a fresh interpreter; wait for its "ready".

    Raises RuntimeError when it does not get ready; EOFError comes from the pipe when it dies later.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(*arguments, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(_READY_S) or ours.recv() != "ready":
            raise RuntimeError(f"{work.__name__} did not get ready within {_READY_S:.0f} s")
        yield ours
        process.join(_END_S)
    finally:
        if process.is_alive():
            process.kill()
            process.join()
        ours.close()
