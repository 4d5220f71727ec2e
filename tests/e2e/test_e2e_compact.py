"""Compact sessions through the daemon: answers are the unmodified model's, before and after re-anchoring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import pytest

from daemon.api.messages import Ask
from daemon.config.schema import FlashConfig, ModelConfig
from engine.model.chat_format import PromptFormat
from engine.model.embedded import embedded_directory
from engine.model.loading import load_model
from engine.model.terse import TAPE_MODEL
from engine.step import Chunk, Executor, SampledToken
from feeds.market_data import Answer
from flash.question import PAPER_SIX
from ingest.bar_kernel import BAR
from ingest.compact import Anchor, CompactEncoder, CompactSpec
from ingest.lines import decimal
from ingest.tokens import Tokeniser
from tests.engine.oracle import History, oracle_logits
from tests.kit import (
    SECOND,
    START,
    inproc_config,
    sessions,
    tolerance,
    trade,
    until,
)
from tests.kit.inproc import running
from tests.kit.models import WINDOW_BARS, terse_directory

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


class Expected(NamedTuple):
    """A version: how its numbers are meant, and the row of each question in its history."""

    anchor: Anchor
    rounded: bool
    history: History
    rows: list[int]


def expected_of(
    prompt: PromptFormat, listed: Sequence[str], questions: Sequence[Sequence[int]], seconds: int
) -> list[Expected]:
    """Every version, and histories for the oracle: one for each anchor, with a fork for each question.

    ``listed``: the texts of numbered questions.
    """
    encoder = CompactEncoder(Tokeniser(prompt.encode), CompactSpec(2, records=WINDOW_BARS))
    versions: list[Expected] = []
    for piece in encoder.encode(bars(seconds)):
        assert piece.anchor is not None
        assert piece.rounded is not None
        if piece.restart is not None:
            history, evicted, owner = History.begin(list(prompt.frozen(piece.anchor.header, listed))), 0, 0
            window = [list(tokens) for tokens, _ in piece.restart.window]
            tape = [token for line in window for token in line]
            history.add(tape, 0, 0)
            written = len(tape)
        for line, rounded in zip(piece.lines, piece.rounded, strict=True):
            if len(window) == WINDOW_BARS:
                evicted += len(window.pop(0))
            window.append(line)
            history.add(line, written, evicted)
            written += len(line)
            rows = []
            for tokens in questions:
                owner += 1
                rows.append(history.add(list(tokens), written, evicted, owner).stop - 1)
            versions.append(Expected(piece.anchor, rounded, history, rows))
    return versions


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("kind", "placement", "questions"),
    [
        ("terse", "ephemeral", 5),
        ("tape", "ephemeral", 5),
        ("tape", "frozen", 5),
        ("untrained", "ephemeral", 1),
    ],
)
async def test_answers_equal_the_dense_model_and_prices_are_printed_by_their_versions_anchor(
    directory: Path, kind: str, placement: Literal["ephemeral", "frozen"], questions: int
) -> None:
    path = {"terse": directory, "tape": TAPE_MODEL}.get(kind) or embedded_directory()
    seconds = 40
    loaded = load_model(path)
    prompt = PromptFormat.of(loaded.tokenizer, described=loaded.described)
    asked = [each.text if kind == "untrained" else each.name for each in PAPER_SIX]
    if placement == "frozen":  # but the price is asked in full: the model does not answer it by number
        listed, tokens = asked[:5], [*(prompt.numbered(n) for n in range(1, 6)), prompt.question(asked[5])]
    else:
        listed, tokens = [], list(map(prompt.question, asked))
    expected = expected_of(prompt, listed, tokens[:questions], seconds)
    units = [each.anchor.unit for each in expected]
    assert [units[0], units[4], units[16], units[20], units[-1]] == [CENT, 2 * CENT, CENT, 5 * CENT, CENT]
    (level,), (end,) = prompt.encode(LEVEL), prompt.stop_ids
    config = inproc_config(
        sessions=sessions("V:AAA", warm_up_records=0, lines="compact", retention_records=WINDOW_BARS),
        model=ModelConfig(path=str(path)),
        flash=FlashConfig(placement=placement),
        standing="paper_six",
    )
    async with running(config, executor=SaysALevel(tokens[5][-1], level, end)) as daemon:
        for n in range(seconds + 1):
            at = START + n * SECOND
            daemon.put(
                *(
                    trade("V:AAA", at + i * 1000, f"{price / 100:.2f}", f"{i + 1}")
                    for i, price in enumerate(prices(n))
                )
            )
            await until(lambda n=n: len(daemon.answers()) == 6 * n)
        found: dict[int, dict[str, Answer]] = {}
        for answer in daemon.answers():
            found.setdefault(answer.data_version, {})[answer.question] = answer
        assert list(found) == list(range(1, seconds + 1))
        histories = {id(each.history): each.history for each in expected}
        logits = {number: oracle_logits(loaded, history) for number, history in histories.items()}
        for version, given in zip(expected, found.values(), strict=True):
            assert given["exact_value"].text == decimal(version.anchor.price(int(LEVEL)), 2)
            assert given["exact_value"].choice is None
            assert all(("rounded" in answer.flags) is version.rounded for answer in given.values())
            for row, question in zip(version.rows, PAPER_SIX[:questions], strict=True):
                answer, choices = given[question.name], question.choices or ()
                dense = logits[id(version.history)][row]
                first, second = (float(dense[prompt.choice(choice)]) for choice in choices)
                bound = tolerance.of_gap(loaded, tolerance.largest(dense))
                assert answer.logit_gap == tolerance.near(abs(first - second), bound)
                assert answer.choice == choices[first < second] or abs(first - second) <= bound
        assert (
            daemon.count("anchors", session="aaa")
            == daemon.count("refreshes", session="aaa")
            == len(histories)
        )
        assert daemon.count("versions", session="aaa") == seconds
        assert daemon.count("bars_rounded", session="aaa") > 0

        reply = await daemon.ask_engine(Ask(1, "aaa", asked[5], 8))
        price = decimal(expected[-1].anchor.price(int(LEVEL)), 2)
        flags = ("untrained",) if loaded.untrained else ()
        assert (reply.data_version, reply.text, reply.flags) == (seconds, price, flags)


async def test_bars_that_arrive_faster_than_anchors_change_are_all_answered_in_order(directory: Path) -> None:
    config = inproc_config(sessions=sessions("V:AAA"), model=ModelConfig(path=str(directory)))
    async with running(config) as daemon:
        prices = [100 * 2.0 ** (n % 24) for n in range(120)]
        daemon.put(*(trade("V:AAA", START + n * SECOND, f"{price:.2f}") for n, price in enumerate(prices)))
        ranges: list[tuple[int, int]] = []

        def complete() -> bool:
            nonlocal ranges
            ranges = sorted({(i.first_offset, i.last_offset) for a in daemon.answers() for i in a.inputs})
            return bool(ranges) and ranges[-1][1] == 118

        await until(complete, what="the last bar's answers")
        assert [first for first, _ in ranges] == [0, *(last + 1 for _, last in ranges[:-1])]
        assert daemon.count("anchors", session="aaa") == daemon.count("refreshes", session="aaa") > 20
