"""A past, the daemon that lived it, and the same questions asked of it later."""

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from daemon.audit.backfill import Asked, Backfill, Reached, Span, asked_of
from daemon.config.schema import (
    OFF,
    UNTRAINED,
    BarsConfig,
    Config,
    FlashConfig,
    ModelConfig,
    QuestionConfig,
    RecoveryConfig,
    RollupConfig,
)
from daemon.engine.build import Loaded
from daemon.gateway.wiring import make_gateway
from feeds.connector import SinkRoute
from feeds.durations import Duration
from feeds.market_data import Answer
from feeds.source import Incoming
from tests.kit import SECOND, START, MemorySink, QueueSource, incoming, inproc_config, sessions, trade
from tests.kit.packs import CHOICES, TEXT

KEY = "V:AAA"
ALWAYS = Span(0, 2**62)
OF_MOMENT = {"backfill", "stale", "silent", "halted"}
"""Flags of the moment of publication: a source that has sent all that it has is silent before long."""
QUESTIONS = (
    QuestionConfig(name="up", text="Up or down?", choices=("UP", "DOWN")),
    QuestionConfig(name="seldom", text="Flat?", choices=("YES", "NO"), ask_every_bars=3),
)
ROLLED = (RollupConfig(interval=Duration(5 * SECOND), bars=20),)
SESSIONS: dict[str, dict[str, Any]] = {
    "carry": {"retention_records": 8},
    "exact": {"retention_records": 8, "semantics": "exact", "refresh_every": 3, "refresh_idle": OFF},
    "rollup": {"retention_tokens": 400, "rollup": ROLLED, "rollup_tokens": 400, "rollup_every": 4},
    "tape model": {"retention_records": 24},
}
OF_THE_TAPE_MODEL = (
    QuestionConfig("up", "Is the last close above or below the close ten bars before it?", ("UP", "DOWN")),
    QuestionConfig(
        "seldom",
        "Did one of the last five bars make the highest high of all bars shown?",
        ("YES", "NO"),
        ask_every_bars=3,
    ),
)


def config_of(kind: str, placement: str = "ephemeral", late: str = "amend", **more: Any) -> Config:
    """A daemon that answers every bar by itself and keeps no snapshots, on one thread."""
    settings = {"retention_tokens": 1024, "divergence_every": OFF, "warm_up_records": 2} | SESSIONS[kind]
    return inproc_config(
        **{
            "questions": QUESTIONS,
            "standing": "none",
            "flash": FlashConfig(every_bar=True, placement=placement),  # type: ignore[arg-type]  # one of its values
            "sessions": sessions(KEY, **settings),
            "bars": BarsConfig(interval=Duration(SECOND), late=late),  # type: ignore[arg-type]  # as above
            "recovery": RecoveryConfig(interval=OFF),
            "model": ModelConfig(path=UNTRAINED, threads=1),
        }
        | more
    )


def tape_model_config(placement: str, pack: Path | None = None) -> Config:
    """Compact lines, and the calibration that the embedded model brings; a ``pack`` answers ``up``."""
    up, seldom = OF_THE_TAPE_MODEL
    if pack is not None:
        up = QuestionConfig("up", TEXT, CHOICES, pack=str(pack))
    return config_of("tape model", placement, "drop", model=ModelConfig(threads=1), questions=(up, seldom))


def trades(seconds: int, seed: int = 0, jump: int = 0) -> list[bytes]:
    """Two a second; a tenth of them is two seconds late. Every 20 s the price moves by ``jump`` cents."""
    draw, price, found = random.Random(seed), 10_000, list[bytes]()
    for n in range(seconds):
        price += jump if n % 20 == 19 else 0
        for i in range(2):
            price += draw.randint(-5, 5)
            late = 2 * SECOND if draw.random() < 0.1 else 0
            at = START + n * SECOND + i * 1000 - late
            found.append(trade(KEY, at, f"{price / 100:.2f}", str(draw.randint(1, 9))))
    return found


def messages_of(payloads: Sequence[bytes]) -> list[Incoming]:
    """They have been read one after the other."""
    return [incoming(payload, offset) for offset, payload in enumerate(payloads)]


async def lived(config: Config, messages: Sequence[Incoming], question: str = "up") -> list[Answer]:
    """What a whole daemon publishes of all messages, which are there from the start."""
    sink, source = MemorySink(), QueueSource()
    source.put(messages)
    source.end()
    gateway = make_gateway(config, source=source, routes=[SinkRoute(sink, "answers")])
    try:
        await gateway.start()
        await gateway.finish()
    finally:
        await gateway.stop()
    published = [each for each in sink.messages("answers") if isinstance(each, Answer)]
    return [each for each in published if each.question == question]


async def given(messages: Sequence[Incoming], size: int) -> AsyncIterator[tuple[str, Sequence[Incoming]]]:
    """In batches of a ``size``."""
    for at in range(0, len(messages), size):
        yield "", messages[at : at + size]


async def past(
    asked: Asked,
    model: Loaded,
    messages: Sequence[Incoming],
    span: Span = ALWAYS,
    reached: Reached | None = None,
    *,
    size: int = 50,
    ends: bool = True,
) -> list[Answer]:
    """What a backfill answers."""
    made = Backfill(asked, span, reached or Reached())
    batches = given(messages, size)
    async with aclosing(made.answers(made.build(model), batches, ends=ends)) as answers:  # type: ignore[arg-type]  # it is one
        return [each async for each in answers if each is not None]


def asked_up(config: Config) -> Asked:
    """The question of most tests."""
    return asked_of(config, "aaa", "up")


def said(answer: Answer) -> tuple[object, ...]:
    """All that a daemon says of the past; the rest is of the moment: ages, latencies and numbers."""
    return (
        answer.data_version,
        answer.as_of,
        answer.text,
        answer.choice,
        answer.logit_gap.hex(),
        answer.probability,
        answer.choice_set,
        answer.uncalibrated,
        tuple(flag for flag in answer.flags if flag not in OF_MOMENT),
        answer.computed_tokens,
        answer.reused_tokens,
        answer.answer_id,
        answer.inputs,
        answer.basis,
        answer.question_hash,
    )
