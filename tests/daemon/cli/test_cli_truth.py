"""The demo's judge: bars from trades, and the right answer at an answer's data version."""

import random

import msgspec
import pytest

from daemon.cli.truth import Tally, Truth
from feeds.decimals import from_units
from feeds.market_data import Answer, Latency, Trade
from ingest.compact import CompactSpec

SECOND = 1_000_000_000
CENT = 10_000_000
SYMBOL = "V:AAA"


def trade(at: int, cents: int, size: int = SECOND) -> Trade:
    return Trade(
        venue="V",
        symbol="AAA",
        ts_event=at,
        ts_recv=at,
        seq=1,
        price=from_units(cents * CENT),
        size=from_units(size),
    )


def answer(question: str, text: str, as_of: int, probability: float | None = None) -> Answer:
    return Answer(
        session="aaa", symbol=SYMBOL, question=question, question_hash="", text=text, choice=text,
        logit_gap=1.0, probability=probability, data_version=1, as_of=as_of, model="m", model_revision="",
        untrained=False, latency=Latency(), reused_tokens=0, computed_tokens=0, flags=(),
    )  # fmt: skip


def truth(window: int = 30) -> Truth:
    return Truth(SECOND, window, {SYMBOL: CompactSpec(2)})


def closing(cents: list[int]) -> Truth:
    """One bar a second, of two trades; the last one closes at the price given."""
    made = truth()
    for second, price in enumerate(cents):
        made.add(trade(second * SECOND, price + 3))
        made.add(trade(second * SECOND + 5, price))
    return made


def as_of(second: int) -> int:
    return second * SECOND + 5


def test_the_last_close_is_that_of_the_answers_data_version() -> None:
    made = closing([10_000, 10_012, 10_007])
    assert [made.expected(answer("exact_value", "", as_of(n))) for n in range(3)] == [
        "100.00", "100.12", "100.07",
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(5))
def test_trend_and_recent_high_follow_their_definitions(seed: int) -> None:
    rng = random.Random(seed)
    closes = [10_000 + rng.randrange(-200, 200) for _ in range(60)]
    made = closing(closes)
    for second in range(60):
        shown = closes[: second + 1][-30:]
        trend = made.expected(answer("trend", "", as_of(second)))
        high = made.expected(answer("recent_high", "", as_of(second)))
        if len(shown) < 11:
            assert (trend, high) == (None, None)
            continue
        change = shown[-1] - shown[-11]
        assert trend == (None if change == 0 else "UP" if change > 0 else "DOWN")
        assert high == ("YES" if max(shown[-5:]) > max(shown[:-5]) else "NO")


def test_volumes_are_summed_within_a_bar() -> None:
    made = truth()
    for second in range(25):
        for _ in range(3 if second >= 20 else 2):
            made.add(trade(second * SECOND + 5, 10_000))
    assert made.expected(answer("volume", "", as_of(24))) == "YES"
    assert made.expected(answer("volume", "", as_of(23))) is None


def test_answers_are_tallied_by_question_and_model() -> None:
    made = closing([10_000 + n for n in range(20)])
    assert made.judge(answer("trend", "UP", as_of(19), 0.9)) is True
    assert made.judge(answer("trend", "DOWN", as_of(18), 0.5)) is False
    assert made.judge(answer("trend", "UP", as_of(3), 0.9)) is None
    assert made.judge(answer("mood", "GOOD", as_of(19))) is None
    other = msgspec.structs.replace(answer("trend", "DOWN", as_of(19), 0.9), model="other")
    assert made.judge(other) is False
    assert made.tallies == {
        ("trend", "m"): Tally(judged=2, right=1, undefined=1, probability=1.4, calibrated=2),
        ("trend", "other"): Tally(judged=1, probability=0.9, calibrated=1),
    }


def test_an_answer_whose_bars_are_gone_or_never_were_is_not_judged() -> None:
    made = closing([10_000 + n % 7 for n in range(300)])
    assert made.judge(answer("exact_value", "100.00", as_of(0))) is None
    assert made.judge(answer("trend", "UP", as_of(220))) is None
    assert made.judge(answer("trend", "UP", as_of(240))) is not None
    assert truth().judge(answer("exact_value", "100.00", as_of(0))) is None
