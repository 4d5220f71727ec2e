"""The load-time canary: compares the logits of a few tokens over regions with the dense model's.

It uses its own pool: a frozen prefix, records in one position frame and in two, and an answer token by token
on a fork. It is the last of three checks and also catches effects outside of attention (token shifts,
convolutions). `engine.model.probe` compares masks over more tokens than the canary has.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from subprocess import CalledProcessError

import torch
from torch import nn

from engine.device import toolchain_fault
from engine.engine import Engine
from engine.model.architectures import ModelError
from engine.model.by_torchao import with_expanded
from engine.model.fusion import as_written
from engine.model.loaded import ATTENTION, LoadedModel
from engine.step import Chunk
from regions.tape import Retention

_FROZEN, _RECORD, _RECORDS, _ANSWER = 5, 7, 6, 3
_READ = 3
"""Rows read of every other record; fewer rows use another path."""
_FULL, _HALF = 2e-3, 1e-1
_KV = 0.2
"""Allowed difference with KV of another type."""
_REROTATION = 1e-2
"""Allowed difference of two frames in half precision, in addition to twice that of one frame."""
KEPT = 64
"""Columns of the dense logits that are kept for another start."""
_EXPERT_FLIPS = 0.2
"""Share of tokens that may differ in half precision: rounding may route a token to another expert."""


def check(loaded: LoadedModel, kept: torch.Tensor | None = None) -> float:
    """The difference from the dense logits relative to their size (root mean square).

    ``kept``: those that `to_keep` returned, where the model's dense forward is not at hand.

    It is that of the worst token; in half precision, of the worst token after a fifth of them is left out.
    There the difference in one frame is the model's own rounding, and that in two frames is compared with it.
    Raises ModelError when the difference is too large.
    """
    kind, tokens = loaded.sizes.kind, _tokens(loaded)
    try:
        expected = dense_logits(loaded, tokens)[_FROZEN:] if kept is None else kept
        plain, framed = (
            _difference(*_over_regions(loaded, tokens, frames), expected, loaded.dtype) for frames in (1, 2)
        )
    except (RuntimeError, OSError, CalledProcessError) as error:
        lacking = toolchain_fault(error)
        why = lacking or f"{kind}: its forward pass does not run over regions: {error}"
        raise ModelError(why) from error
    most = _FULL if loaded.dtype == torch.float32 else _HALF
    rotated = most if loaded.dtype == torch.float32 else max(_REROTATION, 2 * plain)
    if not (plain <= most and framed <= rotated):
        raise ModelError(
            f"{kind}: its logits over regions differ from the dense forward by {plain:.2g} of their size "
            f"in one position frame and {framed:.2g} in two; the architecture is not supported"
        )
    return framed


def check_kv(loaded: LoadedModel, other: LoadedModel) -> float:
    """The difference of ``other``, which has KV of another type, to ``loaded``, as `check` has it.

    Raises ModelError when it is too large.
    """
    tokens = _tokens(loaded)
    (expected, where), (actual, _) = (_over_regions(each, tokens, 2) for each in (loaded, other))
    off = _difference(actual, list(range(len(where))), expected, other.kv_dtype)
    if not off <= _KV:
        raise ModelError(
            f"with model.kv_dtype {str(other.kv_dtype).removeprefix('torch.')}, the logits of {loaded.name} "
            f"differ by {off:.2g} of their size, more than {_KV}"
        )
    return off


def to_keep(loaded: LoadedModel) -> torch.Tensor:
    """Some columns of the dense logits that `check` compares with, fp32 [tokens, columns]."""
    expected = dense_logits(loaded, _tokens(loaded))[_FROZEN:]
    return expected[:, _columns(expected.shape[1], KEPT)]


def _columns(vocabulary: int, count: int) -> torch.Tensor:
    return torch.linspace(0, vocabulary - 1, count).long()


def _tokens(loaded: LoadedModel) -> list[int]:
    total = _FROZEN + _RECORD * _RECORDS + _ANSWER
    generator = torch.Generator().manual_seed(7)
    tokens: list[int] = torch.randint(3, loaded.sizes.vocabulary, (total,), generator=generator).tolist()
    return tokens


def _difference(actual: torch.Tensor, where: list[int], expected: torch.Tensor, dtype: torch.dtype) -> float:
    if actual.shape[1] > expected.shape[1]:
        actual = actual[:, _columns(actual.shape[1], expected.shape[1])]
    expected = expected[where]
    rows = (actual - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-6)
    return float(rows.max() if dtype == torch.float32 else rows.quantile(1 - _EXPERT_FLIPS))


@torch.inference_mode()
def dense_logits(loaded: LoadedModel, tokens: list[int]) -> torch.Tensor:
    """The unmodified model's logits of all tokens, fp32 [tokens, vocabulary], with plain linear layers.

    Codes of torchao's are expanded, so its products are compared with torch's own.
    Where states and sums are fp32 whatever the weights are, so is the reference.
    """
    wide = loaded.decoder is not None and loaded.decoder.in_float32
    precise = _in_float32(loaded.model) if wide else nullcontext()
    loaded.model.set_attn_implementation("eager")
    try:
        ids = torch.tensor([tokens], device=loaded.device)
        with loaded.linears.plain(), with_expanded(loaded.model), precise, as_written(loaded.device):
            logits: torch.Tensor = loaded.model(input_ids=ids, use_cache=False).logits[0].float()
    finally:
        loaded.model.set_attn_implementation(ATTENTION)
    return logits


@contextmanager
def _in_float32(model: nn.Module) -> Iterator[None]:
    """Let every module compute with its weights in fp32, one module's at a time."""

    def cast(dtype: torch.dtype, module: nn.Module, *_: object) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.data.to(dtype)

    hooks = []
    for module in model.modules():
        kinds = {parameter.dtype for parameter in module.parameters(recurse=False)}
        if kinds == {torch.bfloat16}:
            hooks.append(module.register_forward_pre_hook(partial(cast, torch.float32)))
            hooks.append(module.register_forward_hook(partial(cast, torch.bfloat16)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _over_regions(loaded: LoadedModel, tokens: list[int], frames: int) -> tuple[torch.Tensor, list[int]]:
    """Logits over regions, and the indices of their tokens after the frozen ones."""
    engine = Engine(loaded, blocks=24, block_size=4, frame_limit=1 << 30)
    tape = engine.open_tape("canary", tokens[:_FROZEN], Retention(len(tokens)))
    answer = None
    rows = []
    where: list[int] = []
    try:
        for i in range(_RECORDS):
            record = tokens[_FROZEN + i * _RECORD :][:_RECORD]
            if frames > 1 and i == _RECORDS // 2:
                tape.new_frame(at=3)  # the second half gets another frame
            tape.acquire(_RECORD)
            read = range(_RECORD - _READ if i % 2 else 0, _RECORD)
            rows.append(engine.logits([Chunk(tape, record)], read))
            where += [i * _RECORD + row for row in read]
            tape.commit([_RECORD])
        answer = tape.fork()
        answer.acquire(_ANSWER)
        rows.extend(engine.logits([Chunk(answer, [token])]) for token in tokens[-_ANSWER:])
        where += range(_RECORDS * _RECORD, _RECORDS * _RECORD + _ANSWER)
    finally:
        if answer:
            answer.release()
        tape.release()
    return torch.cat(rows), where
