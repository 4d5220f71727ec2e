"""Token ids as arrays: whole prompts are compared at memory speed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

TokenArray = npt.NDArray[np.int32]
Tokens = Sequence[int] | TokenArray


def token_array(tokens: Tokens) -> TokenArray:
    """``tokens`` as int32 [tokens]; an array of that type is returned as it is, not copied."""
    if hasattr(tokens, "__array__"):
        return np.asarray(tokens, np.int32)
    return np.fromiter(tokens, np.int32, len(tokens))


def common_length(a: TokenArray, b: TokenArray) -> int:
    """How many tokens ``a`` and ``b`` have in common from their start."""
    n = min(len(a), len(b))
    if not n:
        return 0
    differ = a[:n] != b[:n]
    first = int(differ.argmax())  # 0, too, when none differs
    return first if differ[first] else n
