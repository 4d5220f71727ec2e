"""Training of the tape model on generated tapes: seeded, resumable, steps counted rather than seconds."""

import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed
from torch.nn import functional

from tapes.generate import TRAINING
from tapes.rules import UNDEFINED
from training.batches import Batch, Layout, Vocabulary, compress, make_batch
from training.model import Optimiser, Shape, TapeModel, initialise_numbers
from training.tokenizer import QUESTIONS

_EXACT = len(QUESTIONS) - 1
_UNDEFINED_WEIGHT = 0.3
_MEASURES_WEIGHT = 5.0
_ASKED_WEIGHT = 1.0
_FIRST, _FIRST_WEIGHT = 5, 3.0
"""The paper's five, which are the embedded default's standing questions, weigh more than the others."""
_LAYOUT = 1 << 20
"""Stream of the layouts; those of the batches are the workers' numbers."""


@dataclass(frozen=True)
class Plan:
    """A training run. Over the last ``cooldown`` of its ``steps`` the rate falls to nothing."""

    steps: int
    cooldown: int
    short: int
    """Steps at the beginning with windows of 32 bars only."""
    seed: int = 0
    tokens: int = 8192
    """Tokens in a step."""
    warm: int = 100


def layout_of(rng: np.random.Generator, step: int, plan: Plan) -> Layout:
    """The layout of a step's batch: window, fresh or sliding, terse or numbered questions."""
    window = 32 if step < plan.short else int(rng.choice((32, 48, 64), p=(0.15, 0.1, 0.75)))
    bars = window * 2 if rng.random() < 0.55 else window
    numbered = bool(rng.random() < (0.1 if step < plan.short else 0.4))
    cuts = 8
    auxiliary = 0 if numbered else 8 if step < plan.short else 4
    rows = cuts * ((2 * len(QUESTIONS) * 0.7) if numbered else len(QUESTIONS) + 1 + auxiliary)
    prefix = 12 + (40 if numbered else 0)
    tapes = max(2, round(plan.tokens / (prefix + 6 * bars + rows)))
    return Layout(window, bars, cuts, tapes, auxiliary, numbered)


class Balance:
    """Weights that give every answer of a question the same say; a running mean of their frequency."""

    def __init__(self) -> None:
        self.frequency = np.full((len(QUESTIONS), 4), 0.33)

    def weights(self, kind: Any, value: Any) -> Any:
        """Weights [tapes, queries] of answers ``value`` to ``kind``; those of other rows are 1."""
        out = np.ones(kind.shape, np.float32)
        for question in range(_EXACT):
            rows = kind == question
            if not rows.any():
                continue
            answers = value[rows]
            counts = np.array([(answers == v).mean() for v in (0, 1, 2, UNDEFINED)])
            self.frequency[question] = 0.98 * self.frequency[question] + 0.02 * counts
            share = np.clip(self.frequency[question], 0.04, 1.0)
            weight = 1 / share[answers]
            weight[answers == UNDEFINED] *= _UNDEFINED_WEIGHT
            known = answers != UNDEFINED
            out[rows] = weight * answers.size / max(weight[known].sum(), 1e-6) * known.mean()
        return out


def loss_of(model: TapeModel, batch: Batch, vocabulary: Vocabulary, balance: Balance) -> tuple[Tensor, Any]:
    """The loss, and the plain cross entropy [tapes, queries] for the log."""
    out = model(batch)
    q = batch.queries
    kind, value = q.kind, q.value
    target = torch.from_numpy(q.target)
    entropy = functional.cross_entropy(out.logits.flatten(0, 1), target.flatten(), reduction="none").view(
        target.shape
    )
    main = kind < _EXACT
    auxiliary = (kind > _EXACT) & (q.target != vocabulary.end)
    weight = balance.weights(kind, value)
    weight = np.where(kind == _EXACT, 0.5, np.where(auxiliary, 0.1, np.where(main, weight, 0.05)))
    weight = weight * np.where(kind < _FIRST, _FIRST_WEIGHT, 1.0)
    loss = (entropy * torch.from_numpy(weight.astype(np.float32))).sum() / max(int(main.sum()), 1)
    defined = torch.from_numpy(main & (value != UNDEFINED))
    wanted = torch.from_numpy(compress(q.margin, 6))
    loss = loss + 0.5 * _distance(out.margin, wanted, defined)
    measures = (torch.from_numpy(each).expand_as(out.measures) for each in batch.measures)
    loss = loss + _MEASURES_WEIGHT * _distance(out.measures, *measures)
    if len(batch.listed):
        numbers = torch.arange(len(batch.listed))
        asked = _kind_loss(out.asked, torch.from_numpy(kind)) + _kind_loss(out.listed, numbers)
        loss = loss + _ASKED_WEIGHT * (asked - out.pointing.mean())
    return loss, entropy.detach().numpy()


def _distance(found: Tensor, wanted: Tensor, known: Tensor) -> Tensor:
    """Mean smooth distance of ``found`` to ``wanted`` where that is ``known``."""
    each = functional.smooth_l1_loss(found, wanted, reduction="none", beta=0.3)
    return (each * known).sum() / known.sum().clamp(min=1)


def _kind_loss(found: Tensor, kind: Tensor) -> Tensor:
    """Mean cross entropy of ``found`` [..., classes] with ``kind``, which broadcasts to [...]."""
    return functional.cross_entropy(found.flatten(0, -2), kind.expand(found.shape[:-1]).flatten())


def rate(step: int, plan: Plan) -> float:
    """Share of the full rate: warm-up, constant, then a linear fall."""
    return min(1.0, (step + 1) / plan.warm, max(0.01, (plan.steps - step) / max(plan.cooldown, 1)))


def save(path: Path, model: TapeModel, optimiser: Optimiser, step: int, balance: Balance, plan: Plan) -> None:
    """Write a checkpoint, whole or not at all."""
    state = {
        "model": model.state_dict(), "optimiser": optimiser.state(), "step": step,
        "frequency": balance.frequency.tolist(), "shape": asdict(model.shape), "plan": asdict(plan),
    }  # fmt: skip
    building = path.with_suffix(".part")
    torch.save(state, building)
    os.replace(building, path)


def load(path: Path) -> tuple[TapeModel, dict[str, Any]]:
    """The model of a checkpoint, and all of the checkpoint."""
    state = torch.load(path, weights_only=True)
    model = TapeModel(Shape(**state["shape"]))
    model.load_state_dict(state["model"])
    return model, state


def average_gradients(model: TapeModel) -> None:
    """Average the gradients of all workers."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    distributed.all_reduce(flat)
    flat /= distributed.get_world_size()
    for gradient, part in zip(gradients, torch.split(flat, [g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def train(
    plan: Plan, directory: Path, shape: Shape, resume: Path | None = None, worker: int = 0, workers: int = 1
) -> Iterator[dict[str, Any]]:
    """Run the plan from its beginning or from a checkpoint; yields the log.

    Checkpoints: `last.pt` every 100 steps, `stable.pt` when the cooldown begins. With several ``workers``
    each is a process of `torch.distributed`; the first one writes.
    """
    vocabulary, balance = Vocabulary(), Balance()
    step = 0
    if resume:
        model, state = load(resume)
        optimiser = Optimiser(model)
        optimiser.load(state["optimiser"])
        balance.frequency, step = np.array(state["frequency"]), state["step"]
    else:
        model = TapeModel(shape, plan.seed)
        initialise_numbers(model, vocabulary.numbers, plan.seed)
        optimiser = Optimiser(model)
    began, tokens = time.monotonic(), 0
    smooth: dict[str, float] = {}
    while step < plan.steps:
        layout = layout_of(np.random.default_rng([plan.seed, step, _LAYOUT]), step, plan)
        batch = make_batch(np.random.default_rng([plan.seed, step, worker]), vocabulary, layout, TRAINING)
        loss, entropy = loss_of(model, batch, vocabulary, balance)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own backward has no annotation
        if workers > 1:
            average_gradients(model)
        optimiser.step(rate(step, plan))
        step += 1
        tokens += batch.ids.size * workers
        for i, name in enumerate(QUESTIONS):
            rows = (batch.queries.kind == i) & (batch.queries.value != UNDEFINED)
            if rows.any():
                smooth[name] = 0.98 * smooth.get(name, 1.0) + 0.02 * float(entropy[rows].mean())
        if worker:
            continue
        if step == plan.steps - plan.cooldown:
            save(directory / "stable.pt", model, optimiser, step, balance, plan)
        if step % 100 == 0 or step == plan.steps:
            save(directory / "last.pt", model, optimiser, step, balance, plan)
            yield {"step": step, "seconds": round(time.monotonic() - began), "tokens": tokens, "loss": smooth}
