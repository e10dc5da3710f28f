"""The kernel system ``(K + reg / w) a = y``: Cholesky, and a jitter ladder that says so."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

import torch
from torch import Tensor

from normalign import _load, _rfam_kernels
from normalign._feature_space import WIDE
from normalign._rfam_kernels import (
    Factor,
    Kernel,
    Points,
    Scratch,
    machine_sizes,
    native,
    rows_apart,
)
from normalign._rfam_machine import on_cpu_kernels, project


def jitter_ladder(dtype: torch.dtype) -> list[float]:
    """What to add to a diagonal of ones, in turn, until a factorisation succeeds: 0 first."""
    unit = torch.finfo(dtype).eps
    return [0.0] + [unit * 10.0**k for k in range(1, 8)]


def warn_jitter(jitter: float, reg: float) -> None:
    """The one warning of a ladder that had to climb."""
    msg = (
        f"the kernel matrix plus reg = {reg:g} is not positive definite in working precision; "
        f"{jitter:.3g} was added to its diagonal. Duplicate rows or a tiny reg lead to this."
    )
    warnings.warn(msg, RuntimeWarning, stacklevel=2)


FAILED = "the kernel matrix could not be factored; does the input hold NaN or infinity?"
# A float32 factor leaves errors of at most a third of e = eps n / (least pivot), which features
# inherit. They are let stand where e is below 2e-5; as a rule, one correction by the residual in
# float64 removes them. Where points nearly coincide as well (a pivot below 0.01: the squared
# distance, in the kernel's space, of a point from the span of those before), their coefficients
# are large and cancel, and float32 can't even hold them: the factor then preconditions a solution
# in float64.
FLOAT32_RULES = (WIDE, 2e-5, 1e-3, 0.01)
_DONE, _WIDE, _FAILED, _HARD = range(4)  # csrc/rfam_fit.h


@dataclass
class Solution:
    """``a``, the points that it belongs to (in float64 where float32 would not do), the jitter.

    ``size`` is the largest absolute value in ``a``; None where nobody looked.
    """

    points: Points
    coef: Tensor
    jitter: float
    size: float | None = None


@dataclass
class System:
    """``(K(u, u) + diag(reg / weight)) a = y`` with ``u = (x - mean) F``, for one F after another.

    Attributes:
        x: Points, shape ``(n, d)``.
        y: Targets, shape ``(n, c)``, dtype of ``x``.
        mean: Centre, shape ``(d,)``, dtype of ``x``.
        kernel: The kernel.
        reg: Ridge, not negative.
        weight: How often each point counts, shape ``(n,)``.
        threads: Threads to use.
        scratch: Memory of the solves, which is anybody's in between.
    """

    x: Tensor
    y: Tensor
    mean: Tensor
    kernel: Kernel
    reg: float
    weight: Tensor | None
    threads: int
    scratch: Scratch = field(default_factory=Scratch)
    _double: System | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.native = min(self.y.shape) > 0 and on_cpu_kernels(self.x)
        if self.native:
            self.x = rows_apart(self.x)
            self.y, self.mean = self.y.contiguous(), self.mean.contiguous()
            if self.weight is not None:
                self.weight = self.weight.to(self.x.dtype).contiguous()

    def solve(self, factor: Tensor, *, refine: bool = True) -> Solution:
        """The coefficients under the features ``F``.

        Args:
            factor: ``F``, shape ``(d, r)``, float64.
            refine: Whether errors of 1e-4, which are the rule in float32, are worth a correction.

        Raises:
            ValueError: no jitter makes the matrix positive definite.
        """
        if not self.native:  # float64 throughout, and torch's factorisation
            points = Points(project(self.x, self.mean, factor, torch.float64), self.kernel)
            gram = _rfam_kernels.gram(points, points, self.threads)
            solved = solve_gram(gram, self.y.double(), self.reg, self.weight)
            return Solution(points, *solved)
        n, c = self.y.shape
        (d, r), dtype = factor.shape, self.x.dtype
        u, coef = self.x.new_empty(n, r), self.x.new_empty(n, c)
        points = Points(u, self.kernel, self.x.new_empty(_rfam_kernels.padded(n) * r))
        size = _load._C.rfam_solve_workspace(n, d, r, c, self.threads, dtype.itemsize)
        factor = factor.contiguous()
        status, least_pivot, largest = native("rfam_solve", dtype)(
            (*machine_sizes(self.kernel, n, d, r, c), self.mean.data_ptr(), factor.data_ptr()),
            self.x.data_ptr(), self.x.stride(0), self.y.data_ptr(),
            0 if self.weight is None else self.weight.data_ptr(), self.reg, FLOAT32_RULES, refine,
            u.data_ptr(), points.panels(self.threads).data_ptr(), coef.data_ptr(),
            self.scratch.take(size), self.threads,
        )  # fmt: skip
        if status == _DONE:
            return Solution(points, coef, 0.0, largest)
        if dtype is torch.float64:
            return self._with_jitter(points)
        if status == _WIDE:
            return self.in_double().solve(factor)
        found = None
        exact = Points(project(self.x, self.mean, factor, torch.float64), self.kernel)
        if status == _HARD:
            found = self._preconditioned(exact, least_pivot)
        if found is None:
            wide = Factor.of(exact, self.reg, 0.0, self.weight, self.threads, self.scratch)
            found = None if wide is None else wide.solve(self.y.double())
        return self._with_jitter(points) if found is None else Solution(exact, found, 0.0)

    def in_double(self) -> System:
        """The same system, computed in float64."""
        if self._double is None:
            weight = None if self.weight is None else self.weight.double()
            self._double = System(
                self.x.double(), self.y.double(), self.mean.double(), self.kernel, self.reg,
                weight, self.threads, self.scratch,
            )  # fmt: skip
        return self._double

    def _preconditioned(self, x: Points, least_pivot: float) -> Tensor | None:
        """A float64 solution by the float32 factor in the scratch; None if it does not converge."""
        factor = Factor.within(self.scratch, self.y.shape[0], torch.float32, least_pivot)
        targets = self.y.double()
        ridge = self.reg if self.weight is None else (self.reg / self.weight.double()).unsqueeze(1)
        coef = factor.solve(self.y).double()
        before = 1.0
        for _ in range(12):
            residual = targets - _rfam_kernels.matvec_symmetric(x, coef, self.threads)
            correction = factor.solve((residual - ridge * coef).float()).double()
            coef += correction
            size = float(correction.abs().max() / coef.abs().max().clamp(min=1e-300))
            # Each correction is a factor smaller than the one before, and so is what it leaves.
            if size**2 <= 1e-9 * before:
                return coef
            if not size < 0.5 * before:
                return None
            before = size
        return None

    def _with_jitter(self, points: Points) -> Solution:
        for jitter in jitter_ladder(points.u.dtype)[1:]:
            factor = Factor.of(points, self.reg, jitter, self.weight, self.threads, self.scratch)
            if factor is not None:
                warn_jitter(jitter, self.reg)
                return Solution(points, factor.solve(self.y), jitter)
        raise ValueError(FAILED)


def solve_gram(
    gram: Tensor, targets: Tensor, reg: float, weight: Tensor | None = None
) -> tuple[Tensor, float]:
    """The same for a matrix that is there already, by torch.linalg."""
    n = gram.shape[0]
    ridge = gram.new_full((n,), reg) if weight is None else reg / weight.to(gram.dtype)
    scale = max(1.0, float(gram.diagonal().max())) if n else 1.0
    for step in jitter_ladder(gram.dtype):
        jitter = step * scale
        system = gram.clone()
        system.diagonal().add_(ridge + jitter)
        factor, info = torch.linalg.cholesky_ex(system)
        noise = torch.finfo(gram.dtype).eps * scale
        if int(info) == 0 and (n == 0 or bool(factor.diagonal().square().min() > noise)):
            if jitter:
                warn_jitter(jitter, reg)
            return torch.cholesky_solve(targets, factor), jitter
    raise ValueError(FAILED)
