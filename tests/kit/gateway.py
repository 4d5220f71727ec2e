"""Parts of a gateway, for tests that stand in for the others."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np

from daemon import protocol
from daemon.ages import VenueClock
from daemon.api.auth import LOCAL_LABEL, Access
from daemon.config.schema import Config
from daemon.config.symbols import SymbolRoute
from daemon.gateway.answer_cache import Sessions
from daemon.gateway.checkpoint.checkpoint import Checkpoint
from daemon.gateway.checkpoint.offsets import OffsetTracker
from daemon.gateway.checkpoint.outbox import Outbox
from daemon.gateway.checkpoint.publisher import Publisher
from daemon.gateway.checkpoint.state import ProgressStore
from daemon.gateway.generations import Generations
from daemon.gateway.inputs import Inputs
from daemon.gateway.peers import Peers
from daemon.gateway.pending import PendingCommands
from daemon.gateway.prompt_quota import PromptQuota
from daemon.gateway.queries import Begin, Queries
from daemon.gateway.record_decoder import Opener, RecordDecoder, RingTurns
from daemon.gateway.source_runner import SourceRunner
from daemon.gateway.standby import Standby
from daemon.gateway.stream_names import StreamNames
from daemon.ledger import ledger
from daemon.progress import Position
from daemon.session_life import Event, Lives, refuse
from daemon.supervision import Tasks
from feeds.connector import SinkRoute
from feeds.kafka_transactions import (
    KafkaTransactions,
    MessagesRefused,
    TransactionOutcome,
)
from feeds.market_data import DeadLetter
from feeds.payloads.payload_decoder import PayloadDecoder, WireDecoder
from feeds.source import (
    CommitFailed,
    CommitPoint,
    Incoming,
    Membership,
    OutgoingMessage,
    Partition,
    ReadCommitted,
    RebalanceListener,
    Source,
    StartPosition,
)
from ingest.record import RECORD, Records
from ingest.ring import Ring
from metrics.catalogue import OTHER
from metrics.store import MetricStore
from tests.kit.config import inproc_config
from tests.kit.engine_events import STREAM
from tests.kit.fakes import QueueSource
from tests.kit.records import SECOND


class Commands(list[protocol.Command]):
    """Takes commands as an engine that is up."""

    def send(self, command: protocol.Command) -> None:
        self.append(command)


class EngineRig:
    """Sessions of a gateway, and the commands that they send; the test is the engine."""

    def __init__(self, *names: str, config: Config | None = None) -> None:
        self.config = config or inproc_config([f"V:{name.upper()}" for name in names])
        self.store = MetricStore.local({"session": list(names), "source": ["test"], "sink": []})
        self.sent = Commands()
        self.sessions = Sessions(self.config, self.store)
        self.pending = PendingCommands(lambda: self)

    def send(self, command: protocol.Command) -> None:
        self.sent.send(command)


class GenerationsRig(EngineRig):
    """Generations of sessions; ``room``: the quota of prompts."""

    def __init__(
        self, *names: str, access: Access | None = None, room: PromptQuota | None = None, **options: Any
    ) -> None:
        super().__init__(*names)
        self.access, self.room = access or Access(), PromptQuota(4, 4) if room is None else room
        self.generations = Generations(self.sessions, self.pending, self.room, self.access, **options)


class DecoderRig:
    """A `RecordDecoder` of a source, and what comes of its messages. Session ``aaa`` shows ``V:AAA``."""

    def __init__(
        self,
        source: Source,
        *sessions: str,
        capacity: int = 4096,
        max_bytes: int = 1 << 20,
        opener: Opener | None = None,
        payloads: PayloadDecoder | None = None,
        upper: bool = True,
    ) -> None:
        names = sessions or ("aaa",)
        self.source, self.capacity = source, capacity
        self.ring = Ring.create(capacity, "overwrite" if source.kind == "dropping" else "pause")
        self.tracker, self.dead_letters = OffsetTracker(), list[DeadLetter]()
        self.store = MetricStore.local({"session": list(names), "source": [source.name], "sink": []})
        self.gate = asyncio.Event()
        self.gate.set()
        self.ingest = RecordDecoder(
            source,
            self.ring,
            {f"V:{name.upper() if upper else name}": SymbolRoute(n, (name,)) for n, name in enumerate(names)},
            self.tracker,
            self.store,
            self.dead_letters.append,
            gate=self.gate,
            opener=opener,
            payloads=payloads or WireDecoder(max_bytes),
            max_ahead_ns=3600 * SECOND,
        )

    async def run(self, *batches: list[Incoming]) -> None:
        """Play the batches of a `QueueSource` to their end."""
        assert isinstance(self.source, QueueSource)
        self.source.put(*batches)
        self.source.end()
        await asyncio.wait_for(self.ingest.run(), 20)
        assert ledger(self.store).read.unaccounted == 0

    def passed(self) -> float:
        """Records that went to sessions."""
        return self.store.value("foretick_records_passed_total", source=self.source.name)

    def records(self) -> Records:
        """What the ring holds; it is empty afterwards."""
        out = np.zeros(self.capacity, RECORD)
        return out[: self.ring.pop(out)]

    def close(self) -> None:
        self.ring.unlink()
        self.ring.close()


class Member(QueueSource):
    """A source that is read by a member of a group, which `owns` partitions."""

    membership: Membership | None = None

    def __init__(self, *partitions: Partition, name: str = "test") -> None:
        super().__init__(name=name)
        self.owns(*partitions)

    def owns(self, *partitions: Partition, placing: Sequence[Partition] = ()) -> None:
        self.membership = Membership("group", 2, "me", None, frozenset(partitions), frozenset(placing))

    def read_committed_by(self, read: ReadCommitted) -> None:
        pass

    def records_of(self, points: Mapping[Partition, CommitPoint]) -> list[OutgoingMessage]:
        return []

    def note_stored(self, points: Mapping[Partition, CommitPoint]) -> None:
        pass


async def assigned(
    listener: RebalanceListener, points: Mapping[Partition, CommitPoint]
) -> Mapping[Partition, StartPosition]:
    """Where partitions begin that come, once it is stored whose they are."""
    listener.claims(points)
    return await listener.on_assigned(points)


class Log(Member):
    """A log with commit points; the test assigns its partitions."""

    again = stays = False

    def __init__(self, points: Mapping[Partition, CommitPoint]) -> None:
        super().__init__(*points, name="kafka")
        self.points = dict(points)
        self.others: dict[Partition, CommitPoint] = {}
        """What other members have committed."""
        self.reached: dict[Partition, tuple[int, int]] = {}
        self.listener: RebalanceListener
        self.fails = False

    async def commit(self, points: Mapping[Partition, CommitPoint]) -> None:
        if self.fails:
            raise CommitFailed("the broker is away")
        await super().commit(points)

    async def stored(self) -> Mapping[Partition, CommitPoint]:
        return self.points

    async def peer_offsets(self) -> Mapping[Partition, CommitPoint]:
        return self.others

    def set_rebalance_listener(self, listener: RebalanceListener) -> None:
        self.listener = listener

    async def batches(self) -> AsyncGenerator[list[Incoming], None]:
        for batch in ():
            yield batch


class Broker(KafkaTransactions):
    """Keeps what was committed. ``held``: commits wait; ``fails``: they raise this; ``refuses``: keys."""

    def __init__(self) -> None:
        self.name, self.committed = "kafka", None  # type: ignore[assignment]  # what is stored is not read
        self.got: list[tuple[list[bytes], dict[Partition, int]]] = []
        self.held = asyncio.Event()
        self.held.set()
        self.fails: Exception | None = None
        self.refuses: frozenset[bytes] = frozenset()
        self.messages: list[OutgoingMessage] = []
        self.tried = 0
        self.outcomes: Counter[TransactionOutcome] = Counter()
        self._stop = asyncio.Event()

    async def commit(
        self,
        messages: Sequence[OutgoingMessage],
        points: Mapping[Partition, CommitPoint],
        member: Callable[[], Membership | None],
        sources: Set[Partition] = frozenset(),
    ) -> None:
        self.tried += 1
        await self.held.wait()
        if partitions := sources | points.keys():
            await self._membership(partitions, member)
        if self.fails is not None:
            raise self.fails
        keys = [m.key or b"" for m in messages]
        if refused := self.refuses & set(keys):
            self.outcomes["aborted"] += 1
            raise MessagesRefused({keys.index(each): "too_large" for each in refused}, "the test says no")
        self.got.append((keys, {p: at.offset for p, at in points.items()}))
        self.messages += messages
        self.outcomes.update(("committed", "aborted", "unknown"))


def admitting() -> Access:
    """Knows no tenant, and counts those of the test as others."""
    return Access(None, MetricStore.local({"tenant": [LOCAL_LABEL, OTHER]}))


def queries(
    begin: Begin,
    max_wait_s: float = 5.0,
    *,
    owner: Callable[[str], str | None] = lambda session: None,
    **more: Any,
) -> Queries:
    """The guards before ``begin``; ``more`` replaces their other parts."""
    parts: dict[str, Any] = {"access": admitting(), "names": tuple, "peers": Peers(max_wait_s)} | more
    return Queries(begin, owner=owner, max_wait_s=max_wait_s, **parts)


class SourceEvents:
    """What a source's runner tells of sessions. ``places``: where those that are resumed read on."""

    def __init__(self) -> None:
        self.assigned: list[set[str]] = []
        self.revoked: list[set[str]] = []
        self.resumed: list[set[str]] = []
        self.dropped: list[tuple[set[str], bool]] = []
        self.places: dict[str, Mapping[str, Position]] = {}
        self.lives = Lives(refuse)
        """Of the runner, once there is one."""

    async def resume(self, sessions: Collection[str]) -> Mapping[str, Mapping[str, Position]]:
        self.resumed.append(set(sessions))
        self.lives.on(Event.OPENED, sessions)
        return {name: self.places[name] for name in sessions if name in self.places}

    async def promote(self, sessions: Collection[str]) -> None:
        pass

    def drop(self, sessions: Collection[str], *, complete: bool) -> None:
        self.dropped.append((set(sessions), complete))

    def partitions_assigned(self, sessions: Collection[str]) -> None:
        self.assigned.append(set(sessions))

    def partitions_revoked(self, sessions: Collection[str]) -> None:
        self.revoked.append(set(sessions))

    def reads(self, session: str) -> bool:
        return False

    def closed(self, sessions: Iterable[str]) -> set[str]:
        return set()

    async def open(self, sessions: Collection[str]) -> set[str]:
        return set()

    def adopt(self) -> set[str]:
        return set()

    async def close_idle(self) -> None:
        pass

    async def close_unused(self, is_elsewhere: Callable[[str], bool]) -> None:
        pass


def inputs_of(
    config: Config,
    source: Source,
    tracker: OffsetTracker,
    store: MetricStore,
    progress: ProgressStore,
    events: SourceEvents,
    **more: Any,
) -> tuple[Inputs, SourceRunner]:
    """The inputs of one source, and its runner; ``more`` replaces the runner's other parts."""
    parts: dict[str, Any] = {
        "progress": progress,
        "order": RingTurns(),
        "standby": Standby(store),
        "streams": StreamNames(),
        "clocks": defaultdict(VenueClock),
        "send": lambda command: None,
        "outbox": Outbox([], [], store),
        "sessions": events,
    } | more
    events.lives = parts["standby"].lives
    inputs = Inputs(config, parts["order"], parts["standby"], store, Tasks())
    runner = SourceRunner(config, source, tracker, store, **parts)
    inputs.add(runner)
    inputs.engine_starts()
    return inputs, runner


def make_publisher(
    config: Config,
    tracker: OffsetTracker,
    sessions: Sessions,
    store: MetricStore,
    *routes: SinkRoute,
    lossless: bool = True,
    standby: Standby | None = None,
) -> Publisher:
    """A publisher of one source to ``routes``; not started."""
    streams = StreamNames()
    streams.name(STREAM)
    return Publisher(
        config,
        {STREAM.source: tracker},
        sessions,
        store,
        progress=ProgressStore(store),
        outbox=Outbox(routes, sessions.states, store, tracker.source_of, lossless=lossless),
        standby=standby or Standby(store),
        streams=streams,
    )


def make_checkpoint(
    source: Source,
    tracker: OffsetTracker,
    outbox: Outbox,
    store: MetricStore,
    *,
    progress: ProgressStore | None = None,
    sink: KafkaTransactions | None = None,
    on_revoked: Callable[[Collection[Partition]], None] = lambda partitions: None,
    is_held: Callable[[], bool] = lambda: False,
) -> Checkpoint:
    """A checkpoint of a daemon that answers, whose engine is not told."""
    return Checkpoint(
        source,
        tracker,
        progress or ProgressStore(store),
        outbox,
        Standby(store),
        store,
        lambda command: None,
        sink=sink,
        on_revoked=on_revoked,
        is_held=is_held,
    )
