"""What a model of the terse layout says of itself: the questions that it answers. Needs no PyTorch."""

import json
from pathlib import Path
from typing import Literal

import msgspec

TAPE_MODEL = Path(__file__).with_name("foretick-tape")
"""Directory of the embedded default, as `foretick train` exports it."""

Lines = Literal["decimal", "table", "words", "compact"]


def named_lines(lines: Lines, examples: int = 0) -> str:
    """How a calibration names lines, with the worked examples before them."""
    return f"{lines}, {examples} examples" if examples else lines


class TerseQuestion(msgspec.Struct, frozen=True):
    """A question of a terse model: what it means, its token, and its answers (none: a level).

    ``by_number``: the model has also learnt to answer it when asked by its number in the frozen prefix.
    """

    text: str
    token: str
    choices: tuple[str, ...] = ()
    by_number: bool = True


class Terse(msgspec.Struct, frozen=True, kw_only=True):
    """What a terse model says of itself, as `foretick` in its config.json.

    ``none`` answers where a question is undefined. ``window_bars``: the bars it was trained to read. ``ask``
    goes before the number of a question, which has three digits.
    """

    layout: Literal["terse"]
    lines: Literal["compact"]
    window_bars: int
    none: str
    questions: dict[str, TerseQuestion]
    ask: str = "<|ask|>"

    def find(self, asked: str) -> TerseQuestion:
        """The question with this name, text or token. Raises ValueError listing all that it answers."""
        known = self.questions.get(asked)
        if known is not None:
            return known
        text = " ".join(asked.split())
        for question in self.questions.values():
            if text in (question.token, " ".join(question.text.split())):
                return question
        raise ValueError(
            f"this model does not answer {asked!r}; it answers these questions, by name or in full: "
            + ", ".join(f"{name} ({question.text})" for name, question in self.questions.items())
        )


def terse_in(directory: Path) -> Terse | None:
    """What the model in ``directory`` says of itself; None for one that reads words, or cannot be read."""
    try:
        described = json.loads((directory / "config.json").read_bytes()).get("foretick")
        return None if described is None else msgspec.convert(described, Terse)
    except (OSError, ValueError, AttributeError):
        return None
