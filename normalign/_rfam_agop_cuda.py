"""The AGOP of kernel machines in factor space on a GPU: ``sum_i weight_i sum_k g_ik g_ik^T``.

With ``g_ik = sum_j W_ij coef_jk (z_j - u_i)``, arguments as in ``normalign._rfam_cuda``. Three ways
lead there:

- Up to 64 coordinates, one kernel goes from points to sums of outer products
  (csrc/cuda/agop.cuh): two launches, and no array larger than those sums.
- Beyond, matrix products by torch are the right tool: a block of the GPU has no room for the sums.
  So they are for more than 65,535 classes, which are more than a launch has room for.
- For one large problem they are so too. The kernel makes W again for every group of classes, and
  takes differences ``z_j - u_i`` where cuBLAS needs a multiply-add; what it saves, some ten
  launches, is the same at every size (bench/MODEL.md has the arithmetic).

The kernel is the more accurate one where points are close, because it adds up differences, where
products subtract two large sums: 2e-8 against 8e-5 in float32 with pairs of points 1e-4 apart, in
units of the largest entry.
"""

from __future__ import annotations

import torch
from torch import Tensor

from normalign import _gpu
from normalign._load import address
from normalign._rfam_cuda import gram, jacobian, problems

_WIDEST = 64  # coordinates, as in csrc/cuda/agop.h
_CLASSES = 65535  # and classes: groups of them are blocks in a grid's second direction
_FEW = 1 << 32  # m n c r elements, in bytes, up to which launches cost more than arithmetic
_TILE = 64  # least rows of W at a time
_ELEMENTS = 1 << 26  # of a temporary array


def agop(
    u: Tensor,
    z: Tensor,
    coef: Tensor,
    length: float,
    exponent: float,
    weight: Tensor | None = None,
    *,
    own_m: Tensor | None = None,
    own_n: Tensor | None = None,
) -> Tensor:
    """Sums of outer products of gradients, shape ``(r, r)``, float64. Takes a batch.

    Gradients are made in the dtype of ``u``; sums over points and classes are in float64.

    Args:
        u: Where to take gradients, shape ``(m, r)``.
        z: Points of the machine, shape ``(n, r)``.
        coef: Its coefficients, shape ``(n, c)``.
        length: L of ``exp(-(D / L)^q)``.
        exponent: q.
        weight: How often each point ``u`` counts, shape ``(m,)``.
        own_m: Points ``u`` of each problem of a batch.
        own_n: Points ``z`` of each.
    """
    (m, r), (n, c) = u.shape[-2:], coef.shape[-2:]
    batch = u.ndim == 3
    if min(*u.shape, n, c) == 0:
        return u.new_zeros(*u.shape[:-2], r, r, dtype=torch.float64)
    narrow = r <= _WIDEST and c <= _CLASSES
    if narrow and (batch or m * n * c * r * u.element_size() <= _FEW):
        return _by_kernel(u, z, coef, length, exponent, weight, own_m, own_n)
    if not batch:
        return _by_products(u, z, coef, length, exponent, weight)
    g = jacobian(u, z, coef, length, exponent, own_m=own_m, own_n=own_n).double()
    if weight is not None:
        g = g * weight.double().sqrt()[:, :, None, None]
    g = g.flatten(1, 2)  # (B, m c, r)
    return g.transpose(1, 2) @ g


def _by_kernel(
    u: Tensor, z: Tensor, coef: Tensor, length: float, exponent: float, weight: Tensor | None,
    own_m: Tensor | None, own_n: Tensor | None,
) -> Tensor:  # fmt: skip
    u, z, coef = u.contiguous(), z.contiguous(), coef.contiguous()
    weight = None if weight is None else weight.double().contiguous()
    (m, r), (n, c) = u.shape[-2:], coef.shape[-2:]
    count, *own = problems(u, own_m, own_n)
    module, kind, where = _gpu.module(u.device), _gpu.suffix(u), _gpu.where(u.device)
    parts = getattr(module, f"agop_parts_{kind}")(count, m, r, c, where[0])
    out = u.new_empty(parts, *u.shape[:-2], r, r, dtype=torch.float64)
    getattr(module, f"agop_{kind}")(
        exponent, length, count, *own, m, n, r, c, u.data_ptr(), z.data_ptr(), coef.data_ptr(),
        address(weight), out.data_ptr(), *where,
    )  # fmt: skip
    return out[0] if parts == 1 else out.sum(0)


def _by_products(
    u: Tensor, z: Tensor, coef: Tensor, length: float, exponent: float, weight: Tensor | None
) -> Tensor:
    """One product of W with ``[coef_jk z_j, coef_jk]`` gives both terms.

    W's rows, and the classes, are taken in groups: a group's arrays take no more than its part of
    W, or 4 M elements, and beyond that the gradients never exist as a whole.
    """
    (m, r), (n, c) = u.shape, coef.shape
    total = u.new_zeros(r, r, dtype=torch.float64)
    # Relative to one point: a common offset would cancel badly in the difference of both terms.
    centre = z.mean(0)
    x0, z0 = u - centre, z - centre
    rows = max(_TILE, min(m, _ELEMENTS // n))
    group = min(_ELEMENTS, max(min(rows, m) * n, 1 << 22))
    step = max(1, min(c, group // (max(min(rows, m), n) * (r + 1))))
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
