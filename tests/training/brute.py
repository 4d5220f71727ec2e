"""The tape model's forward once more: a loop over rows that gathers what each one sees, in float64."""

import numpy as np
import numpy.typing as npt
import torch

from training.batches import BAR_TOKENS, Batch
from training.model import TapeModel

Array = npt.NDArray[np.float64]


def seen_by(batch: Batch, row: int) -> list[int]:
    """The rows a row sees, its own included: prefix, the last bars up to its own, its branch so far."""
    tape_end = batch.prefix + batch.tape
    if row < batch.prefix:
        return list(range(row + 1))
    bar = int(batch.bar[row])
    oldest = max(bar - batch.window + 1, 0)
    last = min(row + 1, batch.prefix + (bar + 1) * BAR_TOKENS)
    seen = [*range(batch.prefix), *range(batch.prefix + oldest * BAR_TOKENS, last)]
    if row >= tape_end:
        branch = batch.branch[row]
        seen += [other for other in range(tape_end, row + 1) if batch.branch[other] == branch]
    return seen


def rotated(x: Array, position: int, theta: float) -> Array:
    """[heads, width] rotated to a position: pairs (i, i + width / 2) as complex numbers."""
    half = x.shape[-1] // 2
    turn = np.exp(1j * position / theta ** (np.arange(half) / half))
    pairs = (x[:, :half] + 1j * x[:, half:]) * turn
    return np.concatenate([pairs.real, pairs.imag], -1)


def norm(x: Array, weight: Array) -> Array:
    scaled: Array = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight
    return scaled


def forward(model: TapeModel, batch: Batch, tape: int) -> Array:
    """Logits [queries, vocabulary] of one tape's query rows."""
    weights = {name: value.detach().double().numpy() for name, value in model.named_parameters()}
    shape, tokens = model.shape, batch.ids.shape[1]
    x = weights["embed_tokens"][batch.ids[tape]]
    # positions: a key's never change; a query is behind the prefix as it sees the tape, where bars are gone
    gone = [BAR_TOKENS * max(int(bar) - batch.window + 1, 0) for bar in batch.bar]
    sight = [seen_by(batch, row) for row in range(tokens)]
    position = [
        row
        if row < batch.prefix + batch.tape
        else batch.prefix + (int(batch.bar[row]) + 1) * BAR_TOKENS + offset
        for row, offset in zip(range(tokens), offsets(batch), strict=True)
    ]
    for index in range(shape.layers):
        own = {name: weights[f"layers.{index}.{name}"] for name, _ in model.layers[index].named_parameters()}
        h = norm(x, own["input_layernorm"])
        q, k, v = (
            (h @ own[f"{name}_proj"].T).reshape(tokens, shape.heads, shape.head) for name in ("q", "k", "v")
        )
        keys = np.stack([rotated(k[row], position[row], shape.theta) for row in range(tokens)])
        mixed = np.empty_like(x)
        for row, seen in enumerate(sight):
            far = rotated(q[row], position[row] - gone[row], shape.theta)
            near = rotated(q[row], position[row], shape.theta)
            scores = np.stack(
                [(keys[other] * (far if other < batch.prefix else near)).sum(-1) for other in seen]
            )
            scores = np.exp((scores - scores.max(0)) / shape.head**0.5)
            mixed[row] = ((scores / scores.sum(0))[..., None] * v[seen]).sum(0).reshape(-1)
        x = x + mixed @ own["o_proj"].T
        h = norm(x, own["post_attention_layernorm"])
        gate = h @ own["gate_proj"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ own["up_proj"].T)) @ own["down_proj"].T
    logits: Array = norm(x[batch.queries.rows], weights["norm"]) @ weights["embed_tokens"].T
    return logits


def offsets(batch: Batch) -> list[int]:
    """Of each row in its branch; 0 elsewhere."""
    found, tape_end = [0] * (batch.prefix + batch.tape), batch.prefix + batch.tape
    for row in range(tape_end, batch.ids.shape[1]):
        same = row > tape_end and batch.branch[row] == batch.branch[row - 1]
        found.append(found[-1] + 1 if same else 0)
    return found


def dense_rows(batch: Batch, query: int) -> npt.NDArray[np.int64]:
    """The rows of one query's prompt, prefix first, as `LlamaForCausalLM` reads it in a fresh window."""
    return np.array(seen_by(batch, int(batch.queries.rows[query])))


def as_float64(x: torch.Tensor) -> Array:
    values: Array = x.detach().double().numpy()
    return values
