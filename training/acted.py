"""What acting within an error amounts to: the tape model's answers in time order, each acted on or not.

The policy is the daemon's (`flash.acting`), fed as the daemon feeds it: an answer knows the labels of answers
that are ``delay`` bars older. Shifts are generated tapes of one kind behind those of another, without notice.

    python -m training.acted --data DIRECTORY --answers DIRECTORY

With ``--answers`` the model's answers are kept there, and read again: another policy takes seconds.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import click
import msgspec
import numpy as np
import torch

from engine.model.revision import CALIBRATION, revision_of
from engine.model.terse import TAPE_MODEL
from flash.acting import WINDOW, ActDecision, Acting, risk_of
from flash.confidence import Calibration, read_calibration
from flash.regimes import RegimeTracker
from tapes.generate import EVALUATION, TRAINING, Ranges, generate
from tapes.real_bars import anchor_of, levels_of
from tapes.rules import RULES, UNDEFINED, Levels
from training.batches import Vocabulary, draw_headers
from training.export import tape_model
from training.sources import Drawn, Packed, Recorded, Setting, together

FIVE = ("trend", "pullback", "recent_high", "consolidation", "volume")
SETTING = Setting(windows=2)
_BARS, _MINUTE_NS, _SECOND_NS = SETTING.window * SETTING.windows, 60 * 10**9, 10**9
_TAPES = 8
_LEAST = 200
"""Least number of answers acted on in a regime whose error is shown."""
TAPES_OF = {
    "btc_perp": ("btc_perp_1m_202201.csv", "btc_perp_bars", 60 * _SECOND_NS),
    "sp500": ("sp500_index_1m_20191105.csv", "sp500_bars", 60 * _SECOND_NS),
    "eurusd": ("histdata_eurusd_ticks_20200101.csv", "histdata_quotes", 2 * _SECOND_NS),
}
"""Recorded tapes: file, format, and interval of the bars made of ticks."""
STORM = replace(EVALUATION, spread=0.8, tails=3.0, jump=0.06, gap=0.5, wick=(0.3, 1.6), burst=0.1)
RANGE = replace(EVALUATION, regimes=(0.05, 0.05, 0.8, 0.1), calm=(0.4, 0.9), drift=0.2)
COARSE = replace(EVALUATION, units=(0.4, 1.5), volume_noise=(0.6, 1.2))
SHIFTS: tuple[Ranges, ...] = (TRAINING, STORM, EVALUATION, RANGE, COARSE, TRAINING)
"""One behind the other: as in training, a storm, usual, ranges only, coarse prices, as at first."""


class Asked(NamedTuple):
    """An answer: bar, regime and risk; the numbers of the choice given and of the right one."""

    bar: int
    regime: str
    risk: float
    given: int
    right: int

    @property
    def wrong(self) -> bool:
        """Whether the right choice is another one."""
        return self.given != self.right


@dataclass(frozen=True)
class Stretch:
    """A window to read, then as many bars to ask at: ``first`` is the first of these, counted from 0."""

    drawn: Drawn
    first: int
    regimes: tuple[str, ...]


def recorded(source: Recorded) -> list[Stretch]:
    """A file's bars in order; each of those behind the first window is asked once."""
    bars, spec = source.bars()
    tracker, names, vocabulary = RegimeTracker(), [], Vocabulary()
    for bar in bars:
        tracker = tracker.after(int(bar["ts_last_event"]), int(bar["h"]), int(bar["l"]), int(bar["c"]))
        names.append(tracker.name)
    found = []
    for start in range(0, len(bars) - _BARS + 1, SETTING.window):
        part = bars[start : start + _BARS]
        anchor = anchor_of(part, spec)
        levels = levels_of(part, anchor, SETTING.window)
        header, first = np.array([vocabulary.encode(anchor.header)]), start + SETTING.window
        regimes = tuple(names[first : first + SETTING.window])
        found.append(Stretch(Drawn(levels, header, np.array([start])), first, regimes))
    return found


def shifted(tapes: int, seed: int = 5) -> list[Stretch]:
    """As many generated tapes of each kind, one kind behind the other."""
    vocabulary, found = Vocabulary(), list[Stretch]()
    for kind, ranges in enumerate(SHIFTS):
        for number in range(tapes):
            rng = np.random.default_rng([770_001, seed, kind, number])
            x = generate(rng, 1, _BARS, ranges, SETTING.window)
            header, percent = draw_headers(rng, vocabulary, x.percent)
            levels = replace(x, percent=percent)
            first = len(found) * SETTING.window
            drawn = Drawn(levels, header, np.array([len(found)]))
            found.append(Stretch(drawn, first, _regimes(levels, first)))
    return found


def _regimes(x: Levels, first: int) -> tuple[str, ...]:
    """Of a generated tape, whose bars are minutes that go on from the tape before."""
    tracker, found = RegimeTracker(), []
    price = 100 * int(x.percent[0])
    for bar in range(_BARS):
        at = (first - SETTING.window + bar) * _MINUTE_NS
        high, low, close = (price + int(column[0, bar]) for column in (x.high, x.low, x.close))
        tracker = tracker.after(at, high, low, close)
        found.append(tracker.name)
    return tuple(found[SETTING.window :])


def answers(reader: Packed, calibration: Calibration, stretches: Sequence[Stretch]) -> dict[str, list[Asked]]:
    """The answers to the five in time order, of those that have a right one."""
    rules = {number: rule for number, rule in enumerate(RULES) if rule.name in FIVE}
    cuts, wanted = np.arange(SETTING.window, _BARS), np.array(sorted(rules))
    found: dict[str, list[Asked]] = {rule.name: [] for rule in rules.values()}
    for group in _groups(stretches):
        windows = [(each.drawn.levels, each.drawn.header[0], at) for at, each in enumerate(group)]
        drawn = together(windows, SETTING.window)
        for read in reader.read(drawn, SETTING, cuts, wanted, np.random.default_rng(0)):
            rule = rules[read.question]
            fitted = calibration.find(rule.name, rule.choices)
            assert fitted is not None, "the model in the package has a calibration of all five"
            label = rule.label(drawn.levels).value
            for tape, bar, logits in zip(
                read.tape.tolist(), read.bar.tolist(), read.chosen.tolist(), strict=True
            ):
                right, behind = int(label[tape, bar]), bar - SETTING.window
                if right == UNDEFINED:
                    continue
                given = int(np.argmax(logits[:-1]))
                regime, at = group[tape].regimes[behind], group[tape].first + behind
                risk = risk_of(fitted, logits[:-1], given)
                found[rule.name].append(Asked(at, regime, risk, given, right))
    return {name: sorted(each) for name, each in found.items() if each}


def _groups(stretches: Sequence[Stretch]) -> Iterator[list[Stretch]]:
    """Those with headers of equal length, a few at a time."""
    waiting: dict[int, list[Stretch]] = defaultdict(list)
    for each in stretches:
        group = waiting[each.drawn.header.shape[1]]
        group.append(each)
        if len(group) == _TAPES:
            yield waiting.pop(each.drawn.header.shape[1])
    yield from waiting.values()


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What acting on a question's answers came to; errors are shares of those acted on.

    ``over``: share of rolling thousands whose error is above the one asked for. ``by_regime``: of those with
    200 answers acted on or more.
    """

    answers: int
    accuracy: float
    acted: float
    error: float
    worst: float
    over: float
    by_regime: dict[str, float]
    reasons: dict[str, int]


def act(asked: Sequence[Asked], acting: Acting, delay: int = 2) -> Outcome:
    """Act on answers in order; a label comes ``delay`` bars behind its answer, -1: never."""
    waiting: deque[tuple[Asked, ActDecision]] = deque()
    acted: list[Asked] = []
    reasons: Counter[str] = Counter()
    for each in asked:
        while waiting and delay >= 0 and waiting[0][0].bar + delay <= each.bar:
            past, decided = waiting.popleft()
            acting.label(decided, past.bar, past.right)
        decision = acting.decide(each.risk, each.regime, each.given)
        waiting.append((each, decision))
        if decision.act:
            acted.append(each)
        elif decision.reason is not None:
            reasons[decision.reason] += 1
    wrong = np.array([each.wrong for each in acted], np.int64)
    total = np.concatenate([[0], np.cumsum(wrong)])
    rolling = (total[WINDOW:] - total[:-WINDOW]) / WINDOW if len(wrong) >= WINDOW else np.zeros(1)
    regimes: dict[str, list[bool]] = defaultdict(list)
    for one in acted:
        regimes[one.regime].append(one.wrong)
    return Outcome(
        answers=len(asked),
        accuracy=1 - sum(each.wrong for each in asked) / len(asked),
        acted=len(acted) / len(asked),
        error=float(wrong.mean()) if len(wrong) else 0.0,
        worst=float(rolling.max()),
        over=float((rolling > acting.max_error).mean()),
        by_regime={name: sum(each) / len(each) for name, each in regimes.items() if len(each) >= _LEAST},
        reasons=dict(reasons),
    )


def loaded() -> tuple[Packed, Calibration]:
    """The tape model in the package, and its calibration."""
    directory = TAPE_MODEL
    calibration = read_calibration(directory / CALIBRATION, revision_of(directory), "compact")
    torch.set_num_threads(1)
    return Packed(tape_model(directory, torch.bfloat16)), calibration


def answers_of(
    name: str, data: Path | None, kept: Path | None, tapes: int, seed: int
) -> dict[str, list[Asked]]:
    """The tape model's answers on a tape: those ``kept`` in a directory, else read by it, and kept there."""
    file = kept and kept / (f"shifts_{seed}_{tapes}.msgpack" if name == "shifts" else f"{name}.msgpack")
    if file and file.exists():
        return msgspec.msgpack.decode(file.read_bytes(), type=dict[str, list[Asked]])
    found = answers(*loaded(), tape(name, data, tapes, seed))
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(msgspec.msgpack.encode(found))
    return found


def tape(name: str, data: Path | None, tapes: int, seed: int = 5) -> list[Stretch]:
    """The stretches of a tape: ``shifts``, or one of TAPES_OF in the directory ``data``."""
    if name == "shifts":
        return shifted(tapes, seed)
    assert data is not None, "recorded tapes are in a directory"
    file, form, interval = TAPES_OF[name]
    return recorded(Recorded(data / file, form, interval))


def row(name: str, question: str, found: Outcome) -> str:
    """A row of Markdown; shares in percent."""
    worst = max(found.by_regime.items(), key=lambda each: each[1], default=("-", 0.0))
    shares = (found.accuracy, found.acted, found.error, found.worst)
    numbers = " | ".join(f"{100 * each:.2f}" for each in shares)
    return f"| {name} | {question} | {found.answers:,} | {numbers} | {100 * worst[1]:.2f} {worst[0]} |"


@click.command()
@click.option("--data", type=click.Path(path_type=Path, exists=True), help="Directory of the recorded tapes.")
@click.option("--answers", "kept", type=click.Path(path_type=Path, file_okay=False), help="Keeps answers.")
@click.option("--max-error", default=0.02, show_default=True)
@click.option("--tapes", default=60, show_default=True, help="Generated tapes of each kind.")
@click.option("--seed", default=5, show_default=True, help="Of the generated tapes.")
@click.option("--delay", default=2, show_default=True, help="Bars from an answer to its label; -1: never.")
def main(data: Path | None, kept: Path | None, max_error: float, tapes: int, seed: int, delay: int) -> None:
    """Print a row of Markdown for each tape and question."""
    click.echo("| tape | question | answers | right % | acted % | wrong % | worst 1,000 % | worst regime % |")
    click.echo("|---|---|---:|---:|---:|---:|---:|---|")
    for name in ("shifts", *(TAPES_OF if data else ())):
        for question, asked in answers_of(name, data, kept, tapes, seed).items():
            click.echo(row(name, question, act(asked, Acting(max_error), delay)))


if __name__ == "__main__":
    main()
