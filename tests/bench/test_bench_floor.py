"""Floors take the best library, and say which."""

from __future__ import annotations

import pytest
import torch

from bench.engine.floor import Floors, PassCosts
from bench.engine.rates import MachineRates, Rate, _total


def test_the_best_library_is_taken_and_named() -> None:
    """Every way is measured at each look; the rate is that of the fastest look of the fastest way."""
    rates = MachineRates(64, 1 << 16, threads=2)
    rates.look()
    rates.look()
    found = {figure.name: figure for figure in rates.figures()}
    for what, best in (
        ("product in float32", rates.product(torch.float32)),
        ("product in bfloat16", rates.product(torch.bfloat16)),
        ("memory read", rates.read()),
    ):
        ways = {name: figure for name, figure in found.items() if name.startswith(what)}
        assert len(ways) > 1 or what == "product in bfloat16"
        assert best.a_second == pytest.approx(1e9 * max(figure.high or 0.0 for figure in ways.values()))
        assert f"{what}, {best.by}" in ways
    assert {figure.n for figure in found.values()} == {10}


def test_another_dtype_has_no_floor() -> None:
    rates = MachineRates(64, 1 << 16, dtypes=[torch.float32])
    rates.look()
    with pytest.raises(ValueError, match="product in bfloat16"):
        rates.product(torch.bfloat16)


def test_every_byte_is_read() -> None:
    values = torch.arange(1000, dtype=torch.int64).numpy()
    assert _total(values) == 999 * 500


def test_floors_say_what_they_are_made_of() -> None:
    floors = Floors(PassCosts(*range(5)), Rate("oneDNN", 4.6e11), Rate("a sum", 3.04e10))
    assert floors.made_of == "460 GFLOP/s (oneDNN), 30.4 GB/s (a sum)"
