"""What a kernel machine needs in memory, known before the n x n matrix is allocated."""

from __future__ import annotations

import math
import os
import re

from normalign import _dispatch, _load
from normalign._rfam_agop import agop_bytes
from normalign._rfam_kernels import padded

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
# Bytes that a fit takes however small it is: torch's and the libraries' own, and tables of ours.
LEAST = 1 << 18


def parse_bytes(limit: float | str) -> int:
    """Bytes of a limit given as a number or as text such as ``"8GB"``.

    Raises:
        ValueError: the text is not a number with one of the units, or the limit isn't positive.
    """
    if isinstance(limit, str):
        match = re.fullmatch(r"\s*([0-9.]+)\s*([KMGT]?)B?\s*", limit, re.IGNORECASE)
        if match is None:
            msg = f'memory_limit must be bytes or text such as "8GB", got {limit!r}'
            raise ValueError(msg)
        limit = float(match[1]) * UNITS[match[2].upper()]
    if not limit > 0:
        msg = f"memory_limit must be positive, got {limit!r}"
        raise ValueError(msg)
    return int(limit)


def available_memory() -> int | None:
    """Bytes that can be had without swapping; ``None`` where the system doesn't say."""
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def fit_bytes(rows: int, features: int, outputs: int, itemsize: int) -> int:
    """Peak bytes of a fit beyond the caller's data, one thread.

    By the kernels of the CPU: half of an ``n x n`` matrix (a whole one where the AGOP takes its
    Gram form), some arrays of the size of the data and of the targets, and ``d x d`` matrices. A
    float32 fit takes twice the matrix where only a factor in float64 will do: for duplicates with
    next to no ridge, or columns whose range float32 can't hold; and so where an AGOP in its Gram
    form loses too many digits, as it does where points are in narrow clusters.
    """
    n, d, c = rows, features, outputs
    r = min(n, d)
    # Mean and covariance, in float64; a rank below d takes an eigendecomposition.
    start = 8 * (n * d + (4 if n > d else 7) * d * d)
    small = 8 * d * r * (6 if n > d else 9)
    if _load.cpu_error is not None or _dispatch.implementation() == "reference":
        # Float64, with (n, n, c) and pieces of (n, n, d) arrays: an upper bound.
        return LEAST + start + 8 * ((8 + 8 * c) * n * n + 3 * min(n * n * d, 1 << 22))
    # Points in factor space, row-major and in panels, and coefficients: of the machine at work and,
    # where validation chooses, of the best one.
    machine = 2 * ((n + padded(n)) * r + n * c) * itemsize
    solve: int = _load._C.rfam_solve_workspace(n, d, r, c, 1, itemsize)
    return LEAST + max(start, small + machine + max(solve, agop_bytes(n, c, r, 1, itemsize)))


def rows_that_fit(limit: int, features: int, outputs: int, itemsize: int) -> int:
    """The most rows whose fit stays within ``limit`` bytes."""
    low, high = 0, math.isqrt(limit) + 1
    while low < high:
        middle = (low + high + 1) // 2
        if fit_bytes(middle, features, outputs, itemsize) <= limit:
            low = middle
        else:
            high = middle - 1
    return low


def check_memory(
    rows: int, features: int, outputs: int, itemsize: int, limit: float | str | None
) -> None:
    """Refuses a fit that would not fit, before anything large is allocated.

    Args:
        rows: Training rows.
        features: Columns.
        outputs: Classes or targets.
        itemsize: Bytes of one number, 4 or 8.
        limit: Bytes, or text such as ``"8GB"``; ``None`` is 90% of the memory available now.

    Raises:
        MemoryError: the estimate exceeds the limit; the message says what would fit.
    """
    if limit is not None:
        allowed, source = parse_bytes(limit), "memory_limit"
    else:
        available = available_memory()
        if available is None:
            return
        allowed, source = int(0.9 * available), "90% of the memory available"
    needed = fit_bytes(rows, features, outputs, itemsize)
    if needed <= allowed:
        return
    fits = rows_that_fit(allowed, features, outputs, itemsize)
    hints = [f"{fits:,} rows would fit"]
    if itemsize == 8:
        single = rows_that_fit(allowed, features, outputs, 4)
        hints.append(f'{min(single, rows):,} with dtype="float32"')
    msg = (
        f"a fit on {rows:,} rows in float{8 * itemsize} needs about {needed / 1e9:.3g} GB, more "
        f"than {allowed / 1e9:.3g} GB ({source}); {', or '.join(hints)}"
    )
    raise MemoryError(msg)
