"""A radius that no attack can beat, for machines with the Laplace kernel."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from normalign._rfam_fit import Machine

# Bytes of the kernel block that is held at once.
BLOCK_BYTES = 32 * 2**20


def certified_distance(machine: Machine, x: Tensor, labels: Tensor) -> Tensor:
    """Distance along M below which no input is classified differently; a lower bound.

    For the label ``y`` and another class ``k`` let
    ``g(x) = f_y(x) - f_k(x) = sum_i b_i exp(-|x - x_i|_M / L)`` with ``b_i = a_iy - a_ik``. The
    label is kept at ``x'`` while ``g(x') > 0``. Two bounds of ``|g(x) - g(x')|`` for
    ``|x - x'|_M <= R`` hold together, and the larger radius counts.

    1. *Lipschitz in the kernel's own metric.* ``g`` lies in the kernel's Hilbert space, so
       ``|g(x) - g(x')| = |<g, k_x - k_x'>| <= |g|_H |k_x - k_x'|_H`` by Cauchy and Schwarz, where
       ``|k_x - k_x'|_H^2 = 2 - 2 k(x, x') = 2 - 2 exp(-|x - x'|_M / L)`` and ``|g|_H^2 = b^T K b``.
       So ``g(x') > 0`` as long as ``2 - 2 exp(-R / L) < (g(x) / |g|_H)^2``, which holds for
       ``R < -L log(1 - g(x)^2 / (2 |g|_H^2))``.
    2. *Lipschitz term by term.* By the triangle inequality the distance ``r_i`` to ``x_i`` changes
       by at most ``R``. A term with ``b_i > 0`` loses most when ``x'`` moves away,
       ``b_i k_i (1 - exp(-R / L))``; one with ``b_i < 0`` when ``x'`` moves closer,
       ``|b_i| k_i (exp(min(R, r_i) / L) - 1) <= |b_i| k_i (exp(R / L) - 1)``, with
       ``k_i = exp(-r_i / L)``. With ``P`` and ``N`` the sums of ``|b_i| k_i`` over positive and
       negative ``b_i``, ``g(x) = P - N`` and ``g(x') >= P exp(-R / L) - N exp(R / L)``, which is
       positive for ``R < L/2 log(P / N)``.

    Everything is computed in float64 from the machine as stored; ``g(x)`` is lowered and the sums
    are raised by the rounding that a float32 evaluation of the machine may add, so that the bound
    holds for the predictions as they are made.

    Args:
        machine: The fitted machine.
        x: Inputs, shape ``(m, d)``.
        labels: Class indices, shape ``(m,)``.

    Returns:
        Shape ``(m,)``, float64, in the units of ``|.|_M``; 0 for a misclassified row, infinite
        where no input at all changes the label.

    Raises:
        ValueError: the kernel isn't the Laplace kernel.
    """
    if machine.kernel not in ("laplace", 1.0):
        msg = f'a certificate needs kernel="laplace", got {machine.kernel!r}'
        raise ValueError(msg)
    epsilon = torch.finfo(machine.mean.dtype).eps
    points = machine.points.double()
    dual = machine.dual_coef.double()
    classes = dual.shape[1]
    if classes < 2:
        return torch.full((len(x),), math.inf, dtype=torch.float64)
    gram = _inner_products(points, dual, machine.bandwidth)
    u = (x.double() - machine.mean.double()) @ machine.factor.double()
    radius = torch.full((len(x),), math.inf, dtype=torch.float64)
    magnitudes = dual.abs()
    for rows in torch.arange(len(x)).split(_block(len(points))):
        kernel = _kernel(u[rows], points, machine.bandwidth)
        outputs = kernel @ dual
        own = outputs.gather(1, labels[rows, None])[:, 0]
        # One evaluation in the machine's precision: products, sums, and the distances within.
        slack = 16.0 * epsilon * (kernel @ magnitudes)
        own_slack = slack.gather(1, labels[rows, None])[:, 0]
        difference = dual.T[labels[rows]]  # (rows, n): coefficients of the label
        for other in range(classes):
            b = difference - dual[:, other]
            margin = own - outputs[:, other] - own_slack - slack[:, other]
            y = labels[rows]
            norm2 = gram[y, y] + gram[other, other] - 2.0 * gram[y, other]
            # Cauchy and Schwarz.
            ratio = margin.clamp(min=0.0).square() / (2.0 * norm2).clamp(min=1e-300)
            first = -machine.bandwidth * torch.log1p(-ratio.clamp(max=1.0))
            # Term by term.
            weighted = b * kernel
            rounding = own_slack + slack[:, other]
            gain = (weighted.clamp(min=0.0).sum(dim=1) - rounding).clamp(min=0.0)
            loss = (-weighted).clamp(min=0.0).sum(dim=1) + rounding
            second = 0.5 * machine.bandwidth * torch.log(gain / loss.clamp(min=1e-300))
            bound = torch.where(margin > 0, torch.maximum(first, second), 0.0).clamp(min=0.0)
            bound = torch.where(y == other, math.inf, bound)
            radius[rows] = torch.minimum(radius[rows], bound)
    return radius


def _block(points: int) -> int:
    return max(1, BLOCK_BYTES // (8 * max(1, points)))


def _kernel(u: Tensor, points: Tensor, bandwidth: float) -> Tensor:
    # The exact form: the product form loses small distances.
    distances = torch.cdist(u, points, compute_mode="donot_use_mm_for_euclid_dist")
    return torch.exp(-distances / bandwidth)


def _inner_products(points: Tensor, dual: Tensor, bandwidth: float) -> Tensor:
    """``A^T K A``, shape ``(c, c)``, rounded upwards on the diagonal."""
    total = torch.zeros(dual.shape[1], dual.shape[1], dtype=torch.float64)
    for rows in torch.arange(len(points)).split(_block(len(points))):
        kernel = _kernel(points[rows], points, bandwidth)
        total += dual[rows].T @ (kernel @ dual)
    total = 0.5 * (total + total.T)
    # Cancellation: at most a few units of rounding of the sum of the terms' sizes.
    size = dual.abs().sum(dim=0).square()
    total.diagonal().add_(4.0 * torch.finfo(torch.float64).eps * size)
    return total


def unit_distance(factor: Tensor, scale: Tensor, norm: str) -> float:
    """The largest ``|scale * z|_M`` over ``|z| <= 1`` in ``norm``, or an upper bound of it.

    With ``S = diag(scale) M diag(scale)``: for the Euclidean norm it is the root of the largest
    eigenvalue of ``S``, exactly. For the maximum norm ``z^T S z`` is at most the sum of
    ``|S_ij|``, and at most ``d`` times the largest eigenvalue; the smaller one is taken (the
    exact maximum over the cube is NP-hard).

    Args:
        factor: ``F`` with ``M = F F^T``, shape ``(d, r)``.
        scale: The region's half-width in each coordinate, shape ``(d,)``.
        norm: ``"linf"`` or ``"l2"``.
    """
    scaled = scale.double()[:, None] * factor.double()
    if scaled.numel() == 0:
        return 0.0
    largest = float(torch.linalg.matrix_norm(scaled, 2).square())
    if norm == "l2":
        return math.sqrt(largest)
    moving = int((scale > 0).sum())
    return math.sqrt(min(float((scaled @ scaled.T).abs().sum()), moving * largest))
