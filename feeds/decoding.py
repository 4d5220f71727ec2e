"""One way to decode what others sent: whatever is wrong with it becomes `Undecodable`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

P = TypeVar("P")
T = TypeVar("T")


class Undecodable(ValueError):
    """Input that cannot be read. ``readable``: it is well-formed, but its members are wrong."""

    def __init__(self, message: str, *, readable: bool) -> None:
        super().__init__(message)
        self.readable = readable


def decoded(decode: Callable[[P], T], payload: P) -> T:
    """``decode(payload)``. Raises Undecodable for anything that the decoder raises.

    Decoders raise more than they document: UnicodeDecodeError for a string that is no UTF-8, RecursionError
    for deep nesting, TypeError for a key that cannot be hashed, OverflowError for integers that are too long.
    """
    try:
        return decode(payload)
    except msgspec.ValidationError as error:
        raise Undecodable(str(error), readable=True) from None
    except Exception as error:
        raise Undecodable(str(error) or type(error).__name__, readable=False) from None
