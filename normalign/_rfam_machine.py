"""A kernel machine with fixed features: what one solve of RFAM gives."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from normalign import _dispatch, _gpu, _load, _rfam_agop, _rfam_kernels
from normalign._rfam_kernels import Points, machine_sizes, make_kernel, native, rows_apart


@dataclass
class Machine:
    """``f(x) = sum_i K(x, x_i) a_i`` with ``K = exp(-(D / L)^q)`` under ``M = F F^T``.

    Attributes:
        mean: Centre that is subtracted from every input, shape ``(d,)``.
        factor: ``F``, shape ``(d, r)``, float64.
        points: Training points in factor space, ``(x - mean) F``, shape ``(n, r)``. Their dtype is
            that of the computation: float64 also for float32 data whose range demands it.
        dual_coef: ``a``, shape ``(n, c)``.
        bandwidth: ``L``.
        kernel: ``"laplace"``, ``"gaussian"``, or the exponent q.
        jitter: What the solve had to add to the diagonal; 0 as a rule.
    """

    mean: Tensor
    factor: Tensor
    points: Tensor
    dual_coef: Tensor
    bandwidth: float
    kernel: str | float = "laplace"
    jitter: float = 0.0
    _packed: Points | None = field(default=None, repr=False, compare=False)
    _cast: tuple[Tensor, Tensor] | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def feature_matrix(self) -> Tensor:
        """``M``, shape ``(d, d)``, float64."""
        return self.factor @ self.factor.T

    @property
    def packed(self) -> Points:
        """The training points as kernels want them; made once."""
        if self._packed is None:
            self._packed = Points(self.points, make_kernel(self.kernel, self.bandwidth))
        return self._packed

    @property
    def projection(self) -> tuple[Tensor, Tensor]:
        """Mean and factor in the dtype of the computation, contiguous; made once."""
        if self._cast is None:
            dtype = self.points.dtype
            self._cast = self.mean.to(dtype).contiguous(), self.factor.to(dtype).contiguous()
        return self._cast

    def project(self, x: Tensor) -> Points:
        """``(x - mean) F``, shape ``(m, r)``."""
        u = project(x, self.mean, self.factor, self.points.dtype)
        return Points(u, self.packed.kernel)

    def decision(self, x: Tensor, chunk: int | None = None) -> Tensor:
        """``f(x)``, shape ``(m, c)``; ``chunk`` rows at a time."""
        if chunk is None or x.shape[0] <= chunk:
            return self._outputs(x)
        return torch.cat([self._outputs(rows) for rows in x.split(chunk)])

    def _outputs(self, x: Tensor) -> Tensor:
        z, threads, (n, c) = self.packed, _dispatch.threads(), self.dual_coef.shape
        if min(n, c, x.shape[0]) == 0 or not on_cpu_kernels(x, self.points):
            return _rfam_kernels.matvec(self.project(x), z, self.dual_coef, threads).to(x.dtype)
        dtype, m, (d, r) = self.points.dtype, x.shape[0], self.factor.shape
        rows, mean = rows_apart(x.to(dtype)), self.mean.to(dtype).contiguous()
        factor, coef = self.factor.contiguous(), self.dual_coef.contiguous()
        out = rows.new_empty(m, c)
        size = _load._C.rfam_predict_workspace(m, d, r, c, threads, dtype.itemsize)
        workspace = torch.empty(size, dtype=torch.uint8)
        native("rfam_predict", dtype)(
            (*machine_sizes(z.kernel, n, d, r, c), mean.data_ptr(), factor.data_ptr()), m,
            rows.data_ptr(), rows.stride(0), z.panels(threads).data_ptr(), coef.data_ptr(),
            out.data_ptr(), workspace.data_ptr(), threads,
        )  # fmt: skip
        return out if dtype is x.dtype else out.to(x.dtype)

    def input_gradient(self, x: Tensor, cotangent: Tensor) -> Tensor:
        """Gradient of ``sum_k cotangent_ik f_k(x_i)``, shape ``(m, d)``.

        A training point at distance 0 contributes 0: there the kernel has no gradient.
        """
        g = _rfam_kernels.gradient(
            self.project(x), self.packed, self.dual_coef,
            cotangent.to(self.dual_coef.dtype), _dispatch.threads(),
        )  # fmt: skip
        return (g @ self.factor.to(g.dtype).T).to(x.dtype)

    def jacobian(self, x: Tensor) -> Tensor:
        """Gradients of every output, shape ``(m, c, d)``."""
        g = _rfam_kernels.jacobian(
            self.project(x), self.packed, self.dual_coef, _dispatch.threads()
        )
        return (g @ self.factor.to(g.dtype).T).to(x.dtype)

    def agop(self, x: Tensor | None = None, weight: Tensor | None = None) -> Tensor:
        """Mean of ``sum_k g_k g_k^T`` over ``x``, or over the training points: ``(d, d)``."""
        u = self.packed if x is None else self.project(x)
        r = _rfam_agop.agop(u, self.packed, self.dual_coef, _dispatch.threads(), weight)
        count = u.u.shape[0] if weight is None else float(weight.sum())
        return self.factor @ (r / count) @ self.factor.T


def on_cpu_kernels(*tensors: Tensor) -> bool:
    """Whether the CPU's kernels take these tensors."""
    for tensor in tensors:
        if tensor.device.type != "cpu":
            return False
    return not _gpu.emulating and _dispatch.reference_reason(*tensors) is None


def project(x: Tensor, mean: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """``(x - mean) F`` in ``dtype``, shape ``(m, r)``.

    Equal rows of ``x`` give equal results, wherever they stand and whatever stands beside them: a
    Laplace kernel's gradient jumps at distance 0, so that rounding which differs by place, as a
    matrix product's does, would give two copies of a point a unit vector between them.
    """
    if on_cpu_kernels(x):
        return _project_native(x.to(dtype), mean.to(dtype), factor.to(dtype))
    mean, factor = mean.double(), factor.double()
    if dtype == torch.float64:  # one column at a time: every row sums in the same order
        out = x.new_zeros(x.shape[0], factor.shape[1], dtype=dtype)
        for k in range(x.shape[1]):
            out += (x[:, k : k + 1].double() - mean[k]) * factor[k]
        return out
    # What differs by place is 1e-16 here, and the rounding to 1e-7 takes it away.
    blocks = [((rows.double() - mean) @ factor).to(dtype) for rows in x.split(8192)]
    return torch.cat(blocks)


def _project_native(x: Tensor, mean: Tensor, factor: Tensor) -> Tensor:
    x = x if x.stride(1) == 1 else x.contiguous()
    mean, factor = mean.contiguous(), factor.contiguous()
    (m, d), r, threads = x.shape, factor.shape[1], _dispatch.threads()
    u = x.new_empty(m, r)
    if u.numel():
        workspace = x.new_empty(threads * _load._C.panel * (d + r))
        native("rfam_project", x.dtype)(
            m, d, r, x.data_ptr(), x.stride(0), mean.data_ptr(), factor.data_ptr(), u.data_ptr(),
            workspace.data_ptr(), threads,
        )  # fmt: skip
    return u
