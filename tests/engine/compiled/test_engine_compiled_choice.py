"""Compiled layers run where whole passes with them are not slower, and the verdict is remembered."""

from collections.abc import Iterator
from dataclasses import replace
from math import exp, log
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.compiled import pass_selftest
from engine.compiled.packing import decoder_of
from engine.compiled.pass_selftest import ROWS, compare, measured_layers, of_all_layers
from engine.compiled.verdict import SLOWER, Verdict
from engine.linears.linear_selftest import Layers, SelfTest
from engine.linears.products import MatmulLibrary, Way
from engine.measurement_cache import Memory
from engine.model import canary, loading
from engine.model.loaded import LoadedModel
from engine.model.loading import load_model, prepare
from engine.model.terse import TAPE_MODEL
from engine.stopwatch import Call
from tests.engine.oracle import random_weights, tiny_config

TOKENS = list(range(5, 42))
Seconds = st.floats(1e-6, 1e3)


def verdict(ratio: float) -> Verdict:
    """Compiled layers that are so many times as fast."""
    return Verdict(rows=(1, 9), compiled_s=(1.0, 2.0), plain_s=(ratio, 2 * ratio), measured="2026-01-02")


@given(st.lists(st.tuples(st.integers(1, 512), Seconds, Seconds), min_size=1, max_size=5))
def test_each_number_of_rows_weighs_the_same(times: list[tuple[int, float, float]]) -> None:
    rows, ours, theirs = zip(*times, strict=True)
    found = Verdict(rows=rows, compiled_s=ours, plain_s=theirs, measured="today")
    expected = exp(sum(log(p) - log(c) for _, c, p in times) / len(times))
    assert found.speedup == pytest.approx(expected)
    assert found.compiled == (found.speedup * SLOWER >= 1)


@pytest.mark.parametrize(("ratio", "used"), [(4.3, True), (1.0, True), (0.96, True), (0.94, False)])
def test_compiled_layers_run_unless_they_are_slower(ratio: float, used: bool) -> None:
    assert verdict(ratio).compiled == used


@pytest.mark.parametrize(
    "wrong",
    [
        {"rows": []},
        {"rows": [1]},
        {"plain_s": [1.0]},
        {"plain_s": [1.0, 0.0]},
        {"plain_s": [1.0, -1.0]},
        {"compiled_s": [1.0, None]},
        {"compiled_s": [1.0, "x"]},
        {"measured": 5},
        {"more": 1},
    ],
    ids=str,
)
def test_a_file_with_times_that_cannot_be_is_no_verdict(wrong: dict[str, object]) -> None:
    entry = msgspec.to_builtins(verdict(2.0))
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({**entry, **wrong}, Verdict)


@pytest.mark.parametrize(
    ("layers", "size", "counts"),
    [(1, 10, (1,)), (12, 1 << 20, (12,)), (2, 1 << 40, (2,)), (32, 1 << 26, (1, 2)), (3, 1 << 40, (1, 2))],
)
def test_of_large_models_the_first_layers_are_measured(
    layers: int, size: int, counts: tuple[int, ...]
) -> None:
    assert measured_layers(layers, size) == counts


@given(st.integers(1, 100), Seconds, Seconds)
def test_all_layers_take_as_long_as_the_measured_ones(layers: int, head: float, each: float) -> None:
    counts = measured_layers(layers, 1 << 25)
    seconds = [head + count * each for count in counts]
    assert of_all_layers(seconds, counts, layers) == pytest.approx(head + layers * each, rel=1e-6)


class Other(SelfTest):
    """Chooses the last way that is offered, so that modules are changed."""

    def fastest(self, layers: Layers, ways: Any, fallback: Way) -> Way:
        return Way(
            MatmulLibrary("other", torch.nn.functional.linear, torch.clone, packs=True), ways[-1].joint
        )


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("largest", [1 << 27, 1])
def test_whole_passes_of_both_are_timed_and_leave_no_trace(
    architecture: str, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is called in turn, for every number of rows; the model is afterwards what it was."""
    monkeypatch.setattr(pass_selftest, "LARGEST", largest)
    monkeypatch.setattr("engine.linears.install.SELF_TEST", Other())
    extra = {"sliding_window": None} if architecture == "mistral" else {}
    model = random_weights(tiny_config(architecture, layers=3, **extra))
    plain = prepare(model, None, name=architecture, layers="torch")
    before = canary.dense_logits(plain, TOKENS)
    forwards = {name: vars(module).get("forward") for name, module in model.named_modules()}
    asked: list[int] = []

    def measure(calls: list[Call]) -> list[float]:
        for call in [*calls, *calls]:
            call()
        asked.append(len(calls))
        half = len(calls) // 2
        return [1.0 + n for n in range(half)] + [3.0 * (1 + n) for n in range(half)]

    decoder = decoder_of(model)
    assert decoder is not None
    found = compare(plain, decoder, measure)
    assert found.speedup == pytest.approx(3.0)
    assert asked == [2 if largest > 1 else 4] * len(ROWS)
    assert {name: vars(module).get("forward") for name, module in model.named_modules()} == forwards
    assert torch.equal(canary.dense_logits(plain, TOKENS), before)
    canary.check(plain)
    canary.check(replace(plain, decoder=decoder))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Verdict]]:
    """What the next comparisons find, the last one first; an empty cache."""
    found: list[Verdict] = []
    monkeypatch.setattr(loading, "MEMORY", Memory(lambda: tmp_path / "measured"))
    monkeypatch.setattr(loading, "compare", lambda plain, decoder: found.pop())
    yield found
    assert not found, "a comparison was not made"


def load() -> LoadedModel:
    return load_model(TAPE_MODEL, dtype="float32", device="cpu")


@pytest.mark.parametrize("ratio", [4.3, 0.5])
def test_the_next_start_chooses_alike_without_a_clock(measured: list[Verdict], ratio: float) -> None:
    measured.append(verdict(ratio))
    first, second = load(), load()
    for loaded, remembered in ((first, False), (second, True)):
        assert (loaded.decoder is not None) == (ratio > 1)
        assert loaded.choice is not None
        assert loaded.choice.remembered == remembered
        assert loaded.choice.verdict == verdict(ratio)
        canary.check(loaded)
    assert "measured now" in str(first.choice)
    assert "remembered from 2026-01-02 in " in str(second.choice)


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b'{"question":'])
def test_a_torn_file_is_measured_again(measured: list[Verdict], content: bytes) -> None:
    measured += [verdict(0.5), verdict(2.0)]
    choice = load().choice
    assert choice is not None
    choice.path.write_bytes(content)
    again = load().choice
    assert again is not None
    assert (again.remembered, again.verdict) == (False, verdict(0.5))


def test_another_type_of_weights_is_another_question(measured: list[Verdict]) -> None:
    measured += [verdict(0.5), verdict(2.0)]
    assert load().decoder is not None
    assert load_model(TAPE_MODEL, dtype="bfloat16", device="cpu").decoder is None


def test_nothing_is_measured_where_nothing_is_to_be_decided(measured: list[Verdict]) -> None:
    for layers in ("compiled", "torch"):
        assert load_model(TAPE_MODEL, dtype="float32", device="cpu", layers=layers).choice is None
    gemma = prepare(random_weights(tiny_config("gemma2")), None, name="gemma2", layers="auto")
    assert gemma.choice is None


def test_the_comparison_itself_runs_at_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With real times, whatever they are: the choice is what they say."""
    monkeypatch.setattr(loading, "MEMORY", Memory(lambda: tmp_path))
    loaded = load()
    assert loaded.choice is not None
    assert loaded.choice.verdict.rows == ROWS
    assert (loaded.decoder is not None) == loaded.choice.verdict.compiled
    canary.check(loaded)
