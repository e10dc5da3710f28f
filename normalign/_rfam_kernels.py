"""The kernels of RFAM between points in factor space, where distances are Euclidean.

Each function takes the native kernel where there is one and the reference elsewhere. ``kernel`` is
``"laplace"``, ``"gaussian"`` or the exponent q of ``exp(-(D / L)^q)``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from normalign import reference


def kernel_shape(kernel: str | float, bandwidth: float) -> tuple[float, float]:
    """The exponent q and the length L of ``exp(-(D / L)^q)``.

    ``"gaussian"`` is ``exp(-D^2 / (2 bandwidth^2))``.
    """
    if kernel == "laplace":
        return 1.0, bandwidth
    if kernel == "gaussian":
        return 2.0, bandwidth * math.sqrt(2.0)
    if isinstance(kernel, str) or not 0 < kernel <= 2:
        msg = f"kernel must be 'laplace', 'gaussian' or an exponent in (0, 2], got {kernel!r}"
        raise ValueError(msg)
    return float(kernel), bandwidth


def matvec(u: Tensor, z: Tensor, coef: Tensor, length: float, exponent: float) -> Tensor:
    """``K(u, z) coef``, shape ``(m, c)``, without storing K beyond a block of rows."""
    rows = max(1, (1 << 22) // max(1, z.shape[0]))
    parts = [reference.laplace_matvec(p, z, coef, None, length, exponent) for p in u.split(rows)]
    return torch.cat(parts) if parts else u.new_zeros(0, coef.shape[1])


def gradient(
    u: Tensor, z: Tensor, coef: Tensor, cotangent: Tensor, length: float, exponent: float
) -> Tensor:
    """Gradient of ``sum_k cotangent_k f_k`` in ``u``, shape ``(m, r)``."""
    return reference.input_gradient(u, z, coef, cotangent, None, length, exponent)


def jacobian(u: Tensor, z: Tensor, coef: Tensor, length: float, exponent: float) -> Tensor:
    """Gradients of all outputs in ``u``, shape ``(m, c, r)``."""
    return reference.jacobian(u, z, coef, None, length, exponent)


def agop(
    u: Tensor,
    z: Tensor,
    coef: Tensor,
    length: float,
    exponent: float,
    weight: Tensor | None = None,
) -> Tensor:
    """A multiple of the sum over points of ``sum_k g_k g_k^T``, shape ``(r, r)``, float64."""
    return reference.agop(u, z, coef, None, length, exponent, weight).double()
