"""From the engine's answers to acknowledged messages, in order within a session.

An answer is on the board as soon as it is known, and acknowledged to the offset tracker when every sink has
it: offsets are committed after the answers that depend on them (at-least-once).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from daemon import protocol as seam
from daemon.config.schema import Config
from daemon.front.delivery import Delivery, Done, Outcome, Route
from daemon.front.offsets import OffsetRange, OffsetTracker
from daemon.front.sessions import Board
from feeds.codec import make_headers
from feeds.messages import Answer, AnyMessage, DataUpdated, DeadLetter, Flag, InputRange, Latency
from metrics.catalogue import FAILURES
from metrics.store import MetricStore

log = logging.getLogger(__name__)


@dataclass
class _Version:
    """Answers of one version that are still to be acknowledged."""

    open: int
    safe: int


@dataclass
class _Lane:
    """What one session's answers still have to settle."""

    versions: dict[int, _Version] = field(default_factory=dict)
    ranges: tuple[int, list[OffsetRange]] = (0, [])


class Publisher:
    """Publishes what the engine says. ``lossless``: the source can wait, so nothing is ever dropped."""

    def __init__(
        self,
        config: Config,
        routes: Sequence[Route],
        tracker: OffsetTracker,
        board: Board,
        store: MetricStore,
        *,
        lossless: bool = True,
    ) -> None:
        self.delivery = Delivery(routes, ["", *board.states], lossless=lossless)
        self._tracker = tracker
        self._board = board
        self._store = store
        self._stale_after = {s.name: s.stale_after for s in config.sessions}
        self._asked = {name: len(state.questions) for name, state in board.states.items()}
        self._lanes = {name: _Lane() for name in board.states}
        self._sent = 0
        self.model, self.revision, self.untrained = "", "", False

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
        self._put(event.session, update, event.session, {}, done)

    def answered(self, event: seam.Answered) -> None:
        """A standing question's answer."""
        lane = self._lanes[event.session]
        answer = self._answer(lane, event)
        self._board.answered(answer)
        self._open(lane, event.session, event.version, event.inputs.safe)
        settle = self._settler(event.session, event.version)
        published = time.monotonic_ns()

        def done(outcome: Outcome) -> None:
            now = time.monotonic_ns()
            if outcome is Outcome.REFUSED:
                self._store.inc("foretick_answers_failed_total", reason="publish")
            elif outcome is Outcome.DELIVERED:
                self._store.inc("foretick_answers_total", session=event.session)
                self._store.observe("foretick_stage_seconds", now - published, stage="publish")
                self._store.observe("foretick_stage_seconds", now - event.ts_ring, stage="end_to_end")
            settle(outcome)

        self._put(event.session, answer, answer.symbol, _answer_id(answer), done)

    def failed(self, event: seam.AnswerFailed) -> None:
        """A question without an answer: its records count as done with, unless the engine was stopped."""
        log.warning("%s/%s version %d: %s", event.session, event.question, event.version, event.message)
        reason = event.code if event.code in FAILURES else "other"
        self._store.inc("foretick_answers_failed_total", reason=reason)
        self._open(self._lanes[event.session], event.session, event.version, event.inputs.safe)
        stopping = event.code == "stopping"
        self._settler(event.session, event.version)(Outcome.STOPPED if stopping else Outcome.REFUSED)

    def dead_letter(self, letter: DeadLetter) -> None:
        """A message that could not be used."""
        self._store.inc("foretick_dead_letters_total")
        headers = {"error": letter.error.encode(), "reason": letter.reason.encode()}
        self._put("", letter, f"{letter.topic}:{letter.partition}", headers, _ignore)

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
            recomputed_tokens=event.recomputed_tokens,
            swapped_tokens=event.swapped_tokens,
        )

    # Settling.

    def _open(self, lane: _Lane, session: str, version: int, safe: int) -> None:
        lane.versions.setdefault(version, _Version(self._asked[session], safe))

    def _settler(self, session: str, version: int) -> Done:
        lane = self._lanes[session]

        def settle(outcome: Outcome) -> None:
            state = lane.versions.get(version)
            if state is None or outcome is Outcome.STOPPED:
                return
            state.open -= 1
            # in order: a version's offsets stand for those of all before it, whichever is acknowledged first
            while lane.versions and not (oldest := next(iter(lane.versions.items())))[1].open:
                del lane.versions[oldest[0]]
                self._tracker.acknowledged(session, oldest[1].safe)

        return settle

    def _put(self, lane: str, message: AnyMessage, key: str, headers: dict[str, bytes], done: Done) -> None:
        self._sent += 1
        headers |= make_headers(message, "json", "foretick", self._sent)
        self.delivery.put(lane, message, key, headers, done)


def _ignore(_outcome: Outcome) -> None:
    pass


def _answer_id(answer: Answer) -> dict[str, bytes]:
    """What a consumer drops repeats by: the question and the newest input it was answered from."""
    inputs = ",".join(f"{i.topic}/{i.partition}/{i.last_offset}" for i in answer.inputs)
    return {"answer_id": f"{answer.session}:{answer.question_hash}:{inputs or answer.data_version}".encode()}
