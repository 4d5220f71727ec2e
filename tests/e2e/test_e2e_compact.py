"""Compact sessions through the daemon: answers are the unmodified model's, before and after re-anchoring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from daemon.api.messages import Ask
from daemon.config.schema import FlashConfig, ModelConfig
from engine.model.canary import dense_logits
from engine.model.loading import load_model
from engine.step import Chunk, Executor, SampledToken
from feeds.messages import Answer
from flash.questions import PAPER_SIX
from ingest.bars import BAR
from ingest.compact import Anchor, CompactEncoder, CompactSpec
from ingest.lines import decimal
from ingest.tokens import Tokeniser
from tests import tolerance
from tests.e2e.inproc import answers, count, running
from tests.e2e.support import (
    SECOND,
    START,
    MemorySink,
    QueueSource,
    incoming,
    inproc_config,
    sessions,
    trade,
    until,
)
from tests.terse import WINDOW_BARS, terse_directory
from training.batches import Vocabulary

CENT = SECOND // 100
LEVEL = "512"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return terse_directory(tmp_path_factory.mktemp("terse") / "model")


class SaysALevel:
    """The engine, but exact_value is answered with a level."""

    def __init__(self, asked: int, level: int, end: int) -> None:
        self._next = {asked: level, level: end}

    def __call__(self, engine: Executor) -> SaysALevel:
        self._engine = engine
        return self

    def execute(self, batch: Sequence[Chunk]) -> list[SampledToken | None]:
        return [
            replace(token, token=self._next[chunk.tokens[-1]])
            if token is not None and chunk.tokens[-1] in self._next and chunk.choices is None
            else token
            for chunk, token in zip(batch, self._engine.execute(batch), strict=True)
        ]


def prices(second: int) -> list[int]:
    """Three trades, in cents: calm, but for two jumps out of the levels; one before bars are evicted."""
    base = 10_000 + second % 4 + (700 if second >= 4 else 0) + (900 if second >= 20 else 0)
    return [base, base + second % 3, base - second % 2]


def bars(seconds: int) -> np.ndarray:
    made = np.zeros(seconds, BAR)
    for n, bar in enumerate(made):
        seen = [each * CENT for each in prices(n)]
        bar["o"], bar["h"], bar["l"], bar["c"] = seen[0], max(seen), min(seen), seen[-1]
        bar["v"], bar["ts_last_event"] = 6 * SECOND, START + n * SECOND
    return made


@pytest.mark.parametrize("placement", ["ephemeral", "frozen"])
async def test_answers_equal_the_dense_model_and_prices_are_printed_by_their_versions_anchor(
    directory: Path, placement: Literal["ephemeral", "frozen"]
) -> None:
    vocabulary = Vocabulary()
    encode = vocabulary.encode
    listed: list[int] = []
    asks = {question.name: [vocabulary.id(f"<|{question.name}|>")] for question in PAPER_SIX}
    if placement == "frozen":
        asks = {name: [vocabulary.ask, vocabulary.id(f"{n:03d}")] for n, name in enumerate(asks, 1)}
        listed = encode("".join(f"<|ask|>{n:03d}<|{name}|>" for n, name in enumerate(asks, 1)) + "\n")
    says = SaysALevel(asks["exact_value"][-1], vocabulary.id(LEVEL), vocabulary.end)
    seconds = 40
    encoder = CompactEncoder(Tokeniser(encode), CompactSpec(2, records=WINDOW_BARS))
    texts: list[tuple[list[int], Anchor, bool, int]] = []
    """By version: the tokens it reads, its anchor, whether it is rounded, bars evicted since the anchor."""
    evicted = 0
    for piece in encoder.encode(bars(seconds)):
        assert piece.anchor is not None
        assert piece.rounded is not None
        if piece.restart is not None:
            window = [list(tokens) for tokens, _ in piece.restart.window]
            evicted = 0
        for line, rounded in zip(piece.lines, piece.rounded, strict=True):
            evicted += len(window) == WINDOW_BARS
            window = [*window, line][-WINDOW_BARS:]
            header = [vocabulary.bos, *encode(piece.anchor.header), *listed]
            tokens = [*header, *(t for each in window for t in each)]
            texts.append((tokens, piece.anchor, rounded, evicted))
    units = [anchor.unit for _, anchor, _, _ in texts]
    assert [units[0], units[4], units[16], units[20], units[-1]] == [CENT, 2 * CENT, CENT, 5 * CENT, CENT]
    source, sink = QueueSource(), MemorySink()
    config = inproc_config(
        sessions=sessions("V:AAA", warm_up_records=0),
        model=ModelConfig(path=str(directory)),
        flash=FlashConfig(placement=placement),
        standing="paper_six",
    )
    async with running(config, source, sink, says) as front:
        offset = 0
        for n in range(seconds + 1):
            batch = []
            for i, price in enumerate(prices(n)):
                at = START + n * SECOND + i * 1000
                batch.append(incoming(trade("V:AAA", at, f"{price / 100:.2f}", f"{i + 1}"), offset))
                offset += 1
            source.put(batch)
            await until(lambda n=n: len(answers(sink)) == 6 * n)
        found: dict[int, dict[str, Answer]] = {}
        for answer in answers(sink):
            found.setdefault(answer.data_version, {})[answer.question] = answer
        assert list(found) == list(range(1, seconds + 1))
        loaded = load_model(directory)
        compared = 0
        for (tokens, anchor, rounded, gone), given in zip(texts, found.values(), strict=True):
            assert given["exact_value"].text == decimal(anchor.price(int(LEVEL)), 2)
            assert given["exact_value"].choice is None
            assert all(("rounded" in answer.flags) is rounded for answer in given.values())
            if gone:
                continue  # its bars carry what they absorbed
            compared += 1
            for question in PAPER_SIX[:5]:
                logits = dense_logits(loaded, [*tokens, *asks[question.name]])[-1]
                assert question.choices is not None
                first, second = (float(logits[vocabulary.id(choice)]) for choice in question.choices)
                answer = given[question.name]
                bound = tolerance.of_gap(loaded, tolerance.largest(logits))
                assert answer.logit_gap == tolerance.near(abs(first - second), bound)
                assert answer.choice == question.choices[first < second] or abs(first - second) <= bound
        assert compared >= 8 + 3  # until the first eviction, and at each new anchor
        assert count(front, "anchors", session="aaa") == encoder.anchors
        assert count(front, "bars_rounded", session="aaa") == encoder.rounded > 0
        assert count(front, "versions", session="aaa") == seconds

        anchor = texts[-1][1]
        if placement == "ephemeral":  # an ask is not numbered
            reply = await front.sessions.ask_engine(Ask(1, "aaa", "exact_value", 8))
            assert (reply.data_version, reply.text) == (seconds, decimal(anchor.price(int(LEVEL)), 2))
        reply = await front.sessions.ask_engine(Ask(2, "aaa", "range_location", 8))
        assert len(encode(reply.text)) == 1


async def test_bars_that_arrive_faster_than_anchors_change_are_all_answered_in_order(directory: Path) -> None:
    source, sink = QueueSource(), MemorySink()
    config = inproc_config(sessions=sessions("V:AAA"), model=ModelConfig(path=str(directory)))
    async with running(config, source, sink) as front:
        batch = []
        for n in range(120):
            price = 100 * 2.0 ** (n % 24)
            batch.append(incoming(trade("V:AAA", START + n * SECOND, f"{price:.2f}"), n))
        source.put(batch)
        ranges: list[tuple[int, int]] = []

        def complete() -> bool:
            nonlocal ranges
            ranges = sorted({(i.first_offset, i.last_offset) for a in answers(sink) for i in a.inputs})
            return bool(ranges) and ranges[-1][1] == 118

        await until(complete, what="the last bar's answers")
        assert [first for first, _ in ranges] == [0, *(last + 1 for _, last in ranges[:-1])]
        assert count(front, "anchors", session="aaa") == count(front, "refreshes", session="aaa") > 20
