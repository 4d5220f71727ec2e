"""Questions, their identity, and the registry's refusals."""

import pytest

from flash.question import PAPER_SIX, PreparedQuestion, Question
from flash.registry import BadQuestion, Registry


def prepare(question: Question) -> PreparedQuestion:
    """One token a character; a choice's token is its first letter, as a tokenizer might have it."""
    choices = tuple(ord(choice[0]) for choice in question.choices) if question.choices else None
    return PreparedQuestion(tuple(map(ord, question.text)), choices, frozenset({0}))


def test_the_papers_six_are_five_choices_and_one_exact_value() -> None:
    assert [question.choices for question in PAPER_SIX] == [("UP", "DOWN"), *[("YES", "NO")] * 4, None]
    assert (
        len({question.name for question in PAPER_SIX}) == len({question.hash for question in PAPER_SIX}) == 6
    )
    registry = Registry(prepare)
    for question in PAPER_SIX:
        registry.register("BTC", question)
    assert [item.question for item in registry.standing("BTC")] == list(PAPER_SIX)


def test_the_hash_is_stable_across_processes_and_releases() -> None:
    """Computed by hand once: blake2b-128 over length-prefixed parts."""
    assert Question("q", "Up?", ("UP", "DOWN")).hash == "c985891690ce73791aaec2aad2d43fa8"


@pytest.mark.parametrize(
    "other",
    [
        Question("another name", "Is it up?", ("UP", "DOWN")),
        Question("q", "  Is it\n up? ", ("UP", "DOWN")),
        Question("q", "Is it up?", ("UP", " DOWN "), max_tokens=99),
    ],
)
def test_name_white_space_and_length_do_not_change_the_hash(other: Question) -> None:
    assert other.hash == Question("q", "Is it up?", ("UP", "DOWN")).hash


def test_unicode_forms_of_a_text_are_the_same_question() -> None:
    assert Question("q", "Cafe\u0301?").hash == Question("q", "Caf\u00e9?").hash


@pytest.mark.parametrize(
    "other",
    [
        Question("q", "is it up?", ("UP", "DOWN")),
        Question("q", "Is it up?", ("DOWN", "UP")),
        Question("q", "Is it up?", ("UPDO", "WN")),
        Question("q", "Is it up? UP", ("DOWN", "x")),
        Question("q", "Is it up?"),
    ],
)
def test_text_choices_and_their_order_change_the_hash(other: Question) -> None:
    assert other.hash != Question("q", "Is it up?", ("UP", "DOWN")).hash


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"name": " "}, "a name and a text"),
        ({"text": ""}, "a name and a text"),
        ({"choices": ("YES",)}, "'q': needs at least two choices"),
        ({"choices": ("YES", "NO", "YES")}, "repeat"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, not 0"),
    ],
)
def test_nonsense_questions_are_refused(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Question(**{"name": "q", "text": "t", **arguments})


def test_choices_that_begin_alike_are_refused_by_name() -> None:
    registry = Registry(prepare)
    with pytest.raises(BadQuestion, match=r"\['BUY', 'BEAR'\]"):
        registry.register("BTC", Question("side", "Which?", ("BUY", "SELL", "BEAR")))
    assert registry.standing("BTC") == ()


@pytest.mark.parametrize(("first", "second"), [(None, 0.02), (0.02, None), (0.02, 0.05)])
def test_who_asks_the_same_has_one_error(first: float | None, second: float | None) -> None:
    """Their answers, labels and debts are one question's: one would act by what the other may get wrong."""
    registry = Registry(prepare)
    registry.register("s", Question("a", "Up?", ("UP", "DOWN"), max_error=first))
    with pytest.raises(BadQuestion, match="the same as 'a'") as refused:
        registry.register("s", Question("b", " Up? ", ("UP", "DOWN"), max_error=second))
    assert refused.value.member == "max_error"
    registry.register("s", Question("b", "Up?", ("UP", "DOWN"), max_error=first))
    registry.register("s", Question("c", "Up?", ("DOWN", "UP"), max_error=second))
    registry.register("t", Question("b", "Up?", ("UP", "DOWN"), max_error=second))


def test_choices_that_were_not_all_prepared_are_refused() -> None:
    registry = Registry(lambda question: PreparedQuestion((1,), (2,), frozenset()))
    with pytest.raises(BadQuestion, match="2 choices"):
        registry.register("BTC", Question("q", "t", ("a", "b")))


def test_register_is_idempotent_and_names_are_unique_within_a_session() -> None:
    registry = Registry(prepare)
    question = Question("q", "Up?", ("UP", "DOWN"))
    first = registry.register("A", question)
    assert registry.register("A", question) is first
    with pytest.raises(BadQuestion, match="'q'") as raised:
        registry.register("A", Question("q", "Down?"))
    assert raised.value.member == "name"
    registry.register("B", Question("q", "Down?"))
    assert [each.question.text for each in registry.standing("A")] == ["Up?"]
    assert [each.question.text for each in registry.standing("B")] == ["Down?"]
    assert registry.standing("C") == ()
