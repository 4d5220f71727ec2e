"""Questions of the configuration that a question pack answers."""

from collections.abc import Sequence

from daemon.config.schema import QuestionConfig
from engine.model.question_pack import PackHead, located, pinned, read_head
from flash.question import worded


def problem(asked: QuestionConfig) -> str:
    """Why the pack does not answer the question of this table; "" where it does."""
    try:
        pinned(asked.pack)
        head = read_head(located(asked.pack)[0])
    except ValueError as error:
        return str(error)
    return mismatch(head, asked.text, asked.choices)


def mismatch(head: PackHead, text: str, choices: Sequence[str]) -> str:
    """Why a pack does not answer a question; "" where it does."""
    if worded(text) != worded(head.text):
        return f"the pack is of another question: {head.text!r}"
    answers = [*head.choices, head.none]
    if not choices or not set(choices) <= set(answers):
        return f"the pack answers {answers}, not {list(choices) or 'free text'}"
    return ""
