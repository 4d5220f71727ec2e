"""Choices of several tokens scored over a tree, against every text that a small model can write."""

from itertools import product
from math import exp, log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.engine.label_tree import LabelTree, Tokens

VOCABULARY, DEPTH = 3, 4
LABELS = st.lists(
    st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=DEPTH).map(tuple),
    min_size=2,
    max_size=6,
    unique=True,
)


def next_probabilities(seed: int, path: Tokens) -> list[float]:
    """What a model that is none says after ``path``."""
    weights = [1.0 + hash((seed, *path, token)) % 97 for token in range(VOCABULARY)]
    return [weight / sum(weights) for weight in weights]


def scored(tree: LabelTree, seed: int) -> list[float]:
    return tree.scores(
        {
            path: [log(next_probabilities(seed, path)[token]) for token in after]
            for path, after in tree.nodes.items()
        }
    )


@given(labels=LABELS, seed=st.integers(0, 1000))
def test_a_choice_has_the_texts_that_begin_with_it_and_with_no_longer_one(labels, seed) -> None:
    shares = dict.fromkeys(labels, 0.0)
    for text in product(range(VOCABULARY), repeat=DEPTH):
        probability = 1.0
        for n, token in enumerate(text):
            probability *= next_probabilities(seed, text[:n])[token]
        begins = [label for label in labels if text[: len(label)] == label]
        if begins:
            shares[max(begins, key=len)] += probability
    found = [exp(score) for score in scored(LabelTree.of(labels), seed)]
    assert found == pytest.approx([shares[label] for label in labels], abs=1e-9)


@given(labels=LABELS, seed=st.integers(0, 1000), order=st.randoms())
def test_the_order_of_the_choices_does_not_matter(labels, seed, order) -> None:
    other = [*labels]
    order.shuffle(other)
    found = dict(zip(labels, scored(LabelTree.of(labels), seed), strict=True))
    again = dict(zip(other, scored(LabelTree.of(other), seed), strict=True))
    assert again == pytest.approx(found, abs=1e-9)


def test_choices_of_one_token_are_a_root_in_their_order() -> None:
    tree = LabelTree.of([(7,), (3,), (5,)])
    assert tree.is_flat
    assert tree.nodes == {(): (7, 3, 5)}
    assert not LabelTree.of([(7,), (3, 5)]).is_flat


def test_what_is_always_gone_on_with_is_never_the_answer() -> None:
    tree = LabelTree.of([(1,), (1, 2)])
    assert tree.scores({(): [-0.5], (1,): [0.0]}) == [float("-inf"), -0.5]


@pytest.mark.parametrize("labels", [[(1,), ()], [(1, 2), (3,), (1, 2)]])
def test_choices_that_are_no_tokens_or_the_same_are_refused(labels) -> None:
    with pytest.raises(ValueError, match="choice"):
        LabelTree.of(labels)


def test_a_choice_that_cannot_be_reached_is_impossible() -> None:
    tree = LabelTree.of([(1,), (2,), (2, 3)])
    assert tree.scores({(): [0.0, float("-inf")], (2,): [-1.0]}) == [0.0, float("-inf"), float("-inf")]
