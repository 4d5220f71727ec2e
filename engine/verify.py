"""Speculation's check: how many of the drafted tokens are what the model would have generated itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engine.step import SampledToken


def accept(drafts: Sequence[int], choices: Sequence[SampledToken]) -> SampledToken:
    """The choice behind the accepted drafts, with the choices that confirmed them.

    ``choices[i]`` is the model's own next token given the first i drafts, so there is one more of them. A
    draft is accepted when it equals that token and all before it were: the answer is then, token for token,
    the one without drafts. This holds at any temperature, since the noise of a token depends on its index
    alone. A choice with an error confirms nothing and is returned as it is.
    """
    count = 0
    for draft, choice in zip(drafts, choices, strict=False):
        if choice.error is not None or choice.token != draft:
            break
        count += 1
    return replace(choices[count], accepted=tuple(choices[:count]))
