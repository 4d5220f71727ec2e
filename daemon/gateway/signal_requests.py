"""Conditions and signals, for clients that ask."""

from daemon.api import messages
from daemon.gateway.answer_cache import Sessions
from daemon.gateway.checkpoint.signal_maker import SignalMaker
from daemon.tenants import Client
from flash.signals import ClauseState, Firing, SignalRule, keys_of


class SignalRequests:
    """Tells each client of those whose sessions its tenant sees. Lives on the event loop."""

    def __init__(self, signals: SignalMaker, sessions: Sessions) -> None:
        self._signals, self._sessions = signals, sessions

    def found(self, request: messages.ListSignals, client: Client) -> messages.SignalsReply:
        """The reply. Raises QueryError."""
        names = [request.session] if request.session else list(self._sessions.states)
        if request.session:
            self._sessions.state(request.session)
        sees = client.tenant.sees
        rules = {rule.hash: rule for name in names for rule in self._signals.rules(name)}
        signals = [
            each
            for each in self._signals.newest
            if (asked := {each.session, *(cause.session for cause in each.answers)}) & set(names)
            and all(map(sees, asked))
        ]
        seen = [rule for rule in rules.values() if all(map(sees, rule.sessions))]
        return messages.SignalsReply(request.id, tuple(map(self._condition, seen)), tuple(signals))

    def _condition(self, rule: SignalRule) -> messages.ConditionInfo:
        states = {name: self._signals.state(name) for name in rule.sessions}
        clauses = []
        for key, clause in keys_of(rule):
            state = states[clause.session].clauses.get(key, ClauseState())
            stands = state.met, state.defined, state.run, clause.for_bars, state.since, state.newest[2]
            clauses.append(messages.ClauseInfo(clause.session, clause.question, *stands))
        fired = [each.fired[rule.hash] for each in states.values() if rule.hash in each.fired]
        newest = max(fired, key=lambda each: each.as_of, default=Firing(""))
        return messages.ConditionInfo(rule.name, rule.session, tuple(clauses), newest.signal_id, newest.as_of)
