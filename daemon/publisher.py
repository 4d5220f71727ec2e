"""From the engine's answers to acknowledged messages, in order within a session.

An answer is on the board as soon as it is known, and acknowledged to the offset tracker when every sink has
it: offsets are committed after the answers that depend on them (at-least-once).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from daemon import seam
from daemon.board import Board
from daemon.offsets import OffsetRange, OffsetTracker
from daemon.sections import Config
from feeds.codec import encode, make_headers
from feeds.messages import Answer, AnyMessage, DataUpdated, DeadLetter, Flag, InputRange, Latency
from feeds.source import PublishRefused, Sink, SinkStopped
from metrics.catalogue import FAILURES
from metrics.store import MetricStore

log = logging.getLogger(__name__)

BACKLOG = 4096
"""Messages waiting for their sinks above which a source that can wait is held up."""


@dataclass(frozen=True)
class Route:
    """A sink and the topics it uses; an empty topic means that this sink does not carry that message."""

    sink: Sink
    answers: str
    updates: str = ""
    dead_letters: str = ""

    def topic(self, message: AnyMessage) -> str:
        """Where the message goes."""
        if isinstance(message, DataUpdated):
            return self.updates
        return self.dead_letters if isinstance(message, DeadLetter) else self.answers


class _Outcome(Enum):
    DELIVERED = "every sink has it"
    REFUSED = "a sink will never take it"
    STOPPED = "a sink was stopped before it had it"


Done = Callable[[_Outcome], None]


@dataclass
class _Version:
    """Answers of one version that are still to be acknowledged."""

    open: int
    safe: int


@dataclass(frozen=True)
class _Outgoing:
    message: AnyMessage
    key: bytes
    headers: dict[str, bytes]
    done: Done


@dataclass
class _Lane:
    """One session's messages, published in order."""

    queue: asyncio.Queue[_Outgoing | None] = field(default_factory=asyncio.Queue)
    versions: dict[int, _Version] = field(default_factory=dict)
    ranges: tuple[int, list[OffsetRange]] = (0, [])
    task: asyncio.Task[None] | None = None


class Publisher:
    """Publishes what the engine says; one lane a session, dead letters in a lane of their own."""

    def __init__(
        self,
        config: Config,
        routes: Sequence[Route],
        tracker: OffsetTracker,
        board: Board,
        store: MetricStore,
        gate: Callable[[bool], None] = lambda _open: None,
    ) -> None:
        self._routes = routes
        self._tracker = tracker
        self._board = board
        self._store = store
        self.gate = gate
        self._stale_after = {s.name: s.stale_after for s in config.sessions}
        self._asked = {name: len(state.questions) for name, state in board.states.items()}
        self._lanes = {name: _Lane() for name in ["", *board.states]}
        self._waiting = 0
        self._sent = 0
        self.model, self.revision, self.untrained = "", "", False

    def start(self) -> None:
        """Begin publishing."""
        for name, lane in self._lanes.items():
            work = self._publish_lane(lane)
            lane.task = asyncio.create_task(work, name=f"publish {name or 'dead letters'}")

    async def stop(self, drain_s: float) -> int:
        """Publish what waits, at most ``drain_s`` seconds; returns how many messages are left."""
        tasks = [lane.task for lane in self._lanes.values() if lane.task is not None]
        for lane in self._lanes.values():
            lane.queue.put_nowait(None)
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=drain_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        return self._waiting

    # What the engine says.

    def committed(self, event: seam.Committed) -> None:
        """A new data version; without standing questions it is acknowledged with its own event."""
        lane = self._lanes[event.session]
        done: Done
        if self._asked[event.session]:
            done = _ignore
        else:
            lane.versions[event.version] = _Version(1, event.inputs.safe)
            done = self._settler(event.session, event.version)
        update = DataUpdated(
            session=event.session, data_version=event.version, as_of=event.as_of, bars=event.bars
        )
        self._put(lane, update, event.session, {}, done)

    def answered(self, event: seam.Answered) -> None:
        """A standing question's answer."""
        lane = self._lanes[event.session]
        answer = self._answer(lane, event)
        self._board.answered(answer)
        self._open(lane, event.session, event.version, event.inputs.safe)
        settle = self._settler(event.session, event.version)
        published = time.monotonic_ns()

        def done(outcome: _Outcome) -> None:
            now = time.monotonic_ns()
            if outcome is _Outcome.REFUSED:
                self._store.inc("foretick_answers_failed_total", reason="publish")
            elif outcome is _Outcome.DELIVERED:
                self._store.inc("foretick_answers_total", session=event.session)
                self._store.observe("foretick_stage_seconds", now - published, stage="publish")
                self._store.observe("foretick_stage_seconds", now - event.ts_ring, stage="end_to_end")
            settle(outcome)

        self._put(lane, answer, answer.symbol, _answer_id(answer), done)

    def failed(self, event: seam.AnswerFailed) -> None:
        """A question without an answer: its records count as done with, unless the engine was stopped."""
        log.warning("%s/%s version %d: %s", event.session, event.question, event.version, event.sentence)
        reason = event.code if event.code in FAILURES else "other"
        self._store.inc("foretick_answers_failed_total", reason=reason)
        self._open(self._lanes[event.session], event.session, event.version, event.inputs.safe)
        stopping = event.code == "stopping"
        self._settler(event.session, event.version)(_Outcome.STOPPED if stopping else _Outcome.REFUSED)

    def dead_letter(self, letter: DeadLetter) -> None:
        """A message that could not be used."""
        self._store.inc("foretick_dead_letters_total")
        headers = {"error": letter.error.encode(), "reason": letter.reason.encode()}
        self._put(self._lanes[""], letter, f"{letter.topic}:{letter.partition}", headers, _ignore)

    def forget(self) -> None:
        """The engine is gone: what was not acknowledged will be read again."""
        for lane in self._lanes.values():
            lane.versions.clear()

    def _answer(self, lane: _Lane, event: seam.Answered) -> Answer:
        if lane.ranges[0] != event.version:  # all questions of a version share their inputs
            lane.ranges = (
                event.version,
                self._tracker.ranges(event.session, event.inputs.first, event.inputs.last),
            )
        age = time.monotonic_ns() - event.ts_ring
        flags: list[Flag] = [*event.flags]  # type: ignore[list-item]  # the engine uses the same words
        if 0 < self._stale_after[event.session] < age:
            flags.append("stale")
        stages = event.stages
        return Answer(
            session=event.session,
            symbol=self._board.states[event.session].symbol,
            question=event.question,
            question_hash=event.question_hash,
            text=event.text,
            choice=event.choice,
            logit_gap=event.logit_gap,
            probability=None,
            data_version=event.version,
            inputs=[InputRange(*found) for found in lane.ranges[1]],
            as_of=event.as_of,
            staleness_ns=age,
            model=self.model,
            model_revision=self.revision,
            untrained=self.untrained,
            latency=Latency(
                ring_wait_ns=stages.ring_wait,
                bars_ns=stages.bars,
                tokenise_ns=stages.tokenise,
                queue_ns=stages.queue,
                forward_ns=stages.forward,
                total_ns=age,
            ),
            reused_tokens=event.reused_tokens,
            computed_tokens=event.computed_tokens,
            flags=flags,
            published_at=time.time_ns(),
        )

    # Lanes.

    def _open(self, lane: _Lane, session: str, version: int, safe: int) -> None:
        lane.versions.setdefault(version, _Version(self._asked[session], safe))

    def _settler(self, session: str, version: int) -> Done:
        lane = self._lanes[session]

        def settle(outcome: _Outcome) -> None:
            state = lane.versions.get(version)
            if state is None or outcome is _Outcome.STOPPED:
                return
            state.open -= 1
            # in order: a version's offsets stand for those of all before it, whichever is acknowledged first
            while lane.versions and not (oldest := next(iter(lane.versions.items())))[1].open:
                del lane.versions[oldest[0]]
                self._tracker.acknowledged(session, oldest[1].safe)

        return settle

    def _put(
        self,
        lane: _Lane,
        message: AnyMessage,
        key: str,
        headers: dict[str, bytes],
        done: Done,
    ) -> None:
        self._sent += 1
        headers |= make_headers(message, "json", "foretick", self._sent)
        self._waiting += 1
        if self._waiting >= BACKLOG:
            self.gate(False)
        lane.queue.put_nowait(_Outgoing(message, key.encode(), headers, done))

    async def _publish_lane(self, lane: _Lane) -> None:
        ended = False
        while not ended:
            batch = [await lane.queue.get()]
            while not lane.queue.empty():
                batch.append(lane.queue.get_nowait())
            ended = batch[-1] is None  # the end marker is the last thing put
            await asyncio.gather(*(self._publish(outgoing) for outgoing in batch if outgoing))

    async def _publish(self, outgoing: _Outgoing) -> None:
        payload = encode(outgoing.message)
        outcomes = [
            await self._deliver(route.sink, topic, outgoing, payload)
            for route in self._routes
            if (topic := route.topic(outgoing.message))
        ]
        self._waiting -= 1
        if self._waiting < BACKLOG // 2:
            self.gate(True)
        worst = (o for o in (_Outcome.STOPPED, _Outcome.REFUSED) if o in outcomes)
        outgoing.done(next(worst, _Outcome.DELIVERED))

    async def _deliver(self, sink: Sink, topic: str, outgoing: _Outgoing, payload: bytes) -> _Outcome:
        try:
            await sink.publish(topic, outgoing.key, payload, outgoing.headers)
        except SinkStopped:
            return _Outcome.STOPPED
        # it can never be delivered: holding back its records for ever would help nobody
        except PublishRefused as error:
            log.error("%s refused a message for good: %s", sink.name, error)
            return _Outcome.REFUSED
        except Exception:
            log.exception("%s failed to publish a message", sink.name)
            return _Outcome.REFUSED
        return _Outcome.DELIVERED


def _ignore(_outcome: _Outcome) -> None:
    pass


def _answer_id(answer: Answer) -> dict[str, bytes]:
    """What a consumer drops repeats by: the question and the newest input it was answered from."""
    inputs = ",".join(f"{i.topic}/{i.partition}/{i.last_offset}" for i in answer.inputs)
    return {"answer_id": f"{answer.session}:{answer.question_hash}:{inputs or answer.data_version}".encode()}
