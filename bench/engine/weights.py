"""Quantised weights beside float32 ones: a decoded token, and reading a prompt."""

from collections.abc import Iterator
from pathlib import Path

from bench.engine.contenders import EIGHTY_SHAPE, append, engine_for
from bench.engine.rates import MachineRates
from bench.figures import Figure, Goal, Setting, latency, quantiles
from bench.run import SuiteRun, Turns
from engine.model.embedded import embedded_directory
from engine.model.loaded import LoadedModel, Weights
from engine.model.loading import load_model
from regions.tape import Retention

_WAYS: tuple[Weights, ...] = ("float", "int8", "int4")
_CONTEXT, _PROMPT = 64, 512
_GOALS = {"int8": 0.3, "int4": 0.2}
"""Of a token's time with float32: it is bound by reading weights, of which there are 9 and 5 bits for 32. A
prompt must not take longer."""
_FEW, _FEW_GOAL = 5, 0.6
"""Rows of a step with drafts, and what they may take of float32's time."""


class Passes:
    """Passes of a model over ``rows`` tokens behind a short tape, each on a fork that is dropped."""

    def __init__(self, loaded: LoadedModel, rows: int) -> None:
        self._engine = engine_for(loaded, _CONTEXT + rows, readers=2)
        tokens = [3 + 7 * n % (loaded.sizes.vocabulary - 3) for n in range(_CONTEXT + rows)]
        self._tape = self._engine.open_tape("tape", tokens[:_CONTEXT], Retention(_CONTEXT + rows))
        self._tokens = tokens[_CONTEXT:]

    def __call__(self) -> None:
        """One pass, whose last row is read."""
        fork = self._tape.fork()
        try:
            append(self._engine, [fork], [self._tokens])
        finally:
            fork.release()


def loaded_as(path: Path, weights: Weights) -> LoadedModel:
    """The model in a directory, by compiled layers alone."""
    loaded = load_model(path, dtype="float32", device="cpu", layers="compiled", weights=weights)
    loaded.release_plain()
    return loaded


def measure(run: SuiteRun) -> Iterator[Figure]:
    """A token behind 64 others, one with four drafts, and a prompt, by compiled layers in float32 over
    weights in float32, int8 and int4, in turn. *Read once*: the packed weights, at the rate of the fastest
    read of memory.
    """
    rates = MachineRates.of(run)
    rates.look()
    path = embedded_directory(**({} if run.quick else EIGHTY_SHAPE))
    models = [loaded_as(path, way) for way in _WAYS]
    prompt = run.sized(_PROMPT, 40)
    few = run.sized(40, 2)
    for rows, repeats in ((1, few), (_FEW, few), (prompt, run.sized(8, 2))):
        turns = Turns(*(Passes(model, rows) for model in models))
        for _ in range(repeats + 1):
            turns()
        what = {1: "a decoded token", _FEW: "a token and four drafts"}.get(rows, f"a prompt of {rows} tokens")
        for way, model, ns in zip(_WAYS, models, turns.ns, strict=True):
            setting: Setting = {"": what, "weights": way}
            if way != "float":
                goal = {0.5: Goal({1: _GOALS[way], _FEW: _FEW_GOAL}.get(rows, 1.0))}
                first = turns.ns[0][1:]
                yield from latency("a pass", ns[1:], setting, "", "float32", first, at=(0.5,), goals=goal)
            if rows == 1:
                least = 1e3 * model.packed_bytes / rates.read().a_second
                taken = quantiles(ns[1:], 0.5)[0] / 1e6
                yield Figure("a pass P50", taken, "ms", "", setting, "weights read once", least)
    for way, model in zip(_WAYS[1:], models[1:], strict=True):
        sizes = [each.packed_bytes / 1e6 for each in (model, models[0])]
        yield Figure("packed weights", sizes[0], "MB", "", {"weights": way}, "float32", sizes[1])
    rates.look()
    yield from rates.figures()
