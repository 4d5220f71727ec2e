"""Teaches the tape model a question: labelled tapes, and training of what is the question's own.

The frozen model reads each tape once, in a thread of its own, ahead of the steps; tapes are kept for a while,
and each step asks behind some of their bars. Every answer has about the same say: bars are drawn by their
answers, and those of an answer too rare for that weigh more; not of what comes next, where how often each
comes is part of what there is to know. Steps are counted, so that equal seeds make
equal packs; fewer are planned where the machine would not end in time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional

from tapes.rules import RULES, UNDEFINED, Flags, Floats, Ints, Labels, Levels, Rule
from training.batches import Vocabulary, compress
from training.model import TapeModel
from training.question_model import QuestionModel, ReadTapes, read_tapes
from training.sources import Asked, Drawn, Read, Setting, Source

_UNDEFINED_SHARE = 0.15
"""The say of bars without a right answer; the choices share the rest."""
_WEIGHTS = 0.2, 8.0
"""Least and largest of an answer in the loss."""
_MARGIN_WEIGHT, _LARGEST_MARGIN = 0.5, 6
_FIRST, _PACE = 4, 20
"""Steps by which the time of the others is guessed: from the one up to the other."""
_FEWEST = 10


@dataclass(frozen=True)
class Plan:
    """``seconds``: within which training ends. Tapes of the newest ``kept`` batches are asked again.

    Each step asks at ``cuts`` bars of each tape of a batch; every ``fresh``-th step reads a batch of tapes.
    Over the last ``cooldown`` of the steps, a share, the rate falls to nothing.
    """

    steps: int = 4000
    seconds: float = 400.0
    seed: int = 0
    tokens: int = 1
    rank: int = 16
    cuts: int = 16
    fresh: int = 4
    kept: int = 32
    rate: float = 3e-3
    cooldown: float = 0.5
    warm: int = 20


class Progress(NamedTuple):
    """A step that is done, of how many, and the running mean of the loss."""

    step: int
    steps: int
    loss: float


class _Lesson(NamedTuple):
    """Tapes as the model has read them, with labels, and from which bar on they are asked."""

    tapes: ReadTapes
    labels: Labels
    first: int


@dataclass
class Balance:
    """How often each answer comes, NONE last: running means. ``wanted``: the say that each shall have.

    ``as_found``: that is how often it comes.
    """

    wanted: Floats
    found: Floats
    """Among all bars."""
    drawn: Floats
    """Among those that are asked."""
    as_found: bool = False

    @classmethod
    def of(cls, choices: int, *, as_found: bool = False) -> Balance:
        """Before anything was counted; NONE comes last."""
        wanted = np.append(np.full(choices, (1 - _UNDEFINED_SHARE) / choices), _UNDEFINED_SHARE)
        return cls(wanted, np.full(choices + 1, 1 / (choices + 1)), wanted.copy(), as_found)

    def odds(self, answers: Ints) -> Floats:
        """By which one bar of each answer is drawn; ``answers`` [bars] are counted."""
        self.found += 0.1 * (self._shares(answers) - self.found)
        odds: Floats = self.wanted / np.maximum(self.found, 0.005)
        return np.ones_like(odds) if self.as_found else odds

    def weights(self, answers: Ints) -> Floats:
        """Of each answer in the loss; ``answers`` [asked] are counted."""
        self.drawn += 0.05 * (self._shares(answers) - self.drawn)
        weights: Floats = np.clip(self.wanted / np.maximum(self.drawn, 0.01), *_WEIGHTS)
        return np.ones_like(weights) if self.as_found else weights

    def _shares(self, answers: Ints) -> Floats:
        shares: Floats = np.bincount(answers, minlength=len(self.wanted)) / len(answers)
        return shares


@dataclass
class Teacher:
    """Trains one question. ``sources``: of tapes, each with how often it is drawn.

    ``reader``: the model as it reads tapes, perhaps in another dtype. ``asks_none``: NONE is the answer where
    there is no label; else it is not asked there.
    """

    plan: Plan
    model: QuestionModel
    reader: TapeModel
    rule: Rule
    sources: Sequence[tuple[Source, float]]
    vocabulary: Vocabulary
    window: int
    asks_none: bool = True
    _kept: list[_Lesson] = field(default_factory=list)

    def steps(self) -> Iterator[Progress]:
        """Train. Raises ValueError where no bar of the first tapes has a label."""
        plan, rng = self.plan, np.random.default_rng([self.plan.seed, 77])
        optimiser = torch.optim.AdamW(
            self.model.parameters(), lr=plan.rate, betas=(0.9, 0.98), weight_decay=0.0
        )
        balance = Balance.of(len(self.rule.choices), as_found=self.rule.horizon > 0)
        began, steps, mean = time.monotonic(), plan.steps, 0.0
        lessons = _ahead(self._lessons(np.random.default_rng([plan.seed, 78])))
        step = 0
        while step < steps:
            if step == _FIRST:
                began = time.monotonic()
            if step == _PACE:
                steps = _planned(plan, (time.monotonic() - began) / (_PACE - _FIRST))
            if step % plan.fresh == 0:
                lesson = next(lessons)
                self._kept = [*self._kept[-plan.kept + 1 :], lesson]
            else:
                lesson = self._kept[rng.integers(len(self._kept))]
            loss = self._loss(lesson, rng, balance)
            if loss is not None:
                for group in optimiser.param_groups:
                    group["lr"] = plan.rate * _rate(step, steps, plan)
                optimiser.zero_grad(set_to_none=True)
                loss.backward()  # type: ignore[no-untyped-call]  # torch's own backward has no annotation
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                optimiser.step()
                mean += (0.05 if mean else 1.0) * (float(loss.detach()) - mean)
            step += 1
            yield Progress(step, steps, mean)

    def _loss(self, lesson: _Lesson, rng: np.random.Generator, balance: Balance) -> torch.Tensor | None:
        """Of one step; None where its tapes have nothing to ask."""
        value, margin = lesson.labels.value[:, lesson.first :], lesson.labels.margin[:, lesson.first :]
        target = np.where(value == UNDEFINED, len(self.rule.choices), value).astype(np.int64)
        allowed = (value != UNDEFINED) | self.asks_none
        if not allowed.any():
            return None
        odds = balance.odds(target[allowed])[target] * allowed
        cuts = drawn_cuts(rng, odds, self.plan.cuts)
        asked, goal = np.take_along_axis(allowed, cuts, 1), np.take_along_axis(target, cuts, 1)
        weight = torch.from_numpy((balance.weights(goal[asked])[goal] * asked).astype(np.float32))
        logits, found = self.model(lesson.tapes, cuts + lesson.first)
        entropy = functional.cross_entropy(
            logits.flatten(0, 1), torch.from_numpy(goal.flatten()), reduction="none"
        )
        loss: torch.Tensor = (entropy.view(goal.shape) * weight).sum() / weight.sum().clamp(min=1)
        far = torch.from_numpy(compress(np.take_along_axis(margin, cuts, 1), _LARGEST_MARGIN))
        known = weight * torch.from_numpy(np.take_along_axis(value != UNDEFINED, cuts, 1)) * (far != 0)
        apart = functional.smooth_l1_loss(found, far, reduction="none", beta=0.3)
        return loss + _MARGIN_WEIGHT * (apart * known).sum() / known.sum().clamp(min=1)

    def _lessons(self, rng: np.random.Generator) -> Iterator[_Lesson]:
        """Fresh tapes without end: whole windows, ones that slide, and short ones."""
        settings = [(2 * self.window, self.window, 0.5)]
        if not self.rule.horizon:  # else the anchor is chosen by the first window
            settings.append((self.window, self.window, 0.35))
        if not self.rule.horizon and self.rule.bars <= self.window // 2:
            settings.append((self.window // 2, self.window // 2, 0.15))
        ways = [
            (_again(source, self.vocabulary, bars, window), bars, window, often * share)
            for source, often in self.sources
            for bars, window, share in settings
        ]
        odds = np.array([each[-1] for each in ways])
        while True:
            tapes, bars, window, _ = ways[rng.choice(len(ways), p=odds / odds.sum())]
            drawn = next(tapes)
            labels = self.rule.label(drawn.levels)
            first = window - 1 if bars > window else min(10, window - 1)
            yield _Lesson(read_tapes(self.reader, self.vocabulary, drawn, window), labels, first)


def _ahead(lessons: Iterator[_Lesson]) -> Iterator[_Lesson]:
    """The same lessons; while one is used, a thread reads the next."""
    with ThreadPoolExecutor(1, "tapes") as reader:
        ready = reader.submit(next, lessons)
        while True:
            lesson, ready = ready.result(), reader.submit(next, lessons)
            yield lesson


def drawn_cuts(rng: np.random.Generator, odds: Floats, count: int) -> Ints:
    """``count`` bars of each tape, at most all, without repeats, by ``odds`` [tapes, bars] (Gumbel top-k)."""
    with np.errstate(divide="ignore"):
        noisy = np.log(odds) + rng.gumbel(size=odds.shape)
    count = min(count, odds.shape[1])
    return np.sort(np.argpartition(-noisy, count - 1, axis=1)[:, :count], axis=1)


def _again(source: Source, vocabulary: Vocabulary, bars: int, window: int) -> Iterator[Drawn]:
    """A source's tapes, again and again. Raises ValueError for one without any."""
    while True:
        drawn = None
        for drawn in source.batches(vocabulary, bars, window):
            yield drawn
        if drawn is None:
            raise ValueError(f"the tape is too short: it has no {bars} bars to learn from")


def _planned(plan: Plan, seconds: float) -> int:
    """Steps that fit, in whole tens."""
    fitting = int(plan.seconds / max(seconds, 1e-9)) // _FEWEST * _FEWEST
    return min(plan.steps, max(fitting, _FEWEST))


def _rate(step: int, steps: int, plan: Plan) -> float:
    """Share of the full rate: warm-up, constant, then a linear fall."""
    return min(1.0, (step + 1) / plan.warm, max(0.01, (steps - step) / max(plan.cooldown * steps, 1)))


def closest(rule: Rule, levels: Levels) -> int:
    """The model's own question whose answers say most of those to ``rule``: where teaching begins."""
    mine = rule.label(levels)
    best = [_agreement(mine, each.label(levels)) for each in RULES]
    return int(np.argmax(best))


def _agreement(one: Labels, other: Labels) -> float:
    """Correlation, without its sign, of which choice is right where both are defined; 0 without one."""
    both: Flags = (one.value != UNDEFINED) & (other.value != UNDEFINED)
    a, b = one.value[both].astype(float), other.value[both].astype(float)
    if len(a) < 2 or not a.std() or not b.std():
        return 0.0
    return abs(float(np.corrcoef(a, b)[0, 1]))


@dataclass(frozen=True)
class Taught:
    """The taught question as a `Reader`: by its own rows, as a daemon's fork asks them."""

    model: QuestionModel
    asked: Asked
    vocabulary: Vocabulary
    cuts: int = 32
    lines: str = field(default="compact", init=False)

    def read(
        self, drawn: Drawn, setting: Setting, cuts: Ints, wanted: Ints, rng: np.random.Generator
    ) -> Iterator[Read]:
        """See `Reader`."""
        tapes = read_tapes(self.model.base, self.vocabulary, drawn, setting.window)
        at = np.tile(cuts, (len(drawn.name), 1))
        with torch.no_grad():
            logits = self.model(tapes, at)[0].double().numpy()
        tape = np.repeat(np.arange(len(at)), at.shape[1])
        yield Read(0, tape, at.reshape(-1), logits.reshape(len(tape), -1))
