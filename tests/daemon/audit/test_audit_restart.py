"""Answers that a daemon gave after it had been started again are explained and derived as those before."""

import asyncio
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path

import pytest

from daemon.config.load import load_config
from daemon.config.schema import Config
from feeds.kafka_client import quiet_client_log
from feeds.market_data import Answer, Basis
from tests.daemon.audit.test_audit_reproduce import CASES, KEY, Ran, config_of, daemon, second
from tests.kit import SECOND, START, until
from tests.kit.daemon import Topics
from tests.kit.fixtures import RealKafka
from tests.kit.kafka import create_topics, delete_records

rotated = pytest.mark.rotated(1, "answers derived behind a roll or a restart")
pytestmark = [rotated, pytest.mark.kafka, pytest.mark.sampled(1), pytest.mark.timeout(900)]

FIRST, SECOND_LIFE, LAST = range(10), range(10, 14), range(14, 18)
"""Seconds that a daemon reads in three lives: the second goes on from a snapshot, the last from the log."""


@dataclass(frozen=True)
class Lives(Ran):
    """What a daemon published in its three lives, and the snapshots that the first one left in ``kept``."""

    topic: str
    snapshots: Path
    kept: Path

    def about(self, n: int) -> Answer:
        """The newest answer about the bar of second ``n``."""
        return [a for a in self.answers if bar_of(a) == n and a.question == "trend"][-1]


def bar_of(answer: Answer) -> int:
    return (answer.as_of - START) // SECOND


async def live(config: Config, topics: Topics, seconds: range) -> None:
    """A daemon's life: each second closes the bar of the one before, which is answered."""
    async with daemon(config) as settled:
        for n in seconds:
            await topics.produce([(KEY, payload) for payload in second(n)])
            if n:
                await until(
                    lambda n=n: sum(bar_of(a) == n - 1 for a in topics.answers("aaa")) >= 6,  # type: ignore[misc]  # a default binds n
                    60,
                    f"answers about second {n - 1}",
                )
                await until(settled)


async def lives(
    config: Config, bootstrap: str, names: tuple[str, str], ours: Path, kept: Path
) -> list[Answer]:
    async with Topics(bootstrap, *names) as topics:
        await live(config, topics, FIRST)
        shutil.copytree(ours, kept)
        await live(config, topics, SECOND_LIFE)
        shutil.rmtree(ours)
        await live(config, topics, LAST)
        return topics.answers("aaa")


@pytest.fixture(scope="module", params=CASES)
def ran(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, real_kafka: RealKafka
) -> Lives:
    quiet_client_log()
    (model, session), folder = CASES[request.param], tmp_path_factory.mktemp("audit")
    suffix, bootstrap = uuid.uuid4().hex[:8], real_kafka.bootstrap
    topic, answers = f"in.{suffix}", f"answers.{suffix}"
    ours, kept = folder / "snapshots", folder / "kept"
    file = config_of(folder, bootstrap, model, session, f'[recovery]\ndirectory = "{ours}"')
    text = file.read_text().replace('["in"]', f'["{topic}"], group = "{suffix}"')
    file.write_text(text.replace("answers.v1", answers).replace("dlq.v1", f"dlq.{suffix}"))
    config = load_config(file)
    asyncio.run(create_topics(bootstrap, {topic: 1, answers: 1, f"dlq.{suffix}": 1}))
    published = asyncio.run(lives(config, bootstrap, (topic, answers), ours, kept))
    return Lives(request.param, file, config, bootstrap, published, topic, ours, kept)


def basis_of(answer: Answer) -> Basis:
    assert answer.basis is not None
    return answer.basis


def test_a_basis_is_as_exact_as_without_a_restart(ran: Lives) -> None:
    """Three trades a bar."""
    read_again = min(bar_of(a) for a in ran.answers if a.epoch == 3)
    assert {a.epoch for a in ran.answers} == {1, 2, 3}
    assert read_again == LAST[0] - 1
    for answer in ran.answers:
        basis, n = basis_of(answer), bar_of(answer)
        (window,), (state,) = basis.window, basis.state
        assert (window.first_offset, window.last_offset) == (3 * (n + 1 - basis.window_bars), 3 * n + 2)
        assert (state.first_offset, state.last_offset) == (3 * (n + 1 - basis.state_bars), 3 * n + 2)
    if ran.case == "decimal, carry":  # the snapshot goes on with the state of the first life
        assert basis_of(ran.about(SECOND_LIFE[-1] - 1)).state_bars == SECOND_LIFE[-1]


def test_answers_after_a_restart_are_explained_and_reproduced(ran: Lives) -> None:
    for life in (SECOND_LIFE, LAST):
        first = ran.about(life[0] - 1)
        last = ran.about(life[-1] - 1)
        # bars that are read again come so fast that some may leave a window while it is prefilled
        if basis_of(first).left:
            assert len(ran.told("explain", first.answer_id)["window"]) == basis_of(first).window_bars
        else:
            ran.check(first)
        ran.check(last)


def test_a_log_without_its_head_is_stood_in_for_by_a_snapshot(ran: Lives) -> None:
    """Or it is told how far back it would have to go. Changes the topic, so it comes last."""
    answer = ran.about(SECOND_LIFE[0] - 1)
    basis = basis_of(answer)
    began = basis.state[0].first_offset
    asyncio.run(delete_records(ran.bootstrap, ran.topic, 0, began + 1))
    shutil.rmtree(ran.snapshots, ignore_errors=True)
    told = ran.invoke("reproduce", answer.answer_id)
    assert told.exit_code == 3
    assert f"depends on {basis.state_bars} bars, back to {ran.topic}/0 offset {began}" in told.output
    assert f"{ran.snapshots} has no snapshot" in told.output
    shutil.copytree(ran.kept, ran.snapshots)
    if ran.case == "decimal, exact":  # its window was prefilled behind the snapshot, or before
        return
    before = sorted((each.name, each.stat().st_mtime_ns) for each in ran.snapshots.iterdir())
    ran.check(answer)
    assert "from  the snapshot" in ran.invoke("reproduce", answer.answer_id).output
    # an answer from before the snapshot cannot stand on it
    assert "has no snapshot" in ran.invoke("reproduce", ran.about(FIRST[-1] - 1).answer_id).output
    asked = ran.invoke("reproduce", answer.answer_id, "--from", "0")
    assert (asked.exit_code, "A later start" in asked.output) == (3, True), asked.output
    # nothing of a daemon's is written
    assert before == sorted((each.name, each.stat().st_mtime_ns) for each in ran.snapshots.iterdir())
