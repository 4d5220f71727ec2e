"""Constrained decoding of a plain decimal number: which tokens may follow those of an answer."""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

_PIECE = re.compile(r" ?-?[0-9]*\.?[0-9]*")
_PREFIX = re.compile(r" ?-?([0-9]{1,15}(\.[0-9]{0,18})?)?")
_NUMBER = re.compile(r" ?-?[0-9]{1,15}(\.[0-9]{1,18})?")
"""At most 15 digits before the point and 18 behind it, so that every number is one of `feeds.decimals`."""
_DIGIT = re.compile(r"[0-9]")


class NumberGrammar:
    """Optional sign, digits, and optionally a point and digits; then a stop token.

    ``pieces``: the text of each token. Raises ValueError without a stop token or without tokens for digits.
    """

    def __init__(self, pieces: Mapping[int, str], stop_ids: frozenset[int]) -> None:
        written = {token: piece for token, piece in pieces.items() if token not in stop_ids}
        self._pieces = {token: piece for token, piece in written.items() if piece and _PIECE.fullmatch(piece)}
        self._stop_ids = tuple(sorted(stop_ids))
        if not stop_ids or not set("0123456789") <= set(self._pieces.values()):
            raise ValueError("the model's tokenizer has no end token, or no token for every digit")
        self._allowed = lru_cache(maxsize=512)(self._find)

    def allowed(self, output: Sequence[int], left: int) -> tuple[int, ...]:
        """Tokens that may follow ``output`` when ``left`` more fit: the last one completes the number."""
        text = "".join(self._pieces.get(token, "") for token in output)
        return self._allowed(_DIGIT.sub("0", text), min(left, 2))

    def _find(self, shape: str, left: int) -> tuple[int, ...]:
        """``shape``: the text with every digit written as 0."""
        form = _NUMBER if left <= 1 else _PREFIX
        found = tuple(token for token, piece in self._pieces.items() if form.fullmatch(shape + piece))
        return found + (self._stop_ids if _NUMBER.fullmatch(shape) else ())


def number_grammar(tokenizer: Any, stop_ids: frozenset[int]) -> NumberGrammar:
    """The grammar over the vocabulary of a transformers tokenizer."""
    pieces = {
        int(token): text.replace("▁", " ").replace("Ġ", " ") for text, token in tokenizer.get_vocab().items()
    }
    return NumberGrammar(pieces, stop_ids)
