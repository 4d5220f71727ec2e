"""The answer cache: versions, retention, waiting."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flash.cache import AnswerCache


@given(st.lists(st.integers(0, 30), max_size=40), st.integers(1, 5))
def test_latest_and_at_agree_with_a_plain_dict(versions: list[int], keep: int) -> None:
    cache, plain = AnswerCache[str](keep), dict[int, str]()
    for n, version in enumerate(versions):
        cache.put("s", "q", version, f"{version}/{n}")
        plain[version] = f"{version}/{n}"
        plain = dict(sorted(plain.items())[-keep:])
    assert cache.latest("s", "q") == (plain[max(plain)] if plain else None)
    for version in range(31):
        assert cache.at("s", "q", version) == plain.get(version)


def test_sessions_and_questions_are_apart_and_a_session_can_be_forgotten() -> None:
    cache = AnswerCache[str]()
    for session in ("a", "b"):
        for question in ("p", "q"):
            cache.put(session, question, 1, session + question)
    assert cache.latest("a", "q") == "aq"
    cache.forget("a")
    assert cache.latest("a", "q") is None
    assert cache.latest("b", "p") == "bp"


def test_when_calls_once_with_the_first_answer_new_enough() -> None:
    cache, heard = AnswerCache[str](), list[str]()
    cache.when("s", "q", 3, heard.append)
    for version in (2, 4, 5):
        cache.put("s", "q", version, f"v{version}")
    assert heard == ["v4"]
    cache.when("s", "q", 4, heard.append)
    assert heard == ["v4", "v5"]
    cache.when("s", "other", 1, heard.append)
    assert heard == ["v4", "v5"]


def test_giving_up_stops_the_call_and_the_others_still_hear() -> None:
    cache, one, two = AnswerCache[str](), list[str](), list[str]()
    give_up = cache.when("s", "q", 1, one.append)
    cache.when("s", "q", 1, two.append)
    give_up()
    give_up()
    cache.put("s", "q", 1, "v1")
    assert (one, two) == ([], ["v1"])
    give_up()


def test_a_callback_may_use_the_cache() -> None:
    cache, heard = AnswerCache[str](), list[str | None]()
    cache.when("s", "q", 1, lambda _: heard.append(cache.latest("s", "q")))
    cache.put("s", "q", 1, "v1")
    assert heard == ["v1"]


def test_a_thread_can_wait_for_a_version() -> None:
    cache = AnswerCache[str]()
    cache.put("s", "q", 1, "v1")
    assert cache.wait_for("s", "q", 1, 0.0) == "v1"
    assert cache.wait_for("s", "q", 2, 0.01) is None
    timer = threading.Timer(0.05, cache.put, ("s", "q", 2, "v2"))
    timer.start()
    assert cache.wait_for("s", "q", 2, 5.0) == "v2"
    timer.join()


def test_nothing_kept_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1, not 0"):
        AnswerCache[str](0)
