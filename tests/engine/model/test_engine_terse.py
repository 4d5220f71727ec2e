"""The layout of a model that reads no words, and the compact lines of one that does."""

import numpy as np
import pytest

from engine.model.chat_format import COMPACT_SCHEMA, PromptError, PromptFormat, schema_of
from engine.model.embedded import build_tokenizer as build_chat_tokenizer
from ingest.compact import Anchor
from ingest.tokens import Tokeniser
from tapes.generate import TRAINING
from tests.kit.models import WINDOW_BARS, description
from training.batches import Layout, Vocabulary, make_batch
from training.tokenizer import QUESTIONS, build_tokenizer

TOKENIZER = build_tokenizer()
TERSE = PromptFormat.of(TOKENIZER, described=description())


@pytest.mark.parametrize("asked", ["trend", "<|trend|>", description()["questions"]["trend"]["text"], None])
def test_a_question_is_one_token_by_name_token_or_text(asked: str | None) -> None:
    if asked is None:  # white space does not matter
        asked = "  " + description()["questions"]["trend"]["text"].replace(" ", "\n ")
    assert TERSE.question(asked) == TOKENIZER.convert_tokens_to_ids(["<|trend|>"])


def test_the_ready_position_of_a_terse_model_is_a_line_break_behind_its_lines() -> None:
    """Its answers have no header."""
    line_break = TERSE.ready()
    assert len(line_break) == 1
    assert TOKENIZER.decode(line_break) == "\n"


def test_an_unknown_question_is_refused_with_all_that_the_model_answers() -> None:
    with pytest.raises(ValueError, match="'Will it rain") as refused:
        TERSE.question("Will it rain?")
    assert all(name in str(refused.value) for name in QUESTIONS)


def test_choices_are_the_answers_of_their_question_or_none() -> None:
    ids = TOKENIZER.convert_tokens_to_ids(["DOWN", "UP", "NONE"])
    assert TERSE.choices("trend", ("DOWN", "UP", "NONE")) == tuple(ids)
    with pytest.raises(ValueError, match=r"\['UP', 'DOWN', 'NONE'\]"):
        TERSE.choices("trend", ("UP", "YES"))


def test_a_prompt_is_what_training_renders() -> None:
    vocabulary = Vocabulary(TOKENIZER)
    layout = Layout(window=12, bars=12, cuts=2, tapes=1)
    batch = make_batch(np.random.default_rng(4), vocabulary, layout, TRAINING)
    header = TOKENIZER.decode(batch.ids[0, 1 : batch.prefix].tolist())
    assert TERSE.frozen(header) == tuple(batch.ids[0, : batch.prefix].tolist())
    tape = batch.ids[0, batch.prefix : batch.prefix + batch.tape].tolist()
    numbers = {token: n for n, token in enumerate(vocabulary.numbers.tolist())}
    fields = np.array([numbers[token] for token in tape if token in numbers]).reshape(-1, 5)
    lines = Tokeniser(TERSE.encode).compact(fields)
    assert [token for line in lines for token in line] == tape
    asked = {TERSE.question(name)[0] for name in QUESTIONS}
    assert asked <= set(batch.ids[0, batch.prefix + batch.tape :].tolist())


def test_what_the_model_says_of_itself() -> None:
    assert TERSE.lines == "compact"
    assert TERSE.terse is not None
    assert TERSE.terse.window_bars == WINDOW_BARS
    assert PromptFormat.of(build_chat_tokenizer()).lines == "decimal"


def test_an_unusable_description_is_refused() -> None:
    with pytest.raises(PromptError, match=r"remove model\.system_prompt"):
        PromptFormat.of(TOKENIZER, "Be brief.", description())
    with pytest.raises(PromptError, match="layout"):
        PromptFormat.of(TOKENIZER, described={**description(), "layout": "telegraphic"})
    with pytest.raises(PromptError, match="'Will it rain'"):
        PromptFormat.of(TOKENIZER, described={**description(), "none": "Will it rain"})


def test_a_model_that_reads_gets_the_lines_explained_before_the_header() -> None:
    tokenizer = build_chat_tokenizer()
    prompt = PromptFormat.of(tokenizer)
    header = Anchor(61_230 * 10**9, 10**9 // 2, 10**9).header
    compact, decimal = (tokenizer.decode(list(prompt.frozen(each))) for each in (header, None))
    assert compact.endswith(COMPACT_SCHEMA + header)
    assert decimal.endswith(schema_of("decimal"))
    assert compact.removesuffix(COMPACT_SCHEMA + header) == decimal.removesuffix(schema_of("decimal"))
