"""The kernels of RFAM between points in factor space, where distances are Euclidean.

Each function takes the native kernel where there is one and the reference elsewhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from normalign import _dispatch, _load, _rfam_cuda, reference
from normalign._load import address

_LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Kernel:
    """``exp(-(D / length)^exponent)``, and how the native kernels express it.

    They scale coordinates by ``scale`` and leave a constant ``weight_scale`` out of the gradient
    weights ``W``; ``code`` names the form (csrc/laplace_gram.h).
    """

    exponent: float
    length: float

    @cached_property
    def code(self) -> int:
        """0 Laplace, 1 Gaussian, 2 any other exponent."""
        return {1.0: 0, 2.0: 1}.get(self.exponent, 2)

    @cached_property
    def scale(self) -> float:
        """Factor of the coordinates."""
        return (_LOG2_E, math.sqrt(_LOG2_E), 1.0)[self.code] / self.length

    @cached_property
    def weight_scale(self) -> float:
        """Factor between the native W and ``-K'(D) / D``."""
        return (_LOG2_E, 2.0, self.exponent)[self.code] / self.length**2


def make_kernel(kernel: str | float, bandwidth: float) -> Kernel:
    """Kernel of a public name: ``"gaussian"`` is ``exp(-D^2 / (2 bandwidth^2))``."""
    if not 0 < bandwidth < math.inf:  # a compiler can trace this, unlike math.isfinite
        msg = f"bandwidth must be positive and finite, got {bandwidth}"
        raise ValueError(msg)
    if kernel == "laplace":
        return Kernel(1.0, float(bandwidth))
    if kernel == "gaussian":
        return Kernel(2.0, bandwidth * math.sqrt(2.0))
    if isinstance(kernel, str) or not 0 < kernel <= 2:
        msg = f"kernel must be 'laplace', 'gaussian' or an exponent in (0, 2], got {kernel!r}"
        raise ValueError(msg)
    return Kernel(float(kernel), float(bandwidth))


def native(name: str, dtype: torch.dtype) -> Any:
    """The function of the extension for one dtype."""
    return getattr(_load._C, name + ("_f32" if dtype is torch.float32 else "_f64"))


class Scratch:
    """Memory that the stages of a fit use in turn; each finds it as the one before left it."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def take(self, size: int) -> int:
        """The address of ``size`` bytes; what was there is lost where it has to grow."""
        if self._buffer is None or self._buffer.shape[0] < size:
            self._buffer = None  # before the larger one is there
            self._buffer = torch.empty(size, dtype=torch.uint8)
        return self._buffer.data_ptr()

    def tensors(self, dtype: torch.dtype, *counts: int) -> tuple[Tensor, ...]:
        """One-dimensional tensors, one behind the other."""
        self.take(max(1, sum(counts)) * dtype.itemsize)
        assert self._buffer is not None
        whole = self._buffer[: sum(counts) * dtype.itemsize].view(dtype)
        return tuple(torch.split(whole, list(counts)))


@dataclass
class Points:
    """Points in factor space ``(n, r)``, and the same in panels once a native kernel wants them."""

    u: Tensor
    kernel: Kernel
    _panels: Tensor | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.u = self.u.contiguous()

    @property
    def gpu(self) -> bool:
        """Whether the CUDA kernels serve."""
        return _dispatch.gpu_module(self.u) is not None

    @property
    def reason(self) -> str | None:
        """Why the reference is to be used; None for native."""
        return _dispatch.reference_reason(self.u)

    def panels(self, threads: int) -> Tensor:
        """The layout of csrc/cpu/point_panel.h, scaled for the kernel."""
        if self._panels is None:
            n, width = self.u.shape
            self._panels = self.u.new_empty(padded(n) * width)
            native("laplace_pack", self.u.dtype)(
                n, width, self.u.data_ptr(), width, self.kernel.scale, self._panels.data_ptr(),
                threads,
            )  # fmt: skip
        return self._panels


def padded(n: int) -> int:
    """Number of points, rounded up to whole panels."""
    size: int = _load._C.panel
    return -(-n // size) * size


def row_length(n: int) -> int:
    """Row length that is a whole number of vectors on every instruction set."""
    return -(-n // 16) * 16


def gram(
    x: Points, z: Points, threads: int, *, weights: bool = False, precision: str | None = None
) -> Tensor:
    """``K(x, z)``, or the gradient weights W, shape ``(m, n)``.

    ``precision`` permits a GPU tensor cores for K.
    """
    kernel = x.kernel
    if x.gpu:
        return _rfam_cuda.gram(
            x.u, z.u, kernel.length, kernel.exponent, weights=weights, precision=precision
        )
    if x.reason is not None:
        f = reference.gradient_weights if weights else reference.laplace_gram
        return f(x.u, z.u, None, kernel.length, kernel.exponent)
    m, n, width = x.u.shape[0], z.u.shape[0], x.u.shape[1]
    out = x.u.new_empty(m, n)
    native("laplace_gram", x.u.dtype)(
        kernel.code, kernel.exponent, weights, m, n, width, x.panels(threads).data_ptr(),
        z.panels(threads).data_ptr(), out.data_ptr(), n, threads,
    )  # fmt: skip
    return out.mul_(kernel.weight_scale) if weights else out


def matvec(x: Points, z: Points, coef: Tensor, threads: int) -> Tensor:
    """``K(x, z) coef``, shape ``(m, c)``, without storing K."""
    kernel = x.kernel
    m, n, c = x.u.shape[0], z.u.shape[0], coef.shape[1]
    if x.gpu:
        return _rfam_cuda.matvec(x.u, z.u, coef, kernel.length, kernel.exponent)
    if x.reason is not None:
        rows = max(1, (1 << 22) // max(1, n))
        parts = [
            reference.laplace_matvec(p, z.u, coef, None, kernel.length, kernel.exponent)
            for p in x.u.split(rows)
        ]
        return torch.cat(parts) if parts else x.u.new_zeros(0, c)
    coef = coef.contiguous()
    out = x.u.new_empty(m, c)
    if out.numel():
        workspace = x.u.new_empty(threads * _load._C.panel * c)
        native("laplace_matvec", x.u.dtype)(
            kernel.code, kernel.exponent, m, n, c, x.u.shape[1], x.panels(threads).data_ptr(),
            z.panels(threads).data_ptr(), coef.data_ptr(), c, out.data_ptr(), c,
            workspace.data_ptr(), threads,
        )  # fmt: skip
    return out


def matvec_symmetric(x: Points, coef: Tensor, threads: int) -> Tensor:
    """``K(x, x) coef``, shape ``(n, c)``; native only, at half the cost of ``matvec``."""
    n, c = coef.shape
    stride, rows = row_length(c), padded(n)
    right = coef.new_zeros(rows, stride)
    right[:n, :c] = coef
    out = torch.empty_like(right)
    workspace = coef.new_empty(threads * (rows * stride + _load._C.panel * c))
    native("laplace_matvec_symmetric", coef.dtype)(
        x.kernel.code, x.kernel.exponent, n, c, x.u.shape[1], x.panels(threads).data_ptr(),
        right.data_ptr(), out.data_ptr(), stride, workspace.data_ptr(), threads,
    )  # fmt: skip
    return out[:n, :c]


def rows_apart(x: Tensor) -> Tensor:
    """``x``, copied unless its rows are contiguous and one behind the other."""
    if x.stride(1) == 1 and x.stride(0) >= x.shape[1]:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def machine_sizes(kernel: Kernel, n: int, d: int, r: int, c: int) -> tuple[object, ...]:
    """How csrc/bind_rfam_fit.cpp takes a kernel and sizes; mean and factor follow."""
    return (kernel.code, kernel.exponent, kernel.scale, n, d, r, c)


def machine_tuple(
    z: Points, coef: Tensor, threads: int, mean: Tensor | None = None, factor: Tensor | None = None
) -> tuple[object, ...]:
    """What csrc/bind_rfam_attack.cpp takes for a machine; the caller keeps the tensors alive."""
    d = 0 if mean is None else mean.shape[0]
    return (
        z.kernel.code, z.kernel.exponent, z.kernel.scale, z.u.shape[0], coef.shape[1], d,
        z.u.shape[1], address(mean), address(factor), z.u.data_ptr(),
        z.panels(threads).data_ptr(), coef.data_ptr(),
    )  # fmt: skip


def gradient(x: Points, z: Points, coef: Tensor, cotangent: Tensor, threads: int) -> Tensor:
    """Gradient of ``sum_k cotangent_k f_k`` in ``u``, shape ``(m, r)``."""
    kernel = x.kernel
    if x.gpu:
        return _rfam_cuda.gradient(x.u, z.u, coef, cotangent, kernel.length, kernel.exponent)
    (m, width), c = x.u.shape, coef.shape[1]
    if min(m, width, c) == 0:
        return torch.zeros_like(x.u)
    if x.reason is not None:
        return reference.input_gradient(
            x.u, z.u, coef, cotangent, None, kernel.length, kernel.exponent
        )
    coef, cotangent = coef.contiguous(), cotangent.contiguous()
    g = torch.empty_like(x.u)
    workspace = x.u.new_empty(threads * _load._C.panel * (c + width + 1))
    native("rfam_gradient", x.u.dtype)(
        machine_tuple(z, coef, threads), m, x.u.data_ptr(), x.panels(threads).data_ptr(),
        cotangent.data_ptr(), g.data_ptr(), workspace.data_ptr(), threads,
    )  # fmt: skip
    return g.mul_(kernel.weight_scale)


def jacobian(x: Points, z: Points, coef: Tensor, threads: int) -> Tensor:
    """Gradients of all outputs in ``u``, shape ``(m, c, r)``."""
    if x.gpu:
        return _rfam_cuda.jacobian(x.u, z.u, coef, x.kernel.length, x.kernel.exponent)
    if x.reason is not None:
        return reference.jacobian(x.u, z.u, coef, None, x.kernel.length, x.kernel.exponent)
    (m, width), (n, c) = x.u.shape, coef.shape
    out = x.u.new_empty(m, c, width)
    rows = max(1, (1 << 22) // max(1, n))  # of the weights that are alive at a time
    for first in range(0, m, rows):
        u = x.u[first : first + rows]
        w = gram(Points(u, x.kernel), z, threads, weights=True)
        own = w @ coef
        for k in range(c):
            moment = w @ (coef[:, k : k + 1] * z.u)
            out[first : first + rows, k] = moment - own[:, k : k + 1] * u
    return out


@dataclass
class Factor:
    """Cholesky factor in panels (csrc/cholesky.h)."""

    n: int
    packed: Tensor
    inverse: Tensor
    least_pivot: float

    @classmethod
    def within(
        cls, scratch: Scratch, n: int, dtype: torch.dtype, least_pivot: float = 0.0
    ) -> Factor:
        """The factor that starts the scratch."""
        rows = padded(n)
        packed, inverse = scratch.tensors(dtype, rows * (rows + _load._C.panel) // 2, rows)
        return cls(n, packed, inverse, least_pivot)

    @classmethod
    def of(
        cls, x: Points, reg: float, jitter: float, weight: Tensor | None, threads: int,
        scratch: Scratch,
    ) -> Factor | None:  # fmt: skip
        """Factors ``K + diag(reg / weight) + jitter I``; None where that fails."""
        n, width = x.u.shape
        place = cls.within(scratch, n, x.u.dtype)
        packed, inverse = place.packed, place.inverse
        ridge = None if weight is None else (reg / weight.double()).to(x.u.dtype).contiguous()
        shift = jitter if ridge is not None else reg + jitter
        native("laplace_gram_packed", x.u.dtype)(
            x.kernel.code, x.kernel.exponent, n, width, x.panels(threads).data_ptr(),
            address(ridge), shift, packed.data_ptr(), threads,
        )  # fmt: skip
        return cls._factored(n, packed, inverse, threads)

    @classmethod
    def of_matrix(cls, matrix: Tensor, shift: float, threads: int) -> Factor | None:
        """Factors the lower triangle of ``matrix`` plus ``shift`` on its diagonal."""
        n = matrix.shape[0]
        matrix = matrix if matrix.stride(1) == 1 or n <= 1 else matrix.contiguous()
        rows = padded(n)
        packed = matrix.new_empty(rows * (rows + _load._C.panel) // 2)
        native("cholesky_pack", matrix.dtype)(
            n, matrix.data_ptr(), max(matrix.stride(0), n), shift, packed.data_ptr(), threads
        )
        return cls._factored(n, packed, matrix.new_empty(rows), threads)

    @classmethod
    def _factored(cls, n: int, packed: Tensor, inverse: Tensor, threads: int) -> Factor | None:
        failed, least, greatest = native("cholesky_factor", packed.dtype)(
            n, packed.data_ptr(), inverse.data_ptr(), threads
        )
        # A pivot within rounding of the products that it is left over from means nothing.
        noise = torch.finfo(packed.dtype).eps * greatest
        return cls(n, packed, inverse, least) if failed == 0 and least > noise else None

    def solve(self, targets: Tensor) -> Tensor:
        """``A^-1 targets``, shape ``(n, c)``."""
        n, c = targets.shape
        rhs = targets.new_zeros(padded(n), row_length(c))
        rhs[:n, :c] = targets
        native("cholesky_solve", targets.dtype)(
            n, c, self.packed.data_ptr(), self.inverse.data_ptr(), rhs.data_ptr(), row_length(c)
        )
        return rhs[:n, :c].contiguous()
