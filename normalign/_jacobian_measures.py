"""Row-wise measures of given input Jacobians."""

from __future__ import annotations

import torch
from torch import Tensor


def unit_rows(a: Tensor) -> Tensor:
    """Each row over its length; rows of zeros stay."""
    largest = a.abs().amax(1, keepdim=True)  # scaled first: squares must not underflow
    a = a / torch.where(largest > 0, largest, 1.0)
    norm = a.norm(dim=1, keepdim=True)
    return a / torch.where(norm > 0, norm, 1.0)


def jacobian_measures(jacobians: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Normal alignment and effective rank of each row; https://arxiv.org/abs/2605.08464.

    The alignment is ``|cos(v_1, x)|``, with ``v_1`` the Jacobian's first right singular vector.
    The rank is ``(sum_k s_k)^2 / sum_k s_k^2`` of its singular values ``s``: 1 when all outputs
    move along one direction, ``min(c, d)`` when all directions count alike. Both come from an
    eigendecomposition of the smaller of ``J J^T`` and ``J^T J``.

    Args:
        jacobians: Shape ``(B, c, d)``.
        x: Inputs, shape ``(B, d)``.

    Returns:
        Two of shape ``(B,)``, float64. NaN where the Jacobian is zero or not finite; the alignment
        with an input of zeros is 0.
    """
    jacobians = jacobians.double()
    largest = jacobians.abs().amax((1, 2), keepdim=True)
    defined = torch.isfinite(largest) & (largest > 0)
    jacobians = torch.where(defined, jacobians / largest, 0.0)  # squares must not underflow
    transposed = jacobians.mT
    if jacobians.shape[1] <= jacobians.shape[2]:
        squared, vectors = torch.linalg.eigh(jacobians @ transposed)
        first = (transposed @ vectors[:, :, -1:])[:, :, 0]
    else:
        squared, vectors = torch.linalg.eigh(transposed @ jacobians)
        first = vectors[:, :, -1]
    alignments = (unit_rows(first) * unit_rows(x.double())).sum(1).abs().clamp(max=1.0)
    squared = squared.clamp(min=0.0)
    ranks = squared.sqrt().sum(1).square() / squared.sum(1)  # 0 / 0 where J = 0
    return torch.where(defined[:, 0, 0], alignments, torch.nan), ranks
