"""A drawn tape in decimal lines, in words and as a table says what its levels say, as a daemon writes it."""

import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from daemon.engine.example_turns import example_turns
from engine.model.chat_format import PromptFormat
from engine.model.embedded import build_tokenizer
from engine.model.terse import Lines
from ingest.compact import Anchor, fields_of
from ingest.lines import bar_line
from ingest.tokens import Tokeniser
from tapes.worked_examples import bars_of_levels
from training.batches import Vocabulary
from training.shown import Reading, anchor_of_header, shown
from training.sources import Drawn, Generated

FORMS = {
    "words": re.compile(r"(\d{4}) open (\S+) high (\S+) low (\S+) close (\S+) volume (\S+)\n"),
    "table": re.compile(r"\| (\d{4}) \| (\S+) \| (\S+) \| (\S+) \| (\S+) \| (\S+) \|\n"),
}
DECIMAL = Reading("decimal")
CHATML = "{%- for m in messages %}{{- m.role + ': ' + m.content + '\n' }}{%- endfor %}"


@pytest.fixture(scope="module")
def prompt() -> PromptFormat:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = CHATML
    return PromptFormat.of(tokenizer)


@pytest.fixture(scope="module")
def drawn() -> Drawn:
    return next(Generated(seed=5).batches(Vocabulary(), 64, 64))


def header(drawn: Drawn, tape: int) -> str:
    return str(Vocabulary().tokenizer.decode(drawn.header[tape]))


def test_levels_around_their_anchor_are_the_bars_again(drawn: Drawn) -> None:
    x = drawn.levels
    for tape in range(len(x.close)):
        bars, spec = bars_of_levels(x, tape, anchor_of_header(header(drawn, tape)))
        words = header(drawn, tape).split()
        anchor = Anchor.of(words[1], words[3], words[5], spec.price_decimals, spec.price_scale)
        expected = np.stack([x.open[tape], x.high[tape], x.low[tape], x.close[tape], x.volume[tape]], 1)
        assert (fields_of(bars, anchor) == expected).all()


def test_decimal_lines_are_those_of_the_daemon(prompt: PromptFormat, drawn: Drawn) -> None:
    for tape in range(3):
        made = shown(prompt, Tokeniser(prompt.encode), DECIMAL, drawn.levels, tape, header(drawn, tape), [])
        bars, spec = bars_of_levels(drawn.levels, tape, anchor_of_header(header(drawn, tape)))
        texts = [prompt.tokenizer.decode(line) for line in made.lines]
        assert texts == [bar_line(bar, spec) for bar in bars]
        assert texts[0].startswith("0930,")
        closes = [made.price(int(level)) for level in drawn.levels.close[tape]]
        assert [text.split(",")[4] for text in texts] == closes
        assert made.frozen == prompt.frozen(None)


@pytest.mark.parametrize("form", FORMS)
def test_each_form_has_the_numbers_of_decimal_lines(form: Lines, prompt: PromptFormat, drawn: Drawn) -> None:
    read = partial(shown, prompt, Tokeniser(prompt.encode))
    made, decimal = (
        read(reading, drawn.levels, 0, header(drawn, 0), []) for reading in (Reading(form), DECIMAL)
    )
    for said, plain in zip(made.lines, decimal.lines, strict=True):
        text = prompt.tokenizer.decode(said)
        found = FORMS[form].fullmatch(text)
        assert found is not None, text
        assert list(found.groups()) == prompt.tokenizer.decode(plain).strip().split(",")
    assert made.frozen == prompt.frozen(None, lines=form)


def test_worked_examples_stand_in_the_frozen_prefix(prompt: PromptFormat, drawn: Drawn) -> None:
    read = partial(shown, prompt, Tokeniser(prompt.encode))
    with_two = read(Reading("words", 2), drawn.levels, 0, header(drawn, 0), [])
    without = read(Reading("words"), drawn.levels, 0, header(drawn, 0), [])
    turns = example_turns(prompt, 2, "words")
    assert with_two.frozen == prompt.frozen(None, lines="words", turns=turns)
    assert len(with_two.frozen) > len(without.frozen)
    assert with_two.lines == without.lines


def test_compact_lines_are_the_levels_themselves(prompt: PromptFormat, drawn: Drawn) -> None:
    made = shown(prompt, Tokeniser(prompt.encode), Reading("compact"), drawn.levels, 1, header(drawn, 1), [])
    x = drawn.levels
    expected = [
        f"{x.open[1, n]:03d}{x.high[1, n]:03d}{x.low[1, n]:03d}{x.close[1, n]:03d}" for n in range(64)
    ]
    assert [prompt.tokenizer.decode(line)[:12] for line in made.lines] == expected
    assert made.price(7) == "007"


def test_large_volumes_are_shown_as_they_are(prompt: PromptFormat, drawn: Drawn) -> None:
    """Beyond what fits 64 bits in units of 1e-9."""
    x = replace(drawn.levels, volume=np.full_like(drawn.levels.volume, 800))
    header = "reference 100.00 unit 0.01 volume 950000000 percent 100\n"
    tokeniser = Tokeniser(prompt.encode)
    decimal, words = (
        shown(prompt, tokeniser, reading, x, 0, header, []) for reading in (DECIMAL, Reading("words"))
    )
    for made, said in zip(decimal.lines, words.lines, strict=True):
        number = prompt.tokenizer.decode(made).strip().rpartition(",")[2]
        assert float(number) == pytest.approx(950e6 * 10**1.5, rel=1e-9)
        assert prompt.tokenizer.decode(said).strip().endswith(f"volume {number}")
