"""KV in 8 bits: a head's key or value as signed codes, and behind them its scale.

A code times the scale is the number. The scale is the row's own, its largest number over 127 in bfloat16, so
nothing is measured ahead and no number lies beyond the codes. One scale for all of a row commutes with the
rotation of queries, as any number does.
"""

import torch

SCALE = 2
"""Bytes of a row's scale, behind its codes."""
_MOST = 127


def row_numbers(dim: int, dtype: torch.dtype) -> int:
    """Numbers of ``dtype`` that a head's key or value of ``dim`` takes in a pool."""
    return dim + SCALE if dtype == torch.int8 else dim


def stored(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``rows`` [..., dim] as a pool of ``dtype`` holds them, [..., `row_numbers`].

    In 8 bits, a row that is not finite is NaN as a whole.
    """
    if dtype != torch.int8:
        return rows.to(dtype)
    top = rows.detach().float().abs().amax(-1, keepdim=True)
    scales = torch.where(top.isfinite(), top / _MOST, torch.nan).bfloat16()
    codes = (rows.float() / scales.float()).round().clamp(-_MOST, _MOST)
    codes = torch.where(scales > 0, codes, scales.isnan())
    return torch.cat((codes.to(torch.int8), scales.view(torch.int8)), -1)


def numbers(rows: torch.Tensor) -> torch.Tensor:
    """What ``rows`` of a pool stand for, [..., dim]: codes as float32, floats as they are."""
    if rows.dtype != torch.int8:
        return rows
    scales = rows[..., -SCALE:].clone(memory_format=torch.contiguous_format).view(torch.bfloat16)
    return rows[..., :-SCALE].float() * scales.float()
