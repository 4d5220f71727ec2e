"""Labels of past answers, from clients to the engine."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from daemon import protocol
from daemon.api import messages
from daemon.gateway.answer_cache import Sessions
from daemon.gateway.waiting import Waiting
from metrics.store import MetricStore


class LabelRequests:
    """Passes labels on. Lives on the event loop."""

    def __init__(
        self, sessions: Sessions, store: MetricStore, send: Callable[[protocol.Command], None]
    ) -> None:
        self._sessions, self._store, self._send = sessions, store, send
        self._waiting: Waiting[messages.LabelReply] = Waiting()

    def on_event(self, event: messages.LabelReply | protocol.LabelRefused) -> None:
        """The engine replied to a label."""
        if isinstance(event, messages.LabelReply):
            self._waiting.done(event.id, event)
        else:
            self._waiting.refused(event)

    def engine_gone(self, message: str) -> None:
        """Fail every label in flight: the engine is gone."""
        self._waiting.engine_gone(message)

    async def label(self, request: messages.Label) -> messages.LabelReply:
        """Pass a client's label on."""
        named = self._sessions.state(request.session).lookup.named(request.question)
        name = next((each.question.name for each in named if each.question.choices), request.question)
        reply = await self._waiting.reply(
            lambda number: self._send(msgspec.structs.replace(request, id=number, question=name))
        )
        self._store.inc("foretick_labels_total", outcome="right" if reply.right else "wrong")
        return msgspec.structs.replace(reply, id=request.id)
