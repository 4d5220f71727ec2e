"""A question asked of the past: at every data version that a daemon would have made of the same records.

The daemon's own decoder, data plane and engine go through the history of one session, from its first record,
one bar a version, each answered before the next one comes (`daemon.audit.stepped_engine`). An answer can
therefore know nothing of what came later, and is equal, to the last bit, to the one that a daemon with
`flash.every_bar` gives live. Versions before the range, or that are answered already, are made and not asked.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import msgspec

from daemon import protocol
from daemon.audit.session_replay import alone
from daemon.audit.stepped_engine import Batches, SteppedEngine
from daemon.config.fingerprint import fingerprint
from daemon.config.schema import Config
from daemon.config.standing import questions_of, table_of
from daemon.engine.build import Built, Loaded, build
from daemon.gateway.checkpoint.publisher import answer_id_of, basis_of
from daemon.gateway.stream_names import StreamNames
from daemon.progress import Progress
from engine.device import use_threads
from feeds.connector import SettingError
from feeds.market_data import Answer, Basis
from flash.question import Question


class CannotBackfill(Exception):
    """The question cannot be asked of this past; says why."""


class Asked(NamedTuple):
    """A session of its own in ``listed``, with all its questions, and those of ``together`` asked.

    ``question`` is the one whose answers are wanted. ``config``: hash of the settings that they depend on.
    """

    listed: Config
    together: Config
    question: Question
    config: str


class Span(NamedTuple):
    """Which versions are answered, by the time of their data, ns; ``begin_ns``: where the tape begins.

    Without that it begins with the history.
    """

    from_ns: int
    to_ns: int
    begin_ns: int | None = None


class Reached(NamedTuple):
    """The newest version that is answered already, and the time of its data, ns.

    ``since``: from when on all versions are answered, ns; None without any.
    """

    version: int = 0
    as_of: int = 0
    since: int | None = None


def asked_of(
    config: Config, session: str, text: str, choices: tuple[str, ...] = (), *, is_alone: bool = False
) -> Asked:
    """The standing question named ``text``, or a new one of this text, as asked of every version.

    The session's other questions, but for provisional ones, are asked when they are due, in the same passes:
    how many share one is in the last bits of a logit. A new question is asked alone, as is another one with
    ``is_alone``; where questions stand in the frozen region, it is listed behind the others.

    Raises SettingError.
    """
    standing = {each.question.name: each.question for each in questions_of(config) if each.session == session}
    own_config = alone(config, session)
    question, questions = standing.get(text), own_config.questions
    if question is not None and choices:
        raise SettingError("--choices", f"{text!r} is a standing question, and has its own choices")
    if question is None and not choices:
        known = ", ".join(standing) or "none"
        why = f"{session} has no standing question {text!r} ({known}); a new one needs --choices"
        raise SettingError("QUESTION", why)
    if question is None:
        is_alone = True
        try:
            question = Question("backfill", text, choices)
        except ValueError as error:
            raise SettingError("--choices", str(error)) from error
        questions += (table_of(question, session),)
    if question.provisional:
        why = f"{text!r} is provisional: which open bars it saw depends on the moment"
        raise SettingError("QUESTION", why)
    listed = msgspec.structs.replace(
        own_config,
        questions=questions,
        events=config.events,
        flash=msgspec.structs.replace(config.flash, every_bar=True),
    )
    own = [each.question for each in questions_of(listed)]
    asked = [question] if is_alone else [each for each in own if not each.provisional]
    tables = (table_of(_of_each_version(q) if q.name == question.name else q, session) for q in asked)
    together = msgspec.structs.replace(listed, standing="none", questions=tuple(tables))
    return Asked(listed, together, question, fingerprint(listed, listed.sessions[0], own))


def _of_each_version(question: Question) -> Question:
    return replace(question, publish_when="always", publish_every=1, ask_every_bars=1, ask_every_ns=0)


class Identity(msgspec.Struct, frozen=True):
    """What all answers of a session's backfill have in common: only where it is the same does it go on."""

    session: str
    question: str
    config: str
    model: str
    revision: str
    computed: str
    together: tuple[str, ...]
    begin: int | None
    since: int


def identity_of(asked: Asked, model: Loaded, span: Span) -> Identity:
    """That of a session's backfill."""
    (loaded, _), threads = model, asked.listed.model.threads
    return Identity(
        asked.listed.sessions[0].name,
        asked.question.hash,
        asked.config,
        loaded.name,
        loaded.revision,
        f"{loaded.device}, {loaded.layers_run}, {threads} threads",
        tuple(each.question.hash for each in questions_of(asked.together)),
        span.begin_ns,
        span.from_ns,
    )


@dataclass(eq=False)
class Backfill:
    """One session's, behind the version that was ``reached`` before.

    ``answered`` of its ``versions``, in ``took_s``; ``first``, ``newest``: times of data of versions, ns.
    """

    asked: Asked
    span: Span
    reached: Reached
    answered: int = 0
    versions: int = 0
    first: int = 0
    newest: int = 0
    took_s: float = 0.0
    _streams: StreamNames = field(init=False)
    _answers: list[Answer] = field(default_factory=list)
    _basis: Basis = field(default_factory=Basis)
    _failed: str = ""

    def __post_init__(self) -> None:
        self._streams = StreamNames(several=len(self.asked.listed.feeds) > 1)

    def build(self, model: Loaded) -> Built:
        """The session's engine, which asks nothing of what is before. Raises SettingError."""
        (session,) = self.asked.listed.sessions
        # of a bar that ends behind it, some records may lie before: see `_is_wanted`
        interval = session.bars(self.asked.listed.bars).interval
        behind = max(self.from_ns, self.reached.as_of) - 2 * interval
        known = Progress(closed=(max(-1, behind),) * len(session.symbols))
        return build(self.asked.listed, {session.name: known}, (model,), opens_all=True)

    async def answers(self, built: Built, batches: Batches, *, ends: bool) -> AsyncGenerator[Answer | None]:
        """Its answers, in order, and None now and then, where nothing is under way.

        ``ends``: the open bars are closed at the end of the history. Raises CannotBackfill.
        """
        use_threads(self.asked.listed.model.threads)  # of this thread, too
        began = time.monotonic()
        engine = SteppedEngine(
            self.asked.listed,
            built,
            self._on_event,
            asked=self.asked.together,
            name_stream=self._streams.name,
        )
        with engine:
            async with aclosing(batches), aclosing(engine.read(batches, engine.step)) as reading:
                async for _ in reading:
                    for answer in self._taken():
                        yield answer
                    yield None
                    if self._is_over:
                        break
                else:
                    if ends:
                        engine.flush()
                    for answer in self._taken():
                        yield answer
            self.took_s = time.monotonic() - began

    @property
    def from_ns(self) -> int:
        """From when on versions are answered. What was begun goes on without a hole."""
        return self.span.from_ns if self.reached.since is None else self.reached.since

    @property
    def _is_over(self) -> bool:
        """No version is to come of data before the range's end."""
        (session,) = self.asked.listed.sessions
        return self.newest >= self.span.to_ns + 2 * session.bars(self.asked.listed.bars).interval

    def _taken(self) -> list[Answer]:
        if self._failed:
            raise CannotBackfill(self._failed)
        taken, self._answers = self._answers, []
        return taken

    def _on_event(self, event: protocol.EngineEvent) -> None:
        match event:
            case protocol.Committed():
                self.newest = event.times.as_of
                self.versions, self.first = self.versions + 1, self.first or self.newest
                self._basis = basis_of(event, self._streams)
            case protocol.Answered() if self._is_wanted(event.answer):
                self.answered += 1
                self._answers.append(self._completed(event))
            case protocol.AnswerFailed() if event.question == self.asked.question.name and not self._failed:
                self._failed = f"version {event.version} was not answered: {event.message}"

    def _is_wanted(self, answer: Answer) -> bool:
        if answer.question != self.asked.question.name:
            return False
        within = self.from_ns <= answer.as_of < self.span.to_ns
        return within and answer.data_version > self.reached.version

    def _completed(self, event: protocol.Answered) -> Answer:
        """As the gateway completes it, but for what is of the moment of publication."""
        answer = event.answer
        inputs = self._streams.ranges(event.inputs.reads)
        anchor = answer.basis.anchor if answer.basis is not None else []
        return msgspec.structs.replace(
            answer,
            answer_id=answer_id_of(answer, inputs, event.inputs),
            inputs=inputs,
            flags=(*answer.flags, "backfill"),
            basis=msgspec.structs.replace(self._basis, config=self.asked.config, anchor=anchor),
        )
