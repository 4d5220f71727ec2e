"""The bytes that each token writes, in order: which tokens may come next, for any rule about bytes."""

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from transformers.convert_slow_tokenizer import bytes_to_unicode

State = TypeVar("State")
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_ALPHABET = {character: byte for byte, character in bytes_to_unicode().items()}
"""The byte of each character of GPT-2's alphabet."""


class Vocabulary:
    """All tokens that write something, by their bytes."""

    def __init__(self, tokens: Mapping[int, bytes]) -> None:
        listed = sorted((written, token) for token, written in tokens.items() if written)
        self.bytes_of = tokens
        self._written = [written for written, _ in listed]
        self._tokens = [token for _, token in listed]
        self.single_bytes = frozenset(written[0] for written in self._written if len(written) == 1)
        """Bytes that are tokens of their own."""

    def allowed(self, state: State, step: Callable[[State, int], State | None]) -> dict[int, State]:
        """Each token whose bytes ``step`` takes one by one from ``state``, and the state after it.

        ``step`` returns None for a byte that may not follow. The cost depends on the tokens that may.
        """
        found: dict[int, State] = {}
        written = self._written
        waiting = [(0, len(written), 0, state)]  # tokens with one beginning, its length, the state after it
        while waiting:
            first, stop, length, at = waiting.pop()
            while first < stop and len(written[first]) == length:
                found[self._tokens[first]] = at
                first += 1
            while first < stop:
                byte = written[first][length]
                end = stop
                if byte < 255:
                    end = bisect_left(written, written[first][:length] + bytes([byte + 1]), first, stop)
                after = step(at, byte)
                if after is not None:
                    waiting.append((first, end, length + 1, after))
                first = end
        return found


def check_vocabulary(tokenizer: Any, rows: int) -> str:
    """Why an embedding of ``rows`` tokens is not that of the tokenizer; "" where no text leaves it.

    Texts of clients never become added tokens, so these may lie beyond it, unless a chat's template or a
    text's beginning has one.
    """
    added = {int(token) for token in tokenizer.added_tokens_decoder}
    own = max((each for each in map(int, tokenizer.get_vocab().values()) if each not in added), default=-1)
    if own >= rows:
        return f"the tokenizer has {own + 1:,} tokens, the embedding {rows:,}: they are of different models"
    around = [token for token in (tokenizer.bos_token_id,) if token is not None]
    if getattr(tokenizer, "chat_template", None):
        with suppress(Exception):  # what a template raises is refused where a prompt is made
            text = tokenizer.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False)
            around += tokenizer.encode(text, add_special_tokens=False)
    beyond = max(around, default=-1)
    if beyond >= rows:
        return f"the chat template writes {tokenizer.decode([beyond])!r}, which the embedding does not have"
    return ""


def token_bytes(tokenizer: Any) -> dict[int, bytes]:
    """The bytes of each token of a transformers tokenizer, without special ones.

    Tokens of byte-level tokenizers (GPT-2's alphabet) are read byte by byte; in others ``▁`` is a blank and
    ``<0x0A>`` a byte.
    """
    special = set(tokenizer.all_special_ids)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    form = {} if backend is None else json.loads(backend.to_str())
    by_byte = "ByteLevel" in json.dumps([form.get("decoder"), form.get("pre_tokenizer")])
    read = _of_byte_level if by_byte else _of_pieces
    added = {int(token): str(each) for token, each in tokenizer.added_tokens_decoder.items()}
    return {
        int(token): added[token].encode() if token in added else written
        for text, token in tokenizer.get_vocab().items()
        if int(token) not in special and (written := read(text)) is not None
    }


def _of_pieces(text: str) -> bytes:
    found = _BYTE.fullmatch(text)
    return bytes([int(found[1], 16)]) if found else text.replace("▁", " ").encode()


def _of_byte_level(text: str) -> bytes | None:
    try:
        return bytes(_ALPHABET[character] for character in text)
    except KeyError:  # it is not of the alphabet
        return None
