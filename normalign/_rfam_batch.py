"""RFAM on many small problems at once, on a GPU: every stage is one launch for all of them.

A problem is a table (or a fold of one) with its own alpha and reg; kernel and bandwidth are shared.
Arrays are padded with zeros to common sizes, which changes no result: a point whose coefficients
are 0 or a column of the factor that is 0 adds nothing, and the kernels know each problem's own
number of points. As for one problem on a GPU, everything is in float64. The host waits twice an
iteration, to see whether a factorisation failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from normalign import _rfam_cuda
from normalign._rfam_kernels import make_kernel
from normalign._rfam_machine import Machine
from normalign._rfam_solve import FAILED, jitter_ladder, warn_jitter
from normalign._rfam_tables import Problem, Queries, Tables

# Beyond this many points a block of the GPU takes longer for its system than cuSOLVER does for all.
MOST_POINTS = 2048
_EPS = torch.finfo(torch.float64).eps


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
        jitter: What each solve had to add to the diagonal.
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
    jitter: list[float]
    table: Tensor = field(repr=False)
    own_n: Tensor = field(repr=False)

    @property
    def form(self) -> tuple[float, float]:
        """Length and exponent of ``exp(-(D / L)^q)``."""
        kernel = make_kernel(self.kernel, self.bandwidth)
        return kernel.length, kernel.exponent

    def outputs(self, queries: Queries) -> Tensor:
        """Outputs at each problem's points, shape ``(B, m, c)``; 0 where there is none."""
        u = _rfam_cuda.project_batch(queries.x, self.factor, self.table)
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
            self.bandwidth, self.kernel, self.jitter[b],
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
    table = tables.upload(np.array(index, dtype=np.int32))
    own_n = tables.pick(index, tables.sizes)
    ridge = tables.upload(np.array(regs, dtype=np.float64))
    targets = tables.targets[table]
    return _solve(
        tables, list(index), table, own_n, targets, factor, ridge, regs, bandwidth, kernel
    )


def _solve(
    tables: Tables,
    index: list[int],
    table: Tensor,
    own_n: Tensor,
    targets: Tensor,
    factor: Tensor,
    ridge: Tensor,
    regs: Sequence[float],
    bandwidth: float,
    kernel: str | float,
) -> Machines:
    shape = make_kernel(kernel, bandwidth)
    points = _rfam_cuda.project_batch(tables.x, factor, table)
    systems = _Systems(points, own_n, targets, ridge, shape.length, shape.exponent)
    rows, jitter = systems.solve(regs)
    coef = rows.transpose(1, 2).contiguous()
    return Machines(tables, index, bandwidth, kernel, factor, points, coef, jitter, table, own_n)


@dataclass
class _Systems:
    points: Tensor
    own_n: Tensor
    targets: Tensor  # (B, c, n)
    ridge: Tensor
    length: float
    exponent: float

    def attempt(self, jitter: float, rows: Tensor | None) -> tuple[Tensor, list[bool]]:
        """Solutions of some systems (None: all), and which of them failed."""
        u, own, y, ridge = self.points, self.own_n, self.targets, self.ridge
        if rows is None:
            y = y.clone()
        else:
            u, own, y, ridge = u[rows], own[rows], y[rows], ridge[rows] + jitter
        k = _rfam_cuda.gram(u, u, self.length, self.exponent, own_m=own, own_n=own)
        info = _rfam_cuda.cholesky_solve(k, y, ridge, own).tolist()
        # A pivot within rounding of the products that it is left over from means nothing.
        return y, [failed > 0 or not least > _EPS * most for failed, least, most in info]

    def solve(self, regs: Sequence[float]) -> tuple[Tensor, list[float]]:
        """Solutions ``(B, c, n)`` and jitters: a ladder, for the systems that failed alone."""
        result, failed = self.attempt(0.0, None)
        jitters = [0.0] * len(failed)
        left = [b for b, bad in enumerate(failed) if bad]
        for jitter in jitter_ladder(torch.float64)[1:]:
            if not left:
                break
            rows = torch.tensor(left, device=self.points.device)
            y, failed = self.attempt(jitter, rows)
            for place, b in enumerate(left):
                if not failed[place]:
                    result[b] = y[place]
                    jitters[b] = jitter
                    warn_jitter(jitter, regs[b])
            left = [b for b, bad in zip(left, failed, strict=True) if bad]
        if left:
            raise ValueError(FAILED)
        return result, jitters


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
    regs = [p.reg for p in problems]
    factor, ranks = tables.first_factors(problems)
    table = tables.upload(np.array(index, dtype=np.int32))
    own_n = tables.pick(index, tables.sizes)
    ridge = tables.upload(np.array(regs, dtype=np.float64))
    targets = tables.targets[table]
    # |F|^2 = d, the trace of M.
    size = tables.upload(np.sqrt([float(tables.features[t]) for t in index]))
    tried: list[Machines] = []
    sums: list[Tensor] = []
    for i in range(n_iter):
        machines = _solve(
            tables, index, table, own_n, targets, factor, ridge, regs, bandwidth, kernel
        )
        if valid is not None:
            sums.append(valid.sums(machines.outputs(valid), table))
            tried.append(machines)
        if i + 1 < n_iter:  # nobody reads an update after the last solve
            factor = _updated(machines, size, ranks)
    if valid is None:
        return Fitted(machines, [n_iter - 1] * len(index), [[] for _ in index])
    values = torch.stack(sums, 1).tolist()
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

    jitter = [tried[i].jitter[b] for b, i in enumerate(best)]
    return Machines(
        last.tables, last.index, last.bandwidth, last.kernel, pick("factor"), pick("points"),
        pick("coef"), jitter, last.table, last.own_n,
    )  # fmt: skip


def _updated(machines: Machines, size: Tensor, ranks: list[int]) -> Tensor:
    """The next factors ``F C`` with ``C C^T`` the AGOP in factor space, scaled to trace d.

    ``ranks`` says how many columns of each factor there are; it's brought up to date.
    """
    u, own = machines.points, machines.own_n
    g = _rfam_cuda.jacobian(u, u, machines.coef, *machines.form, own_m=own, own_n=own)
    g = g.flatten(1, 2)  # (B, n c, r)
    r = g.transpose(1, 2) @ g
    own_r = machines.tables.upload(np.array(ranks, dtype=np.int32))
    info = _rfam_cuda.cholesky_solve(r, r[:, :0], None, own_r).tolist()
    lower = r.tril_()
    # A factorisation that ends is exact to rounding; pivots that are rounding are dropped, as
    # eigenvalues are below.
    noise = 4 * r.shape[1] * _EPS
    failed = [b for b, (at, least, most) in enumerate(info) if at or not least > noise * most]
    if failed:
        _by_eigenvalues(g, lower, failed, ranks)
    factor = machines.factor @ lower
    length = torch.linalg.vector_norm(factor, dim=(1, 2)).clamp_(min=1e-300)  # M may be 0
    return factor.mul_((size / length)[:, None, None])


def _by_eigenvalues(g: Tensor, lower: Tensor, failed: list[int], ranks: list[int]) -> None:
    """Factors of ``g^T g`` where Cholesky finds none; the identity where all gradients are 0."""
    width = g.shape[2]
    rows = torch.tensor(failed, device=g.device)
    g = g[rows]
    values, vectors = torch.linalg.eigh(g.transpose(1, 2) @ g)
    values, vectors = values.flip(1), vectors.flip(2)
    # Directions below rounding, and slightly negative ones, are dropped.
    kept = values > width * _EPS * values[:, :1].clamp(min=0)
    found = torch.where(kept[:, None], vectors * values.clamp(min=0).sqrt()[:, None], 0.0)
    lower[rows] = found
    for b, rank in zip(failed, kept.sum(1).tolist(), strict=True):
        if rank:
            ranks[b] = rank
        else:
            lower[b] = torch.eye(width, dtype=g.dtype, device=g.device)
