"""Training of a released language model on generated tapes: seeded, resumable, and held to how it talked.

It first only reads: each bar teaches all margins, so gradients are steady enough for a high rate. Then
it is asked: a step has some twenty answers of about one bit each, and takes a low one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from math import isnan
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from engine.model.architectures import ModelError
from engine.model.terse import Lines
from tapes.generate import TRAINING
from tapes.rules import Ints
from training.prompt_pack import pack
from training.sources import TAPES, Drawn, Generated, Read, Setting
from training.tape_prompts import Balance, Prompts, TapePrompts
from training.train import Plan, rate
from training.tuned_model import TunedModel

_SEEDS = 7_000
"""Of the tapes; evaluation's seeds are small numbers."""
_LATER = 0.1
"""Weight of a choice's tokens behind the first, by which an answer is judged."""
_DIGITS = 0.4
"""Weight of each token of a number."""
_MEASURES_WEIGHT = 2.0
_READING_RATE = 1e-3
"""The first rate, which falls to that of answers while it reads: kept up, it forgets how to talk."""


@dataclass(frozen=True)
class TunePlan:
    """A training run. Over the last ``cooldown`` of its ``steps`` the rate falls to nothing."""

    steps: int
    cooldown: int
    seed: int = 0
    reading: int = 0
    """First steps, in which nothing is asked."""
    tokens: int = 8192
    """Tokens in a step, about."""
    window: int = 64
    """Bars of a tape."""
    cuts: int = 4
    """Bars of a tape behind which questions are asked, each from its own part of those with all labels."""
    rank: int = 32
    upper: int = 0
    """Last layers that are trained; 0 is all."""
    lines: Lines = "decimal"
    learning_rate: float = 1.5e-4
    """While it's asked."""
    talk: float = 1.0
    """Weight of the divergence from the model as it was, on its own texts."""
    talk_every: int = 4
    """Steps from one such text to the next, which stands for those between: it costs a third of a step."""
    warm: int = 50
    """First steps, over which the rate rises; at most a tenth of all."""


class Lesson(NamedTuple):
    """What a tape taught. ``entropy`` [branches]: the cross entropy of each answer's first token.

    ``signs`` [bars, questions]: 1 where the last head's margin has the right sign, nan without a label.
    """

    loss: Tensor
    entropy: Tensor
    signs: Tensor


def learn(model: TunedModel, prompts: Prompts, balance: Balance, exact: int) -> Lesson:
    """``exact``: the number of the question whose answer is a number; those before it have margins."""
    found = prompts.pack
    logits, read = model(found, found.rows, torch.from_numpy(prompts.bars))
    assert read is not None, "bars were given"
    wanted, known = (torch.from_numpy(each) for each in prompts.measures)
    apart = functional.smooth_l1_loss(read, wanted.expand_as(read), reduction="none", beta=0.3)
    loss = _MEASURES_WEIGHT * (apart * known).sum() / (known.sum().clamp(min=1) * len(read))
    right = (read[-1].detach().sign() == wanted[0].sign()).float()
    signs = torch.where(known[0], right, torch.nan)[:, :exact]
    if not prompts.queries:
        return Lesson(loss, torch.zeros(0), signs)
    entropy = functional.cross_entropy(logits, found.targets, reduction="none")
    first = torch.ones_like(found.branch, dtype=torch.bool)
    first[1:] = found.branch[1:] != found.branch[:-1]
    is_number = torch.tensor([each.question == exact for each in prompts.queries])[found.branch]
    weight = torch.from_numpy(balance.weights(prompts.queries))[found.branch]
    weight = torch.where(is_number, _DIGITS, torch.where(first, weight, _LATER))
    return Lesson(loss + (entropy * weight).sum() / len(prompts.queries), entropy.detach()[first], signs)


def divergence(model: TunedModel, tokens: Sequence[int]) -> Tensor:
    """Mean KL divergence of the model from itself as it was, over a text, in nats a token."""
    text, rows = pack(tokens), torch.arange(len(tokens))
    with torch.no_grad(), model.untuned():
        before = functional.log_softmax(model(text, rows)[0], -1)
    after = functional.log_softmax(model(text, rows)[0], -1)
    return functional.kl_div(after, before, reduction="batchmean", log_target=True)


@torch.no_grad()
def nats(model: TunedModel, texts: Sequence[Sequence[int]]) -> float:
    """Mean cross entropy of texts; its exponential is the perplexity."""
    total, count = 0.0, 0
    for tokens in texts:
        logits = model(pack(tokens), torch.arange(len(tokens) - 1))[0]
        total += float(functional.cross_entropy(logits, torch.tensor(tokens[1:]), reduction="sum"))
        count += len(tokens) - 1
    return total / count


@torch.no_grad()
def own_texts(model: Any, begin: Sequence[int], seed: int, count: int, tokens: int) -> list[list[int]]:
    """What ``model``, transformers', says of itself behind ``begin``: its users' part first, then its own.

    Sampled at temperature 1, so that these are texts of the distribution to be kept (as in Magpie,
    arXiv 2406.08464). End tokens end nothing.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.tensor([list(begin)]).expand(count, -1)
    said, cache = [ids], None
    while sum(each.shape[1] for each in said) < tokens:
        output = model(input_ids=said[-1], past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        said.append(torch.multinomial(output.logits[:, -1].float().softmax(-1), 1, generator=generator))
    found: list[list[int]] = torch.cat(said, 1).tolist()
    return found


class Run:
    """A run: the model, its optimiser, and where it stands."""

    def __init__(
        self, model: TunedModel, prompts: TapePrompts, plan: TunePlan, texts: list[list[int]], base: str
    ) -> None:
        self.model, self.prompts, self.plan, self.texts, self.base = model, prompts, plan, texts, base
        self.balance, self.step, self.apart = Balance(len(prompts.asked.names)), 0, 0.0
        self._batch: tuple[int, Drawn] | None = None
        self._schedule = Plan(plan.steps, plan.cooldown, 0, warm=max(1, min(plan.warm, plan.steps // 10)))
        self.optimiser = torch.optim.AdamW(
            model.learnt().values(), lr=plan.learning_rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True
        )
        self.first = self._prompts(0)
        self.tapes = max(1, round(plan.tokens / len(self.first.pack.ids)))

    def drawn(self, number: int) -> tuple[Drawn, int, list[int]]:
        """The tape of this number: the batch that it is in, its place there, and the bars to ask behind."""
        plan, (batch, place) = self.plan, divmod(number, TAPES)
        if self._batch is None or self._batch[0] != batch:
            source = Generated(_SEEDS + plan.seed, TRAINING)
            self._batch = batch, source.batch(self.prompts.vocabulary, plan.window, plan.window, batch)
        rng = np.random.default_rng([plan.seed, number])
        first = max(rule.bars for rule in self.prompts.asked.rules) - 1
        parts = np.array_split(np.arange(first, plan.window), plan.cuts)
        cuts = [int(rng.choice(part)) for part in parts if len(part)]
        return self._batch[1], place, cuts

    def _prompts(self, number: int, reads: bool = False) -> Prompts:
        return self.prompts.of(*self.drawn(number), range(0 if reads else len(self.prompts.asked.names)))

    def _rate(self) -> float:
        last, reading = self.plan.learning_rate, self.plan.reading
        share = max(1 - self.step / reading, 0.0) if reading else 0.0
        return (last + max(_READING_RATE - last, 0.0) * share) * rate(self.step, self._schedule)

    def advance(self) -> dict[str, Any]:
        """One step; returns tokens, divergence, and by question the entropy and the share of right signs."""
        exact, names = len(self.prompts.asked.rules), self.prompts.asked.names
        entropy: dict[str, list[float]] = {}
        signs: list[Tensor] = []
        tokens = 0
        for number in range(self.tapes):
            prompts = self._prompts(self.step * self.tapes + number, self.step < self.plan.reading)
            lesson = learn(self.model, prompts, self.balance, exact)
            (lesson.loss / self.tapes).backward()  # type: ignore[no-untyped-call]  # torch's has no annotation
            tokens += len(prompts.pack.ids)
            signs.append(lesson.signs)
            for query, each in zip(prompts.queries, lesson.entropy.tolist(), strict=True):
                entropy.setdefault(names[query.question], []).append(each)
        every = self.plan.talk_every
        if self.step % every == 0:
            text = self.texts[self.step // every % len(self.texts)]
            apart = divergence(self.model, text)
            (self.plan.talk * every * apart).backward()  # type: ignore[no-untyped-call]
            self.apart = float(apart.detach())
            tokens += 2 * len(text)
        torch.nn.utils.clip_grad_norm_(self.model.learnt().values(), 1.0)
        for group in self.optimiser.param_groups:
            group["lr"] = self._rate()
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.step += 1
        means = {name: float(np.mean(each)) for name, each in entropy.items()}
        right = torch.cat(signs).nanmean(0).tolist()
        shares = {name: each for name, each in zip(names[:exact], right, strict=True) if not isnan(each)}
        return {"tokens": tokens, "entropy": means, "divergence": self.apart, "signs": shares}

    def train(self) -> Iterator[dict[str, Any]]:
        """Take all steps that are left; yields the log of each."""
        began, tokens = time.monotonic(), 0
        while self.step < self.plan.steps:
            log = self.advance()
            tokens += log["tokens"]
            yield {**log, "step": self.step, "tokens": tokens, "seconds": time.monotonic() - began}

    def save(self, path: Path) -> None:
        """Write a checkpoint, whole or not at all."""
        learnt = {name: each.detach() for name, each in self.model.learnt().items()}
        state = {
            "learnt": learnt, "optimiser": self.optimiser.state_dict(), "step": self.step, "base": self.base,
            "frequency": self.balance.frequency.tolist(), "plan": asdict(self.plan), "texts": self.texts,
            "apart": self.apart,
        }  # fmt: skip
        building = path.with_suffix(".part")
        torch.save(state, building)
        os.replace(building, path)

    @torch.no_grad()
    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `save` wrote. Raises ModelError where it is of another model or rank."""
        if state["base"] != self.base:
            raise ModelError(f"the checkpoint is of model {state['base']}, and this one is {self.base}")
        for name in ("rank", "upper", "lines"):
            if (found := state["plan"][name]) != (wanted := getattr(self.plan, name)):
                raise ModelError(f"the checkpoint has {name} {found}, not {wanted}")
        for name, each in self.model.learnt().items():
            each.copy_(state["learnt"][name])
        self.optimiser.load_state_dict(state["optimiser"])
        self.balance.frequency = np.array(state["frequency"])
        self.step, self.apart = state["step"], state["apart"]


@dataclass(frozen=True)
class TunedReader:
    """The model in training as a reader of tapes: a tape is read once for all questions at all its bars.

    It reads fresh windows only, as `Served` does; questions are asked in words, each by itself.
    """

    model: TunedModel
    prompts: TapePrompts
    none: int
    cuts: int = 8

    @property
    def asked(self) -> Any:
        """See `Reader`."""
        return self.prompts.asked

    @property
    def lines(self) -> str:
        """See `Reader`."""
        return self.prompts.lines

    @torch.no_grad()
    def read(
        self, drawn: Drawn, setting: Setting, cuts: Ints, wanted: Ints, rng: np.random.Generator
    ) -> Iterator[Read]:
        """See `Reader`. Where a question is undefined it is not asked."""
        if setting.numbered or setting.windows != 1:
            raise ModelError("a model in training is asked in fresh windows, and not by number")
        exact = len(self.asked.rules)
        rows: dict[int, list[tuple[int, int, list[float], bool]]] = {each: [] for each in wanted.tolist()}
        for tape in range(len(drawn.levels.close)):
            prompts = self.prompts.of(drawn, tape, cuts.tolist(), wanted.tolist())
            found = prompts.pack
            logits, _ = self.model(found, found.rows)
            right = logits.argmax(-1) == found.targets
            for number, query in enumerate(prompts.queries):
                own = found.branch == number
                if query.question == exact:
                    rows[exact].append((tape, query.bar, [], bool(right[own].all())))
                    continue
                tokens = [each[0] for each in self.prompts.answers[query.question]]
                chosen = logits[own][0, [*tokens, self.none]].tolist()
                rows[query.question].append((tape, query.bar, chosen, False))
        for question, each in rows.items():
            if each:
                tape_of, bar_of = (np.array([row[i] for row in each]) for i in (0, 1))
                logits_of = np.array([row[2] for row in each], np.float64).reshape(len(each), -1)
                said = np.array([row[3] for row in each])
                yield Read(question, tape_of, bar_of, logits_of, said if question == exact else None)
