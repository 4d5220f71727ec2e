"""What a question pack trains: rows of one question's own weights over tapes that the frozen model has read.

A tape's keys and values are computed once, without a gradient (`TapeModel.memory`). The question is asked
behind many of its bars at once; each time it sees what the daemon's fork would: the prefix, the window's bars
and its own tokens. Only its rows differ from the model's, so no other answer changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.model.question_pack import ANSWERS, TOKEN, Array
from tapes.rules import Ints
from training.batches import BAR_TOKENS, Layout, Vocabulary, pack
from training.model import TapeModel, norm, rotate
from training.sources import Drawn

MATRICES = ("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Those that a question changes; keys and values of its own rows stay the model's."""


@dataclass(frozen=True)
class ReadTapes:
    """Tapes as the model has read them: keys and values by layer, ``prefix`` tokens and bars."""

    kv: list[tuple[Tensor, Tensor]]
    prefix: int
    bars: int
    window: int


def read_tapes(model: TapeModel, vocabulary: Vocabulary, drawn: Drawn, window: int) -> ReadTapes:
    """Read drawn tapes as a session with this window does; keys and values in float32."""
    tapes, bars = drawn.levels.close.shape
    layout = Layout(window, bars, 1, tapes, 0)
    order, last = np.zeros((tapes, 1), np.int64), np.array([bars - 1])
    batch = pack(np.random.default_rng(0), vocabulary, layout, drawn.levels, drawn.header, last, order)
    kv = [(keys.float(), values.float()) for keys, values in model.memory(batch)]
    return ReadTapes(kv, batch.prefix, bars, window)


class QuestionModel(nn.Module):
    """One question's tokens, low-rank changes of the layers, and answers; ``base`` never changes.

    ``answers``: tokens of the choices, then that of none. ``begin``: token whose embedding it begins with.
    """

    def __init__(
        self, base: TapeModel, answers: Sequence[int], begin: int, *, tokens: int, rank: int, seed: int
    ) -> None:
        super().__init__()
        self._base = [base.requires_grad_(False)]  # in a list: no parameter of ours
        generator = torch.Generator().manual_seed(seed)
        words, width = base.embed_tokens, base.shape.hidden
        noise = torch.randn(tokens, width, generator=generator) * 0.02
        self.token = nn.Parameter(words[begin].repeat(tokens, 1) + noise)
        self.answers = nn.Parameter(words[list(answers)].clone())
        self.margin = nn.Parameter(torch.zeros(width))
        self.a, self.b = nn.ParameterDict(), nn.ParameterDict()
        for number, layer in enumerate(base.layers):
            for name in MATRICES:
                outputs, inputs = getattr(layer, name).shape
                low = torch.randn(rank, inputs, generator=generator) / inputs**0.5
                self.a[f"{number}-{name}"] = nn.Parameter(low)
                self.b[f"{number}-{name}"] = nn.Parameter(torch.zeros(outputs, rank))

    @property
    def base(self) -> TapeModel:
        """The frozen model."""
        return self._base[0]

    def forward(self, tapes: ReadTapes, cuts: Ints) -> tuple[Tensor, Tensor]:
        """Logits [tapes, cuts, answers] and compressed margins [tapes, cuts] behind bars ``cuts``.

        ``cuts`` [tapes, cuts]: the last bar shown, of each tape its own.
        """
        tokens, (count, rows) = len(self.token), cuts.shape
        angles, bias = _angles(self.base, tapes, cuts, tokens), _bias(tapes, cuts, tokens)
        x = self.token.repeat(rows, 1).expand(count, -1, -1)
        for number, (layer, kv) in enumerate(zip(self.base.layers, tapes.kv, strict=True)):
            x = self._layer(number, layer, x, kv, angles, bias, tapes.prefix)
        x = norm(x[:, tokens - 1 :: tokens], self.base.norm)
        return functional.linear(x, self.answers), (x * self.margin).sum(-1)

    def _matrix(self, number: int, layer: Any, name: str) -> Tensor:
        key = f"{number}-{name}"
        merged: Tensor = getattr(layer, name) + self.b[key] @ self.a[key]
        return merged

    def _layer(
        self,
        number: int,
        layer: Any,
        x: Tensor,
        kv: tuple[Tensor, Tensor],
        angles: Any,
        bias: Any,
        prefix: int,
    ) -> Tensor:
        q_proj, o_proj, gate, up, down = (self._matrix(number, layer, name) for name in MATRICES)
        h = norm(x, layer.input_layernorm)
        q, k, v = (self._heads(functional.linear(h, w)) for w in (q_proj, layer.k_proj, layer.v_proj))
        stream, local = angles
        near = rotate(q, stream)
        keys, values = kv
        scores = (
            rotate(q, local) @ keys[:, :, :prefix].transpose(-1, -2),
            near @ keys[:, :, prefix:].transpose(-1, -2) + bias[0],
            near @ rotate(k, stream).transpose(-1, -2) + bias[1],
        )
        weights = torch.softmax(torch.cat(scores, -1) * self.base.shape.head**-0.5, -1)
        attended = weights @ torch.cat((values, v), 2)
        x = x + functional.linear(attended.transpose(1, 2).flatten(2), o_proj)
        h = norm(x, layer.post_attention_layernorm)
        return x + functional.linear(
            functional.silu(functional.linear(h, gate)) * functional.linear(h, up), down
        )

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.base.shape.head).transpose(1, 2)

    def tensors(self) -> dict[str, Array]:
        """As a pack has them."""
        found = {TOKEN: self.token, ANSWERS: self.answers}
        for key in self.a:
            number, name = key.split("-")
            room = "mlp" if name.split("_")[0] in ("gate", "up", "down") else "self_attn"
            for which, each in (("a", self.a[key]), ("b", self.b[key])):
                found[f"model.layers.{number}.{room}.{name}.{which}"] = each
        return {name: each.detach().float().contiguous().numpy() for name, each in found.items()}


def _angles(base: TapeModel, tapes: ReadTapes, cuts: Ints, tokens: int) -> Any:
    """Cosines and sines [tapes, 1, rows, head] of stream and of local positions."""
    stream = tapes.prefix + (cuts[:, :, None] + 1) * BAR_TOKENS + np.arange(tokens)
    evicted = BAR_TOKENS * np.maximum(cuts - tapes.window + 1, 0)[:, :, None]
    found = []
    for positions in (stream, stream - evicted):
        flat = torch.from_numpy(positions.reshape(len(cuts), 1, -1)).float()
        angles = flat[..., None] * base.inverse
        angles = torch.cat((angles, angles), -1)
        found.append((angles.cos(), angles.sin()))
    return found


def _bias(tapes: ReadTapes, cuts: Ints, tokens: int) -> tuple[Tensor, Tensor]:
    """0 where a row sees a key, else minus infinity: [tapes, 1, rows, bars' tokens], and [rows, rows]."""
    bar = np.arange(tapes.bars)
    age = cuts[:, :, None] - bar
    seen = np.repeat(np.repeat((age >= 0) & (age < tapes.window), BAR_TOKENS, 2), tokens, 1)
    row = np.arange(cuts.shape[1] * tokens)
    own = (row[:, None] // tokens == row // tokens) & (row[:, None] >= row)
    tape, question = (
        torch.zeros(each.shape).masked_fill_(~torch.from_numpy(each), float("-inf")) for each in (seen, own)
    )
    return tape[:, None], question
