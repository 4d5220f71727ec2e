"""The packed forward is the dense one, and training goes on from a checkpoint as if it had never stopped."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tapes.generate import TRAINING
from tapes.rules import UNDEFINED
from tests.kit.tolerance import apart, largest, rounding
from tests.training import brute
from training.batches import Batch, Layout, Vocabulary, make_batch
from training.model import Optimiser, Shape, TapeModel, initialise_numbers, transformers_model
from training.tokenizer import QUESTIONS
from training.train import Balance, Plan, loss_of, train

SMALL = Shape(hidden=32, layers=2, heads=2, inner=48)
LAYOUTS = {
    "terse": Layout(32, 32, 3, 2, 2),
    "numbered": Layout(32, 32, 3, 2, 0, True),
    "terse sliding": Layout(12, 28, 3, 2, 0),
    "numbered sliding": Layout(12, 28, 3, 2, 0, True),
}


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary()


@pytest.fixture(scope="module")
def model(vocabulary: Vocabulary) -> TapeModel:
    """In float32, so that differences are rounding alone."""
    model = TapeModel(SMALL, seed=3)
    initialise_numbers(model, vocabulary.numbers, 3)
    model.dtype = torch.float32
    return model


def drawn(vocabulary: Vocabulary, layout: Layout, seed: int = 0) -> Batch:
    return make_batch(np.random.default_rng(seed), vocabulary, layout, TRAINING)


def assert_logits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for the rounding of float32 sums in another order."""
    bound = rounding(largest(expected), width=SMALL.inner, depth=SMALL.layers)
    assert apart(actual, expected) <= bound


@pytest.mark.parametrize("name", ["terse", "numbered"])
def test_packed_queries_equal_the_dense_model_prompt_by_prompt(
    model: TapeModel, vocabulary: Vocabulary, name: str
) -> None:
    batch = drawn(vocabulary, LAYOUTS[name])
    plain = transformers_model(model)
    with torch.no_grad():
        packed = model(batch).logits
        for query in range(len(batch.queries.rows)):
            prompt = torch.from_numpy(batch.ids[:, brute.dense_rows(batch, query)])
            assert_logits(packed[:, query], plain(prompt).logits[:, -1])


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_packed_queries_equal_a_loop_over_what_each_row_sees(
    model: TapeModel, vocabulary: Vocabulary, name: str
) -> None:
    """Sliding too: evicted bars are unseen, carried state keeps what it read, the prefix stays close."""
    batch = drawn(vocabulary, LAYOUTS[name])
    with torch.no_grad():
        packed = model(batch).logits
    expected = torch.from_numpy(brute.forward(model, batch, 0))
    assert_logits(packed[0], expected.float())


def test_a_prompt_reads_as_the_daemon_writes_it(vocabulary: Vocabulary) -> None:
    """Header, bars of five groups of three digits, then one token a question, or a number behind <|ask|>."""
    for numbered in (False, True):
        batch = drawn(vocabulary, Layout(16, 16, 2, 2, 0, numbered))
        prompt = vocabulary.tokenizer.decode(batch.ids[0, brute.dense_rows(batch, 0)])
        begin, *bars, question = prompt.split("\n")
        assert begin.startswith("<|bos|>reference ")
        assert " unit " in begin
        assert " percent " in begin
        if numbered:
            listed, *bars = bars
            assert listed.startswith("<|ask|>001<|")
        assert all(len(bar) == 15 and bar.isdigit() for bar in bars)
        assert len(bars) == batch.bar[batch.queries.rows[0]] + 1
        assert question == ("<|ask|>001" if numbered else "<|trend|>")


def test_a_few_steps_lower_the_loss(vocabulary: Vocabulary) -> None:
    model = TapeModel(SMALL)
    initialise_numbers(model, vocabulary.numbers, 0)
    optimiser, balance, losses = Optimiser(model), Balance(), []
    batch = drawn(vocabulary, Layout(32, 32, 4, 3, 2))
    for _ in range(8):
        loss, _ = loss_of(model, batch, vocabulary, balance)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own backward has no annotation
        optimiser.step(1.0)
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]


def finished(directory: Path, **options: Any) -> dict[str, Any]:
    plan = Plan(steps=4, cooldown=2, short=2, tokens=256, warm=1)
    list(train(plan, directory, SMALL, **options))
    state: dict[str, Any] = torch.load(directory / "last.pt", weights_only=True)
    return state


def test_resumed_training_is_bit_equal(tmp_path: Path) -> None:
    """Weights, optimiser and frequencies, after resuming where the cooldown begins."""
    whole, again = tmp_path / "whole", tmp_path / "again"
    whole.mkdir()
    again.mkdir()
    expected = finished(whole)
    resumed = finished(again, resume=whole / "stable.pt")
    assert torch.load(whole / "stable.pt", weights_only=True)["step"] == 2
    assert resumed["step"] == expected["step"] == 4
    assert resumed["frequency"] == expected["frequency"]
    assert all(torch.equal(resumed["model"][name], expected["model"][name]) for name in expected["model"])
    ours, theirs = resumed["optimiser"]["momentum"], expected["optimiser"]["momentum"]
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_equal_seeds_make_equal_batches_and_weights(vocabulary: Vocabulary) -> None:
    one, same, other = (drawn(vocabulary, LAYOUTS["terse"], seed) for seed in (1, 1, 2))
    assert np.array_equal(one.ids, same.ids)
    assert not np.array_equal(one.ids[:, -100:], other.ids[:, -100:])
    weights = [TapeModel(SMALL, seed).embed_tokens for seed in (1, 1, 2)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_labels_and_targets_agree(vocabulary: Vocabulary) -> None:
    """A defined label's target is its choice's token, an undefined one's is NONE."""
    batch = drawn(vocabulary, replace(LAYOUTS["terse"], auxiliary=0))
    q = batch.queries
    for index in range(len(q.rows)):
        kind = int(q.kind[0, index])
        target, value = q.target[:, index], q.value[:, index]
        if kind < len(vocabulary.questions) - 1:
            choices = vocabulary.choices[kind][np.maximum(value, 0)]
            assert np.array_equal(target, np.where(value < 0, vocabulary.none, choices))


def test_a_bar_is_measured_behind_its_last_token(model: TapeModel, vocabulary: Vocabulary) -> None:
    """Other prices from bar 9 on change the measures of bars 9 and later, and no others."""
    batch = drawn(vocabulary, LAYOUTS["terse sliding"])
    ids, first = batch.ids.copy(), batch.prefix + 9 * 6
    ids[:, first : batch.prefix + batch.tape] = vocabulary.numbers[7]
    with torch.no_grad():
        model.measures.fill_(0.1).mul_(torch.arange(SMALL.hidden))
        one, other = model(batch).measures, model(replace(batch, ids=ids)).measures
    assert one.shape == (SMALL.measured, 2, 28, batch.measures.wanted.shape[-1])
    changed = (one != other).any(0).any(-1)
    assert not changed[:, :9].any()
    assert changed[:, 9:].all()


@pytest.mark.parametrize("name", ["terse", "numbered"])
def test_the_questions_in_the_prefix_are_listed_in_the_order_of_their_numbers(
    vocabulary: Vocabulary, name: str
) -> None:
    batch = drawn(vocabulary, LAYOUTS[name])
    asked = batch.queries.kind[:, : len(batch.listed)]
    assert len(batch.listed) == (0 if name == "terse" else batch.queries.kind.shape[1] // 3)
    assert np.array_equal(batch.ids[:, batch.listed], vocabulary.questions[asked])
    numbers = vocabulary.numbers[1 + np.arange(len(batch.listed))]
    assert (batch.ids[:, batch.listed - 1] == numbers).all()


def test_which_question_a_row_asks_is_read_behind_the_layers_that_have_seen_the_list(
    model: TapeModel, vocabulary: Vocabulary
) -> None:
    batch = drawn(vocabulary, LAYOUTS["numbered"])
    with torch.no_grad():
        model.asked.normal_(generator=torch.Generator().manual_seed(3))
        one = model(batch).asked
        listed = batch.ids.copy()
        listed[:, : batch.prefix] = np.roll(listed[:, : batch.prefix], 1, 1)
        other = model(replace(batch, ids=listed)).asked
    assert one.shape == (1, *batch.queries.kind.shape, len(QUESTIONS))
    assert (one != other).any(-1).all()


def test_measures_are_the_margins_and_prices_in_units_of_the_mean_range(vocabulary: Vocabulary) -> None:
    batch = drawn(vocabulary, LAYOUTS["terse"])
    q, (wanted, known) = batch.queries, batch.measures
    for query in range(len(q.rows)):
        kind, bar = int(q.kind[0, query]), int(batch.bar[q.rows[query]])
        if kind < len(QUESTIONS) - 1:
            assert (known[:, bar, kind] == (q.value[:, query] != UNDEFINED)).all()
            assert np.allclose(wanted[:, bar, kind], np.arcsinh(2 * np.clip(q.margin[:, query], -6, 6)))
    numbers = batch.ids[:, batch.prefix : batch.prefix + batch.tape].reshape(2, -1, 6) - vocabulary.numbers[0]
    close, size = numbers[:, :, 3], (numbers[:, -20:, 1] - numbers[:, -20:, 2]).mean(1) + 0.5
    five = (close[:, -6] - close[:, -1]) / size
    assert np.allclose(wanted[:, -1, len(QUESTIONS) - 1], np.arcsinh(2 * np.clip(five, -12, 12)), atol=1e-6)
