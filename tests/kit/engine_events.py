"""Engine events, for tests that stand in for the engine."""

import time
from typing import Any

import msgspec

from daemon import protocol
from daemon.ages import Times
from feeds.market_data import Answer, Latency
from flash.question import PAPER_SIX
from tests.kit import START

ANSWER = Answer(
    session="aaa",
    symbol="V:AAA",
    question="trend",
    question_hash="h",
    text="UP",
    choice="UP",
    logit_gap=1.5,
    probability=None,
    data_version=1,
    as_of=START,
    model="m",
    model_revision="r1",
    untrained=True,
    latency=Latency(ring_wait_ns=1, bars_ns=2, tokenise_ns=3, queue_ns=4, forward_ns=5),
    reused_tokens=400,
    computed_tokens=30,
    flags=(),
    recomputed_tokens=7,
    swapped_tokens=8,
)


def answered(
    session: str,
    version: int,
    low_watermark: int,
    *,
    inputs: protocol.InputNumbers | None = None,
    times: Times | None = None,
    asked: int = len(PAPER_SIX),
    **fields: Any,
) -> protocol.Answered:
    """A standing question's answer; ``fields`` replace those of `ANSWER`."""
    symbol = f"V:{session.upper()}"
    answer = msgspec.structs.replace(
        ANSWER, **({"session": session, "symbol": symbol, "data_version": version} | fields)
    )
    return protocol.Answered(
        answer,
        inputs or protocol.InputNumbers(low_watermark - 1, low_watermark - 1, low_watermark),
        Times(ANSWER.as_of, time.time_ns(), time.monotonic_ns()) if times is None else times,
        asked,
    )
