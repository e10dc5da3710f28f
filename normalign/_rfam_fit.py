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

from normalign import _rfam_kernels, reference
from normalign._rfam_factor import initial_factor, psd_factor, scaled_to_trace
from normalign._rfam_kernels import kernel_shape
from normalign._rfam_machine import Machine, project
from normalign._rfam_solve import solve_gram

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
    """What the fits of one table share whatever their ``reg``: centre, first factor."""

    x: Tensor
    x_val: Tensor | None
    alpha: float
    weight: Tensor | None
    mean: Tensor
    factor: Tensor


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
    kernel_shape(kernel, bandwidth)
    _check_finite("X", x)
    mean, factor = initial_factor(x, alpha, sample_weight)
    return Prepared(x, x_val, alpha, sample_weight, mean, factor)


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
    exponent, length = kernel_shape(kernel, bandwidth)
    u = project(x, mean, factor, x.dtype)
    gram = reference.laplace_gram(u, u, None, length, exponent)
    coef, jitter = solve_gram(gram, y, reg, sample_weight)
    return Machine(mean, factor, u, coef, bandwidth, kernel, jitter)


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
    exponent, length = kernel_shape(kernel, bandwidth)
    _check_finite("y", y)
    mean, factor, weight = shared.mean, shared.factor, sample_weight
    d = x.shape[1]
    result: FitResult | None = None
    best: float | None = None
    history: list[dict[str, Any]] = []
    for i in range(n_iter):
        start = time.perf_counter()
        machine = solve_machine(x, y, mean, factor, reg, bandwidth, kernel, weight)
        score = None
        if evaluate is not None:
            assert shared.x_val is not None
            score = float(evaluate(machine.decision(shared.x_val)))
        if result is None or score is None or best is None or score > best:
            result, best = FitResult(machine, history, i), score
        change = None
        if i + 1 < n_iter:  # nobody reads an update after the last solve
            points, row_weight = machine.points, weight
            if agop_samples is not None:
                rows = torch.randint(x.shape[0], (agop_samples,), generator=generator)
                points = points[rows]
                row_weight = None if weight is None else weight[rows]
            r = _rfam_kernels.agop(
                points, machine.points, machine.dual_coef, length, exponent, row_weight
            )
            updated = scaled_to_trace(factor @ psd_factor(r), float(d))
            if updated.numel():  # an AGOP of 0 (all gradients vanish) leaves M as it is
                before = factor @ factor.T
                after = updated @ updated.T
                change = float((after - before).norm() / after.norm())
                factor = updated
            else:
                change = 0.0
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
