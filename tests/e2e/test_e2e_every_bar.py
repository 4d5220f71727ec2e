"""A backtest: every bar is answered by itself, also by questions whose answers are texts."""

from pathlib import Path

from daemon.config.schema import BarsConfig, FlashConfig, QuestionConfig, RecoveryConfig
from feeds.durations import Duration
from tests.kit import SECOND, inproc_config, until
from tests.kit.inproc import running

BARS = 10
QUESTIONS = (
    QuestionConfig(name="up", text="Up or down?", choices=("UP", "DOWN")),
    QuestionConfig(name="why", text="Why?", max_tokens=5),
    QuestionConfig(name="seldom", text="Flat?", choices=("YES", "NO"), ask_every_bars=7),
    QuestionConfig(name="now", text="Up now?", choices=("YES", "NO"), provisional=True),
)


async def test_bars_that_all_come_at_once_are_each_answered(tmp_path: Path) -> None:
    """In order, by all questions that are due, of two sessions that do not wait for each other.

    Snapshots are taken meanwhile.
    """
    names = ("V:AAA", "V:BBB")
    config = inproc_config(
        names,
        questions=QUESTIONS,
        standing="none",
        flash=FlashConfig(every_bar=True),
        recovery=RecoveryConfig(Duration(SECOND // 5), str(tmp_path)),
    )
    async with running(config) as daemon:
        daemon.feed(BARS + 1)
        asked = {"up": BARS, "why": BARS, "seldom": -(-BARS // 7), "now": BARS}
        for session in ("aaa", "bbb"):
            await until(lambda session=session: len(daemon.answers(session)) >= sum(asked.values()), 60)
            answers = daemon.answers(session)
            for question, times in asked.items():
                own = [each for each in answers if each.question == question]
                assert [each.data_version for each in own] == sorted({each.data_version for each in own})
                assert len(own) == times
            assert daemon.count("flash_coalesced", session=session) == 0
            assert daemon.count("bars", session=session) == BARS
            assert any("provisional" in each.flags for each in answers)
        for name in ("aaa", "bbb"):
            await until(lambda name=name: daemon.count("snapshots_written", session=name) > 0)


async def test_a_session_that_is_removed_while_it_is_answered_holds_nothing_up() -> None:
    config = inproc_config(
        ("V:AAA", "V:BBB"), questions=QUESTIONS[:2], standing="none", flash=FlashConfig(every_bar=True)
    )
    async with running(config) as daemon:
        daemon.feed(12)
        await until(lambda: len(daemon.answers("bbb")) > 2, 60)
        await daemon.http("DELETE", "/v1/sessions/bbb")
        await until(lambda: len(daemon.answers("aaa")) == 2 * 11, 60)
        await until(lambda: daemon.host.input.settled, 10)


async def test_bars_that_one_record_closes_are_answered_one_by_one() -> None:
    """Those of a pause, which are filled."""
    config = inproc_config(
        questions=QUESTIONS[:1],
        standing="none",
        flash=FlashConfig(every_bar=True),
        bars=BarsConfig(interval=Duration(SECOND), empty="emit"),
    )
    async with running(config) as daemon:
        daemon.source.put(*(daemon.tape.second(n) for n in (0, 9, 10)))
        await until(lambda: len(daemon.answers()) >= 10, 30)
        assert [each.data_version for each in daemon.answers()] == list(range(1, 11))
