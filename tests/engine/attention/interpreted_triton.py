"""The Triton backend against the reference and the oracle; `test_engine_triton` runs it in its own process.

Triton decides when it is imported whether kernels are interpreted, and torch imports it: so this must run
with TRITON_INTERPRET=1 set before, unless there is a GPU, which then runs the real kernels.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

import engine.attention.triton as backend
from engine.attention.base import Attention, LayerCall
from engine.attention.reference import ReferenceAttention
from engine.attention.triton import TritonAttention
from engine.engine import Engine
from engine.fused.decoder import FusedDecoder
from engine.model.canary import check
from engine.model.loading import prepare
from engine.model.plain import is_plain
from engine.step import Chunk
from regions.extents import Extent, Placement
from regions.tape import Retention
from tests.engine.attention.layers import Layer, unread
from tests.engine.oracle import random_weights, tiny, tiny_config
from tests.kit import tolerance
from tests.kit.engine import TapeWithHistory, ask_together, tokens

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTH = 500  # terms of the longest sums: keys that a row sees
PROGRAMS = 12  # for each KV head: splits keys of the small cases below


@pytest.fixture(autouse=True)
def bf16_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies the bits of bf16 as integers and cuts where a GPU rounds to nearest."""
    plain = InterpreterBuilder.create_dot

    def wide(handle: TensorHandle) -> TensorHandle:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: Any, a: TensorHandle, b: TensorHandle, *rest: Any) -> TensorHandle:
        return plain(self, wide(a), wide(b), *rest)

    def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source, target) != (tl.float32, tl.bfloat16):
            return cutting(data, source, target, rounding)
        return (
            torch.from_numpy(np.ascontiguousarray(data)).bfloat16().view(torch.int16).numpy().view(np.uint16)
        )

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
    cutting = interpreter._convert_float
    monkeypatch.setattr(interpreter, "_convert_float", convert)


@pytest.fixture(autouse=True)
def language_patched_once_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter looks through the whole language at each call inside a kernel: a third of its time."""
    patch_language, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[int] = set()

    def launch_patching_anew(self: Any, *arguments: Any, **options: Any) -> None:
        patched.clear()  # a launch takes its patches back when it ends
        launch(self, *arguments, **options)

    def patch(function: Any) -> Any:
        where = id(function.__globals__)
        if where not in patched:
            patched.add(where)
            return patch_language(function)
        return None

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch_patching_anew)
    monkeypatch.setattr(interpreter, "_patch_lang", patch)


def layer(seed: int, slots: int = 1200, **shape: Any) -> Layer:
    """By default with 2 heads of KV, 2 query heads each, and 64 dimensions that are all rotated."""
    dims = shape.pop("dims", (64, 64))
    return Layer(seed, slots, device=DEVICE, dims=dims, **{"groups": 2, "rotary": dims[0], **shape})


def both(call: LayerCall) -> tuple[torch.Tensor, torch.Tensor]:
    """The results of the kernels and of the reference."""
    actual = TritonAttention(programs=PROGRAMS * len(call.keys))(call)
    expected = ReferenceAttention()(call)
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    return actual, expected


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "window": ({"kv_heads": 1}, {"window": 37}),
    "window of one": ({"kv_heads": 1}, {"window": 1}),
    "softcap": ({"kv_heads": 1}, {"softcap": 3.0}),
    "sinks": ({"kv_heads": 1}, {"sinks": True}),
    "everything": ({"groups": 3, "rotary": 32}, {"window": 60, "softcap": 20.0, "sinks": True}),
    "dim 128, page-major": ({"dims": (128, 128), "page_major": True}, {}),
    "dim 256, one head": ({"dims": (256, 256), "kv_heads": 1, "groups": 1}, {"window": 90}),
    "dims 96 and 80": ({"dims": (96, 80), "kv_heads": 1, "groups": 7}, {}),
    "no positions": ({"rotary": 0, "kv_heads": 1}, {}),
    "partial rotary of an odd size": ({"dims": (80, 80), "rotary": 48, "kv_heads": 1}, {}),
    "dim 16": ({"dims": (16, 16), "kv_heads": 1, "groups": 20}, {}),
}
"""The layer, and how it is called."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES)
def test_mixed_batches_equal_the_reference(case: str) -> None:
    """Shared extents in several frames, causal rows, NaN in slots without readers."""
    shape, options = CASES[case]
    call = layer(len(case), **shape).mixed().call(**options)
    for pool in (call.keys, call.values):
        pool[:, unread(call)] = float("nan")
    tolerance.assert_sums(*both(call), width=WIDTH)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_half_precision_is_within_its_own_rounding(dtype: torch.dtype, dim: int) -> None:
    """As close to the fp32 answer as the reference in the same dtype, within a factor."""
    call = layer(dim, dims=(dim, dim), dtype=dtype, kv_heads=1, groups=4).mixed().call(150, 30.0, sinks=True)
    half = {name: value.to(dtype) for name, value in vars(call).items() if isinstance(value, torch.Tensor)}
    call = replace(call, **half)
    exact = ReferenceAttention()(replace(call, **{name: value.float() for name, value in half.items()}))

    def off(attention: Callable[[LayerCall], torch.Tensor]) -> float:
        return float((attention(call).float() - exact).abs().max())

    assert off(TritonAttention(programs=PROGRAMS)) < 1.3 * off(ReferenceAttention())


def test_a_request_that_writes_nan_spoils_no_other() -> None:
    """Two readers of a tape share one tile, and one of them appends NaN: the other does not change."""
    batch = layer(0, 130, groups=4)
    tape = Extent(5, 100, 0, 0)
    for first in (105, 120):
        batch.place(Placement((tape,), ((first, 2),), 100, 0))
    call = batch.call()
    expected = ReferenceAttention()(call)
    call.values[:, 106] = float("nan")
    output = TritonAttention(programs=2 * PROGRAMS)(call)
    assert output[:, 1].isnan().all()
    tolerance.assert_sums(output[:, 2:], expected[:, 2:], width=WIDTH)


class Capture:
    """Stands for a kernel and remembers its launches, as the capture of a CUDA graph does."""

    def __init__(self, kernel: Any, launches: list[Callable[[], None]]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            self.launches.append(lambda: self.kernel[grid](*args, **kwargs))
            self.launches[-1]()

        return launch


def test_a_captured_call_answers_another_batch_after_prepare(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launches of one pass, replayed, serve a batch of other extents, frames and fewer
    rows.

    Nothing of the first batch may be in the arguments or the grid, only in the tensors `prepare` refills.
    """
    first, second = layer(0, 230, dims=(32, 32)), layer(1, 230, dims=(32, 32))
    first.place(Placement((Extent(3, 200, 50, 40),), ((210, 6),), 250, 40))
    shared = Extent(40, 130, 7000, 6990)
    second.place(Placement((shared,), ((5, 1),), 7130, 9))
    second.place(Placement((shared,), ((220, 3), (18, 1)), 7130, 6990))
    call, other = first.call(), second.call()
    padded = torch.cat((call.query, torch.zeros_like(call.query[:, :2])), 1)  # to the bucket's 8 rows
    static = replace(call, query=padded)
    attention = TritonAttention(programs=2 * PROGRAMS)
    attention(static)
    captured_for = attention.prepare(call.metadata)
    launches: list[Callable[[], None]] = []
    with monkeypatch.context() as patch:
        for name in ("attend", "merge", "rotation_table"):
            patch.setattr(backend, name, Capture(getattr(backend, name), launches))
        output = attention(static)
    tolerance.assert_sums(output[:, :6], ReferenceAttention()(call), width=WIDTH)
    assert len(launches) == 3

    call.keys.copy_(other.keys)
    call.values.copy_(other.values)
    padded[:, :5].copy_(other.query)
    assert attention.prepare(other.metadata) == captured_for
    for launch in launches:
        launch()
    tolerance.assert_sums(output[:, :5], ReferenceAttention()(other), width=WIDTH)
    assert not output[:, 5:].any()  # rows of padding


def test_the_rotation_table_is_made_once_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that share a rotation share its table; the next pass makes its own."""
    one = layer(0, 40, dims=(16, 16))
    one.place(Placement((Extent(3, 20, 0, 0),), ((30, 1),), 20, 7))
    call = one.call()
    launches: list[Callable[[], None]] = []
    monkeypatch.setattr(backend, "rotation_table", Capture(backend.rotation_table, launches))
    attention = TritonAttention(programs=2 * PROGRAMS)
    for _ in range(3):
        attention(call)
    assert len(launches) == 1
    attention(replace(call, metadata=one.metadata))
    assert len(launches) == 2


class Switch:
    """The reference until `attention` is set to another backend; only the final state is under test."""

    def __init__(self) -> None:
        self.attention: Attention = ReferenceAttention()

    def __call__(self, call: LayerCall) -> torch.Tensor:
        return self.attention(call)


def test_rotations_by_a_whole_frame_are_precise() -> None:
    """Cosines and sines of 32k positions are as exact as fp32 allows; a shift of 0 is exactly 1 and 0."""
    inv_freq = 500000.0 ** (-torch.arange(0, 1, 1 / 24, dtype=torch.float64, device=DEVICE))
    shifts = torch.tensor([0, 31999, -32003], dtype=torch.int32, device=DEVICE)
    table = torch.empty(3, 2, 24, device=DEVICE)
    backend.rotation_table[(3,)](shifts, inv_freq, table, HALF=24, BLOCK=32)
    angles = shifts.double()[:, None] * inv_freq
    tolerance.assert_sums(table, torch.stack((angles.cos(), angles.sin()), 1), width=1)
    assert (table[0, 0] == 1).all()
    assert (table[0, 1] == 0).all()


FUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "biases": ("qwen2", {}),
    "norms of heads": ("qwen3", {}),
    "three queries a key, heads of 24": (
        "llama", {"hidden_size": 96, "num_attention_heads": 6, "intermediate_size": 100, "head_dim": 24}
    ),
}  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", FUSED)
def test_fused_layers_give_what_the_unmodified_model_gives(case: str, dtype: torch.dtype) -> None:
    """By the canary: frozen and new tokens, two frames, all rows and few of them, token after token.

    The unmodified model runs on the same memory, as views of the joined matrices.
    """
    architecture, shape = FUSED[case]
    weights = random_weights(tiny_config(architecture, layers=2, **shape)).to(DEVICE, dtype)
    model = prepare(weights, None, name=case, layers="torch")
    decoder = FusedDecoder.of(weights)
    attention = weights.model.layers[1].self_attn
    assert attention.q_proj.weight.data_ptr() == decoder.layers[1].joint.weight.data_ptr()
    ready = replace(model, decoder=decoder)
    assert ready.layers_run == "fused layers"
    assert check(ready) < (1e-5 if dtype == torch.float32 else 0.05)


def test_fused_layers_leave_the_pool_beside_their_slots_alone() -> None:
    """Keys and values of a pass go to its own slots, wherever these are."""
    weights = random_weights(tiny_config("llama", layers=1)).to(DEVICE)
    model = replace(prepare(weights, None, name="llama", layers="torch"), decoder=FusedDecoder.of(weights))
    engine = Engine(model, blocks=8, block_size=4, frame_limit=90, attention=ReferenceAttention())
    first, second = engine.open_prompt(), engine.open_prompt()
    for prompt in (first, second, first):
        assert prompt.acquire(5)
        before = [each.clone() for each in (*engine.pool.keys, *engine.pool.values)]
        slots = set(chunk_slots(prompt.next_slots(5)))
        engine.execute([Chunk(prompt, [3, 4, 5, 6, 7], sample=False)])
        for was, now in zip(before, (*engine.pool.keys, *engine.pool.values), strict=True):
            changed = (was != now).any(-1).any(0).nonzero()[:, 0].tolist()
            assert set(changed) == slots
    first.release()
    second.release()


def chunk_slots(placement: Placement) -> list[int]:
    """The slots of new tokens."""
    return [slot for start, count in placement.slots for slot in range(start, start + count)]


ALTERNATING = ("gemma2", "gemma3_text", "gpt_oss")  # every other layer sees a window


@pytest.mark.sampled(2)
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "mistral", "gemma3_text", "phi3", "gpt_oss"])
def test_a_tape_with_questions_equals_the_oracle(architecture: str) -> None:
    """Through the engine: records to a tape of several frames, then questions of two versions of it.

    The last append has three records, each of which sees what it would see if it came alone.
    """
    layers = 2 if architecture in ALTERNATING else 1
    weights = random_weights(tiny_config(architecture, layers=layers)).to(DEVICE)
    # torch.compile takes seconds for each of the others, and is tested in `test_engine_gpu`
    model = prepare(weights, None, name=architecture, layers="compiled" if is_plain(weights) else "torch")
    switch = Switch()
    world = TapeWithHistory(
        model, blocks=96, frame_limit=70, retention=Retention(40, 9), frozen=7, attention=switch
    )
    tape, rng = world.tape, world.rng
    forks = []
    for owner in range(1, 12):
        if owner == 11:
            switch.attention = TritonAttention(programs=PROGRAMS)
        count = 3 if owner == 11 else 1
        world.append_together(*(tokens(rng, rng.randrange(6, 12)) for _ in range(count)))
        if owner >= 10:
            forks.append((tape.fork(), world.coord, tape.evicted_tokens))
    asked = [(fork, tokens(rng, n)) for (fork, _, _), n in zip(forks, (5, 2), strict=True)]
    answers = ask_together(world.engine, asked)
    for (_, coord, evicted), (_, question), logits in zip(forks, asked, answers, strict=True):
        world.history.add(question, coord, evicted, world.owner(), logits)
    assert tape.evicted_tokens > 40
    assert len({extent.origin for extent in forks[-1][0].extents}) > 1
    world.history.verify(tiny(architecture, layers=layers))
