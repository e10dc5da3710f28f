"""The path for any differentiable model: one forward, then double backward.

Forward-mode forms were measured slower on every model tried. The projection is one fused
operator, and the forward pass is shared with the task.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from normalign import _diagnose, reference
from normalign._attention import keep_in_backward, twice_differentiable
from normalign._inputs import autocast_is_on
from normalign._probes import HALF
from normalign.orthogonal_projection import orthogonal_projection

Terms = Callable[[Any, Tensor, Tensor, Tensor, str, bool], Tensor]

Projection = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def run(
    model: Any,
    call: Callable[[Tensor], Tensor],
    x: Tensor,
    make_probes: Callable[[Tensor], Tensor],
    penalty: str,
    reduction: str,
    terms: Terms,
) -> tuple[Tensor, Tensor]:
    """Logits as the model gives them, and the penalty; detached where gradients are off.

    Args:
        model: The key under which graph checks are remembered.
        call: Maps ``x`` to the logits ``(B, ...)``.
        x: Inputs; a copy enters the model, so that in-place layers cannot change the caller's.
        make_probes: Probes ``(P, B, c)`` for flat logits ``(B, c)``.
        penalty: Which one.
        reduction: ``"mean"`` or ``"none"``.
        terms: ``penalty_terms`` or ``reference_terms``.
    """
    training = torch.is_grad_enabled()
    with twice_differentiable():
        if x.is_inference():
            x = x.clone()
        leaf = x if x.requires_grad else x.detach().requires_grad_()
        logits = call(leaf.clone())
        _diagnose.check_logits(logits, x)
        flat = logits.reshape(logits.shape[0], -1)
        with without_autocast(x.device.type):
            probes = make_probes(flat).to(flat.dtype)
            values = terms(model, flat, leaf, probes, penalty, training)
            value = values.mean() if reduction == "mean" else values
    if not training:
        return logits.detach(), value.detach()
    keep_in_backward(logits, value)
    return logits, value


@contextlib.contextmanager
def without_autocast(device_type: str) -> Iterator[None]:
    """Backward formulas follow the dtypes of the forward; autocast must not touch them."""
    if autocast_is_on(device_type):
        with torch.autocast(device_type, enabled=False):
            yield
    else:
        yield


def penalty_terms(
    model: Any, flat: Tensor, leaf: Tensor, probes: Tensor, penalty: str, training: bool
) -> Tensor:
    """The penalty of each sample, ``(B,)``, of logits ``flat`` (B, c) computed from ``leaf``."""
    joint = penalty == "joint"
    products, offset = jacobian_products(model, flat, leaf, probes, joint, training)
    return combine(products, full_precision(leaf_direction(leaf, training)), penalty, offset)


def reference_terms(
    model: Any, flat: Tensor, leaf: Tensor, probes: Tensor, penalty: str, training: bool
) -> Tensor:
    """As ``penalty_terms``, by the definition."""
    return reference.penalty_terms(flat, leaf, probes, penalty)


def leaf_direction(leaf: Tensor, training: bool) -> Tensor:
    """``x`` as rows ``(B, d)``; a part of the graph only where the caller's x was."""
    outside = leaf.grad_fn is not None or not training
    return (leaf if outside else leaf.detach()).flatten(1)


def jacobian_products(
    model: Any, flat: Tensor, leaf: Tensor, probes: Tensor, joint: bool, training: bool
) -> tuple[list[Tensor], Tensor | None]:
    """``J^T v`` of each probe as rows ``(B, d)``; for the joint penalty ``f(x) - J x`` too."""
    if joint:  # J x is the derivative in v of x . (J^T v)
        probes = probes.detach().requires_grad_()
    products = []
    offset = None
    for index, v in enumerate(probes.unbind()):
        g = _diagnose.gradient(flat, leaf, v, training or joint)
        if index == 0 and training:
            _diagnose.check_graph(model, g, leaf)
        if index == 0 and joint:
            x = leaf_direction(leaf, training).reshape(leaf.shape).to(g.dtype)
            (jx,) = torch.autograd.grad(g, v, x, create_graph=training, retain_graph=True)
            offset = full_precision(flat) - full_precision(jx)
        products.append(full_precision(g.flatten(1)))
    return products, offset


def combine(
    products: list[Tensor],
    x: Tensor,
    penalty: str,
    offset: Tensor | None,
    project: Projection = orthogonal_projection,
) -> Tensor:
    """The penalty of each sample from ``J^T v`` of each probe, rows ``(B, d)``."""
    count = len(products)
    if penalty == "joint":
        assert offset is not None
        return safe_norm(products) + offset.square().sum(1)
    if penalty == "jacobian":
        norms = [g.square().sum(1) for g in products]
    else:
        norms = [project(g, x.to(g.dtype))[1] for g in products]
    total = norms[0]
    for norm in norms[1:]:
        total = total + norm
    return total / count if count > 1 else total


def safe_norm(products: list[Tensor]) -> Tensor:
    """``sqrt(mean_p |g_p|^2)`` of each sample; 0 with gradient 0 where all g are 0.

    Rows are scaled by their largest entry first, so that squares of tiny ones do not underflow.
    """
    g = torch.cat(products, 1)  # (B, P d)
    scale = g.detach().abs().amax(1, keepdim=True)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    q = (g / scale).square().sum(1) / len(products)
    return scale.squeeze(1) * reference.root(q)


def full_precision(t: Tensor) -> Tensor:
    """float32 for the half-precision dtypes: reductions over many terms need it."""
    return t.float() if t.dtype in HALF else t
