"""Text of an answer while it grows: tokens in, whole characters out, cut before the first stop sequence."""

from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]
INCOMPLETE = "\ufffd"
"""What tokenizers write for bytes that are no character (yet)."""
KEPT = 6
"""Tokens decoded again before new ones: decoders that join words with blanks look back at them."""


class Detokeniser:
    """Decodes a growing list of tokens; the pieces together are the text of the whole list.

    A character whose bytes lie in several tokens comes with the last of them. Each call decodes a bounded
    number of tokens, unless bytes that are no character pile up.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._start = self._read = 0  # of the tokens that are decoded again, and of those not read yet

    def add(self, tokens: Sequence[int]) -> str:
        """The text that ``tokens`` complete."""
        self._tokens += tokens
        return self._next(whole=False)

    def rest(self) -> str:
        """The text that never got complete, at the end."""
        return self._next(whole=True)

    def _next(self, *, whole: bool) -> str:
        known = self._decode(self._tokens[self._start : self._read])
        text = self._decode(self._tokens[self._start :])
        if not whole and (text.endswith(INCOMPLETE) or len(text) <= len(known)):
            return ""
        self._start = (
            max(self._start, self._read - KEPT) if self._read - self._start > 2 * KEPT else self._start
        )
        self._read = len(self._tokens)
        return text[len(known) :]


class StopText:
    """Cuts a text that comes in pieces before the first of several stop sequences.

    What may be the beginning of one is held back. ``found``: the sequence that ended the text, if one did.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.found: str | None = None

    def add(self, piece: str) -> str:
        """The text that is safe to show; nothing after a stop."""
        if self.found is not None:
            return ""
        text, self._held = self._held + piece, ""
        hits = [(at, -len(stop), stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if hits:
            at, _, self.found = min(hits)
            return text[:at]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        if held:
            text, self._held = text[:-held], text[-held:]
        return text

    def rest(self) -> str:
        """What was held back, once the stream has ended."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if stop.startswith(text[-n:])), 0)
