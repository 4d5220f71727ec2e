"""Questions: `Question` as its owner wrote it, `PreparedQuestion` as tokens for one model."""

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

PublishWhen = Literal["always", "changed", "confident", "crossed", "every", "never"]
"""See `flash.publishing`."""
AnswerForm = Literal["text", "number"]
_DECIMAL = re.compile(r"[+-]?[0-9]{1,15}(\.[0-9]{1,18})?")

BRIEF_TOKENS = 16
"""Longest answer that has room for a word or a number only."""
_LEAST = {"max_tokens": 1, "publish_every": 1, "ask_every_bars": 1, "ask_every_ns": 0, "answer_within_ns": 0}


@dataclass(frozen=True, slots=True)
class Question:
    """A standing question, answered for every data version.

    With `choices` the answer is the likeliest one and takes one token; without them it is greedy text of at
    most `max_tokens` tokens, or with `answer` a number only. `min_probability` and `min_logit_gap` belong to
    `confident`, `level` (decimal text) to `crossed`, `publish_every` (data versions) to `every`. It is asked
    every `ask_every_bars`, or every `ask_every_ns` of event time, and answered within `answer_within_ns` of
    the data's receipt or not at all (see `flash.schedules`). If it is `provisional`, it is asked behind the
    open bars, too, which are no part of the tape. Of its answers that are marked `act`, at most the share
    `max_error` is to be wrong (see `flash.acting`). It takes at most `engine_share` of the engine's time; 0:
    any (see `flash.budgets`). `pack`: FILE@REVISION of the question pack that answers it.

    Raises ValueError for an empty name or text, for repeated or single choices, for choices of a question
    that crosses a level, for a `level` that is not a number, and for other numbers out of range,
    and for a `max_error` without choices or behind open bars.
    """

    name: str
    text: str
    choices: tuple[str, ...] | None = None
    max_tokens: int = 8
    answer: AnswerForm = "text"
    publish_when: PublishWhen = "always"
    min_probability: float = 0.8
    min_logit_gap: float = 2.0
    level: str = "0"
    publish_every: int = 1
    ask_every_bars: int = 1
    ask_every_ns: int = 0
    answer_within_ns: int = 0
    provisional: bool = False
    max_error: float | None = None
    engine_share: float = 0.0
    pack: str = ""

    def __post_init__(self) -> None:
        if not self.name.strip() or not self.text.strip():
            raise ValueError("a question needs a name and a text")
        for member, least in _LEAST.items():
            if (value := getattr(self, member)) < least:
                raise ValueError(f"question {self.name!r}: {member} must be at least {least}, not {value}")
        if self.ask_every_bars > 1 and self.ask_every_ns:
            raise ValueError(f"question {self.name!r}: asked every n bars or every n seconds, not both")
        if self.answer == "number" and self.choices is not None:
            raise ValueError(
                f"question {self.name!r}: the answer is a number or one of the choices, not both"
            )
        if self.publish_when == "crossed" and self.choices is not None:
            raise ValueError(f"question {self.name!r}: only a number crosses a level: remove the choices")
        if not 0 <= self.engine_share <= 1:
            share = self.engine_share
            raise ValueError(f"question {self.name!r}: engine_share must be from 0 to 1, not {share:g}")
        if self.max_error is not None:
            self._check_acting(self.max_error)
        if _DECIMAL.fullmatch(self.level) is None:
            raise ValueError(f"question {self.name!r}: level {self.level!r} is not a plain decimal number")
        if self.choices is not None:
            if len(self.choices) < 2:
                raise ValueError(f"question {self.name!r}: needs at least two choices, or none")
            if len(set(self.choices)) < len(self.choices):
                twice = [choice for choice, n in Counter(self.choices).items() if n > 1][:8]
                raise ValueError(
                    f"question {self.name!r}: the choices {twice} repeat; each must be different"
                )

    def _check_acting(self, error: float) -> None:
        if not 0 < error < 0.5:
            why = f"max_error must be above 0 and below 0.5, not {error:g}"
            raise ValueError(f"question {self.name!r}: {why}")
        if self.choices is None:
            raise ValueError(f"question {self.name!r}: max_error needs choices: other answers have no label")
        if self.provisional:
            why = "answers behind open bars have no label: remove max_error or provisional"
            raise ValueError(f"question {self.name!r}: {why}")

    @property
    def is_brief(self) -> bool:
        """Whether the model is asked to be brief: for a number or a few words. A choice is one anyway."""
        return self.choices is None and (self.answer == "number" or self.max_tokens <= BRIEF_TOKENS)

    @property
    def hash(self) -> str:
        """Identity of the question under any name: h of *Attention Once* equation 11, 32 hex digits.

        Ignores differences in Unicode form and white space, but not in the choices, their order or the form
        of the answer, and what is published. Each part is preceded by its length, so that no two lists of
        parts hash the same bytes.
        """
        digest = blake2b(digest_size=16)
        form = () if self.answer == "text" else (self.answer,)
        open_bars = ("provisional",) if self.provisional else ()
        taught = (self.pack.rpartition("@")[2],) if self.pack else ()  # wherever the file is
        for part in (self.text, *(self.choices or ()), *form, *open_bars, *taught):
            data = worded(part).encode()
            digest.update(len(data).to_bytes(8, "big") + data)
        return digest.hexdigest()


def worded(text: str) -> str:
    """``text`` without differences in Unicode form and white space: two texts that are one question's."""
    return " ".join(unicodedata.normalize("NFC", text).split())


Grammar = Callable[[Sequence[int], int], tuple[int, ...]]
"""Token ids that may follow the generated ones, given how many more fit."""


@dataclass(frozen=True, slots=True)
class PreparedQuestion:
    """A question rendered and encoded for one model."""

    prompt_tokens: tuple[int, ...]
    """The tokens between the tape and the answer."""
    choice_tokens: tuple[int, ...] | None
    """First token of each choice, in the question's order."""
    stop_ids: frozenset[int]
    max_tokens: int | None = None
    """Tokens of the model's whole answer, whatever was asked for; None: as many as asked for."""
    is_price: bool = False
    """The answer is a price: in a compact session, its level."""
    grammar: Grammar | None = None
    """What the answer may consist of; None: anything."""

    def answer_tokens(self, question: Question) -> int:
        """Longest answer to ``question``; a terse model's is whole, however few are asked for."""
        if self.max_tokens is not None:
            return self.max_tokens
        return 1 if question.choices else question.max_tokens


Prepare = Callable[[Question], PreparedQuestion]
"""Renders and encodes a question; implemented by the engine."""

EXACT_VALUE = Question(
    "exact_value",
    "What is the closing price of the last bar? Answer with the number only.",
    None,
    max_tokens=12,
)
PAPER_SIX = (
    Question(
        "trend",
        "Looking at the closing prices of the most recent bars, is the trend up or down?",
        ("UP", "DOWN"),
    ),
    Question(
        "pullback", "Is the price now pulling back against the trend of the earlier bars?", ("YES", "NO")
    ),
    Question(
        "recent_high", "Did one of the last five bars make the highest high of all bars shown?", ("YES", "NO")
    ),
    Question(
        "consolidation",
        "Are the most recent bars consolidating, that is, moving sideways in a narrow range?",
        ("YES", "NO"),
    ),
    Question(
        "volume",
        "Is the volume of the most recent bars higher than that of the bars before them?",
        ("YES", "NO"),
    ),
    EXACT_VALUE,
)
"""The query set of *Attention Once* section 4.3, worded for a tape of open, high, low, close, volume bars."""
