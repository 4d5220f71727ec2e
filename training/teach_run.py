"""One run of `foretick teach`: a question and its tapes, then a pack with its card, or why there is none."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from engine.model.question_pack import PackHead, QuestionPack, digest_of
from engine.model.revision import revision_of
from engine.model.terse import TAPE_MODEL, Terse, terse_in
from flash.confidence import Calibration, QuestionCalibration
from tapes.generate import EVALUATION, TRAINING, Ranges
from tapes.question_file import QuestionError, check_labels
from training.ahead_card import AheadScores, score_ahead
from training.batches import Vocabulary
from training.calibrate import fit
from training.evaluate import QuestionScores, score
from training.export import is_packed, tape_model
from training.model import TapeModel
from training.question_model import QuestionModel
from training.sources import Answers, Asked, Generated, Recorded, Setting, Source, Stretch, collect, joined
from training.taught_question import TaughtQuestion, read_taught, with_labels
from training.teach import Plan, Progress, Taught, Teacher, closest
from training.teach_ahead import Ahead
from training.teach_card import card, measured_ahead, measured_on, refusal, refusal_ahead

_TRAINED, _FITTED = 0.6, 0.75
"""Until which share of a desk's tape is trained, and calibrated on; the rest is measured on."""
_OWN = 0.3
"""How often a tape of the desk's own is drawn, beside generated ones."""
_LEAST_BARS = 2_000
"""Of a desk's tape."""
_TRIED = 16
"""Batches of tapes on which labels are tried before anything is trained."""
FOLDS = 5
"""Test folds of a question about what comes next."""
_SEEDS = 5_000
"""Seeds of generated tapes: no other command's."""

Advance = Callable[[str, float], None]


class Result(NamedTuple):
    """``why``: it is not good enough; "" where it is."""

    pack: QuestionPack
    card: str
    why: str


@dataclass
class Run:
    """``own``: the desk's tape in three parts of time: to train, to calibrate and to measure on. ``ahead``:
    the tape of a question about what comes next, in its place.
    """

    question: TaughtQuestion
    directory: Path
    terse: Terse
    base: TapeModel
    vocabulary: Vocabulary
    own: tuple[Stretch, Stretch, Stretch] | None
    ahead: Ahead | None
    answers: tuple[int, ...]
    seed: int
    labels: int
    model: QuestionModel
    steps: int = 0
    seconds: float = 0.0

    @classmethod
    def of(
        cls, file: Path, directory: Path | None, tape: tuple[Path, str] | None, seed: int, labels: int
    ) -> Run:
        """Read everything, and try the labels. Raises QuestionError and ExpressionError."""
        directory = directory or TAPE_MODEL
        terse = terse_in(directory) if (directory / "config.json").exists() else None
        if terse is None or not is_packed(directory):
            raise QuestionError(f"{directory} is no tape model, and no other can be taught")
        window, vocabulary = terse.window_bars, Vocabulary()
        question = read_taught(file, window, taped=tape is not None)
        answers = _answers(question, vocabulary, terse.none)
        own, ahead = None, None
        if tape is not None:
            recorded = Recorded(*tape)
            whole = recorded.stretch()
            if len(whole.everything) < _LEAST_BARS:
                few = f"the tape has {len(whole.everything):,} bars, and {_LEAST_BARS:,} are needed"
                raise QuestionError(f"{tape[0]}: {few}: to train, calibrate and measure on")
            if question.labels is not None:
                question = with_labels(question, whole.everything, recorded.symbols())
            if question.rule.horizon:
                ahead = Ahead.of(question.rule, whole, window, _TRAINED, labels)
                score_ahead(ahead.decisions, FOLDS)  # before minutes are spent: are there enough?
            else:
                own = whole.part(0, _TRAINED), whole.part(_TRAINED, _FITTED), whole.part(_FITTED, 1)
        elif question.labels is not None:
            raise QuestionError(f"{file}: its labels are of a recorded file: give --tape and --format")
        source: Source = Generated(_SEEDS + seed, TRAINING)
        if ahead is not None:
            source = ahead.learnt
        elif question.labels is not None and own is not None:
            source = own[0]
        rule = question.rule if ahead is None else ahead.rule
        drawn = [each.levels for each in islice(source.batches(vocabulary, 2 * window, window), _TRIED)]
        check_labels(rule, drawn)
        base = tape_model(directory)
        begin = vocabulary.questions[closest(rule, drawn[0])]
        plan = Plan()
        model = QuestionModel(base, answers, int(begin), tokens=plan.tokens, rank=plan.rank, seed=seed)
        return cls(question, directory, terse, base, vocabulary, own, ahead, answers, seed, labels, model)

    def train(self, steps: int, seconds: float) -> Iterator[Progress]:
        """Train, in at most about ``seconds``."""
        sources: list[tuple[Source, float]] = []
        if self.ahead is not None:
            sources.append((self.ahead.learnt, 1.0))
        elif self.question.labels is None:
            sources.append((Generated(_SEEDS + self.seed, TRAINING), 1 - _OWN))
        if self.own is not None:
            sources.append((self.own[0], _OWN))
        plan = Plan(steps=steps, seconds=seconds, seed=self.seed)
        teacher = Teacher(
            plan,
            self.model,
            tape_model(self.directory, reading_dtype()),
            self.question.rule if self.ahead is None else self.ahead.rule,
            sources,
            self.vocabulary,
            self.terse.window_bars,
            asks_none=self.question.labels is None and self.ahead is None,
        )
        began, done = time.monotonic(), None
        for done in teacher.steps():
            yield done
        self.steps, self.seconds = done.step if done else 0, time.monotonic() - began

    def finished(self, floor: float, advance: Advance) -> Result:
        """Calibrate and measure."""
        if self.ahead is not None:
            return self._finished_ahead(self.ahead, advance)
        rule, by_hand = self.question.rule, self.question.labels is not None
        answers = [found for _, found in self._asked(TRAINING, 1, partial(advance, "calibrating"))]
        fitted = fit(joined(answers), {rule.name: rule.text})
        # of labels by hand, none is no answer
        fitted = [each for each in fitted if not by_hand or each.choices == list(rule.choices)]
        calibration = Calibration(model="", lines="compact", data={}, questions=fitted)
        measured = self._asked(EVALUATION, 2, partial(advance, "measuring"))
        scores = {name: score(each, calibration) for name, found in measured for each in found}
        return self._result(fitted, scores, refusal(scores, floor), measured_on(scores))

    def _finished_ahead(self, ahead: Ahead, advance: Advance) -> Result:
        """The same, walk-forward."""
        reader = Taught(self.model, Asked((self.question.rule,), exact=False), self.vocabulary)
        answered = ahead.answered(reader, partial(advance, "asking in time order"))
        scores = score_ahead(answered, FOLDS)
        fitted = ahead.fitted(answered)
        return self._result(fitted, {"own tape": scores}, refusal_ahead(scores), measured_ahead(scores))

    def _result(
        self,
        fitted: Sequence[QuestionCalibration],
        scores: Mapping[str, QuestionScores | AheadScores],
        why: str,
        measured: Sequence[str],
    ) -> Result:
        """The pack with its card."""
        rule, about, tensors = (
            self.question.rule,
            self._about(calibrated=bool(fitted)),
            self.model.tensors(),
        )
        head = PackHead(
            name=rule.name,
            text=rule.text,
            choices=rule.choices,
            none=self.terse.none,
            answers=self.answers,
            base=revision_of(self.directory),
            lines="compact",
            window_bars=self.terse.window_bars,
            question=self.question.source,
            calibrations=tuple(msgspec.to_builtins(each) for each in fitted),
            card={"about": about, "scores": msgspec.to_builtins(scores), "refused": why},
            digest=digest_of(tensors),
        )
        shown = about | {"took": f"{self.seconds:.0f} s", "revision": head.revision}
        return Result(QuestionPack(head, tensors), card(shown, measured, why), why)

    def _asked(
        self, ranges: Ranges, part: int, advance: Callable[[float], None]
    ) -> Iterator[tuple[str, list[Answers]]]:
        """Answers on held-out tapes, by name: generated ones, and this part of the desk's own."""
        sources: list[tuple[str, Source]] = []
        if self.question.labels is None:
            sources.append(("generated", Generated(_SEEDS * (part + 1) + self.seed, ranges)))
        if self.own is not None:
            sources.append(("own tape", self.own[part]))
        reader = Taught(self.model, Asked((self.question.rule,), exact=False), self.vocabulary)
        most, labels, done = 2 * self.labels // reader.cuts, self.labels // 2, 0.0
        for name, source in sources:
            for windows in (1, 2):
                setting = Setting("terse", windows, self.terse.window_bars)
                found = collect(reader, source, setting, labels, most)
                done += 1 / (2 * len(sources))
                advance(done)
                yield f"{name}, {setting.name.partition(', ')[2]}", found

    def _about(self, *, calibrated: bool) -> dict[str, Any]:
        rule, question = self.question.rule, self.question
        tapes = [] if question.labels is not None or self.ahead is not None else ["generated"]
        tapes += [str(own.described["tape"]) for own in (self.own or ())[:1]]
        tapes += [] if self.ahead is None else [str(self.ahead.learnt.described["tape"])]
        return {
            "name": rule.name,
            "text": rule.text,
            "choices": list(rule.choices),
            question.kind: question.source[question.kind],
            "tapes": ", ".join(tapes),
            "base": f"{self.directory.name}, revision {revision_of(self.directory)}",
            "trained": f"{self.steps:,} steps, seed {self.seed}",
            "parameters": sum(each.numel() for each in self.model.parameters()),
            "calibrated": "yes" if calibrated else "no: too few labels",
        }


def reading_dtype() -> torch.dtype:
    """In which tapes are read to train on: bf16 takes half the time where the CPU multiplies in it."""
    return torch.bfloat16 if torch.cpu.get_capabilities().get("avx512_bf16") else torch.float32


def _answers(question: TaughtQuestion, vocabulary: Vocabulary, none: str) -> tuple[int, ...]:
    """The token of each choice, and of none. Raises QuestionError where two are one."""
    tokens: dict[int, str] = {}
    for choice in (*question.rule.choices, none):
        token = vocabulary.encode(choice)[0]
        if token in tokens:
            both = f"{tokens[token]!r} and {choice!r}"
            raise QuestionError(f"{question.rule.name}: {both} begin with the same token: reword one")
        tokens[token] = choice
    return tuple(tokens)
