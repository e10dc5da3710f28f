"""The kernel system ``(K + reg / w) a = y``: Cholesky, and a jitter ladder that says so."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from normalign import _rfam_kernels
from normalign._rfam_kernels import Factor, Points


def jitter_ladder(dtype: torch.dtype) -> list[float]:
    """What to add to a diagonal of ones, in turn, until a factorisation succeeds: 0 first."""
    unit = torch.finfo(dtype).eps
    return [0.0] + [unit * 10.0**k for k in range(1, 8)]


def warn_jitter(jitter: float, reg: float) -> None:
    """The one warning of a ladder that had to climb."""
    msg = (
        f"the kernel matrix plus reg = {reg:g} is not positive definite in working precision; "
        f"{jitter:.3g} was added to its diagonal. Duplicate rows or a tiny reg lead to this."
    )
    warnings.warn(msg, RuntimeWarning, stacklevel=2)


@dataclass
class Solution:
    """``a``, the points that it belongs to (in float64 where float32 would not do), the jitter."""

    points: Points
    coef: Tensor
    jitter: float


def solve_points(
    x: Points,
    targets: Tensor,
    reg: float,
    weight: Tensor | None,
    threads: int,
    *,
    exact: Callable[[], Points] | None = None,
    refine: bool = True,
) -> Solution:
    """Solves ``(K(x, x) + diag(reg / weight)) a = targets``.

    A float32 factor leaves errors of at most eps n / (least pivot), which features inherit:

    * below 5e-6 they are let stand;
    * as a rule, one correction by the residual in float64 removes them;
    * where points nearly coincide as well (a small pivot), their coefficients are large and cancel,
      and float32 can't even hold them: the factor then preconditions a solution in float64.

    Args:
        x: Points, in factor space.
        targets: ``(n, c)``, dtype of ``x``.
        reg: Ridge, not negative.
        weight: How often each point counts.
        threads: Threads to use.
        exact: Makes the points in float64; by default they are converted.
        refine: Whether the rule's errors, 1e-4 in practice, are worth a correction.
    """
    if x.gpu or x.reason is not None:  # float64 throughout, and torch's factorisation
        x = exact() if exact is not None else Points(x.u.double(), x.kernel)
        targets = targets.double()
        gram = _rfam_kernels.gram(x, x, threads)
        return Solution(x, *solve_gram(gram, targets, reg, weight))
    factor = Factor.of(x, reg, 0.0, weight, threads)
    if x.u.dtype is torch.float64:
        if factor is None:
            return _with_jitter(x, targets, reg, weight, threads)
        return Solution(x, factor.solve(targets), 0.0)
    hard, error = True, 1.0
    if factor is not None:
        error = _EPS * targets.shape[0] / factor.least_pivot
        hard = error >= 1e-3 and factor.least_pivot < _NEAR
        if error < 5e-6 or not (hard or refine):
            return Solution(x, factor.solve(targets), 0.0)
    wide = exact() if hard and exact is not None else x
    wide = Points(wide.u.double(), x.kernel)
    right = targets.double()
    if factor is not None:
        tolerance = 1e-9 if hard else 1e-3
        coef, small = _corrected(factor, wide, right, reg, weight, threads, tolerance)
        if small:
            return Solution(wide, coef, 0.0) if hard else Solution(x, coef.float(), 0.0)
    factor = Factor.of(wide, reg, 0.0, weight, threads)
    if factor is not None:
        return Solution(wide, factor.solve(right), 0.0)
    return _with_jitter(x, targets, reg, weight, threads)


def _corrected(
    factor: Factor,
    x: Points,
    targets: Tensor,
    reg: float,
    weight: Tensor | None,
    threads: int,
    tolerance: float,
) -> tuple[Tensor, bool]:
    """A float64 solution by a float32 factor, and whether the last correction was relatively small.

    A correction of 1e-3 leaves an error of about 1e-6, the square of it.
    """
    ridge = reg if weight is None else (reg / weight.double()).unsqueeze(1)
    coef = factor.solve(targets.float()).double()
    before = float("inf")
    for _ in range(12):
        residual = targets - _rfam_kernels.matvec_symmetric(x, coef, threads) - ridge * coef
        correction = factor.solve(residual.float()).double()
        coef += correction
        size = float(correction.abs().max() / coef.abs().max().clamp(min=1e-300))
        if size <= tolerance:
            return coef, True
        if not size < 0.5 * before:
            break
        before = size
    return coef, False


def _with_jitter(
    x: Points, targets: Tensor, reg: float, weight: Tensor | None, threads: int
) -> Solution:
    for jitter in jitter_ladder(targets.dtype)[1:]:
        factor = Factor.of(x, reg, jitter, weight, threads)
        if factor is not None:
            warn_jitter(jitter, reg)
            return Solution(x, factor.solve(targets), jitter)
    raise ValueError(FAILED)


_EPS = torch.finfo(torch.float32).eps
# A pivot is the squared distance, in the kernel's space, of a point from the span of those before.
_NEAR = 0.01
FAILED = "the kernel matrix could not be factored; does the input hold NaN or infinity?"


def solve_gram(
    gram: Tensor, targets: Tensor, reg: float, weight: Tensor | None = None
) -> tuple[Tensor, float]:
    """The same for a matrix that is there already, by torch.linalg."""
    n = gram.shape[0]
    ridge = gram.new_full((n,), reg) if weight is None else reg / weight.to(gram.dtype)
    scale = max(1.0, float(gram.diagonal().max())) if n else 1.0
    for step in jitter_ladder(gram.dtype):
        jitter = step * scale
        system = gram.clone()
        system.diagonal().add_(ridge + jitter)
        factor, info = torch.linalg.cholesky_ex(system)
        noise = torch.finfo(gram.dtype).eps * scale
        if int(info) == 0 and (n == 0 or bool(factor.diagonal().square().min() > noise)):
            if jitter:
                warn_jitter(jitter, reg)
            return torch.cholesky_solve(targets, factor), jitter
    raise ValueError(FAILED)
