"""Questions numbered in the frozen prefix, for models that read words and for the terse layout."""

from typing import Any

import pytest

from engine.model.chat_format import LISTED, PromptError, PromptFormat
from engine.model.embedded import build_tokenizer
from training.tokenizer import build_tokenizer as build_terse

TERSE: dict[str, Any] = {
    "layout": "terse",
    "lines": "compact",
    "window_bars": 64,
    "none": "NONE",
    "questions": {
        "trend": {"text": "Up or down?", "token": "<|trend|>", "choices": ["UP", "DOWN"]},
        "exact_value": {"text": "The close?", "token": "<|exact_value|>", "choices": []},
    },
}
HEADER = "reference 61230.00 unit 0.50 volume 12.5 percent 245\n"


def terse(**changes: Any) -> PromptFormat:
    return PromptFormat.of(build_terse(), described={**TERSE, **changes})


def template_of(tokenizer: Any, template: str | None) -> Any:
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(
    "template",
    [
        build_tokenizer().chat_template,
        None,
        "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}<s>assistant: ",
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}"
        "[{{ m['content'] }}]{% endfor %}",
    ],
)
@pytest.mark.parametrize("header", [None, HEADER])
def test_a_numbered_question_is_the_prompt_of_a_list_and_a_number(
    template: str | None, header: str | None
) -> None:
    """The whole prompt differs from one without a list by the list and by what is asked, in nothing else."""
    prompt = PromptFormat.of(template_of(build_tokenizer(), template))
    decode = prompt.tokenizer.decode
    bare = decode(list(prompt.frozen(header)) + prompt.encode("TAPE\n") + prompt.question("Two?"))
    numbered = decode(
        list(prompt.frozen(header, ["One?", "Two?"])) + prompt.encode("TAPE\n") + prompt.numbered(2)
    )
    listed = f"{LISTED}#1 One?\n#2 Two?\n\n"
    assert numbered.count(listed) == 1
    before, after = numbered.split(listed)
    assert before + after == bare.replace("\nQuestion: Two?", "#2")
    assert (header or "") in before + after
    after = decode(prompt.question("Two?")).split("Two?")[1]
    assert len(prompt.numbered(2)) <= 3 + len(prompt.encode(after))


def test_the_list_stands_before_what_differs_between_sessions() -> None:
    """So compact sessions, each with a header of its own, share it."""
    prompt = PromptFormat.of(build_tokenizer())
    one, other = (prompt.frozen(header, ["One?"]) for header in (HEADER, HEADER.replace("245", "99")))
    common = next(n for n, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1])
    assert "One?" in prompt.tokenizer.decode(list(one[:common]))


def test_a_terse_model_reads_numbers_as_it_was_trained_to() -> None:
    prompt = terse()
    text = prompt.tokenizer.decode(list(prompt.frozen(HEADER, ["trend", "The close?"])))
    assert text == f"<|bos|>{HEADER}<|ask|>001<|trend|><|ask|>002<|exact_value|>\n"
    assert prompt.tokenizer.decode(prompt.numbered(2)) == "<|ask|>002"
    assert len(prompt.numbered(2)) == 2
    assert prompt.frozen(HEADER) == tuple(prompt.encode(f"<|bos|>{HEADER}"))
    listed = prompt.frozen(HEADER, ["trend"])
    assert len(listed) == len(prompt.frozen(HEADER)) + 4


def test_a_terse_model_says_which_questions_it_answers_by_number() -> None:
    """Any other model takes whatever it is asked."""
    told = {**TERSE["questions"], "exact_value": {**TERSE["questions"]["exact_value"], "by_number": False}}
    prompt = terse(questions=told)
    assert prompt.answers_by_number("trend")
    assert not prompt.answers_by_number("The close?")
    assert terse().answers_by_number("exact_value")
    assert PromptFormat.of(build_tokenizer()).answers_by_number("Why?")


def test_a_terse_model_refuses_what_it_cannot_be_asked() -> None:
    prompt = terse()
    with pytest.raises(ValueError, match="'Why'"):
        prompt.frozen(HEADER, ["Why"])
    with pytest.raises(ValueError, match="999"):
        prompt.numbered(1000)
    with pytest.raises(ValueError, match="number"):
        terse(ask="numbers are not for me").numbered(1)
    with pytest.raises(PromptError, match="layout"):
        terse(layout="verbose")
