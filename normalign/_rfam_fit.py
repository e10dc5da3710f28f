"""The RFAM iteration: solve, average the gradients' outer products, take them as new features.

Equation and names follow arXiv 2605.08464; ``M`` is kept as a factor (see ``_rfam_factor``).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from normalign import _dispatch, _rfam_kernels
from normalign._feature_space import WIDE
from normalign._rfam_factor import initial_factor, psd_factor, scaled_to_trace
from normalign._rfam_kernels import Kernel, Points, make_kernel
from normalign._rfam_machine import Machine, project
from normalign._rfam_solve import solve_points

__all__ = [
    "FitResult",
    "Machine",
    "Prepared",
    "fit",
    "initial_factor",
    "prepare",
    "solve_machine",
]


@dataclass
class FitResult:
    """What ``fit`` found.

    Attributes:
        machine: Of the best iteration where a score was asked for, else of the last.
        history: One entry for each iteration: ``score`` (None without ``evaluate``), ``change``
            (relative change of M by this iteration's update, None where none was made),
            ``jitter`` and ``seconds``.
        best_iter: Index into ``history`` of ``machine``.
    """

    machine: Machine
    history: list[dict[str, Any]] = field(default_factory=list)
    best_iter: int = 0


@dataclass
class Prepared:
    """What the fits of one table share whatever their ``reg``: centre, first factor and points."""

    x: Tensor
    x_val: Tensor | None
    alpha: float
    weight: Tensor | None
    mean: Tensor
    factor: Tensor
    points: Points
    val_points: Points | None


def prepare(
    x: Tensor,
    *,
    alpha: float = 0.0,
    bandwidth: float = 10.0,
    kernel: str | float = "laplace",
    x_val: Tensor | None = None,
    sample_weight: Tensor | None = None,
) -> Prepared:
    """Work that fits with different ``reg`` (or targets) on the same points share.

    Args:
        x: Training points, shape ``(n, d)``, float32 or float64.
        alpha: Weight of the identity in the first M.
        bandwidth: Length of the kernel.
        kernel: ``"laplace"``, ``"gaussian"``, or an exponent.
        x_val: Points whose decision values ``evaluate`` receives, shape ``(m, d)``.
        sample_weight: How often each point counts, shape ``(n,)``, positive.
    """
    shape = make_kernel(kernel, bandwidth)
    _check_finite("X", x)
    mean, factor = initial_factor(x, alpha, sample_weight)
    points = _points(x, mean, factor, shape)
    val_points = None
    if x_val is not None:
        _check_finite("X_val", x_val)
        val_points = _points(x_val, mean, factor, shape, points.u.dtype)
    return Prepared(x, x_val, alpha, sample_weight, mean, factor, points, val_points)


def _points(
    x: Tensor, mean: Tensor, factor: Tensor, kernel: Kernel, dtype: torch.dtype | None = None
) -> Points:
    """The points in factor space, in float64 where float32 would not do for their range."""
    u = project(x, mean, factor, dtype or x.dtype)
    wide = dtype is None and u.dtype is torch.float32 and u.numel() > 0
    if wide and bool(u.abs().max() * kernel.scale > WIDE):
        u = project(x, mean, factor, torch.float64)
    return Points(u, kernel)


def _check_finite(name: str, x: Tensor) -> None:
    if not bool(torch.isfinite(x).all()):
        msg = f"{name} must be finite, got NaN or infinity"
        raise ValueError(msg)


def solve_machine(
    x: Tensor,
    y: Tensor,
    mean: Tensor,
    factor: Tensor,
    reg: float,
    bandwidth: float,
    kernel: str | float = "laplace",
    sample_weight: Tensor | None = None,
) -> Machine:
    """One kernel solve with fixed features.

    Args:
        x: Points, shape ``(n, d)``.
        y: Targets, shape ``(n, c)``, dtype of ``x``.
        mean: Centre, shape ``(d,)``.
        factor: ``F`` with ``M = F F^T``, shape ``(d, r)``.
        reg: Ridge, not negative.
        bandwidth: Length of the kernel.
        kernel: ``"laplace"``, ``"gaussian"``, or an exponent.
        sample_weight: How often each point counts, shape ``(n,)``, positive.
    """
    points = _points(x, mean, factor, make_kernel(kernel, bandwidth))
    return _machine(
        points, x, y, mean, factor, reg, bandwidth, kernel, sample_weight, _dispatch.threads()
    )


def _machine(
    points: Points,
    x: Tensor,
    y: Tensor,
    mean: Tensor,
    factor: Tensor,
    reg: float,
    bandwidth: float,
    kernel: str | float,
    weight: Tensor | None,
    threads: int,
    refine: bool = True,
) -> Machine:
    found = solve_points(
        points, y.to(points.u.dtype), reg, weight, threads, refine=refine,
        exact=lambda: Points(project(x, mean, factor, torch.float64), points.kernel),
    )  # fmt: skip
    return Machine(
        mean, factor, found.points.u, found.coef, bandwidth, kernel, found.jitter, found.points
    )


def fit(
    x: Tensor,
    y: Tensor,
    *,
    alpha: float = 0.0,
    reg: float = 1e-3,
    bandwidth: float = 10.0,
    kernel: str | float = "laplace",
    n_iter: int = 5,
    tol: float | None = None,
    sample_weight: Tensor | None = None,
    agop_samples: int | None = None,
    generator: torch.Generator | None = None,
    evaluate: Callable[[Tensor], float] | None = None,
    shared: Prepared | None = None,
    x_val: Tensor | None = None,
    threads: int | None = None,
) -> FitResult:
    """Fits RFAM.

    Args:
        x: Points, shape ``(n, d)``, float32 or float64, finite.
        y: Targets, shape ``(n, c)``, dtype of ``x``.
        alpha: Weight of the identity in the first M.
        reg: Ridge, not negative.
        bandwidth: Length of the kernel.
        kernel: ``"laplace"``, ``"gaussian"`` (``exp(-D^2 / (2 L^2))``), or the exponent q of
            ``exp(-(D / L)^q)``.
        n_iter: Number of solves; the features of the last come from the one before.
        tol: Stops once M changes by less, relatively; None never stops early.
        sample_weight: How often each point counts, shape ``(n,)``, positive.
        agop_samples: Points drawn with replacement for each AGOP; None takes all points.
        generator: Source of those draws.
        evaluate: Receives the decision values of the validation points, shape ``(m, c)``, and
            returns a score; the machine of the highest is kept, the first one on ties.
        shared: From ``prepare`` for the same points.
        x_val: Validation points, where ``shared`` does not hold them.
        threads: Threads to use; None takes torch's setting.
    """
    if shared is None:
        shared = prepare(
            x, alpha=alpha, bandwidth=bandwidth, kernel=kernel, x_val=x_val,
            sample_weight=sample_weight,
        )  # fmt: skip
    if evaluate is not None and shared.x_val is None:
        msg = "evaluate needs validation points: give x_val"
        raise ValueError(msg)
    _check_finite("y", y)
    threads = threads or _dispatch.threads()
    mean, factor, weight = shared.mean, shared.factor, sample_weight
    points, val_points = shared.points, shared.val_points
    result: FitResult | None = None
    best: float | None = None
    history: list[dict[str, Any]] = []
    for i in range(n_iter):
        start = time.perf_counter()
        last = i + 1 == n_iter
        # Without an update to follow, a float32 solution is as good as float32 predictions.
        machine = _machine(
            points, x, y, mean, factor, reg, bandwidth, kernel, weight, threads, refine=not last
        )
        score = None
        if evaluate is not None:
            assert val_points is not None
            assert shared.x_val is not None
            if val_points.u.dtype is not machine.points.dtype:
                val_points = _points(
                    shared.x_val, mean, factor, points.kernel, machine.points.dtype
                )
            f = _rfam_kernels.matvec(val_points, machine.packed, machine.dual_coef, threads)
            score = float(evaluate(f.to(y.dtype)))
        if result is None or score is None or best is None or score > best:
            result, best = FitResult(machine, history, i), score
        change = None
        if not last:  # nobody reads an update after the last solve
            updated = _update(machine, weight, agop_samples, generator, threads)
            change = 0.0 if updated is None else _relative_change(factor, updated)
            if updated is not None:
                factor = updated
                points = _points(x, mean, factor, points.kernel)
                if shared.x_val is not None and evaluate is not None:
                    val_points = _points(shared.x_val, mean, factor, points.kernel, points.u.dtype)
        history.append(
            {
                "iteration": i,
                "score": score,
                "change": change,
                "jitter": machine.jitter,
                "seconds": time.perf_counter() - start,
            }
        )
        if tol is not None and change is not None and change < tol:
            break
    assert result is not None
    return result


def _update(
    machine: Machine,
    weight: Tensor | None,
    samples: int | None,
    generator: torch.Generator | None,
    threads: int,
) -> Tensor | None:
    """The next factor; None where all gradients vanish, which leaves M as it is."""
    points = machine.packed
    if samples is not None:
        rows = torch.randint(points.u.shape[0], (samples,), generator=generator)
        points = Points(points.u[rows], points.kernel)
        weight = None if weight is None else weight[rows]
    r = _rfam_kernels.agop(points, machine.packed, machine.dual_coef, threads, weight)
    updated = scaled_to_trace(machine.factor @ psd_factor(r), float(machine.factor.shape[0]))
    return updated if updated.shape[1] else None


def _relative_change(before: Tensor, after: Tensor) -> float:
    """``|M' - M| / |M'|`` in the Frobenius norm, from the factors."""
    cross = (before.T @ after).square().sum()
    new, old = (after.T @ after).square().sum(), (before.T @ before).square().sum()
    return float(((new + old - 2 * cross).clamp(min=0) / new).sqrt())
