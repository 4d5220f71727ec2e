"""What the model reads of a session's newest version, and before the answer to a question about it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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

Emit = Callable[[PromptViewed | Failed], None]


@dataclass(frozen=True)
class PromptView:
    """Shows prompts, on request from any thread. A tape is read between two batches: it is of one version."""

    built: Built
    scheduler: Scheduler
    prompts: PromptBuilder
    registry: Registry
    emit: Emit

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
            question = None if asked is None else self._region(self._question(tape, asked))
        except ValueError as error:
            self.emit(failed(number, failure_of(error)))
            return
        frozen, sliding = self._region(tape.prefix), self._region(tape.window)
        self.emit(PromptViewed(number, tape.version, frozen, sliding, question))

    def _question(self, tape: Tape, asked: Generate) -> Sequence[int]:
        """The tokens that ask a question: a standing one as it is asked of every version.

        Raises ValueError for what cannot be asked.
        """
        for each in self.registry.standing(tape.name):
            if each.question == asked.question and not each.question.provisional:
                return self.built.prefixes.asked(each, tape.prefix)
        return self.prompts.prompt(asked).tokens

    def _region(self, tokens: Sequence[int]) -> Region:
        text = self.built.prompt.tokenizer.decode(list(tokens), skip_special_tokens=False)
        return Region(str(text), len(tokens))
