"""The question benchmark compares contenders that give the same answers, and fails when they do not."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from bench.engine.contenders import EIGHTY_SHAPE, Disagreement, Reply
from bench.engine.floor import Floors, PassCosts
from bench.engine.questions import EMBEDDED, Race, race
from bench.engine.rates import MachineRates, Rate
from bench.engine.scenario import Scenario, Size, make_scenario, synthetic_bars
from engine.model.embedded import build_model, embedded_directory
from engine.model.loaded import LoadedModel
from engine.model.loading import load_model
from tests.kit import tolerance

SHAPE = {"hidden": 64, "layers": 2}
SIZE = Size(first=6, rounds=3, bars=4)
FLOORS = Floors(PassCosts(*range(5)), Rate("oneDNN", 1e9), Rate("a sum", 1e9))


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    directory = embedded_directory(tmp_path_factory.mktemp("models"), **SHAPE)
    return load_model(directory, dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def scenario(loaded: LoadedModel) -> Scenario:
    return make_scenario(loaded, SIZE)


def test_a_run_has_every_point_and_every_answer_agrees() -> None:
    """Contexts grow by whole updates; ours, kept cache and dense give the same tokens and logits."""
    plan = replace(EMBEDDED, shape=SHAPE, size=SIZE, repeats=2, dense_rounds=(0, 2))
    found = list(race(plan, 1, MachineRates(64, 1 << 16)))
    points = [f for f in found if f.name == "question P50" and "context" in f.setting]
    kept = [int(f.setting["context"]) for f in points if f.against == "kept cache"]
    dense = [int(f.setting["context"]) for f in points if f.against == "dense"]
    assert (len(kept), dense) == (3, [kept[0], kept[2]])
    reading = [f for f in found if f.name == "reading" and f.against == "kept cache"]
    assert [f.setting["context before"] for f in reading[1:]] == kept[:-1]
    assert [b - a for a, b in pairwise(kept)] == [f.setting["tokens read"] for f in reading[1:]]
    assert next(f.n for f in found if f.name == "question P50") == 6
    agreed = next(f for f in found if f.name == "answers equal to the reference's")
    assert agreed.ours == agreed.reference == 8
    assert (
        next(f.ours for f in found if f.name == "largest difference of their logits")
        <= tolerance.of_embedded_gap()
    )


class Fixed:
    """Always gives the same answer."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply

    def ingest(self, records: Sequence[Sequence[int]]) -> None:
        pass

    def ask(self, question: Sequence[int]) -> Reply:
        return self._reply


def test_a_different_answer_fails_the_run_unless_it_is_a_tie(scenario: Scenario) -> None:
    """Another token with a clear gap raises; a gap within fp32 noise counts as no agreement."""
    ours, clear, tied = Fixed(Reply(5, 1.0, 2e-4)), Fixed(Reply(6, 1.0, 0.5)), Fixed(Reply(6, 1.0, 1e-4))
    with pytest.raises(Disagreement, match="token=6"):
        Race(scenario, ours, clear, ours).round(scenario.updates[0], 1, with_dense=False)
    race = Race(scenario, ours, tied, ours)
    for update in scenario.updates:
        race.round(update, 1, with_dense=True)
    found = race.figures("fixed", EMBEDDED.goals, FLOORS)
    agreed = next(f for f in found if f.name == "answers equal to the reference's")
    assert (agreed.ours, agreed.reference) == (3, 6)


def test_the_larger_model_has_about_eighty_million_parameters() -> None:
    """Counted without building the weights."""
    with torch.device("meta"):
        model = build_model(**EIGHTY_SHAPE, seed=0)
    assert sum(parameter.numel() for parameter in model.parameters()) == 81_808_128


def test_the_scenario_is_the_papers(loaded: LoadedModel) -> None:
    """925 bars of one second each in order, about 16 tokens a bar, a question of about 40 tokens."""
    full = make_scenario(loaded, EMBEDDED.size)
    assert [len(full.first), len(full.updates), {len(update) for update in full.updates}] == [100, 15, {55}]
    bars = synthetic_bars(20, 7)
    assert (bars["ts_open"][1:] - bars["ts_open"][:-1] == 1_000_000_000).all()
    per_bar = (full.tokens - len(full.frozen)) / 925
    assert 14 <= per_bar <= 19
    assert 30 <= len(full.question) <= 50
