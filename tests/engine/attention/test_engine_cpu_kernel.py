"""The compiled CPU kernel beyond what all backends have in common: sizes, tiles, pieces, threads, choice."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llvmlite import binding, ir

from engine.attention.base import LayerCall
from engine.attention.cpu import CpuAttention
from engine.attention.cpu_kernel.backend import KV_KINDS, CpuKernelAttention
from engine.attention.cpu_kernel.choice import cpu_attention, disagreement
from engine.attention.cpu_kernel.task_plan import Shape, _cut, plan
from engine.attention.reads import reads_of
from engine.compiled.packed_products import panel_product
from engine.cpu.emit import emitted
from engine.cpu.team import torch_openmp
from engine.cpu.vectors import PAIRED, TILE, widths
from regions.extents import Extent, Placement
from regions.kv_codes import stored
from regions.kv_tensors import LayerShape
from tests.engine.attention.layers import Layer, defined, seen_by_row, unread
from tests.kit import tolerance


def made(
    context: int,
    rows: int,
    *,
    readers: int = 1,
    kv_heads: int = 2,
    groups: int = 2,
    dims: tuple[int, int] = (32, 32),
    dtype: torch.dtype = torch.float32,
) -> LayerCall:
    """``readers`` of a shared context, each with ``rows`` new rows."""
    slots = context + readers * (rows + 2) + 2
    layer = Layer(
        context + rows, slots, kv_heads=kv_heads, groups=groups, dims=dims, rotary=dims[0], dtype=dtype
    )
    shared = (layer.extent(context, 0, 0),) if context else ()
    for _ in range(readers):
        layer.add(shared, rows)
    return layer.call()


@pytest.mark.parametrize("dtype", KV_KINDS, ids=["float32", "bfloat16", "int8"])
@pytest.mark.parametrize(
    ("kv_heads", "groups", "dims"),
    [(1, 1, (16, 16)), (2, 4, (64, 64)), (3, 1, (128, 128)), (1, 7, (32, 80)), (1, 2, (256, 16))],
)
@pytest.mark.parametrize(("context", "rows"), [(0, 1), (0, 90), (1, 1), (TILE, 3), (777, 20), (5000, 2)])
def test_every_size_gives_float64_s_output(
    context: int, rows: int, kv_heads: int, groups: int, dims: tuple[int, int], dtype: torch.dtype
) -> None:
    """Tiles that are full, begun and cut by the causal edge; contexts long enough to be cut into pieces."""
    call = made(context, rows, kv_heads=kv_heads, groups=groups, dims=dims, dtype=dtype)
    tolerance.assert_sums(CpuKernelAttention()(call), defined(call), width=context + rows)


@given(st.data())
@settings(max_examples=200)
def test_runs_of_slots_are_cut_into_pieces_without_loss(data: st.DataObject) -> None:
    """In order, at borders of tiles, no more pieces than wanted; also where sizes do not divide."""
    lengths = data.draw(st.lists(st.integers(1, 3000), min_size=1, max_size=5))
    readers = data.draw(st.lists(st.integers(1, 30), min_size=len(lengths), max_size=len(lengths)))
    pieces, groups = data.draw(st.integers(2, 32)), data.draw(st.integers(1, 8))
    sizes = enumerate(zip(readers, lengths, strict=True))
    runs = np.array([(i, n, 10_000 * i, 10_000 * i + length, 7) for i, (n, length) in sizes])
    tiles = -(-(runs[:, 3] - runs[:, 2]) // TILE)
    into = np.empty((len(runs) + pieces, runs.shape[1]), np.int64)
    sizes = _cut(runs, tiles, tiles * (runs[:, 1] * groups + 6), pieces, into)
    assert 1 <= len(sizes) <= pieces
    assert sizes.all()
    flat = into[: sizes.sum()]
    for entry, entries, low, high, _ in runs.tolist():
        own = flat[flat[:, 0] == entry]
        assert (own[:, 1] == entries).all()
        assert [own[0, 2], own[-1, 3]] == [low, high]
        assert (own[1:, 2] == own[:-1, 3]).all()
        assert ((own[1:, 2] - low) % TILE == 0).all()


@settings(max_examples=60)
@given(st.integers(0, 2000), st.integers(1, 130), st.integers(1, 4), st.sampled_from([None, 5, 300]))
def test_a_plan_reads_what_its_rows_see(context: int, rows: int, readers: int, window: int | None) -> None:
    """Every row its keys by slot and shift, each once; each segment lies in one task of its rows' block."""
    metadata = made(context, rows, readers=readers).metadata
    found = plan(reads_of(metadata), rows * readers, window, Shape(2, 2, 32, 32))
    seen: list[list[tuple[int, int]]] = [[] for _ in range(rows * readers)]
    for first_row, count, first, segments, *_ in found.tasks.tolist():
        for entry, entries, start, stop, extent in found.segments[first : first + segments].tolist():
            slots = slots_of(found.extents[extent:].tolist(), stop)
            for row, turn, low, high in found.entries[entry : entry + entries].tolist():
                assert first_row <= row < first_row + count
                shift = 0 if turn < 0 else found.shifts[turn]
                seen[row] += [(slot, shift) for slot in slots[max(low, start) : min(high, stop)]]
    assert [sorted(keys) for keys in seen] == [sorted(keys) for keys in seen_by_row(metadata, window)]


def test_windows_of_a_pass_are_one_reader_of_one_run() -> None:
    """Bars appended together, each of which sees a bar less of the past: runs do not end there."""
    layer = Layer(1)
    tape = layer.extent(400, 1000, 900)
    for at in range(0, 200, 20):
        context = (Extent(tape.slot + at, 400 - at, 1000 + at, 900), Extent(900, at, 1400, 900))
        layer.place(Placement(context[: 1 + (at > 0)], ((900 + at, 20),), 1400 + at, 900))
    call = layer.call()
    found = plan(reads_of(call.metadata), 200, None, Shape(2, 3, 16, 16))
    assert found.blocks == 1
    assert len(set(found.segments[:, 4].tolist())) == 1
    tolerance.assert_sums(CpuKernelAttention()(call), defined(call), width=600)


def slots_of(extents: list[list[int]], stop: int) -> list[int]:
    """The slots of a run's keys up to ``stop``."""
    slots: list[int] = []
    for (first, slot), (until, _) in pairwise(extents):
        if len(slots) < stop:
            slots += range(slot, slot + until - first)
    return slots


@pytest.mark.parametrize("readers", [1, 25])
@pytest.mark.parametrize("rows", [1, 37])
def test_readers_of_one_context_get_what_each_gets_alone(readers: int, rows: int) -> None:
    call = made(1500, rows, readers=readers)
    tolerance.assert_sums(CpuKernelAttention()(call), defined(call), width=1600)


def test_a_fork_gets_the_bits_alone_that_it_gets_beside_another() -> None:
    """Its own keys are summed up by themselves, though no other sequence reads the tape before them."""
    layer = Layer(1)
    tape = layer.extent(150, 1000, 900)
    for _ in range(2):
        own = layer.extent(4, 0, 0)
        layer.place(Placement((tape,), ((own.slot, 4),), 1150, 900, own=1150))
    both = CpuKernelAttention()(layer.call())
    query = layer.call().query[:, :4]
    layer.sequences.pop()
    assert torch.equal(CpuKernelAttention()(replace(layer.call(), query=query)), both[:, :4])


def test_a_kernel_is_used_again_for_passes_of_other_sizes() -> None:
    """Its memory grows and holds numbers of earlier passes."""
    kernel = CpuKernelAttention()
    for context, rows in ((900, 60), (3, 1), (2000, 100), (900, 60)):
        call = made(context, rows)
        tolerance.assert_sums(kernel(call), defined(call), width=context + rows)


@pytest.mark.parametrize(("context", "rows", "readers"), [(6000, 1, 1), (300, 700, 1), (4000, 4, 25)])
def test_threads_change_no_bit(context: int, rows: int, readers: int, threads: Callable[[int], None]) -> None:
    call = made(context, rows, readers=readers)
    found = []
    for count in (1, 2, 3):
        threads(count)
        found.append(CpuKernelAttention()(call))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("dtype", KV_KINDS)
def test_heads_of_whole_vectors_are_served_by_the_kernel_and_others_by_torch(dtype: torch.dtype) -> None:
    assert isinstance(cpu_attention([LayerShape(2, 64, 64)], dtype), CpuKernelAttention)
    assert disagreement(CpuKernelAttention(), LayerShape(2, 64, 32), dtype) < 2.0**-16
    mixed = [LayerShape(2, 64, 64), LayerShape(2, 24, 24)]
    assert isinstance(cpu_attention(mixed, dtype), CpuAttention)
    assert isinstance(cpu_attention([LayerShape(2, 64, 64)], torch.float16), CpuAttention)


def test_tiles_fit_the_registers_of_the_cpu() -> None:
    assert widths({"avx512f": True, "avx2": True}) == (4, 2, 1)
    assert widths({"avx512f": False, "avx2": True}) == widths({}) == (1,)


def test_the_openmp_library_is_torch_s_own_or_the_only_one() -> None:
    home = Path(torch.__file__).parent
    own, other = f"{home}/lib/libgomp.so.1", "/usr/lib/libgomp.so.1"

    def maps(*paths: str) -> str:
        return "".join(
            f"7f00-7f01 r-xp 00000000 08:01 42   {path}\n" for path in (*paths, "/usr/lib/libc.so.6")
        )

    assert torch_openmp(maps(own)) == own
    assert torch_openmp(maps(other)) == other
    assert torch_openmp(maps(own, other)) == own
    assert torch_openmp(maps(other, "/opt/libomp.so")) is None
    assert torch_openmp(maps()) is None
    assert torch_openmp("") is None


def test_a_kernel_that_is_wrong_or_fails_is_not_chosen(caplog: pytest.LogCaptureFixture) -> None:
    class Wrong(CpuKernelAttention):
        def __call__(self, call: LayerCall) -> torch.Tensor:
            return super().__call__(call) * 1.001

    class Failing(CpuKernelAttention):
        def __call__(self, call: LayerCall) -> torch.Tensor:
            raise RuntimeError("LLVM has no such instruction")

    for kernel in (Wrong, Failing):
        assert isinstance(cpu_attention([LayerShape(2, 32, 32)], torch.float32, kernel), CpuAttention)
    assert "off by" in caplog.text
    assert "no such instruction" in caplog.text


@pytest.mark.parametrize("dtype", KV_KINDS)
def test_nothing_beside_a_run_is_read_into_the_result(dtype: torch.dtype) -> None:
    """All slots that no row reads are NaN or infinite; runs end within a tile and within a vector."""
    for context, rows in ((1, 1), (63, 2), (65, 9), (130, 20), (17, 3)):
        call = made(context, rows, readers=2, dtype=dtype)
        wanted = CpuKernelAttention()(call)
        for pool, beside in ((call.keys, float("nan")), (call.values, float("inf"))):
            pool[:, unread(call)] = stored(torch.full((32,), beside), dtype)
        assert torch.equal(CpuKernelAttention()(call), wanted)


def test_heads_that_are_not_served_are_refused() -> None:
    with pytest.raises(ValueError, match="another backend"):
        CpuKernelAttention()(made(5, 1, dims=(24, 24)))


@pytest.mark.parametrize(
    ("triple", "cpu", "fused"),
    [
        ("x86_64-unknown-linux-gnu", "haswell", ["vfmadd231ps"]),
        ("x86_64-unknown-linux-gnu", "sapphirerapids", ["vfmadd231ps", "vdpbf16ps"]),
        ("aarch64-unknown-linux-gnu", "neoverse-v1", ["fmla"]),
    ],
)
def test_the_inner_loops_compile_for_other_cpus(triple: str, cpu: str, fused: list[str]) -> None:
    """Those of compiled layers included, with products of bfloat16 where the CPU has them."""
    assert panel_product
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    module = ir.Module("other")
    module.triple = triple
    names = emitted(module, [PAIRED] if cpu == "sapphirerapids" else [])
    machine = binding.Target.from_triple(triple).create_target_machine(cpu=cpu, opt=3)
    # nothing calls them here, and LLVM drops what is internal
    parsed = binding.parse_assembly(str(module).replace("define internal", "define"))
    parsed.verify()
    assembly = machine.emit_assembly(parsed)
    assert len(names) > 5
    assert all(name in assembly for name in names)
    assert all(instruction in assembly for instruction in fused)
