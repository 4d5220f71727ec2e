"""The scenarios, as messages: a growing tape, six questions at once, eight sessions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from bench.engine.batches import standing_texts
from bench.engine.scenario import PAPER, Size, scenario_in
from bench.peers.protocol import Ask, Opening, Update
from engine.model.chat_format import PromptFormat

_SEED = 7


@dataclass(frozen=True)
class Plan:
    """``size`` of each of ``sessions``.

    ``questions``: to each session after each update; ``decoded``: tokens after the first of a further
    question, which comes last in a round, if any.
    """

    name: str
    size: Size = PAPER
    sessions: int = 1
    questions: int = 1
    decoded: int = 0

    @property
    def quick(self) -> Plan:
        """The same in small sizes."""
        return replace(
            self,
            size=Size(12, 3, 5),
            sessions=min(3, self.sessions),
            questions=min(3, self.questions),
            decoded=min(3, self.decoded),
        )

    def within(self, prompt: PromptFormat, tokens: int) -> Plan:
        """As many rounds, each with as many bars as fit into ``tokens``; a third of the bars comes first."""
        sample = scenario_in(prompt, Size(first=64, rounds=0), _SEED)
        bar = max(map(len, sample.first))
        question = max(map(len, map(prompt.question, standing_texts(self.questions)))) + 1 + self.decoded
        bars = (tokens - len(sample.frozen) - question) // bar
        first = bars // 3
        return replace(self, size=replace(self.size, first=first, bars=(bars - first) // self.size.rounds))


GROW = Plan("grow", decoded=8)
BURST = Plan("burst", questions=6)
RELEASED = Plan("released", decoded=16)
FILE = replace(RELEASED, name="file")
MULTI = Plan("multi", Size(100, 15, 20), sessions=8)


class Round(NamedTuple):
    """One update, and the tokens of a session after it."""

    context: int
    update: Update


class Run(NamedTuple):
    """The parameters of every contestant.

    ``asks`` follow each round's update: the questions, and the one with a longer answer, if any. They also
    follow ``fill``, the updates that are not measured.
    """

    opening: Opening
    fill: list[Update]
    asks: list[Ask]
    rounds: list[Round]


def run_of(plan: Plan, prompt: PromptFormat, model: str, dtype: str, threads: int, file: str = "") -> Run:
    """The messages of ``plan`` in the tokens of one model, in directory ``model``, expanded from ``file``."""
    tapes = [scenario_in(prompt, plan.size, _SEED + session) for session in range(plan.sessions)]
    questions = [prompt.question(text) for text in standing_texts(plan.questions)]
    asked = [(session, question) for session in range(plan.sessions) for question in questions]
    frozen = list(tapes[0].frozen)
    opening = Opening(
        model=model,
        dtype=dtype,
        threads=threads,
        frozen=frozen,
        sessions=plan.sessions,
        tokens=max(tape.tokens for tape in tapes),
        questions=len(asked),
        question=max(map(len, questions)) + 1 + plan.decoded,
        file=file,
    )
    asks = [Ask(asked)]
    if plan.decoded:
        asks.append(Ask([(0, questions[-1])], 1 + plan.decoded))
    rounds, context = [], len(frozen) + sum(map(len, tapes[0].first))
    for number in range(plan.size.rounds):
        context += sum(map(len, tapes[0].updates[number]))
        rounds.append(Round(context, Update([tape.updates[number] for tape in tapes])))
    step = PAPER.bars
    fill = [
        Update([tape.first[start : start + step] for tape in tapes])
        for start in range(0, plan.size.first, step)
    ]
    return Run(opening, fill, asks, rounds)
