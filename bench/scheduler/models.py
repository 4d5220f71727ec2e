"""The model of the parts that run on an engine."""

from __future__ import annotations

from bench.engine.models import load
from bench.run import Run
from engine.device import in_own_thread
from engine.model.loading import LoadedModel


def embedded(run: Run) -> LoadedModel:
    """The embedded model, loaded where it will be run: on the engine's thread."""
    return in_own_thread(lambda: load({}, run.threads))[0]
