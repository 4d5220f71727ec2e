"""The checks of a chaos run find what they are for."""

from __future__ import annotations

from typing import Any

import msgspec

from feeds.messages import Answer, InputRange, Latency
from tests.chaos.checks import ahead, by_key, different, gaps, missing, repeats
from tests.chaos.feed import SYMBOLS, as_of
from tests.chaos.reading import Published
from tests.chaos.schedule import DECK, draw

QUESTIONS = ["trend", "jump"]
BARS = 3
RECORDS = 10
"""Of a session's bar, in a partition of its own."""


def answer(session: str, question: str, n: int, **more: Any) -> Answer:
    inputs = [InputRange("t", list(SYMBOLS).index(session), RECORDS * n, RECORDS * n + RECORDS - 1)]
    fields: dict[str, Any] = {
        "session": session, "symbol": SYMBOLS[session], "question": question, "question_hash": question,
        "text": "UP", "choice": "UP", "logit_gap": 1.0, "probability": None, "data_version": n + 1,
        "inputs": inputs, "as_of": as_of(n), "model": "m", "model_revision": "r", "untrained": False,
        "latency": Latency(), "reused_tokens": 0, "computed_tokens": 0, "flags": [],
    }  # fmt: skip
    return Answer(**(fields | more))


def everything() -> list[Published]:
    keys = [(s, q, n) for n in range(BARS) for s in SYMBOLS for q in QUESTIONS]
    return [Published(i, f"{s}:{q}:{n}", answer(s, q, n)) for i, (s, q, n) in enumerate(keys)]


def test_a_run_in_order_passes() -> None:
    found = everything()
    reference = {key: each[0] for key, each in by_key(found).items()}
    assert missing(found, QUESTIONS, BARS) == []
    assert repeats([*found, found[3]._replace(offset=99)], allowed=True) == []
    assert ahead(found, {0: RECORDS * BARS, 1: 0, 2: None}, QUESTIONS) == []
    assert gaps(found) == []
    assert different(found, reference) == []


def test_a_missing_answer_and_one_to_nothing_are_found() -> None:
    found = everything()
    strange = found[4].answer
    strange = msgspec.structs.replace(strange, as_of=strange.as_of + 1)
    problems = missing([*found[:4], found[4]._replace(answer=strange), *found[5:]], QUESTIONS, BARS)
    assert [line.partition(":")[0] for line in problems] == ["no answer", "an answer to nothing"]


def test_repeats_are_found() -> None:
    found = everything()
    again = [*found, found[3]._replace(offset=99)]
    assert "2 times" in repeats(again, allowed=False)[0]
    assert "cannot be recognised" in repeats([*found, found[3]._replace(answer_id="other")], allowed=True)[0]
    assert (
        "two answers"
        in repeats([*found[:3], found[3]._replace(answer_id=found[2].answer_id)], allowed=True)[0]
    )


def test_an_offset_ahead_of_its_answers_is_found() -> None:
    found = everything()
    assert ahead(found[:-1], {2: RECORDS * BARS}, QUESTIONS)
    assert ahead([], {0: 2}, QUESTIONS)


def test_another_state_is_found() -> None:
    found = everything()
    reference = {key: each[0] for key, each in by_key(found).items()}
    wrong = [
        found[-1]._replace(answer=msgspec.structs.replace(found[-1].answer, text="DOWN")),
        found[-2]._replace(answer=msgspec.structs.replace(found[-2].answer, logit_gap=1.5)),
    ]
    assert len(different(wrong, reference)) == 2
    assert different(wrong, reference, before=as_of(BARS - 1)) == []
    assert "has no" in different(wrong[:1], {})[0]


def test_a_seed_is_a_schedule() -> None:
    drawn = [draw(seed, bars=8, faults=3) for seed in range(len(DECK))]
    assert drawn == [draw(seed, bars=8, faults=3) for seed in range(len(DECK))]
    assert {event.fault for schedule in drawn for event in schedule.events} == set(DECK)
    for schedule in drawn:
        bars = [event.bar for event in schedule.events]
        assert bars == sorted(set(bars))
        assert bars[-1] < schedule.bars - 1
        assert str(schedule).startswith(f"seed {schedule.seed}, 8 bars\nbar ")
