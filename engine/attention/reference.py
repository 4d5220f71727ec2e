"""Plain softmax attention on any device: for soft-caps, and as the oracle of every backend."""

from collections.abc import Iterator

import torch

from engine.attention.base import LayerCall, Merged
from engine.attention.metadata import ContextPart, NewPart


class ReferenceAttention:
    """One softmax per part, or per range of its keys with at most about ``scores`` scores; slow and plain."""

    def __init__(self, scores: int | None = None) -> None:
        self._scores = scores

    def __call__(self, call: LayerCall) -> torch.Tensor:
        """The output, [q_heads, rows, value_dim]."""
        call = call.as_stored()
        output = Merged(call)
        for part in call.metadata.context(call.window):
            query = call.rotated(part.rows, part.shifts)
            # masks are small; and one row of a mask may see none of the first keys, so it is not split
            most = part.stop - part.start
            if self._scores is not None and part.visible is None:
                most = max(64, self._scores // query.shape[:2].numel())
            for keys, values in ranges(call, part, most):
                output.add(part.rows, *attend(query, keys, values, call, part.visible))
        for new in call.metadata.new(call.window):
            output.add(new.rows, *attend_new(call, new))
        return output.result()


def ranges(call: LayerCall, part: ContextPart, most: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The part's keys and values in equal ranges of at most ``most`` keys."""
    length = part.stop - part.start
    step = -(-length // -(-length // most))
    for start in range(part.start, part.stop, step):
        yield call.read(slice(start, min(start + step, part.stop)))


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    call: LayerCall,
    visible: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain softmax attention of ``query`` [q_heads, rows, dim]: output, log-sum-exp [q_heads, rows].

    ``keys``, ``values`` [kv_heads, keys, dim]; ``visible``: bool [rows, keys], None when all are visible.
    """
    heads, rows, _ = query.shape
    groups = heads // keys.shape[0]
    folded = query.reshape(keys.shape[0], groups * rows, -1)
    scores = torch.matmul(folded, keys.transpose(1, 2)).float().view(heads, rows, -1) * call.scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.clamp(min=torch.finfo(torch.float32).min)[..., None]).to(values.dtype)
    folded_weights = weights.view(keys.shape[0], groups * rows, -1)
    return torch.matmul(folded_weights, values).float().view(heads, rows, -1), lse


def attend_new(call: LayerCall, new: NewPart) -> tuple[torch.Tensor, torch.Tensor]:
    """`attend` within each sequence of ``new``."""
    tensors = (call.query, call.new_key, call.new_value)
    queries, keys, values = (tensor[:, new.rows].chunk(new.count, 1) for tensor in tensors)
    rows = queries[0].shape[1]
    causal = torch.ones(rows, rows, dtype=torch.bool, device=call.query.device).tril()
    parts = [attend(*sequence, call, causal) for sequence in zip(queries, keys, values, strict=True)]
    return torch.cat([out for out, _ in parts], 1), torch.cat([lse for _, lse in parts], 1)
