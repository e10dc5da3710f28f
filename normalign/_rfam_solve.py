"""The kernel system ``(K + reg / w) a = y``: Cholesky, and a jitter ladder that says so."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor


def jitter_ladder(dtype: torch.dtype, diagonal: float) -> list[float]:
    """What to add to a diagonal, in turn, until a factorisation succeeds: 0 first."""
    unit = torch.finfo(dtype).eps * max(diagonal, 1.0)
    return [0.0] + [unit * 10.0**k for k in range(7)]


def warn_jitter(jitter: float, reg: float) -> None:
    """The one warning of a ladder that had to climb."""
    msg = (
        f"the kernel matrix plus reg = {reg:g} is not positive definite in working precision; "
        f"{jitter:.3g} was added to its diagonal. Duplicate rows or a tiny reg lead to this."
    )
    warnings.warn(msg, RuntimeWarning, stacklevel=4)


def solve_gram(
    gram: Tensor, targets: Tensor, reg: float, weight: Tensor | None = None
) -> tuple[Tensor, float]:
    """Solves ``(gram + reg diag(1 / weight)) a = targets``.

    Returns:
        ``a``, shape ``(n, c)``, and the jitter that was needed.
    """
    ridge = gram.new_full((gram.shape[0],), reg) if weight is None else reg / weight.to(gram.dtype)
    diagonal = float(gram.diagonal().max()) if gram.numel() else 1.0
    for jitter in jitter_ladder(gram.dtype, diagonal):
        system = gram.clone()
        system.diagonal().add_(ridge + jitter)
        factor, info = torch.linalg.cholesky_ex(system)
        if int(info) == 0:
            if jitter:
                warn_jitter(jitter, reg)
            return torch.cholesky_solve(targets, factor), jitter
    msg = "the kernel matrix could not be factored; does the input hold NaN or infinity?"
    raise ValueError(msg)
