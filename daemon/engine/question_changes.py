"""Standing questions while the engine runs: other ones, and labels of their answers."""

from collections.abc import Sequence
from functools import partial

from daemon import protocol
from daemon.api.messages import Label, LabelReply
from daemon.engine.answers import Emit
from daemon.engine.build import Built
from daemon.engine.confidence_metrics import Confidence
from daemon.engine.request_runner import failed
from flash.late_labels import LabelError
from flash.question import Question
from flash.registry import BadQuestion, Registry, Standing
from regions.tape import Tape
from scheduler.interfaces import Limits
from scheduler.lifecycle import STOPPING
from scheduler.request import Failure
from scheduler.scheduler import Scheduler


class StandingQuestions:
    """Gives sessions other standing questions, and answers their labels.

    Commands come from one thread. Each is answered by its event or, with nothing changed, by `Failed`.
    """

    def __init__(
        self,
        registry: Registry,
        built: Built,
        scheduler: Scheduler,
        limits: Limits,
        confidence: Confidence,
        emit: Emit,
    ) -> None:
        self.registry, self._built, self._scheduler = registry, built, scheduler
        self._limits, self._confidence, self._emit = limits, confidence, emit

    def set(self, command: protocol.SetQuestions) -> None:
        """Answer with `QuestionsSet`."""
        session, questions, prefixes = command.session, command.questions, self._built.prefixes
        tape = self._built.tapes.get(session)
        if tape is None:
            self._refuse(command.id, Failure("unknown_session", f"there is no session {session!r}"))
            return
        try:
            standing = self.made(session, questions)
            # a prefix that fits now must fit behind every later anchor, too
            tape.check_prefix(prefixes.longest(session, questions))
            prefixes.number(session, questions, partial(self._scheduler.refresh, tape))
        except BadQuestion as error:
            self._refuse(command.id, Failure("bad_request", str(error)))
        except ValueError as error:
            self._refuse(command.id, Failure("too_long", str(error)))
        else:
            if not self._scheduler.run_between(partial(self._replace, command, tape, standing)):
                self._refuse(command.id, STOPPING)

    def made(self, session: str, questions: Sequence[Question]) -> tuple[Standing, ...]:
        """Prepare questions. Raises BadQuestion, and ValueError for one that is too long."""
        standing, limits = self.registry.made(session, questions), self._limits
        for each in standing:
            self._confidence.check(each.question)
            name, prompt = each.question.name, len(each.prepared.prompt_tokens)
            if prompt > (limit := limits.max_prompt_tokens):
                raise ValueError(f"question {name!r} has {prompt} tokens, the limit is {limit}")
            if (tokens := each.question.max_tokens) > (limit := limits.max_new_tokens):
                raise BadQuestion(f"question {name!r}: max_tokens is {tokens}, the limit is {limit}")
        return standing

    def label(self, command: Label) -> None:
        """Answer with `LabelReply`."""
        if not self._scheduler.run_between(partial(self._label, command)):
            self._refuse(command.id, STOPPING)

    # Between two batches.

    def _replace(self, command: protocol.SetQuestions, tape: Tape, standing: tuple[Standing, ...]) -> None:
        self.registry.replace(command.session, standing)
        self._confidence.keep(command.session, standing)
        self._emit(protocol.QuestionsSet(command.id, command.session, tape.version, tuple(command.questions)))

    def _label(self, command: Label) -> None:
        session, version, asked = command.session, command.data_version, command.question
        try:
            for standing in self.registry.standing(session):
                if asked in (standing.question.name, standing.question.text):
                    break
            else:
                raise LabelError("bad_request", f"{session} has no standing question {asked!r}")
            found = self._confidence.label(standing, version, command.choice)
        except LabelError as error:
            self._refuse(command.id, Failure(error.code, str(error)))
        else:
            self._emit(LabelReply(command.id, session, standing.question.name, version, *found))

    def _refuse(self, number: int, failure: Failure) -> None:
        self._emit(failed(number, failure))
