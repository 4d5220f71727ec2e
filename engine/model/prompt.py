"""The chat template around a tape: prefix (frozen), tape (sliding), question (ephemeral).

The template is rendered once with markers for the tape and the question, and cut at them. The frozen prefix
ends where the data begins; a question's tokens end the user's message and begin the assistant's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SYSTEM_PROMPT = "You are a market analyst. Answer the question about the bars with one word or one number."
SCHEMA = "Each line is one bar, oldest first: time,open,high,low,close,volume\n"
_TAPE, _QUESTION = "\x00tape\x00", "\x00question\x00"


class PromptError(ValueError):
    """The model's chat template cannot be cut at tape and question."""


@dataclass(frozen=True)
class PromptFormat:
    """The fixed tokens around tape and question."""

    tokenizer: Any
    frozen: tuple[int, ...]
    before_question: str
    after_question: str
    answer_prefix: str = ""

    @classmethod
    def of(cls, tokenizer: Any, system_prompt: str = "") -> PromptFormat:
        """Cut ``tokenizer``'s chat template, or a plain text layout if it has none.

        Raises PromptError when the template drops or repeats the user's content.
        """
        system = system_prompt or SYSTEM_PROMPT
        answer_prefix = ""
        user = f"{SCHEMA}{_TAPE}\nQuestion: {_QUESTION}"
        if getattr(tokenizer, "chat_template", None):
            rendered = _render(tokenizer, system, user)
        else:
            rendered = f"{tokenizer.bos_token or ''}{system}\n\n{user}\nAnswer:"
            answer_prefix = " "
        if rendered.count(_TAPE) != 1 or rendered.count(_QUESTION) != 1:
            raise PromptError("the chat template does not carry the user's message exactly once")
        frozen, rest = rendered.split(_TAPE)
        before, after = rest.split(_QUESTION)
        return cls(tokenizer, tuple(_encode(tokenizer, frozen)), before, after, answer_prefix)

    def question(self, text: str) -> list[int]:
        """The tokens of a question, from the end of the tape to the beginning of the answer."""
        return _encode(self.tokenizer, self.before_question + text + self.after_question)

    def choice(self, text: str) -> int:
        """The first token of ``text`` as an answer. Raises ValueError when it has none."""
        if not text.strip():
            raise ValueError("an empty choice")
        return _encode(self.tokenizer, self.answer_prefix + text)[0]

    def encode(self, text: str) -> list[int]:
        """Tokens of ``text``, without special tokens."""
        return _encode(self.tokenizer, text)

    def plain(self, text: str) -> list[int]:
        """Tokens of ``text`` after the begin-of-text token, if there is one; none for an empty text."""
        begin = getattr(self.tokenizer, "bos_token_id", None)
        if not text:
            return []
        return [*([] if begin is None else [int(begin)]), *self.encode(text)]

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        ids = getattr(self.tokenizer, "eos_token_id", None)
        return frozenset() if ids is None else frozenset({int(ids)})

    def decode(self, tokens: list[int]) -> str:
        """The text of ``tokens``."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True)).strip()


def _render(tokenizer: Any, system: str, user: str) -> str:
    for messages in (
        [{"role": "system", "content": system}, {"role": "user", "content": user}],
        # some templates (Gemma's, early Mistral's) refuse a system role
        [{"role": "user", "content": f"{system}\n\n{user}"}],
    ):
        try:
            return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except Exception as error:
            last = error
    raise PromptError(f"the chat template refuses both a system and a lone user message: {last}")


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))
