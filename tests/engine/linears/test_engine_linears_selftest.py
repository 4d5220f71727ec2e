"""The fastest way is chosen from measured times, and a way that is wrong or missing is never chosen."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import linear

from engine.linears.linear_selftest import EDGE, ROWS, Layers, SelfTest, choose
from engine.linears.products import TORCH, MatmulLibrary, Way
from engine.measurement_cache import Memory
from engine.stopwatch import Call

OTHER = MatmulLibrary("other", linear)
PLAIN, FAST, JOINT = Way(TORCH), Way(OTHER), Way(OTHER, joint=True)


def layers(*outs: int, width: int = 16, bias: bool = False) -> Layers:
    generator = torch.Generator().manual_seed(3)
    return Layers(
        [torch.randn(out, width, generator=generator) for out in outs],
        [torch.randn(out, generator=generator) if bias else None for out in outs],
    )


class Times:
    """A measuring function with given seconds for each call; ``asked``: how many calls each time."""

    def __init__(self, *seconds: float) -> None:
        self.seconds = seconds
        self.asked: list[int] = []

    def __call__(self, calls: Sequence[Call]) -> list[float]:
        for call in calls:
            call()
        self.asked.append(len(calls))
        return list(self.seconds[: len(calls)])


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({PLAIN: [1.0, 1.0], FAST: [0.9, 0.9]}, FAST),
        ({PLAIN: [1.0, 1.0], FAST: [1.1, 0.95]}, PLAIN),
        # better for few rows and worse for many, each by its share
        ({PLAIN: [1.0, 10.0], FAST: [0.6, 12.0]}, FAST),
        ({PLAIN: [1.0, 10.0], FAST: [1.5, 9.0]}, PLAIN),
        ({PLAIN: [1.0], FAST: [0.7], JOINT: [0.6]}, JOINT),
        # within the edge is noise
        ({PLAIN: [1.0] * 3, FAST: [1 - EDGE / 2] * 3}, PLAIN),
        # a single hiccup does not decide
        ({PLAIN: [1.0] * 5, FAST: [0.6] * 4 + [90.0]}, FAST),
        ({PLAIN: [1.0]}, PLAIN),
    ],
)
def test_the_least_mean_of_relative_times_wins(times: dict[Way, list[float]], expected: Way) -> None:
    assert choose(times) == expected


@pytest.mark.parametrize("bias", [False, True])
def test_it_takes_the_fastest_and_remembers_it(bias: bool) -> None:
    """Another model with the same shape asks no clock; another shape does."""
    measure = Times(1e-6, 9e-7, 8e-7)
    test = SelfTest(measure)
    ways = [PLAIN, FAST, JOINT]
    assert test.fastest(layers(8, 4, bias=bias), ways, PLAIN) == JOINT
    assert measure.asked == [3] * len(ROWS)
    assert test.fastest(layers(8, 4, bias=bias), ways, PLAIN) == JOINT
    assert len(measure.asked) == len(ROWS)
    test.fastest(layers(8, 5, bias=bias), ways, PLAIN)
    assert len(measure.asked) == 2 * len(ROWS)


def _shifted(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return linear(rows, weight.roll(1, 0), bias)


def _missing(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    raise RuntimeError("this CPU has no such instruction")


def _nan(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return linear(rows, weight, bias) * torch.nan


def _only_one_row(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return linear(rows, weight, bias) * (rows.shape[-2] == 1)


def _rounded(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """In bf16, as a library may do behind the back of float32."""
    return linear(rows.bfloat16(), weight.bfloat16()).float()


@pytest.mark.parametrize("apply", [_shifted, _missing, _nan, _only_one_row, _rounded])
def test_a_wrong_or_missing_way_is_not_chosen(apply: object) -> None:
    wrong = Way(replace(OTHER, apply=apply))  # type: ignore[arg-type]  # an Apply
    assert SelfTest(Times(1e-6, 1e-7)).fastest(layers(8), [PLAIN, wrong], PLAIN) == PLAIN
    assert SelfTest(Times(1e-7)).fastest(layers(8), [wrong], PLAIN) == PLAIN


def test_running_out_of_memory_is_not_a_missing_way() -> None:
    def full(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    with pytest.raises(RuntimeError, match="allocate"):
        SelfTest(Times(1.0)).fastest(layers(8), [Way(replace(OTHER, apply=full))], PLAIN)


def test_slow_products_are_measured_with_fewer_rows() -> None:
    """The measured times alone decide when the budget is spent; one row is always measured."""
    for seconds, expected in ((1.0, 1), (1e-3, 4), (1e-6, len(ROWS))):
        measure = Times(seconds, seconds)
        SelfTest(measure, budget_s=0.09).fastest(layers(8), [PLAIN, FAST], PLAIN)
        assert len(measure.asked) == expected


def test_large_weights_are_measured_by_a_part_of_their_outputs() -> None:
    cut = layers(40, 20, width=10, bias=True).cut(300)
    assert [weight.shape for weight in cut.weights] == [(20, 10), (10, 10)]
    assert [bias.shape for bias in cut.biases if bias is not None] == [(20,), (10,)]
    whole = layers(40, 20, width=10)
    assert [weight.shape for weight in whole.cut(600).weights] == [(40, 10), (20, 10)]
    assert [weight.shape for weight in layers(2, width=1000).cut(10).weights] == [(1, 1000)]


def remembering(measure: Times, folder: Path) -> SelfTest:
    return SelfTest(measure, memory=Memory(lambda: folder))


def test_the_next_process_takes_the_same_way_without_a_clock(tmp_path: Path) -> None:
    """Other shapes and other ways are another question."""
    ways = [PLAIN, FAST, JOINT]
    assert remembering(Times(1e-6, 8e-7, 9e-7), tmp_path).fastest(layers(8, 4), ways, PLAIN) == FAST
    again = Times(1e-6, 1e-5, 1e-5)
    assert remembering(again, tmp_path).fastest(layers(8, 4), ways, PLAIN) == FAST
    assert again.asked == []
    assert remembering(again, tmp_path).fastest(layers(8, 5), ways, PLAIN) == PLAIN
    assert remembering(again, tmp_path).fastest(layers(8, 4), [PLAIN, FAST], PLAIN) == PLAIN
    assert again.asked == [3] * len(ROWS) + [2] * len(ROWS)


@pytest.mark.parametrize("apply", [_shifted, _missing, _nan])
def test_a_remembered_way_that_is_wrong_or_missing_is_measured_again(tmp_path: Path, apply: object) -> None:
    """As after a library was replaced."""
    remembering(Times(1e-6, 1e-7), tmp_path).fastest(layers(8), [PLAIN, FAST], PLAIN)
    wrong = Way(replace(OTHER, apply=apply))  # type: ignore[arg-type]  # an Apply
    again = Times(1e-6, 1e-7)
    assert remembering(again, tmp_path).fastest(layers(8), [PLAIN, wrong], PLAIN) == PLAIN
    assert again.asked
