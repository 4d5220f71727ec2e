"""Ahead-of-time evaluation: answers the standing questions for each data version, on forks of that version.

On each commit the tape is forked once per question that is due (`flash.schedules`). There are two stages.

1. The questions with one answer token are submitted together, so they run in one batch (*Attention Once*
   section 3.9.3, with forks instead of strip and restore). Overload skips versions, never questions: a new
   version replaces one whose evaluation has not started, and takes over its questions; while one runs, the
   newest version waits. Skipped versions are counted and their records are reported with the next answers, so
   every input is accounted for.
2. Those with longer answers (free text) follow, in the class of asks, so that no one-token answer of any
   session waits for them. Each such question is asked of one version at a time; the newest of the versions
   that wait for it supersedes the others, which fail as `SUPERSEDED`.

A question with a deadline is skipped, and fails as `late`, once it cannot be answered in time: when its pass
would have to begin, by the predicted time of that pass, or when its time is up while text is generated.

All state belongs to the thread that steps the scheduler.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from flash.registry import Key, Registry, Standing
from flash.schedules import SUPERSEDED, DataVersion, is_due
from regions.ephemeral import Fork
from regions.tape import Tape
from scheduler.costs import Span
from scheduler.deadlines import Deadline
from scheduler.interfaces import PriorityClass
from scheduler.lifecycle import call
from scheduler.request import Failure, LifecycleEvent, Request, RequestSpec, State
from scheduler.scheduler import Scheduler
from scheduler.tapes import TapeItems

P = TypeVar("P")
"""Payload of a record."""


@dataclass(frozen=True, slots=True)
class Evaluated(Generic[P]):
    """The result of one standing question at one data version; ``request`` is finished or has its error.

    ``payloads``: those of all records since the last evaluation, oldest first, skipped versions included.
    """

    standing: Standing
    version: int
    request: Request
    payloads: tuple[P, ...]
    gap: bool
    """Data was lost since the last answered version."""
    asked: int
    """The number of questions asked of this version."""

    @property
    def queue_ns(self) -> int:
        """Time from the submission to the first batch."""
        return self._scheduled_at - self.request.events[0][1]

    @property
    def forward_ns(self) -> int:
        """Time from the first batch to the last; several tokens also wait between batches."""
        return self.request.events[-1][1] - self._scheduled_at

    @property
    def _scheduled_at(self) -> int:
        scheduled = self.request.first(LifecycleEvent.SCHEDULED)
        assert scheduled is not None  # it finished, so it ran
        return scheduled


def request_of(
    item: Standing,
    tokens: Sequence[int],
    reader: Fork,
    cls: PriorityClass,
    on_done: Callable[[Request], None],
    deadline: Deadline | None = None,
) -> Request:
    """The request that asks a standing question of ``reader`` by ``tokens``."""
    prepared = item.prepared
    return Request(
        RequestSpec(
            cls=cls,
            session=item.session,
            prompt=tokens,
            max_tokens=prepared.answer_tokens(item.question),
            on_done=on_done,
            reader=reader,
            stop_ids=prepared.stop_ids,
            choices=prepared.choice_tokens,
            grammar=prepared.grammar,
            deadline=deadline,
        )
    )


class AskedState(msgspec.Struct, frozen=True):
    """What was asked of a session so far.

    ``asked``: name and hash of each question, with bars and event time (ns) when it was asked last. ``gap``,
    ``unreported``: data was lost, and which questions have not reported it.
    """

    bars: int = 0
    asked: tuple[tuple[Key, DataVersion], ...] = ()
    gap: bool = False
    unreported: tuple[Key, ...] = ()


class _Ask(NamedTuple):
    """A question about one version: its reader, and the tokens that ask it."""

    item: Standing
    reader: Fork
    tokens: Sequence[int]

    @property
    def is_text(self) -> bool:
        """Its answer may have several tokens."""
        return self.item.prepared.answer_tokens(self.item.question) > 1


@dataclass(eq=False, slots=True)
class _Evaluation:
    """The evaluation of a session's due questions at one version."""

    version: int
    first: list[_Ask]
    second: list[_Ask]
    payloads: tuple[Any, ...]
    gap: bool
    unreported: set[Key]
    """Questions to which an earlier gap was not reported: they were not due."""
    requests: list[Request] = field(default_factory=list)
    """Submitted so far."""
    open: int = field(init=False)
    """Questions of both stages that have no result."""
    reported: bool = False
    """Some question has its result, so that the others must get theirs of this version too."""

    def __post_init__(self) -> None:
        self.open = len(self.asks)

    @property
    def asks(self) -> list[_Ask]:
        """All questions."""
        return self.first + self.second

    @property
    def started(self) -> bool:
        """Some question is in a batch, or has its result."""
        return self.reported or any(
            request.first(LifecycleEvent.SCHEDULED) is not None for request in self.requests
        )

    def end(self, *, reports: bool) -> None:
        """One question has ended; ``reports``: with a result, so no other evaluation replaced this one."""
        self.open -= 1
        self.reported |= reports

    def drop_texts(self) -> list[_Ask]:
        """Remove the questions of the second stage, and return them."""
        dropped, self.second = self.second, []
        self.open -= len(dropped)
        return dropped

    def absorb(self, older: _Evaluation) -> None:
        """Take over the payloads and the gaps of a skipped evaluation."""
        self.payloads = older.payloads + self.payloads
        self.gap |= older.gap
        self.unreported |= older.unreported


@dataclass(slots=True)
class _Session:
    name: str
    current: _Evaluation | None = None
    """In its first stage."""
    pending: _Evaluation | None = None
    """The newest version, which waits for `current`."""
    texts: dict[Key, tuple[_Evaluation, _Ask] | None] = field(default_factory=dict)
    """Free-text questions that are being answered, and of which version each is asked next."""
    gap: bool = False
    """Data was lost, and no evaluation has reported it yet."""
    bars: int = 0
    asked: dict[Key, DataVersion] = field(default_factory=dict)
    """When each standing question was asked last."""
    unreported: set[Key] = field(default_factory=set)
    """Those that were not asked when a gap was reported."""
    not_due: tuple[int, tuple[Any, ...]] | None = None
    """The newest version that no question was due at while an evaluation ran, and the payloads since it."""

    @property
    def is_idle(self) -> bool:
        """Nothing is being answered, and nothing waits."""
        return self.current is None and self.pending is None and not self.texts

    def add(self, bars: int, *, gap: bool) -> None:
        """Bars came; ``gap``: data was lost before one of them."""
        self.bars += bars
        self.gap |= gap

    def due(
        self,
        standing: Sequence[Standing],
        as_of: int,
        replaced: Sequence[_Evaluation],
        may_ask: Callable[[Standing], bool],
    ) -> list[Standing]:
        """The questions to ask now: none, or those due that ``may`` be asked, and those of ``replaced``."""
        now = DataVersion(self.bars, as_of)
        asked = self.asked
        due = {e.key for e in standing if is_due(e.question, now, asked.get(e.key)) and may_ask(e)}
        if not due:
            return []
        due |= {ask.item.key for each in replaced for ask in each.asks}
        found = [item for item in standing if item.key in due]
        kept = {item.key for item in standing}
        self.asked = {key: then for key, then in self.asked.items() if key in kept}
        self.asked |= {item.key: now for item in found}
        return found

    def take_gaps(self, standing: Sequence[Standing], due: Sequence[Standing]) -> tuple[bool, set[Key]]:
        """Whether those that are ``due`` report a gap, and which of them one of before; the others will."""
        asked, gap = {item.key for item in due}, self.gap
        unreported = self.unreported & asked
        self.unreported -= asked
        if gap:
            self.unreported |= {item.key for item in standing} - asked
        self.gap = False
        return gap, unreported

    def pass_gap(self) -> None:
        """An earlier engine reported it."""
        self.gap = False

    def defer(self, version: int, payloads: tuple[Any, ...]) -> None:
        """No question is due at ``version``, and an evaluation runs."""
        self.not_due = version, (self.not_due[1] if self.not_due else ()) + payloads

    def take_not_due(self) -> tuple[int, tuple[Any, ...]] | None:
        """The newest such version, and the payloads since it."""
        found, self.not_due = self.not_due, None
        return found

    def replace(self, new: _Evaluation, replaced: Sequence[_Evaluation]) -> bool:
        """Whether ``new`` can begin now; else it waits for the evaluation that runs."""
        if self.current in replaced:
            self.current = None
        self.pending = new if self.current else None
        return self.pending is None

    def begin(self, evaluation: _Evaluation) -> None:
        """Its first stage begins."""
        self.current = evaluation

    def finish(self) -> _Evaluation | None:
        """The first stage has ended; returns what waited for it."""
        pending, self.current, self.pending = self.pending, None, None
        return pending

    def drop(self) -> list[_Ask]:
        """The session is to be removed: what waits, and is not submitted."""
        waiting = [each[1] for each in self.texts.values() if each is not None]
        if self.pending is not None:
            waiting += self.pending.asks
        if self.current is not None:
            waiting += self.current.drop_texts()
        self.pending = self.not_due = None
        self.texts = dict.fromkeys(self.texts)
        return waiting

    def inherit(self, evaluation: _Evaluation, key: Key) -> None:
        """A question of ``evaluation`` had to report a gap and got no answer: its next one reports it."""
        waits = self.texts.get(key)
        coming = (waits[0] if waits else None, self.current, self.pending)
        later = (each for each in coming if each and each is not evaluation)
        asked = (each for each in later if any(ask.item.key == key for ask in each.asks))
        heir: _Evaluation | _Session = next(asked, None) or self
        heir.unreported.add(key)


class FlashEvaluator(Generic[P]):
    """Submits the registry's questions on each commit of a scheduler.

    `has_gap` says whether data was lost before the record of a payload. `on_done` is called on the stepping
    thread, once per question and evaluated version. `on_texts` gets session, version, payloads and the number
    of questions where all are free text: their results may come after those of later versions. `on_not_due`
    gets session, version and payloads where no question is due, after the first stages of all earlier
    versions. `tokens_of` gives the tokens that ask a question of a fork. `received_ns` is when a payload was
    received, by the scheduler's clock: deadlines count from then. `pass_ns` predicts the time of a pass. A
    version of payloads that are history is asked nothing: its answers were given by an earlier engine; nor is
    one whose newest payload is held. `on_idle` gets each session that has a version and nothing left to
    answer. A question that `may_ask` refuses is due again at the next version.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        registry: Registry,
        on_done: Callable[[Evaluated[P]], None],
        has_gap: Callable[[P], bool],
        on_not_due: Callable[[str, int, tuple[P, ...]], None],
        on_texts: Callable[[str, int, tuple[P, ...], int], None],
        tokens_of: Callable[[Standing, Fork], Sequence[int]] = lambda item, fork: item.prepared.prompt_tokens,
        received_ns: Callable[[P], int] = lambda payload: 0,
        pass_ns: Callable[[Sequence[Span]], int] = lambda rows: 0,
        is_history: Callable[[P], bool] = lambda payload: False,
        is_held: Callable[[P], bool] = lambda payload: False,
        on_idle: Callable[[str], None] = lambda session: None,
        may_ask: Callable[[Standing], bool] = lambda item: True,
    ) -> None:
        self._scheduler = scheduler
        self._registry = registry
        self._on_done, self._on_not_due, self._on_texts = on_done, on_not_due, on_texts
        self._has_gap, self._tokens_of = has_gap, tokens_of
        self._received_ns, self._pass_ns = received_ns, pass_ns
        self._is_history, self._is_held, self._on_idle = is_history, is_held, on_idle
        self._may_ask = may_ask
        self._sessions: dict[str, _Session] = {}
        self.coalesced: defaultdict[str, int] = defaultdict(int)
        """Skipped updates so far, by session."""
        scheduler.subscribe(self.on_commit, self.on_drop)

    def on_commit(self, tape: Tape, version: int, records: TapeItems) -> None:
        """Evaluate the new version now, or after the running evaluation."""
        try:
            self._evaluate(tape, version, records)
        finally:
            self._note_idle(self._session(tape.name))

    def _evaluate(self, tape: Tape, version: int, records: TapeItems) -> None:
        session, standing = self._session(tape.name), self._registry.standing(tape.name)
        payloads = tuple(record.payload for record in records)
        session.add(len(records), gap=any(map(self._has_gap, payloads)))
        if not standing:
            return
        replaced = [each for each in (session.pending, session.current) if each and not each.started]
        held = self._is_held(payloads[-1])
        due = [] if held else session.due(standing, records[-1].ts_event, replaced, self._may_ask)
        if all(map(self._is_history, payloads)):
            if due:
                session.pass_gap()
            due = []
        if not due:  # reported after the first stages before it
            if session.current is None:
                self._on_not_due(session.name, version, payloads)
            else:
                session.defer(version, payloads)
            return
        self.coalesced[tape.name] += len(records) - 1
        if (skipped := session.take_not_due()) is not None:
            payloads = skipped[1] + payloads
        asks = [_Ask(item, fork := tape.fork(), self._tokens_of(item, fork)) for item in due]
        first, second = ([ask for ask in asks if ask.is_text == text] for text in (False, True))
        new = _Evaluation(version, first, second, payloads, *session.take_gaps(standing, due))
        for each in replaced:
            self._skip(tape.name, each, new)
        if session.replace(new, replaced):
            self._submit(session, new)

    def on_drop(self, tape: Tape, records: TapeItems, failure: Failure) -> None:
        """Note the gap in the tape; the next version's answers report it."""
        self._session(tape.name).add(0, gap=True)

    def cut(self, name: str) -> AskedState:
        """What was asked of a session so far."""
        found = self._session(name)
        return AskedState(found.bars, tuple(found.asked.items()), found.gap, tuple(found.unreported))

    def asked(self, name: str) -> set[Key]:
        """The questions that were asked of a session's newest version, by this engine or an earlier one."""
        found = self._session(name)
        return {key for key, then in found.asked.items() if then.bars == found.bars}

    def restore(self, name: str, cut: AskedState) -> None:
        """Go on from a cut, before the session's first version."""
        unreported = set(cut.unreported)
        self._sessions[name] = _Session(
            name, gap=cut.gap, bars=cut.bars, asked=dict(cut.asked), unreported=unreported
        )

    def forget(self, name: str) -> None:
        """Drop what waits of a session that is to be removed; the requests that run end by themselves.

        None of them has a result any more, also if there is such a session again: its versions are others.
        """
        session = self._sessions.pop(name, None)
        if session is None:
            return
        for ask in session.drop():
            ask.reader.release()
        self.coalesced.pop(name, None)
        self._on_idle(name)

    def _session(self, name: str) -> _Session:
        return self._sessions.setdefault(name, _Session(name))

    def _skip(self, name: str, old: _Evaluation, new: _Evaluation) -> None:
        """Cancel an evaluation that has not started, and hand its payloads to the new one."""
        self.coalesced[name] += 1
        new.absorb(old)
        for request in old.requests:
            self._scheduler.cancel(request.id)
        for ask in old.second if old.requests else old.asks:
            ask.reader.release()

    def _submit(self, session: _Session, evaluation: _Evaluation) -> None:
        """Begin the first stage, or the second where that is empty."""
        if evaluation.first:
            session.begin(evaluation)
            self._ask(session, evaluation, evaluation.first)
        else:
            version, payloads = evaluation.version, evaluation.payloads
            call(partial(self._on_texts, session.name, version, payloads, evaluation.open))
            self._ask_texts(session, evaluation)

    def _ask_texts(self, session: _Session, evaluation: _Evaluation) -> None:
        """Begin the second stage: ask each question now, or after the version that it is being asked of."""
        for ask in evaluation.second:
            key = ask.item.key
            if key not in session.texts:
                session.texts[key] = None
                self._ask(session, evaluation, [ask])
                continue
            older, session.texts[key] = session.texts[key], (evaluation, ask)
            if older is not None:
                request = self._request(session, *older)
                why = f"version {evaluation.version} came before its turn"
                request.end(State.FAILED, 0, Failure(SUPERSEDED, why))
                self._ended(session, *older, request)

    def _ask(self, session: _Session, evaluation: _Evaluation, asks: Sequence[_Ask]) -> None:
        """Submit questions of one version, to share a pass."""
        takes = 0
        if any(ask.item.question.answer_within_ns for ask in asks):
            takes = self._pass_ns([(ask.reader.cached_tokens, len(ask.tokens)) for ask in asks])
        requests = [self._request(session, evaluation, ask, takes) for ask in asks]
        evaluation.requests.extend(requests)
        for request in requests:
            self._scheduler.submit(request)

    def _request(self, session: _Session, evaluation: _Evaluation, ask: _Ask, takes: int = 0) -> Request:
        """``takes``: its pass, ns."""
        item = ask.item
        within = item.question.answer_within_ns
        end = self._received_ns(evaluation.payloads[-1]) + within
        # free text goes behind the one-token questions of every session
        cls = PriorityClass.SESSION if ask.is_text else PriorityClass.FLASH
        done = partial(self._done, session, evaluation, ask)
        deadline = Deadline(end - takes, end) if within else None
        return request_of(item, ask.tokens, ask.reader, cls, done, deadline)

    def _done(self, session: _Session, evaluation: _Evaluation, ask: _Ask, request: Request) -> None:
        self._ended(session, evaluation, ask, request)
        if ask.is_text:
            waits = session.texts.pop(ask.item.key)
            if waits is not None:
                session.texts[ask.item.key] = None
                self._ask(session, waits[0], [waits[1]])
        elif session.current is evaluation and evaluation.open == len(evaluation.second):
            self._next(session, evaluation)
        self._note_idle(session)

    def _note_idle(self, session: _Session) -> None:
        if session.is_idle and self._sessions.get(session.name) is session:
            self._on_idle(session.name)

    def _next(self, session: _Session, finished: _Evaluation) -> None:
        """After a first stage: its second stage, and the newest version that waits."""
        pending = session.finish()
        self._ask_texts(session, finished)
        if pending is not None:
            self._submit(session, pending)
        if session.current is None and (skipped := session.take_not_due()) is not None:
            self._on_not_due(session.name, *skipped)

    def _ended(self, session: _Session, evaluation: _Evaluation, ask: _Ask, request: Request) -> None:
        """Report a result; a receiver that raises must not stop the session's next evaluation."""
        answered, key = request.state is State.FINISHED, ask.item.key
        is_gone = self._sessions.get(session.name) is not session
        reports = (answered or request.error is not None) and not is_gone
        evaluation.end(reports=reports)
        if not reports:
            return  # another evaluation replaced this one, or another session its
        gap = evaluation.gap or key in evaluation.unreported
        if gap and not answered:
            session.inherit(evaluation, key)
        asked = len(evaluation.asks)
        done = Evaluated(ask.item, evaluation.version, request, evaluation.payloads, gap, asked)
        call(partial(self._on_done, done))
