"""Questions that fit between two updates, against brute force over the passes."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from flash.capacity import Background, Shape, WithHost, asked_times, passes_ns
from flash.question import PreparedQuestion, Question
from flash.registry import Standing
from scheduler.costs import Span, guess
from scheduler.interfaces import Limits

MS = 1_000_000
LIMITS = Limits(max_batch_tokens=64, max_batch_requests=4)


class Linear:
    """2 ms a pass and 0.1 ms a token."""

    def batch_ns(self, spans: Sequence[Span]) -> int:
        return 2 * MS + sum(n for _, n in spans) * MS // 10


@given(
    st.integers(1, 30), st.integers(1, 9), st.integers(0, 3), st.integers(1, 9),
    st.floats(0.01, 2.0), st.sampled_from([0.0, 0.25, 0.9]),
)  # fmt: skip
def test_k_max_is_the_most_questions_whose_passes_end_before_the_next_update(
    n: int, bar: int, ready: int, question: int, data: float, others: float
) -> None:
    """One question of each session at a time, as equation 14 has it."""
    shape = Shape(100, bar, ((question, 1, 1.0),), ready)
    found = Background(Linear(), LIMITS, shape).k_max(n, data, others)

    def took(rows: int, tokens: int) -> float:
        left, ns = rows, 0
        most = min(4, 64 // tokens)
        while left:
            ns += Linear().batch_ns([(100, tokens)] * min(left, most))
            left -= min(left, most)
        return ns * 1e-9

    fixed = took(n, bar) + (took(n, ready) if ready else 0.0) + others * data
    fits = [k for k in range(1, 2000) if fixed + k * took(n, question) <= data + 1e-12]
    assert found == max(fits, default=0)


def test_the_host_s_part_comes_on_top() -> None:
    profile = _with_host(2e-3, 1e-3)
    assert WithHost(Linear(), profile).batch_ns([(0, 10)] * 3) == (2 + 3 + 2 + 3) * MS
    assert WithHost(Linear(), guess(16)).batch_ns([(0, 10)]) == 3 * MS


def _with_host(step_s: float, row_s: float) -> Any:
    return SimpleNamespace(host_ns=lambda rows: round((step_s + row_s * rows) * 1e9))


def test_questions_count_by_how_often_they_are_asked() -> None:
    prepared = PreparedQuestion((1, 2, 3), (7, 8), frozenset())
    asked = [
        Question("every", "a?", ("YES", "NO")),
        Question("fourth", "b?", ("YES", "NO"), ask_every_bars=4),
        Question("timed", "c?", ("YES", "NO"), ask_every_ns=10_000),
        Question("often", "d?", max_tokens=5, ask_every_ns=10),
    ]
    standing = [Standing("s", each, each.hash, prepared) for each in asked]
    found = asked_times(standing, 1000, lambda each: len(each.prepared.prompt_tokens))
    assert found == ((3, 1, 1.0), (3, 1, 0.25), (3, 1, 0.1), (3, 5, 1.0))
    assert Shape(10, 1, found).k == 2.35


def test_no_question_is_worth_one_of_one_token() -> None:
    alone = Background(Linear(), LIMITS, Shape(10, 5, ()))
    assert alone.k_max(1, 0.1, 0.0) == int((100 - 2.5) / 2.1)
    assert alone.k_max(1, 0.002, 0.0) == 0, "not even the update fits"
    assert passes_ns(0, (10, 5), Linear(), LIMITS) == 0


def test_a_device_that_takes_no_time_has_a_limit_all_the_same() -> None:
    free: Any = SimpleNamespace(batch_ns=lambda spans: 0)
    for questions in ((), ((3, 1, 1.0),)):
        assert Background(free, LIMITS, Shape(10, 5, questions)).k_max(2, 1.0, 0.0) > 10**8
