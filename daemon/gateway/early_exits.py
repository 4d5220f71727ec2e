"""Answers asks from the ready position of their session's newest version, without a hop to the engine.

*Attention Once* section 3.9.4: an ask is compared with what the model favoured there before any question,
which is known since the version was read. Lives on the event loop.
"""

import msgspec

from daemon import protocol
from daemon.api import messages
from daemon.config.answerable import refusal_of
from daemon.gateway.answer_cache import Sessions
from flash.early_exit import ReadyToken, exit_of
from flash.question import Question


class EarlyExits:
    """The newest result of each session. ``tau``: logit gap to exceed, unless an ask has its own; 0: none."""

    def __init__(self, sessions: Sessions, tau: float) -> None:
        self._sessions, self._tau = sessions, tau
        self._newest: dict[str, protocol.ReadyLogits] = {}

    def on_ready(self, event: protocol.ReadyLogits) -> None:
        """A version has been evaluated."""
        self._newest[event.session] = event
        if len(self._newest) > len(self._sessions.states):
            self._newest = {n: each for n, each in self._newest.items() if n in self._sessions.states}

    def reply(self, ask: messages.Ask, session: str, question: Question) -> messages.AskReply | None:
        """The reply to ``question``, if the ready position is sure enough and it is for the model."""
        found, state = self._newest.get(session), self._sessions.state(session)
        # times tell a version from one of another engine that has its number
        if found is None or found.times != state.times:
            return None
        tau = self._tau if ask.early_exit is None else ask.early_exit
        ready = ReadyToken(found.version, found.token, found.gap)
        choice = exit_of(ready, state.version, question.choices or (), found.fast, tau)
        if choice is None or not self._sessions.is_open(session) or refusal_of(state.model, question):
            return None
        dated = state.with_ages(found.times)
        now = state.flags_now(dated["staleness_ns"])
        flags = (*found.metadata.flags, messages.READY_EXIT, *now)
        members = msgspec.structs.asdict(found.metadata)
        members |= {"choice": choice, "logit_gap": found.gap, "flags": flags} | dated
        return messages.AskReply(id=ask.id, text=choice, **members)
