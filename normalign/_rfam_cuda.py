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
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from normalign import _gpu
from normalign._load import address

_TILE = 64  # points of a block, as in csrc/cuda/laplace.cuh
_BLOCKS = 264  # enough to fill a GPU of about 130 processors twice


def _function(name: str, like: Tensor) -> Any:
    return getattr(_gpu.module(like.device), f"laplace_{name}_{_gpu.suffix(like)}")


def problems(u: Tensor, own_m: Tensor | None, own_n: Tensor | None) -> tuple[int, int, int]:
    """The arguments that every launch begins with."""
    count = u.shape[0] if u.ndim == 3 else 1
    for own in (own_m, own_n):
        assert own is None or (own.dtype is torch.int32 and own.shape == (count,))
    return (
        count, address(own_m), address(own_n),
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
    precision: str | None = None,
) -> Tensor:
    """``K(u, z)``, shape ``(m, n)``; or W, the gradient weights. Half the work for ``u is z``.

    Takes a batch. ``precision`` permits K of float32 points products of ``"tf32"`` or ``"bf16"``.
    """
    u, z = u.contiguous(), z.contiguous()
    (m, r), n = u.shape[-2:], z.shape[-2]
    out = u.new_empty(*u.shape[:-1], n)
    tensor = precision is not None and not weights and u.dtype is torch.float32
    tensor = tensor and _gpu.tensor_cores(u.device)
    name, choice = ("gram_tensor", precision == "bf16") if tensor else ("gram", weights)
    if out.numel():
        _function(name, u)(
            exponent, length, *problems(u, own_m, own_n), choice, m, n, r, u.data_ptr(),
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
    k: Tensor,
    targets: Tensor,
    ridge: Tensor,
    ladder: Sequence[float] = (0.0,),
    own_n: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Solves ``(K_p + (ridge_p + jitter_p) I) a = y`` for many systems p, a block of the GPU each.

    Args:
        k: Symmetric matrices, shape ``(B, n, n)``, float64, contiguous; the lower triangles become
            the Cholesky factors.
        targets: Right-hand sides as rows, shape ``(B, c, n)``.
        ridge: Shape ``(B,)``.
        ladder: What each system tries as its jitter, in turn.
        own_n: Order of each system, shape ``(B,)``, int32; None means n.

    Returns:
        Solutions, shape ``(B, n, c)``, 0 beyond a system's own; and the jitters, shape ``(B,)``.
        Both are NaN where no jitter led to pivots above their rounding.
    """
    (count, n, _), c = k.shape, targets.shape[1]
    assert k.dtype is targets.dtype is torch.float64
    assert k.is_contiguous()
    targets = targets.contiguous()
    coef, jitter = k.new_empty(count, n, c), k.new_empty(count)
    work, diagonal = torch.empty_like(targets), k.new_empty(count, n)
    if count:
        _gpu.module(k.device).cholesky_solve_f64(
            count, n, c, address(own_n), ridge.data_ptr(), ladder,
            k.data_ptr(), targets.data_ptr(), work.data_ptr(), diagonal.data_ptr(),
            coef.data_ptr(), jitter.data_ptr(), *_gpu.where(k.device),
        )  # fmt: skip
    return coef, jitter


def semidefinite_factor(r: Tensor, ranks: Tensor) -> Tensor:
    """``C_p`` with ``C_p C_p^T = R_p`` to rounding, a block of the GPU for each p.

    Where R is definite in working precision this is its Cholesky factor, else that with complete
    pivoting, rows in R's own order; entries are off by about ``n eps max(R)`` in either case.

    Args:
        r: Symmetric positive semi-definite matrices, shape ``(B, n, n)``, float64, contiguous;
            entries negative by rounding don't matter. What they hold is lost.
        ranks: Orders of R, shape ``(B,)``, int32: what lies beyond is not read. Becomes the number
            of columns of C that are not 0, which are the first ones.

    Returns:
        Shape ``(B, n, n)``. The identity where R is 0, and NaN where it holds NaN or infinity; the
        rank stays as it is for both.
    """
    count, n, _ = r.shape
    assert r.dtype is torch.float64
    assert r.is_contiguous()
    assert ranks.dtype is torch.int32
    assert ranks.shape == (count,)
    factor, diagonal = torch.empty_like(r), r.new_empty(count, n)
    if factor.numel():
        _gpu.module(r.device).semidefinite_factor_f64(
            count, n, ranks.data_ptr(), r.data_ptr(), diagonal.data_ptr(), factor.data_ptr(),
            *_gpu.where(r.device),
        )  # fmt: skip
    return factor
