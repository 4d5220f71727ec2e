"""A released language model that learns to read tapes: LoRA beside its frozen matrices.

Heads that training alone uses read the margins of all rules, and what they are made of, off each bar's last
token: a tape costs much, and questions behind a few of its bars teach little for it (`training.model`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.model.architectures import ModelError
from engine.model.lora import Adapter
from engine.model.plain import is_plain, linears_of
from training.model import MEASURES
from training.prompt_pack import ATTENTION, Pack


class Lora(nn.Module):
    """A frozen linear layer and ``scale`` B A beside its matrix; B begins as zeros."""

    def __init__(self, base: nn.Linear, rank: int, scale: float, generator: torch.Generator) -> None:
        super().__init__()
        self.base, self.scale, self.on = base, scale, True
        drawn = torch.rand(rank, base.in_features, generator=generator) * 2 - 1
        self.a = nn.Parameter(drawn / base.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] to [..., outputs]."""
        found: Tensor = self.base(x)
        if not self.on:
            return found
        low = functional.linear(x, self.a.to(x.dtype)).flatten(0, -2)
        added = torch.addmm(found.flatten(0, -2), low, self.b.to(x.dtype).T, alpha=self.scale)
        return added.view_as(found)


class TunedModel(nn.Module):
    """``model``: transformers', plain; its matrices are frozen, and those of its last ``upper`` layers get a
    `Lora` each (0: of all). Nothing is computed backward below these.

    Raises ModelError for a model that is no plain decoder.
    """

    def __init__(self, model: Any, *, rank: int, scale: float, seed: int, upper: int = 0) -> None:
        super().__init__()
        if not is_plain(model):
            raise ModelError(f"only plain decoders are trained, and {model.config.model_type} is none")
        self.model = model.requires_grad_(False)
        generator = torch.Generator().manual_seed(seed)
        named = {id(module): name for name, module in model.named_modules()}
        self.loras: dict[str, Lora] = {}
        count = len(model.model.layers)
        first = max(count - (upper or count), 0)
        for layer in model.model.layers[first:]:
            for linear in linears_of(layer):
                name = named[id(linear)]
                self.loras[name] = Lora(linear, rank, scale, generator)
                model.set_submodule(name, self.loras[name])
        self.measured = sorted({max(each, first) for each in (count // 2, 2 * count // 3, 5 * count // 6)})
        self.measures = nn.Parameter(torch.zeros(len(self.measured), MEASURES, model.config.hidden_size))
        model.set_attn_implementation(ATTENTION)

    @property
    def dtype(self) -> torch.dtype:
        """Of the frozen weights, and of what is computed."""
        found: torch.dtype = self.model.dtype
        return found

    def learnt(self) -> dict[str, nn.Parameter]:
        """The parameters that training changes, by name."""
        found = {
            f"{name}.{which}": getattr(each, which) for name, each in self.loras.items() for which in "ab"
        }
        return {**found, "measures": self.measures}

    def forward(self, pack: Pack, rows: Tensor, bars: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Logits [rows, vocabulary], float32; and the measures [layers, bars, measures] of rows ``bars``."""
        states: list[Tensor] = []
        layers = self.model.model.layers

        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            found = output[0] if isinstance(output, tuple) else output
            states.append(functional.rms_norm(found[0, bars].float(), found.shape[-1:]))

        hooks = [] if bars is None else [layers[n].register_forward_hook(keep) for n in self.measured]
        try:
            last = self.model.model(
                input_ids=pack.ids[None], position_ids=pack.positions[None], use_cache=False, pack=pack
            ).last_hidden_state
        finally:
            for hook in hooks:
                hook.remove()
        logits = self.model.lm_head(last[0, rows]).float()
        read = torch.einsum("lbh,lmh->lbm", torch.stack(states), self.measures) if states else None
        return logits, read

    @contextmanager
    def untuned(self) -> Iterator[None]:
        """The model as it was."""
        try:
            for each in self.loras.values():
                each.on = False
            yield
        finally:
            for each in self.loras.values():
                each.on = True

    def adapter(self, directory: Path, base: str) -> Adapter:
        """What was learnt, for ``directory``; ``base``: revision of the model."""
        one = next(iter(self.loras.values()))
        matrices = {name: (each.a.detach(), each.b.detach()) for name, each in self.loras.items()}
        return Adapter(directory, one.scale, matrices, base)
