"""The answer cache: newest versions and waiting for one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flash.cache import AnswerCache


@given(st.lists(st.integers(0, 30), max_size=40))
def test_the_latest_is_the_last_put_of_the_highest_version(versions: list[int]) -> None:
    cache, plain = AnswerCache[str](), dict[int, str]()
    for n, version in enumerate(versions):
        cache.put("s", "q", version, f"{version}/{n}")
        plain[version] = f"{version}/{n}"
    assert cache.latest("s", "q") == (plain[max(plain)] if plain else None)


def test_sessions_and_questions_are_apart() -> None:
    cache = AnswerCache[str]()
    for session in ("a", "b"):
        for question in ("p", "q"):
            cache.put(session, question, 1, session + question)
    assert cache.latest("a", "q") == "aq"
    assert cache.latest("b", "p") == "bp"
    assert cache.latest("b", "r") is None


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
