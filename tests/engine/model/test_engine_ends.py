"""The end tokens of a model are all that its configurations and its tokenizer name."""

import json
from pathlib import Path
from shutil import copytree
from types import SimpleNamespace
from typing import Any

import pytest

from daemon.config.schema import Config, ModelConfig
from daemon.engine.build import load, prepared
from engine.model.chat_format import PromptFormat
from engine.model.constrained import OneOf, TextGrammar
from engine.model.embedded import build_tokenizer, embedded_directory
from engine.model.loading import end_ids_of
from engine.model.numbers import NumberGrammar
from engine.model.vocabulary import Vocabulary, token_bytes
from flash.question import Question

TOKENIZER = build_tokenizer()
OWN = TOKENIZER.eos_token_id


def model(generation: Any, config: Any, text: Any = None) -> SimpleNamespace:
    """A model with these end tokens in its configurations; 100 tokens."""
    inner = SimpleNamespace(eos_token_id=text, vocab_size=100)
    outer = SimpleNamespace(eos_token_id=config, get_text_config=lambda: inner)
    return SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=generation), config=outer)


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        (model(None, None), set()),
        (model(5, None), {5}),
        (model([5, 7], None), {5, 7}),
        (model([5, 7], 9), {5, 7, 9}),
        (model((5,), [9, 5], 3), {3, 5, 9}),
        (model(None, 9, [1, 2]), {1, 2, 9}),
        (model([-1, 5, 100, 99], -1), {5, 99}),
        (model([], []), set()),
    ],
)
def test_one_or_several_of_any_configuration(named: Any, expected: set[int]) -> None:
    assert end_ids_of(named) == expected


def test_the_tokenizers_own_is_always_one() -> None:
    assert PromptFormat.of(TOKENIZER).stop_ids == {OWN}
    assert PromptFormat.of(TOKENIZER, end_ids=frozenset({7, 9})).stop_ids == {OWN, 7, 9}


@pytest.mark.parametrize("ids", [7, [7], [OWN, 7, 300]])
def test_a_models_directory_says_which_they_are(tmp_path: Path, ids: object) -> None:
    """For questions in free text, as numbers, and for prompts alike."""
    directory = copytree(embedded_directory(), tmp_path / "model")
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    loaded, prompt = load(Config(model=ModelConfig(path=str(directory), device="cpu")))
    named = {ids} if isinstance(ids, int) else set(ids)  # type: ignore[call-overload]  # a list
    assert loaded.end_ids == {OWN, *named}
    assert prompt.stop_ids == {OWN, *named}
    for answer in ("text", "number"):
        question = Question("q", "What is it?", None, answer=answer)  # type: ignore[arg-type]  # one of its kinds
        assert prepared(prompt, question).stop_ids == {OWN, *named}


def test_an_end_token_with_a_text_ends_a_constrained_answer_and_is_no_part_of_one() -> None:
    """Some models name a line feed: no text that is constrained can then be cut short by one."""
    texts = token_bytes(TOKENIZER)
    a, b = (next(token for token, text in texts.items() if text == each) for each in (b"a", b"b"))
    grammar = TextGrammar([OneOf((b"ab",))], Vocabulary(texts), frozenset({OWN, b}))
    assert b not in grammar.allowed([a], 9)
    free = TextGrammar([OneOf((b"ab",))], Vocabulary(texts), frozenset({OWN}))
    assert b in free.allowed([a], 9)


def test_a_digit_that_ends_answers_is_no_digit_of_a_number() -> None:
    pieces = {number: str(number) for number in range(10)} | {10: "12", 11: ""}
    numbers = NumberGrammar(pieces, frozenset({10, 11}))
    assert set(numbers.allowed([1], 9)) == {*range(10), 10, 11}  # the two as ends of "1"
    assert set(numbers.allowed([], 9)) == set(range(10))
