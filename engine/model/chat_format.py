"""The text around a tape: prefix (frozen), tape (sliding), question (ephemeral).

For a chat model, the template is rendered once with markers for the tape and the question, and cut at them.
The frozen prefix ends where the data begins; a question's tokens end the user's message and begin the
assistant's. A model of the terse layout reads no words: its prefix is the begin-of-text token and the header
of the compact lines, a question is a token, and the answer follows at once. Either kind can have questions
numbered in its prefix; a question is then its number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from engine.model.numbers import NumberGrammar, number_grammar
from engine.model.terse import Lines, Terse

SYSTEM_PROMPT = "You are a market analyst. Answer the question about the bars."
BRIEF = "Answer with one word or one number."
"""Behind a question whose answer is short, with that prompt; another prompt says itself what it wants."""
_COLUMNS = ("time", "open", "high", "low", "close", "volume")
COMPACT_SCHEMA = (
    "Each line is one bar, oldest first: open, high, low, close and volume, three digits each. Prices are "
    "levels: level = 500 + (price - reference) / unit. Volumes are codes: code = 500 + 200 log10(volume / "
    "typical volume), and 000 is none. The first line has the reference, the unit, the typical volume and "
    "the units in one percent of the reference. Give a price as its level, with three digits.\n"
)
LISTED = "After the bars, # and a number asks one of these questions:\n"
_ASK = "\nQuestion: "
_THOUGHTLESS = (
    ("<think>\n", "\n</think>\n\n"),
    ("<think>", "\n\n</think>\n\n"),
    ("<|start|>assistant", "<|channel|>final<|message|>"),
)
"""What a template may end with, and what goes on from there so that the answer begins."""
_ANSWER = "\x00answer\x00"
_TAPE, _QUESTION = "\x00tape\x00", "\x00question\x00"


class PromptError(ValueError):
    """The model's chat template cannot render messages or be cut, or its layout is unknown."""


def schema_of(lines: Lines, *, symbols: bool = False) -> str:
    """What lines mean that are not compact; with ``symbols`` they begin with one."""
    names = ("symbol", *_COLUMNS) if symbols else _COLUMNS
    said = f"Each line is one bar{' of one symbol' if symbols else ''}, oldest first"
    if lines == "words":
        return said + ".\n"
    if lines == "table":
        return f"{said}:\n\n| {' | '.join(names)} |\n|{' --- |' * len(names)}\n"
    return f"{said}: {','.join(names)}\n"


@dataclass(frozen=True)
class PromptFormat:
    """The fixed text around tape and question.

    ``before_tape``: the frozen prefix without what it says of questions and lines. ``brief``: what stands
    behind a question whose answer is short. ``system``: the system prompt of a model that reads words.
    """

    tokenizer: Any
    before_tape: str
    before_question: str
    after_question: str
    answer_prefix: str = ""
    terse: Terse | None = None
    end_ids: frozenset[int] = frozenset()
    brief: str = ""
    system: str = ""
    only_ends: frozenset[int] = frozenset()
    """Where there are some, these alone end an answer."""

    @classmethod
    def of(
        cls,
        tokenizer: Any,
        system_prompt: str = "",
        described: Mapping[str, Any] | None = None,
        end_ids: frozenset[int] = frozenset(),
    ) -> PromptFormat:
        """Cut ``tokenizer``'s chat template, or a plain text layout if it has none.

        ``described`` is what the model says of itself, `foretick` in its config.json. ``end_ids``: tokens
        that end an answer beside the tokenizer's own. Raises PromptError when the template refuses, drops or
        repeats the user's content, and for an unknown layout.
        """
        if described:
            return cls._terse(tokenizer, system_prompt, described, end_ids)
        system = system_prompt or SYSTEM_PROMPT
        parts = _cut(tokenizer, system, ())
        answer_prefix = "" if getattr(tokenizer, "chat_template", None) else " "
        brief = "" if system_prompt else BRIEF
        return cls(tokenizer, *parts, answer_prefix, end_ids=end_ids, brief=brief, system=system)

    @classmethod
    def _terse(
        cls, tokenizer: Any, system_prompt: str, described: Mapping[str, Any], end_ids: frozenset[int]
    ) -> PromptFormat:
        try:
            terse = msgspec.convert(dict(described), Terse)
        except msgspec.ValidationError as error:
            raise PromptError(
                f"this version cannot use the model's layout (foretick in config.json): {error}"
            ) from error
        if system_prompt:
            raise PromptError("this model reads no words but its questions': remove model.system_prompt")
        format_ = cls(tokenizer, tokenizer.bos_token, "", "", "", terse, end_ids)
        for text in (terse.none, *(q.token for q in terse.questions.values())):
            if len(format_.encode(text)) != 1:
                raise PromptError(f"{text!r} is not one token of the model's tokenizer")
        return format_

    @property
    def lines(self) -> Lines:
        """The lines that the model reads best."""
        return "decimal" if self.terse is None else self.terse.lines

    def frozen(
        self,
        header: str | None = None,
        questions: Sequence[str] = (),
        *,
        lines: Lines = "decimal",
        symbols: bool = False,
        about: str = "",
        turns: Sequence[tuple[str, str]] = (),
    ) -> tuple[int, ...]:
        """The frozen prefix; ``header`` says what the numbers of compact lines mean, None: other ``lines``.

        ``symbols``: these begin with a symbol. ``about``: what else is said of the lines. ``turns``: worked
        examples, what is asked and the answer, which go before as turns of the chat.
        ``questions`` get the numbers from 1 on, see `numbered`. Raises ValueError when a terse model does not
        know one, or cannot number that many.
        """
        if self.terse is not None:
            asked = [self._number(n) + self.terse.find(text).token for n, text in enumerate(questions, 1)]
            listed = "".join(asked) + "\n" if asked else ""
            return tuple(self.encode(f"{self.before_tape}{header}{listed}"))
        schema = COMPACT_SCHEMA + header if header is not None else schema_of(lines, symbols=symbols)
        numbered = "".join(f"#{n} {text}\n" for n, text in enumerate(questions, 1))
        listed = f"{LISTED}{numbered}\n" if numbered else ""
        before = _cut(self.tokenizer, self.system, turns)[0] if turns else self.before_tape
        return tuple(self.encode(before + listed + about + schema))

    def briefly(self, text: str) -> str:
        """The question ``text``, to be answered in a word."""
        return f"{text} {self.brief}" if self.brief else text

    def question(self, text: str) -> list[int]:
        """The tokens of a question, from the end of the tape to the beginning of the answer.

        Raises ValueError for a question that a terse model does not answer.
        """
        if self.terse is not None:
            return self.encode(self.terse.find(text).token)
        return self.encode(self.before_question + text + self.after_question)

    def answers_by_number(self, text: str) -> bool:
        """Whether the question ``text`` may be asked by its number. Raises ValueError as `question` does."""
        return self.terse is None or self.terse.find(text).by_number

    def numbered(self, number: int) -> list[int]:
        """As `question`, for one that has this number in the frozen prefix."""
        if self.terse is not None:
            return self.encode(self._number(number))
        before = self.before_question.removesuffix(_ASK)  # the tape ends with a line break
        return self.encode(f"{before}#{number}{self.after_question}")

    def ready(self) -> list[int]:
        """As `question`, without one: the header of an answer. A terse model's answers have none, so it is a
        line break behind the last one.
        """
        if self.terse is not None:
            return self.encode("\n")
        return self.encode(self.before_question.removesuffix(_ASK) + self.after_question)

    def choices(self, text: str, choices: Sequence[str]) -> tuple[int, ...]:
        """The first token of each choice of the question ``text``.

        Raises ValueError when one is empty, and when a terse model does not give it as an answer.
        """
        if self.terse is not None:
            answers = (*self.terse.find(text).choices, self.terse.none)
            if unknown := [choice for choice in choices if choice not in answers]:
                raise ValueError(f"the model does not answer {unknown}; its answers are {list(answers)}")
        return tuple(map(self.choice, choices))

    def choice(self, text: str) -> int:
        """The first token of ``text`` as an answer. Raises ValueError when it has none."""
        if not text.strip():
            raise ValueError("an empty choice")
        return self.encode(self.answer_prefix + text)[0]

    @cached_property
    def longest_token(self) -> int:
        """Characters that a token is written with, at most; none stands for more."""
        return max(map(len, self.tokenizer.get_vocab()))

    def encode(self, text: str) -> list[int]:
        """Tokens of ``text``, without special tokens."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def without_special(self, text: str) -> str:
        """``text`` of somebody else's, with a blank where it writes a special token."""
        return self._added.sub(" ", text) if self._added else text

    @cached_property
    def _added(self) -> re.Pattern[str] | None:
        """Finds what the tokenizer reads as one token whatever is around it."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {}).values()
        names = sorted((token.content for token in added), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, names))) if names else None

    def parts(self, text: str, least: int) -> list[str]:
        """``text`` in parts whose tokens, one after the other, are the text's.

        Each run of at least ``least`` characters without a special token is a part with the token before it:
        a long message of a chat stays the same part whatever else is said.
        """
        parts, start, before = [], 0, 0
        bounds = [found.start() for found in self._special.finditer(text)] if self._special else []
        for bound in [*bounds, len(text)]:
            if bound - before >= least:
                parts += [text[start:before], text[before:bound]]
                start = bound
            before = bound
        return [part for part in (*parts, text[start:]) if part]

    @cached_property
    def _special(self) -> re.Pattern[str] | None:
        """Finds where a text may be cut: before special tokens, by which tokenizers cut it first.

        None where this tokenizer looks beyond such a token.
        """
        added = getattr(self.tokenizer, "added_tokens_decoder", {}).values()
        tokens = [token for token in added if not token.normalized]
        if not tokens or any(token.lstrip or token.single_word for token in tokens):
            return None
        names = sorted((token.content for token in tokens), key=len, reverse=True)
        sample = [f"{name} a  {name}b\n\n c" for name in names]
        if self.encode("".join(sample)) != [token for each in sample for token in self.encode(each)]:
            return None
        return re.compile("|".join(map(re.escape, names)))

    def plain(self, text: str) -> list[int]:
        """Tokens of ``text`` after the begin-of-text token, if there is one; none for an empty text."""
        begin = getattr(self.tokenizer, "bos_token_id", None)
        if not text:
            return []
        return [*([] if begin is None else [int(begin)]), *self.encode(text)]

    def chat(self, turns: Sequence[tuple[str, str]]) -> str:
        """A chat, (role, text) of each turn, up to the next answer, which goes on a last turn `assistant`.

        Roles are system, user and assistant. A model without a chat template gets plain text with the names
        of the roles. Raises ValueError for a chat that the model's template refuses, and for a terse model.
        """
        if self.terse is not None:
            raise ValueError("this model answers its own questions about a session only; ask session:NAME")
        if not turns:
            raise ValueError("a chat needs at least one message")
        begun = turns[-1][1] if turns[-1][0] == "assistant" else ""
        said = turns[:-1] if turns[-1][0] == "assistant" else turns
        if getattr(self.tokenizer, "chat_template", None):
            return _render(self.tokenizer, said) + begun
        lines = [text if role == "system" else f"{role.capitalize()}: {text}" for role, text in said]
        return f"{self.tokenizer.bos_token or ''}" + "\n\n".join([*lines, f"Assistant: {begun}".rstrip()])

    def _number(self, number: int) -> str:
        """A number as a terse model reads it."""
        if self.terse is None or len(self.encode(self.terse.ask)) != 1:
            raise ValueError("this model cannot be asked for the number of a question")
        if number > 999:
            raise ValueError("this model can be asked for 999 questions by their number at most")
        return f"{self.terse.ask}{number:03d}"

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end an answer: the tokenizer's, and all that the model names, or others instead."""
        if self.only_ends:
            return self.only_ends
        own = getattr(self.tokenizer, "eos_token_id", None)
        return self.end_ids if own is None else self.end_ids | {int(own)}

    @cached_property
    def numbers(self) -> NumberGrammar:
        """Constrains an answer to a number. Raises ValueError for a tokenizer that cannot write one."""
        return number_grammar(self.tokenizer, self.stop_ids)

    def decode(self, tokens: list[int]) -> str:
        """The text of ``tokens``."""
        return self.text(tokens).strip()

    def text(self, tokens: list[int]) -> str:
        """As `decode`, with the white space around it."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))


def _cut(tokenizer: Any, system: str, turns: Sequence[tuple[str, str]]) -> tuple[str, str, str]:
    """What stands before the tape, between it and a question, and behind that; ``turns``: see `frozen`."""
    user = f"{_TAPE}{_ASK}{_QUESTION}"
    if getattr(tokenizer, "chat_template", None):
        said = [part for asked, answer in turns for part in (("user", asked), ("assistant", answer))]
        rendered = _render(tokenizer, [("system", system), *said, ("user", user)])
    else:
        texts = [system, *(f"{asked}\nAnswer: {answer}" for asked, answer in turns), f"{user}\nAnswer:"]
        rendered = (tokenizer.bos_token or "") + "\n\n".join(texts)
    if rendered.count(_TAPE) != 1 or rendered.count(_QUESTION) != 1:
        raise PromptError("the chat template does not carry the user's message exactly once")
    frozen, rest = rendered.split(_TAPE)
    before, after = rest.split(_QUESTION)
    return frozen, before, after


def turn_ends(tokenizer: Any) -> frozenset[int]:
    """The token that the chat template ends an answer with: none where that is no special token."""
    if not getattr(tokenizer, "chat_template", None):
        return frozenset()
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
    try:
        rendered = str(tokenizer.apply_chat_template(turns, tokenize=False, enable_thinking=False))
    except Exception:  # whatever a template raises
        return frozenset()
    _, found, behind = rendered.rpartition(_ANSWER)
    tokens = tokenizer.encode(behind.lstrip(), add_special_tokens=False) if found else []
    return frozenset(tokens[:1]) & frozenset(tokenizer.all_special_ids)


def _render(tokenizer: Any, turns: Sequence[tuple[str, str]]) -> str:
    """The template around ``turns``, without a thought: an answer is judged by its first token.

    Where it refuses a system role (Gemma's, early Mistral's), what that says goes before the first turn. A
    thought that the template begins is ended at once, and of channels the final one is begun.
    """
    instructions = "\n\n".join(text for role, text in turns if role == "system")
    rest = [(role, text) for role, text in turns if role != "system"]
    merged = [(role, f"{instructions}\n\n{text}" if n == 0 else text) for n, (role, text) in enumerate(rest)]
    for messages in (turns, merged) if instructions else (turns,):
        try:
            rendered = str(
                tokenizer.apply_chat_template(
                    [{"role": role, "content": text} for role, text in messages],
                    tokenize=False,
                    add_generation_prompt=True,
                    enable_thinking=False,
                )
            )
            return next((rendered + more for end, more in _THOUGHTLESS if rendered.endswith(end)), rendered)
        except Exception as error:
            last = error
    raise PromptError(f"the model's chat template refuses these messages: {last}")
