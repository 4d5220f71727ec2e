"""Labels that clients send later: the right choices of standing answers."""

from __future__ import annotations

from functools import partial

from daemon.api.generation import Failed
from daemon.api.messages import Label, LabelReply, code_of
from daemon.engine.answers import Emit
from daemon.engine.confidence_metrics import Confidence
from flash.late_labels import LabelError
from flash.registry import Registry
from scheduler.lifecycle import STOPPING
from scheduler.scheduler import Scheduler


class EngineLabels:
    """Passes labels on to `Confidence`. Commands come from one thread; replies go out on the scheduler's."""

    def __init__(self, registry: Registry, confidence: Confidence, scheduler: Scheduler, emit: Emit) -> None:
        self._registry, self._confidence = registry, confidence
        self._scheduler, self._emit = scheduler, emit

    def label(self, command: Label) -> None:
        """Answer with a `LabelReply` or, with nothing changed, `Failed`."""
        if not self._scheduler.run_between(partial(self._label, command)):
            self._emit(Failed(command.id, "shutting_down", STOPPING.message))

    def _label(self, command: Label) -> None:
        """Between two batches."""
        session, version = command.session, command.data_version
        standing = next(
            (
                each
                for each in self._registry.standing(session)
                if command.question in (each.question.name, each.question.text)
            ),
            None,
        )
        try:
            if standing is None:
                raise LabelError("bad_request", f"{session} has no standing question {command.question!r}")
            found = self._confidence.label(standing, version, command.choice)
        except LabelError as error:
            self._emit(Failed(command.id, code_of(error.code), str(error)))
        else:
            name = standing.question.name
            self._emit(LabelReply(command.id, session, name, version, *found))
