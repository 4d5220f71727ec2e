"""Training batches: packed prompts as the daemon serves them, with what each query row must answer.

A batch is rows of one layout: the frozen prefix (header, perhaps numbered questions), the tape's bars, then
the questions of several cuts, each a branch of its own. Every tape token sees the prefix and the last
``window`` bars, its own included: whole-record eviction with carried state, as a sliding session does it.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ingest.compact import CENTRE, CODES_PER_DECADE, HIGHEST, Anchor
from tapes.generate import Ranges, generate
from tapes.rules import (
    LOOKBACK,
    RULES,
    UNDEFINED,
    VOLUMES,
    Ints,
    Labels,
    Levels,
    before,
    lag,
    mean_range,
    rolling,
)
from training.tokenizer import ASK, AUXILIARY, NONE, QUESTIONS, build_tokenizer, question_token

BAR_TOKENS = 6
AUXILIARIES = 15
"""Numbers that training asks for: `auxiliary`."""
_UNITS = (1, 2, 5)


class Auxiliary(NamedTuple):
    """A number that training asks for; ``values`` [tapes, bars] and ``smooth`` are levels or codes."""

    name: str
    values: Ints
    smooth: float


@dataclass(frozen=True)
class Queries:
    """The query rows: their numbers, kinds, targets and labels."""

    rows: npt.NDArray[np.int64]
    """[queries] rows in the sequence whose next token is asked for."""
    target: Ints
    """[tapes, queries] token ids."""
    kind: Ints
    """[tapes, queries] index of the question in QUESTIONS, or len(QUESTIONS) + an auxiliary one."""
    value: Ints
    """[tapes, queries] index of the right choice or UNDEFINED; the printed number of an auxiliary one."""
    margin: npt.NDArray[np.float32]


class Measures(NamedTuple):
    """What training alone reads off a bar's last token: the questions' margins and what they are made of.

    A tape costs much and its few cuts teach little; these are there at every bar. Both are
    [tapes, bars, measures].
    """

    wanted: npt.NDArray[np.float32]
    known: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Batch:
    """One packed batch: ``ids`` [tapes, tokens]; positions and visibility are the same for all its tapes."""

    ids: Ints
    prefix: int
    tape: int
    window: int
    bar: Ints
    """[tokens] the bar a token belongs to; a query's cut; -1 in the prefix."""
    branch: Ints
    """[tokens] the branch of a query row, -1 elsewhere."""
    measures: Measures
    stream: Ints
    """[tokens] positions that grow with the stream."""
    local: Ints
    """[tokens] positions behind the prefix as the reader sees it: evicted bars do not count."""
    queries: Queries
    listed: npt.NDArray[np.int64]
    """[listed] rows of the numbered questions in the prefix, in the order of their numbers; often none."""


@dataclass
class Vocabulary:
    """Token ids by meaning."""

    tokenizer: Any = field(default_factory=build_tokenizer)

    def __post_init__(self) -> None:
        one = self.id
        self.bos, self.end = int(self.tokenizer.bos_token_id), int(self.tokenizer.eos_token_id)
        self.numbers = np.array([one(f"{i:03d}") for i in range(1000)])
        self.newline, self.ask, self.none = one("\n"), one(ASK), one(NONE)
        self.questions = np.array([one(question_token(name)) for name in QUESTIONS])
        self.auxiliary = np.array([one(f"<|aux{i}|>") for i in range(AUXILIARY)])
        most = max(len(rule.choices) for rule in RULES)
        self.choices = np.full((len(QUESTIONS), most), self.none)
        for i, rule in enumerate(RULES):
            self.choices[i, : len(rule.choices)] = [one(choice) for choice in rule.choices]

    def id(self, text: str) -> int:
        """The id of a text that is one token."""
        ids = self.encode(text)
        if len(ids) != 1:
            raise ValueError(f"{text!r} is {len(ids)} tokens instead of one")
        return int(ids[0])

    def encode(self, text: str) -> list[int]:
        """Token ids without special tokens."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))


def draw_headers(rng: np.random.Generator, vocabulary: Vocabulary, percents: Ints) -> tuple[Ints, Ints]:
    """Headers [tapes, tokens] of anchors with about these percents, and what they print; equally long.

    Units from 1e-6 to 500, volumes of three digits from 0.001 to 999,000,000.
    """
    unit = int(rng.choice(_UNITS)) * 10 ** int(rng.integers(3, 12))
    scale = 10 ** int(rng.integers(6, 16))
    headers: list[list[int]] = []
    anchors: list[Anchor] = []
    for percent in percents.tolist():
        for attempt in range(40):
            # from the second tape on only headers as long as the first one's will do
            wanted = percent if attempt < 20 else anchors[0].percent
            levels = max(100 * wanted + int(rng.integers(-49, 50)), 1)
            anchor = Anchor(levels * unit, unit, int(rng.integers(100, 1000)) * scale)
            ids = vocabulary.encode(anchor.header)
            if not headers or len(ids) == len(headers[0]):
                break
        else:
            ids, anchor = headers[0], anchors[0]
        headers.append(ids)
        anchors.append(anchor)
    return np.array(headers), np.array([anchor.percent for anchor in anchors])


def auxiliary(x: Levels) -> list[Auxiliary]:
    """What the questions are made of."""
    v = VOLUMES[x.volume]

    def code(volume: npt.NDArray[np.float64]) -> Ints:
        decades = np.log10(np.maximum(volume, 1e-3)) - 6
        codes: Ints = np.rint(CENTRE + CODES_PER_DECADE * decades).astype(np.int64)
        return np.clip(codes, 0, HIGHEST)

    def level(values: npt.NDArray[np.float64]) -> Ints:
        levels: Ints = np.clip(values, 0, HIGHEST).astype(np.int64)
        return levels

    shown = x.window or x.close.shape[1]
    high, low = np.max, np.min
    return [
        Auxiliary("close_5", lag(x.close, 5), 0),
        Auxiliary("close_10", lag(x.close, 10), 0),
        Auxiliary("close_25", lag(x.close, 25), 0),
        Auxiliary("high_5", level(rolling(x.high, 5, high)), 1.5),
        Auxiliary("high_10", level(rolling(x.high, 10, high)), 1.5),
        Auxiliary("low_10", level(rolling(x.low, 10, low)), 1.5),
        Auxiliary("high_20_before", level(before(rolling(x.high, 20, high), 10, 0.0)), 1.5),
        Auxiliary("low_20_before", level(before(rolling(x.low, 20, low), 10, 0.0)), 1.5),
        Auxiliary("high_earlier", level(before(rolling(x.high, shown - 5, high), 5, 0.0)), 1.5),
        Auxiliary("high_breakout", level(before(rolling(x.high, 20, high), 6, 0.0)), 1.5),
        Auxiliary("high_30", level(rolling(x.high, LOOKBACK, high)), 1.5),
        Auxiliary("low_30", level(rolling(x.low, LOOKBACK, low)), 1.5),
        Auxiliary("volume_5", code(rolling(v, 5, np.sum) / 5), 5),
        Auxiliary("volume_20", code(before(rolling(v, 20, np.sum), 5, 0.0) / 20), 5),
        Auxiliary("range_20", level(10 * rolling(x.high - x.low, 20, np.sum) / 20), 5),
    ]


def compress(x: npt.NDArray[np.floating[Any]], limit: float) -> npt.NDArray[np.float32]:
    """Distances as training asks for them: finest around 0, cut at ``limit``."""
    distances: npt.NDArray[np.float32] = np.arcsinh(2 * np.clip(x, -limit, limit)).astype(np.float32)
    return distances


def measure(x: Levels, labels: list[Labels], numbers: list[Auxiliary]) -> Measures:
    """The measures of every bar: margins where the rule is defined, prices from the close in R, volumes."""
    size = mean_range(x)
    wanted = [compress(label.margin, 6) for label in labels]
    known = [label.value != UNDEFINED for label in labels]
    for each in numbers:
        if each.name.startswith("volume"):
            distance = (each.values - x.volume) / 40
        elif each.name.startswith("range"):
            distance = np.log(size)
        else:
            distance = (each.values - x.close) / size
        wanted.append(compress(distance, 12))
        known.append(np.ones(x.close.shape, bool))
    return Measures(np.stack(wanted, -1), np.stack(known, -1))


@dataclass(frozen=True)
class Layout:
    """How a batch is laid out. ``bars`` may exceed ``window``: then the tape slides."""

    window: int
    bars: int
    cuts: int
    tapes: int
    auxiliary: int = 6
    numbered: bool = False


def make_batch(
    rng: np.random.Generator, vocabulary: Vocabulary, layout: Layout, ranges: Ranges, cuts: Ints | None = None
) -> Batch:
    """Draw a batch of generated tapes. The cuts (last bars shown) are the same for all of them."""
    B, N = layout.tapes, layout.bars
    drawn = generate(rng, B, N, ranges, layout.window)
    header, percent = draw_headers(rng, vocabulary, drawn.percent)
    x = Levels(drawn.open, drawn.high, drawn.low, drawn.close, drawn.volume, percent, layout.window)
    if cuts is None:
        first = layout.window - 1 if layout.window < N else 10
        n = min(layout.cuts, N - first)
        cuts = np.sort(np.append(rng.choice(np.arange(first, N - 1), n - 1, replace=False), N - 1))
    order = np.tile(np.arange(len(QUESTIONS)), (B, 1))
    if layout.numbered:
        order = rng.permuted(order, axis=1)[:, : int(rng.integers(6, len(QUESTIONS) + 1))]
    return pack(rng, vocabulary, layout, x, header, cuts, order)


def pack(
    rng: np.random.Generator,
    vocabulary: Vocabulary,
    layout: Layout,
    x: Levels,
    header: Ints,
    cuts: Ints,
    order: Ints,
) -> Batch:
    """Pack tapes and ask the questions ``order`` [tapes, asked] at each cut. ``header`` [tapes, tokens].

    ``rng`` draws the auxiliary questions, if the layout has any.
    """
    B, N = x.close.shape
    prefix = [np.full((B, 1), vocabulary.bos), header]
    if layout.numbered:
        ask = np.full_like(order, vocabulary.ask)
        numbers = np.broadcast_to(vocabulary.numbers[1 + np.arange(order.shape[1])], order.shape)
        listed = np.stack([ask, numbers, vocabulary.questions[order]], -1)
        prefix += [listed.reshape(B, -1), np.full((B, 1), vocabulary.newline)]
    frozen = np.concatenate(prefix, 1)
    fields = [vocabulary.numbers[field] for field in (x.open, x.high, x.low, x.close, x.volume)]
    tape = np.stack([*fields, np.full((B, N), vocabulary.newline)], -1).reshape(B, -1)
    labels, parts = [rule.label(x) for rule in RULES], auxiliary(x)
    columns, places, queries = _branches(
        rng, vocabulary, layout, x.close, labels, parts, cuts, order, frozen.shape[1] + tape.shape[1]
    )
    ids = np.concatenate([frozen, tape, columns], 1)
    F, T = frozen.shape[1], tape.shape[1]
    bar = np.concatenate([np.full(F, -1), np.repeat(np.arange(N), BAR_TOKENS), places[:, 0]])
    branch = np.concatenate([np.full(F + T, -1), places[:, 1]])
    stream = np.concatenate([np.arange(F + T), F + (places[:, 0] + 1) * BAR_TOKENS + places[:, 2]])
    evicted = BAR_TOKENS * np.maximum(bar - layout.window + 1, 0)
    measures = measure(x, labels, parts)
    listed = 1 + header.shape[1] + 2 + 3 * np.arange(order.shape[1] if layout.numbered else 0)
    return Batch(ids, F, T, layout.window, bar, branch, measures, stream, stream - evicted, queries, listed)


def _branches(
    rng: np.random.Generator,
    vocabulary: Vocabulary,
    layout: Layout,
    closes: Ints,
    labels: list[Labels],
    numbers: list[Auxiliary],
    cuts: Ints,
    order: Ints,
    start: int,
) -> tuple[Ints, Ints, Queries]:
    """Query columns [tapes, rows]; cut, branch and offset of each [rows, 3]; and what they must answer."""
    B, asked = order.shape
    exact = len(QUESTIONS) - 1
    value = np.full((len(QUESTIONS), B, len(cuts)), 0, np.int64)
    margin = np.zeros((len(QUESTIONS), B, len(cuts)), np.float32)
    target = np.empty((len(QUESTIONS), B, len(cuts)), np.int64)
    for i, label in enumerate(labels):
        value[i], margin[i] = label.value[:, cuts], label.margin[:, cuts]
        right = vocabulary.choices[i][np.maximum(value[i], 0)]
        target[i] = np.where(value[i] == UNDEFINED, vocabulary.none, right)
    target[exact] = vocabulary.numbers[closes[:, cuts]]
    chosen = rng.choice(len(numbers), min(layout.auxiliary, len(numbers)), replace=False)
    columns: list[Ints] = []
    places: list[tuple[int, int, int]] = []
    out: dict[str, list[Any]] = {"rows": [], "target": [], "kind": [], "value": [], "margin": []}
    tapes, nothing = np.arange(B), np.zeros(B, np.int64)

    def ask(tokens: list[Ints], cut: int, *wanted: Any, behind: bool = False) -> None:
        """``wanted``: target, kind, value and margin; ``behind`` the row before, else a branch of its own."""
        _, branch, offset = places[-1] if places else (0, -1, 0)
        branch, offset = (branch, offset + 1) if behind else (branch + 1, 0)
        for column in tokens:
            columns.append(column)
            places.append((cut, branch, offset))
            offset += 1
        out["rows"].append(start + len(columns) - 1)
        for name, part in zip(("target", "kind", "value", "margin"), wanted, strict=True):
            out[name].append(part)

    for ci, cut in enumerate(cuts.tolist()):
        for j in range(asked):
            kind = order[:, j]
            if layout.numbered:
                tokens = [np.full(B, vocabulary.ask), np.full(B, vocabulary.numbers[1 + j])]
            else:
                tokens = [vocabulary.questions[kind]]
            ask(tokens, cut, target[kind, tapes, ci], kind, value[kind, tapes, ci], margin[kind, tapes, ci])
            if not layout.numbered and kind[0] == exact:
                end, last = np.full(B, vocabulary.end), np.full(B, len(QUESTIONS) + len(numbers))
                number = [target[exact, :, ci]]
                ask(number, cut, end, last, nothing, nothing.astype(np.float32), behind=True)
        for a in chosen.tolist():
            answer = numbers[a].values[:, cut]
            kind = np.full(B, len(QUESTIONS) + a)
            token = [np.full(B, vocabulary.auxiliary[a])]
            ask(token, cut, vocabulary.numbers[answer], kind, answer, nothing.astype(np.float32))
    stacked = {name: np.stack(parts, 1) if name != "rows" else np.array(parts) for name, parts in out.items()}
    return np.stack(columns, 1), np.array(places), Queries(**stacked)
