"""Token sampling where the logits are: a few numbers per row are copied from a device, all at once.

Confidence is the logit gap of *Attention Once* equation 10, always of the raw logits. Sampling at a
temperature is Gumbel-max, the argmax of the logits plus noise, so restricted sampling is a restricted argmax.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.cpu.best import FIELDS, two_best
from engine.device import queued, to_device
from engine.seeding import GOLDEN, MULTIPLIERS, SHIFTS, Sampling, signed
from engine.step import SampledToken

BLOCK = 128
"""Logits per block maximum, see `_top2`."""
FEW = 1 << 16
"""Logits that `compiled` chooses among sooner than torch."""
INFINITY = float("inf")
NOT_FINITE = "the model's logits are not finite"

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Table = list[list[float]]
Fetch = Callable[[torch.Tensor], torch.Tensor]
"""Brings a tensor to the host."""


@torch.inference_mode()
def choose(
    logits: torch.Tensor,
    choices: Sequence[tuple[int, ...] | None],
    sampling: Sequence[Sampling | None] = (),
    top_logprobs: Sequence[int | None] = (),
    fetch: Fetch = torch.Tensor.cpu,
) -> list[SampledToken]:
    """Choose a token for each row of ``logits`` [rows, vocabulary], out of ``choices[row]`` if given.

    Without ``sampling[row]`` it is the argmax; ties go to the lowest id or the first of the choices. A single
    choice has no second best: its gap is 0. A row with a logit that is not finite fails alone. With
    ``top_logprobs[row]`` it has its log probability, and those of that many of the likeliest tokens.
    ``fetch`` brings all of it from a device, at once.
    """
    allowed = _padded(choices)
    drawn = [
        (row, how if choices[row] is None else replace(how, top_p=1.0, top_k=0))
        for row, how in enumerate(sampling)
        if how is not None
    ]
    asked = [(row, most) for row, most in enumerate(top_logprobs) if most is not None]
    if logits.device.type == "cpu" and logits.numel() <= FEW:
        table = compiled(logits, allowed, drawn)
        tokens = [int(line[0]) for line in table]
        likely: Table = []
        if any(most for _, most in asked):
            likely = _logprobs(logits, asked, torch.tensor(tokens)).tolist()
        elif asked:
            likely = _own_logprobs(logits.numpy(), [(row, tokens[row]) for row, _ in asked])
    else:
        found = by_torch(logits, allowed, drawn)
        parts = [found, _logprobs(logits, asked, found[:, 0].long())] if asked else [found]
        table, likely = _lines(fetch(torch.cat([each.flatten() for each in parts])), parts)
    chosen = [
        SampledToken(int(token), top1, top2, logits=tuple(rest[: len(among or ())]))
        if math.isfinite(spread)
        else SampledToken(0, 0.0, 0.0, NOT_FINITE)
        for (token, top1, top2, spread, *rest), among in zip(table, choices, strict=True)
    ]
    for (row, most), (own, *rest) in zip(asked, likely, strict=True):
        if chosen[row].error is None:
            values, ids = rest[: len(rest) // 2], rest[len(rest) // 2 :]
            top = tuple(zip(map(int, ids[:most]), values[:most], strict=True))
            chosen[row] = replace(chosen[row], logprob=own, top=top)
    return chosen


def _lines(numbers: torch.Tensor, parts: Sequence[torch.Tensor]) -> tuple[Table, Table]:
    """The ``numbers`` of one or two ``parts``, joined, by part and row."""
    split = torch.split(numbers, [each.numel() for each in parts])
    first, *more = [lines.view(each.shape).tolist() for lines, each in zip(split, parts, strict=True)]
    return first, more[0] if more else []


def _logprobs(logits: torch.Tensor, asked: Sequence[tuple[int, int]], tokens: torch.Tensor) -> torch.Tensor:
    """Of each row ``asked``: the log probability of its token, the highest ones, and their ids."""
    (rows,) = to_device(logits.device, [row for row, _ in asked])
    logprobs = torch.log_softmax(logits[rows].float(), -1)
    best = logprobs.topk(min(max(most for _, most in asked), logprobs.shape[1]))
    return torch.cat((logprobs.gather(1, tokens[rows][:, None]), best.values, best.indices.float()), -1)


def _own_logprobs(logits: Floats, tokens: Sequence[tuple[int, int]]) -> Table:
    """As `_logprobs` without others, for (row, token), by the caller's thread alone: torch's softmax waits
    for its other threads, a whole time slice where others have the cores.
    """
    values = logits[[row for row, _ in tokens]]
    with np.errstate(invalid="ignore"):  # a row that is not finite has failed
        values -= values.max(-1, keepdims=True)
        totals = np.log(np.exp(values).sum(-1, dtype=np.float64))
    return [
        [float(own[token] - total)] for own, total, (_, token) in zip(values, totals, tokens, strict=True)
    ]


Drawn = Sequence[tuple[int, Sampling]]
"""Rows that are drawn at a temperature, and how."""


def by_torch(logits: torch.Tensor, allowed: Ints | None, drawn: Drawn) -> torch.Tensor:
    """Of each row: token, two highest logits, their spread, then the logits of ``allowed`` ids, -1 for none.

    NaN wins every maximum and minimum, and an infinity is one of them: the spread shows all three cases.
    """
    among = None if allowed is None else queued(logits.device, torch.from_numpy(allowed))
    best = _top2(logits)
    spread = best.first - logits.amin(-1)
    token, top1, top2 = _restricted(best, logits, among)
    if drawn:
        rows, noisy = _noisy(logits, drawn)
        best = _restricted(_top2(noisy), noisy, None if among is None else among[rows])
        token = token.index_copy(0, rows, best.token)
    # ids are exact in fp32 up to 2**24
    table = torch.stack((token.float(), top1, top2, spread), -1)
    return table if among is None else torch.cat((table, logits.gather(1, among.clamp(min=0))), -1)


def compiled(logits: torch.Tensor, allowed: Ints | None, drawn: Drawn) -> Table:
    """As `by_torch`, of a CPU's logits: it starts sooner, and torch is faster for many."""
    among = np.zeros((len(logits), 0), np.int64) if allowed is None else allowed
    table = np.empty((len(logits), FIELDS + among.shape[1]))
    two_best(logits.numpy(), logits.view(torch.int32).numpy(), among, table)
    if drawn:
        rows, noisy = _noisy(logits, drawn)
        own = rows.numpy()
        found = np.empty((len(own), table.shape[1]))
        two_best(noisy.numpy(), noisy.view(torch.int32).numpy(), among[own], found)
        table[own, 0] = found[:, 0]
    listed: Table = table.tolist()
    return listed


def _noisy(logits: torch.Tensor, drawn: Drawn) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows ``drawn``, and their logits with noise."""
    rows, keys = to_device(logits.device, [row for row, _ in drawn], [signed(how.key) for _, how in drawn])
    scale = queued(logits.device, torch.tensor([how.temperature for _, how in drawn]))
    values = logits[rows]
    if any(how.cuts for _, how in drawn):
        values = _cut(values, [how for _, how in drawn])
    # scale the noise instead of dividing the logits: nothing overflows at a low temperature
    return rows, values + scale[:, None] * gumbel(keys, logits.shape[1])


def _cut(logits: torch.Tensor, sampling: Sequence[Sampling]) -> torch.Tensor:
    """``logits`` [rows, vocabulary], minus infinity where ``top_p`` or ``top_k`` never draw a token."""
    ranked, order = logits.sort(dim=-1, descending=True, stable=True)
    columns = [[how.temperature, how.top_p, how.top_k or logits.shape[1]] for how in sampling]
    temperature, top_p, top_k = queued(logits.device, torch.tensor(columns)).T[:, :, None]
    likely = torch.softmax((ranked - ranked[:, :1]) / temperature, -1)
    before = likely.cumsum(-1) - likely
    goes = (before >= top_p) & (top_p < 1) | (torch.arange(logits.shape[1], device=logits.device) >= top_k)
    goes[:, 0] = False  # the likeliest always stays
    return logits.masked_fill(torch.zeros_like(goes).scatter(1, order, goes), -INFINITY)


def accept(drafts: Sequence[int], choices: Sequence[SampledToken]) -> SampledToken:
    """The choice after the accepted drafts, with the choices that confirmed them.

    ``choices[i]`` is the model's next token after the first i drafts, so there is one more of them than
    drafts. A draft is accepted when it and all before it equal the model's tokens. The answer thus has the
    same tokens as without drafts, at any temperature, because a token's noise depends only on its index. A
    choice with an error confirms nothing.
    """
    count = 0
    for draft, choice in zip(drafts, choices, strict=False):
        if choice.error is not None or choice.token != draft:
            break
        count += 1
    return replace(choices[count], accepted=tuple(choices[:count]))


def gumbel(keys: torch.Tensor, width: int) -> torch.Tensor:
    """Standard Gumbel noise, fp32 [rows, width]; row r is the splitmix64 stream that begins at ``keys[r]``.

    It is computed in integers up to the last step, so every device draws the same bits.
    """
    counter = torch.arange(1, width + 1, device=keys.device) * signed(GOLDEN)
    bits = keys[:, None] + counter
    for shift, multiplier in zip(SHIFTS, (*MULTIPLIERS, 1), strict=True):
        # the shift is arithmetic; the mask makes it logical
        bits ^= bits >> shift & (1 << (64 - shift)) - 1
        bits *= signed(multiplier)
    uniform = ((bits >> 32 & 0xFFFFFFFF).float() + 0.5) * 2.0**-32
    # log1p of the small side: the largest noise comes from numbers near 0, where fp32 is finest
    return -torch.log(-torch.log1p(-uniform.clamp_(max=1 - 2.0**-24)))


class _Best(NamedTuple):
    """Each row's highest value, its first index, and the second highest value."""

    token: torch.Tensor
    first: torch.Tensor
    second: torch.Tensor


def _restricted(best: _Best, values: torch.Tensor, allowed: torch.Tensor | None) -> _Best:
    """``best`` of ``values``, chosen again among the allowed ids for restricted rows."""
    if allowed is None:
        return best
    padding = allowed < 0
    at, first, second = _top2(values.gather(1, allowed.clamp(min=0)).masked_fill(padding, -INFINITY))
    free = padding[:, 0]
    return _Best(
        torch.where(free, best.token, allowed.gather(1, at[:, None])[:, 0]),
        torch.where(free, best.first, first),
        torch.where(free, best.second, torch.where(second == -INFINITY, first, second)),
    )


def _top2(values: torch.Tensor) -> _Best:
    """The two best values of each row, in one pass over the values.

    Block maxima are vectorised everywhere, argmax and topk are not: on a CPU, 25 rows of 128,256 logits take
    a quarter of topk's time.
    """
    rows, width = values.shape
    block = math.gcd(width, BLOCK)
    blocks = values.view(rows, -1, block)
    maxima = blocks.amax(-1)
    where = maxima.argmax(-1, keepdim=True)
    inside = blocks.gather(1, where[..., None].expand(-1, 1, block))[:, 0]
    at = inside.argmax(-1, keepdim=True)
    second = torch.maximum(
        maxima.scatter(1, where, -INFINITY).amax(-1), inside.scatter(1, at, -INFINITY).amax(-1)
    )
    return _Best((where * block + at)[:, 0], inside.gather(1, at)[:, 0], second)


def _padded(choices: Sequence[tuple[int, ...] | None]) -> Ints | None:
    """Choice ids, [rows, most choices], padded with -1; None when no row is restricted."""
    widest = max((len(allowed) for allowed in choices if allowed is not None), default=0)
    if not widest:
        return None
    padding = (-1,) * widest
    return np.array([((allowed or ()) + padding)[:widest] for allowed in choices])
