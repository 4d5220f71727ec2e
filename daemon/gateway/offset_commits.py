"""Commits a source's offsets, with where its sessions stand."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable

from daemon import protocol
from daemon.gateway.checkpoint.commits import Transactions
from daemon.gateway.checkpoint.offsets import OffsetTracker
from daemon.gateway.checkpoint.state import ProgressStore
from daemon.gateway.standby import Standby
from feeds.source import CommitFailed, CommitPoint, LogSource, Source

log = logging.getLogger(__name__)

RETRY_S = 0.1


class OffsetCommits:
    """``transactions`` commit, where there are any. ``send``: to the engine."""

    def __init__(
        self,
        source: Source,
        tracker: OffsetTracker,
        progress: ProgressStore,
        standby: Standby,
        transactions: Transactions | None,
        send: Callable[[protocol.Command], None],
    ) -> None:
        self.transactions = transactions
        self._source, self._tracker, self._progress = source, tracker, progress
        self._standby, self._send = standby, send
        self._committing = asyncio.Lock()
        """Held during a commit, so that the source is not closed meanwhile."""

    async def commit(self) -> bool:
        """Commit the offsets that acknowledged answers cover, and where their sessions stand.

        Returns False on failure; the next call includes these offsets. A standby commits nothing.
        """
        if not self._standby.answers:
            return True
        if isinstance(self._source, LogSource):
            for partition, (read, position) in self._source.reached.items():
                self._tracker.reached(partition, read, position)
        if self.transactions is not None:
            settled = await self.transactions.settle()
            self.notify_stored(self.transactions.stored.values())
            return settled
        async with self._committing:
            points = self._tracker.to_commit()
            saved = self._source.kind != "dropping" or await self._progress.save()
            try:
                if points:
                    await self._source.commit(points)
            except CommitFailed as error:
                self._tracker.not_committed(points)
                log.warning("cannot commit offsets, retrying: %s", error)
                return False
            self.notify_stored(points.values() if saved else ())
            return True

    async def commit_within(self, seconds: float) -> None:
        """Commit, retrying on failure: what is not committed is read and answered a second time."""
        deadline = time.monotonic() + seconds
        while not await self.commit():
            if time.monotonic() > deadline:
                return
            await asyncio.sleep(RETRY_S)

    async def commit_before_leaving(self, seconds: float) -> None:
        """The same, while the source is not read."""
        if self.transactions is None:
            await self.commit_within(seconds)
        elif not await self.commit():
            # a rebalance does not end now; what is in doubt is waited for
            with self.transactions.giving_up():
                await self.commit_within(float("inf"))

    def notify_stored(self, points: Iterable[CommitPoint], *, engine_is_new: bool = False) -> None:
        """These points are committed: the engine keeps a snapshot that goes with them."""
        self._progress.stored(points)
        if news := self._progress.news_of_stored(engine_is_new=engine_is_new):
            self._send(protocol.NoteProgress(news))
