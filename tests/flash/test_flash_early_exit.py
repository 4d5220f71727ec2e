"""Early exit without a tokenizer: the decision is the one that the engine made with one."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flash.early_exit import ReadyToken, exit_of, fast_answers
from flash.question import PreparedQuestion, Question
from flash.registry import Standing

WORDS = ("YES", "NO", "UP", "DOWN", "YESTERDAY", "NONE", "FLAT")


def token_of(word: str) -> int:
    """First token of an answer, as a tokenizer of three letters would have it."""
    return sum(ord(letter) << 8 * at for at, letter in enumerate(word[:3]))


def standing(*choices: Sequence[str], shift: int = 0) -> list[Standing]:
    made = []
    for number, each in enumerate(choices):
        question = Question(f"q{number}", f"{number}?", tuple(each) or None)
        prepared = PreparedQuestion((1,), tuple(token_of(c) + shift for c in each) or None, frozenset())
        made.append(Standing("s", question, question.hash, prepared))
    return made


def with_tokenizer(
    logits: dict[int, float], of: int, version: int, choices: Sequence[str], tau: float
) -> str | None:
    """The decision from all logits of version ``of``: equations 12 and 13, and no ask with like choices."""
    first, second = sorted(logits.values(), reverse=True)[:2]
    best = max(logits, key=lambda token: logits[token])
    tokens = [token_of(choice) for choice in choices]
    if len(set(tokens)) < len(tokens):
        return None  # the engine refuses it
    if of == version and tau and first - second > tau and best in tokens:
        return choices[tokens.index(best)]
    return None


asked = st.lists(st.sampled_from(WORDS), max_size=4).map(tuple)
values = st.floats(-10, 10, allow_nan=False)


@given(
    logits=st.lists(values, min_size=len(WORDS) + 1, max_size=len(WORDS) + 1, unique=True),
    versions=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    choices=asked,
    tau=st.sampled_from([0.0, 0.5, 2.0]) | st.floats(0, 8),
    asks=st.lists(st.lists(st.sampled_from(WORDS), min_size=2, max_size=4, unique=True), max_size=4),
)
def test_the_decision_is_that_of_the_engine_for_the_same_logits_threshold_and_version(
    logits: list[float],
    versions: tuple[int, int],
    choices: tuple[str, ...],
    tau: float,
    asks: list[list[str]],
) -> None:
    tokens = {token_of(word): value for word, value in zip(WORDS, logits, strict=False)}
    tokens[-1] = logits[-1]  # of a token that begins no answer
    # two words that begin alike share a logit, the second one's
    first, second = sorted(tokens.values(), reverse=True)[:2]
    ready = ReadyToken(versions[0], max(tokens, key=lambda token: tokens[token]), first - second)
    fast = fast_answers(standing(*asks))
    expected = with_tokenizer(tokens, *versions, choices, tau)
    known = {choice for each in asks for choice in each}
    found = exit_of(ready, versions[1], choices, fast, tau)
    assert found == (expected if known >= set(choices) else None)


def test_the_vocabulary_is_that_of_all_questions() -> None:
    found = fast_answers(standing(("YES", "NO"), (), ("NO", "FLAT")))
    assert found == {word: token_of(word) for word in ("YES", "NO", "FLAT")}


def test_an_answer_that_begins_differently_elsewhere_is_not_fast() -> None:
    """As one of a question pack, whose answers have tokens of their own."""
    found = fast_answers([*standing(("YES", "NO")), *standing(("NO", "UP"), shift=1)])
    assert found == {"YES": token_of("YES"), "UP": token_of("UP") + 1}


@pytest.mark.parametrize(
    ("ready", "choices", "exits"),
    [
        (ReadyToken(4, token_of("NO"), 2.5), ("YES", "NO"), "NO"),
        (ReadyToken(4, token_of("NO"), 2.5), ("NO", "FLAT"), "NO"),
        (ReadyToken(4, token_of("NO"), 2.0), ("YES", "NO"), None),  # not above tau
        (ReadyToken(3, token_of("NO"), 2.5), ("YES", "NO"), None),  # of an older version
        (ReadyToken(5, token_of("NO"), 2.5), ("YES", "NO"), None),  # of another engine's
        (ReadyToken(4, token_of("UP"), 9.0), ("YES", "NO"), None),  # no choice of the ask
        (ReadyToken(4, token_of("NO"), 9.0), (), None),  # an ask without choices
        (ReadyToken(4, token_of("NO"), 9.0), ("NO", "MAYBE"), None),  # one is no fast answer
        (ReadyToken(4, token_of("YES"), 9.0), ("YES", "YESTERDAY"), None),  # they begin alike
    ],
)
def test_an_ask_exits_only_on_a_sure_choice_of_its_version(
    ready: ReadyToken, choices: tuple[str, ...], exits: str | None
) -> None:
    fast = fast_answers(standing(("YES", "NO"), ("FLAT", "UP"), ("YESTERDAY", "DOWN")))
    assert exit_of(ready, 4, choices, fast, 2.0) == exits
    assert exit_of(ready, 4, choices, fast, 0.0) is None, "off"
