"""Reference for the kernels ``exp(-(D / L)^q)`` under a Mahalanobis distance ``D``.

``exponent`` q is 1 for the Laplace kernel of arXiv 2605.08464 and 2 for a Gaussian. Distances come
from differences, not from ``|x|^2 - 2 x.z + |z|^2``, so that ``D(x, x) = 0`` exactly and a common
offset of x and z cancels.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Elements of the (rows, n, d) array of differences that is alive at a time.
_CHUNK = 1 << 22


def squared_distances(x: Tensor, z: Tensor, feature_matrix: Tensor | None = None) -> Tensor:
    """``(x_i - z_j)^T M (x_i - z_j)``, shape ``(m, n)``; ``None`` stands for the identity."""
    rows = max(1, _CHUNK // max(1, z.shape[0] * x.shape[1]))
    blocks = []
    for part in x.split(rows):
        delta = part[:, None, :] - z[None, :, :]  # (rows, n, d)
        image = delta if feature_matrix is None else delta @ feature_matrix
        blocks.append((image * delta).sum(-1))
    return torch.cat(blocks) if blocks else x.new_zeros(0, z.shape[0])


def distances(x: Tensor, z: Tensor, feature_matrix: Tensor | None = None) -> Tensor:
    """The root of ``squared_distances``; its gradient is 0 at 0, where it has none."""
    squared = squared_distances(x, z, feature_matrix)
    apart = ~(squared <= 0)  # NaN counts as apart, and stays NaN
    root = torch.where(apart, squared, torch.ones_like(squared)).sqrt()
    return torch.where(apart, root, torch.zeros_like(root))


def laplace_gram(
    x: Tensor,
    z: Tensor,
    feature_matrix: Tensor | None,
    bandwidth: float,
    exponent: float = 1.0,
) -> Tensor:
    """``K_ij = exp(-(D_ij / L)^q)``, shape ``(m, n)``."""
    return torch.exp(-((distances(x, z, feature_matrix) / bandwidth) ** exponent))


def gradient_weights(
    x: Tensor,
    z: Tensor,
    feature_matrix: Tensor | None,
    bandwidth: float,
    exponent: float = 1.0,
) -> Tensor:
    """``W_ij`` such that the gradient of ``K_ij`` in ``x_i`` is ``-W_ij M (x_i - z_j)``.

    ``W = -K'(D) / D = q (D / L)^(q - 2) K / L^2``, and 0 where ``D = 0``: there a Laplace kernel
    has no gradient, and any other has gradient 0 whatever ``W`` is.
    """
    distance = distances(x, z, feature_matrix)
    apart = distance != 0
    t = torch.where(apart, distance / bandwidth, torch.ones_like(distance))
    w = exponent / bandwidth**2 * t ** (exponent - 2) * torch.exp(-(t**exponent))
    return torch.where(apart, w, torch.zeros_like(w))


def laplace_matvec(
    x: Tensor,
    z: Tensor,
    coef: Tensor,
    feature_matrix: Tensor | None,
    bandwidth: float,
    exponent: float = 1.0,
) -> Tensor:
    """``K(x, z) coef``, shape ``(m, c)``."""
    return laplace_gram(x, z, feature_matrix, bandwidth, exponent) @ coef


def input_gradient(
    x: Tensor,
    z: Tensor,
    coef: Tensor,
    cotangent: Tensor,
    feature_matrix: Tensor | None,
    bandwidth: float,
    exponent: float = 1.0,
) -> Tensor:
    """Gradient of ``sum_k cotangent_ik f_k(x_i)`` in ``x_i``, ``f = K(., z) coef``: ``(m, d)``."""
    w = gradient_weights(x, z, feature_matrix, bandwidth, exponent)
    s = w * (cotangent @ coef.T)  # (m, n)
    # x and z relative to one point: a common offset would cancel badly in the difference below.
    centre = z.mean(0) if z.shape[0] else 0.0
    g = s @ (z - centre) - s.sum(1, keepdim=True) * (x - centre)
    return g if feature_matrix is None else g @ feature_matrix


def jacobian(
    x: Tensor,
    z: Tensor,
    coef: Tensor,
    feature_matrix: Tensor | None,
    bandwidth: float,
    exponent: float = 1.0,
) -> Tensor:
    """Gradients of every ``f_k`` at every ``x_i``, shape ``(m, c, d)``."""
    w = gradient_weights(x, z, feature_matrix, bandwidth, exponent)
    centre = z.mean(0) if z.shape[0] else 0.0
    moment = torch.einsum("ij,jk,jd->ikd", w, coef, z - centre)
    g = moment - (w @ coef).unsqueeze(-1) * (x - centre).unsqueeze(1)
    return g if feature_matrix is None else g @ feature_matrix


def agop(
    x: Tensor,
    z: Tensor,
    coef: Tensor,
    feature_matrix: Tensor | None,
    bandwidth: float,
    exponent: float = 1.0,
    weight: Tensor | None = None,
) -> Tensor:
    """``sum_i w_i sum_k g_ik g_ik^T / sum_i w_i`` with ``g_ik`` the gradient of ``f_k`` at x_i."""
    g = jacobian(x, z, coef, feature_matrix, bandwidth, exponent)  # (m, c, d)
    w = x.new_ones(x.shape[0]) if weight is None else weight
    return torch.einsum("i,ikd,ike->de", w, g, g) / w.sum()
