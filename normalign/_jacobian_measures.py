"""Row-wise measures of given input Jacobians."""

from __future__ import annotations

import torch
from torch import Tensor


def _spectrum(jacobians: Tensor) -> tuple[Tensor, Tensor]:
    """Squared singular values, ascending, and the first right singular vector, in float64.

    They come from the smaller of ``J J^T`` and ``J^T J``.
    """
    jacobians = jacobians.double()
    rows, columns = jacobians.shape[1:]
    transposed = jacobians.transpose(1, 2)
    if rows <= columns:
        squared, vectors = torch.linalg.eigh(jacobians @ transposed)
        first = (transposed @ vectors[:, :, -1:])[:, :, 0]
    else:
        squared, vectors = torch.linalg.eigh(transposed @ jacobians)
        first = vectors[:, :, -1]
    return squared.clamp(min=0.0), first


def effective_ranks(jacobians: Tensor) -> Tensor:
    """``(sum_k s_k)^2 / sum_k s_k^2`` of each Jacobian's singular values ``s``.

    1 when a row's outputs all move along one direction, ``min(c, d)`` when all directions count
    alike; https://arxiv.org/abs/2605.08464.

    Args:
        jacobians: Shape ``(B, c, d)``.

    Returns:
        Shape ``(B,)``, float64; NaN where the Jacobian is zero.
    """
    squared, _ = _spectrum(jacobians)
    return squared.sqrt().sum(dim=1).square() / squared.sum(dim=1)


def normal_alignments(jacobians: Tensor, x: Tensor) -> Tensor:
    """``|cos|`` of the angle between each input and its Jacobian's first right singular vector.

    Args:
        jacobians: Shape ``(B, c, d)``.
        x: Inputs, shape ``(B, d)``.

    Returns:
        Shape ``(B,)``, float64, in [0, 1]; NaN where the Jacobian or the input is zero.
    """
    _, first = _spectrum(jacobians)
    x = x.double()
    products = (first * x).sum(dim=1).abs()
    cosines = products / (first.norm(dim=1) * x.norm(dim=1))
    defined = jacobians.flatten(1).ne(0).any(dim=1)
    return torch.where(defined, cosines, torch.nan).clamp(max=1.0)
