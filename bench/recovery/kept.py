"""What sessions come back from, and when they are back, as a client sees it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from statistics import median
from tempfile import TemporaryDirectory
from typing import Literal, NamedTuple

from bench.figures import Figure, Goal, Setting
from bench.recovery.snapshots import QUESTION
from daemon.api.client import AsyncQueryClient
from daemon.api.messages import Answers, AnswersReply, Ask, AskReply, ClientRequest, QueryError, Reply

_AGAIN_S = 0.01
_PATIENCE_S = 1.0
"""A request to a process that is gone is given up after this time."""
Kept = Literal["on disk", "in memory", "none"]
KEPT: tuple[Kept, ...] = ("on disk", "in memory", "none")
"""Where snapshots are; with none the log alone is read again."""
_PLACES: dict[Kept, str] = {"on disk": "/var/tmp", "in memory": "/dev/shm", "none": "/var/tmp"}


class Took(NamedTuple):
    """Seconds to the first answer, to the first one from a whole window, and to live answers of all."""

    first: float
    whole: float
    live: float


NAMES = ("first answer to a client", "answer from the whole window", "live answers of every session")


@contextmanager
def place(kept: Kept) -> Iterator[str]:
    """A directory for snapshots: on a disk, or on a tmpfs."""
    with TemporaryDirectory(prefix="foretick-bench-", dir=_PLACES[kept]) as folder:
        yield folder


async def back(endpoint: str, sessions: Sequence[str], since: int) -> Took:
    """Ask until all is back that ended at ``since``, wall clock, ns. Bound it by a timeout."""
    first = whole = 0.0

    def is_whole(reply: Reply) -> bool:
        nonlocal first
        if not isinstance(reply, AskReply):
            return False
        first = first or (time.time_ns() - since) / 1e9
        return "warm_up" not in reply.flags

    def is_live(reply: Reply) -> bool:
        found = reply.answers if isinstance(reply, AnswersReply) else ()
        return any(answer.as_of >= since for answer in found)

    async def alive() -> None:
        for name in sessions:
            await _until(endpoint, Answers(0, name), is_live)

    living = asyncio.create_task(alive())
    try:
        await _until(endpoint, Ask(0, sessions[0], QUESTION, 1), is_whole)
        whole = (time.time_ns() - since) / 1e9
        await living
    finally:
        living.cancel()
        await asyncio.gather(living, return_exceptions=True)
    return Took(first, whole, (time.time_ns() - since) / 1e9)


def figures_of(
    took: Sequence[tuple[float, ...]],
    reference: Sequence[tuple[float, ...]],
    setting: Setting,
    against: str,
    goals: dict[str, Goal] | None = None,
    names: Sequence[str] = NAMES,
) -> Iterator[Figure]:
    """Medians beside those of the reference, with the slowest and the fastest; ``names``: of the members."""
    for name, ours, theirs in zip(names, zip(*took, strict=True), zip(*reference, strict=True), strict=True):
        yield Figure(
            name,
            median(ours),
            unit="s",
            setting=setting,
            against=against,
            reference=median(theirs),
            goal=(goals or {}).get(name),
            n=len(ours),
            low=max(ours),
            high=min(ours),
            samples=list(ours),
        )


async def _until(endpoint: str, request: ClientRequest, done: Callable[[Reply], bool]) -> None:
    """Repeat a request until it is ``done``. A daemon that is started again is another connection."""
    is_done = False
    while not is_done:
        with suppress(QueryError):
            async with AsyncQueryClient(endpoint, _PATIENCE_S) as client:
                # the daemon does not tell when an answer would be another
                while not (is_done := done(await client.request(request))):  # noqa: ASYNC110
                    await asyncio.sleep(_AGAIN_S)
