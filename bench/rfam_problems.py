"""Problems for the benches of RFAM's operators, and the way they all start."""

from __future__ import annotations

from collections.abc import Callable

import harness
import torch
import torch.nn.functional as F
from baselines import rfam as authors
from torch import Tensor

from normalign import _rfam_fit
from normalign._rfam_kernels import Points, make_kernel
from normalign._rfam_machine import project

BANDWIDTH = 10.0


def table(n: int, d: int, c: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Points and labels that depend on a few directions of them."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=g)
    scores = x @ torch.randn(d, c, generator=g) + (x[:, :1] * x[:, -1:])
    return x, scores.argmax(1)


def problem(n: int, d: int, c: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Points, one-hot labels, coefficients of a first solve, and the M that they belong to."""
    x, labels = table(n, d, c)
    y = F.one_hot(labels, c).float()
    m = authors.start(x, 0.0)
    return x, y, authors.solve(authors.gram(x, x, m, BANDWIDTH), y, 1e-2), m


def first_points(x: Tensor) -> tuple[Tensor, Tensor, Points]:
    """Mean, factor and points of RFAM's start."""
    prepared = _rfam_fit.prepare(x)
    u = project(x, prepared.mean, prepared.factor, x.dtype)
    return prepared.mean, prepared.factor, Points(u, make_kernel("laplace", BANDWIDTH))


def fresh(points: Points) -> Points:
    """The same points, not yet in panels: packing them is part of every stage."""
    return Points(points.u, points.kernel)


def run(description: str | None, stage: Callable[[harness.Bench, int], None]) -> int:
    """One stage with the options that every bench has; the exit status."""
    args = harness.parser(description).parse_args()
    bench = harness.Bench(args)
    torch.manual_seed(0)
    stage(bench, args.threads)
    return bench.finish()
