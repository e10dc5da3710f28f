"""Attacks for ``device_check.py``: all steps in one launch, against autograd on the same device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from baselines import rfam as authors
from torch import Tensor

from normalign import _rfam_attack_cuda, _rfam_fit, reference

RADII = (0.1, 1.0, 2.0)
STEPS = 20


class Machine(Protocol):
    """The part of ``device_check.Machine`` that is used here."""

    emulated: bool
    device: torch.device

    def seconds(self, call: Callable[[], Any], budget: float = 0.3) -> float:
        """Median time of a call."""

    def launches(self, call: Callable[[], Any]) -> int:
        """Kernels that a call starts."""


def _problem(machine: Machine, n: int, d: int, c: int, m: int) -> tuple[Any, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n + m, d, generator=generator).to(machine.device)
    labels = (x[:, :c] + 0.3 * x[:, -1:] * x[:, :c]).argmax(1)
    y = F.one_hot(labels, c).float()
    return _rfam_fit.fit(x[:n], y[:n], reg=1e-2, n_iter=2).machine, x[n:], labels[n:]


def rfam_attack(machine: Machine, folds: int, n: int, d: int, c: int, m: int) -> dict[str, Any]:
    """The published attack: all folds and radii in one launch; the authors' one after the other."""
    if machine.emulated:
        folds, n, m = 2, 40, 6
    kernel, x, labels = _problem(machine, n, d, c, m)
    targets = F.one_hot(labels, c).float()
    # A small fit may be in float64; the sweep's attack is in the data's float32.
    points, coef = kernel.points.float(), kernel.dual_coef.float()
    shape = (folds, len(RADII), m, d)
    generator = torch.Generator().manual_seed(1)
    unit = 2 * torch.rand(shape, generator=generator).to(machine.device) - 1
    eps = torch.tensor(RADII, device=machine.device)[:, None].expand(-1, d)
    start = x + eps[:, None] * unit

    def ours(iterations: int = STEPS) -> Any:
        same = [t.expand(folds, *t.shape) for t in (
            points, coef, kernel.mean, kernel.factor, x, targets
        )]  # fmt: skip
        return _rfam_attack_cuda.attack(
            *same, start, eps, eps / 10, length=10.0, exponent=1.0, iterations=iterations
        )

    # The authors' form sees no centre: it takes the points as they were.
    inverse = torch.linalg.pinv(kernel.factor)
    z = (kernel.points.double() @ inverse + kernel.mean.double()).float()
    m32 = kernel.feature_matrix.float()

    def theirs() -> None:
        for fold in range(folds):
            for e, radius in enumerate(RADII):
                authors.pgd(x, labels, z, coef, m32, 10.0, radius, STEPS, start[fold, e])

    found = ours()
    u = (found.points.double() - kernel.mean.double()) @ kernel.factor
    exact = reference.laplace_matvec(u.flatten(0, 2), points.double(), coef.double(), None, 10.0)
    scale = float(exact.abs().max())
    seconds = machine.seconds(ours)
    row = {
        "case": f"attack {folds} folds x {len(RADII)} radii, n {n} d {d} classes {c}, {m} points",
        "error": float((found.outputs.flatten(0, 2).double() - exact).abs().max()) / scale,
        "launches": machine.launches(ours),
        "seconds": seconds,
        "one_step_seconds": machine.seconds(lambda: ours(1)),
        "authors_seconds": machine.seconds(theirs, 0.1),
        "authors_launches": machine.launches(theirs),
    }
    row["authors_over_ours"] = row["authors_seconds"] / seconds
    return row
