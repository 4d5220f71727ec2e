"""Which standing question is meant, against a plain search through the list."""

import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from flash.lookup import Lookup
from flash.question import Question

WORDS = st.sampled_from(
    ["trend", "up or down?", "up  or\ndown?", " up or down? ", "caf\u00e9", "cafe\u0301", "b"]
)
CHOICES = st.sampled_from([None, ("UP", "DOWN"), ("DOWN", "UP"), ("YES", "NO")])


def plain(text: str) -> str:
    return " ".join(unicodedata.normalize("NFC", text).split())


def meant(questions: list[Question], asked: str, choices: tuple[str, ...]) -> Question | None:
    """By name, else by text; with choices the one that has them."""
    named = [each for each in questions if plain(each.name) == plain(asked)][:1]
    found = named + [each for each in questions if plain(each.text) == plain(asked) and each not in named]
    if choices:
        return next((each for each in found if each.choices == choices), None)
    if named:
        return named[0]
    for provisional in (False, True):
        for bare in (True, False):
            for each in found:
                if each.provisional == provisional and (each.choices is None) == bare:
                    return each
    return None


@st.composite
def lists(draw: st.DrawFn) -> list[Question]:
    names = draw(st.lists(st.sampled_from(["trend", "a", "b", "c", "d"]), unique=True))
    return [Question(name, draw(WORDS), draw(CHOICES), provisional=draw(st.booleans())) for name in names]


@given(questions=lists(), asked=WORDS | st.sampled_from(["a", "c ", "zzz", ""]), choices=CHOICES)
def test_it_is_found_by_name_or_text_whatever_the_order(questions, asked, choices) -> None:
    lookup = Lookup.of(questions)
    found = lookup.find(asked, choices or ())
    expected = meant(questions, asked, choices or ())
    assert (found and found.question) == expected
    if found is not None:
        assert found.hash == found.question.hash
    named = [each for each in questions if plain(each.name) == plain(asked)]
    assert lookup.text_of(asked) == (named[0].text if named else asked)
    every = [each for each in questions if plain(asked) in (plain(each.name), plain(each.text))]
    assert {each.question for each in lookup.named(asked)} == set(every)


def test_of_two_with_one_name_the_first_is_found() -> None:
    one, two = Question("a", "Up?"), Question("a", "Down?")
    assert Lookup.of([one, two]).find("a").question == one
