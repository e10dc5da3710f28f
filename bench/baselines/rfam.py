"""The algorithm of RFAM's authors, in our own words, as a peer for ``bench_rfam.py``.

float32 without centring, distances under M by the product form, an LU solve, an AGOP that builds
the (m, c, d) array of gradients (all points here; the authors draw up to 20,000 with replacement),
attacks by autograd. Loops over small batches are left out: this is the best form of that algorithm.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

REGS = (10.0, 1.0, 0.1, 0.01, 0.001)
EPSILONS = (0.1, 1.0, 2.0)


def distances(x: Tensor, z: Tensor, m: Tensor) -> Tensor:
    """``||x_i - z_j||_M`` by ``|x|^2 - 2 x.z + |z|^2``."""
    xm, zm = x @ m, z @ m
    squared = (xm * x).sum(1, keepdim=True) + (zm * z).sum(1) - 2 * xm @ z.T
    return squared.clamp_(min=0).sqrt_()


def gram(x: Tensor, z: Tensor, m: Tensor, bandwidth: float) -> Tensor:
    """The Laplace kernel matrix."""
    return distances(x, z, m).div_(-bandwidth).exp_()


def solve(k: Tensor, y: Tensor, reg: float) -> Tensor:
    """``(K + reg I)^-1 y`` by LU."""
    return torch.linalg.solve(k + reg * torch.eye(len(k), dtype=k.dtype, device=k.device), y)


def agop(x: Tensor, z: Tensor, a: Tensor, m: Tensor, bandwidth: float) -> Tensor:
    """Mean outer product of the gradients at ``x`` of ``K(., z) a``."""
    d = distances(z, x, m)  # (n, m)
    w = torch.exp(-d / bandwidth) / d
    w[d < 1e-10] = 0
    values = a.unsqueeze(2) * (z @ m).unsqueeze(1)  # (n, c, d)
    moment = (w.T @ values.flatten(1)).view(len(x), *values.shape[1:])
    own = (w.T @ a).unsqueeze(2) * (x @ m).unsqueeze(1)
    g = (moment - own) / bandwidth  # (m, c, d)
    g = g.flatten(0, 1)
    return g.T @ g / len(x)


def to_trace(m: Tensor) -> Tensor:
    """``m`` scaled so that its trace is d."""
    trace = m.trace()
    return m * (len(m) / trace) if trace > 1e-10 else m


def start(x: Tensor, alpha: float) -> Tensor:
    """The first M."""
    return to_trace((1 - alpha) * torch.cov(x.T) + alpha * torch.eye(x.shape[1], device=x.device))


@dataclasses.dataclass
class Search:
    """The best validation accuracy, and what reached it."""

    accuracy: float
    reg: float
    iteration: int
    m: Tensor


def fit(
    x: Tensor, y: Tensor, reg: float, *, alpha: float = 0.0, bandwidth: float = 10.0,
    iterations: int = 5, validation: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Search]:  # fmt: skip
    """M and coefficients of the last solve, and the best iteration on validation points."""
    m = start(x, alpha)
    best = Search(-1.0, reg, 0, m)
    for i in range(iterations):
        a = solve(gram(x, x, m, bandwidth), y, reg)
        if validation is not None:
            f = gram(validation[0], x, m, bandwidth) @ a
            accuracy = (f.argmax(1) == validation[1]).float().mean().item()
            if accuracy > best.accuracy:
                best = Search(accuracy, reg, i, m)
        used, m = m, to_trace(agop(x, x, a, m, bandwidth))
    return used, a, best


def pgd(
    x: Tensor, labels: Tensor, z: Tensor, a: Tensor, m: Tensor, bandwidth: float, eps: float,
    steps: int = 20, first: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """L-infinity ascent of the squared error to the one-hot label, by autograd."""
    target = F.one_hot(labels, a.shape[1]).to(x.dtype)
    current = x + torch.empty_like(x).uniform_(-eps, eps) if first is None else first
    for _ in range(steps):
        current = current.detach().requires_grad_()
        cm, zm = current @ m, z @ m
        squared = (cm * current).sum(1, keepdim=True) + (zm * z).sum(1) - 2 * cm @ z.T
        f = torch.exp(-squared.clamp(min=1e-12).sqrt() / bandwidth) @ a
        (g,) = torch.autograd.grad(F.mse_loss(f, target), current)
        move = current.detach() + eps / 10 * g.sign() - x
        current = x + move.clamp(-eps, eps)
    return current


def protocol(
    x: Tensor, labels: Tensor, classes: int, split: tuple[Tensor, Tensor],
    folds: Sequence[tuple[Tensor, Tensor]], alpha: float = 0.0, bandwidth: float = 10.0,
) -> tuple[Search, list[list[float]]]:  # fmt: skip
    """The published protocol: search over reg, then accuracy and robust accuracy on each fold."""
    y = F.one_hot(labels, classes).to(x.dtype)
    train, val = split
    best = Search(-1.0, 0.0, 0, x)
    for reg in REGS:
        validation = (x[val], labels[val])
        found = fit(x[train], y[train], reg, alpha=alpha, validation=validation)[2]
        best = found if found.accuracy > best.accuracy else best
    results = []
    for a, b in folds:
        coef = solve(gram(x[a], x[a], best.m, bandwidth), y[a], best.reg)
        predict = lambda q, z=x[a], coef=coef: gram(q, z, best.m, bandwidth) @ coef  # noqa: E731
        row = [(predict(x[b]).argmax(1) == labels[b]).float().mean().item()]
        for eps in EPSILONS:
            moved = pgd(x[b], labels[b], x[a], coef, best.m, bandwidth, eps)
            row.append((predict(moved).argmax(1) == labels[b]).float().mean().item())
        results.append(row)
    return best, results
