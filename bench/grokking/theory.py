"""Small, seeded checks of Theorems 1 to 3 of arXiv 2605.08464.

Written with plain autograd, so that they also check the package's geometry from outside.
"""

from __future__ import annotations

import copy
import json
import pathlib
import statistics
from collections.abc import Callable, Iterable
from typing import Any

import torch
from baselines.problems import mlp
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.nn import functional as F

CLASSES = 3
Result = dict[str, Any]


def jacobians(model: nn.Module, x: Tensor) -> Tensor:
    """df/dx of each sample, ``(n, c, d)``."""
    return vmap(jacrev(model))(x)


def alignments(j: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Of each sample: |cos| of the top right singular vector with x, and cos of J^T 1 with x."""
    top = torch.linalg.svd(j, full_matrices=False).Vh[:, 0]
    normal = F.cosine_similarity(top, x).abs()
    return normal, F.cosine_similarity(j.sum(1), x)


def certified_radius(j: Tensor, logits: Tensor, y: Tensor) -> Tensor:
    """Distance to the nearest boundary of the affine piece; negative where misclassified."""
    gap = logits.gather(1, y[:, None]) - logits
    slope = (j[torch.arange(len(y)), y][:, None] - j).norm(dim=2)
    slope[torch.arange(len(y)), y] = torch.nan
    return (gap / slope).nan_to_num(torch.inf, torch.inf, torch.inf).amin(1)


def attacked_radius(model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    """Length of the shortest perturbation found: repeated linearisation, then bisection."""
    direction = torch.zeros_like(x)
    for _ in range(50):
        point = (x + direction).requires_grad_()
        logits = model(point)
        other = logits.detach().scatter(1, y[:, None], -torch.inf).argmax(1)
        margin = (logits.gather(1, y[:, None]) - logits.gather(1, other[:, None]))[:, 0]
        (g,) = torch.autograd.grad(margin.sum(), point)
        step = (margin.detach() + 1e-4) / g.square().sum(1).clamp(min=1e-12)
        direction = direction - torch.where(margin.detach() > 0, step, 0)[:, None] * g
    low, high = torch.zeros(len(x), 1), torch.ones(len(x), 1)
    with torch.no_grad():
        for _ in range(30):
            middle = (low + high) / 2
            safe = (model(x + middle * direction).argmax(1) == y)[:, None]
            low, high = torch.where(safe, middle, low), torch.where(safe, high, middle)
        fooled = model(x + direction).argmax(1) != y
    return torch.where(fooled, (high * direction).norm(dim=1), torch.inf)


def _points(n: int, d: int) -> tuple[Tensor, Tensor]:
    """Far apart with random labels if d is large; in a plane, labels by sectors, if d = 2."""
    x = torch.randn(n, d)
    if d > 2:
        return x, torch.randint(CLASSES, (n,))
    sector = (torch.atan2(x[:, 1], x[:, 0]) + torch.pi) / (2 * torch.pi) * 2 * CLASSES
    return x, sector.long() % CLASSES


def _train_under_budget(model: nn.Module, x: Tensor, y: Tensor, budget: float, steps: int) -> None:
    """Cross-entropy with a steep price on |J|_F^2 + |b|^2 above the budget; 0: no budget."""
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * (1 - step / steps)
        rows = torch.randperm(len(x))[:64]
        logits = model(x[rows])
        loss = F.cross_entropy(logits, y[rows])
        if budget:
            j = jacobians(model, x[rows])
            offset = logits - (j @ x[rows, :, None])[..., 0]
            size = j.square().sum((1, 2)) + offset.square().sum(1)
            loss = loss + 10 * F.relu(size / budget - 1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def theorem1(seed: int) -> Result:
    """Normal alignment after training under a budget on |J|_F^2 + |b|^2."""
    torch.manual_seed(seed)
    x, y = _points(24, 60)
    j, b = torch.randn(24, CLASSES, 60), torch.randn(24, CLASSES)
    for _ in range(400):  # projected gradient, each sample has an affine piece of its own
        j, b = j.requires_grad_(), b.requires_grad_()
        logits = (j @ x[..., None])[..., 0] + b
        gj, gb = torch.autograd.grad(F.cross_entropy(logits, y, reduction="sum"), (j, b))
        j, b = (j - gj).detach(), (b - gb).detach()
        size = (j.square().sum((1, 2)) + b.square().sum(1)).sqrt()
        shrink = (0.2 / size).clamp(max=1)
        j, b = j * shrink[:, None, None], b * shrink[:, None]
    result: Result = {"free pieces": alignments(j, x)[0].mean().item()}
    for n, d in ((1000, 2), (24, 10), (24, 60), (24, 300), (24, 1000)):
        x, y = _points(n, d)
        start = mlp((d, 128, 128, CLASSES), nn.ReLU)
        numbers = {"start": alignments(jacobians(start, x), x)[0].mean().item()}
        for name, budget in (("no budget", 0.0), ("budget", 30 / d)):
            model = copy.deepcopy(start)
            _train_under_budget(model, x, y, budget, 1500)
            numbers[name] = alignments(jacobians(model, x), x)[0].mean().item()
            with torch.no_grad():
                accuracy = (model(x).argmax(1) == y).double().mean().item()
            numbers[f"accuracy, {name}"] = accuracy
        result[f"{n} points, {d} features"] = numbers
    return result


def theorem2(seed: int) -> Result:
    """Radius over |x| of linear pieces of equal Jacobian norm; radii of trained networks."""
    torch.manual_seed(seed)
    d = 60
    x = torch.randn(1, d)
    y = torch.tensor([0])
    unit = x / x.norm()
    across = torch.randn(1, d)
    across -= (across @ unit.T) * unit
    across /= across.norm()
    u = torch.tensor([[2.0], [-1.0], [-1.0]]) / 6**0.5
    result: Result = {}
    for cosine in (1.0, 0.9, 0.7, 0.5, 0.3):
        j = u @ (cosine * unit + (1 - cosine**2) ** 0.5 * across)  # |J|_F = 1 for each
        radius = attacked_radius(lambda t, j=j: t @ j.T, x, y)
        result[f"cos {cosine}"] = (radius / x.norm()).item()
    best = 0.0
    for _ in range(2000):  # any other Jacobian of norm 1, turned so that it classifies x
        j = torch.randn(CLASSES, d)
        j = (j[(x @ j.T)[0].argsort(descending=True)] / j.norm())[None]
        best = max(best, (certified_radius(j, j @ x[0], y) / x.norm()).item())
    result["best of 2000 random"] = best

    x, y = _points(24, d)
    start = mlp((d, 128, 128, CLASSES), nn.ReLU)
    for budget in (0.0, 30 / d):
        model = copy.deepcopy(start)
        _train_under_budget(model, x, y, budget, 1500)
        j, logits = jacobians(model, x), model(x).detach()
        # Radii do not change when logits and Jacobians are scaled to one common norm.
        name = "net with budget" if budget else "net without"
        result[f"{name}, alignment"] = alignments(j, x)[0].mean().item()
        result[f"{name}, certified"] = certified_radius(j, logits, y).mean().item()
        result[f"{name}, attacked"] = attacked_radius(model, x, y).mean().item()
    return result


def _tangent_kernel(model: nn.Module, x: Tensor) -> Tensor:
    """Gram matrix of the gradients of the summed outputs in the parameters."""
    parameters = {k: p.detach() for k, p in model.named_parameters()}

    def output(p: dict[str, Tensor], t: Tensor) -> Tensor:
        return functional_call(model, p, (t[None],)).sum()

    gradients = vmap(torch.func.grad(output), (None, 0))(parameters, x)
    flat = torch.cat([g.flatten(1) for g in gradients.values()], 1)
    return flat @ flat.T


def theorem3(seed: int, scales: Iterable[float] = (0.3, 1.0, 10.0, 100.0)) -> Result:
    """Training s (f - f_0) at rate 1/s^2: a large s is lazy, a small one learns features."""
    torch.manual_seed(seed)
    x, y = _points(24, 20)
    target = F.one_hot(y, CLASSES).float()
    start = mlp((20, 256, 256, CLASSES), nn.ReLU)
    kernel0, j0 = _tangent_kernel(start, x), jacobians(start, x)
    result: Result = {}
    for scale in scales:
        model = copy.deepcopy(start)
        optimizer = torch.optim.SGD(model.parameters(), 0.05 / scale**2)
        base = start(x).detach()
        path = []
        for step in range(4001):
            loss = F.mse_loss(scale * (model(x) - base), target)
            if step % 10 == 0:
                path.append([t.mean().item() for t in alignments(jacobians(model, x), x)])
            if loss.item() < 1e-4:
                break
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        j, kernel = jacobians(model, x), _tangent_kernel(model, x)
        normal, centroid = alignments(j, x)
        centroid0 = j0.sum(1)
        result[f"s = {scale:g}"] = {
            "loss": loss.item(),
            "kernel change": ((kernel - kernel0).norm() / kernel0.norm()).item(),
            "centroid change": ((j.sum(1) - centroid0).norm() / centroid0.norm()).item(),
            "normal alignment": normal.mean().item(),
            "centroid alignment": centroid.mean().item(),
            "correlation along training": torch.corrcoef(torch.tensor(path).T)[0, 1].item(),
        }
    return result


def write(seeds: int, path: pathlib.Path) -> None:
    """All checks for each seed, as JSON."""
    torch.set_num_threads(1)
    numbers = {t.__name__: [t(s) for s in range(seeds)] for t in (theorem1, theorem2, theorem3)}
    path.write_text(json.dumps(numbers, indent=1) + "\n")


def summary(results: list[Result]) -> Result:
    """Mean and standard deviation of every number over the seeds."""
    out: Result = {}
    for key, value in results[0].items():
        if isinstance(value, dict):
            out[key] = summary([r[key] for r in results])
        else:
            values = [r[key] for r in results]
            out[key] = (statistics.mean(values), statistics.pstdev(values))
    return out
