"""Compact lines against plain Python: numbers, tokens, anchors, and what stays in the window."""

import math
from dataclasses import dataclass, field
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from feeds.decimals import format_fixed, from_units
from ingest.bar_kernel import BAR, Bars
from ingest.compact import (
    FITTING,
    REVIEW,
    TINY,
    WIDEST,
    Anchor,
    CompactEncoder,
    CompactSpec,
    Restart,
    anchor_for,
    fields_of,
    header_text,
    unit_for,
)
from ingest.lines import round_half_even
from ingest.tokens import Tokeniser, compact_line, whole_units
from ingest.volumes import Volume, put_volume
from tests.ingest.bpe import make_encode
from tests.ingest.building import TOKENISER, characters, text_of
from training.tokenizer import build_tokenizer

NANO = 10**9
CENT = NANO // 100
LIMIT = 9_200_000_000 * NANO
ONE = 10**18
"""A volume of 1."""
MAX_VOLUME = 10**24 * ONE
TAPE_TOKENIZER = build_tokenizer()


def encode_tape(text: str) -> list[int]:
    return list(TAPE_TOKENIZER.encode(text, add_special_tokens=False))


def bars_of(rows: list[tuple[int, ...]], first_event: int = 0) -> Bars:
    """Bars of (open, high, low, close, volume), prices in 1e-9 and volumes in 1e-18, a second apart."""
    bars = np.zeros(len(rows), BAR)
    for bar, (*prices, volume) in zip(bars, rows, strict=True):
        for name, price in zip("ohlc", prices, strict=True):
            bar[name] = price
        put_volume(bar, Volume.of(volume))
    bars["ts_last_event"] = first_event + np.arange(len(rows)) * NANO
    return bars


def flat(price: int, volume: int = ONE) -> tuple[int, ...]:
    return price, price, price, price, volume


def walk(n: int, seed: int, step: float, start: int = 6_123_000) -> list[tuple[int, ...]]:
    """A random walk on a grid of cents; ``step``: standard deviation of a close, in cents."""
    rng = np.random.default_rng(seed)
    close = start + np.cumsum(rng.normal(0, step, n)).astype(int)
    opened = np.append(start, close[:-1])
    high = np.maximum(opened, close) + rng.integers(0, 3, n)
    low = np.minimum(opened, close) - rng.integers(0, 3, n)
    volume = (10 ** rng.normal(1, 0.4, n) * NANO).astype(int)
    prices = np.stack([opened, high, low, close], 1) * CENT
    return [(*row, v * NANO) for row, v in zip(prices.tolist(), volume.tolist(), strict=True)]


# Numbers.


def level(price: int, anchor: Anchor) -> int:
    """The level of a price, in exact fractions."""
    return (
        500
        + int((Decimal(price) / anchor.unit).to_integral_value("ROUND_HALF_EVEN"))
        - (anchor.reference // anchor.unit)
    )


@given(
    units=st.lists(st.integers(-700, 700), min_size=4, max_size=4),
    off=st.sampled_from([0, 1, -1, 2, 5]),
    unit=st.sampled_from([1, 2, CENT // 2, CENT, 25 * CENT, 20 * NANO]),
    reference=st.integers(-(10**7), 10**7),
)
def test_levels_are_rounded_half_to_even_and_end_at_the_first_bar_outside(
    units: list[int], off: int, unit: int, reference: int
) -> None:
    anchor = Anchor(reference * unit, unit, ONE)
    prices = [(reference + n) * unit + off * unit // 4 for n in units]
    expected = [level(price, anchor) for price in prices]
    bars = bars_of([(*prices, ONE)])
    if all(0 <= each <= 999 for each in expected):
        assert fields_of(bars, anchor)[0, :4].tolist() == expected
        for price, each in zip(prices, expected, strict=True):
            assert abs(anchor.price(each) - price) <= unit // 2
    else:
        with pytest.raises(ValueError, match="bar 0"):
            fields_of(bars, anchor)


@given(volume=st.integers(1, MAX_VOLUME), typical=st.integers(1, MAX_VOLUME))
@example(1, MAX_VOLUME)
@example(MAX_VOLUME, 1)
@example(ONE, ONE)
@example(NANO - 1, 1)
@example(2**63 * NANO, 2**63 * NANO - 1)
def test_a_volume_code_is_exact_to_its_stated_precision(volume: int, typical: int) -> None:
    (code,) = fields_of(bars_of([flat(0, volume)]), Anchor(0, 1, typical))[:, 4].tolist()
    exact = 500 + 200 * math.log10(volume / typical)
    assert abs(code - min(max(exact, 1), 999)) <= 0.5 + 1e-9
    if 1 <= exact <= 999:
        assert 10 ** ((code - 500) / 200) * typical == pytest.approx(volume, rel=0.012)


def test_no_volume_is_code_zero() -> None:
    assert fields_of(bars_of([flat(0, 0)]), Anchor(0, 1, 1))[0].tolist() == [500, 500, 500, 500, 0]


@given(
    reference=st.integers(-(10**15), 10**15),
    unit=st.sampled_from([1, 5 * 10**6, CENT, 25 * CENT, NANO, 20 * NANO]),
    volume=st.integers(1, 10**24),
)
def test_the_header_prints_the_anchor_exactly(reference: int, unit: int, volume: int) -> None:
    anchor = Anchor(reference * unit % LIMIT // unit * unit, unit, volume)
    words = anchor.header.split()
    assert words[::2] == ["reference", "unit", "volume", "percent"]
    assert [int(Decimal(word).scaleb(9)) for word in words[1:4:2]] == [anchor.reference, unit]
    assert int(Decimal(words[5]).scaleb(18)) == volume
    assert Anchor.of(*anchor.numbers, anchor.price_decimals, anchor.price_scale) == anchor
    assert anchor.header == header_text(*words[1:6:2], anchor.percent)
    places = [len(word.partition(".")[2]) for word in words[1:4:2]]
    assert places[0] == places[1] == len(format_fixed(from_units(unit)).partition(".")[2])
    assert anchor.percent == min(max(round(Decimal(abs(anchor.reference)) / unit / 100), 1), 999)


@given(
    st.integers(-LIMIT, LIMIT),
    st.sampled_from([1, CENT, 25 * CENT, NANO]),
    st.integers(1, 999),
    st.integers(0, 40),
    st.integers(0, 18),
)
def test_no_header_is_longer_than_the_widest(
    reference: int, unit: int, digits: int, zeros: int, scale: int
) -> None:
    anchor = Anchor(reference // unit * unit, unit, digits * 10**zeros, 0, scale)
    assert len(anchor.header) <= len(WIDEST.header)


def test_a_level_is_printed_as_its_price() -> None:
    anchor = Anchor(61_230 * NANO, NANO // 2, ONE, 2)
    printed = {"500": "61230.00", "512": "61236.00", "000": "60980.00", "": "", "12": "12"}
    assert {text: anchor.printed(text) for text in printed} == printed
    assert Anchor(-37 * NANO, CENT, ONE, 2).printed("463") == "-37.37"


# Tokens.


@pytest.mark.parametrize(
    ("encode", "fast", "tokens"),
    [
        (encode_tape, True, 6),
        (make_encode("llama3", 3200), True, 6),
        (make_encode("llama3", 500), True, None),
        (make_encode("qwen", 600), True, 16),
        (make_encode("gpt2", 3200), False, None),
    ],
    ids=["tape", "llama3", "llama3-small", "qwen", "gpt2"],
)
def test_ids_equal_the_tokenizers(encode: object, fast: bool, tokens: int | None) -> None:
    assert callable(encode)
    tokeniser = Tokeniser(encode)
    assert tokeniser.fast_compact is fast
    fields = np.random.default_rng(5).integers(0, 1000, (300, 5))
    lines = tokeniser.compact(fields)
    assert lines == [list(encode(compact_line(row))) for row in fields.tolist()]
    if tokens is not None:
        assert {len(line) for line in lines} == {tokens}


# Anchors.


@given(span=st.integers(0, 2**64), finest=st.sampled_from([1, CENT, 25 * CENT, NANO]))
def test_the_unit_is_the_finest_of_its_series_that_fits(span: int, finest: int) -> None:
    unit = unit_for(span, finest)
    assert span <= FITTING * unit
    series = [finest * digit * 10**k for k in range(20) for digit in (1, 2, 5)]
    assert unit == next(each for each in series if span <= FITTING * each)


@given(
    ends=st.tuples(st.integers(-LIMIT, LIMIT), st.integers(-LIMIT, LIMIT)),
    volume=st.integers(1, MAX_VOLUME),
    spec=st.builds(CompactSpec, st.integers(0, 9), st.sampled_from([0, 1, CENT, 25 * CENT])),
)
def test_every_window_fits_around_its_anchor(ends: tuple[int, int], volume: int, spec: CompactSpec) -> None:
    low, high = sorted(ends)
    anchor = anchor_for(low, high, volume, spec)
    assert anchor.unit >= spec.finest
    assert anchor.reference % anchor.unit == 0
    levels = fields_of(bars_of([(low, high, low, high, volume)]), anchor)[0]
    assert levels[:4].min() >= 500 - FITTING // 2 - 1
    assert levels[:4].max() <= 500 + FITTING // 2 + 1
    assert abs(levels[4] - 500) <= 1


@dataclass
class Reference:
    """The encoder bar by bar, with lists and fractions."""

    spec: CompactSpec
    window: list[tuple[tuple[int, ...], int, int]] = field(default_factory=list)
    """Bar, event time, tokens."""
    anchor: Anchor | None = None
    age: int = 0
    out: list[object] = field(default_factory=list)
    """Restarts as (anchor, texts), bars as (text, whether rounding shows)."""

    def text(self, bar: tuple[int, ...]) -> str:
        assert self.anchor is not None
        code = fields_of(bars_of([flat(self.anchor.reference, bar[4])]), self.anchor)[0, 4]
        levels = [level(price, self.anchor) for price in bar[:4]]
        return "".join(f"{each:03d}" for each in [*levels, code]) + "\n"

    def _evict(self, event: int, tokens: int) -> None:
        """Make room for a bar."""
        spec = self.spec
        while self.window and (
            sum(tokens for _, _, tokens in self.window) + tokens > spec.tokens
            or (spec.records and len(self.window) + 1 > spec.records)
            or (spec.span_ns and self.window[0][1] < event - spec.span_ns)
        ):
            self.window.pop(0)

    def add(self, bar: tuple[int, ...], event: int) -> None:
        seen = [each for each, _, _ in self.window] + [bar]
        low, high = min(min(each[:4]) for each in seen), max(max(each[:4]) for each in seen)
        volumes = sorted(each[4] for each in seen if each[4] > 0)
        typical = volumes[len(volumes) // 2] if volumes else self.anchor.volume if self.anchor else ONE
        anchor = self.anchor
        if anchor is None:
            again = True
        else:
            again = not all(0 <= level(price, anchor) <= 999 for price in bar[:4])
            checked = self.age % REVIEW == 0 if self.age >= REVIEW else self.age in (1, 2, 4, 8, 16, 32)
            if checked and self.age:
                again |= anchor.unit > self.spec.finest and high - low <= TINY * anchor.unit
                again |= not anchor.volume <= 10 * typical <= 100 * anchor.volume
        if again:
            self._evict(event, 0)
            seen = [each for each, _, _ in self.window] + [bar]
            low, high = min(min(each[:4]) for each in seen), max(max(each[:4]) for each in seen)
            volumes = sorted(each[4] for each in seen if each[4] > 0)
            typical = volumes[len(volumes) // 2] if volumes else anchor.volume if anchor else ONE
            self.anchor, self.age = anchor_for(low, high, typical, self.spec), 0
            self._evict(event, 16)
            self.out.append((self.anchor, [self.text(each) for each, _, _ in self.window]))
        self.age += 1
        self._evict(event, 16)
        self.window.append((bar, event, 16))
        assert self.anchor is not None
        unit = self.anchor.unit
        shows = any(price % unit for each, _, _ in self.window for price in each[:4])
        self.out.append((self.text(bar), shows))


def encoded(encoder: CompactEncoder, bars: Bars, sizes: list[int]) -> list[object]:
    """What `Reference.out` would have, from batches of these sizes."""
    out: list[object] = []
    at = 0
    while at < len(bars):
        size = sizes[len(out) % len(sizes)]
        for piece in encoder.encode(bars[at : at + size]):
            if piece.restart is not None:
                lines = [text_of(tokens) for tokens, _ in piece.restart.window]
                out.append((piece.restart.anchor, lines))
            assert piece.rounded is not None
            out += [(text_of(line), shows) for line, shows in zip(piece.lines, piece.rounded, strict=True)]
        at += size
    return out


steps = st.tuples(
    st.sampled_from([0, 1, -3, 40, -200, 450, 3000, -(10**6)]),
    st.integers(0, 30),
    st.sampled_from([0, 1, NANO, ONE, 3 * ONE, 50 * ONE, 10**6 * ONE, 10**12 * ONE]),
)
SPECS = [
    CompactSpec(2),
    CompactSpec(2, records=5),
    CompactSpec(1, tokens=16 * 7),
    CompactSpec(2, 25 * CENT, span_ns=3 * NANO),
    CompactSpec(4, records=80),
]


@given(
    moves=st.lists(steps, min_size=1, max_size=90),
    spec=st.sampled_from(SPECS),
    sizes=st.lists(st.integers(1, 70), min_size=1, max_size=4),
)
@settings(max_examples=60)
def test_the_encoder_equals_plain_python_for_every_way_of_batching(
    moves: list[tuple[int, int, int]], spec: CompactSpec, sizes: list[int]
) -> None:
    rows, price = [], 6_123_000
    for move, width, volume in moves:
        opened, price = price, price + move
        prices = (opened, max(opened, price) + width, min(opened, price), price)
        rows.append((*(each * CENT for each in prices), volume))
    bars = bars_of(rows)
    reference = Reference(spec)
    for row, event in zip(rows, bars["ts_last_event"].tolist(), strict=True):
        reference.add(row, event)
    encoder = CompactEncoder(TOKENISER, spec)
    assert encoded(encoder, bars, sizes) == reference.out
    assert encoder.anchors == sum(isinstance(each[0], Anchor) for each in reference.out)  # type: ignore[index]
    kept = [[*bar[:4], *Volume.of(bar[4])] for bar, _, _ in reference.window]
    assert encoder.window.tolist() == kept


def restarts(encoder: CompactEncoder, rows: list[tuple[int, ...]]) -> list[Anchor]:
    pieces = encoder.encode(bars_of(rows))
    return [piece.restart.anchor for piece in pieces if piece.restart is not None]


def test_the_first_bar_sets_the_reference() -> None:
    encoder = CompactEncoder(TOKENISER, CompactSpec(2, records=64))
    (anchor,) = restarts(encoder, [flat(61_230 * NANO + 7 * CENT, 12 * ONE + ONE // 2)])
    assert anchor == Anchor(61_230 * NANO + 7 * CENT, CENT, 12 * ONE + ONE // 2, 2)
    assert anchor.header == "reference 61230.07 unit 0.01 volume 12.5 percent 999\n"


def test_prices_that_stay_keep_their_anchor_and_a_calm_window_gets_a_finer_unit() -> None:
    encoder = CompactEncoder(TOKENISER, CompactSpec(2, records=32))
    found = restarts(encoder, walk(200, 1, 0.5))
    assert len(found) == 1
    (jumped,) = restarts(encoder, [flat(6_123_000 * CENT + 39 * NANO)])
    assert jumped.unit == 10 * CENT  # 39.00 in at most 400 levels
    # the jump leaves the window after 32 bars; after 64 the anchor is checked
    settled = restarts(encoder, walk(100, 2, 0.5, start=6_126_900))
    assert [each.unit for each in settled] == [CENT]
    assert restarts(encoder, walk(300, 3, 0.5, start=6_126_900)) == []


def test_a_changed_volume_regime_moves_the_reference_volume() -> None:
    encoder = CompactEncoder(TOKENISER, CompactSpec(2, records=32))
    restarts(encoder, [flat(NANO, 3 * ONE)] * 70)
    assert encoder.saturated == 0
    found = restarts(encoder, [flat(NANO, 5000 * ONE)] * 130)
    assert [each.volume for each in found] == [5000 * ONE]
    assert 0 < encoder.saturated <= REVIEW  # the code's limit until then
    assert restarts(encoder, [flat(NANO, 1000 * ONE)] * 70) == []


def test_prices_finer_than_the_unit_are_rounded_counted_and_shown_while_they_are_in_the_window() -> None:
    """As when a symbol changes to more decimals than the session is configured for."""
    encoder = CompactEncoder(TOKENISER, CompactSpec(2, records=3))
    rows = [flat(100 * CENT)] * 2 + [flat(100 * CENT + CENT // 2)] + [flat(101 * CENT)] * 4
    shown = [flag for piece in encoder.encode(bars_of(rows)) for flag in piece.rounded or []]
    assert shown == [False, False, True, True, True, False, False]
    assert encoder.rounded == 1


def test_a_window_that_takes_more_tokens_around_another_anchor_loses_its_oldest_bars() -> None:
    """Where groups of digits differ in their number of tokens."""

    def encode(text: str) -> list[int]:
        return characters(text.replace("500", "!"))

    encoder = CompactEncoder(Tokeniser(encode), CompactSpec(2, tokens=32))
    encoder.encode(bars_of([flat(100 * CENT)] * 6))
    assert len(encoder.window) == 5  # 6 tokens each
    pieces = encoder.encode(bars_of([flat(2000 * CENT)]))
    (restart,) = [piece.restart for piece in pieces if piece.restart is not None]
    assert len(restart.window) == 1  # 14 tokens, as many as the new bar
    assert sum(len(tokens) for tokens, _ in restart.window) <= 32


@pytest.mark.parametrize(
    ("value", "unit", "expected"), [(5, 10, 0), (15, 10, 2), (-5, 10, 0), (-15, 10, -2), (-16, 10, -2)]
)
def test_whole_units(value: int, unit: int, expected: int) -> None:
    assert round_half_even(value, unit) == whole_units(value, unit) == expected


def test_decimals_outside_the_fixed_point_and_negative_units_are_refused() -> None:
    with pytest.raises(ValueError, match="price_decimals"):
        CompactSpec(10)
    with pytest.raises(ValueError, match="unit"):
        CompactSpec(2, -1)


# Beginning in the midst.


@given(
    seed=st.integers(0, 1000), step=st.sampled_from([2.0, 60.0, 400.0]), n=st.integers(2, 90), end=st.data()
)
@settings(max_examples=40)
def test_an_encoder_that_is_given_the_anchor_encodes_as_the_one_that_chose_it(
    seed: int, step: float, n: int, end: st.DataObject
) -> None:
    rows = bars_of(walk(n, seed, step))
    spec = CompactSpec(2, records=16)
    last, state, lines = end.draw(st.integers(1, n)), 0, list[list[int]]()
    encoder = CompactEncoder(TOKENISER, spec)
    for at in range(last):
        for piece in encoder.encode(rows[at : at + 1]):
            if piece.restart is not None:
                anchor, lines = piece.restart.anchor, [list(tokens) for tokens, _ in piece.restart.window]
                state = at - len(lines)
            lines += piece.lines
    again = CompactEncoder(TOKENISER, CompactSpec(2, records=16, begins=(anchor, last - state)))
    made = again.encode(rows[state:last])
    assert [piece.restart for piece in made] == [Restart(anchor, ()), *[None] * (len(made) - 1)]
    assert {piece.anchor for piece in made} == {anchor}
    assert [line for piece in made for line in piece.lines] == lines
