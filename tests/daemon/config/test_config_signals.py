"""`[[signals]]`: what they declare, and what is wrong with them."""

from decimal import Decimal
from pathlib import Path

import pytest

from daemon.config.load import ConfigError, load_config
from daemon.config.signals import rules_of, unmet_clauses
from flash.confidence import UNCALIBRATED
from flash.signals import Clause

BASE = """
[[sessions]]
name = "btcusdt"
symbol = "BINANCE:BTCUSDT"

[[sessions]]
name = "ethusdt"
symbol = "BINANCE:ETHUSDT"

[[signals]]
name = "turn"
"""


def load(tmp_path: Path, signal: str, base: str = BASE):
    (tmp_path / "c.toml").write_text(base + signal)
    return load_config(tmp_path / "c.toml", {})


def problems(tmp_path: Path, signal: str, base: str = BASE) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        load(tmp_path, signal, base)
    return [f"{each.key}: {each.message}" for each in raised.value.problems]


def test_a_pattern_makes_one_signal_of_each_session(tmp_path):
    text = """
    when = [
      { question = "trend", answer = ["UP"], for_bars = 3, min_probability = 0.8, rearm = 0.6 },
      { session = "btcusdt", question = "exact_value", above = 70000, rearm = 69500.5 },
    ]
    sessions = ["*usdt"]
    cooldown = "15m"
    """
    rules = rules_of(load(tmp_path, text))
    assert [(each.name, each.session, each.sessions) for each in rules] == [
        ("turn", "btcusdt", ("btcusdt",)),
        ("turn", "ethusdt", ("ethusdt", "btcusdt")),
    ]
    assert rules[1].clauses == (
        Clause("ethusdt", "trend", ("UP",), min_probability=0.8, rearm=Decimal("0.6"), for_bars=3),
        Clause("btcusdt", "exact_value", above=Decimal(70000), rearm=Decimal("69500.5")),
    )
    assert rules[0].cooldown_ns == 15 * 60 * 10**9
    assert rules[0].none == "NONE"


def test_clauses_that_all_name_their_sessions_make_one_signal(tmp_path):
    text = """
    when = [
      { session = "ethusdt", question = "trend", changed = true, before = ["DOWN"] },
      { session = "btcusdt", question = "trend", answer = ["UP"] },
    ]
    """
    assert [each.session for each in rules_of(load(tmp_path, text))] == ["ethusdt"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "signals[0].when: a signal without a clause never fires: say which answer it waits for"),
        ('when = [{ question = "trend" }]', "signals[0].when[0].question: nothing is asked of its answers: "),
        (
            'when = [{ question = "trent", answer = ["UP"] }]',
            "signals[0].when[0].question: session btcusdt has no standing question 'trent'; it has: trend, ",
        ),
        (
            'when = [{ session = "solusdt", question = "trend", answer = ["UP"] }]',
            "signals[0].when[0].session: there is no session named 'solusdt'; there are: btcusdt, ethusdt",
        ),
        (
            'sessions = ["sol*"]\nwhen = [{ question = "trend", answer = ["UP"] }]',
            "signals[0].when[0].session: there is no session named 'sol*', as signals.sessions says",
        ),
        (
            'when = [{ question = "trend", answer = ["UPWARDS"] }]',
            "signals[0].when[0].answer: trend is never answered 'UPWARDS'; it may be UP, DOWN, NONE",
        ),
        (
            'when = [{ question = "trend", changed = true, before = ["SIDEWAYS"] }]',
            "signals[0].when[0].before: trend is never answered 'SIDEWAYS'; it may be UP, DOWN, NONE",
        ),
        (
            'when = [{ question = "trend", above = 3 }]',
            "signals[0].when[0].above: trend is answered by one of UP, DOWN, which is no number",
        ),
        (
            'when = [{ question = "exact_value", min_probability = 0.5 }]',
            "signals[0].when[0].min_probability: exact_value is answered in free text, which has no ",
        ),
        (
            'when = [{ question = "trend", min_probability = 0.5 }]\n[model]\ncalibration = "off"',
            "signals[0].when[0].min_probability: model.calibration is off, so no answer has a probability: ",
        ),
        (
            'when = [{ question = "trend", answer = ["UP"], min_probability = 1.5 }]',
            "signals[0].when[0].min_probability: expected float <= 1.0",
        ),
        (
            'when = [{ question = "trend", min_probability = 0.0 }]',
            "signals[0].when[0].min_probability: every answer",
        ),
        (
            'when = [{ question = "trend", changed = true, for_bars = 2 }]',
            "signals[0].when[0].for_bars: a change lasts one answer: ",
        ),
        (
            'when = [{ question = "trend", answer = ["UP"], before = ["DOWN"] }]',
            "signals[0].when[0].before: is for changed",
        ),
        (
            'when = [{ question = "trend", answer = ["UP"], above = 1 }]',
            "signals[0].when[0].above: only a number has",
        ),
        (
            'when = [{ question = "exact_value", above = 5, below = 5 }]',
            "signals[0].when[0].below: no number is at 5 or above it and below 5",
        ),
        (
            'when = [{ question = "exact_value", above = 5, rearm = 5 }]',
            "signals[0].when[0].rearm: 5 is not below above, 5",
        ),
        (
            'when = [{ question = "exact_value", below = 5, rearm = 4 }]',
            "signals[0].when[0].rearm: 4 is less than below, 5",
        ),
        (
            'when = [{ question = "exact_value", above = 5, below = 9, rearm = 4 }]',
            "signals[0].when[0].rearm: there are two",
        ),
        (
            'when = [{ question = "trend", answer = ["UP"], rearm = 0.5 }]',
            "signals[0].when[0].rearm: there is no threshold",
        ),
        (
            'when = [{ question = "trend", min_probability = 0.5, rearm = 0.6 }]',
            "signals[0].when[0].rearm: 0.6 is not between 0 and min_probability, 0.5",
        ),
        (
            'when = [{ question = "trend", answer = ["UP"] }, { question = "trend", answer = ["DOWN"] }]',
            "signals[0].when[1].answer: no answer to trend meets this and the clause before",
        ),
        (
            'when = [{ session = "btcusdt", question = "trend", answer = ["UP"] }]\nsessions = ["ethusdt"]',
            "signals[0].sessions: each clause names its session: ",
        ),
        (
            'cooldown_bars = 2\nwhen = [{ question = "trend", answer = ["UP"] }, '
            '{ session = "btcusdt", question = "volume", answer = ["YES"] }]',
            "signals[0].cooldown_bars: several sessions count their own data versions: use cooldown",
        ),
        (
            'when = [{ question = "trend", answer = ["UP"] }]\n[[signals]]\nname = "turn"\n'
            'when = [{ question = "trend", answer = ["UP"] }]',
            "signals[1].name: 'turn' is already signals[0].name",
        ),
        (
            'when = [{ question = "trend", answers = ["UP"] }]',
            "signals[0].when[0].answers: there is no such key; did you mean answer?",
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(tmp_path, text: str, problem: str) -> None:
    (found,) = problems(tmp_path, text)
    assert found.startswith(problem)


def test_sessions_that_a_pattern_may_open_are_not_known_yet(tmp_path):
    base = '[[sessions]]\nmatch = "BINANCE:*"\nmax_sessions = 4\n[[signals]]\nname = "turn"\n'
    config = load(tmp_path, 'when = [{ session = "solusdt", question = "trend", answer = ["UP"] }]', base)
    assert not rules_of(config)


def test_a_clause_that_asks_for_a_probability_of_answers_without_one_is_named_once(tmp_path: Path) -> None:
    when = 'when = [{ question = "trend", answer = ["UP"] }, { question = "volume", min_probability = 0.8 }]'
    config = load(tmp_path, when)
    unjudged = {("btcusdt", "trend"): "not_calibrated", ("ethusdt", "volume"): "by_number"}
    (found,) = unmet_clauses(config, unjudged)
    assert found.key == "signals[0].when[1].min_probability"
    assert found.message == (
        "answers to volume of ethusdt have no probability, so this never holds: " + UNCALIBRATED["by_number"]
    )
    (both,) = unmet_clauses(config, unjudged | {("btcusdt", "volume"): "by_number"})
    assert "of btcusdt and 1 more have" in both.message
    of_a_pattern = '[[sessions]]\nmatch = "BINANCE:*"\nmax_sessions = 4\n[[signals]]\nname = "turn"\n'
    (example,) = unmet_clauses(load(tmp_path, when, of_a_pattern), {("BINANCE:*", "volume"): "by_number"})
    assert example.key == found.key


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ('url = "desk.example"', "webhooks[0].url: 'desk.example' is no address such as "),
        ('url = "https://me:secret@desk.example"', "webhooks[0].url: "),
        (
            'url = "https://desk.example"\nsignals = ["turns"]',
            "webhooks[0].signals: there is no signal named 'turns'",
        ),
        ('url = "https://desk.example"\ntimeout = "soon"', "webhooks[0].timeout: "),
    ],
)
def test_what_is_wrong_with_a_webhook_is_said(tmp_path: Path, more: str, problem: str) -> None:
    signal = 'when = [{ question = "trend", answer = ["UP"] }]\n'
    table = f'[[webhooks]]\nname = "desk"\nsecret_file = "/nowhere"\n{more}\n'
    (found,) = problems(tmp_path, signal + table)
    assert found.startswith(problem)
    (alone,) = problems(
        tmp_path, table.replace(more, 'url = "https://desk.example"'), BASE[: BASE.index("[[signals]]")]
    )
    assert alone == "webhooks[0]: there are no [[signals]] that it could send"
