"""Feature matrices as factors: ``M = F F^T``.

With ``u = (x - mean) F`` Mahalanobis distances are Euclidean, ``M`` leaves every sum over pairs,
and the update of ``M`` by the AGOP is ``F <- F chol(H^T H)``: no eigendecomposition. These matrices
are small (d x r) and decide every later digit, so they are computed in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from normalign import _dispatch, _load

# The least pivot, relative to the largest diagonal element, of a matrix that counts as definite.
_LEAST = 1e-12
# Up to this rank a plain loop is quicker than several calls.
_SMALL = 64


def psd_factor(matrix: Tensor) -> Tensor:
    """``C`` with ``C C^T = matrix``, for a symmetric positive semi-definite matrix.

    Returns:
        Shape ``(n, n)`` where Cholesky succeeds, else ``(n, rank)`` from an eigendecomposition.
        Directions below rounding (and slightly negative ones) are dropped.
    """
    matrix = matrix.double()
    n = matrix.shape[0]
    if n == 0:
        return matrix.new_zeros(0, 0)
    top = matrix.diagonal().max()
    factor: Tensor
    factor, info = torch.linalg.cholesky_ex(matrix)
    if int(info) == 0 and bool(factor.diagonal().square().min() > _LEAST * top):
        return factor
    values, vectors = torch.linalg.eigh(matrix)
    kept = values > n * torch.finfo(torch.float64).eps * values.max().clamp(min=0)
    factor = vectors[:, kept] * values[kept].sqrt()
    return factor


def scaled_to_trace(factor: Tensor, trace: float) -> Tensor:
    """The factor times a number, so that the trace of ``F F^T`` is ``trace``; zero stays zero."""
    largest = factor.abs().max() if factor.numel() else factor.new_zeros(())
    if not bool(largest > 0):
        return factor
    factor = factor / largest  # squares neither overflow nor vanish
    return factor * (trace / factor.square().sum()).sqrt()


def next_factor(factor: Tensor, agop: Tensor) -> tuple[Tensor | None, float]:
    """The factor of ``F R F^T``, scaled to trace d, and how much that changes M.

    Args:
        factor: ``F``, shape ``(d, r)``, float64.
        agop: ``R``, the AGOP in factor space, shape ``(r, r)``, float64, contiguous.

    Returns:
        The next factor, None where ``R = 0``, and ``|M' - M| / |M'|`` in the Frobenius norm.
    """
    d, r = factor.shape
    if 0 < r <= _SMALL and factor.device.type == "cpu" and _dispatch.reference_reason(agop) is None:
        factor = factor.contiguous()
        updated = torch.empty_like(factor)
        workspace = factor.new_empty(2, r, r)
        change = _load._C.rfam_next_factor(
            d, r, factor.data_ptr(), agop.data_ptr(), _LEAST, updated.data_ptr(),
            workspace.data_ptr(),
        )  # fmt: skip
        if change is not None:
            return updated, change
    updated = scaled_to_trace(factor @ psd_factor(agop), float(d))
    return (updated, _relative_change(factor, updated)) if updated.shape[1] else (None, 0.0)


def _relative_change(before: Tensor, after: Tensor) -> float:
    cross = (before.T @ after).square().sum()
    new, old = (after.T @ after).square().sum(), (before.T @ before).square().sum()
    return float(((new + old - 2 * cross).clamp(min=0) / new).sqrt())


def weighted_mean(x: Tensor, weight: Tensor | None) -> Tensor:
    """The mean of the rows, accumulated in float64."""
    if weight is None:
        return x.mean(0, dtype=torch.float64)
    w = weight.double()
    return (w @ x.double()) / w.sum()


def initial_factor(x: Tensor, alpha: float, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Where RFAM starts: ``M = (1 - alpha) Cov(x) + alpha I``, scaled to trace d.

    Args:
        x: Points, shape ``(n, d)``.
        alpha: In [0, 1]: 0 is RFAM's start, 1 is that of a recursive feature machine.
        weight: How often each point counts, shape ``(n,)``.

    Returns:
        The mean, shape ``(d,)``, in the dtype of ``x``, and ``F``, shape ``(d, r)``, float64, with
        ``M = F F^T``. Where ``M = 0`` (all columns constant and ``alpha = 0``), ``r = 0``.
    """
    n, d = x.shape
    # Any point near the middle serves as centre; its rounding is taken out of the covariance.
    mean = weighted_mean(x, weight).to(x.dtype)
    if alpha < 1.0:
        centred = x.double()
        centred = centred.clone() if centred is x else centred
        centred -= mean
        centred -= weighted_mean(centred, weight)
        count = float(n)
        if weight is not None:
            count = float(weight.double().sum())
            centred *= weight.double().sqrt().unsqueeze(1)
        covariance = centred.T @ centred / (count - 1 if count > 1 else 1)
        matrix = (1 - alpha) * covariance
        matrix.diagonal().add_(alpha)
        factor = psd_factor(matrix)
    else:
        factor = torch.eye(d, dtype=torch.float64, device=x.device)
    return mean, scaled_to_trace(factor, float(d))
