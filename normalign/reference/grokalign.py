"""Reference for ``grokalign``: the penalties of arXiv 2605.08464 by double backward."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from normalign.reference.orthogonal_projection import orthogonal_projection


def jacobian_products(logits: Tensor, x: Tensor, probes: Tensor) -> Tensor:
    """``J^T v`` of each sample and probe: logits ``(B, c)``, probes ``(P, B, c)`` -> (P, B, d)."""
    rows = []
    for v in probes:
        (g,) = torch.autograd.grad(logits, x, v.to(logits.dtype), create_graph=True)
        rows.append(g.flatten(1))
    return torch.stack(rows)


def jacobian_direction(logits: Tensor, x: Tensor) -> Tensor:
    """``J x`` of each sample, ``(B, c)``: the derivative in u of ``x . (J^T u)``."""
    u = torch.zeros_like(logits, requires_grad=True)
    (g,) = torch.autograd.grad(logits, x, u, create_graph=True)
    (jx,) = torch.autograd.grad(g, u, x, create_graph=True)
    return jx


def root(q: Tensor) -> Tensor:
    """Square root with value and gradient 0 at 0."""
    zero = q == 0
    return torch.where(zero, q, torch.where(zero, torch.ones_like(q), q).sqrt())


def penalty_terms(logits: Tensor, x: Tensor, probes: Tensor, penalty: str) -> Tensor:
    """The penalty of each sample, ``(B,)``; ``logits`` ``(B, c)`` must be a function of ``x``."""
    g = jacobian_products(logits, x, probes)  # (P, B, d)
    if penalty == "orthogonal":
        norms = [orthogonal_projection(rows, x.flatten(1))[1] for rows in g]
        return torch.stack(norms).mean(0)
    squares = (g * g).sum(-1).mean(0)  # (B,)
    if penalty == "jacobian":
        return squares
    offset = logits - jacobian_direction(logits, x)  # b = f(x) - J x
    return root(squares) + (offset * offset).sum(-1)


def grokalign(
    model: Callable[[Tensor], Tensor],
    x: Tensor,
    probes: Tensor | Callable[[Tensor], Tensor],
    penalty: str = "orthogonal",
    reduction: str = "mean",
) -> tuple[Tensor, Tensor]:
    """Logits and penalty of ``model`` at ``x``.

    Args:
        model: Maps ``x`` to logits ``(B, ...)``, by operations that differentiate twice.
        x: Inputs ``(B, ...)``, any floating dtype.
        probes: ``v``, shape ``(P, B, c)``, or a function that makes them from the logits.
        penalty: ``"orthogonal"``, the mean over v of ``|(I - x x^T / |x|^2) J^T v|^2``;
            ``"jacobian"``, of ``|J^T v|^2``; ``"joint"``, the root of that mean plus
            ``|f(x) - J x|^2``.
        reduction: ``"mean"`` over the batch, or ``"none"``.
    """
    leaf = x if x.requires_grad else x.detach().requires_grad_()
    logits = model(leaf.clone())
    flat = logits.reshape(logits.shape[0], -1)
    terms = penalty_terms(flat, leaf, probes(flat) if callable(probes) else probes, penalty)
    return logits, terms.mean() if reduction == "mean" else terms
