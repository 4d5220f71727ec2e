"""A prompt line by line, and the comparison of two answers to it."""

from __future__ import annotations

from daemon.api.messages import FinishReply
from tests.kit import tolerance

LINES = [f"{n:02d}. Prices of item {n % 5} moved by {n * 37 % 101} in quarter {n % 4}.\n" for n in range(12)]
TEXT = "".join(LINES)


def same(streamed: FinishReply, whole: FinishReply) -> bool:
    """The same prompt and the same answer."""
    return (streamed.text, streamed.choice, streamed.prompt_tokens, streamed.answer_tokens) == (
        whole.text,
        whole.choice,
        whole.prompt_tokens,
        whole.answer_tokens,
    ) and abs(streamed.logit_gap - whole.logit_gap) <= tolerance.of_embedded_gap()
