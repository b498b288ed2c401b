"""The solver against GPTQ written out plainly, and on second moments that break careless code."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from optimc_passes.quantize.affine import quantize_affine
from optimc_passes.quantize.gptq_refine import fit_scales
from optimc_passes.quantize.gptq_solver import Solved, decode, factorize, losses, solve

N, C, GROUP = 24, 160, 32


def weight(seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((N, C)).astype(np.float32))


def inputs(tokens: int = 600, seed: int = 1) -> NDArray[np.float64]:
    """Correlated inputs of very different sizes, [T, C]."""
    rng = np.random.default_rng(seed)
    mixed = rng.standard_normal((tokens, 40)) @ rng.standard_normal((40, C)) + 0.3 * rng.standard_normal((tokens, C))
    return mixed * np.exp(rng.normal(0, 1, C))


def moment_of(x: NDArray[np.float64]) -> torch.Tensor:
    return torch.from_numpy((x.T @ x).astype(np.float32))


def run(
    w: torch.Tensor, moment: torch.Tensor, *, act_order: bool = True, damping: float = 0.01, **options: Any
) -> Solved:
    factor = factorize(moment, damping=damping, act_order=act_order)
    return solve(w, moment, factor, **{"bits": 4, "group": GROUP, "symmetric": False, **options})


def nearest_loss(w: torch.Tensor, moment: torch.Tensor, bits: int = 4, *, symmetric: bool = False) -> float:
    codes = quantize_affine(w.numpy(), bits, GROUP, symmetric=symmetric)
    return float(losses(w - decode(codes.codes, codes.scales, codes.zeros, bits, GROUP), moment).sum())


def output_loss(w: torch.Tensor, solved: Solved, x: NDArray[np.float64], bits: int = 4) -> float:
    difference = w.double().numpy() - decode(solved.codes, solved.scales, solved.zeros, bits, GROUP).double().numpy()
    return float(((x @ difference.T) ** 2).sum())


def plain_gptq(w: NDArray[np.float64], moment: NDArray[np.float64], order: NDArray[np.int64]) -> NDArray[np.float64]:
    """GPTQ as the paper derives it, float64: after each column the inverse loses a row and a column."""
    codes = quantize_affine(w.astype(np.float32), 4, GROUP, symmetric=False)
    assert codes.zeros is not None
    damped = moment + 0.01 * np.diag(moment).mean() * np.eye(C)
    inverse = np.linalg.inv(damped)
    left, result = w.copy(), np.empty_like(w)
    for column in order:
        scale, zero = codes.scales[:, column // GROUP], codes.zeros[:, column // GROUP].astype(np.float64)
        code = np.clip(np.rint(left[:, column] / scale) + zero, 0, 15)
        result[:, column] = (code - zero) * scale
        error = (left[:, column] - result[:, column]) / inverse[column, column]
        left -= np.outer(error, inverse[column])
        inverse -= np.outer(inverse[:, column], inverse[column]) / inverse[column, column]
        inverse[column, column] = 1
    return result


@pytest.mark.parametrize("act_order", [False, True])
def test_codes_are_those_of_the_plain_algorithm(act_order: bool):
    """But a few in a thousand: where float32 and float64 fall on different sides of a half, later columns follow."""
    x = inputs()
    moment = x.T @ x
    order = np.argsort(-np.diag(moment), kind="stable") if act_order else np.arange(C)
    expected = plain_gptq(weight().double().numpy(), moment, order)
    solved = run(weight(), moment_of(x), act_order=act_order)
    actual = decode(solved.codes, solved.scales, solved.zeros, 4, GROUP).numpy()
    assert np.mean(np.abs(actual - expected) > 1e-5) < 0.003
    assert solved.fallback is None
    assert solved.damping == 0.01
    assert not solved.nearest.any()


def test_the_factor_is_that_of_the_inverse():
    moment = moment_of(inputs())
    factor = factorize(moment, damping=0.01, act_order=True)
    assert factor is not None
    diagonal = moment.diagonal()[factor.order]
    assert bool((diagonal[:-1] >= diagonal[1:]).all())
    mean = float(moment.diagonal().mean())
    ordered = moment.double()[factor.order][:, factor.order] / mean + 0.01 * torch.eye(C, dtype=torch.float64)
    upper = factor.upper.double()
    assert torch.equal(upper, upper.triu())
    assert torch.allclose(upper.T @ upper @ ordered, torch.eye(C, dtype=torch.float64), atol=2e-3)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [False, True])
def test_outputs_change_much_less_than_with_rounding_to_nearest(bits: int, symmetric: bool):
    x = inputs()
    moment = moment_of(x)
    solved = run(weight(), moment, bits=bits, symmetric=symmetric)
    assert (solved.zeros is None) == symmetric
    assert int(solved.codes.max()) < 2**bits
    assert output_loss(weight(), solved, x, bits) < 0.7 * nearest_loss(weight(), moment, bits, symmetric=symmetric)
    assert output_loss(weight(), solved, x, bits) == pytest.approx(float(solved.errors.sum()), rel=1e-2)


def degenerate(kind: str) -> NDArray[np.float64]:
    rng = np.random.default_rng(5)
    x = inputs()
    if kind == "rank three":
        return rng.standard_normal((600, 3)) @ rng.standard_normal((3, C))
    if kind == "three tokens":
        return x[:3]
    if kind == "duplicated columns":
        x[:, 40:80] = x[:, :40]
        return x
    if kind == "equal columns":
        return np.repeat(x[:, :1], C, axis=1)
    x[:, 3] *= 1e4
    x[:, 90] *= 1e-6
    return x


@pytest.mark.parametrize(
    "kind", ["rank three", "three tokens", "duplicated columns", "equal columns", "columns of 1e4 and 1e-6"]
)
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("extras", [{}, {"clip": True, "sweeps": 2, "refit": True}])
def test_degenerate_inputs_give_finite_codes_no_worse_than_nearest(kind: str, act_order: bool, extras: dict[str, Any]):
    x = degenerate(kind)
    moment = moment_of(x)
    solved = run(weight(), moment, act_order=act_order, **extras)
    assert np.isfinite(solved.scales).all()
    assert (solved.scales > 0).all()
    assert np.isfinite(solved.errors).all()
    assert float(solved.errors.sum()) <= nearest_loss(weight(), moment) * (1 if not extras else 1.05)


def test_damping_rises_until_there_is_a_factor():
    """A moment that rounding has made slightly indefinite: -0.05 on the diagonal's scale of one takes 0.1."""
    moment = torch.eye(C)
    moment[:2, :2] = torch.tensor([[1.0, 1.05], [1.05, 1.0]])
    factor = factorize(moment, damping=0.01, act_order=True)
    assert factor is not None
    assert factor.damping == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("moment", "reason"),
    [
        (torch.full((C, C), float("nan")), "is not finite"),
        (torch.zeros(C, C), "has no Cholesky factor"),
        (torch.eye(C) - 2e3 * (torch.ones(C, C) - torch.eye(C)), "has no Cholesky factor"),
    ],
    ids=["not a number", "all dead", "hopelessly indefinite"],
)
def test_a_hopeless_moment_means_nearest_with_its_reason(moment: torch.Tensor, reason: str):
    solved = run(weight(), moment)
    expected = quantize_affine(weight().numpy(), 4, GROUP, symmetric=False)
    assert np.array_equal(solved.codes, expected.codes)
    assert np.array_equal(solved.scales, expected.scales)
    assert solved.damping is None
    assert solved.fallback == f"the second moment of its inputs {reason}"
    assert solved.nearest.all()


def test_dead_columns_are_their_own_nearest_codes():
    x = inputs()
    dead = [0, 17, 63, 159]
    x[:, dead] = 0
    solved = run(weight(), moment_of(x), sweeps=1)
    expected = quantize_affine(weight().numpy(), 4, GROUP, symmetric=False)
    assert np.array_equal(solved.codes[:, dead], expected.codes[:, dead])
    assert output_loss(weight(), solved, x) < 0.7 * nearest_loss(weight(), moment_of(x))


def test_rows_do_not_depend_on_their_neighbours():
    """So siblings may be solved stacked: alone or together, the same codes."""
    moment = moment_of(inputs())
    together = run(torch.cat([weight(0), weight(7)]), moment)
    alone = run(weight(7), moment)
    assert np.mean(together.codes[N:] != alone.codes) < 0.002


def test_sweeps_and_fitted_scales_each_lower_the_loss():
    x = inputs()
    moment = moment_of(x)
    total = [
        output_loss(weight(), run(weight(), moment, **options), x)
        for options in ({}, {"sweeps": 1}, {"sweeps": 3}, {"sweeps": 3, "refit": True})
    ]
    assert total == sorted(total, reverse=True)
    assert total[3] < 0.9 * total[0]


def test_fitted_scales_are_float16_numbers_and_never_worse_for_a_row():
    moment = moment_of(inputs())
    solved = run(weight(), moment)
    fitted = fit_scales(weight(), moment, solved.codes, solved.scales, solved.zeros, 4, GROUP)
    assert np.array_equal(fitted.astype(np.float16).astype(np.float32), fitted)
    before = losses(weight() - decode(solved.codes, solved.scales, solved.zeros, 4, GROUP), moment)
    after = losses(weight() - decode(solved.codes, fitted, solved.zeros, 4, GROUP), moment)
    assert (after <= before).all()
    assert after.sum() < before.sum()


def test_the_original_inputs_are_aimed_at():
    """GPTAQ: with inputs that drifted, the product comes closer to what the original inputs gave."""
    x0 = inputs()
    x = x0 + 0.3 * np.random.default_rng(2).standard_normal(x0.shape) * x0.std(axis=0)
    moment, cross = moment_of(x), torch.from_numpy((x0.T @ x).astype(np.float32))
    wanted = x0 @ weight().double().numpy().T
    reached = []
    for options in ({}, {"cross": cross}):
        solved = run(weight(), moment, **options)
        got = x @ decode(solved.codes, solved.scales, solved.zeros, 4, GROUP).double().numpy().T
        reached.append(float(((got - wanted) ** 2).sum()))
    assert reached[1] < 0.98 * reached[0]


def test_a_ragged_last_group_and_whole_rows_are_solved():
    w, x = weight()[:, :150], inputs()[:, :150]
    moment = moment_of(x)
    factor = factorize(moment, damping=0.01, act_order=True)
    for group, groups in ((32, 5), (150, 1)):
        options: dict[str, Any] = {"bits": 4, "group": group, "symmetric": False}
        solved = solve(w, moment, factor, **options, sweeps=1, refit=True)
        assert solved.scales.shape == (N, groups)
        nearest = solve(w, moment, None, **options)
        assert solved.errors.sum() < 0.8 * nearest.errors.sum()


def test_a_weight_that_is_not_finite_is_named():
    broken = weight()
    broken[5, 3] = float("inf")
    with pytest.raises(ValueError, match="1 rows have elements that are not finite, the first is row 5"):
        run(broken, moment_of(inputs()))
