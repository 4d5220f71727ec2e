"""What early exits are worth: counted one by one."""

from hypothesis import given
from hypothesis import strategies as st

from flash.early_exit import ReadyToken
from training.early_exit import COLUMNS, TAUS, AskedOnce, exits_of, report, row

FAST = {"YES": 1, "NO": 2, "UP": 3, "DOWN": 4}
CHOICES = (("YES", "NO"), ("UP", "DOWN"))
BY_TOKEN = {token: text for text, token in FAST.items()}


@st.composite
def asks(draw: st.DrawFn) -> AskedOnce:
    number = draw(st.integers(0, 1))
    choices = CHOICES[number]
    ready = ReadyToken(1, draw(st.integers(0, 5)), draw(st.floats(0, 10)))
    said, right = draw(st.sampled_from(choices)), draw(st.sampled_from(choices))
    return AskedOnce(f"q{number}", choices, ready, said, right)


@given(st.lists(asks(), max_size=30), st.sampled_from(TAUS))
def test_each_share_is_of_the_asks_that_exit(asked: list[AskedOnce], tau: float) -> None:
    found = exits_of(asked, FAST, tau)
    exited = [a for a in asked if a.ready.gap > tau and BY_TOKEN.get(a.ready.token) in a.choices]
    said = [BY_TOKEN[a.ready.token] for a in exited]
    assert (found.asks, found.exits) == (len(asked), len(exited))
    assert found.right == sum(text == a.right for text, a in zip(said, exited, strict=True))
    assert found.computed_right == sum(a.computed == a.right for a in exited)
    assert found.agreed == sum(text == a.computed for text, a in zip(said, exited, strict=True))
    assert len(row(found)) == len(COLUMNS)


@given(st.lists(asks(), max_size=30))
def test_a_report_has_all_asks_and_those_of_each_question_at_each_gap(asked: list[AskedOnce]) -> None:
    made = report(asked, FAST, str, ("m", "r"), {})
    for token, share in made.favoured.items():
        assert share == sum(each.ready.token == int(token) for each in asked) / len(asked)
    assert len(made.favoured) == min(4, len({each.ready.token for each in asked}))
    names = ["all", *dict.fromkeys(each.question for each in asked)]
    assert [(each.question, each.tau) for each in made.exits] == [(n, tau) for n in names for tau in TAUS]
    for tau in TAUS:
        whole, *parts = (each for each in made.exits if each.tau == tau)
        assert whole.exits == sum(each.exits for each in parts)
        assert whole.right == sum(each.right for each in parts)
