"""Answers asks from the ready position of their session's newest version, without a hop to the engine.

*Attention Once* section 3.9.4: an ask is compared with what the model favoured there before any question,
which is known since the version was read. Lives on the event loop.
"""

from functools import lru_cache
from typing import NamedTuple

import msgspec

from daemon import protocol
from daemon.ages import Times
from daemon.api import messages
from daemon.config.answerable import refusal_of
from daemon.config.schema import ModelConfig
from daemon.gateway.answer_cache import Sessions
from flash.early_exit import FastAnswers, ReadyToken, exit_of
from flash.lookup import Known
from flash.question import Question


class _Newest(NamedTuple):
    """Of a session's newest version. ``reply``: to any ask, but for number, choice, ages and last flags."""

    token: ReadyToken
    fast: FastAnswers
    times: Times
    reply: messages.AskReply


class EarlyExits:
    """The newest result of each session. ``tau``: logit gap to exceed, unless an ask has its own; 0: none."""

    def __init__(self, sessions: Sessions, tau: float) -> None:
        self._sessions, self._tau = sessions, tau
        self._newest: dict[str, _Newest] = {}

    def on_ready(self, event: protocol.ReadyLogits) -> None:
        """A version has been evaluated."""
        members = msgspec.structs.asdict(event.metadata)
        members |= {"logit_gap": event.gap, "flags": (*event.metadata.flags, messages.READY_EXIT)}
        reply = messages.AskReply(id=0, text="", **members)
        token = ReadyToken(event.version, event.token, event.gap)
        self._newest[event.session] = _Newest(token, event.fast, event.times, reply)
        if len(self._newest) > len(self._sessions.states):
            self._newest = {n: each for n, each in self._newest.items() if n in self._sessions.states}

    def reply(self, ask: messages.Ask, session: str, known: Known | None) -> messages.AskReply | None:
        """The reply to ``ask``, if the ready position is sure enough and it is for the model.

        ``known``: the standing question that is asked, if any. Raises ValueError for one that is none.
        """
        found, state = self._newest.get(session), self._sessions.state(session)
        # times tell a version from one of another engine that has its number
        if found is None or found.times != state.times:
            return None
        tau = self._tau if ask.early_exit is None else ask.early_exit
        choices = ask.choices if known is None else known.question.choices or ()
        choice = exit_of(found.token, state.version, choices, found.fast, tau)
        if choice is None or not self._sessions.is_open(session):
            return None
        if known is None and not _is_for(
            state.model, state.lookup.text_of(ask.question), choices, ask.max_tokens
        ):
            return None
        dated = state.with_ages(found.times)
        flags = found.reply.flags + state.flags_now(dated["staleness_ns"])
        return msgspec.structs.replace(
            found.reply, id=ask.id, text=choice, choice=choice, flags=flags, **dated
        )


@lru_cache(maxsize=256)
def _is_for(model: ModelConfig, text: str, choices: tuple[str, ...], max_tokens: int) -> bool:
    """Whether the model can answer a client's own question. Raises ValueError for one that is none."""
    return not refusal_of(model, Question("ask", text, choices, max_tokens))
