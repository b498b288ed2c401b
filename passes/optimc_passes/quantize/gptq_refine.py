"""Rounded columns gone over again: codes one column at a time, scales all of a row's at once. Never for the worse.

After GPTQ's single pass the last columns have taken up everybody's errors, and the first have heard of none. With all
other columns fixed, the loss d H d^T of a row d = w - q is least where column j moves by (d H)[j] / H[j, j]; rounded
to the grid it still falls or stays, as on a line the nearest grid point to the minimum of a parabola is the best.
Scales enter the loss quadratically too: with codes fixed, the best ones solve a system of g equations per row.

Letters: N rows, C columns, G group size, g groups per row.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from optimc_passes.quantize.affine import float16_neighbours
from optimc_passes.quantize.one_thread import one_thread

_BLOCK = 128


def refine(
    target: Tensor,
    moment: Tensor,
    order: Tensor,
    codes: NDArray[np.uint8],
    scales: NDArray[np.float32],
    zeros: NDArray[np.uint8] | None,
    *,
    bits: int,
    group: int,
    sweeps: int,
    refit: bool,
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Return better codes [N, C] and scales [N, g] for `target` [N, C] under `moment` [C, C].

    `sweeps` times all columns are gone over in `order`; with `refit` scales are fitted before each sweep and at the
    end.
    """
    for _ in range(sweeps):
        if refit:
            scales = fit_scales(target, moment, codes, scales, zeros, bits, group)
        codes = _sweep(target, moment, order, codes, scales, zeros, bits, group)
    if refit:
        scales = fit_scales(target, moment, codes, scales, zeros, bits, group)
    return codes, scales


def grids_by_column(scales: NDArray[np.float32], zeros: NDArray[np.uint8] | None, bits: int) -> tuple[Tensor, Tensor]:
    """Return scales and zero points as float32 [g, N], so that a column's are one row."""
    scale_of = torch.from_numpy(np.ascontiguousarray(scales.T))
    if zeros is None:
        return scale_of, torch.full(scale_of.shape, float(2 ** (bits - 1)))
    return scale_of, torch.from_numpy(np.ascontiguousarray(zeros.T).astype(np.float32))


def _sweep(
    target: Tensor,
    moment: Tensor,
    order: Tensor,
    codes: NDArray[np.uint8],
    scales: NDArray[np.float32],
    zeros: NDArray[np.uint8] | None,
    bits: int,
    group: int,
) -> NDArray[np.uint8]:
    rows, columns = target.shape
    steps = _signed(codes, zeros, bits, group).T[order].contiguous()
    scale_of, zero_of = grids_by_column(scales, zeros, bits)
    top = float(2**bits - 1)
    groups = [index // group for index in order.tolist()]
    ordered = moment[order][:, order]
    diagonal = ordered.diagonal().tolist()
    group_index = torch.tensor(groups)
    gradient = ordered @ (target.T[order] - steps * scale_of[group_index])
    for begin in range(0, columns, _BLOCK):
        end = min(begin + _BLOCK, columns)
        moved = torch.zeros(end - begin, rows)
        near = gradient[begin:end]
        with one_thread():
            for index in range(end - begin):
                column = begin + index
                if diagonal[column] <= 0:
                    continue  # nothing depends on it: it keeps its nearest code
                scale, zero = scale_of[groups[column]], zero_of[groups[column]]
                step = steps[column]
                wanted = (near[index] / (scale * diagonal[column])).add_(step).round_()
                wanted = torch.minimum(torch.maximum(wanted, -zero), top - zero)
                change = torch.sub(wanted, step, out=moved[index]).mul_(scale)
                step.copy_(wanted)
                near[index + 1 :].addr_(ordered[column, column + 1 : end], change, alpha=-1)
        gradient[end:].addmm_(ordered[end:, begin:end], moved, alpha=-1)
    result = torch.empty_like(steps)
    result[order] = steps + zero_of[group_index]
    swept: NDArray[np.uint8] = result.T.contiguous().numpy().astype(np.uint8)
    return swept


def fit_scales(
    target: Tensor,
    moment: Tensor,
    codes: NDArray[np.uint8],
    scales: NDArray[np.float32],
    zeros: NDArray[np.uint8] | None,
    bits: int,
    group: int,
) -> NDArray[np.float32]:
    """Return scales [N, g] with a smaller loss for the same codes, or the given ones for rows where there are none.

    Fitted scales are float16 numbers wherever the given ones are; a row keeps its scales if rounding them so, or a
    system without a solution, would cost what fitting gained.
    """
    rows, columns = target.shape
    num_groups = scales.shape[1]
    steps = _signed(codes, zeros, bits, group)
    right = _group_sums((target @ moment).mul_(steps), group)
    system = torch.zeros(rows, num_groups, num_groups)
    for index, start in enumerate(range(0, columns, group)):
        mine = slice(start, start + group)
        product = (steps[:, mine] @ moment[mine, start:]).mul_(steps[:, start:])
        system[:, index, index:] = _group_sums(product, group)
    system += system.triu(1).mT
    before = torch.from_numpy(scales)
    # A group without steps has no say in its scale: it keeps the one it has.
    diagonal = system.diagonal(dim1=1, dim2=2)
    silent = diagonal <= 0
    damped = system + torch.diag_embed((1e-6 * diagonal.mean(dim=1) + 1e-30)[:, None].expand(-1, num_groups))
    # Solved for the change, so that damping pulls towards the scales there are.
    change, info = torch.linalg.solve_ex(damped, right - (system @ before[:, :, None])[:, :, 0])
    change[silent | (info != 0)[:, None]] = 0
    fitted = (before + change).numpy()
    usable = np.isfinite(fitted) & (fitted > 0.5 * scales) & (fitted < 2 * scales)
    fitted = np.where(usable, fitted, scales)
    if np.array_equal(float16_neighbours(scales)[0], scales):
        halved = float16_neighbours(fitted)[0]
        fitted = halved if np.array_equal(halved.astype(np.float16).astype(np.float32), halved) else scales
    # The loss is a constant - 2 s r + s S s in the scales s: what changes is computed without the constant.
    new = torch.from_numpy(np.ascontiguousarray(fitted, np.float32)).double()
    moved, both = new - before, new + before
    gain = 2 * (moved * right).sum(dim=1) - ((moved[:, None] @ system.double())[:, 0] * both).sum(dim=1)
    return np.where((gain > 0).numpy()[:, None], fitted, scales).astype(np.float32)


def _group_sums(values: Tensor, group: int) -> Tensor:
    """Return the sum over each group of columns, [N, g] of [N, C]; the last group may be ragged."""
    rows, columns = values.shape
    if columns % group:
        values = torch.nn.functional.pad(values, (0, group - columns % group))
    return values.view(rows, -1, group).sum(dim=2)


def _signed(codes: NDArray[np.uint8], zeros: NDArray[np.uint8] | None, bits: int, group: int) -> Tensor:
    """Return codes less their zero points, float32 [N, C]."""
    groups = np.arange(codes.shape[1]) // group
    zero = np.float32(2 ** (bits - 1)) if zeros is None else zeros.astype(np.float32)[:, groups]
    return torch.from_numpy(codes.astype(np.float32) - zero)
