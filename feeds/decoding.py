"""Decodes external input: any failure becomes `Undecodable`."""

from collections.abc import Callable
from typing import TypeVar

import msgspec

P = TypeVar("P")
T = TypeVar("T")
MAX_MESSAGE_CHARS = 2048
"""Longest text of an error, which may name what was sent, of any length."""
MAX_DECODING_CHARS = 200
"""The same of a decoder's, most of which may be input."""


def shortened(message: str, chars: int = MAX_MESSAGE_CHARS) -> str:
    """The text of an error without the middle of one that is longer than ``chars``."""
    excluded = len(message) - chars
    if excluded <= 0:
        return message
    half = chars // 2
    return f"{message[:half]} ({excluded} characters) {message[-half:]}"


class Undecodable(ValueError):
    """Input that cannot be decoded. ``readable``: it is well-formed, but its members are wrong."""

    def __init__(self, message: str, *, readable: bool) -> None:
        super().__init__(shortened(message, MAX_DECODING_CHARS))
        self.readable = readable


def decoded(decode: Callable[[P], T], payload: P) -> T:
    """``decode(payload)``. Raises Undecodable for anything that the decoder raises.

    Decoders raise more than they document: UnicodeDecodeError for a string that is not UTF-8, RecursionError
    for deep nesting, TypeError for an unhashable key, OverflowError for an integer that is too long.
    """
    try:
        return decode(payload)
    except msgspec.ValidationError as error:
        raise Undecodable(str(error), readable=True) from None
    except Exception as error:
        raise Undecodable(str(error) or type(error).__name__, readable=False) from None
