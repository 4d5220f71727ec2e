"""Tells the gateway what the model favours at the ready position of each version, before any question."""

from collections.abc import Sequence

from daemon import protocol
from daemon.engine.answers import Emit, times_of
from daemon.engine.build import Built
from daemon.engine.request_runner import RequestRunner
from flash.early_exit import ReadyToken, fast_answers
from flash.ready import ReadyPosition
from flash.registry import Registry
from scheduler.scheduler import Scheduler


class ReadyEvents:
    """On the scheduler's thread. ``tokens``: see `ReadyPosition`; without any, there are no events."""

    def __init__(
        self,
        built: Built,
        scheduler: Scheduler,
        registry: Registry,
        requests: RequestRunner,
        tokens: Sequence[int],
        emit: Emit,
    ) -> None:
        self._built, self._registry, self._requests, self._emit = built, registry, requests, emit
        if tokens:
            ReadyPosition(scheduler, tokens, self.on_ready)

    def on_ready(self, session: str, ready: ReadyToken) -> None:
        """Tell it of the newest version, unless questions about that are refused."""
        tape = self._built.tapes.get(session)
        record = self._requests.record(session, ready.version)
        if tape is None or record is None or tape.version != ready.version or self._requests.refuses(session):
            return
        self._emit(
            protocol.ReadyLogits(
                session=session,
                version=ready.version,
                token=ready.token,
                gap=ready.gap,
                fast=dict(fast_answers(self._registry.standing(session))),
                metadata=self._requests.metadata(session, ready.version),
                times=times_of(record),
            )
        )
