"""What early exits are worth: how many asks exit at a logit gap, and how many of those answers are right.

Asks are the questions of an evaluation at each bar that it asks at. The decision is the gateway's own
(`flash.early_exit`), from the logits at the ready position of the same bars.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, NamedTuple

import msgspec
import numpy as np

from flash.early_exit import ReadyToken, exit_of
from tapes.rules import UNDEFINED
from training.served import Served
from training.sources import Setting, Source

TAUS = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Logit gaps to exceed; the paper has 2.0."""
_FAVOURED = 4
"""Texts that are shown."""


class AskedOnce(NamedTuple):
    """One ask: its question, what the ready position says, what a pass says, and what is right."""

    question: str
    choices: tuple[str, ...]
    ready: ReadyToken
    computed: str
    right: str


class Exits(msgspec.Struct, frozen=True, kw_only=True):
    """Asks at one logit gap ``tau``. Of those that exit: how many are right, how many a pass gets right, and
    how many get the answer of the pass.
    """

    question: str
    tau: float
    asks: int
    exits: int
    right: int
    computed_right: int
    agreed: int


class ExitReport(msgspec.Struct, frozen=True):
    """Early exits of a model's asks, all together and by question, and how many of all a pass gets right."""

    model: str
    revision: str
    data: dict[str, str | int | float]
    computed_right: float
    favoured: dict[str, float]
    """Shares of the asks at whose ready position the model favours these texts, the most frequent first."""
    exits: list[Exits]


def ask_all(
    served: Served,
    source: Source,
    setting: Setting,
    labels: int,
    progress: Callable[[float], None] = lambda share: None,
) -> tuple[list[AskedOnce], dict[str, int]]:
    """At least ``labels`` asks that have a right answer, and the fast answers."""
    header = served.prompt.ready()
    rules = served.asked.rules
    tokens = [served.choices(n)[:-1] for n in range(len(rules))]
    fast = {
        choice: t
        for rule, own in zip(rules, tokens, strict=True)
        for choice, t in zip(rule.choices, own, strict=True)
    }
    questions = [served.tokens(n, setting.numbered) for n in range(len(rules))]
    last = np.arange(setting.window // 2, setting.window)
    asked: list[AskedOnce] = []
    batches = source.batches(served.vocabulary, setting.window, setting.window)
    for number, drawn in zip(count(), batches, strict=False):
        cuts = np.sort(np.random.default_rng([7, number]).choice(last, served.cuts, replace=False))
        values = [rule.label(drawn.levels).value for rule in rules]
        for tape, bar, context, _ in served.contexts(drawn, setting, cuts):
            *found, at_ready = context.logits([*questions, header])
            first, second = at_ready.topk(2).values.tolist()
            ready = ReadyToken(1, int(at_ready.argmax()), first - second)
            for rule, own, logits, value in zip(rules, tokens, found, values, strict=True):
                if (label := int(value[tape, bar])) != UNDEFINED:
                    says = rule.choices[int(logits[own].argmax())]
                    asked.append(AskedOnce(rule.name, rule.choices, ready, says, rule.choices[label]))
        progress(min(1.0, len(asked) / labels))
        if len(asked) >= labels:
            break
    return asked, fast


def exits_of(asked: Sequence[AskedOnce], fast: dict[str, int], tau: float, question: str = "all") -> Exits:
    """What becomes of these asks at ``tau``."""
    exited = [(each, exit_of(each.ready, 1, each.choices, fast, tau)) for each in asked]
    left = [(each, choice) for each, choice in exited if choice is not None]
    return Exits(
        question=question,
        tau=tau,
        asks=len(asked),
        exits=len(left),
        right=sum(choice == each.right for each, choice in left),
        computed_right=sum(each.computed == each.right for each, _ in left),
        agreed=sum(choice == each.computed for each, choice in left),
    )


def report(
    asked: Sequence[AskedOnce],
    fast: dict[str, int],
    text: Callable[[int], str],
    named: tuple[str, str],
    data: dict[str, Any],
) -> ExitReport:
    """All asks at each gap, then each question's. ``text`` of a token; ``named``: model and revision."""
    found = [exits_of(asked, fast, tau) for tau in TAUS]
    for name in dict.fromkeys(each.question for each in asked):
        own = [each for each in asked if each.question == name]
        found += [exits_of(own, fast, tau, name) for tau in TAUS]
    right = sum(each.computed == each.right for each in asked) / max(1, len(asked))
    counts = Counter(each.ready.token for each in asked)
    tokens = sorted(counts.items(), key=lambda each: -each[1])[:_FAVOURED]
    favoured = {text(token): times / len(asked) for token, times in tokens}
    return ExitReport(*named, data, right, favoured, found)


COLUMNS = ("question", "logit gap above", "asks", "exit", "right", "computed right", "same answer")


def row(found: Exits) -> list[str]:
    """The cells of COLUMNS; the last three are shares of the asks that exit."""
    shares = (found.right, found.computed_right, found.agreed)
    of_exits = [f"{100 * each / found.exits:.1f}" if found.exits else "" for each in shares]
    share = f"{100 * found.exits / found.asks:.1f}" if found.asks else ""
    return [found.question, f"{found.tau:g}", f"{found.asks:,}", share, *of_exits]


def table(made: ExitReport) -> Any:
    """A rich table; shares in percent."""
    from rich.table import Table

    title = f"{made.model}: early exits; a pass is right in {100 * made.computed_right:.1f} % of all asks"
    favoured = ", ".join(f"{text!r} {100 * share:.0f} %" for text, share in made.favoured.items())
    shown = Table(title=title, caption=f"favoured at the ready position: {favoured}")
    for column in COLUMNS:
        shown.add_column(column, justify="left" if column == "question" else "right", no_wrap=True)
    for each in made.exits:
        shown.add_row(*row(each))
    return shown
