"""`foretick profile`: the fit of a known device, and the whole command on the embedded model."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from daemon.cli.main import main
from engine.engine import Engine
from lab.profile.cost_model import by_size, file_name, ladder_for, model_of, table, waking
from lab.profile.timing import Ladder, Samples, measure
from scheduler.costs import CostModel, load
from scheduler.curves import CostCurve
from tests.engine.oracle import tiny

CHUNK = 1024
NO_ENGINE = SimpleNamespace(model=SimpleNamespace(name="made up"), pool=SimpleNamespace(block_size=16))


def device(pass_s: float, floor_s: float, row_s: float = 0.0, context_s: float = 0.0) -> CostModel:
    """Attention grows with the context; a pass has a fixed cost and a floor."""
    sizes = [0.0, *(2.0**i for i in range(3, 15))]
    return CostModel(
        device="known",
        model="made up",
        block_size=16,
        source="made up",
        pass_tokens=CHUNK,
        pass_s=pass_s,
        floor_s=floor_s,
        recompute=CostCurve(tuple(sizes), tuple(1e-4 * n + 1e-8 * n * n for n in sizes)),
        swap_out=CostCurve((0.0, 1.0), (0.001, 0.002)),
        swap_in=CostCurve((0.0, 1.0), (0.0, 0.003)),
        row_s=row_s,
        context_s=context_s,
    )


def samples_of(known: CostModel, ladder: Ladder) -> Samples:
    """Noise-free measurements of the device. Prefills are the sums of their passes."""

    def prefill(n: int) -> int:
        return sum(known.batch_ns([(c, min(CHUNK, n - c))]) for c in range(0, n, CHUNK))

    blocks = [-(-n // 16) for n in ladder.prefills]
    return Samples(
        [(n, known.batch_ns([(0, n)]) / 1e9) for n in ladder.passes],
        [(n, prefill(n) / 1e9) for n in ladder.prefills],
        [(n, known.swap_out_ns(n) / 1e9) for n in blocks],
        [(n, known.swap_in_ns(n) / 1e9) for n in blocks],
        [(spans, known.batch_ns(spans) / 1e9) for spans in ladder.batches],
    )


@pytest.mark.parametrize(
    ("pass_s", "floor_s", "row_s", "context_s", "worst"),
    [
        # tokens only; when the one pass of single tokens is left out, nothing determines a row's cost
        (0.0, 1e-5, 0.0, 0.0, 2.2),
        # a CPU: starting a pass costs as much as a few dozen tokens
        (0.004, 0.0042, 0.0, 0.0, 0.15),
        (0.0, 0.012, 0.0, 0.0, 0.15),  # a GPU: a hundred tokens are as fast as one
        (0.002, 0.012, 0.0, 0.0, 0.15),
        (0.004, 0.0042, 0.002, 0.0, 0.15),
        (0.004, 0.0042, 0.001, 3e-6, 0.15),
    ],
)
def test_the_fit_recovers_a_known_device(
    pass_s: float, floor_s: float, row_s: float, context_s: float, worst: float
) -> None:
    known, ladder = device(pass_s, floor_s, row_s, context_s), ladder_for(8192, CHUNK, quick=False)
    found = model_of(samples_of(known, ladder), NO_ENGINE, CHUNK, "known", "made up")
    assert found.floor_s == pytest.approx(known.batch_ns([(0, 1)]) / 1e9)
    assert found.pass_s == pytest.approx(known.pass_s, abs=0.002)
    assert found.row_s == pytest.approx(row_s, abs=5e-4)
    assert found.context_s == pytest.approx(context_s, abs=1e-6)
    for n in (1, 40, 500, 1024, 3000, 8192):
        assert found.recompute_ns(n) == pytest.approx(known.recompute_ns(n), rel=0.1)
    for spans in (*ladder.batches, [(0, 8)] * 10, [(3000, 100), (0, 100)]):
        assert found.batch_ns(spans) == pytest.approx(known.batch_ns(spans), rel=0.2)
    for blocks in (1, 30, 512):
        assert found.swap_out_ns(blocks) == pytest.approx(known.swap_out_ns(blocks), rel=0.01)
        assert found.swap_in_ns(blocks) == pytest.approx(known.swap_in_ns(blocks), rel=0.01)
    assert set(found.errors) == {"recompute", "swap_out", "swap_in", "batch"}
    assert found.errors["batch"].median < 0.1
    assert found.errors["batch"].worst < worst


def test_a_pause_costs_what_passes_take_longer_after_it() -> None:
    found = waking([(0.0, 0.010), (0.0, 0.030), (0.0, 0.011), (0.1, 0.019), (0.02, 0.010), (1.0, 0.018)])
    assert [found(pause) for pause in (0.0, 0.02, 0.06, 0.1)] == pytest.approx([0.0, 0.0, 0.004, 0.008])
    assert found(1.0) == found(60.0) == pytest.approx(0.008)  # it never falls, and ends where it was measured


def test_a_batch_that_breaks_the_model_shows_in_its_error() -> None:
    known, ladder = device(0.0, 1e-5), ladder_for(8192, CHUNK, quick=False)
    samples = samples_of(known, ladder)
    samples.batches = [(spans, (3 if i % 2 else 0.3) * s) for i, (spans, s) in enumerate(samples.batches)]
    found = model_of(samples, NO_ENGINE, CHUNK, "known", "made up")
    assert found.errors["batch"].worst > 0.5


@pytest.mark.parametrize("limit", [100, 8192, 131_072])
@pytest.mark.parametrize("chunk", [1, 64, 2048])
@pytest.mark.parametrize("quick", [True, False])
def test_no_size_is_beyond_the_limits(limit: int, chunk: int, quick: bool) -> None:
    ladder = ladder_for(limit, chunk, quick=quick)
    assert ladder.passes[0] == 1
    assert max(ladder.passes) <= min(chunk, limit)
    assert max(ladder.prefills) <= limit < 2 * max(ladder.prefills) or quick
    for batch in ladder.batches:
        assert all(c + n <= limit for c, n in batch)
        assert sum(n for _, n in batch) <= max(chunk, len(batch))
    assert 16 * ladder.blocks(16) >= ladder.tokens
    assert all(c + n <= 40 for batch in ladder.up_to(40).batches for c, n in batch)
    assert max(ladder.up_to(40).prefills) <= 40


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Engine(tiny("llama", layers=2), blocks=24, block_size=4, frame_limit=64)
    torch.set_num_threads(before)


LADDER = Ladder(8, (1, 8), (4, 16, 32), (((16, 4), (0, 4)),), repeats=2)


def test_every_size_is_timed_as_often_and_nothing_stays_in_the_pool(engine: Engine) -> None:
    samples = measure(engine, LADDER)
    assert [n for n, _ in samples.passes] == [8, 1, 1, 8]  # down, then up
    assert [n for n, _ in samples.prefills] == [32, 16, 4, 4, 16, 32]
    assert [n for n, _ in samples.swap_out] == [n for n, _ in samples.swap_in] == [8, 4, 1, 1, 4, 8]
    assert [spans for spans, _ in samples.batches] == [LADDER.batches[0]] * 2
    times = [s for _, s in (*samples.passes, *samples.prefills, *samples.swap_out, *samples.batches)]
    assert min(times) > 0
    assert engine.pool.free_blocks == engine.pool.total_blocks
    engine.pool.check_integrity()
    assert {n: len(found) for n, found in by_size(samples.prefills).items()} == {4: 2, 16: 2, 32: 2}


def test_sizes_beyond_the_time_limit_are_left_out(engine: Engine) -> None:
    samples = measure(engine, replace(LADDER, patience_s=0.0))
    assert {n for n, _ in samples.prefills} == {4}
    assert samples.batches == []


def test_a_pool_that_is_too_small_raises(engine: Engine) -> None:
    with pytest.raises(RuntimeError, match="200 tokens"):
        measure(engine, replace(LADDER, prefills=(200,)))
    assert engine.pool.free_blocks == engine.pool.total_blocks


def test_the_command_writes_a_profile_that_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, ["profile", "--quick", "--set", "model.threads=1"])
    assert done.exit_code == 0, done.output
    model = load(tmp_path / "profiles" / "cpu.json")
    assert (model.device, model.block_size) == ("CPU", 16)
    assert model.source == "measured: foretick profile --quick"
    assert "foretick-tape" in model.model
    assert set(model.errors) == {"recompute", "swap_out", "swap_in", "batch"}
    assert 0 < model.recompute_ns(16) <= model.recompute_ns(256)
    assert "wrote profiles/cpu.json" in done.output
    assert "recompute, 256 tokens" in done.output


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["profile", "--set", f"model.path={tmp_path}/none"])
    assert done.exit_code == 2
    assert "model.path" in done.output


def test_a_device_gives_its_name_to_the_file() -> None:
    assert file_name("NVIDIA H200 (80GB)") == "nvidia-h200-80gb.json"


def test_the_table_has_a_row_for_every_size() -> None:
    known, ladder = device(0.002, 0.003), ladder_for(256, 64, quick=False)
    samples = samples_of(known, replace(ladder, chunk=CHUNK))
    lines = table(known, samples).splitlines()
    sizes = len(ladder.passes) + 3 * len(ladder.prefills) + len(ladder.batches)
    assert len(lines) == sizes + 2
    assert lines[1].split() == ["pass,", "1", "tokens", "3.000", "3.000"]
