"""Messages to the sinks: sent at once, or staged until their version goes into a transaction.

A staged message is complete with its version, and all versions of its session before.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from daemon.gateway.checkpoint.delivery import BACKLOG, Delivery, DeliveryOutcome, Done, RefusedMessage
from daemon.gateway.dead_letters import DeadLetterLog, unpublished
from feeds.codec import encode, make_headers
from feeds.connector import SinkRoute
from feeds.kafka_transactions import KafkaTransactions
from feeds.market_data import Answer, AnyMessage, DataUpdated, DeadLetter, FlashReady, Signal
from feeds.source import OutgoingMessage, Partition, Refusal
from metrics.store import MetricStore

log = logging.getLogger(__name__)


def nothing(_outcome: DeliveryOutcome) -> None:
    """Nothing waits for this message."""


@dataclass(frozen=True)
class Staged:
    """``version`` 0 is complete. ``stream``: of the newest record behind it, if any."""

    session: str
    version: int
    message: OutgoingMessage
    published: Done
    original: AnyMessage
    stream: Partition | None


def _completed(staged: Iterable[Staged]) -> list[Staged]:
    """The same, complete whatever becomes of their sessions and engine."""
    return [replace(each, version=0) for each in staged]


class Outbox:
    """Messages of ``sessions`` and DLQ records; those to `KafkaTransactions` are staged.

    ``source_of``: the stream of a session's newest record. ``lossless``, ``backlog``: see `Delivery`.
    ``listener`` gets every message.
    """

    def __init__(
        self,
        routes: Sequence[SinkRoute],
        sessions: Iterable[str],
        store: MetricStore,
        source_of: Callable[[str], Partition | None] = lambda session: None,
        *,
        lossless: bool = True,
        backlog: int = BACKLOG,
        listener: Callable[[AnyMessage], None] = lambda message: None,
    ) -> None:
        self._store, self._source_of, self._listener = store, source_of, listener
        staging = {index for index, each in enumerate(routes) if isinstance(each.sink, KafkaTransactions)}
        self._route = next((routes[index] for index in staging), None)
        others = [each for index, each in enumerate(routes) if index not in staging]
        self.delivery = Delivery(others, ["", *sessions], self._refused, lossless=lossless, backlog=backlog)
        self._letters = DeadLetterLog(log)
        self._sent = 0
        self._staged: list[Staged] = []
        self._complete: dict[str, int] = {}
        """Newest version by session that is complete, and all before it."""
        self._again: set[str] = set()
        """Sessions whose messages that were taken last will be made again."""
        self.ready = asyncio.Event()
        """Something may be complete."""

    def add(self, session: str) -> None:
        """There is another session."""
        self.delivery.add(session)

    def remove(self, session: str) -> None:
        """A session is gone; what it has sent is still delivered."""
        self.delivery.remove(session)
        self._staged = [
            replace(each, version=0) if each.session == session else each for each in self._staged
        ]
        self._complete.pop(session, None)
        self.ready.set()

    def put(
        self,
        session: str,
        message: AnyMessage,
        key: str,
        headers: dict[str, bytes],
        acknowledge: Done = nothing,
        delivered: Done = nothing,
    ) -> None:
        """Send, or stage; DLQ records are of session "".

        ``acknowledge`` is called when all sinks have the message that take it by themselves, ``delivered``
        when it is in effect: where it is staged, later.
        """
        self._sent += 1
        headers |= make_headers(message, "json", "foretick", self._sent)
        self._listener(message)

        def done(outcome: DeliveryOutcome) -> None:
            if self._route is None:
                delivered(outcome)
            acknowledge(outcome)

        if self._route is not None:
            self._stage(self._route.topic(message), session, message, key, headers, delivered)
        self.delivery.put(session, message, key, headers, done)

    def dead_letter(self, dead_letter: DeadLetter, settle: Callable[[], None] = lambda: None) -> None:
        """A message that could not be used. ``settle`` is called once its record is acknowledged, or refused.

        No sink has to acknowledge one that is staged: it goes with the offset that covers it, or before.
        """
        self._store.inc("foretick_dead_letters_total", stage=dead_letter.stage)
        self._letters.note(dead_letter)
        headers = {"error": dead_letter.error.encode(), "reason": dead_letter.reason.encode()}

        def done(outcome: DeliveryOutcome) -> None:
            if outcome is not DeliveryOutcome.STOPPED:
                settle()

        self.put("", dead_letter, f"{dead_letter.topic}:{dead_letter.partition}", headers, done)

    def _refused(self, refused: RefusedMessage, settle: Callable[[], None]) -> None:
        """A sink refuses a message for good: an answer or signal becomes a DLQ record, another is logged."""
        if isinstance(refused.message, Answer | Signal):
            self.dead_letter(unpublished(refused), settle)
        else:
            log.error("%s", refused.error)
            settle()

    # What is staged.

    def _stage(
        self,
        topic: str,
        session: str,
        message: AnyMessage,
        key: str,
        headers: Mapping[str, bytes],
        published: Done,
    ) -> None:
        if not topic:
            published(DeliveryOutcome.DELIVERED)
            return
        match message:
            case Answer() | Signal() | DataUpdated() | FlashReady():
                version = message.data_version
            case _:
                version = 0
        encoded = OutgoingMessage(topic, key.encode(), encode(message), headers)
        self.delivery.wait_for(1)
        self._staged.append(Staged(session, version, encoded, published, message, self._source_of(session)))
        if self._is_complete(self._staged[-1]):
            self.ready.set()

    def complete(self, session: str, version: int) -> None:
        """All results of this version, and of those before, are acknowledged or staged."""
        self._complete[session] = version
        self.ready.set()

    def _is_complete(self, staged: Staged) -> bool:
        return staged.version <= self._complete.get(staged.session, 0)

    def take(self) -> list[Staged]:
        """What is complete, version by version within a session."""
        self._again.clear()
        return self._take()

    def _take(self) -> list[Staged]:
        return sorted(self._remove(self._is_complete), key=lambda each: each.version)

    def _remove(self, which: Callable[[Staged], bool]) -> list[Staged]:
        found = [each for each in self._staged if which(each)]
        self._staged = [each for each in self._staged if not which(each)]
        return found

    def put_back(self, taken: Sequence[Staged], refused: Mapping[int, Refusal], why: str) -> None:
        """These had no effect: what is not made again, nor ``refused`` for good, by index, is taken next."""
        again = [each for each in taken if each.session in self._again]
        kept = [index for index, each in enumerate(taken) if each.session not in self._again]
        self._staged = [*_completed(taken[index] for index in kept if index not in refused), *self._staged]
        self._finish(again, DeliveryOutcome.STOPPED)
        for index in kept:
            if index in refused:
                self._refuse(taken[index], refused[index], why)

    def _refuse(self, staged: Staged, reason: Refusal, why: str) -> None:
        topic, key, payload, headers = staged.message
        if isinstance(staged.original, DeadLetter):  # one about a DLQ record would be refused, too
            log.error("refused a DLQ record for good: %s", why)
        else:
            refused = RefusedMessage(staged.original, topic, key or b"", payload or b"", headers, reason, why)
            self._refused(refused, lambda: None)
        self._finish([staged], DeliveryOutcome.REFUSED)

    def drop(self, session: str, *, complete: bool) -> None:
        """What is staged of this session will be made again; ``complete``: complete versions, too."""
        if complete:
            self._again.add(session)
        self._stop(lambda each: each.session == session and (complete or not self._is_complete(each)))

    def leave(self, streams: Collection[Partition]) -> None:
        """Another member makes again what comes from these streams, and so do we if they come back."""
        self._stop(lambda each: each.stream in streams)

    def forget(self) -> None:
        """The engine is gone: versions that are not complete will be made again."""
        # the next engine may make complete ones again, and those are not complete
        complete = _completed(self._take())
        self._stop(lambda each: True)
        self._staged = complete
        self._complete.clear()

    def _stop(self, which: Callable[[Staged], bool]) -> None:
        self._finish(self._remove(which), DeliveryOutcome.STOPPED)

    def done(self, taken: Sequence[Staged], *, delivered: bool) -> None:
        """These are in effect, or no attempt is made any more."""
        self._finish(taken, DeliveryOutcome.DELIVERED if delivered else DeliveryOutcome.STOPPED)

    def _finish(self, staged: Sequence[Staged], outcome: DeliveryOutcome) -> None:
        self.delivery.wait_for(-len(staged))
        for each in staged:
            each.published(outcome)
