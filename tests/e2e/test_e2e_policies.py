"""Policies of standing questions, through a whole daemon in one process."""

from __future__ import annotations

from decimal import Decimal

from daemon.config.schema import QuestionConfig, SchedulerConfig
from feeds.market_data import FlashReady
from tests.kit import MemorySink, QueueSource, inproc_config, until
from tests.kit.inproc import Tape, answers, count, running


async def test_numbers_schedules_and_policies_together() -> None:
    source, sink, tape = QueueSource(), MemorySink(), Tape("V:AAA")
    config = inproc_config(
        standing="none",
        questions=(
            QuestionConfig(name="number", text="What is the price?", answer="number", max_tokens=5),
            QuestionConfig(
                name="once",
                text="Up or down?",
                choices=("UP", "DOWN"),
                publish_when="every",
                publish_every=99,
            ),
            QuestionConfig(name="rare", text="Is it quiet?", choices=("YES", "NO"), ask_every_bars=3),
        ),
        scheduler=SchedulerConfig(max_new_tokens=64, chunk_min=64),
    )
    async with running(config, source, sink, ready="flash_ready.v1") as gateway:
        for second in range(7):
            version = gateway.sessions.states["aaa"].version
            source.put(tape.second(second))
            if second:
                await until(lambda v=version: len(sink.messages("flash_ready.v1")) > v)
        asked = {(answer.question, answer.data_version) for answer in answers(sink)}
        assert {version for name, version in asked if name == "number"} == set(range(1, 7))
        assert {version for name, version in asked if name == "once"} == {1}
        assert {version for name, version in asked if name == "rare"} == {1, 4}
        for answer in answers(sink):
            if answer.question == "number":
                assert answer.value is not None
                assert Decimal(answer.value) == Decimal(answer.text)
            else:
                assert answer.value is None
        ready = [event for event in sink.messages("flash_ready.v1") if isinstance(event, FlashReady)]
        assert [(event.data_version, event.answers) for event in ready] == [
            (version, 3 if version in (1, 4) else 2) for version in range(1, 7)
        ]
        cached = gateway.sessions.states["aaa"].answers
        assert sum(ready.answer.data_version == 6 for ready in cached.values()) == 2
        await until(lambda: count(gateway, "answers_suppressed", reason="not_due") == 5)
