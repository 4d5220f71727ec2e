"""Events of the group's other daemons, for the clients of this one.

Each daemon is followed by one subscription, shared by all clients, for as long as any listens, and a while
longer: a client that comes back finds what it has missed.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection

from daemon.api.events import Events, Lost, positions_of
from daemon.api.messages import LostMessage, QueryError
from daemon.api.subscriptions import AsyncSocketStream, subscription
from daemon.api.zmq import forwarding_name
from feeds.curve import Keys
from metrics.store import MetricStore

log = logging.getLogger(__name__)

PEER_EVENTS = "peer events"
LOOK_S = 0.25
"""How often it is looked which daemons there are."""
LINGER_S = 60.0
"""How long a daemon is followed after the last client has left, or its last session has moved."""
BEGIN_S, BEAT_S = 2.0, 1.0
"""Longest wait for a daemon that is about to be followed, and how often it is asked whether that lasts."""
ALL_KEPT = "0.0"
"""The id of no event: behind it comes all that a daemon keeps."""


class PeerEvents:
    """Follows daemons at the addresses ``peers()``. ``keys``: of all daemons' query sockets."""

    def __init__(
        self,
        events: Events,
        peers: Callable[[], Collection[str]],
        store: MetricStore,
        keys: Keys | None = None,
    ) -> None:
        self._events, self._peers, self._store, self._keys = events, peers, store, keys
        self._following: dict[str, asyncio.Task[None]] = {}
        self._until: dict[str, float] = {}
        self._tried: set[str] = set()
        """Those that have sent what they had kept, or did not answer."""
        self._last: dict[str, str] = {}
        """By address, the id of the newest event that is known."""

    async def run(self) -> None:
        """Follow, until cancelled."""
        try:
            while True:
                now = time.monotonic()
                if self._events.listening.is_set():
                    self._until |= dict.fromkeys(self._peers(), now + LINGER_S)
                for address in [each for each, until in self._until.items() if until < now]:
                    del self._until[address]
                    self._tried.discard(address)
                    self._last.pop(address, None)
                    await _ended(self._following.pop(address))
                for address in self._until.keys() - self._following.keys():
                    self._following[address] = asyncio.create_task(self._follow(address))
                if self._until.keys() <= self._tried:
                    self._events.settle([each.partition(".")[0] for each in self._last.values()])
                self._store.set("foretick_peers_followed", len(self._following))
                await asyncio.sleep(LOOK_S)
        finally:
            await asyncio.gather(*map(_ended, self._following.values()))
            self._following.clear()

    async def _follow(self, address: str) -> None:
        told = ""
        while True:
            try:
                await self._listen(address)
            except QueryError as error:
                if str(error) != told:
                    told = str(error)
                    log.warning("the events of the daemon at %s are not followed: %s", address, error)
            self._tried.add(address)
            await asyncio.sleep(BEAT_S)

    async def _listen(self, address: str) -> None:
        """Pass events on. Raises QueryError."""
        goes_on = address in self._tried and address in self._last
        before = None if goes_on else self._events.reached()
        chosen = subscription(after=self._last.get(address, ALL_KEPT))
        name = forwarding_name("")  # for all tenants: each client here gets what its own one sees
        stream = await AsyncSocketStream.open(
            address, chosen, BEGIN_S, self._keys, identity=name, beat_s=BEAT_S
        )
        async with stream:
            first = positions_of(stream.newest) or {}
            if not any(first.values()) or self._last.get(address) == stream.newest:
                self._tried.add(address)
            async for item in stream:
                if isinstance(item, LostMessage):
                    if item.reason == "restarted" and address in self._last:
                        self._events.lose(Lost(item.events, False, "restarted"))
                    continue
                for start, number in (positions_of(item.id) or {}).items():
                    earlier = before if number <= first.get(start, 0) else None
                    self._events.receive(start, number, item.message, earlier)
                    if number >= first.get(start, 0):
                        self._tried.add(address)
                self._last[address] = item.id


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
