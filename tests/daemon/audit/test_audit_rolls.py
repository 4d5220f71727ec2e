"""Answers about a continuous contract are derived again, also where a roll is the oldest that is known."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from daemon.config.load import load_config
from feeds.mock_broker import MockBroker
from feeds.timestamps import Instant
from tests.daemon.audit.test_audit_reproduce import CASES, KEY, Ran, config_of, daemon, topics_of
from tests.kit import SECOND, START, trade, until
from tests.kit.daemon import Topics

# a daemon and several engines for each case
rotated = pytest.mark.rotated(1, "answers derived behind a roll or a restart")
pytestmark = [rotated, pytest.mark.sampled(1), pytest.mark.timeout(900)]

ROLL, SECONDS, LIFE = 6, 16, 8
"""Seconds; the daemon is started again behind `LIFE` of them."""
SYMBOLS = """
[[symbols.continuous]]
symbol = "{key}"
roll = "{roll}"
contracts = [{{ symbol = "V:Z6", from = "2020-01-01T00:00:00Z" }}, {{ symbol = "V:H7", from = "{at}" }}]
"""


def second(n: int) -> list[bytes]:
    """Three trades of each contract; the new one has none in the second of the roll."""
    made = []
    for i in range(3):
        for name, base in (("V:Z6", 10_000), ("V:H7", 20_000)):
            if name == "V:Z6" or n != ROLL:
                price = f"{(base + (n * 7) % 13 + (n * i) % 5) / 100:.2f}"
                made.append(trade(name, START + n * SECOND + i * 1000, price, f"{i + 1}"))
    return made


async def answered(file: Path, bootstrap: str) -> Ran:
    """Two lives of a daemon, a bar at a time."""
    config = load_config(file)
    async with Topics(bootstrap, "in", "answers.v1") as topics:
        for seconds in (range(LIFE), range(LIFE, SECONDS)):
            async with daemon(config) as settled:
                for n in seconds:
                    await topics.produce([(KEY, payload) for payload in second(n)])
                    bar = max((each for each in range(n) if each != ROLL), default=-1)
                    if bar >= 0 and n != ROLL:
                        await until(
                            lambda bar=bar: (
                                sum(  # type: ignore[misc]  # a default binds it
                                    (a.as_of - START) // SECOND == bar for a in topics.answers("aaa")
                                )
                                >= 6
                            ),
                            60,
                            f"answers about second {bar}",
                        )
                        await until(settled)
        return Ran("", file, config, bootstrap, topics.answers("aaa"))


RUNS = [pytest.param((case, roll), id=f"{case}, {roll}") for case in CASES for roll in ("line", "reset")]


@pytest.fixture(scope="module", params=RUNS)
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    (case, roll), folder = request.param, tmp_path_factory.mktemp("rolls")
    symbols = SYMBOLS.format(key=KEY, roll=roll, at=Instant(START + ROLL * SECOND))
    more = f'{symbols}\n[recovery]\ndirectory = "{folder / "snapshots"}"'
    with MockBroker() as broker:
        bootstrap = topics_of(broker)
        yield asyncio.run(answered(config_of(folder, bootstrap, *CASES[case], more), bootstrap))


def test_answers_behind_a_roll_are_derived_again(ran: Ran) -> None:
    own = [each for each in ran.answers if each.question == "trend"]
    assert sorted({(each.as_of - START) // SECOND for each in own}) == [
        n for n in range(SECONDS - 1) if n != ROLL
    ]
    rolled = [(each.as_of - START) // SECOND for each in own if "rolled" in each.flags]
    assert rolled == [ROLL + 1]
    # the first bar of the new contract is the newest one of the state, is in its midst, or is the oldest one
    for each in own:
        if (each.as_of - START) // SECOND in (ROLL - 1, ROLL + 1, ROLL + 3, SECONDS - 3, SECONDS - 2):
            assert each.basis is not None
            assert not each.basis.left
            ran.check(each)
