"""Numbers by constrained decoding: whatever a model prefers, the answer is a decimal that fits."""

import random
import re

import pytest

from engine.model.embedded import embedded_directory
from engine.model.numbers import NumberGrammar, number_grammar

STOP = 99
PIECES = dict(
    enumerate([*"0123456789", "-", ".", "12", " 7", "-3", ".5", "0.25", "up", "1 2", "5\n", "--", ""])
)
GRAMMAR = NumberGrammar(PIECES, frozenset({STOP}))
NUMBER = re.compile(r"-?[0-9]{1,15}(\.[0-9]{1,18})?")


def written(tokens: list[int]) -> str:
    return "".join(PIECES[token] for token in tokens)


@pytest.mark.parametrize("most", [1, 2, 3, 30])
def test_any_walk_through_the_allowed_tokens_ends_with_a_number(most: int) -> None:
    rng = random.Random(most)
    for _ in range(300):
        output: list[int] = []
        while len(output) < most and STOP not in output:
            output.append(rng.choice(GRAMMAR.allowed(output, most - len(output))))
        text = written([token for token in output if token != STOP])
        assert NUMBER.fullmatch(text.strip()), text


def test_what_is_no_number_is_never_allowed() -> None:
    def texts(*tokens: int) -> set[str]:
        allowed = GRAMMAR.allowed(tokens, 9)
        return {PIECES.get(token, "stop") for token in allowed}

    digits = set("0123456789") | {"12"}
    assert texts() == digits | {"-", " 7", "-3", "0.25"}
    assert texts(10) == digits | {"0.25"}
    assert texts(5) == digits | {".", ".5", "0.25", "stop"}
    assert texts(5, 11) == digits
    assert texts(5, 15) == digits | {"stop"}


def test_a_tokenizer_without_an_end_or_digits_is_refused() -> None:
    for pieces, stops in ((PIECES, frozenset[int]()), ({0: "a"}, frozenset({STOP}))):
        with pytest.raises(ValueError, match="end token"):
            NumberGrammar(pieces, stops)


def test_the_embedded_tokenizer_writes_numbers() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(embedded_directory(seed=0))
    stop = frozenset({int(tokenizer.eos_token_id)})
    grammar = number_grammar(tokenizer, stop)
    assert 10 <= len(grammar.allowed((), 8)) < 2500
    for text in ("7", "12.5"):
        tokens = tokenizer.encode(text, add_special_tokens=False)
        for n, token in enumerate(tokens):
            assert token in grammar.allowed(tokens[:n], 8)
        assert stop <= set(grammar.allowed(tokens, 8))
