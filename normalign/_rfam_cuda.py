"""The kernels of RFAM on a GPU, between points in factor space, where distances are Euclidean.

The tiles of K and of the gradient weights W, and the sums over them, are our own kernels; products
of whole matrices are torch's. Arguments as in ``normalign.reference``: points ``u`` ``(m, r)`` and
``z`` ``(n, r)``, coefficients ``(n, c)``, length L and exponent q of ``exp(-(D / L)^q)``.

Where it says so, tensors may have a first dimension more: many problems in one launch, each with
its own number of points ``own_m`` and ``own_n``, int32 of shape ``(B,)``. Rows beyond those are not
read; results there are 0, except in K and W, where nothing is written.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from normalign import _gpu

_TILE = 64  # points of a block, as in csrc/cuda/laplace.cuh
_BLOCKS = 264  # enough to fill a GPU of about 130 processors twice


def suffix(like: Tensor) -> str:
    """What the names of kernels for this dtype end with."""
    return "f64" if like.dtype is torch.float64 else "f32"


def _function(name: str, like: Tensor) -> Any:
    return getattr(_gpu.module(like.device), f"laplace_{name}_{suffix(like)}")


def problems(u: Tensor, own_m: Tensor | None, own_n: Tensor | None) -> tuple[int, int, int]:
    """The arguments that every launch begins with."""
    count = u.shape[0] if u.ndim == 3 else 1
    for own in (own_m, own_n):
        assert own is None or (own.dtype is torch.int32 and own.shape == (count,))
    return (
        count, 0 if own_m is None else own_m.data_ptr(), 0 if own_n is None else own_n.data_ptr(),
    )  # fmt: skip


def gram(
    u: Tensor,
    z: Tensor,
    length: float,
    exponent: float,
    *,
    weights: bool = False,
    own_m: Tensor | None = None,
    own_n: Tensor | None = None,
) -> Tensor:
    """``K(u, z)``, shape ``(m, n)``; or W, the gradient weights. Half the work for ``u is z``.

    Takes a batch.
    """
    u, z = u.contiguous(), z.contiguous()
    (m, r), n = u.shape[-2:], z.shape[-2]
    out = u.new_empty(*u.shape[:-1], n)
    if out.numel():
        _function("gram", u)(
            exponent, length, *problems(u, own_m, own_n), weights, m, n, r, u.data_ptr(),
            z.data_ptr(), out.data_ptr(), *_gpu.where(u.device),
        )  # fmt: skip
    return out


def _streamed(
    name: str,
    u: Tensor,
    z: Tensor,
    coef: Tensor,
    cotangent: Tensor | None,
    results: tuple[int, ...],
    kernel: tuple[float, float],
    own: tuple[Tensor | None, Tensor | None],
) -> Tensor:
    """A sum over the points z, shape ``(m, *results)``, in as many parts as fill the GPU."""
    u, z, coef = u.contiguous(), z.contiguous(), coef.contiguous()
    (m, r), (n, c) = u.shape[-2:], coef.shape[-2:]
    columns = math.prod(results)
    if u.shape[:-1].numel() * n * columns * c == 0:
        return u.new_zeros(*u.shape[:-1], *results)
    batch = problems(u, *own)
    # So many parts that blocks fill the GPU.
    blocks = batch[0] * -(-m // _TILE) * -(-columns // 64)
    parts = max(1, min(-(-n // _TILE), _BLOCKS // blocks))
    out = u.new_empty(parts, *u.shape[:-1], *results)
    cotangent = None if cotangent is None else cotangent.contiguous()
    _function(name, u)(
        *kernel, *batch, m, n, r, c, parts, u.data_ptr(), z.data_ptr(), coef.data_ptr(),
        *(() if cotangent is None else (cotangent.data_ptr(),)), out.data_ptr(),
        *_gpu.where(u.device),
    )  # fmt: skip
    return out[0] if parts == 1 else out.sum(0)


def matvec(
    u: Tensor,
    z: Tensor,
    coef: Tensor,
    length: float,
    exponent: float,
    *,
    own_m: Tensor | None = None,
    own_n: Tensor | None = None,
) -> Tensor:
    """``K(u, z) coef``, shape ``(m, c)``, without storing K. Takes a batch."""
    results = (coef.shape[-1],)
    return _streamed(
        "matvec", u, z, coef, None, results, (exponent, length), (own_m, own_n)
    )  # fmt: skip


def gradient(
    u: Tensor, z: Tensor, coef: Tensor, cotangent: Tensor, length: float, exponent: float
) -> Tensor:
    """Gradient of ``sum_k cotangent_k f_k`` in ``u``, shape ``(m, r)``, without storing W.

    Rows may hold attacks of several strengths, restarts and points together: one launch.
    """
    results = (u.shape[-1],)
    return _streamed("gradient", u, z, coef, cotangent, results, (exponent, length), (None, None))


def jacobian(
    u: Tensor,
    z: Tensor,
    coef: Tensor,
    length: float,
    exponent: float,
    *,
    own_m: Tensor | None = None,
    own_n: Tensor | None = None,
) -> Tensor:
    """Gradients of all outputs in ``u``, shape ``(m, c, r)``, without storing W. Takes a batch."""
    results = (coef.shape[-1], u.shape[-1])
    return _streamed(
        "jacobian", u, z, coef, None, results, (exponent, length), (own_m, own_n)
    )  # fmt: skip


def project_batch(x: Tensor, factor: Tensor, table: Tensor) -> Tensor:
    """``x[table[p]] F_p`` for problems p: centred points in factor space, float64.

    Equal points give equal results, wherever they stand.

    Args:
        x: Centred points of several tables, shape ``(t, m, d)``, float64.
        factor: Factors, shape ``(B, d, r)``, float64.
        table: Which points a problem takes, shape ``(B,)``, int32.
    """
    x, factor = x.contiguous(), factor.contiguous()
    (_, m, d), (count, _, r) = x.shape, factor.shape
    out = x.new_empty(count, m, r)
    if out.numel():
        _function("project", out)(
            count, m, d, r, table.data_ptr(), x.data_ptr(), factor.data_ptr(), out.data_ptr(),
            *_gpu.where(x.device),
        )  # fmt: skip
    return out


def cholesky_solve(
    k: Tensor, y: Tensor, ridge: Tensor | None = None, own_n: Tensor | None = None
) -> Tensor:
    """Solves ``(K_p + ridge_p I) a = y`` for many systems p, in place, a block of the GPU each.

    Args:
        k: Symmetric matrices, shape ``(B, n, n)``, float64, contiguous; only the lower triangles
            are read, and become the Cholesky factors.
        y: Right-hand sides as rows, shape ``(B, c, n)``, contiguous; become the solutions.
        ridge: Shape ``(B,)``; None adds nothing.
        own_n: Order of each system, shape ``(B,)``, int32; None means n. What lies beyond is not
            touched.

    Returns:
        Shape ``(B, 3)``: 0 or, where a pivot is not positive, 1 + its column (then ``k`` and ``y``
        hold nothing of use); the least pivot; the greatest entry of the diagonal.
    """
    count, n, _ = k.shape
    assert k.dtype is torch.float64
    assert k.is_contiguous()
    assert y.is_contiguous()
    if count == 0 or n == 0:
        return k.new_tensor([[0.0, 1.0, 0.0]]).repeat(count, 1)
    info = k.new_empty(count, 3)
    _gpu.module(k.device).cholesky_solve_f64(
        count, n, y.shape[1], 0 if own_n is None else own_n.data_ptr(),
        0 if ridge is None else ridge.data_ptr(), k.data_ptr(), y.data_ptr(), info.data_ptr(),
        *_gpu.where(k.device),
    )  # fmt: skip
    return info
