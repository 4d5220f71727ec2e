"""Answers whose version, or the beginning of whose state, is not told by one record alone."""

import asyncio
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from daemon.audit.reproduction import CannotReproduce, basis_of, compare, derive, plan
from daemon.config.load import load_config
from feeds.market_data import Answer
from feeds.mock_broker import MockBroker
from tests.daemon.audit.test_audit_reproduce import KEY, SHORT, Ran, config_of, daemon, topics_of
from tests.kit import SECOND, START, trade, until
from tests.kit.daemon import Topics

OTHER = "V:BBB"
TWO = f'more_symbols = ["{OTHER}"]\nwarm_up_records = 0'
ONE_QUESTION = """
[[questions]]
name = "trend"
text = "Is the price going UP or DOWN?"
choices = ["UP", "DOWN"]
"""
EXACT = 'semantics = "exact"\nrefresh_every = 2'

pytestmark = pytest.mark.timeout(600)  # a daemon and an engine for each answer
rotated = pytest.mark.rotated(3, "versions that are made again")


def second(n: int, key: str = KEY, shift: int = 0) -> list[bytes]:
    base = 10_000 + (n * 7) % 13
    return [
        trade(key, START + n * SECOND + i * 1000 + shift, f"{(base + (n * i) % 5) / 100:.2f}", f"{i + 1}")
        for i in range(3)
    ]


def turns(n: int) -> list[bytes]:
    """Of two symbols; by turns the one's record and the other's is the newest."""
    pairs = zip(second(n), second(n, OTHER, 500), strict=True)
    return [each for a, b in pairs for each in ((a, b) if n % 2 else (b, a))]


def other_last(n: int) -> list[bytes]:
    return [each for pair in zip(second(n), second(n, OTHER, 500), strict=True) for each in pair]


def with_a_pause(n: int) -> list[bytes]:
    return [] if n in (5, 6) else second(n)


def answered_at_ease(
    folder: Path, broker: MockBroker, session: str, of: Callable[[int], list[bytes]], more: str = ""
) -> Ran:
    """A daemon at ease answers eleven seconds."""
    bootstrap = topics_of(broker)
    file = config_of(folder, bootstrap, "untrained", session, ONE_QUESTION + more)
    text = file.read_text().replace("[source]\n", '[source]\nmax_ahead = "1s"\n')
    file.write_text(f'standing = "none"\n{text}')
    config = load_config(file)

    async def answered() -> list[Answer]:
        async with Topics(bootstrap, "in", "answers.v1") as topics:

            def reached(n: int) -> bool:
                return any(a.as_of >= START + n * SECOND for a in topics.answers("aaa"))

            async with daemon(config) as settled:
                for n in range(11):
                    await topics.produce([(KEY, payload) for payload in of(n)])
                    if n and of(n) and of(n - 1):
                        await until(partial(reached, n - 1), 60, f"bar {n - 1}")
                        await until(settled)
                await until(partial(reached, 8), 60)
            return topics.answers("aaa")

    return Ran("decimal", file, config, bootstrap, asyncio.run(answered()))


Run = Callable[..., Ran]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """`answered_at_ease` on a broker of its own."""
    with MockBroker() as broker:
        yield partial(answered_at_ease, tmp_path, broker)


def out_of_order(n: int) -> list[bytes]:
    """The second record belongs to the bar before, which the last one closes."""
    first, *others = second(n)
    before = trade(KEY, START + n * SECOND - 300_000_000, "103.00")
    closing = trade(KEY, START + n * SECOND + 600_000_000, "102.00")
    return [first, *([before] if n else []), *others, closing]


@rotated
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("session", "of", "checked"),
    [
        (f"{TWO}\nretention_tokens = 4000", turns, slice(4, 6)),
        (f"{TWO}\nretention_records = 5\n{EXACT}", other_last, slice(5, 8)),
        (f'lateness = "500ms"\n{SHORT}', out_of_order, slice(6, 8)),
        (f'empty = "emit"\n{SHORT}', with_a_pause, slice(5, 8)),
    ],
    ids=["bars closed by one record", "bars before the state", "out of order", "missing bars are said"],
)
def test_a_version_is_made_again(
    run: Run, session: str, of: Callable[[int], list[bytes]], checked: slice
) -> None:
    ran = run(session, of)
    if of is turns:
        assert all(a.basis is not None and a.basis.bars == 2 for a in ran.answers)
    ran.check(*ran.answers[checked])


@rotated
def test_empty_bars_are_part_of_their_version(run: Run) -> None:
    ran = run(f'empty = "fill"\n{SHORT.replace("160", "4000")}', with_a_pause)
    (filled,) = (a for a in ran.answers if a.basis is not None and a.basis.bars == 3)
    ran.check(filled)


@rotated
def test_a_question_that_is_not_asked_of_each_version_is_asked_of_the_answers(run: Run) -> None:
    each = ONE_QUESTION.replace('"trend"', '"each"')
    ran = run(SHORT, second, f"ask_every_bars = 4\n{each}")
    seldom = [a for a in ran.answers if a.question == "trend"]
    assert [a.data_version for a in seldom] == [1, 5, 9]
    ran.check(*seldom[1:])


@rotated
def test_what_may_differ_for_records_that_were_skipped_is_not_called_different(run: Run) -> None:
    ran = run(SHORT, second)
    config, answer = ran.config, ran.answers[6]
    session, basis = basis_of(config, answer)
    assert basis.since_gap == 0
    # the daemon read one bar less, and with it another answer
    behind = replace(basis, since_gap=3, state_bars=basis.state_bars - 1)
    planned = plan(behind, session)
    with pytest.raises(CannotReproduce, match="3 bars before"):
        asyncio.run(derive(config, replace(answer, basis=behind), planned))
    other = replace(answer, basis=replace(basis, since_gap=3), logit_gap=answer.logit_gap + 1)
    derived = asyncio.run(derive(config, other, plan(basis, session)))
    with pytest.raises(CannotReproduce, match="3 bars before"):
        compare(other, derived)
    assert compare(answer, derived).says == "reproduced"


@rotated
def test_what_was_ahead_of_the_clock_is_refused_again(run: Run) -> None:
    ahead: list[int] = []

    def with_one_ahead(n: int) -> list[bytes]:
        if n != 4:
            return second(n)
        ahead[:] = ahead or [time.time_ns() + 20 * SECOND]
        first, *others = second(n)
        return [first, trade(KEY, ahead[0], "101.00"), *others]

    ran = run(SHORT, with_one_ahead)
    time.sleep(max(0.0, (ahead[0] - time.time_ns()) / 1e9))
    ran.check(*ran.answers[6:8])


@rotated
def test_corrected_bars_are_corrected_again(run: Run) -> None:
    def late(n: int) -> list[bytes]:
        """Of two seconds, the second record belongs to the bar that the first one closes."""
        return out_of_order(n)[:-1] if n in (4, 7) else second(n)

    ran = run(f'late = "amend"\n{SHORT.replace("160", "4000")}', late)
    amended = [a for a in ran.answers if "amended" in a.flags]
    assert len(amended) == 2
    ran.check(*amended, ran.answers[-1])


@rotated
def test_lines_of_events_are_made_again(run: Run) -> None:
    """Each is a version of its own, with the words that stood in its record; a split resets the window."""

    def told(n: int) -> list[bytes]:
        moment = START + n * SECOND + 500_000_000
        common = {"venue": "V", "symbol": "AAA", "ts_event": moment, "ts_recv": moment}
        events = {
            2: {"type": "text", "text": "a headline that takes more than one record in the ring"},
            4: {"type": "status", "state": "halt"},
            5: {"type": "status", "state": "resume"},
            6: {"type": "action", "action": "split", "factor": "1"},
            7: {"type": "text", "text": "another one"},
        }
        return [*second(n), *([msgspec.json.encode(common | events[n])] if n in events else [])]

    events = '[events]\non_halt = "flag"\non_split = "reset"\n'
    ran = run(SHORT.replace("160", "600"), told, events)
    at = {a.as_of: a for a in ran.answers if a.as_of % SECOND == 500_000_000}
    assert [(moment - START) // SECOND for moment in at] == [2, 4, 5, 6, 7]
    assert all(":in/0/" in a.answer_id for a in at.values())
    headline, halt, _, split, _ = at.values()
    assert ("text" in headline.flags, "action" in split.flags) == (True, True)
    ran.check(headline, halt, split, ran.answers[-1])
