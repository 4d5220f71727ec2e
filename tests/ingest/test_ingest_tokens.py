"""Token ids by table equal the tokenizer's own, for every way of splitting numbers."""

from functools import cache
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingest.bar_kernel import BAR, Bars
from ingest.lines import MINUTE_NS, LineSpec, bar_line
from ingest.tokens import Encode, Tokeniser
from tests.ingest.bpe import make_encode
from tests.ingest.building import TOKENISER, characters

STYLES = [("llama3", 3200, True), ("llama3", 500, True), ("qwen", 600, True), ("gpt2", 3200, False)]
MOST = 2**63 - 1


@cache
def tokeniser_of(style: str, vocabulary: int) -> Tokeniser:
    return Tokeniser(make_encode(style, vocabulary))


def random_bars(n: int, seed: int, interval: int) -> Bars:
    source = np.random.default_rng(seed)
    bars = np.zeros(n, BAR)
    bars["interval"] = interval
    bars["ts_open"] = source.integers(0, 2 * 10**18, n)
    for name in "ohlcv":
        bars[name] = source.integers(0, 10 ** source.integers(1, 19, n))
    return bars


def oracle(encode: Encode, bars: Bars, spec: LineSpec) -> list[list[int]]:
    return [list(encode(bar_line(bar, spec))) for bar in bars]


@pytest.mark.parametrize(("style", "vocabulary", "fast"), STYLES)
@pytest.mark.parametrize("decimals", [(0, 0), (2, 3), (5, 9)])
def test_ids_equal_the_tokenizers(style: str, vocabulary: int, fast: bool, decimals: tuple[int, int]) -> None:
    encode, tokeniser = make_encode(style, vocabulary), tokeniser_of(style, vocabulary)
    assert tokeniser.fast is fast
    spec = LineSpec(*decimals)
    for interval in (MINUTE_NS // 60, MINUTE_NS):
        bars = random_bars(200, 7, interval)
        lines = tokeniser.lines(bars, spec)
        assert lines == oracle(encode, bars, spec)
        if fast:  # lines tokenize independently, so their concatenation has the text's own tokens
            assert list(chain.from_iterable(lines)) == encode("".join(bar_line(bar, spec) for bar in bars))


@given(
    values=st.lists(st.sampled_from([0, 1, 499, 500, 501, 10**9 - 1, 10**9, MOST]), min_size=5, max_size=5),
    limbs=st.tuples(st.sampled_from([0, 0, 1, 10**9]), st.sampled_from([0, 0, 1, 5 * 10**8, 10**9 - 1])),
    scale=st.integers(0, 18),
    decimals=st.tuples(st.integers(0, 18), st.integers(0, 18)),
)
@settings(max_examples=400)
def test_extreme_numbers_by_table(
    values: list[int], limbs: tuple[int, int], scale: int, decimals: tuple[int, int]
) -> None:
    encode, tokeniser = make_encode("llama3", 3200), tokeniser_of("llama3", 3200)
    bars = np.zeros(1, BAR)
    bars["interval"], bars["ts_open"] = 1, 86_399 * 10**9
    for name, value in zip("ohlcv", values, strict=True):
        bars[name] = value
    bars["v_high"], bars["v_low"] = limbs
    spec = LineSpec(min(decimals[0], scale), decimals[1], price_scale=scale)
    assert tokeniser.lines(bars, spec) == oracle(encode, bars, spec)


def test_negative_prices_go_through_the_tokenizer() -> None:
    bars = random_bars(3, 1, MINUTE_NS)
    bars["l"][1] = -37_630_000_000  # crude oil, 20 April 2020
    expected = oracle(make_encode("llama3", 3200), bars, LineSpec())
    assert tokeniser_of("llama3", 3200).lines(bars, LineSpec()) == expected


def joins_lines(text: str) -> list[int]:
    """Single characters, but a newline merges with the next digit: only joined lines show it."""
    return characters(text.replace("\n0", "!"))


def merges_one_long_number(text: str) -> list[int]:
    """Single characters, but one six-digit run has a token of its own."""
    return characters(text.replace("000000", "!"))


def prepends_a_token(text: str) -> list[int]:
    return [1, *characters(text)]


@pytest.mark.parametrize("encode", [joins_lines, merges_one_long_number, prepends_a_token])
def test_a_tokenizer_that_differs_anywhere_gets_no_tables(encode: Encode) -> None:
    tokeniser = Tokeniser(encode)
    assert (tokeniser.fast, tokeniser.fast_compact) == (False, False)
    bars = random_bars(5, 3, MINUTE_NS)
    assert tokeniser.lines(bars, LineSpec()) == oracle(encode, bars, LineSpec())
    assert tokeniser.compact(np.zeros((1, 5), np.int64)) == [encode("0" * 15 + "\n")]


def test_plain_characters_are_the_simplest_tokenizer_with_tables() -> None:
    """The refusals above come from the differences, not from the fakes."""
    assert (TOKENISER.fast, TOKENISER.fast_compact) == (True, True)
