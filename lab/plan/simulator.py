"""The daemon's engine in virtual time: data plane, scheduler and standing questions over a simulated device.

Ring, bars, lines, credits, scheduler, evaluations and refreshes are the daemon's own code; pool and tapes are
its block metadata. Simulated are the device (a pass takes what the profile says), the host beside a pass
(`CostModel.step_s`, `step_row_s`) and the gateway, which takes `CostModel.answer_s` for one answer after the
other.
"""

import random
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import lcm
from types import SimpleNamespace
from typing import cast

from daemon.api.messages import RETRY_AFTER_S
from daemon.engine.build import Built
from daemon.engine.session_parts import refresh_policy
from daemon.engine.tape_feeder import TapeFeeder, has_gap, missed
from flash.evaluator import Evaluated, FlashEvaluator
from flash.ready import ReadyPosition
from ingest.plane import TapeRecord
from ingest.ring import Ring
from lab.plan.arrivals import Arrival
from lab.plan.host_costs import HostCosts
from lab.plan.load import Load
from lab.plan.market import EPOCH_NS, Market
from lab.plan.simulated_tapes import SimulatedPrefixes, fill_window
from lab.plan.sources import Sources
from lab.simulation.device import SimDevice
from lab.simulation.tokens import Segments
from lab.simulation.workload import Library
from metrics.store import MetricStore
from regions.tape import Tape
from scheduler.interfaces import PriorityClass
from scheduler.observer import Observer
from scheduler.policies import Ordering
from scheduler.refresh import Comparison, Refresher
from scheduler.request import LifecycleEvent, Request, RequestSpec, State
from scheduler.scheduler import Scheduler
from scheduler.tapes import TapeItem

BARS_THROUGH_THE_PLANE = 72
"""Bars of each session that are read before the measurement, so that anchors have settled. Further ones, up
to the retention, are written to the tape directly."""


@dataclass
class Outcomes:
    """What happened in a simulation; times in ns."""

    end_to_end: list[int] = field(default_factory=list)
    """From the version's newest tick to each answer of a standing question."""
    close_to_answer: list[int] = field(default_factory=list)
    """From the tick that closed the version's newest bar to each answer of a standing question."""
    asks: list[int] = field(default_factory=list)
    """From each computed ask to its reply."""
    prompts: list[int] = field(default_factory=list)
    """TTFT of each prompt."""
    bars: int = 0
    """Bars read."""
    late: int = 0
    """Of these, bars read later than their freshness objective."""
    versions: int = 0
    """Data versions."""
    unanswered: Counter[str] = field(default_factory=Counter)
    """Questions, asks and prompts without an answer, by code."""
    peak_cells: int = 0
    """Most tokens of requests under way at once."""


class Simulator:
    """One simulated daemon: `run` plays arrivals, and `outcomes` holds what happened.

    The windows are full when the constructor returns. ``load``: tells the tokens of prompts, and the seed.
    Close it after use: its ring is shared memory.
    """

    def __init__(self, sources: Sources, load: Load) -> None:
        self.outcomes = Outcomes()
        self._sources, self._load, config = sources, load, sources.config
        self._arrivals: deque[Arrival] = deque()
        self._prompts = Library()
        self._front_free = self._late_until = 0
        """When the gateway has published all answers so far; until when prompts are refused."""
        self._costs = HostCosts(sources.costs, on=False, now=self._now)
        self.device = SimDevice(
            self._costs,
            self._elapse,
            blocks=sources.blocks,
            block_size=config.pool.block_size,
            host_blocks=sources.host_blocks,
            keep_prefixes=True,
        )
        self.scheduler = _scheduler(sources, self.device)
        prefixes = SimulatedPrefixes(self.device, config.pool.frame_limit)
        self.tapes = {session.name: prefixes.open_tape(session, sources) for session in config.sessions}
        self._ring = Ring.create(1 << 12, clock=self.device.clock)
        self.store = MetricStore.local({"session": list(self.tapes), "source": ["plan"]})
        self._input = self._make_input()
        self._market = Market(sources, self._ring, load.seed)
        self._refresh(prefixes)
        self._fill()
        self._evaluator = self._begin()

    def close(self) -> None:
        """Free the ring."""
        self._ring.close()
        self._ring.unlink()

    @property
    def forward_ns(self) -> int:
        """Time in forward passes."""
        return self.device.busy_ns - self._costs.host_ns

    def context(self) -> float:
        """Tokens that a question reads, on average over the sessions."""
        tapes = self.tapes.values()
        return sum(tape.live_tokens + len(tape.prefix) for tape in tapes) / len(tapes)

    def bar_tokens(self) -> float:
        """Tokens of a bar, on average over the sessions."""
        return sum(t.live_tokens / max(1, t.live_records) for t in self.tapes.values()) / len(self.tapes)

    @property
    def skipped(self) -> int:
        """Bars that were never read."""
        return self._sum("foretick_bars_skipped_total")

    @property
    def coalesced(self) -> int:
        """Bars answered only together with a later version."""
        return sum(self._evaluator.coalesced.values())

    @property
    def waiting(self) -> int:
        """Bars that wait for the engine."""
        return self._sum("foretick_bars_waiting")

    def run(self, arrivals: Iterable[Arrival], seconds: float) -> None:
        """Play ``arrivals``, times from now, for ``seconds``; what is under way then stays unfinished."""
        begin = self.device.clock.now
        end = begin + round(seconds * 1e9)
        self._arrivals = deque(each._replace(at_ns=begin + each.at_ns) for each in arrivals)
        while self.device.clock.now < end:
            if self.scheduler.step():
                self.outcomes.peak_cells = max(self.outcomes.peak_cells, self.scheduler.queues.cells)
                continue
            upcoming = self._arrivals[0].at_ns if self._arrivals else end
            self._elapse(min(upcoming, end))

    # Arrivals.

    def _elapse(self, until: int) -> None:
        clock = self.device.clock
        while self._arrivals and self._arrivals[0].at_ns <= until:
            arrival = self._arrivals.popleft()
            clock.now = max(clock.now, arrival.at_ns)
            if arrival.kind == "tick":
                self._tick(arrival.of, arrival.at_ns)
            elif arrival.kind == "ask":
                self._ask(arrival.of)
            else:
                self._prompt()
        clock.now = max(clock.now, until)

    def _tick(self, symbol: int, event_ns: int) -> None:
        self._market.trade(symbol, event_ns, self._now())
        self._input.plane.step()

    def _ask(self, session: int) -> None:
        """A question in the words of a standing one of one token, but computed; without one a short text."""
        name = self._sources.config.sessions[session].name
        known = self._sources.registry.standing(name)
        number = self._market.trades
        tokens = known[number % len(known)].prepared.prompt_tokens if known else tuple(range(32))
        asked = self._now()

        def done(request: Request) -> None:
            if request.state is State.FINISHED:
                self.outcomes.asks.append(self._delivered() - asked)
            else:
                self._count_failure(request)

        self.scheduler.submit(
            Request(RequestSpec(PriorityClass.SESSION, name, tokens, 1, done, tape=self.tapes[name]))
        )

    def _prompt(self) -> None:
        """A prompt that has nothing in common with another; refused while tapes are late."""
        if self._now() < self._late_until:
            self.outcomes.unanswered["late"] += 1
            return

        def done(request: Request) -> None:
            first = request.first(LifecycleEvent.KV_ON_GPU)
            if request.state is State.FINISHED and first is not None:
                self.outcomes.prompts.append(first - request.last_chunk_ns)
            else:
                self._count_failure(request)

        tokens = self._prompts.document(self._load.prompt_tokens)
        self.scheduler.submit(
            Request(
                RequestSpec(
                    PriorityClass.POOL,
                    "",
                    Segments([tokens]),
                    self._load.answer_tokens,
                    done,
                    open_prompt=self.device.open_prompt,
                )
            )
        )

    # What happens.

    def _now(self) -> int:
        return self.device.clock.now

    def _count_failure(self, request: Request) -> None:
        if request.error is not None:
            self.outcomes.unanswered[request.error.code] += 1

    def _committed(self, tape: Tape, version: int, records: Sequence[TapeItem[TapeRecord]]) -> None:
        now = self._now()
        self.outcomes.versions += 1
        self.outcomes.bars += len(records)
        late = missed([record.payload for record in records], tape.staleness_ns, now)
        if late:
            self.outcomes.late += late
            self._late_until = now + RETRY_AFTER_S * 10**9
        self._input.plane.step()  # what the ring's wake-up does

    def _evaluated(self, done: Evaluated[TapeRecord]) -> None:
        if done.request.state is State.FINISHED:
            record, acked = done.payloads[-1], self._delivered()
            self.outcomes.end_to_end.append(acked - record.ts_ring)
            self.outcomes.close_to_answer.append(acked - record.ts_closed)
        else:
            self._count_failure(done.request)

    def _delivered(self) -> int:
        """When the gateway is done with one more answer."""
        took = round(self._sources.costs.answer_s * 1e9)
        self._front_free = max(self._front_free, self._now()) + took
        return self._front_free

    def _sum(self, metric: str) -> int:
        return int(sum(self.store.value(metric, session=name) for name in self.tapes))

    # Before the measurement.

    def _make_input(self) -> TapeFeeder:
        sources = self._sources
        # the data plane reads only these of what the daemon builds
        built = SimpleNamespace(
            tapes=self.tapes,
            lines=sources.lines,
            prompt=sources.prompt,
            prefixes=sources.prefixes,
            progress={},
            restored={},
        )
        return TapeFeeder(
            sources.config,
            self._ring,
            "plan",
            [(cast(Built, built), self.scheduler)],
            sources.symbols,
            self.store,
            self.device.clock,
        )

    def _refresh(self, prefixes: SimulatedPrefixes) -> None:
        """Let tapes be refreshed as the sessions want it; nothing is compared."""
        config = self._sources.config
        Refresher(
            self.scheduler,
            self.device,
            prefixes,
            [(self.tapes[s.name], refresh_policy(s)) for s in config.sessions],
            Comparison(lambda session: [], lambda tape, fresh, probes: [], 1),
            Observer(),
            self.device.clock,
            frame_limit=config.pool.frame_limit,
            catch_up_tokens=config.scheduler.chunk_min,
        )

    def _fill(self) -> None:
        """Read bars until every window is full; nothing takes time."""
        intervals = self._sources.intervals
        now, longest = self._now(), max(intervals)
        # the bars of every interval, without more ticks than the shortest ones need
        step = min(intervals)
        for number in range(BARS_THROUGH_THE_PLANE):
            for symbol in range(len(self._sources.symbols)):
                self._tick(symbol, now)
            while self.scheduler.step():
                pass
            now += step if number < BARS_THROUGH_THE_PLANE // 2 else longest
            self.device.clock.now = now
        # whole intervals of all from here on
        self.device.clock.now = now + -(EPOCH_NS + now) % lcm(*intervals)
        for tape, interval in zip(self.tapes.values(), intervals, strict=True):
            fill_window(tape, interval, EPOCH_NS + self._now())

    def _begin(self) -> FlashEvaluator[TapeRecord]:
        """From now on the device takes its time, and versions are asked about."""
        self._costs.on = True
        sources, device = self._sources, self.device
        self.scheduler.subscribe(self._committed)
        evaluator = FlashEvaluator(
            self.scheduler,
            sources.registry,
            self._evaluated,
            has_gap,
            lambda session, version, payloads: None,
            lambda session, version, payloads, asked: None,
            lambda standing, reader: sources.prefixes.asked(standing, reader.prefix),
            lambda payload: payload.ts_ring,
            sources.costs.batch_ns,
        )
        if sources.config.flash.early_exit and (tokens := sources.prompt.ready()):
            ReadyPosition(self.scheduler, tokens, lambda session, ready: None)
        device.passes = device.tokens = device.busy_ns = device.copying_ns = device.peak_blocks = 0
        return evaluator


def _scheduler(sources: Sources, device: SimDevice) -> Scheduler:
    settings = sources.config.scheduler
    ordering = Ordering(settings.policy, settings.k)
    return Scheduler(
        device,
        device.pool,
        sources.limits,
        device.clock,
        ordering=ordering,
        costs=sources.costs,
        tier=device.tier,
        index=device.index if ordering.by_prefix else None,
        rng=random.Random(0),
    )
