"""The checks of a chaos run find what they are for."""

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from feeds.market_data import Answer, InputRange, Latency
from tests.chaos.checks import ahead, by_key, conflicts, different, gaps, missing, repeats, unread
from tests.chaos.feed import SYMBOLS, as_of
from tests.chaos.reading import Published
from tests.chaos.rig import WINDOW_BARS, damage
from tests.chaos.schedule import DECK, PAIR_DECK, Deck, draw

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
        "epoch": 1, "sequence": 1 + QUESTIONS.index(question) + n * len(QUESTIONS),
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
    assert conflicts([*found, found[3]._replace(offset=99)]) == []
    assert different(found, reference) == []


def test_a_missing_answer_and_one_to_nothing_are_found() -> None:
    found = everything()
    strange = found[4].answer
    strange = msgspec.structs.replace(strange, as_of=strange.as_of + 1)
    problems = missing([*found[:4], found[4]._replace(answer=strange), *found[5:]], QUESTIONS, BARS)
    assert [line.partition(":")[0] for line in problems] == ["no answer", "an answer to nothing"]


def test_records_in_no_answer_are_found() -> None:
    found = everything()
    offsets = {session: range(RECORDS * BARS) for session in SYMBOLS}
    assert unread(found, QUESTIONS, offsets) == []
    late = [each for each in found if each.answer.as_of != as_of(1) or each.answer.question != "jump"]
    first, *others = unread(late, QUESTIONS, offsets)
    assert (first, len(others)) == ("aaa, jump: 10 records in no answer, from 10 on", 2)
    skipping = late[-1].answer  # it has the records of the one before, too
    skipping = msgspec.structs.replace(skipping, inputs=[InputRange("t", 2, RECORDS, 3 * RECORDS - 1)])
    assert len(unread([*late, found[-1]._replace(answer=skipping)], QUESTIONS, offsets)) == 2


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


def test_a_number_of_two_owners_is_found() -> None:
    found = everything()
    epoch, sequence = found[3].answer.epoch, found[3].answer.sequence
    other = msgspec.structs.replace(found[4].answer, epoch=epoch, sequence=sequence)
    assert "two owners" in conflicts([*found, found[4]._replace(answer=other)])[0]
    again = msgspec.structs.replace(found[3].answer, data_version=9)  # by one with versions of its own
    assert "two owners" in conflicts([*found, found[3]._replace(answer=again)])[0]


@pytest.mark.parametrize("deck", [DECK, PAIR_DECK])
def test_a_seed_is_a_schedule(deck: Deck) -> None:
    drawn = [draw(seed, bars=8, faults=3, deck=deck) for seed in range(deck.runs)]
    assert drawn == [draw(seed, bars=8, faults=3, deck=deck) for seed in range(deck.runs)]
    for schedule in drawn:
        bars = [event.bar for event in schedule.events]
        assert bars == sorted(set(bars))
        assert bars[-1] < schedule.bars - 1
        assert str(schedule).startswith(f"seed {schedule.seed}, ")


@pytest.mark.parametrize("deck", [DECK, PAIR_DECK])
def test_a_run_of_seeds_has_every_first_fault_in_both_deliveries(deck: Deck) -> None:
    drawn = [draw(seed, bars=2, faults=1, deck=deck) for seed in range(deck.runs)]
    for exactly_once, faults in ((False, deck.at_least_once), (True, deck.exactly_once)):
        met = [each.events[0].fault for each in drawn if each.exactly_once is exactly_once]
        assert sorted(met) == sorted(faults)
        assert {"kill gateway", "kill engine", "kill broker", "zombie", "fill disk", "power loss"} <= set(met)
        assert {"bad network", "delay commit"} <= set(met)


@pytest.mark.parametrize(("bars", "torn", "older"), [(0, 3, b"223"), (WINDOW_BARS, 2, b"2234567")])
def test_what_a_loss_of_power_leaves_behind(bars: int, torn: int, older: bytes, tmp_path: Path) -> None:
    for n, (name, number) in enumerate((s, g) for s in SYMBOLS for g in (0, 1)):
        path = tmp_path / f"{name}.{number}.snapshot"
        path.write_bytes(b"%d234567" % n)
        os.utime(path, (n, n))
    assert damage(tmp_path, bars) == torn
    left = {path.name: path.read_bytes() for path in tmp_path.glob("[!.]*")}
    assert left == {
        "aaa.0.snapshot": b"0234567", "aaa.1.snapshot": b"",
        "bbb.0.snapshot": older, "bbb.1.snapshot": b"323",
        "ccc.1.snapshot": b"4234567",
    }  # fmt: skip
