"""One flooded session beside nine quiet ones: the real data plane and scheduler, in virtual time."""

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from daemon.config.schema import Config, SessionConfig, SourceConfig
from daemon.config.symbols import numbered
from daemon.engine.tape_feeder import CREDITS, IN_ORDER, TapeFeeder, missed
from feeds.connectors.kafka import KafkaSourceConnector
from feeds.connectors.zeromq import ZmqSourceConnector
from ingest.lines import LineSpec
from ingest.plane import TapeRecord
from ingest.record import BAR, RecordWriter
from ingest.ring import Ring
from metrics.store import MetricStore
from regions.tape import Tape
from scheduler.interfaces import Limits, PriorityClass
from scheduler.request import Request
from scheduler.scheduler import Scheduler
from scheduler.tapes import TapeItem
from tests.kit.scheduler.fakes import FakeTape
from tests.kit.scheduler.worlds import COSTS, FakeWorld

SECOND = 10**9
NAMES = [f"s{n}" for n in range(10)]
LIMITS = Limits(max_batch_tokens=512, max_batch_requests=64, chunk_min=64, chunk_max=256)
BATCH_NS = COSTS.batch_ns([(0, LIMITS.max_batch_tokens)])
EVERY, BARS = 2 * BATCH_NS, 12
"""A quiet session has a bar in so many ns, and so many of them; the flooded one a hundred times as many."""
BAR_TOKENS, WINDOW = 17, 20
FLOODING = SourceConfig(backlog_policy="skip")
BUS = SourceConfig(kind="zeromq", zeromq=ZmqSourceConnector("tcp://127.0.0.1:1"), backlog_policy="wait")
LOG = SourceConfig(kind="kafka", kafka=KafkaSourceConnector("127.0.0.1:1"), backlog_policy="wait")


class World:
    """Ten sessions of ready-made bars on one ring; each version is asked a question of eight tokens."""

    def __init__(self, objective_ns: int, source: SourceConfig = FLOODING) -> None:
        self.world = over = FakeWorld(LIMITS, blocks=4000, block_size=16)
        self.device = over.executor
        self.scheduler = Scheduler(over.executor, over.memory, LIMITS, self.device.clock, costs=over.costs)  # type: ignore[arg-type]  # a fake
        self.tapes = {name: FakeTape(over.memory, name, BAR_TOKENS * WINDOW) for name in NAMES}
        for tape in self.tapes.values():
            tape.staleness_ns = objective_ns
        over.tapes = self.tapes
        self.ring = Ring.create(1024, clock=self.device.clock)
        self.store = MetricStore.local({"session": NAMES, "source": ["x"]})
        self.waited: dict[str, list[int]] = {name: [] for name in NAMES}
        self.missed = dict.fromkeys(NAMES, 0)
        self.versions: list[int] = []
        """Bars of each version of the first session."""
        self.gaps = 0
        built: Any = SimpleNamespace(
            tapes=self.tapes,
            lines=dict.fromkeys(NAMES, LineSpec(0, 0)),
            prompt=SimpleNamespace(encode=lambda text: list(text.encode()), without_special=str),
            prefixes=None,
            progress={},
            restored={},
        )
        config = Config(sessions=tuple(SessionConfig(name, f"V:{name}") for name in NAMES), source=source)
        self.input = TapeFeeder(
            config,
            self.ring,
            "x",
            [(built, self.scheduler)],
            numbered(config.sessions),
            self.store,
            self.device.clock,
        )
        self.scheduler.subscribe(self._committed)
        self._writer = RecordWriter(1)

    def bar(self, session: int, number: int) -> None:
        now = self.device.now
        self._writer.clear()
        self._writer.add(
            BAR, session, number * SECOND, now, (5 * SECOND,) * 5, x=SECOND, offset=number, ts_source=now
        )
        assert self.ring.push(self._writer.records) == 1
        self.input.plane.step()

    def run(self) -> None:
        """Until nothing is left to do; it has no ring any more then."""
        try:
            while self.scheduler.step() or self.device.sleep():
                pass
        finally:
            self.ring.close()
            self.ring.unlink()

    def prompts(self, number: int) -> None:
        prompt = [number % 3] * 200
        self.scheduler.submit(self.world.request(PriorityClass.POOL, prompt, 2, salt=str(number)))

    def p99(self) -> float:
        """Tick to answer of the quiet sessions, ns."""
        return float(np.quantile([waited for name in NAMES[1:] for waited in self.waited[name]], 0.99))

    def _committed(self, tape: Tape, version: int, records: Sequence[TapeItem[TapeRecord]]) -> None:
        payloads = [record.payload for record in records]
        if tape.name == NAMES[0]:
            self.versions.append(len(records))
        self.missed[tape.name] += missed(payloads, tape.staleness_ns, self.device.now)
        self.gaps += any(payload.flags & 2 for payload in payloads)
        since = payloads[-1].ts_ring
        question = self.world.request(PriorityClass.FLASH, range(8), 1, tape.name)
        done = question.spec.on_done

        def answered(request: Request) -> None:
            done(request)
            self.waited[tape.name].append(self.device.now - since)

        object.__setattr__(question.spec, "on_done", answered)
        self.scheduler.submit(question)
        self.input.plane.step()  # what the ring's wake-up does


def driven(objective_ns: int, *, flood: int = 1, prompts: int = 0) -> World:
    world = World(objective_ns)
    for session in range(10):
        times = flood if session == 0 else 1
        for n in range(BARS * times):
            at = 1000 + session * EVERY // 10 + n * EVERY // times
            world.device.at(at, partial(world.bar, session, n + 1))
    for n in range(prompts):
        world.device.at(1000 + n * BARS * EVERY // prompts, partial(world.prompts, n))
    world.run()
    for name in NAMES[1:]:
        assert len(world.waited[name]) == BARS, "each bar of a quiet session is a version with its answer"
    assert not world.store.value("foretick_bars_skipped_total", session=NAMES[1])
    return world


@pytest.mark.parametrize("objective_ns", [0, 3 * EVERY], ids=["no objective", "three bars"])
def test_a_flooded_session_delays_the_others_by_a_batch_at_most(objective_ns: int) -> None:
    """It has 100 times the bars, nearly twice what the device can read."""
    calm, flooded = driven(objective_ns), driven(objective_ns, flood=100)
    assert flooded.p99() <= 1.5 * calm.p99() + BATCH_NS
    name = NAMES[0]
    skipped = flooded.store.value("foretick_bars_skipped_total", session=name)
    read = flooded.tapes[name].version
    assert skipped > 0
    assert flooded.gaps > 0
    # the newest bars are read, and the last ones without loss
    assert len(flooded.tapes[name].records) == WINDOW
    assert 0 < read <= 100 * BARS - skipped
    assert flooded.store.value("foretick_bars_waiting", session=name) == 0
    assert [flooded.missed[each] for each in NAMES[1:]] == [0] * 9
    # it is never further behind than its window, its credits, and what comes meanwhile
    newest = max(flooded.waited[name])
    assert newest <= (WINDOW + CREDITS) * 4 * COSTS.batch_ns([(0, BAR_TOKENS)]) + 4 * BATCH_NS


@pytest.mark.parametrize("objective_ns", [0, 3 * EVERY], ids=["no objective", "three bars"])
def test_a_flood_of_prompts_stops_no_tape(objective_ns: int) -> None:
    """Prompts of more than the device can compute: bars have their share, and no deadline is missed."""
    calm, flooded = driven(objective_ns), driven(objective_ns, prompts=80)
    assert flooded.p99() <= 1.5 * calm.p99() + 3 * BATCH_NS
    assert sum(flooded.missed.values()) == 0


@pytest.mark.parametrize("source", [BUS, LOG], ids=["bus", "log"])
def test_what_came_while_the_daemon_was_down_goes_version_by_version(source: SourceConfig) -> None:
    """As it would have gone. A longer backlog is caught up with faster; a bus has none."""
    world = World(0, source)
    bars = IN_ORDER + 100
    for n in range(bars):
        world.device.at(1000 + n, partial(world.bar, 0, n + 1))
    world.run()
    assert sum(world.versions) == bars
    in_order, behind = world.versions[:IN_ORDER], world.versions[IN_ORDER:]
    assert (set(in_order) == {1}) == (source is LOG), in_order
    assert max(behind or in_order) > 1


class Removing(dict[str, FakeTape]):
    """Tapes of which a command's thread removes one as soon as it is looked up."""

    def __contains__(self, name: object) -> bool:
        return self.get(str(name)) is not None

    def get(self, name: str, default: Any = None) -> Any:
        return self.pop(name, default) if name == NAMES[0] else super().get(name, default)


def test_a_session_that_is_removed_while_its_bars_are_appended_stops_no_other() -> None:
    world = World(0)
    world.tapes = Removing(world.tapes)
    built: Any = world.input._models[0].built
    built.tapes = world.tapes
    for session in (0, 1):
        world.bar(session, 1)
        world.bar(session, 2)
    world.run()
    assert world.waited[NAMES[1]]
