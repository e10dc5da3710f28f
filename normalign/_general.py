"""The path for any differentiable model: one forward, then double backward.

Measured against forward-mode forms it is the faster one everywhere; the projection is one fused
operator, and the forward pass is shared with the task.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from normalign import _diagnose, reference
from normalign.orthogonal_projection import orthogonal_projection

Call = Callable[[Tensor], Tensor]


@contextlib.contextmanager
def twice_differentiable() -> Iterator[None]:
    """Gradients on, and attention in the one form that has a second derivative; then as before."""
    with contextlib.ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        yield


def full_precision(t: Tensor) -> Tensor:
    """float32 for the half-precision dtypes: reductions over many terms need it."""
    return t.float() if t.dtype in (torch.bfloat16, torch.float16) else t


def safe_norm(g: Tensor, probes: int) -> Tensor:
    """``sqrt(mean_p |g_p|^2)`` of rows ``g`` (P, B, d); 0 with gradient 0 where g is 0.

    Rows are scaled by their largest entry first, so that squares of tiny ones do not underflow.
    """
    with torch.no_grad():
        scale = g.abs().amax((0, 2))  # (B,)
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    q = (g / scale[:, None]).square().sum((0, 2)) / probes
    return scale * reference.root(q)


def penalty_terms(products: list[Tensor], x: Tensor, penalty: str, offset: Tensor | None) -> Tensor:
    """The penalty of each sample, ``(B,)``, from the products ``J^T v`` of each probe."""
    count = len(products)
    rows = [full_precision(g.flatten(1)) for g in products]
    if penalty == "joint":
        assert offset is not None
        return safe_norm(torch.stack(rows), count) + full_precision(offset).square().sum(1)
    if penalty == "jacobian":
        norms = [g.square().sum(1) for g in rows]
    else:
        direction = full_precision(x.flatten(1))
        norms = [orthogonal_projection(g, direction.to(g.dtype))[1] for g in rows]
    total = norms[0]
    for norm in norms[1:]:
        total = total + norm
    return total / count if count > 1 else total


def run(
    model: object,
    call: Call,
    x: Tensor,
    make_probes: Callable[[Tensor], Tensor],
    penalty: str,
    reduction: str,
) -> tuple[Tensor, Tensor]:
    """Logits as the model gives them, and the penalty, attached to the graph when gradients are on.

    Args:
        model: The key under which graph checks are remembered.
        call: Maps ``x`` to the logits ``(B, ...)``.
        x: Inputs; a copy enters the model, so that in-place layers cannot change the caller's.
        make_probes: Probes ``(P, B, c)`` for flat logits ``(B, c)``.
        penalty: Which one.
        reduction: ``"mean"`` or ``"none"``.
    """
    training = torch.is_grad_enabled()
    with twice_differentiable():
        if x.is_inference():
            x = x.clone()
        leaf = x if x.requires_grad else x.detach().requires_grad_()
        logits = call(leaf.clone())
        _diagnose.check_logits(logits, x)
        flat = logits.reshape(logits.shape[0], -1)
        with _without_autocast(x.device.type):
            probes = make_probes(flat).to(flat.dtype)
            products, jx = _products(model, flat, leaf, probes, penalty, training)
            offset = None if jx is None else full_precision(flat) - jx
            direction = leaf if x.requires_grad else leaf.detach()
            terms = penalty_terms(products, direction, penalty, offset)
            value = terms.mean() if reduction == "mean" else terms
    return (logits, value) if training else (logits.detach(), value.detach())


@contextlib.contextmanager
def _without_autocast(device_type: str) -> Iterator[None]:
    """Backward formulas follow the dtypes of the forward; autocast must not touch them."""
    if torch.is_autocast_enabled(device_type):
        with torch.autocast(device_type, enabled=False):
            yield
    else:
        yield


def _products(
    model: object, flat: Tensor, leaf: Tensor, probes: Tensor, penalty: str, training: bool
) -> tuple[list[Tensor], Tensor | None]:
    """``J^T v`` for every probe, and ``J x`` for the joint penalty."""
    joint = penalty == "joint"
    products = []
    jx = None
    for index, v in enumerate(probes):
        first = joint and index == 0
        if first:  # J x is the derivative in v of x . (J^T v)
            v = v.detach().requires_grad_()
        g = _diagnose.gradient(flat, leaf, v, training or first)
        if index == 0 and training:
            _diagnose.check_graph(model, g, leaf)
        products.append(g)
        if first:
            direction = leaf if training and leaf.grad_fn is not None else leaf.detach()
            (jx,) = torch.autograd.grad(
                g, v, direction.to(g.dtype), create_graph=training, retain_graph=True
            )
            jx = full_precision(jx)
    return products, jx
