"""What the model reads of a session's newest version, and before the answer to a question about it."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from daemon.api.generation import Failed, Generate, PromptViewed, ViewPrompt
from daemon.api.messages import Region
from daemon.engine.build import Built
from daemon.engine.prompt_builder import PromptBuilder
from daemon.engine.request_runner import failed, failure_of
from flash.registry import Registry
from regions.tape import Tape
from scheduler.lifecycle import STOPPING
from scheduler.request import Failure
from scheduler.scheduler import Scheduler

log = logging.getLogger(__name__)

Emit = Callable[[PromptViewed | Failed], None]


@dataclass(frozen=True)
class PromptView:
    """Shows prompts, on request from any thread. A tape is read between two batches: it is of one version."""

    built: Built
    scheduler: Scheduler
    prompts: PromptBuilder
    registry: Registry
    emit: Emit
    texts: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, 1, "prompt-view"))
    """Makes texts of tokens."""

    def show(self, command: ViewPrompt) -> None:
        """Emit what the model reads, or why that cannot be shown."""
        if not self.scheduler.run_between(partial(self._show, command)):
            self.emit(failed(command.id, STOPPING))

    def _show(self, command: ViewPrompt) -> None:
        number, name, asked = command.id, command.session, command.asked
        tape = self.built.tapes.get(name)
        if tape is None:
            self.emit(failed(number, Failure("unknown_session", f"there is no session {name!r}")))
            return
        try:
            question = None if asked is None else tuple(self._question(tape, asked))
        except ValueError as error:
            self.emit(failed(number, failure_of(error)))
            return
        read = tape.version, tuple(tape.prefix), tuple(tape.window), question
        self.texts.submit(self._emit_texts, number, *read)  # a long window takes long, and batches wait

    def _emit_texts(
        self,
        number: int,
        version: int,
        frozen: Sequence[int],
        sliding: Sequence[int],
        question: Sequence[int] | None,
    ) -> None:
        try:
            asked = None if question is None else self._region(question)
            event = PromptViewed(number, version, self._region(frozen), self._region(sliding), asked)
        except Exception as error:
            log.exception("the prompt of version %d cannot be shown", version)
            self.emit(failed(number, Failure("engine", f"its texts cannot be made: {error}")))
        else:
            self.emit(event)

    def _question(self, tape: Tape, asked: Generate) -> Sequence[int]:
        """The tokens that ask a question: a standing one as it is asked of every version.

        Raises ValueError for what cannot be asked.
        """
        for each in self.registry.standing(tape.name):
            if each.question == asked.question and not each.question.provisional:
                return self.built.prefixes.asked(each, tape.prefix)
        return self.prompts.prompt(asked).tokens

    def _region(self, tokens: Sequence[int]) -> Region:
        return Region(self.built.shown(tokens), len(tokens))
