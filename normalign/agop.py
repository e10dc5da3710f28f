"""Gradients of kernel machines in their inputs, and the average of their outer products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from normalign import _dispatch, _ops, _rfam_agop, _rfam_kernels, reference
from normalign._checks import check_choice, check_float, check_like, check_shape
from normalign._feature_space import (
    check_coef,
    check_points,
    factor_of,
    into_factor_space,
    runs_natively,
)
from normalign._rfam_agop import AGOP_METHODS
from normalign._rfam_kernels import Kernel, make_kernel


def input_gradient(
    x: Tensor,
    z: Tensor,
    feature_matrix: Tensor | None,
    bandwidth: float,
    coef: Tensor,
    cotangent: Tensor,
    *,
    kernel: str | float = "laplace",
) -> Tensor:
    """Gradient of ``sum_k cotangent_ik f_k(x_i)`` in ``x_i``, where ``f = K(., z) coef``.

    ``-sum_j W_ij (cotangent_i . coef_j) M (x_i - z_j)`` with ``W = -K'(D) / D``, in one pass over
    tiles of W. A point of ``z`` at distance 0 contributes 0: there the kernel has no gradient.
    Differentiable in all five tensors; the backward is plain PyTorch, with arrays of m x n.

    Args:
        x: Where, shape ``(m, d)``.
        z: Points of the machine, shape ``(n, d)``; dtype and device of ``x``, as all others.
        feature_matrix: ``M``, shape ``(d, d)``; None for the identity.
        bandwidth: Positive length.
        coef: ``a``, shape ``(n, c)``.
        cotangent: Shape ``(m, c)``.
        kernel: As in ``laplace_gram``.

    Returns:
        Shape ``(m, d)``, dtype of ``x``.

    Raises:
        ValueError: shapes or devices disagree, ``bandwidth <= 0``, or ``M`` is indefinite.
        TypeError: a dtype is not floating, or differs between inputs.
    """
    check_points(x, z, feature_matrix)
    check_coef(coef, x, z)
    check_float("cotangent", cotangent)
    check_shape("cotangent", cotangent, (x.shape[0], coef.shape[1]))
    check_like("cotangent", cotangent, "x", x)
    shape = make_kernel(kernel, bandwidth)
    result: Tensor = _gradient_op(
        x, z, feature_matrix, coef, cotangent, shape.length, shape.exponent
    )
    return result


def agop(
    x: Tensor,
    z: Tensor,
    feature_matrix: Tensor | None,
    bandwidth: float,
    coef: Tensor,
    *,
    kernel: str | float = "laplace",
    method: str = "auto",
) -> Tensor:
    """Average gradient outer product ``mean_i sum_k g_ik g_ik^T`` of ``f = K(., z) coef``.

    ``g_ik`` is the gradient of ``f_k`` at ``x_i``; RFAM takes this matrix, scaled, as its next
    feature matrix (arXiv 2605.08464). All points count, none is sampled. Three exact forms, none of
    which stores an array of n x n x c:

    * ``"tiles"``: symmetric tiles of the weights, used as they are made (x must be z);
    * ``"streamed"``: the same row by row, for any x;
    * ``"gram"``: through the matrix product of the weights, n^3 whatever c and d are (x must be z);
    * ``"auto"``: the one that is predicted to be fastest.

    Differentiable in all four tensors; the backward is plain PyTorch, with arrays of m x n and of
    m x c x d.

    Args:
        x: Where the gradients are taken, shape ``(m, d)``; pass ``z`` itself for its own points.
        z: Points of the machine, shape ``(n, d)``; dtype and device of ``x``, as all others.
        feature_matrix: ``M``, shape ``(d, d)``; None for the identity.
        bandwidth: Positive length.
        coef: ``a``, shape ``(n, c)``.
        kernel: As in ``laplace_gram``.
        method: The form.

    Returns:
        Shape ``(d, d)``, dtype of ``x``.

    Raises:
        ValueError: shapes or devices disagree, ``bandwidth <= 0``, ``M`` is indefinite, or
            ``method`` does not fit.
        TypeError: a dtype is not floating, or differs between inputs.
    """
    check_points(x, z, feature_matrix)
    check_coef(coef, x, z)
    check_choice("method", method, AGOP_METHODS)
    if method in ("tiles", "gram") and x is not z:
        msg = f"method={method!r} needs gradients at the machine's own points: pass z as x"
        raise ValueError(msg)
    shape = make_kernel(kernel, bandwidth)
    result: Tensor = _agop_op(
        x, None if x is z else z, feature_matrix, coef, shape.length, shape.exponent, method
    )
    return result


def _impl_gradient(
    x: Tensor,
    z: Tensor,
    m: Tensor | None,
    coef: Tensor,
    cotangent: Tensor,
    length: float,
    exponent: float,
) -> Tensor:
    if not runs_natively(x, z, coef, cuda_kernel=True):
        return reference.input_gradient(x, z, coef, cotangent, m, length, exponent)
    factor = factor_of(m, x.shape[1], x.device)
    u, v = into_factor_space(x, z, factor, Kernel(exponent, length))
    dtype = u.u.dtype
    g = _rfam_kernels.gradient(u, v, coef.to(dtype), cotangent.to(dtype), _dispatch.threads())
    return (g @ factor.to(dtype).T).to(x.dtype)


def _impl_agop(
    x: Tensor,
    z: Tensor | None,
    m: Tensor | None,
    coef: Tensor,
    length: float,
    exponent: float,
    method: str,
) -> Tensor:
    z = x if z is None else z
    if not runs_natively(x, z, coef, cuda_kernel=True) or x.shape[0] == 0:
        return reference.agop(x, z, coef, m, length, exponent)
    factor = factor_of(m, x.shape[1], x.device)
    u, v = into_factor_space(x, z, factor, Kernel(exponent, length))
    r = _rfam_agop.agop(u, v, coef.to(u.u.dtype), _dispatch.threads(), None, method)
    return (factor @ (r / x.shape[0]) @ factor.T).to(x.dtype)


def _fake_agop(x: Tensor, *others: object) -> Tensor:
    return x.new_empty(x.shape[1], x.shape[1])


def _pull_back(
    ctx: Any, f: Callable[..., Tensor], tensors: Sequence[Tensor | None], grad: Tensor
) -> list[Tensor | None]:
    """Gradients of ``f(*tensors)``, computed anew, in those tensors that want one."""
    pairs = zip(tensors, ctx.needs_input_grad, strict=False)
    wanted = [t for t, want in pairs if want and t is not None]
    twice = torch.is_grad_enabled()
    with torch.enable_grad():
        found = iter(torch.autograd.grad(f(*tensors), wanted, grad, create_graph=twice))
    return [next(found) if want else None for want in ctx.needs_input_grad[: len(tensors)]]


def _setup_gradient(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.length, ctx.exponent = inputs
    ctx.save_for_backward(*tensors)


def _backward_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    def f(x: Tensor, z: Tensor, m: Tensor | None, coef: Tensor, cotangent: Tensor) -> Tensor:
        half = None if m is None else (m + m.T) / 2  # what the forward uses
        return reference.input_gradient(x, z, coef, cotangent, half, ctx.length, ctx.exponent)

    return (*_pull_back(ctx, f, ctx.saved_tensors, grad), None, None)


def _setup_agop(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.length, ctx.exponent, _ = inputs
    ctx.save_for_backward(*tensors)


def _backward_agop(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    def f(x: Tensor, z: Tensor | None, m: Tensor | None, coef: Tensor) -> Tensor:
        half = None if m is None else (m + m.T) / 2
        return reference.agop(x, x if z is None else z, coef, half, ctx.length, ctx.exponent)

    return (*_pull_back(ctx, f, ctx.saved_tensors, grad), None, None, None)


_gradient_op = _ops.register(
    "input_gradient",
    "(Tensor x, Tensor z, Tensor? feature_matrix, Tensor coef, Tensor cotangent, float length,"
    " float exponent) -> Tensor",
    _impl_gradient,
    lambda x, *others: torch.empty_like(x, memory_format=torch.contiguous_format),
    _backward_gradient,
    _setup_gradient,
)
_agop_op = _ops.register(
    "agop",
    "(Tensor x, Tensor? z, Tensor? feature_matrix, Tensor coef, float length, float exponent,"
    " str method) -> Tensor",
    _impl_agop,
    _fake_agop,
    _backward_agop,
    _setup_agop,
)
