"""Worked examples before a session's bars: what the prefix says, who shares it, where they are refused."""

from typing import Any

import msgspec
import pytest

from daemon.config.fingerprint import fingerprint
from daemon.config.schema import Config, ModelConfig, QuestionConfig, SessionConfig
from daemon.engine.build import line_spec, prefixes_of
from daemon.engine.prefixes import EnginePrefixes
from engine.model.chat_format import BRIEF, PromptError, PromptFormat, schema_of
from engine.model.embedded import build_tokenizer
from engine.model.terse import Lines
from feeds.connector import SettingError
from ingest.lines import bar_line
from tapes.worked_examples import worked_examples
from tests.kit import inproc_config
from tests.kit.inproc import running

CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
A = SessionConfig(name="a", symbol="V:AAA", lines="decimal")


@pytest.fixture(params=[True, False], ids=["chat", "plain"])
def prompt(request: pytest.FixtureRequest) -> PromptFormat:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = CHATML if request.param else None
    return PromptFormat.of(tokenizer)


def prefixes(prompt: PromptFormat, *sessions: SessionConfig, examples: int = 2) -> EnginePrefixes:
    config = Config(sessions=sessions, model=ModelConfig(examples=examples), standing="none")
    lines = {each.name: line_spec(each, config.bars, prompt) for each in sessions}
    return prefixes_of(config, prompt, lines)


def turns(text: str) -> list[str]:
    """What the user and the assistant say, in order, in a chat of this template."""
    parts = text.replace("</user>", "").replace("</assistant>", "").replace("</system>", "")
    return parts.replace("<assistant>", "\n<user>").split("<user>")[1:]


def test_each_example_shows_its_bars_once_and_then_every_question_with_its_answer() -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = CHATML
    prompt = PromptFormat.of(tokenizer)
    expected = []
    for example in worked_examples(2):
        shown = schema_of("decimal") + "".join(bar_line(bar, example.spec) for bar in example.bars) + "\n"
        for question, answer in example.answers:
            text = f"{question.text} {BRIEF}" if question.name == "exact_value" else question.text
            expected += [f"{shown}Question: {text}\n", answer]
            shown = ""
    found = turns(tokenizer.decode(list(prefixes(prompt, A).newest("a"))))
    assert found == [*expected, schema_of("decimal")]


@pytest.mark.parametrize("form", ["decimal", "table", "words"])
def test_they_go_before_what_is_said_without_them_and_count(prompt: PromptFormat, form: Lines) -> None:
    session = msgspec.structs.replace(A, lines=form)
    decode = prompt.tokenizer.decode
    made, bare = (prefixes(prompt, session, examples=n) for n in (3, 0))
    system = prompt.system
    with_three, without = (decode(list(each.newest("a"))) for each in (made, bare))
    before, own = without.split(system)
    assert with_three.startswith(before + system)
    assert with_three.endswith(own.removeprefix("</system>"))
    for example in worked_examples(3):
        assert f"Question: {example.answers[0][0].text}" in with_three
    assert made.longest("a", ()) == len(made.newest("a")) > 3 * 1000 + len(bare.newest("a"))


def test_sessions_share_them(prompt: PromptFormat) -> None:
    other = SessionConfig(name="b", symbol="V:BBB", lines="decimal", price_decimals=5)
    made = prefixes(prompt, A, other)
    assert made.newest("a") == made.newest("b")


def test_the_fingerprint_has_their_number() -> None:
    found = {fingerprint(Config(sessions=(A,), model=ModelConfig(examples=n)), A, ()) for n in (0, 1, 2)}
    assert len(found) == 3


def test_compact_lines_have_none(prompt: PromptFormat) -> None:
    with pytest.raises(SettingError, match="not for compact lines") as caught:
        prefixes(prompt, msgspec.structs.replace(A, lines="compact"))
    assert caught.value.key == "model.examples"


def test_a_template_that_refuses_more_turns_says_so() -> None:
    tokenizer = build_tokenizer()
    refusal = "{% if messages | length > 2 %}{{ raise_exception('one turn only') }}{% endif %}"
    tokenizer.chat_template = refusal + CHATML
    prompt = PromptFormat.of(tokenizer)
    with pytest.raises(PromptError, match="one turn only"):
        prompt.frozen(turns=[("Up?", "YES")])
    with pytest.raises(SettingError, match="one turn only") as caught:
        prefixes(prompt, A)
    assert caught.value.key == "model.examples"


async def test_a_daemon_shows_them_in_its_prompt_and_answers_behind_them() -> None:
    asked: Any = QuestionConfig("side", text="Which side?", choices=("BUY", "SELL"))
    model = ModelConfig(path="untrained", examples=1)
    async with running(inproc_config(standing="none", questions=(asked,), model=model)) as daemon:
        await daemon.advance(3)
        shown = await daemon.call("show_prompt", "aaa", "side")
        (example,) = worked_examples(1)
        for bar in example.bars:
            assert bar_line(bar, example.spec) in shown.frozen.text
        assert shown.frozen.text.endswith(schema_of("decimal"))
        assert len(shown.sliding.text.splitlines()) == 3
        (answer,) = (await daemon.call("answers", "aaa", "side")).answers
        assert answer.choice in asked.choices
