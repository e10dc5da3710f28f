"""RFAM on many small problems at once, on a GPU: every stage is one launch for all of them.

A problem is a table (or a fold of one) with its own alpha and reg; kernel and bandwidth are shared.
Arrays are padded with zeros to common sizes, which changes no result: a point whose coefficients
are 0 or a column of the factor that is 0 adds nothing, and the kernels know each problem's own
number of points. As for one problem on a GPU, everything is in float64. The host waits for nothing
before the last solve: jitters and ranks are found where the factorisations are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from normalign import _rfam_cuda
from normalign._rfam_agop_cuda import agop
from normalign._rfam_kernels import make_kernel
from normalign._rfam_machine import Machine
from normalign._rfam_solve import FAILED, jitter_ladder, warn_jitter
from normalign._rfam_tables import Problem, Queries, Tables

# Beyond this many points a block of the GPU takes longer for its system than cuSOLVER does for all.
MOST_POINTS = 2048
_LADDER = jitter_ladder(torch.float64)


@dataclass
class Machines:
    """Kernel machines, padded; B of them.

    Attributes:
        tables: Their tables.
        index: The table of each.
        bandwidth: Length of the kernel.
        kernel: ``"laplace"``, ``"gaussian"``, or an exponent.
        factor: ``F``, shape ``(B, d, r)``.
        points: Training points in factor space, shape ``(B, n, r)``.
        coef: Coefficients, shape ``(B, n, c)``.
        jitter: What each solve had to add to the diagonal, shape ``(B,)``.
        table: ``index`` on the device, int32.
        own_n: Training points of each, on the device, int32.
    """

    tables: Tables
    index: list[int]
    bandwidth: float
    kernel: str | float
    factor: Tensor
    points: Tensor
    coef: Tensor
    jitter: Tensor
    table: Tensor = field(repr=False)
    own_n: Tensor = field(repr=False)

    @property
    def form(self) -> tuple[float, float]:
        """Length and exponent of ``exp(-(D / L)^q)``."""
        kernel = make_kernel(self.kernel, self.bandwidth)
        return kernel.length, kernel.exponent

    def outputs(self, queries: Queries, own_m: Tensor | None = None) -> Tensor:
        """Outputs at each problem's points, shape ``(B, m, c)``; 0 where there is none.

        Args:
            queries: The points of each table.
            own_m: How many each problem has, where that is on the device already.
        """
        u = _rfam_cuda.project_batch(queries.x, self.factor, self.table)
        if own_m is None:
            own_m = self.tables.pick(self.index, queries.sizes)
        return _rfam_cuda.matvec(
            u, self.points, self.coef, *self.form, own_m=own_m, own_n=self.own_n
        )

    def scores(self, queries: Queries) -> list[float]:
        """The score of each at these points."""
        sums = queries.sums(self.outputs(queries), self.table).tolist()
        return [queries.score(t, value) for t, value in zip(self.index, sums, strict=True)]

    def machine(self, b: int) -> Machine:
        """One of them by itself, without the padding."""
        table = self.index[b]
        n, d = self.tables.sizes[table], self.tables.features[table]
        mean = torch.from_numpy(self.tables.mean[table, :d]).to(self.tables.raw[table].dtype)
        return Machine(
            mean.to(self.tables.device), self.factor[b, :d], self.points[b, :n], self.coef[b, :n],
            self.bandwidth, self.kernel, float(self.jitter[b]),
        )  # fmt: skip


def solve(
    tables: Tables,
    index: Sequence[int],
    factor: Tensor,
    regs: Sequence[float],
    bandwidth: float,
    kernel: str | float = "laplace",
) -> Machines:
    """Kernel solves with given features.

    Args:
        tables: The training points.
        index: The table of each problem.
        factor: ``F`` of each, shape ``(B, d, r)``, float64.
        regs: Ridge of each.
        bandwidth: Length of the kernel.
        kernel: ``"laplace"``, ``"gaussian"``, or an exponent.
    """
    systems = _Systems(tables, list(index), regs, bandwidth, kernel)
    machines = systems.solve(factor)
    systems.report([machines.jitter])
    return machines


class _Systems:
    """``(K + reg I) a = y`` for each problem, with one set of features after another."""

    def __init__(
        self,
        tables: Tables,
        index: list[int],
        regs: Sequence[float],
        bandwidth: float,
        kernel: str | float,
    ):
        self.tables, self.index, self.regs = tables, index, regs
        self.bandwidth, self.kernel = bandwidth, kernel
        self.table = tables.upload(np.array(index, dtype=np.int32))
        self.own_n = tables.pick(index, tables.sizes)
        self.ridge = tables.upload(np.array(regs, dtype=np.float64))
        self.targets = tables.targets[self.table]  # (B, c, n)

    def solve(self, factor: Tensor) -> Machines:
        own, shape = self.own_n, make_kernel(self.kernel, self.bandwidth)
        u = _rfam_cuda.project_batch(self.tables.x, factor, self.table)
        k = _rfam_cuda.gram(u, u, shape.length, shape.exponent, own_m=own, own_n=own)
        coef, jitter = _rfam_cuda.cholesky_solve(k, self.targets, self.ridge, _LADDER, own)
        return Machines(
            self.tables, self.index, self.bandwidth, self.kernel, factor, u, coef, jitter,
            self.table, own,
        )  # fmt: skip

    def report(self, jitters: list[Tensor]) -> None:
        """Waits, and tells of the solves that needed a jitter, and of those that none helped."""
        for solve in torch.stack(jitters).tolist():
            for jitter, reg in zip(solve, self.regs, strict=True):
                if math.isnan(jitter):
                    raise ValueError(FAILED)
                if jitter > 0:
                    warn_jitter(jitter, reg)


@dataclass
class Fitted:
    """What ``fit`` found.

    Attributes:
        machines: Of the best iteration of each problem, else of the last.
        best_iter: That iteration.
        scores: Of each iteration of each problem; empty without points to score.
    """

    machines: Machines
    best_iter: list[int]
    scores: list[list[float]]


def fit(
    tables: Tables,
    problems: Sequence[Problem],
    *,
    bandwidth: float,
    kernel: str | float = "laplace",
    n_iter: int = 5,
    valid: Queries | None = None,
) -> Fitted:
    """Fits RFAM for many problems; see ``_rfam_fit.fit`` for one.

    Args:
        tables: The training points.
        problems: What to fit.
        bandwidth: Length of the kernel.
        kernel: ``"laplace"``, ``"gaussian"``, or an exponent.
        n_iter: Number of solves.
        valid: Points whose score chooses the iteration, the first one on ties; None keeps the last.
    """
    index = [p.table for p in problems]
    systems = _Systems(tables, index, [p.reg for p in problems], bandwidth, kernel)
    factor, ranks = tables.first_factors(problems)
    # |F|^2 = d, the trace of M.
    size = tables.upload(np.sqrt([float(tables.features[t]) for t in index]))
    own_valid = None if valid is None else tables.pick(index, valid.sizes)
    jitters: list[Tensor] = []
    tried: list[Machines] = []
    outputs: list[Tensor] = []
    for i in range(n_iter):
        machines = systems.solve(factor)
        jitters.append(machines.jitter)
        if valid is not None:
            outputs.append(machines.outputs(valid, own_valid))
            tried.append(machines)
        if i + 1 < n_iter:  # nobody reads an update after the last solve
            factor = _updated(machines, size, ranks)
    systems.report(jitters)
    if valid is None:
        return Fitted(machines, [n_iter - 1] * len(index), [[] for _ in index])
    values = zip(*valid.sums(torch.stack(outputs), systems.table).tolist(), strict=True)
    scores = [
        [valid.score(t, value) for value in row] for t, row in zip(index, values, strict=True)
    ]
    best = [row.index(max(row)) for row in scores]
    return Fitted(_chosen(tried, best), best, scores)


def _chosen(tried: list[Machines], best: list[int]) -> Machines:
    """Each problem's machine of its best iteration."""
    last = tried[-1]

    def pick(name: str) -> Tensor:
        return torch.stack([getattr(tried[i], name)[b] for b, i in enumerate(best)])

    return Machines(
        last.tables, last.index, last.bandwidth, last.kernel, pick("factor"), pick("points"),
        pick("coef"), pick("jitter"), last.table, last.own_n,
    )  # fmt: skip


def _updated(machines: Machines, size: Tensor, ranks: Tensor) -> Tensor:
    """The next factors ``F C`` with ``C C^T`` the AGOP in factor space, scaled to trace d.

    ``ranks`` says how many columns of each factor there are; it's brought up to date. Where all
    gradients are 0 the features stay as they are.
    """
    u, own = machines.points, machines.own_n
    r = agop(u, u, machines.coef, *machines.form, own_m=own, own_n=own)
    factor = machines.factor @ _rfam_cuda.semidefinite_factor(r, ranks)
    length = torch.linalg.vector_norm(factor, dim=(1, 2)).clamp_(min=1e-300)  # M may be 0
    return factor.mul_((size / length)[:, None, None])
