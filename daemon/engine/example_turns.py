"""Worked examples as turns of a chat (`model.examples`)."""

from dataclasses import replace
from functools import lru_cache

from engine.model.chat_format import PromptFormat, schema_of
from flash.question import Question
from ingest.lines import Form, bar_line
from tapes.worked_examples import WorkedExample, worked_examples


@lru_cache(maxsize=16)
def example_turns(prompt: PromptFormat, examples: int, form: Form) -> tuple[tuple[str, str], ...]:
    """What is asked and the right answer, turn by turn; the bars of an example stand in its first turn."""
    found = []
    for each in worked_examples(examples):
        shown = _shown(each, form)
        for question, answer in each.answers:
            found.append((f"{shown}Question: {asked_as(prompt, question)}", answer))
            shown = ""
    return tuple(found)


def asked_as(prompt: PromptFormat, question: Question) -> str:
    """The text by which a model that reads words is asked."""
    return prompt.briefly(question.text) if question.is_brief else question.text


def _shown(example: WorkedExample, form: Form) -> str:
    spec = replace(example.spec, form=form)
    return schema_of(form) + "".join(bar_line(bar, spec) for bar in example.bars) + "\n"
