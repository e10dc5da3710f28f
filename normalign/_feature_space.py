"""Inputs of the kernel ops: checks, and the way into factor space."""

from __future__ import annotations

import torch
from torch import Tensor

from normalign import _dispatch, _gpu
from normalign._checks import check_float, check_like, check_shape
from normalign._rfam_factor import psd_factor
from normalign._rfam_kernels import Kernel, Points
from normalign._rfam_machine import project

# Scaled coordinates beyond this lose so many digits in float32 that K does not keep 1e-6.
WIDE = 16.0
# Squares of distances leave the range of float32 where lengths are not between these. The CPU's
# kernels take coordinates in units of the length; those of a GPU take them as they are.
_LENGTHS = (1e-12, 1e12)


def runs_natively(*tensors: Tensor, cuda_kernel: bool = False) -> bool:
    """Whether our kernels serve: those of the CPU, or on a GPU where the operator has one.

    Raises:
        RuntimeError: native was asked for and is not available.
    """
    if _gpu.serves(tensors[0].device) and cuda_kernel:
        if _dispatch.gpu_module(*tensors) is not None:
            return True
    on_cpu = all(t.device.type == "cpu" for t in tensors)
    return _dispatch.reference_reason(*tensors) is None and on_cpu


def check_points(x: Tensor, z: Tensor, feature_matrix: Tensor | None) -> None:
    """Shapes ``(m, d)``, ``(n, d)``, ``(d, d)``, one dtype and device."""
    check_float("x", x)
    check_float("z", z)
    check_shape("x", x, (None, None))
    if z.ndim == 2 and z.shape[1] != x.shape[1]:
        msg = f"z must have {x.shape[1]} columns to match x, got {z.shape[1]}"
        raise ValueError(msg)
    check_shape("z", z, (None, x.shape[1]))
    check_like("z", z, "x", x)
    if feature_matrix is not None:
        check_float("feature_matrix", feature_matrix)
        check_shape("feature_matrix", feature_matrix, (x.shape[1], x.shape[1]))
        check_like("feature_matrix", feature_matrix, "x", x)


def check_coef(coef: Tensor, x: Tensor, z: Tensor) -> None:
    """A row of coefficients for each point of ``z``; dtype and device of ``x``."""
    check_float("coef", coef)
    check_shape("coef", coef, (z.shape[0], None))
    check_like("coef", coef, "x", x)


def factor_of(feature_matrix: Tensor | None, d: int, device: torch.device) -> Tensor:
    """``F`` with ``F F^T = M``, float64; the identity for None.

    Raises:
        ValueError: ``M`` is not positive semi-definite, to 1e-4 of its norm.
    """
    if feature_matrix is None:
        return torch.eye(d, dtype=torch.float64, device=device)
    matrix = feature_matrix.double()
    matrix = (matrix + matrix.T) / 2
    if not bool(torch.isfinite(matrix).all()):
        msg = "feature_matrix must be finite, got NaN or infinity"
        raise ValueError(msg)
    factor = psd_factor(matrix)
    if not bool((factor @ factor.T - matrix).norm() <= 1e-4 * matrix.norm()):
        msg = "feature_matrix must be positive semi-definite, got a negative eigenvalue"
        raise ValueError(msg)
    return factor


def centre_of(z: Tensor) -> Tensor:
    """A point in the middle of the finite values: subtracting it keeps float32 exact."""
    mean = z.mean(0) if z.shape[0] else z.new_zeros(z.shape[1])
    if bool(torch.isfinite(mean).all()):
        return mean
    values = torch.where(torch.isfinite(z), z, torch.nan)
    return torch.nanmean(values, 0).nan_to_num()


def _reach(u: Tensor) -> float:
    return float(torch.linalg.vector_norm(u, torch.inf)) if u.numel() else 0.0


def into_factor_space(
    x: Tensor, z: Tensor, factor: Tensor, kernel: Kernel
) -> tuple[Points, Points]:
    """``(x - centre) F`` and ``(z - centre) F``: float64 where float32 would not do.

    One object twice where x and z are one tensor.
    """
    mean, dtype = centre_of(z), x.dtype
    same = x is z
    u = project(x, mean, factor, dtype)
    v = u if same else project(z, mean, factor, dtype)
    extreme = _gpu.serves(x.device) and not _LENGTHS[0] <= kernel.length <= _LENGTHS[1]
    if dtype is torch.float32 and (extreme or any(_reach(t) * kernel.scale > WIDE for t in (u, v))):
        u = project(x, mean, factor, torch.float64)
        v = u if same else project(z, mean, factor, torch.float64)
    left = Points(u, kernel)
    return left, left if same else Points(v, kernel)
