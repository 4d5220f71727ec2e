"""Prompts of one tape as one sequence: the tape is read once, and the questions branch off behind its bars.

The tokens are those that the daemon's prompts have (`training.shown`, `PromptFormat`): the frozen prefix, the
lines of the window, then, behind some bars, each question in words with its answer. A branch sees the tape up
to its bar and itself, as a fork of the daemon's does, and has the positions of a prompt of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface

ATTENTION = "foretick_packed"
_BLOCK = 192
"""Rows of the tape whose attention is computed at a time, against the keys that they can see."""


class Branch(NamedTuple):
    """A question behind some of the tape's tokens, and its answer, which is learnt."""

    seen: int
    """Tokens of the tape that it sees."""
    question: Sequence[int]
    answer: Sequence[int]


@dataclass(frozen=True)
class Part:
    """Rows from ``start`` to ``stop`` that see the first ``seen`` rows, and of their own what ``bias``
    [rows, seen + rows] says: 0 where a row sees a key, else minus infinity.
    """

    start: int
    stop: int
    seen: int
    bias: Tensor


@dataclass(frozen=True)
class Pack:
    """``ids`` and ``positions`` [rows]: the tape's, then the branches'; ``parts`` are of all of them.

    ``rows``: those whose next token is an answer's, branch by branch; ``targets``: these tokens; ``branch``:
    the branch of each.
    """

    ids: Tensor
    positions: Tensor
    parts: tuple[Part, ...]
    rows: Tensor
    targets: Tensor
    branch: Tensor


def pack(tape: Sequence[int], branches: Sequence[Branch] = ()) -> Pack:
    """Branches behind equally many tokens must follow one another: they are one part."""
    ids, positions = list(tape), list(range(len(tape)))
    blocks = [(start, min(start + _BLOCK, len(tape))) for start in range(0, len(tape), _BLOCK)]
    parts = [Part(start, stop, start, _bias(start, [stop - start])) for start, stop in blocks]
    rows: list[int] = []
    targets: list[int] = []
    owners: list[int] = []
    begin = 0
    while begin < len(branches):
        seen = branches[begin].seen
        end = next((n for n in range(begin, len(branches)) if branches[n].seen != seen), len(branches))
        start, lengths = len(ids), []
        for number, (_, question, answer) in enumerate(branches[begin:end], begin):
            asked = [*question, *answer[:-1]]
            rows += range(len(ids) + len(question) - 1, len(ids) + len(asked))
            targets += answer
            owners += [number] * len(answer)
            positions += range(seen, seen + len(asked))
            ids += asked
            lengths.append(len(asked))
        parts.append(Part(start, len(ids), seen, _bias(seen, lengths)))
        begin = end
    tensors = (torch.tensor(each, dtype=torch.long) for each in (rows, targets, owners))
    return Pack(torch.tensor(ids), torch.tensor(positions), tuple(parts), *tensors)


def _bias(seen: int, lengths: Sequence[int]) -> Tensor:
    size = sum(lengths)
    owner, row = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)), torch.arange(size)
    own = (owner[:, None] == owner) & (row[:, None] >= row)
    bias = torch.zeros(size, seen + size)
    bias[:, seen:].masked_fill_(~own, float("-inf"))
    return bias


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    pack: Pack | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function, [1, heads, rows, dim] to [1, rows, heads, dim], of a `Pack`.

    By plain products, which are quicker in bf16 on a CPU than PyTorch's fused attention, most in backward.
    """
    assert pack is not None, "a forward pass has a pack"
    assert attention_mask is None, "no mask function has this name"
    heads, shared = key.shape[1], query.shape[1] // key.shape[1]
    dim = query.shape[-1]
    (query,), (key,), (value,) = query * (dim**-0.5 if scaling is None else scaling), key, value
    found = []
    for part in pack.parts:
        rows, own = part.stop - part.start, slice(part.start, part.stop)
        keys, values = (torch.cat((each[:, : part.seen], each[:, own]), 1) for each in (key, value))
        scores = query[:, own].reshape(heads, shared * rows, dim) @ keys.transpose(1, 2)
        weights = torch.softmax(scores.view(heads, shared, rows, -1) + part.bias.to(scores.dtype), -1)
        attended = weights.view(heads, shared * rows, -1) @ values
        found.append(attended.view(heads * shared, rows, -1))
    return torch.cat(found, 1).transpose(0, 1)[None], None


AttentionInterface.register(ATTENTION, packed_attention)
