"""Labels of past answers, from clients to the engine."""

import msgspec

from daemon.api import messages
from daemon.gateway.answer_cache import Sessions
from daemon.gateway.pending import PendingCommands
from metrics.store import MetricStore


class LabelRequests:
    """Passes labels on. Lives on the event loop."""

    def __init__(self, sessions: Sessions, store: MetricStore, pending: PendingCommands) -> None:
        self._sessions, self._store, self._pending = sessions, store, pending

    async def label(self, request: messages.Label) -> messages.LabelReply:
        """Pass a client's label on."""
        named = self._sessions.state(request.session).lookup.named(request.question)
        self._sessions.check_open(request.session)
        name = next((each.question.name for each in named if each.question.choices), request.question)
        reply = await self._pending.reply(
            lambda number: msgspec.structs.replace(request, id=number, question=name)
        )
        assert isinstance(reply, messages.LabelReply)
        self._store.inc("foretick_labels_total", outcome="right" if reply.right else "wrong")
        return msgspec.structs.replace(reply, id=request.id)
