"""Kernel matrices under a Mahalanobis distance, and their products."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from normalign import _dispatch, _ops, _rfam_kernels, reference
from normalign._feature_space import (
    check_coef,
    check_points,
    factor_of,
    into_factor_space,
    runs_natively,
)
from normalign._rfam_kernels import Kernel, make_kernel


def laplace_gram(
    x: Tensor,
    z: Tensor,
    feature_matrix: Tensor | None,
    bandwidth: float,
    *,
    kernel: str | float = "laplace",
    precision: str | None = None,
) -> Tensor:
    """Kernel matrix ``exp(-||x_i - z_j||_M / bandwidth)`` under a Mahalanobis distance.

    The Laplace kernel of RFAM (arXiv 2605.08464), ``||v||_M^2 = v^T M v``. Distances come from
    differences of centred points: they are 0 for equal rows, so ``K(x, x)`` has an exact unit
    diagonal, and a common offset of ``x`` and ``z`` changes nothing. Differentiable in ``x``,
    ``z`` and ``feature_matrix``; where a distance is 0 the gradient is 0 by convention.

    ``precision`` permits a GPU to take float32 points of more than 32 coordinates to tensor cores:
    centred coordinates u are rounded to tf32 or bf16, by a relative eps = 2^-11 or 2^-8 at most,
    and their products summed in float32. Pairs with ``D^2 < near (|u|^2 + |v|^2)``, near = 1/16 or
    1/4, still come from float32 differences: equal rows have K = 1, and near ones lose nothing.
    Other entries of ``exp(-(D / L)^q)`` are off by ``(q / e) eps sqrt(2 / near)`` at most, 1.0e-3 q
    in tf32 and 4.1e-3 q in bf16, for q >= 1 also by ``eps (|u| + |v|) / L`` at most, and by the
    sums' own ``q (1.5 width + 18 + width / 64) 2^-23 / (2 e near)``. It is a permission: CPUs,
    float64, fewer coordinates, and points or lengths for which float64 makes K, are as exact
    as without it. Gradients never use it.

    Args:
        x: Points, shape ``(m, d)``, any floating dtype; float32 and float64 run natively.
        z: Points, shape ``(n, d)``; dtype and device of ``x``.
        feature_matrix: ``M``, shape ``(d, d)``, symmetric positive semi-definite (its symmetric
            part is used); None for the identity.
        bandwidth: Positive length, in the units of ``x``.
        kernel: ``"laplace"``; ``"gaussian"`` for ``exp(-D^2 / (2 bandwidth^2))``; or an exponent q
            in (0, 2] for ``exp(-(D / bandwidth)^q)``.
        precision: None for float32 arithmetic; ``"tf32"`` or ``"bf16"`` where that will do.

    Returns:
        Shape ``(m, n)``, dtype of ``x``; values in [0, 1]. Rows with NaN stay NaN.

    Raises:
        ValueError: shapes or devices disagree, ``bandwidth <= 0``, ``M`` is indefinite, or
            ``precision`` is none of these.
        TypeError: a dtype is not floating, or differs between inputs.
    """
    check_points(x, z, feature_matrix)
    _check_precision(precision)
    shape = make_kernel(kernel, bandwidth)
    result: Tensor = _gram_op(x, z, feature_matrix, shape.length, shape.exponent, precision)
    return result


def laplace_matvec(
    x: Tensor,
    z: Tensor,
    feature_matrix: Tensor | None,
    bandwidth: float,
    coef: Tensor,
    *,
    kernel: str | float = "laplace",
) -> Tensor:
    """``K(x, z) coef`` without storing ``K``.

    ``K`` is that of ``laplace_gram``, always by differences; tiles of it are made and used at once.
    Differentiable in all four tensors (the backward takes blocks of rows of ``K``).

    Args:
        x: Points, shape ``(m, d)``.
        z: Points, shape ``(n, d)``; dtype and device of ``x``.
        feature_matrix: ``M``, shape ``(d, d)``; None for the identity.
        bandwidth: Positive length.
        coef: Shape ``(n, c)``; dtype and device of ``x``.
        kernel: As in ``laplace_gram``.

    Returns:
        Shape ``(m, c)``, dtype of ``x``.

    Raises:
        ValueError: shapes or devices disagree, ``bandwidth <= 0``, or ``M`` is indefinite.
        TypeError: a dtype is not floating, or differs between inputs.
    """
    check_points(x, z, feature_matrix)
    check_coef(coef, x, z)
    shape = make_kernel(kernel, bandwidth)
    result: Tensor = _matvec_op(x, z, feature_matrix, coef, shape.length, shape.exponent)
    return result


def _check_precision(precision: str | None) -> None:
    known = isinstance(precision, str) and precision in ("tf32", "bf16")
    if precision is not None and not known:
        msg = f"precision must be None, 'tf32' or 'bf16', got {precision!r}"
        raise ValueError(msg)


def _impl_gram(
    x: Tensor,
    z: Tensor,
    m: Tensor | None,
    length: float,
    exponent: float,
    precision: str | None = None,
) -> Tensor:
    _check_precision(precision)
    if not runs_natively(x, z, cuda_kernel=True):
        return reference.laplace_gram(x, z, m, length, exponent)
    points = into_factor_space(x, z, factor_of(m, x.shape[1], x.device), Kernel(exponent, length))
    return _rfam_kernels.gram(*points, _dispatch.threads(), precision=precision).to(x.dtype)


def _impl_matvec(
    x: Tensor, z: Tensor, m: Tensor | None, coef: Tensor, length: float, exponent: float
) -> Tensor:
    if not runs_natively(x, z, coef, cuda_kernel=True):
        return reference.laplace_matvec(x, z, coef, m, length, exponent)
    u, v = into_factor_space(x, z, factor_of(m, x.shape[1], x.device), Kernel(exponent, length))
    return _rfam_kernels.matvec(u, v, coef.to(u.u.dtype), _dispatch.threads()).to(x.dtype)


def _weights(x: Tensor, z: Tensor, m: Tensor | None, length: float, exponent: float) -> Tensor:
    """``-K'(D) / D``; the reference where a second derivative is wanted, or while tracing."""
    plain = x.device.type == "cpu" and _dispatch.unavailable_reason(x, z) is None
    if torch.is_grad_enabled() or not plain or _dispatch.implementation() == "reference":
        return reference.gradient_weights(x, z, m, length, exponent)
    points = into_factor_space(x, z, factor_of(m, x.shape[1], x.device), Kernel(exponent, length))
    return _rfam_kernels.gram(*points, _dispatch.threads(), weights=True).to(x.dtype)


def _pair_gradients(
    s: Tensor, x: Tensor, z: Tensor, m: Tensor | None, want_m: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of ``sum_ij s_ij D_ij^2 / -2`` with s held: in x, in z, and in M."""
    # Relative to one point, since sums over pairs cancel what is common to x and z.
    centre = z.detach().mean(0) if z.shape[0] else 0.0
    x, z = x - centre, z - centre
    to_x = s @ z - s.sum(1, keepdim=True) * x
    to_z = s.T @ x - s.sum(0).unsqueeze(1) * z
    # sum s (x - z)(x - z)^T, from the two sums above
    to_m = (to_x.T @ x + to_z.T @ z) / 2 if want_m else None
    if m is not None:
        half = (m + m.T) / 2
        to_x, to_z = to_x @ half, to_z @ half
    return to_x, to_z, to_m


def _setup_gram(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, z, m, ctx.length, ctx.exponent, _ = inputs  # gradients never use the precision
    ctx.save_for_backward(x, z, m)


def _backward_gram(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, z, m = ctx.saved_tensors
    s = grad * _weights(x, z, m, ctx.length, ctx.exponent)
    to_x, to_z, to_m = _pair_gradients(s, x, z, m, ctx.needs_input_grad[2])
    return to_x, to_z, to_m, None, None, None


def _setup_matvec(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, z, m, coef, ctx.length, ctx.exponent = inputs
    ctx.save_for_backward(x, z, m, coef)


def _backward_matvec(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, z, m, coef = ctx.saved_tensors
    to_coef = _matvec_op(z, x, m, grad, ctx.length, ctx.exponent)
    want_x, want_z, want_m = ctx.needs_input_grad[:3]
    if not (want_x or want_z or want_m):
        return None, None, None, to_coef, None, None
    rows = max(1, (1 << 22) // max(1, z.shape[0]))
    parts_x = []
    to_z, to_m = torch.zeros_like(z), None if m is None else torch.zeros_like(m)
    for xs, gs in zip(x.split(rows), grad.split(rows), strict=True):
        s = (gs @ coef.T) * _weights(xs, z, m, ctx.length, ctx.exponent)
        part_x, part_z, part_m = _pair_gradients(s, xs, z, m, want_m)
        parts_x.append(part_x)
        to_z = to_z + part_z
        to_m = None if to_m is None or part_m is None else to_m + part_m
    to_x = torch.cat(parts_x) if parts_x else torch.zeros_like(x)
    return to_x, to_z, to_m if want_m else None, to_coef, None, None


_gram_op = _ops.register(
    "laplace_gram",
    "(Tensor x, Tensor z, Tensor? feature_matrix, float length, float exponent,"
    " str? precision=None) -> Tensor",
    _impl_gram,
    lambda x, z, m, length, exponent, precision=None: x.new_empty(x.shape[0], z.shape[0]),
    _backward_gram,
    _setup_gram,
)
_matvec_op = _ops.register(
    "laplace_matvec",
    "(Tensor x, Tensor z, Tensor? feature_matrix, Tensor coef, float length, float exponent)"
    " -> Tensor",
    _impl_matvec,
    lambda x, z, m, coef, length, exponent: x.new_empty(x.shape[0], coef.shape[1]),
    _backward_matvec,
    _setup_matvec,
)
