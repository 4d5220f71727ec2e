"""Changes of standing questions while the daemon runs: by clients, and by a configuration that is read again.

They last until the daemon ends or reads its configuration again. An engine that is started again gets them.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, fields

import msgspec

from daemon import protocol
from daemon.api import messages
from daemon.config.schema import Config
from daemon.config.standing import questions_of, table_of
from daemon.gateway.answer_cache import Sessions
from daemon.gateway.pending import PendingCommands
from engine.model.question_pack import PackError, pinned, read_pinned
from flash.question import Question

log = logging.getLogger(__name__)

MOST = 999
"""Standing questions of a session."""


class Questions:
    """Standing questions of every session. Lives on the event loop; one change of a session at a time."""

    def __init__(self, sessions: Sessions, pending: PendingCommands) -> None:
        self._sessions, self._pending = sessions, pending
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    # Called by the gateway.

    def configured(self, config: Config) -> Config:
        """``config`` with the standing questions as they are now, for an engine that is started again."""
        now = {name: list(state.questions) for name, state in self._sessions.states.items()}
        if now == self._wanted(config):
            return config
        rules = {(each.text, each.choices, each.pack): each.rule for each in config.questions}
        questions = tuple(
            msgspec.structs.replace(
                table_of(asked, name), rule=rules.get((asked.text, asked.choices or (), asked.pack), "")
            )
            for name, questions in now.items()
            for asked in questions
        )
        return msgspec.structs.replace(config, standing="none", questions=questions)

    async def unreadable(self, config: Config) -> Mapping[str, str]:
        """Of the question packs that are asked, those whose file is gone or another one by now, and why."""
        asked = [each.pack for state in self._sessions.states.values() for each in state.questions]
        packs = {pack for pack in (*asked, *(each.pack for each in config.questions)) if pack}
        return await asyncio.to_thread(_unreadable, packs) if packs else {}

    async def pause_packs(self, why: Mapping[str, str]) -> dict[str, tuple[Question, ...]]:
        """Pause the questions of these packs, while no engine is up; what their sessions are asked then."""
        left = {}
        for session in list(self._sessions.states):
            async with self._locks[session]:
                state = self._sessions.states.get(session)
                lost = [] if state is None else [each for each in state.questions if each.pack in why]
                if state is None or not lost:
                    continue
                kept = [each for each in state.questions if each.pack not in why]
                state.ask_these(state.questions, (*state.paused, *lost))
                state.questions_set(kept)
                left[session] = state.questions
            for each in lost:
                log.error("%s: question %r is paused: %s", session, each.name, why[each.pack])
        return left

    async def reload(self, config: Config) -> None:
        """Give every session the questions that ``config`` has for it; failures are logged."""
        for session, questions in self._wanted(config).items():
            try:
                async with self._locks[session]:
                    state = self._sessions.states[session]
                    if tuple(questions) == state.questions:
                        state.ask_these(state.questions, ())
                    else:
                        await self._move(session, questions, [])
                        log.info("%s: %d standing questions from now on", session, len(questions))
            except messages.QueryError as error:
                log.error("%s keeps its standing questions: %s", session, error)

    def _wanted(self, config: Config) -> dict[str, list[Question]]:
        """The questions that ``config`` has for each session."""
        wanted: dict[str, list[Question]] = {name: [] for name in self._sessions.states}
        for asked in questions_of(config):
            if asked.session in wanted:
                wanted[asked.session].append(asked.question)
        return wanted

    # Called for clients.

    async def list(self, request: messages.ListQuestions) -> messages.QuestionsReply:
        """A session's questions."""
        return self._reply(request)

    async def set(self, request: messages.SetQuestion) -> messages.QuestionsReply:
        """Add a question, or change the one with its name."""
        try:
            members = {f.name: getattr(request, f.name) for f in fields(Question)}
            if request.pack:
                members["pack"] = pinned(request.pack)
            new = Question(**members | {"choices": request.choices or None})
        except ValueError as error:
            raise messages.QueryError("bad_request", str(error)) from None
        self._sessions.state(request.session)
        async with self._locks[request.session]:
            state = self._sessions.state(request.session)
            changed = [new if each.name == new.name else each for each in state.questions]
            if new not in changed:
                changed.append(new)
            paused = [each for each in state.paused if each.name != new.name]
            if len(changed) + len(paused) > MOST:
                raise messages.QueryError("bad_request", f"a session has at most {MOST} standing questions")
            await self._move(request.session, changed, paused)
        return self._reply(request)

    async def remove(self, request: messages.RemoveQuestion) -> messages.QuestionsReply:
        """Remove a question."""
        self._sessions.state(request.session)
        async with self._locks[request.session]:
            state = self._sessions.state(request.session)
            kept = [each for each in state.questions if each.name != request.name]
            paused = [each for each in state.paused if each.name != request.name]
            if len(kept) + len(paused) == len(state.questions) + len(state.paused):
                raise _unknown(request.session, request.name)
            if len(kept) < len(state.questions):
                await self._move(request.session, kept, paused)
            else:
                state.ask_these(state.questions, paused)
        return self._reply(request)

    async def pause(self, request: messages.Pause) -> messages.QuestionsReply:
        """Pause a question or resume it; without a name, all of the session's."""
        self._sessions.state(request.session)
        async with self._locks[request.session]:
            state = self._sessions.state(request.session)
            asked, paused = list(state.questions), list(state.paused)
            if request.question not in ("", *(each.name for each in (*asked, *paused))):
                raise _unknown(request.session, request.question)
            moving = [
                each for each in (asked if request.paused else paused) if request.question in ("", each.name)
            ]
            if request.paused:
                asked = [each for each in asked if each not in moving]
                paused = [*paused, *moving]
            else:
                asked = [*asked, *moving]
                paused = [each for each in paused if each not in moving]
            if moving:
                await self._move(request.session, asked, paused)
        return self._reply(request)

    async def describe(self, request: messages.Describe) -> messages.DescribeReply:
        """A session, its questions, and their latest answers."""
        state = self._sessions.state(request.session)
        listed = self._sessions.listed(request.id, request.session).sessions
        answers = state.answers_of(state.questions)
        return messages.DescribeReply(request.id, listed[0], self._infos(request.session), tuple(answers))

    async def _move(self, session: str, asked: Sequence[Question], paused: Sequence[Question]) -> None:
        """Change what is asked, and what is paused with it. A client that goes away does not undo either."""
        state = self._sessions.state(session)
        if not self._sessions.is_open(session):  # it will be opened with them
            state.ask_these(state.questions, paused)
            state.questions_set(asked)
            return
        before = state.paused
        state.ask_these(state.questions, paused, asked)
        try:
            await self._pending.reply(
                lambda number: protocol.SetQuestions(number, session, tuple(asked)), self._set
            )
        except messages.QueryError:
            state.ask_these(state.questions, before)
            raise

    def _set(self, event: protocol.ReplyEvent) -> None:
        """The engine replied to a change, whose client may be gone."""
        if isinstance(event, protocol.QuestionsSet) and event.session in self._sessions.states:
            self._sessions.questions_set(event.session, event.questions)

    def _reply(self, request: messages.QuestionRequest) -> messages.QuestionsReply:
        return messages.QuestionsReply(request.id, request.session, self._infos(request.session))

    def _infos(self, session: str) -> tuple[messages.QuestionInfo, ...]:
        state = self._sessions.state(session)

        def used(question: Question) -> float:
            ready = state.answers.get(question.hash)
            return 0.0 if ready is None else ready.engine_used

        return tuple(
            messages.QuestionInfo(
                **asdict(q) | {"choices": q.choices or ()}, paused=paused, engine_used=used(q)
            )
            for paused, questions in ((False, state.questions), (True, state.paused))
            for q in questions
        )


def _unknown(session: str, name: str) -> messages.QueryError:
    return messages.QueryError("bad_request", f"{session} has no standing question {name!r}")


def _unreadable(packs: Collection[str]) -> Mapping[str, str]:
    """Why those of these packs, each FILE@REVISION, that cannot be read cannot."""
    found = {}
    for pack in packs:
        try:
            read_pinned(pack)
        except PackError as error:
            found[pack] = str(error)
    return found
