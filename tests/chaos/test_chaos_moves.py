"""Schedules of a group that grows and shrinks, and the silences that its answers tell of."""

from collections import Counter

from msgspec.structs import replace

from tests.chaos.feed import as_of
from tests.chaos.hand_over import Silence, silences
from tests.chaos.moves import LATEST_MS, RUNS, TROUBLES, HandOver, Move, draw, hand_overs, summary
from tests.chaos.reading import Published
from tests.chaos.test_chaos_checks import answer

SECOND = 10**9


def test_a_seed_is_a_schedule_and_a_run_of_seeds_has_every_trouble_in_both_deliveries() -> None:
    drawn = [draw(seed) for seed in range(20 * RUNS)]
    assert drawn == [draw(seed) for seed in range(20 * RUNS)]
    for first in range(0, 20 * RUNS, RUNS):
        met = Counter((each.trouble, each.exactly_once) for each in drawn[first : first + RUNS])
        assert met == {(trouble, once): 1 for trouble in TROUBLES for once in (False, True)}
    assert {each.phase for each in drawn} == {"growth", "shrinking"}
    assert {leave for each in drawn for leave in each.leaves} == {"terminate", "kill"}
    assert all("kill" not in each.leaves for each in drawn if each.trouble == "none")
    assert max(each.delay_ms for each in drawn) < LATEST_MS


def published(*bars: tuple[str, int, float, int]) -> list[Published]:
    """Answers: session, bar, when it was published (s), epoch."""
    found = []
    for offset, (session, n, at_s, epoch) in enumerate(bars):
        made = replace(answer(session, "trend", n), published_at=int(at_s * SECOND), epoch=epoch)
        assert made.as_of == as_of(n)
        found.append(Published(offset, f"{session}{n}", made))
    return found


def test_a_silence_lasts_from_an_owners_last_answer_to_the_next_ones_first() -> None:
    found = published(
        ("aaa", 0, 1.0, 1), ("aaa", 1, 1.5, 1), ("aaa", 2, 4.0, 2), ("aaa", 3, 4.5, 2),
        ("bbb", 0, 1.0, 7), ("bbb", 1, 1.5, 7), ("bbb", 1, 3.0, 8), ("bbb", 2, 3.5, 8),
    )  # fmt: skip
    moves = [Move(SECOND, "join", planned=True), Move(2 * SECOND, "kill", planned=False)]
    assert hand_overs(found, moves) == [
        HandOver("aaa", int(2.5 * SECOND), SECOND // 2, "kill", planned=False),
        HandOver("bbb", 2 * SECOND, SECOND // 2, "kill", planned=False),  # what came again counts once
    ]
    moves.append(Move(int(2.5 * SECOND), "terminate", planned=True))
    assert [each.why for each in hand_overs(found, moves)] == ["kill", "kill"]
    moves[1] = Move(0, "kill", planned=False)  # long before
    assert [each.why for each in hand_overs(found, moves)] == ["terminate", "terminate"]
    assert hand_overs(found, []) == [], "of an earlier case"


def test_silences_are_summed_up_by_whether_they_were_planned() -> None:
    made = [HandOver("aaa", n * SECOND, SECOND, "join", planned=True) for n in range(1, 101)]
    made.append(HandOver("aaa", 7 * SECOND, SECOND, "kill", planned=False))
    assert summary(made).splitlines() == [
        "planned: 100 hand-overs, P50 51.00 s, P99 100.00 s, worst 100.00 s",
        "unplanned: 1 hand-overs, P50 7.00 s, P99 7.00 s, worst 7.00 s",
    ]


def test_a_session_is_silent_in_a_move_for_its_longest_pause_beyond_the_usual() -> None:
    times = {
        "aaa": {as_of(n): int(at * SECOND) for n, at in enumerate((1.0, 1.5, 2.0, 4.5, 5.0, 5.5, 6.0))},
        "bbb": {as_of(n): int(at * SECOND) for n, at in enumerate((1.0, 1.5, 2.0, 2.5, 3.0, 5.0, 5.5))},
    }
    moves = [Move(2 * SECOND, "join", planned=True), Move(int(4.6 * SECOND), "kill", planned=False)]
    owners = [{"aaa": 1, "bbb": 1}, {"aaa": 2, "bbb": 1}, {"aaa": 2, "bbb": 2}]
    assert silences(times, moves, owners) == [
        Silence("join", moved=True, seconds=2.0),
        Silence("kill", moved=False, seconds=0.0),
        Silence("join", moved=False, seconds=0.0),
        Silence("kill", moved=True, seconds=1.5),
    ]
