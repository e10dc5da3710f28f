"""The AGOP of a kernel machine in factor space, in the exact form that is predicted fastest."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from normalign import _load, _rfam_agop_cuda, reference
from normalign._load import address
from normalign._rfam_kernels import Points, Scratch, native, padded, row_length

AGOP_METHODS = ("auto", "tiles", "streamed", "gram")


@lru_cache(maxsize=256)
def agop_method(m: int, n: int, c: int, width: int, square: bool, threads: int = 1) -> str:
    """The exact form that is predicted to be fastest."""
    if not square:
        return "streamed"
    costs = {name: _agop_cost(name, n, c, width, threads) for name in ("tiles", "streamed", "gram")}
    return min(costs, key=costs.__getitem__)


def _agop_cost(method: str, n: int, c: int, width: int, threads: int) -> float:
    """Predicted multiplications per pair of points.

    The factors were fitted to times of 230 shapes (n 100 to 3000, width 4 to 300, 1 to 30 classes)
    on one core with AVX-512: half of the predictions are within 5% of the time, nine tenths within
    15%, and the form chosen took more than 1.25 times the best one's time on one shape of them. 16
    stands for the root and the exponential of a weight.
    """
    rows = padded(n)
    outer, call = width * row_length(width) / rows, 3e6 / rows**2
    if method == "gram":
        # Beyond 12 MB the weights are read from memory again and again, which halves the speed.
        product = 0.6 * n * (2.0 if 4 * n * n > 12e6 else 1.0)
        return product + 60 + 0.3 * width + 3 * c + 6 * outer + call
    copies, share = (threads + 1, 0.5) if method == "tiles" else (1, 1.0)
    groups = _class_groups(n, c, width, copies)
    product = sum(row_length((last - first) * (width + 1)) for first, last in groups)
    weights = 1.15 * share * (width + 16) + call
    return len(groups) * weights + 1.07 * product + 1.8 * c * outer


def agop(
    x: Points,
    z: Points,
    coef: Tensor,
    threads: int,
    weight: Tensor | None = None,
    method: str = "auto",
    scratch: Scratch | None = None,
) -> Tensor:
    """``sum_i weight_i sum_k g_ik g_ik^T`` over the points ``x``, shape ``(r, r)``, float64.

    ``scratch`` is memory to work in.
    """
    kernel = x.kernel
    m, n, c, width = x.u.shape[0], z.u.shape[0], coef.shape[1], x.u.shape[1]
    if min(m, n, c, width) == 0:
        return x.u.new_zeros(width, width, dtype=torch.float64)
    if x.gpu:
        return _rfam_agop_cuda.agop(x.u, z.u, coef, kernel.length, kernel.exponent, weight)
    if x.reason is not None:
        total = m if weight is None else weight.sum()
        r = reference.agop(x.u, z.u, coef, None, kernel.length, kernel.exponent, weight)
        return r.double() * total
    if method == "auto":
        method = agop_method(m, n, c, width, x is z, threads)
    if method in ("tiles", "gram") and x is not z:
        msg = f"method={method!r} needs gradients at the machine's own points; use 'streamed'"
        raise ValueError(msg)
    size = float(coef.abs().max())
    if not size > 0:
        return x.u.new_zeros(width, width, dtype=torch.float64)
    if weight is not None:
        weight = weight.to(x.u.dtype).contiguous()
    r, scale = agop_scaled(x, z, coef, size, threads, weight, method, scratch or Scratch())
    return r * (scale * kernel.weight_scale) ** 2


def agop_scaled(
    x: Points, z: Points, coef: Tensor, size: float, threads: int, weight: Tensor | None,
    method: str, scratch: Scratch,
) -> tuple[Tensor, float]:  # fmt: skip
    """``agop`` up to a factor, by a native form; the factor without the kernel's ``weight_scale``.

    ``size`` is the largest coefficient, not 0; the weight has the dtype of the points.
    """
    scale = 1.0
    if not 1e-3 < size < 1e3:  # products of tiny or huge ones would leave the range of float32
        coef, scale = coef / size, size
    if method == "tiles":
        return _tiles(x, z, coef.contiguous(), threads, weight, scratch), scale
    if method == "streamed":
        return _streamed(x, z, coef.contiguous(), threads, weight, scratch), scale
    coef = coef.contiguous()
    r, error = _gram(x, z, coef, threads, weight, scratch)
    if x.u.dtype is torch.float64 or error <= 1e-5:
        return r, scale
    # By streams in float32 the error is about 1e-7 times the root of how much cancels, to which
    # this one is proportional. They need little memory, but may take long.
    (n, width), c = x.u.shape, coef.shape[1]
    streamed, gram = (_agop_cost(form, n, c, width, threads) for form in ("streamed", "gram"))
    if error < 1e-3 and streamed < 2 * gram:
        return _streamed(x, z, coef, threads, weight, scratch), scale
    exact = Points(x.u.double(), x.kernel)
    weight = None if weight is None else weight.double()
    return _gram(exact, exact, coef.double(), threads, weight, scratch)[0], scale


# Elements of the AGOP's arrays that are let be, however few the points.
SMALL = 1 << 18


@lru_cache(maxsize=256)
def _class_groups(n: int, c: int, width: int, copies: int) -> tuple[tuple[int, int], ...]:
    """The fewest ranges of classes whose arrays take little beside n^2 / 2, of equal length."""
    budget = max(n * n // 2, n * max(width + 1, 128), SMALL)
    rows = copies * padded(n)
    steps = (-(-c // ranges) for ranges in range(1, c + 1))
    step = next((s for s in steps if rows * row_length(s * (width + 1)) <= budget), 1)
    return tuple((k, min(c, k + step)) for k in range(0, c, step))


def agop_bytes(n: int, c: int, width: int, threads: int, itemsize: int) -> int:
    """What ``agop`` works in at a machine's own points."""
    if min(n, c, width) == 0:
        return 0
    panel: int = _load._C.panel
    rows, row = padded(n), row_length(width)
    method = agop_method(n, n, c, width, True, threads)
    if method == "gram":
        own = (panel + 1) * rows + (panel + width) * row
        return itemsize * (rows * (rows + 2 * c + row) + threads * own)
    groups = _class_groups(n, c, width, threads + 1 if method == "tiles" else 1)
    step = max(last - first for first, last in groups)
    sums = threads * (rows if method == "tiles" else panel)
    arrays = (rows + sums) * row_length(step * (width + 1))
    return itemsize * (arrays + threads * (panel * step + width) * row)


def _addresses(x: Points, scratch: Scratch, *counts: int) -> list[int]:
    """Places for arrays of so many elements, whole cache lines each, in the scratch."""
    size = x.u.element_size()
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + -(-count * size // 64) * 64)
    first = scratch.take(starts[-1])
    return [first + start for start in starts[:-1]]


def _tiles(
    x: Points, z: Points, coef: Tensor, threads: int, weight: Tensor | None, scratch: Scratch
) -> Tensor:
    n, width = x.u.shape
    totals = []
    for first, last in _class_groups(n, coef.shape[1], width, threads + 1):
        c, part = last - first, coef[:, first:last]
        row = row_length(c * (width + 1))
        values, sums, block = _addresses(
            x, scratch, padded(n) * row, threads * padded(n) * row,
            threads * (_load._C.panel * c + width) * row_length(width),
        )  # fmt: skip
        r = _sums(x, threads)
        native("agop_tiles", x.u.dtype)(
            x.kernel.code, x.kernel.exponent, n, c, width, x.panels(threads).data_ptr(),
            x.u.data_ptr(), part.data_ptr(), coef.stride(0), address(weight), values, sums,
            block, r.data_ptr(), threads,
        )  # fmt: skip
        totals.append(r)
    return _sum(totals)


def _streamed(
    x: Points, z: Points, coef: Tensor, threads: int, weight: Tensor | None, scratch: Scratch
) -> Tensor:
    m, n, width = x.u.shape[0], z.u.shape[0], x.u.shape[1]
    totals = []
    for first, last in _class_groups(n, coef.shape[1], width, 1):
        c, part = last - first, coef[:, first:last]
        row = row_length(c * (width + 1))
        values, sums, block = _addresses(
            x, scratch, padded(n) * row, threads * _load._C.panel * row,
            threads * (_load._C.panel * c + width) * row_length(width),
        )  # fmt: skip
        r = _sums(x, threads)
        native("agop_streamed", x.u.dtype)(
            x.kernel.code, x.kernel.exponent, m, n, c, width, x.panels(threads).data_ptr(),
            x.u.data_ptr(), z.panels(threads).data_ptr(), z.u.data_ptr(), part.data_ptr(),
            coef.stride(0), address(weight), values, sums, block, r.data_ptr(), threads,
        )  # fmt: skip
        totals.append(r)
    return _sum(totals)


def _sums(x: Points, threads: int) -> Tensor:
    """Where each thread adds up its ``(r, r)``."""
    width = x.u.shape[1]
    shape = (width, width) if threads == 1 else (threads, width, width)
    return torch.empty(shape, dtype=torch.float64)


def _sum(parts: list[Tensor]) -> Tensor:
    """What ranges of classes and threads add up to, ``(r, r)``."""
    parts = [part if part.dim() == 2 else part.sum(0) for part in parts]
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


def _gram(
    x: Points, z: Points, coef: Tensor, threads: int, weight: Tensor | None, scratch: Scratch
) -> tuple[Tensor, float]:
    """The matrix, and an estimate of its relative error."""
    n, width = x.u.shape
    c, rows = coef.shape[1], padded(n)
    own = (_load._C.panel + 1) * rows + (_load._C.panel + width) * row_length(width)
    w, lanes, points, workspace = _addresses(
        x, scratch, rows * rows, 2 * c * rows, rows * row_length(width), threads * own
    )
    r = x.u.new_empty(threads, width, width, dtype=torch.float64)
    squares = native("agop_gram", x.u.dtype)(
        x.kernel.code, x.kernel.exponent, n, c, width, x.panels(threads).data_ptr(),
        x.u.data_ptr(), coef.data_ptr(), coef.stride(0), address(weight), w, lanes, points,
        workspace, r.data_ptr(), threads,
    )  # fmt: skip
    # The form adds up squares of what cancels within a gradient, most where points are close.
    unit = torch.finfo(x.u.dtype).eps / 2
    return r[0], 0.4 * unit * math.sqrt(n) * squares / max(float(r[0].trace()), 1e-300)
