"""Makes signals of the answers of whole versions; what it knows of a session is part of its progress."""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from decimal import Decimal

import msgspec

from daemon import protocol
from daemon.config.schema import Config, SessionConfig
from daemon.config.signals import rules_reading
from daemon.gateway.checkpoint.state import ProgressStore
from feeds.decoding import Undecodable, decoded
from feeds.market_data import Answer, Signal, SignalCause
from flash.signals import UNKNOWN, MadeSignal, Said, SessionSignals, SignalRule, stepped
from ingest.lines import decimal
from metrics.store import MetricStore

log = logging.getLogger(__name__)

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(SessionSignals).decode


class SignalMaker:
    """What sessions' signals are, and what is known for them beyond their acknowledged progress.

    ``config()``: as it is now. ``is_ours(session)``: this daemon answers it; of others nothing is known.
    ``kept``: of the newest signals, how many are kept for clients that ask.
    """

    def __init__(
        self,
        config: Callable[[], Config],
        progress: ProgressStore,
        store: MetricStore,
        is_ours: Callable[[str], bool],
        kept: int = 256,
    ) -> None:
        self._is_ours = is_ours
        self._config, self._progress, self._store = config, progress, store
        self._of: Config | None = None
        """What ``_sessions`` and ``_rules`` were read from."""
        self._sessions: dict[str, SessionConfig] = {}
        self._rules: dict[str, list[SignalRule]] = {}
        self._states: dict[str, SessionSignals] = {}
        self.newest = deque[Signal](maxlen=kept)

    def reads(self, session: str) -> bool:
        """Whether there are signals of its answers."""
        return bool(self._config().signals) and bool(self.rules(session))

    def rules(self, session: str) -> list[SignalRule]:
        """Those that read its answers."""
        config = self._config()
        if config is not self._of:
            self._of, self._sessions = config, {each.name: each for each in config.sessions}
            self._rules.clear()
        if session not in self._rules:
            self._rules[session] = list(rules_reading(config, self._sessions, session))
        return self._rules[session]

    def forget(self, session: str | None = None) -> None:
        """What its answers said behind the newest acknowledged version comes again; None: of all sessions."""
        if session is None:
            self._states.clear()
        else:
            self._states.pop(session, None)

    def state(self, session: str) -> SessionSignals:
        """What is known of it."""
        if session not in self._states:
            stored = self._progress.of(session).signals
            try:
                self._states[session] = decoded(_decode, stored) if stored else UNKNOWN
            except Undecodable as error:
                log.warning("what was known for signals of %s is not used: %s", session, error)
                self._states[session] = UNKNOWN
        return self._states[session]

    def made(
        self,
        session: str,
        version: int,
        answers: Sequence[Answer],
        inputs: protocol.VersionInputs,
        close: int | None = None,
    ) -> tuple[bytes | None, list[Signal]]:
        """The signals of a version, and what is known afterwards; None where nothing was answered.

        ``close``: as in `Committed`.
        """
        if not answers:
            return None, []
        rules = self.rules(session)
        others = {name for rule in rules for name in rule.sessions if self._is_ours(name)}
        states = {name: self.state(name) for name in {session, *others}}
        as_of = max(each.as_of for each in answers)
        said = {each.question: _said(each) for each in answers}
        self._states[session], found = stepped(rules, states, session, version, as_of, said)
        made = []
        for each in found:
            self._store.inc("foretick_signals_total", outcome="suppressed" if each.suppressed else "fired")
            if not each.suppressed:
                made.append(self._message(each, answers[0].symbol, inputs, close))
        self.newest.extend(made)
        return _encode(self._states[session]), made

    def _message(
        self, made: MadeSignal, symbol: str, inputs: protocol.VersionInputs, close: int | None
    ) -> Signal:
        settings = self._sessions[made.session]
        causes = [
            SignalCause(clause.session, clause.question, *state.newest)
            for clause, state in zip(made.rule.clauses, made.answers, strict=True)
        ]
        return Signal(
            session=made.session,
            name=made.rule.name,
            owner=made.rule.session,
            signal_id=made.signal_id,
            symbol=symbol,
            data_version=made.version,
            as_of=made.as_of,
            bar=max(inputs.closed, default=-1),
            close=None if close is None else decimal(close, settings.price_decimals, settings.scale),
            answers=causes,
            epoch=self._progress.epoch,
            published_at=time.time_ns(),
        )


def _said(answer: Answer) -> Said:
    value = None if answer.value is None else Decimal(answer.value)
    named = answer.answer_id, answer.data_version, answer.text
    return Said(*named, value, answer.probability, answer.flags)
