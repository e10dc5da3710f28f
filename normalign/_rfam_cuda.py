"""The kernels of RFAM on a GPU, between points in factor space, where distances are Euclidean.

The tiles of K and of the gradient weights W, and the sums over them, are our own kernels; products
of whole matrices are torch's. Arguments as in ``normalign.reference``: points ``u`` ``(m, r)`` and
``z`` ``(n, r)``, coefficients ``(n, c)``, length L and exponent q of ``exp(-(D / L)^q)``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from normalign import _gpu

_TILE = 64  # points of a block, as in csrc/cuda/laplace.cuh
_BLOCKS = 264  # enough to fill a GPU of about 130 processors twice
_ELEMENTS = 1 << 26  # of a temporary array


def _function(name: str, like: Tensor) -> Any:
    suffix = "f64" if like.dtype is torch.float64 else "f32"
    return getattr(_gpu.module(like.device), f"laplace_{name}_{suffix}")


def gram(u: Tensor, z: Tensor, length: float, exponent: float, *, weights: bool = False) -> Tensor:
    """``K(u, z)``, shape ``(m, n)``; or W, the gradient weights. Half the work for ``u is z``."""
    u, z = u.contiguous(), z.contiguous()
    out = u.new_empty(u.shape[0], z.shape[0])
    if out.numel():
        _function("gram", u)(
            exponent, length, weights, *out.shape, u.shape[1], u.data_ptr(), z.data_ptr(),
            out.data_ptr(), *_gpu.where(u.device),
        )  # fmt: skip
    return out


def _parts(m: int, n: int, results: int) -> int:
    """Into how many parts a sum over n points goes, so that the blocks fill the GPU."""
    tiles = -(-m // _TILE) * -(-results // 64)
    return max(1, min(-(-n // _TILE), _BLOCKS // tiles))


def _sum_parts(out: Tensor) -> Tensor:
    return out[0] if out.shape[0] == 1 else out.sum(0)


def matvec(u: Tensor, z: Tensor, coef: Tensor, length: float, exponent: float) -> Tensor:
    """``K(u, z) coef``, shape ``(m, c)``, without storing K."""
    u, z, coef = u.contiguous(), z.contiguous(), coef.contiguous()
    (m, r), n, c = u.shape, z.shape[0], coef.shape[1]
    if min(m, n, c) == 0:
        return u.new_zeros(m, c)
    out = u.new_empty(_parts(m, n, c), m, c)
    _function("matvec", u)(
        exponent, length, m, n, r, c, out.shape[0], u.data_ptr(), z.data_ptr(), coef.data_ptr(),
        out.data_ptr(), *_gpu.where(u.device),
    )  # fmt: skip
    return _sum_parts(out)


def gradient(
    u: Tensor, z: Tensor, coef: Tensor, cotangent: Tensor, length: float, exponent: float
) -> Tensor:
    """Gradient of ``sum_k cotangent_k f_k`` in ``u``, shape ``(m, r)``, without storing W.

    Rows may hold attacks of several strengths, restarts and points together: one launch.
    """
    u, z, coef, cotangent = (t.contiguous() for t in (u, z, coef, cotangent))
    (m, r), n, c = u.shape, z.shape[0], coef.shape[1]
    if min(m, n, c, r) == 0:
        return u.new_zeros(m, r)
    out = u.new_empty(_parts(m, n, r), m, r)
    _function("gradient", u)(
        exponent, length, m, n, r, c, out.shape[0], u.data_ptr(), z.data_ptr(), coef.data_ptr(),
        cotangent.data_ptr(), out.data_ptr(), *_gpu.where(u.device),
    )  # fmt: skip
    return _sum_parts(out)


def agop(
    u: Tensor,
    z: Tensor,
    coef: Tensor,
    length: float,
    exponent: float,
    weight: Tensor | None = None,
) -> Tensor:
    """``sum_i weight_i sum_k g_ik g_ik^T``, shape ``(r, r)``, float64.

    With ``g_ik = sum_j W_ij coef_jk (z_j - u_i)``: one product of W with ``[coef_jk z_j, coef_jk]``
    gives both terms. W, and the classes, are taken in groups that bound the memory.
    """
    (m, r), (n, c) = u.shape, coef.shape
    total = u.new_zeros(r, r, dtype=torch.float64)
    if min(m, n, c, r) == 0:
        return total
    # Relative to one point: a common offset would cancel badly in the difference of both terms.
    centre = z.mean(0)
    x0, z0 = u - centre, z - centre
    step = max(1, min(c, _ELEMENTS // (max(m, n) * (r + 1))))
    rows = max(_TILE, min(m, _ELEMENTS // n))
    for first in range(0, c, step):
        a = coef[:, first : first + step]  # (n, k)
        right = torch.cat(((a.unsqueeze(2) * z0.unsqueeze(1)).flatten(1), a), 1)
        for i in range(0, m, rows):
            whole = u is z and rows >= m  # then half of W is enough
            w = gram(u if whole else u[i : i + rows], z, length, exponent, weights=True)
            sums = w @ right
            moment, mass = sums.split((a.shape[1] * r, a.shape[1]), 1)
            g = moment.unflatten(1, (a.shape[1], r)) - mass.unsqueeze(2) * x0[i : i + rows, None]
            if weight is not None:
                g = g * weight[i : i + rows].sqrt()[:, None, None].to(g.dtype)
            flat = g.flatten(0, 1).double()
            total.addmm_(flat.T, flat)
    return total
