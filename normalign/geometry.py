"""Measures of normal alignment, for any model and batch.

All are taken in evaluation mode (no BatchNorm update, no dropout; the model's modes are restored),
so that each sample has a Jacobian of its own. Samples go through in blocks, which bounds memory.
Where a measure has no value (J = 0, x = 0) the result is 0, not NaN; NaN in a Jacobian stays NaN.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from normalign import _diagnose, _inputs
from normalign._attention import twice_differentiable
from normalign._checks import check_count, check_shape
from normalign._general import full_precision, without_autocast
from normalign._jacobian_measures import jacobian_measures, unit_rows
from normalign.grokalign import Output

BLOCK_BYTES = 64 << 20  # of Jacobian held at once


def normal_alignment(
    model: nn.Module | Callable[..., Any],
    x: Tensor,
    *,
    forward: Callable[[Any, Tensor], Any] | None = None,
    output: Output = None,
    block: int | None = None,
) -> Tensor:
    """``|cos(v_1, x)|`` of each sample, with v_1 the top right singular vector of J = df/dx.

    1 for a normal-aligned classifier (arXiv 2605.08464): its Jacobian has rank one and points
    along x. Where the largest singular value is not simple, v_1 is one of many.

    Args:
        model: Module or callable that maps x to logits.
        x: Inputs, shape ``(B, ...)``, floating point.
        forward: Called as ``forward(model, x)`` instead of ``model(x)``.
        output: Key or callable that chooses the logits.
        block: Samples per block; by default as many as keep the Jacobian within 64 MB.

    Returns:
        Shape ``(B,)``, values in [0, 1]; 0 where J = 0 or x = 0.

    Raises:
        TypeError: x is not floating point.
        ValueError: x is empty, or the logits do not depend on it.
    """
    results = []
    for rows, _, jacobian in _blocks(model, x, forward, output, block):
        alignments, _ = jacobian_measures(jacobian, rows)
        results.append(_where_zero(jacobian, alignments))
    return _join(results, x)


def centroid(
    model: nn.Module | Callable[..., Any],
    x: Tensor,
    *,
    forward: Callable[[Any, Tensor], Any] | None = None,
    output: Output = None,
) -> Tensor:
    """``J^T 1`` of each sample: the centroid of its region in a piecewise-affine network.

    The centroid of the power-diagram cell of arXiv 2605.08464, from one vector-Jacobian product.

    Args:
        model: Module or callable that maps x to logits.
        x: Inputs, shape ``(B, ...)``, floating point.
        forward: Called as ``forward(model, x)`` instead of ``model(x)``.
        output: Key or callable that chooses the logits.

    Returns:
        The shape and dtype of ``x``.
    """
    _inputs.check_x(x)
    with _measuring(model, x):
        leaf, flat = _logits(model, x, forward, output)
        return _diagnose.gradient(flat, leaf, torch.ones_like(flat), False)


def centroid_alignment(
    model: nn.Module | Callable[..., Any],
    x: Tensor,
    *,
    forward: Callable[[Any, Tensor], Any] | None = None,
    output: Output = None,
) -> Tensor:
    """``cos(J^T 1, x)`` of each sample: the tractable sign of normal alignment.

    Args:
        model: Module or callable that maps x to logits.
        x: Inputs, shape ``(B, ...)``, floating point.
        forward: Called as ``forward(model, x)`` instead of ``model(x)``.
        output: Key or callable that chooses the logits.

    Returns:
        Shape ``(B,)``, values in [-1, 1]; 0 where J^T 1 = 0 or x = 0.
    """
    centroids = centroid(model, x, forward=forward, output=output)
    cosines = (unit_rows(_wide(centroids)) * unit_rows(_wide(x.detach()))).sum(1)
    return _join([cosines.clamp(-1, 1)], x)


def effective_rank(
    model: nn.Module | Callable[..., Any],
    x: Tensor,
    *,
    normalised: bool = False,
    forward: Callable[[Any, Tensor], Any] | None = None,
    output: Output = None,
    block: int | None = None,
) -> Tensor:
    """``(sum s)^2 / sum s^2`` of the singular values s of each sample's Jacobian.

    Args:
        model: Module or callable that maps x to logits.
        x: Inputs, shape ``(B, ...)``, floating point.
        normalised: Divides by the largest value possible, ``min(c, d)``.
        forward: Called as ``forward(model, x)`` instead of ``model(x)``.
        output: Key or callable that chooses the logits.
        block: Samples per block; by default as many as keep the Jacobian within 64 MB.

    Returns:
        Shape ``(B,)``, values in [1, min(c, d)], or 0 where J = 0.
    """
    results = []
    for rows, _, jacobian in _blocks(model, x, forward, output, block):
        _, ranks = jacobian_measures(jacobian, rows)
        ranks = ranks / min(jacobian.shape[1:]) if normalised else ranks
        results.append(_where_zero(jacobian, ranks))
    return _join(results, x)


def local_robustness(
    model: nn.Module | Callable[..., Any],
    x: Tensor,
    y: Tensor | None = None,
    *,
    forward: Callable[[Any, Tensor], Any] | None = None,
    output: Output = None,
    block: int | None = None,
) -> Tensor:
    """``min_k (f_y - f_k) / |J_y - J_k|``: how far x is from the nearest decision boundary.

    The quantity of Theorem 2 of arXiv 2605.08464: exact for an affine model, and for a
    piecewise-affine one within its region. With one output it is ``|f| / |J|``, the distance to
    f = 0.

    Args:
        model: Module or callable that maps x to logits ``(B, c)``.
        x: Inputs, shape ``(B, ...)``, floating point.
        y: Class of each sample, shape ``(B,)``; by default the predicted one. Where the model
            predicts another class the result is negative.
        forward: Called as ``forward(model, x)`` instead of ``model(x)``.
        output: Key or callable that chooses the logits.
        block: Samples per block; by default as many as keep the Jacobian within 64 MB.

    Returns:
        Shape ``(B,)``; infinite (with the sign of the margin) where no change of x moves the
        margin, and 0 where the margin is 0.

    Raises:
        ValueError: the shape of y is not (B,), or y is out of range.
    """
    results = []
    start = 0
    _inputs.check_x(x)
    if y is not None:
        check_shape("y", y, (x.shape[0],))
    for _, logits, jacobian in _blocks(model, x, forward, output, block):
        count, classes = logits.shape
        if classes == 1:
            margin, slope = logits.abs(), jacobian.norm(dim=2)
        else:
            own = logits.argmax(1) if y is None else y[start : start + count].to(logits.device)
            if own.min() < 0 or own.max() >= classes:
                found = f"{int(own.min())} to {int(own.max())}"
                msg = f"y must hold classes 0 to {classes - 1}, got {found}"
                raise ValueError(msg)
            index = own.long()[:, None]
            others = torch.ones_like(logits, dtype=torch.bool).scatter_(1, index, False)
            row = jacobian.gather(1, index[:, :, None].expand(-1, 1, jacobian.shape[2]))
            margin = (logits.gather(1, index) - logits)[others].reshape(count, -1)
            slope = (row - jacobian).norm(dim=2)[others].reshape(count, -1)
        ratio = torch.where(margin == 0, margin, margin / slope)
        results.append(ratio.amin(1))
        start += count
    return _join(results, x)


def _wide(t: Tensor) -> Tensor:
    """Rows in float64: these are measurements, taken once in a while."""
    return t.flatten(1).double()


def _where_zero(jacobian: Tensor, measured: Tensor) -> Tensor:
    """The measure, 0 where J = 0."""
    return measured.masked_fill((jacobian == 0).all(2).all(1), 0.0)


def _join(results: list[Tensor], x: Tensor) -> Tensor:
    return torch.cat(results).to(full_precision(x.detach()[:0]).dtype)


@contextlib.contextmanager
def _measuring(model: Any, x: Tensor) -> Iterator[None]:
    """Evaluation mode, without autocast, differentiable attention; each module's mode restored."""
    modules = [m for m in model.modules() if m.training] if isinstance(model, nn.Module) else []
    try:
        for module in modules:
            module.training = False
        with twice_differentiable(), without_autocast(x.device.type):
            yield
    finally:
        for module in modules:
            module.training = True


def _logits(
    model: Any, x: Tensor, forward: Callable[[Any, Tensor], Any] | None, output: Output
) -> tuple[Tensor, Tensor]:
    """A leaf with the values of x, and the flat logits computed from it."""
    leaf = x.detach().clone().requires_grad_()
    copy = leaf.clone()  # in-place layers may write to it
    result = model(copy) if forward is None else forward(model, copy)
    logits = _inputs.make_select(output)(result)
    _diagnose.check_logits(logits, x)
    return leaf, logits.reshape(logits.shape[0], -1)


def _blocks(
    model: Any,
    x: Tensor,
    forward: Callable[[Any, Tensor], Any] | None,
    output: Output,
    block: int | None,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Rows ``(b, d)``, logits ``(b, c)`` and Jacobian ``(b, c, d)``, in float64, per block."""
    _inputs.check_x(x)
    if block is not None:
        check_count("block", block)
    start = 0
    size = block or 1  # one sample tells how many outputs there are
    while start < x.shape[0]:
        part = x[start : start + size]
        with _measuring(model, x):
            leaf, flat = _logits(model, part, forward, output)
            rows = [
                _wide(_diagnose.gradient(flat, leaf, _one_hot(flat, k), False))
                for k in range(flat.shape[1])
            ]
        jacobian = torch.stack(rows, 1)
        yield _wide(part.detach()), flat.detach().double(), jacobian
        start += part.shape[0]
        if block is None:
            size = max(1, BLOCK_BYTES // max(1, jacobian[0].numel() * jacobian.element_size()))


def _one_hot(flat: Tensor, k: int) -> Tensor:
    v = torch.zeros_like(flat)
    v[:, k] = 1
    return v
