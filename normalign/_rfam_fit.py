"""The RFAM iteration: solve, average the gradients' outer products, take them as new features.

Equation and names follow arXiv 2605.08464; ``M`` is kept as a factor (see ``_rfam_factor``).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from normalign import _dispatch, _rfam_agop
from normalign._rfam_factor import initial_factor, next_factor
from normalign._rfam_kernels import Points, make_kernel
from normalign._rfam_machine import Machine
from normalign._rfam_solve import Solution, System

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
    """What the fits of one table share whatever their ``reg``: centre and first factor."""

    x: Tensor
    x_val: Tensor | None
    mean: Tensor
    factor: Tensor


def prepare(
    x: Tensor,
    *,
    alpha: float = 0.0,
    x_val: Tensor | None = None,
    sample_weight: Tensor | None = None,
) -> Prepared:
    """Work that fits with different ``reg``, kernels or targets on the same points share.

    Args:
        x: Training points, shape ``(n, d)``, float32 or float64.
        alpha: Weight of the identity in the first M.
        x_val: Points whose decision values ``evaluate`` receives, shape ``(m, d)``.
        sample_weight: How often each point counts, shape ``(n,)``, positive.
    """
    _check_finite("X", x)
    if x_val is not None:
        _check_finite("X_val", x_val)
    return Prepared(x, x_val, *initial_factor(x, alpha, sample_weight))


def _check_finite(name: str, x: Tensor) -> None:
    # A sum is finite unless something in it is not, or it overflows: then each value is looked at.
    if not math.isfinite(float(x.sum())) and not bool(torch.isfinite(x).all()):
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
    form, threads = make_kernel(kernel, bandwidth), _dispatch.threads()
    found = System(x, y, mean, form, reg, sample_weight, threads).solve(factor)
    return _machine(found, mean, factor, bandwidth, kernel)


def _machine(
    found: Solution, mean: Tensor, factor: Tensor, bandwidth: float, kernel: str | float
) -> Machine:
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
        shared = prepare(x, alpha=alpha, x_val=x_val, sample_weight=sample_weight)
    if evaluate is not None and shared.x_val is None:
        msg = "evaluate needs validation points: give x_val"
        raise ValueError(msg)
    _check_finite("y", y)
    mean, factor = shared.mean, shared.factor
    system = System(
        x, y, mean, make_kernel(kernel, bandwidth), reg, sample_weight,
        threads or _dispatch.threads(),
    )  # fmt: skip
    if system.native and n_iter > 1:  # at once: growing would leave a hole behind
        sizes = (*y.shape, factor.shape[1], system.threads, x.element_size())
        system.scratch.take(_rfam_agop.agop_bytes(*sizes))
    result: FitResult | None = None
    best: float | None = None
    history: list[dict[str, Any]] = []
    for i in range(n_iter):
        start = time.perf_counter()
        last = i + 1 == n_iter
        # Without an update to follow, a float32 solution is as good as float32 predictions.
        if evaluate is None:
            result = None  # the machine before leaves its memory
        found = system.solve(factor, refine=not last)
        machine = _machine(found, mean, factor, bandwidth, kernel)
        score = None
        if evaluate is not None:
            assert shared.x_val is not None
            score = float(evaluate(machine.decision(shared.x_val)))
        if result is None or score is None or best is None or score > best:
            result, best = FitResult(machine, history, i), score
        change = None
        if not last:  # nobody reads an update after the last solve
            updated, change = _update(system, found, factor, agop_samples, generator)
            factor = factor if updated is None else updated
        history.append(
            {
                "iteration": i,
                "score": score,
                "change": change,
                "jitter": machine.jitter,
                "seconds": time.perf_counter() - start,
            }
        )
        del found, machine
        if tol is not None and change is not None and change < tol:
            break
    assert result is not None
    return result


# Gradients of about the root of this size come from kernel values that float32 rounds to 0, and
# float64 does not: all points are far from each other for the bandwidth.
_LEAST_TRACE = 1e-60


def _update(
    system: System, found: Solution, factor: Tensor, samples: int | None,
    generator: torch.Generator | None,
) -> tuple[Tensor | None, float]:  # fmt: skip
    """The next factor and its change; None where all gradients vanish, which leaves M as it is."""
    z, coef, weight = found.points, found.coef, system.weight
    if weight is not None:
        weight = weight.to(z.u.dtype)  # float64 where float32 would not do for the points
    if samples is None and found.size and z.u.shape[1]:
        (n, c), width = coef.shape, z.u.shape[1]
        method = _rfam_agop.agop_method(n, n, c, width, True, system.threads)
        agop, _ = _rfam_agop.agop_scaled(
            z, z, coef, found.size, system.threads, weight, method, system.scratch
        )
        if z.u.dtype is torch.float64 or float(agop.trace()) > _LEAST_TRACE:
            return next_factor(factor, agop)
        z, coef = Points(z.u.double(), z.kernel), coef.double()
        weight = None if weight is None else weight.double()
    points = z
    if samples is not None:
        rows = torch.randint(z.u.shape[0], (samples,), generator=generator)
        points = Points(z.u[rows], z.kernel)
        weight = None if weight is None else weight[rows]
    agop = _rfam_agop.agop(points, z, coef, system.threads, weight, scratch=system.scratch)
    return next_factor(factor, agop)
