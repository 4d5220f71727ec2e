"""Changes of the standing questions while the engine runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from daemon import protocol
from daemon.api.generation import Failed
from daemon.api.messages import code_of
from daemon.engine.answers import Emit
from daemon.engine.prefixes import EnginePrefixes
from flash.question import Question
from flash.registry import BadQuestion, Registry, Standing
from regions.tape import Tape
from scheduler.interfaces import Limits
from scheduler.lifecycle import STOPPING
from scheduler.request import Failure
from scheduler.scheduler import Scheduler


class StandingQuestions:
    """Gives sessions other standing questions. Commands come from one thread."""

    def __init__(
        self,
        registry: Registry,
        prefixes: EnginePrefixes,
        tapes: Mapping[str, Tape],
        scheduler: Scheduler,
        limits: Limits,
        emit: Emit,
    ) -> None:
        self.registry, self._prefixes, self._tapes = registry, prefixes, tapes
        self._scheduler, self._limits, self._emit = scheduler, limits, emit

    def set(self, command: protocol.SetQuestions) -> None:
        """Answer with `QuestionsSet` or, with nothing changed, `Failed`."""
        tape = self._tapes.get(command.session)
        if tape is None:
            self._refuse(command, Failure("unknown_session", f"there is no session {command.session!r}"))
            return
        refresh = partial(self._scheduler.refresh, tape)
        try:
            standing = self.made(command.session, command.questions)
            # a prefix that fits now must fit behind every later anchor, too
            tape.check_prefix(self._prefixes.longest(command.session, command.questions))
            self._prefixes.number(command.session, command.questions, refresh)
        except BadQuestion as error:
            self._refuse(command, Failure("bad_request", str(error)))
        except ValueError as error:
            self._refuse(command, Failure("too_long", str(error)))
        else:
            if not self._scheduler.run_between(partial(self._replace, command, tape, standing)):
                self._refuse(command, STOPPING)

    def made(self, session: str, questions: Sequence[Question]) -> tuple[Standing, ...]:
        """Prepare questions. Raises BadQuestion, and ValueError for one that is too long."""
        standing, limits = self.registry.made(session, questions), self._limits
        for each in standing:
            question, prompt = each.question, len(each.prepared.prompt_tokens)
            if prompt > limits.max_prompt_tokens:
                most = limits.max_prompt_tokens
                raise ValueError(f"question {question.name!r} has {prompt} tokens, the limit is {most}")
            if question.max_tokens > limits.max_new_tokens:
                most = limits.max_new_tokens
                raise BadQuestion(
                    f"question {question.name!r}: max_tokens is {question.max_tokens}, the limit is {most}"
                )
        return standing

    def _replace(self, command: protocol.SetQuestions, tape: Tape, standing: tuple[Standing, ...]) -> None:
        """Between two batches."""
        self.registry.replace(command.session, standing)
        self._emit(protocol.QuestionsSet(command.id, command.session, tape.version, tuple(command.questions)))

    def _refuse(self, command: protocol.SetQuestions, failure: Failure) -> None:
        self._emit(Failed(command.id, code_of(failure.code), failure.message))
