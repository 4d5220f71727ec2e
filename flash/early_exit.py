"""Early exit: whether the ready position answers an ask (*Attention Once* section 3.9.4).

The ready position is where an answer begins, behind the bars and without a question; what the model favours
there is known for each data version before anybody asks. The check needs no tokenizer: it knows the first
tokens of a vocabulary of fast answers, the choices of the session's standing questions.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from flash.registry import Standing

FastAnswers = Mapping[str, int]
"""First tokens by answer: *V* of equation 13."""


@dataclass(frozen=True, slots=True)
class ReadyToken:
    """The likeliest ``token`` at the ready position of a data version, and its logit gap (equation 12)."""

    version: int
    token: int
    gap: float


def fast_answers(standing: Iterable[Standing]) -> FastAnswers:
    """Those of a session's questions. A text that two of them begin with different tokens is none."""
    found: dict[str, set[int]] = {}
    for each in standing:
        for choice, token in zip(each.question.choices or (), each.prepared.choice_tokens or (), strict=True):
            found.setdefault(choice, set()).add(token)
    return {choice: tokens.pop() for choice, tokens in found.items() if len(tokens) == 1}


def exit_of(
    ready: ReadyToken, version: int, choices: Sequence[str], fast: FastAnswers, tau: float
) -> str | None:
    """The choice with which an ask of ``version`` is answered at once, or None (equation 13).

    ``tau``: logit gap to exceed; 0 never exits. All ``choices`` must be fast answers, told by their tokens.
    """
    if not tau or ready.gap <= tau or ready.version != version:
        return None
    tokens = [fast.get(choice) for choice in choices]
    if None in tokens or len(set(tokens)) < len(tokens) or ready.token not in tokens:
        return None
    return choices[tokens.index(ready.token)]
