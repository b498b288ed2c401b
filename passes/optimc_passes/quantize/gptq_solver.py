"""GPTQ: rounding columns one after another, each error made up for by the columns not rounded yet. Pure arithmetic.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", arXiv 2210.17323;
the correction for inputs that differ from the original model's: Li et al., "GPTAQ", arXiv 2504.02692.

The loss of a weight W [N, C] rounded to Q over inputs X [T, C] is |X (W - Q)^T|^2 = tr((W - Q) H (W - Q)^T) with the
second moment H = X^T X. With U, the upper Cholesky factor of the inverse of H, rounding column j by an error e leaves
the least loss if every later column k takes e * U[j, k] / U[j, j].

Letters: N rows (output features), C columns (input features), G group size, g groups per row, T tokens.

Grids are fixed before the first column is rounded ("static groups"): columns may then be rounded in any order while
codes stay in the source's.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from optimc_passes.quantize.affine import Grid, encode, grid_of, group_range
from optimc_passes.quantize.clip import clipped_range
from optimc_passes.quantize.gptq_refine import grids_by_column, refine
from optimc_passes.quantize.one_thread import one_thread

DAMPING_STEPS = 5
"""How often damping is tried, ten times larger each time."""
_BLOCK = 128
"""Columns rounded before the rest of the matrix hears of their errors: one large product instead of many small."""


class Solved(NamedTuple):
    """A weight matrix as codes."""

    codes: NDArray[np.uint8]
    """[N, C], in the source's column order."""
    scales: NDArray[np.float32]
    """[N, g]."""
    zeros: NDArray[np.uint8] | None
    """[N, g], or None: 2**(bits - 1) everywhere."""
    errors: NDArray[np.float64]
    """[N]: (w - q) H (w - q)^T per row."""
    norms: NDArray[np.float64]
    """[N]: w H w^T per row."""
    damping: float | None
    """What was added to the diagonal of H, as a fraction of its mean; None for rounding to nearest."""
    fallback: str | None
    """Why codes are the nearest ones instead."""
    nearest: NDArray[np.bool_]
    """[N]: rows that are rounded to nearest, because there is a reason or because it costs them less."""


class Factor(NamedTuple):
    """The upper Cholesky factor of an inverse second moment, columns in the order they are to be rounded."""

    upper: Tensor
    """float32 [C, C]."""
    order: Tensor
    """int64 [C]: source column of each."""
    damping: float


def factorize(moment: Tensor, *, damping: float, act_order: bool) -> Factor | None:
    """Factorize a second moment H [C, C]; None if it has no factor even with 10**4 times the damping.

    Dead columns, whose inputs are always 0, get the mean on the diagonal: they have no part in anybody's error.
    `act_order` takes columns by falling diagonal. Ties keep the source's order.
    """
    diagonal = moment.diagonal().clone()
    mean = float(diagonal.double().mean())
    if not (math.isfinite(mean) and mean > 0 and bool(torch.isfinite(moment).all())):
        return None
    columns = len(diagonal)
    if act_order:
        order = torch.sort(diagonal, descending=True, stable=True).indices
        # Reversed at once: what follows factorizes from the last column.
        reverse = order.flip(0)
    else:
        order = torch.arange(columns)
        reverse = order.flip(0)
    scaled = moment[reverse][:, reverse].div_(mean)
    diagonal = scaled.diagonal().clone()
    diagonal[diagonal == 0] = 1
    for step in range(DAMPING_STEPS):
        fraction = damping * 10**step
        scaled.diagonal().copy_(diagonal + fraction)
        lower, info = torch.linalg.cholesky_ex(scaled)
        if int(info) != 0:
            continue
        # H = R R^T with R = flip(L) upper triangular, so U = R^-1: one factorization, one triangular solve.
        right = lower.flip(0, 1)
        del lower
        upper = torch.linalg.solve_triangular(right, torch.eye(columns), upper=True)
        if bool(torch.isfinite(upper).all()):
            return Factor(upper, order, fraction)
    return None


def solve(
    weight: Tensor,
    moment: Tensor,
    factor: Factor | None,
    *,
    bits: int,
    group: int,
    symmetric: bool,
    clip: bool = False,
    sweeps: int = 0,
    refit: bool = False,
    cross: Tensor | None = None,
    nearest: str | None = None,
) -> Solved:
    """Round `weight` [N, C] so that its product with inputs X of second moment `moment` [C, C] changes least.

    `factor` is the moment's, from `factorize`; None rounds to nearest, and so does a reason given as `nearest`.
    `clip` chooses ranges of groups by their squared error under the moment's diagonal. `sweeps` and `refit` are
    `refine`'s. `cross` [C, C] is X0^T X for inputs X0 of the original model: then X0 W^T is what the product should
    be. Rows that come out worse than rounded to nearest are rounded to nearest. Raises ValueError if an element of the
    weight is not finite.
    """
    assert weight.ndim == 2, weight.shape
    assert moment.shape == (weight.shape[1], weight.shape[1]), (weight.shape, moment.shape)
    source = weight.numpy()
    if not np.isfinite(source).all():
        rows = np.flatnonzero(~np.isfinite(source).all(axis=1))
        raise ValueError(f"{len(rows)} rows have elements that are not finite, the first is row {rows[0]}")
    usable = bool(torch.isfinite(moment).all())
    if nearest is None and factor is None:
        why = "has no Cholesky factor" if usable else "is not finite"
        nearest = f"the second moment of its inputs {why}"
    grid = _grid(source, moment if usable and clip else None, bits, group, symmetric)
    plain = encode(source, *grid, bits, group)
    norms = losses(weight, moment) if usable else np.zeros(len(source))
    worst = losses(weight - decode(plain, *grid, bits, group), moment) if usable else norms
    if factor is None or nearest is not None:
        return Solved(plain, *grid, worst, norms, None, nearest, np.ones(len(source), np.bool_))
    target = weight if cross is None else _corrected(weight, cross, moment, factor)
    if cross is not None:
        grid = _grid(target.numpy(), moment if clip else None, bits, group, symmetric)
        plain = encode(target.numpy(), *grid, bits, group)
        worst = losses(target - decode(plain, *grid, bits, group), moment)
    scales, zeros = grid
    codes = _round_columns(target, factor, scales, zeros, bits, group)
    if sweeps or refit:
        codes, scales = refine(
            target, moment, factor.order, codes, scales, zeros, bits=bits, group=group, sweeps=sweeps, refit=refit
        )
    errors = losses(target - decode(codes, scales, zeros, bits, group), moment)
    worse = ~(errors <= worst)
    codes[worse], errors[worse] = plain[worse], worst[worse]
    scales = np.where(worse[:, None], grid[0], scales)
    return Solved(codes, scales, zeros, errors, norms, factor.damping, None, worse)


def _grid(weight: NDArray[np.float32], moment: Tensor | None, bits: int, group: int, symmetric: bool) -> Grid:
    """Return scales and zero points of each group; with a moment, its diagonal decides how much range is given up."""
    importance = None if moment is None else moment.diagonal().numpy()
    if importance is None or not importance.any():
        low, high = group_range(weight, group)
    else:
        low, high = clipped_range(weight, bits, group, symmetric=symmetric, importance=importance)
    return grid_of(low, high, bits, symmetric=symmetric)


def _round_columns(
    target: Tensor, factor: Factor, scales: NDArray[np.float32], zeros: NDArray[np.uint8] | None, bits: int, group: int
) -> NDArray[np.uint8]:
    """Return codes [N, C] of `target` [N, C], each column's error passed on to those after it."""
    rows, columns = target.shape
    upper, order = factor.upper, factor.order
    # Columns are rows here, in the order of rounding: what one step reads and writes lies together.
    work = target.T[order].contiguous()
    scale_of, zero_of = grids_by_column(scales, zeros, bits)
    codes = torch.empty(columns, rows, dtype=torch.uint8)
    top = 2**bits - 1
    groups = [index // group for index in order.tolist()]
    for begin in range(0, columns, _BLOCK):
        end = min(begin + _BLOCK, columns)
        block, errors = work[begin:end], torch.empty(end - begin, rows)
        with one_thread():
            for index in range(end - begin):
                column, scale, zero = block[index], scale_of[groups[begin + index]], zero_of[groups[begin + index]]
                code = (column / scale).round_().add_(zero).clamp_(0, top)
                codes[begin + index] = code
                error = torch.sub(column, code.sub_(zero).mul_(scale), out=errors[index])
                error.div_(upper[begin + index, begin + index])
                block[index + 1 :].addr_(upper[begin + index, begin + index + 1 : end], error, alpha=-1)
        work[end:].addmm_(upper[begin:end, end:].T, errors, alpha=-1)
    source_order = torch.empty_like(codes)
    source_order[order] = codes
    result: NDArray[np.uint8] = source_order.T.contiguous().numpy()
    return result


def _corrected(weight: Tensor, cross: Tensor, moment: Tensor, factor: Factor) -> Tensor:
    """Return the weight whose product with X comes closest to X0 W^T: W + W (X0^T X - H) H^-1."""
    order, upper = factor.order, factor.upper
    scale = moment.diagonal().double().mean().float()
    difference = (weight @ ((cross - moment) / scale))[:, order]
    corrected = torch.empty_like(weight)
    corrected[:, order] = weight[:, order] + (difference @ upper.T) @ upper
    return corrected


def losses(difference: Tensor, moment: Tensor) -> NDArray[np.float64]:
    """Return d H d^T for each row d of `difference` [N, C], float64 [N]; never negative."""
    values: NDArray[np.float64] = ((difference @ moment) * difference).sum(dim=1, dtype=torch.float64).numpy()
    return np.maximum(values, 0)


def decode(
    codes: NDArray[np.uint8], scales: NDArray[np.float32], zeros: NDArray[np.uint8] | None, bits: int, group: int
) -> Tensor:
    """Return the weight [N, C] that codes stand for."""
    groups = np.arange(codes.shape[1]) // group
    zero = np.float32(2 ** (bits - 1)) if zeros is None else zeros.astype(np.float32)[:, groups]
    return torch.from_numpy((codes.astype(np.float32) - zero) * scales[:, groups])
