"""Ad hoc questions that come often are made standing ones for as long as they do (`flash.frequent`).

They are set and removed as by an operator, under names of their own, and never published. Off by default.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from daemon.api import messages
from daemon.config.schema import FlashConfig
from daemon.gateway.answer_cache import Sessions
from daemon.gateway.question_requests import Questions
from flash.frequent import FrequentQuestions
from flash.question import Question
from metrics.store import MetricStore

log = logging.getLogger(__name__)

CHECK_S = 1.0
"""Time from one look for questions that have become rare to the next."""


class FrequentAsks:
    """Hears of asks, and changes the standing questions of their sessions. On the event loop."""

    def __init__(
        self,
        settings: FlashConfig,
        sessions: Sessions,
        questions: Questions,
        store: MetricStore,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._sessions, self._questions, self._store = sessions, questions, store
        window, most = int(settings.standing_window), settings.standing_most
        self._frequent = FrequentQuestions(settings.standing_after, window, most, clock)
        self._often: asyncio.Queue[tuple[str, Question]] = asyncio.Queue()

    def asked(self, session: str, question: Question) -> None:
        """A client asked a question that is none of the configuration or an operator."""
        standing = self._frequent.ask(session, question)
        if standing is not None:
            self._often.put_nowait((session, standing))

    async def run(self) -> None:
        """Let questions stand, and end that, until it is cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CHECK_S):
                    session, question = await self._often.get()
                await self._stand(session, question)
            for session, question in self._frequent.rarer():
                await self._end(session, question)
            self._frequent.keep(self._sessions.states)
            self._forget_removed()
            self._store.set("foretick_frequent_questions", len(self._frequent.standing()))

    def _forget_removed(self) -> None:
        """An operator, or another configuration, removed some: their asks count from 0 again."""
        if not self._often.empty():
            return
        for session, question in self._frequent.standing():
            state = self._sessions.states[session]
            if all(each.name != question.name for each in (*state.questions, *state.paused)):
                self._frequent.drop(session, question)

    async def _stand(self, session: str, question: Question) -> None:
        asked = messages.SetQuestion(
            0, session, question.name, question.text, question.choices or (), question.max_tokens,
            publish_when=question.publish_when,
        )  # fmt: skip
        try:
            await self._questions.set(asked)
        except messages.QueryError as error:
            log.info("%s: %r is asked often and cannot stand: %s", session, question.text, error)
            self._frequent.drop(session, question)
            self._count("refused")
        else:
            self._count("standing")

    async def _end(self, session: str, question: Question) -> None:
        with contextlib.suppress(messages.QueryError):  # an operator was first
            await self._questions.remove(messages.RemoveQuestion(0, session, question.name))
        self._count("ended")

    def _count(self, outcome: str) -> None:
        self._store.inc("foretick_frequent_changes_total", outcome=outcome)
