"""Removes from each row its component along a second row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from normalign import _dispatch, _gpu, _load, _ops, reference
from normalign._checks import check_float, check_like, check_shape


def orthogonal_projection(g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Component of each ``g_i`` orthogonal to ``x_i``, and its squared norm.

    Computes ``r_i = g_i - (g_i . x_i / |x_i|^2) x_i`` and ``|r_i|^2`` in one pass over memory: the
    projector of the orthogonal GrokAlign penalty, ``||J (I - x x^T / |x|^2)||_F^2``
    (arXiv 2605.08464). Differentiable in both arguments, any number of times.

    Args:
        g: Rows to project, shape ``(n, d)``, any floating dtype. float32 and float64 run natively.
        x: Directions to remove, shape ``(n, d)``; dtype and device of ``g``. Where ``x_i = 0``
            nothing is removed.

    Returns:
        ``r``, shape ``(n, d)``, and ``|r|^2``, shape ``(n,)``; dtype of ``g``. Rows with NaN stay
        NaN.

    Raises:
        TypeError: a dtype is not floating, or the two differ.
        ValueError: the shapes or devices differ, or ``g`` is not a matrix.
    """
    check_float("g", g)
    check_float("x", x)
    check_shape("g", g, (None, None))
    check_shape("x", x, tuple(g.shape))
    check_like("x", x, "g", g)
    r, squared_norm = _op(g, x)
    return r, squared_norm


def _rows(t: Tensor) -> Tensor:
    """The tensor itself where columns are contiguous, at any row stride; else a copy."""
    return t if t.stride(1) == 1 or t.shape[1] <= 1 else t.contiguous()


def _impl(g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    gpu = _dispatch.gpu_module(g, x)
    if gpu is None and _dispatch.reference_reason(g, x) is not None:
        return reference.orthogonal_projection(g, x)
    g, x = _rows(g), _rows(x)
    n, d = g.shape
    r, squared_norm = g.new_empty(n, d), g.new_empty(n)
    module = _load._C if gpu is None else gpu
    f = module.orthogonal_projection_f32
    if g.dtype is torch.float64:
        f = module.orthogonal_projection_f64
    place = (_dispatch.threads(),) if gpu is None else _gpu.where(g.device)
    f(
        n, d, g.data_ptr(), g.stride(0), x.data_ptr(), x.stride(0),
        r.data_ptr(), d, squared_norm.data_ptr(), *place,
    )  # fmt: skip
    return r, squared_norm


def _fake(g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return g.new_empty(g.shape), g.new_empty(g.shape[:1])


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs)
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, grad_r: Tensor | None, grad_squared_norm: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    g, x = ctx.saved_tensors
    if grad_r is None and grad_squared_norm is None:
        return None, None
    if torch.is_grad_enabled():  # a graph of this pass is wanted: only differentiable steps
        return _composed_backward(g, x, grad_r, grad_squared_norm, ctx.needs_input_grad[1])
    grad_g, grad_x = _backward_op(g, x, grad_r, grad_squared_norm, ctx.needs_input_grad[1])
    return grad_g, grad_x if ctx.needs_input_grad[1] else None


def _composed_backward(
    g: Tensor, x: Tensor, grad_r: Tensor | None, grad_squared_norm: Tensor | None, needs_x: bool
) -> tuple[Tensor, Tensor | None]:
    # With h the cotangent of r: dg = P h, and |r|^2 adds 2 r to h. P is symmetric and P r = r.
    h = grad_r
    r = None
    if grad_squared_norm is not None or needs_x:
        r, _ = _op(g, x)
    if grad_squared_norm is not None:
        assert r is not None
        term = (2 * grad_squared_norm).unsqueeze(-1) * r
        h = term if h is None else h + term
    assert h is not None
    grad_g = _op(h, x)[0] if grad_r is not None else h
    if not needs_x:
        return grad_g, None
    # r = g - s x with s = g.x / |x|^2, so dx = -s h - (h.x / |x|^2) (g - 2 s x).
    xx = (x * x).sum(-1, keepdim=True)
    safe = torch.where(xx == 0, torch.ones_like(xx), xx)
    zero = torch.zeros_like(xx)
    s = torch.where(xx == 0, zero, (g * x).sum(-1, keepdim=True) / safe)
    hx = torch.where(xx == 0, zero, (h * x).sum(-1, keepdim=True) / safe)
    return grad_g, -s * h - hx * (g - 2 * s * x)


def _backward_impl(
    g: Tensor,
    x: Tensor,
    grad_r: Tensor | None,
    grad_squared_norm: Tensor | None,
    needs_x: bool,
) -> tuple[Tensor, Tensor]:
    """One pass over memory on a GPU; elsewhere the composed steps. ``grad_x`` may be empty."""
    gpu = _dispatch.gpu_module(g, x)
    if gpu is None:
        grad_g, grad_x = _composed_backward(g, x, grad_r, grad_squared_norm, needs_x)
        return grad_g, g.new_empty(0, 0) if grad_x is None else grad_x
    g, x = _rows(g), _rows(x)
    n, d = g.shape
    grad_g = g.new_empty(n, d)
    to_x = g.new_empty((n, d) if needs_x else (0, 0))
    # Held by name until the launch: an address alone keeps no memory.
    h = None if grad_r is None else _rows(grad_r)
    q = grad_squared_norm
    f = gpu.orthogonal_projection_backward_f32
    if g.dtype is torch.float64:
        f = gpu.orthogonal_projection_backward_f64
    f(
        n, d, g.data_ptr(), g.stride(0), x.data_ptr(), x.stride(0),
        *((0, 0) if h is None else (h.data_ptr(), h.stride(0))),
        *((0, 0) if q is None else (q.data_ptr(), q.stride(0))),
        grad_g.data_ptr(), to_x.data_ptr() if needs_x else 0, *_gpu.where(g.device),
    )  # fmt: skip
    return grad_g, to_x


def _backward_fake(
    g: Tensor,
    x: Tensor,
    grad_r: Tensor | None,
    grad_squared_norm: Tensor | None,
    needs_x: bool,
) -> tuple[Tensor, Tensor]:
    return g.new_empty(g.shape), g.new_empty(g.shape if needs_x else (0, 0))


_backward_op = _ops.register(
    "orthogonal_projection_backward",
    "(Tensor g, Tensor x, Tensor? grad_r, Tensor? grad_squared_norm, bool needs_x)"
    " -> (Tensor, Tensor)",
    _backward_impl,
    _backward_fake,
)
_op = _ops.register(
    "orthogonal_projection",
    "(Tensor g, Tensor x) -> (Tensor, Tensor)",
    _impl,
    _fake,
    _backward,
    _setup_context,
)
