"""How good the answers to one question were: what their labels say, by probability, market and age.

Of the versions that are kept, and computed when it is asked for. Volatility is the mean absolute change of
the close over `TREND` versions; the third of the versions with the least is calm, the third with the most
volatile. A version is rising or falling by its close and the one `TREND` versions before.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from daemon.api.messages import AgeBlock, PastAnswer, PastVersion, ProbabilityBin, Regime, RegimeName, Tally

BINS, BLOCKS = 10, 10
TREND = 20
"""Versions over which volatility and direction are taken."""
_Found = tuple[PastVersion, PastAnswer]


def found_in(versions: Sequence[PastVersion], question: str) -> list[_Found]:
    """The answers to the question of this name, with their versions."""
    return [(each, a) for each in versions for a in each.answers if a.question == question]


def tally_of(answers: Iterable[PastAnswer]) -> Tally:
    """What the labels of these answers say; those without a label or a probability only count."""
    every = list(answers)
    judged = [(a, a.probability) for a in every if a.label is not None and a.probability is not None]
    sets = [a for a, _ in judged if a.choice_set is not None]
    return Tally(
        answers=len(every),
        labels=len(judged),
        right=sum(a.text == a.label for a, _ in judged),
        probability=sum(p for _, p in judged) / len(judged) if judged else None,
        covered=sum(a.label in (a.choice_set or ()) for a in sets),
        sets=len(sets),
    )


def reliability(answers: Iterable[PastAnswer]) -> tuple[ProbabilityBin, ...]:
    """By probability, in tenths; 1.0 is in the last one, and one without labels is left out."""
    bins: list[list[PastAnswer]] = [[] for _ in range(BINS)]
    for each in answers:
        if each.label is not None and each.probability is not None:
            bins[min(int(each.probability * BINS), BINS - 1)].append(each)
    return tuple(ProbabilityBin(n / BINS, tally_of(found)) for n, found in enumerate(bins) if found)


def regimes_of(versions: Sequence[PastVersion]) -> dict[int, tuple[RegimeName, ...]]:
    """What each version was, by its number: of the first ones, with too few closes before, nothing."""
    closes = [(each.data_version, float(each.close)) for each in versions if each.close is not None]
    moves = [abs(b - a) for (_, a), (_, b) in pairwise(closes)]
    later = range(TREND, len(closes))
    volatility = {closes[i][0]: sum(moves[i - TREND : i]) for i in later}
    ranked = sorted(volatility.values())
    calm, volatile = (ranked[len(ranked) // 3], ranked[-1 - len(ranked) // 3]) if ranked else (0.0, 0.0)
    found: dict[int, tuple[RegimeName, ...]] = {}
    for i in later:
        number, close = closes[i]
        moved = volatility[number]
        size: RegimeName = "calm" if moved < calm else "volatile" if moved > volatile else "usual"
        before = closes[i - TREND][1]
        found[number] = (size, *_direction(before, close))
    return found


def _direction(before: float, close: float) -> Iterator[RegimeName]:
    if close != before:
        yield "rising" if close > before else "falling"


def by_regime(versions: Sequence[PastVersion], found: Sequence[_Found]) -> tuple[Regime, ...]:
    """Of each regime that occurred, the answers in it."""
    regimes = regimes_of(versions)
    names: tuple[RegimeName, ...] = ("calm", "usual", "volatile", "rising", "falling")
    made = ((name, [a for v, a in found if name in regimes.get(v.data_version, ())]) for name in names)
    return tuple(Regime(name, tally_of(answers)) for name, answers in made if answers)


def by_age(newest: int, kept: int, found: Sequence[_Found]) -> tuple[AgeBlock, ...]:
    """In blocks of versions of the same length, the oldest first; one without answers is left out.

    ``newest``: the session's version; ``kept``: versions that a daemon keeps.
    """
    length = max(1, -(-kept // BLOCKS))
    blocks: dict[int, list[_Found]] = {}
    for version, answer in found:
        blocks.setdefault((newest - version.data_version) // length, []).append((version, answer))
    return tuple(
        AgeBlock(
            versions_ago=age * length,
            as_of=max(version.as_of for version, _ in block),
            mean_gap=sum(answer.logit_gap for _, answer in block) / len(block),
            tally=tally_of(answer for _, answer in block),
        )
        for age, block in sorted(blocks.items(), reverse=True)
    )
