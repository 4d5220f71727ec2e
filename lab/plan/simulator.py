"""The daemon's engine in virtual time: data plane, scheduler and standing questions over a simulated device.

Ring, bars, lines, credits, scheduler, evaluations and refreshes are the daemon's own code; pool and tapes are
its block metadata. Simulated are the device (a pass takes what the profile says), the host beside a pass
(`CostModel.step_s`, `step_row_s`) and the gateway, which takes `CostModel.answer_s` for one answer after the
other.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import lcm
from types import SimpleNamespace
from typing import cast

from daemon.api.messages import RETRY_AFTER_S
from daemon.config.schema import SessionConfig
from daemon.engine.build import Built, retention_of
from daemon.engine.session_lifecycle import refresh_policy
from daemon.engine.tape_feeder import Appended, TapeFeeder, has_gap, missed
from flash.evaluator import Evaluated, FlashEvaluator
from flash.ready import ReadyPosition
from ingest.record import TRADE, RecordWriter
from ingest.ring import Ring
from lab.plan.arrivals import Arrival
from lab.plan.sources import Sources
from lab.simulation.device import SimDevice
from lab.simulation.tokens import Segments
from metrics.store import MetricStore
from regions.ephemeral import Fork
from regions.frozen import Context
from regions.tape import Tape
from scheduler.costs import CostModel, Span
from scheduler.interfaces import PriorityClass
from scheduler.observer import Observer
from scheduler.policies import Ordering
from scheduler.refresh import Comparison, Refresher
from scheduler.request import LifecycleEvent, Request, RequestSpec, State
from scheduler.scheduler import Scheduler
from scheduler.tapes import TapeItem

EPOCH_NS = 1_750_000_000 * 10**9
"""Event time and wall clock at virtual time 0."""
BARS_THROUGH_THE_PLANE = 72
"""Bars of each session that are read before the measurement, so that anchors have settled. Further ones, up
to the retention, are written to the tape directly."""
_PRICE = 20_000
"""Of the synthetic ticks, in units of the last decimal."""


class Beside:
    """A profile's costs with the host's: what a pass takes in the daemon. Off, everything takes no time.

    ``now``: a clock in ns, by which the device pauses between passes; without it, it never does.
    """

    def __init__(self, costs: CostModel, *, on: bool = True, now: Callable[[], int] | None = None) -> None:
        self._costs, self.on, self._now = costs, on, now
        self._ended = 0
        self.host_ns = 0
        """Of all passes so far: their time beside the device."""

    def batch_ns(self, spans: Sequence[Span]) -> int:
        """One pass with its step."""
        if not self.on:
            return 0
        host = round((self._costs.step_s + self._costs.step_row_s * len(spans)) * 1e9)
        self.host_ns += host
        return self._costs.batch_ns(spans) + host + self._waking_ns(spans, host)

    def _waking_ns(self, spans: Sequence[Span], host: int) -> int:
        """What this pass takes longer, because the device paused before it."""
        waking = self._costs.waking
        if self._now is None or waking is None:
            return 0
        paused = max(0, self._now() - self._ended)
        longer = round(waking(paused * 1e-9) * 1e9)
        self._ended = self._now() + self._costs.batch_ns(spans) + host + longer
        return longer

    def recompute_ns(self, tokens: int) -> int:
        """See `Costs`."""
        return self._costs.recompute_ns(tokens)

    def swap_ns(self, blocks: int) -> int:
        """See `Costs`."""
        return self._costs.swap_ns(blocks)

    def swap_out_ns(self, blocks: int) -> int:
        """See `DeviceCosts`."""
        return self._costs.swap_out_ns(blocks) if self.on else 0

    def swap_in_ns(self, blocks: int) -> int:
        """See `DeviceCosts`."""
        return self._costs.swap_in_ns(blocks) if self.on else 0


class World:
    """One simulated daemon; `run` plays arrivals, the lists below hold what happened (times in ns).

    The windows are full when the constructor returns. ``prompt_tokens``, ``answer_tokens``: of each prompt.
    Close it after use: its ring is shared memory.
    """

    def __init__(
        self, sources: Sources, *, prompt_tokens: int = 512, answer_tokens: int = 16, seed: int = 0
    ) -> None:
        self.sources, config = sources, sources.config
        self.end_to_end: list[int] = []
        """From the version's newest tick to each answer of a standing question."""
        self.close_to_answer: list[int] = []
        """From the tick that closed the version's newest bar to each answer of a standing question."""
        self.asks: list[int] = []
        """From each computed ask to its reply."""
        self.prompts: list[int] = []
        """TTFT of each prompt."""
        self.bars = self.late = self.versions = 0
        """Bars read; those read later than promised; data versions."""
        self.unanswered: Counter[str] = Counter()
        """Questions, asks and prompts without an answer, by code."""
        self.peak_cells = 0
        """Most tokens of requests under way at once."""
        self._arrivals: list[Arrival] = []
        self._next = self._front_free = self._late_until = 0
        self._prompt_tokens, self._answer_tokens, self._prompts = prompt_tokens, answer_tokens, 0
        size = config.pool.block_size
        self._costs = Beside(sources.costs, on=False, now=self._now)
        self.device = device = SimDevice(
            self._costs,
            self._elapse,
            blocks=sources.blocks,
            block_size=size,
            host_blocks=config.pool.host_blocks,
            keep_prefixes=True,
        )
        settings = config.scheduler
        ordering = Ordering(settings.policy, settings.k)
        self.scheduler = Scheduler(
            device,
            device.pool,
            sources.limits,
            device.clock,
            ordering=ordering,
            costs=sources.costs,
            tier=device.tier,
            index=device.index if ordering.by_prefix else None,
            rng=random.Random(settings.seed),
        )
        self.tapes = {session.name: self._open(session) for session in config.sessions}
        self._ring = Ring.create(1 << 12, clock=device.clock)
        self.store = MetricStore.local({"session": list(self.tapes), "source": ["plan"]})
        # the data plane reads only these of what the daemon builds
        built = SimpleNamespace(
            tapes=self.tapes,
            lines=sources.lines,
            prompt=sources.prompt,
            prefixes=sources.prefixes,
            progress={},
            restored={},
        )
        self._input = TapeFeeder(
            config,
            self._ring,
            "plan",
            cast(Built, built),
            sources.symbols,
            self.scheduler,
            self.store,
            device.clock,
        )
        self._writer = RecordWriter(1)
        self._rng = random.Random(seed)
        self._prices = [_PRICE] * len(sources.symbols)
        self._units = [0] * len(sources.symbols)
        self._finer = [0] * len(sources.symbols)
        for session in config.sessions:
            for each in session.symbols:
                self._finer[sources.symbols[each]] = session.scale - 9
                self._units[sources.symbols[each]] = 10 ** (session.scale - session.price_decimals)
        self._refresher = self._make_refresher()
        self._offset = 0
        self._fill()
        self._begin()

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
        """Bars passed over unread."""
        names = self.tapes
        return int(sum(self.store.value("foretick_bars_skipped_total", session=name) for name in names))

    @property
    def coalesced(self) -> int:
        """Bars answered only together with a later version."""
        return sum(self._evaluator.coalesced.values())

    @property
    def waiting(self) -> int:
        """Bars that wait for the engine."""
        names = self.tapes
        return int(sum(self.store.value("foretick_bars_waiting", session=name) for name in names))

    def run(self, arrivals: list[Arrival], seconds: float) -> None:
        """Play ``arrivals``, times from now, for ``seconds``; what is under way then stays unfinished."""
        begin = self.device.clock.now
        end = begin + round(seconds * 1e9)
        self._arrivals = [each._replace(at_ns=begin + each.at_ns) for each in arrivals]
        self._next = 0
        while self.device.clock.now < end:
            if self.scheduler.step():
                self.peak_cells = max(self.peak_cells, self.scheduler.queues.cells)
                continue
            upcoming = self._arrivals[self._next].at_ns if self._next < len(self._arrivals) else end
            self._elapse(min(upcoming, end))

    # Arrivals.

    def _elapse(self, until: int) -> None:
        clock = self.device.clock
        while self._next < len(self._arrivals) and self._arrivals[self._next].at_ns <= until:
            arrival = self._arrivals[self._next]
            self._next += 1
            clock.now = max(clock.now, arrival.at_ns)
            if arrival.kind == "tick":
                self._tick(arrival.of, arrival.at_ns)
            elif arrival.kind == "ask":
                self._ask(arrival.of)
            else:
                self._prompt()
        clock.now = max(clock.now, until)

    def _tick(self, symbol: int, event_ns: int) -> None:
        price = self._prices[symbol] + self._rng.choice((-1, 0, 1))
        self._prices[symbol] = price = min(max(price, _PRICE - 50), _PRICE + 50)
        now = EPOCH_NS + self.device.clock.now
        self._offset += 1
        self._writer.clear()
        self._writer.add(
            TRADE,
            symbol,
            EPOCH_NS + event_ns,
            now,
            (price * self._units[symbol], 10**9, 0, 0, 0),
            offset=self._offset,
            ts_source=now,
            price_finer=self._finer[symbol],
        )
        self._ring.push(self._writer.records)
        self._input.take()

    def _ask(self, session: int) -> None:
        """A question in the words of a standing one of one token, but computed; without one a short text."""
        name = self.sources.config.sessions[session].name
        known = self.sources.registry.standing(name)
        tokens = known[self._offset % len(known)].prepared.prompt_tokens if known else tuple(range(32))
        asked = self.device.clock.now

        def done(request: Request) -> None:
            if request.state is State.FINISHED:
                self.asks.append(self._delivered() - asked)
            elif request.error is not None:
                self.unanswered[request.error.code] += 1

        self.scheduler.submit(
            Request(RequestSpec(PriorityClass.SESSION, name, tokens, 1, done, tape=self.tapes[name]))
        )

    def _prompt(self) -> None:
        """A prompt that has nothing in common with another; refused while tapes are late."""
        if self.device.clock.now < self._late_until:
            self.unanswered["late"] += 1
            return
        begin = (self._prompts * (self._prompt_tokens + 1)) % (1 << 30)
        self._prompts += 1

        def done(request: Request) -> None:
            first = request.first(LifecycleEvent.KV_ON_GPU)
            if request.state is State.FINISHED and first is not None:
                self.prompts.append(first - request.last_chunk_ns)
            elif request.error is not None:
                self.unanswered[request.error.code] += 1

        self.scheduler.submit(
            Request(
                RequestSpec(
                    PriorityClass.POOL,
                    "",
                    Segments([range(begin, begin + self._prompt_tokens)]),
                    self._answer_tokens,
                    done,
                    open_prompt=self.device.open_prompt,
                )
            )
        )

    # What happens.

    def _now(self) -> int:
        return self.device.clock.now

    def _committed(self, tape: Tape, version: int, records: Sequence[TapeItem[Appended]]) -> None:
        now = self.device.clock.now
        self.versions += 1
        self.bars += len(records)
        late = missed([record.payload for record in records], tape.staleness_ns, now)
        if late:
            self.late += late
            self._late_until = now + RETRY_AFTER_S * 10**9
        self._input.take()  # what the ring's wake-up does

    def _evaluated(self, done: Evaluated[Appended]) -> None:
        if done.request.state is State.FINISHED:
            record, acked = done.payloads[-1].record, self._delivered()
            self.end_to_end.append(acked - record.ts_ring)
            self.close_to_answer.append(acked - record.ts_closed)
        elif done.request.error is not None:
            self.unanswered[done.request.error.code] += 1

    def _delivered(self) -> int:
        """When the gateway is done with one more answer."""
        took = round(self.sources.costs.answer_s * 1e9)
        self._front_free = max(self._front_free, self.device.clock.now) + took
        return self._front_free

    # Before the measurement.

    def _open(self, session: SessionConfig) -> Tape:
        prefix = self.sources.prefixes.newest(session.name)
        frozen = self.open_prefix(prefix)
        rest = prefix[frozen.cached_tokens :]
        if not frozen.acquire(len(rest)):
            raise ValueError(
                f"a pool of {self.sources.blocks} blocks is too small for {len(prefix)} frozen tokens"
            )
        frozen.wrote(frozen.next_slots(len(rest)), rest)
        limit = min(self.sources.config.pool.frame_limit, self.sources.outline.max_positions)
        tape = Tape(
            session.name,
            self.device.pool,
            self.close_prefix(prefix, frozen),
            retention_of(session, self.sources.prompt),
            frame_limit=limit,
        )
        tape.staleness_ns = self.sources.config.promise_ns(session)
        return tape

    def open_prefix(self, tokens: Sequence[int]) -> Fork:
        """See `scheduler.refresh.Prefixes`."""
        context = self.device.cache.match(tokens) or Context()
        prompt = Fork(self.device.pool, frame_limit=self.sources.config.pool.frame_limit, context=context)
        context.release()
        return prompt

    def close_prefix(self, tokens: Sequence[int], prompt: Fork) -> Context:
        """See `scheduler.refresh.Prefixes`."""
        self.device.cache.save(tokens, prompt)
        context = prompt.as_context()
        prompt.release()
        return replace(context, prefix=tuple(tokens))

    def _make_refresher(self) -> Refresher:
        config = self.sources.config
        nothing = Comparison(lambda session: [], lambda tape, fresh, probes: [], 1)
        return Refresher(
            self.scheduler,
            self.device,
            self,
            [(self.tapes[s.name], refresh_policy(s)) for s in config.sessions],
            nothing,
            Observer(),
            self.device.clock,
            frame_limit=config.pool.frame_limit,
            catch_up_tokens=config.scheduler.chunk_min,
        )

    def _fill(self) -> None:
        """Read bars until every window is full; nothing takes time."""
        intervals = self.sources.intervals
        now, longest = self.device.clock.now, max(intervals)
        # the bars of every interval, without more ticks than the shortest ones need
        step = min(intervals)
        for number in range(BARS_THROUGH_THE_PLANE):
            for symbol in range(len(self.sources.symbols)):
                self._tick(symbol, now)
            while self.scheduler.step():
                pass
            now += step if number < BARS_THROUGH_THE_PLANE // 2 else longest
            self.device.clock.now = now
        # whole intervals of all from here on
        self.device.clock.now = now + -(EPOCH_NS + now) % lcm(*intervals)
        for session, interval in zip(self.sources.config.sessions, intervals, strict=True):
            self._fill_up(self.tapes[session.name], interval)

    def _fill_up(self, tape: Tape, interval: int) -> None:
        kept, length = tape.retention, round(tape.live_tokens / max(1, tape.live_records))
        at = EPOCH_NS + self.device.clock.now
        while (
            length
            and tape.live_tokens + length <= kept.tokens
            and (not kept.records or tape.live_records < kept.records)
            and (not kept.span_ns or tape.live_records * interval < kept.span_ns)
        ):
            tokens = [3] * length
            if not tape.acquire(length):
                raise ValueError(f"a pool of {self.sources.blocks} blocks does not hold the windows")
            tape.wrote(tape.next_slots(length), tokens)
            tape.commit([length], [at])

    def _begin(self) -> None:
        """From now on the device takes its time, and versions are asked about."""
        self._costs.on = True
        self.scheduler.subscribe(self._committed)
        self._evaluator = FlashEvaluator(
            self.scheduler,
            self.sources.registry,
            self._evaluated,
            has_gap,
            lambda session, version, payloads: None,
            lambda session, version, payloads, asked: None,
            self.sources.prefixes.asked,
            lambda payload: payload.record.ts_ring,
            self.sources.costs.batch_ns,
        )
        tokens = self.sources.prompt.ready() if self.sources.config.flash.early_exit else []
        self._ready = ReadyPosition(self.scheduler, tokens) if tokens else None
        device = self.device
        device.passes = device.tokens = device.busy_ns = device.copying_ns = device.peak_blocks = 0
