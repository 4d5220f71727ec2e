"""All sources, read into one ring: each connects, fails, commits and ends by itself."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from daemon.config.schema import Config, SessionConfig
from daemon.config.symbols import Names, numbered, routes
from daemon.gateway.checkpoint.checkpoint import TASK as TRANSACTIONS
from daemon.gateway.record_decoder import RingTurns
from daemon.gateway.source_runner import SourceRunner
from daemon.gateway.standby import Standby
from daemon.progress import Position
from daemon.supervision import Tasks, reason_of
from feeds.backoff import delay_s
from feeds.source import DataUnreadable, HandingOverSource
from ingest.ring import Ring
from metrics.feed_faults import CONFIGURED
from metrics.store import MetricStore

log = logging.getLogger(__name__)

INGEST, COMMIT = "ingest", "commit loop"


class Inputs:
    """All sources that were added, which read the same symbols into one ring.

    One that fails is opened again, with backoff, while the others go on; alone it ends the daemon.
    """

    def __init__(
        self,
        config: Config,
        order: RingTurns,
        standby: Standby,
        store: MetricStore,
        tasks: Tasks,
    ) -> None:
        self.runners: list[SourceRunner] = []
        self.exhausted = asyncio.Event()
        """All sources have ended (replayed files)."""
        self._order, self._standby, self._store, self._tasks = order, standby, store, tasks
        self._bars, self._sessions = config.bars, config.sessions
        self._dead_letters = "dead_letter" in (getattr(config.quality, kind.name) for kind in CONFIGURED)
        self._opens_all = not config.opens_by_partition
        self.symbols = numbered(config.sessions)
        """Their numbers in the ring."""
        self._routes = routes(config.sessions, self.symbols)
        self.names = Names(config.symbols)
        """What else their symbols are called."""
        self._keep_originals()
        self._why: dict[str, str] = {}
        self._some_up = asyncio.Event()

    def add(self, runner: SourceRunner) -> None:
        """There is this source, too; before the start."""
        self.runners.append(runner)

    @property
    def _several(self) -> bool:
        return len(self.runners) > 1

    # An engine's life.

    async def recover(self) -> None:
        """Read where sessions stand in every source, before an engine goes on from there."""
        await asyncio.gather(*(runner.group.recover() for runner in self.runners))

    @property
    def again(self) -> bool:
        """Whether a source begins in a past that was asked for, and that is answered again."""
        return any(runner.group.again for runner in self.runners)

    def engine_starts(self) -> None:
        """A new engine begins with what is known."""
        self._standby.engine_starts([session.name for session in self._sessions], opens=self._opens_all)
        for runner in self.runners:
            runner.group.engine_starts()
        self.symbols = numbered(self._sessions)
        self._routes = routes(self._sessions, self.symbols)

    def engine_ready(self, positions: Mapping[str, Mapping[str, Position]]) -> None:
        """See `GroupMember.engine_ready`."""
        for runner in self.runners:
            runner.group.engine_ready(positions)

    async def start(self, ring: Ring) -> None:
        """Connect all, and read into ``ring``; returns when one is connected."""
        self._standby.wait()
        if not self._several:
            for runner in self.runners:
                runner.begin(ring)
                await self._connect(runner, ring)
                self._tasks.start(self._task(runner), partial(self._read, runner), returns=True)
            return
        self._some_up.clear()
        for runner in self.runners:
            if not runner.exhausted.is_set():
                runner.begin(ring)
        for runner in self.runners:
            self._tasks.start(self._task(runner), partial(self._keep_reading, runner, ring), returns=True)
        await self._some_up.wait()

    async def _connect(self, runner: SourceRunner, ring: Ring) -> None:
        await runner.connect(ring, self._routes, self.names)

    async def _read(self, runner: SourceRunner) -> None:
        await runner.read()
        if all(each.exhausted.is_set() for each in self.runners):
            self.exhausted.set()

    async def _keep_reading(self, runner: SourceRunner, ring: Ring) -> None:
        name, attempt = runner.source.name, 0
        while not runner.exhausted.is_set():
            try:
                await self._connect(runner, ring)
                self._why.pop(name, None)
                self._some_up.set()
                await self._read(runner)
            except DataUnreadable:
                raise
            except Exception as error:
                self._why[name] = reason_of(error)
                self._store.inc("foretick_source_failures_total", source=name)
                log.exception("source %s failed; the others go on", name)
                await runner.fail()
                await asyncio.sleep(delay_s(attempt))
                attempt += 1

    async def stop_reading(self) -> None:
        """Stop reading; nothing more goes into the ring."""
        if self.runners:  # without names every task of the daemon would be stopped
            await self._tasks.stop(*map(self._task, self.runners))

    async def drain(self, within_s: float) -> None:
        """Hand partitions over to other daemons that warm up, while they are read and answered here."""
        sources = [each.source for each in self.runners if each.connected]
        draining = [each.hand_over(within_s) for each in sources if isinstance(each, HandingOverSource)]
        await asyncio.gather(*draining)

    async def hand_over(self, forget: Callable[[], None]) -> None:
        """Leave the partitions to a standby, if there may be one: it answers while an engine is started here.

        ``forget``: see `reopen`, which follows.
        """
        if any(runner.group.is_standby for runner in self.runners):
            await self._leave(forget)
            self._standby.wait()

    async def reopen(self, ring: Ring, forget: Callable[[], None]) -> None:
        """Read again from the committed offsets; calls ``forget`` once nothing more can be acknowledged."""
        await self._leave(forget)
        for runner in self.runners:
            runner.tracker.clear()
            runner.group.clear()
        self._order.originals.clear()
        await self.start(ring)

    async def _leave(self, forget: Callable[[], None]) -> None:
        # transactions first end all that is complete: the source still owns its partitions
        exactly_once = any(runner.checkpoint.exactly_once for runner in self.runners)
        if exactly_once:
            forget()
        await asyncio.gather(*(runner.leave() for runner in self.runners))
        if not exactly_once:
            forget()

    def start_transactions(self) -> None:
        """Exactly once: commit whatever is complete, as soon as it is."""
        for runner in self.runners:
            if runner.checkpoint.exactly_once:
                self._tasks.start(TRANSACTIONS, runner.checkpoint.run)

    async def commit_periodically(self) -> None:
        """Commit every second, to each source by itself: one that hangs delays no other."""
        await asyncio.gather(*(runner.commit_periodically() for runner in self.runners))

    async def close(self, deadline: float) -> None:
        """Commit once more, a transaction until ``deadline`` (monotonic, seconds), and disconnect."""
        await self._tasks.stop(TRANSACTIONS, COMMIT)
        await asyncio.gather(*(runner.close(deadline) for runner in self.runners))

    # Sessions.

    def number(self, sessions: Sequence[SessionConfig]) -> dict[str, int]:
        """Give numbers to the symbols of ``sessions`` that have none."""
        self.symbols = numbered(sessions, self.symbols)
        return self.symbols

    def rename(self, names: Names) -> None:
        """Symbols are called so from now on; `change` follows."""
        self.names = names

    def change(self, sessions: Sequence[SessionConfig]) -> None:
        """Let these sessions read the records from now on."""
        self._sessions = tuple(sessions)
        self._keep_originals()
        self._routes = routes(sessions, self.number(sessions))
        for runner in self.runners:
            runner.change(sessions, self._routes, self.names)

    def extend(self, sessions: Sequence[SessionConfig]) -> None:
        """Let these read records, too, of symbols that no session reads yet: in time for these alone."""
        self._sessions += tuple(sessions)
        if any(map(self._refuses, sessions)):
            self._order.originals.want(True)
        more = routes(sessions, self.number(sessions))
        self._routes = {**self._routes, **more}
        for runner in self.runners:
            runner.extend(sessions, more)

    def has_route(self, symbol: str) -> bool:
        """Whether a session reads this symbol."""
        return symbol in self._routes

    def _keep_originals(self) -> None:
        """Keep messages as they came where a session may refuse their records."""
        self._order.originals.want(self._dead_letters or any(map(self._refuses, self._sessions)))

    def _refuses(self, session: SessionConfig) -> bool:
        bars = session.bars(self._bars)
        return "refuse" in (bars.late, bars.on_price_jump)

    def serves(self, session: str) -> bool:
        """See `GroupMember.serves`. Without a source all sessions are ours."""
        return not self.runners or any(runner.group.serves(session) for runner in self.runners)

    def reads(self, session: str) -> bool:
        """Whether any source reads the session here."""
        return any(runner.group.reads(session) for runner in self.runners)

    def holds(self, session: str) -> bool:
        """See `GroupMember.holds`."""
        return any(runner.group.holds(session) for runner in self.runners)

    def owner(self, session: str) -> str | None:
        """See `GroupMember.owner`; a session is this daemon's if any of its sources reads it here."""
        if self.reads(session):
            return None
        owners = (runner.group.owner(session) for runner in self.runners)
        return next((owner for owner in owners if owner is not None), None)

    def former(self, session: str) -> str:
        """See `GroupMember.former`."""
        return next(filter(None, (runner.group.former(session) for runner in self.runners)), "")

    def peers(self) -> frozenset[str]:
        """See `GroupMember.peers`."""
        return frozenset[str]().union(*(runner.group.peers for runner in self.runners))

    # Health and metrics.

    def missing(self) -> list[str]:
        """What is not connected, or cannot be read, and why this daemon does not answer."""
        running, missing, unread = self._tasks.names(), list[str](), list[str]()
        for runner in self.runners:
            name = runner.source.name
            source = f"source {name}" if self._several else "the source"
            if runner.exhausted.is_set() or (runner.connected and self._task(runner) in running):
                unread += [f"{source}: {why}" if self._several else why for why in runner.unread()]
            else:
                why = f": {self._why[name]}" if name in self._why else ""
                missing.append(f"{source} is not connected{why}")
        return missing + unread if missing else self._standby.reasons() + unread

    def gauges(self) -> dict[str, dict[str, float]]:
        """Gauges of sources' partitions and venues, named after their source if there are several."""
        merged: dict[str, dict[str, float]] = {}
        for runner in self.runners:
            prefix = f"{runner.source.name}/" if self._several else ""
            for gauge, values in runner.gauges().items():
                merged.setdefault(gauge, {}).update({prefix + key: each for key, each in values.items()})
        return merged

    def note(self) -> None:
        """Bring metrics of connections up to date."""
        for runner in self.runners:
            runner.note()

    def _task(self, runner: SourceRunner) -> str:
        return f"{INGEST} {runner.source.name}" if self._several else INGEST
