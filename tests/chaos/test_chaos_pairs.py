"""An active daemon and a standby: faults of the active one lose nothing."""

from collections.abc import Iterator

import pytest

from tests.chaos.schedule import PAIR_DECK, Event, Schedule, draw
from tests.chaos.test_chaos import Rigs, rigs, run

pytestmark = pytest.mark.kafka


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Rigs, Rigs]]:
    yield from rigs(tmp_path_factory, pair=True)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(PAIR_DECK.runs), ids="seed{:03}".format)
async def test_one_that_stands_by_loses_nothing(pairs: tuple[Rigs, Rigs], seed: int) -> None:
    await run(pairs, draw(seed, bars=6, faults=2, deck=PAIR_DECK))


@pytest.mark.rotated(1, "pairs and clusters")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("exactly_once", [False, True], ids=["at_least_once", "exactly_once"])
async def test_one_that_is_killed_and_one_that_hangs_are_replaced(
    pairs: tuple[Rigs, Rigs], exactly_once: bool
) -> None:
    events = Event(1, "kill gateway", "answering", 20), Event(3, "zombie", "sent", 20)
    await run(pairs, Schedule(0, exactly_once, 5, events))
