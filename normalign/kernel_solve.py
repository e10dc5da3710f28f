"""Kernel ridge systems by Cholesky."""

from __future__ import annotations

import torch
from torch import Tensor

from normalign import _dispatch
from normalign._checks import check_float, check_like, check_shape
from normalign._feature_space import runs_natively
from normalign._rfam_kernels import Factor
from normalign._rfam_solve import FAILED, jitter_ladder, solve_gram, warn_jitter


def kernel_solve(
    gram: Tensor, targets: Tensor, reg: float = 0.0, *, dtype: torch.dtype | None = None
) -> tuple[Tensor, float]:
    """Solves ``(K + reg I) a = y`` for a symmetric positive semi-definite kernel matrix.

    A copy of the lower triangle, ``n^2 / 2`` elements, is factored in place; ``gram`` is left as it
    is. Where that fails, growing amounts are added to the diagonal until it succeeds, with one
    warning that says how much: the ridge is never changed silently.

    Args:
        gram: ``K``, shape ``(n, n)``; only its lower triangle is read natively.
        targets: ``y``, shape ``(n, c)``; dtype and device of ``gram``.
        reg: Ridge, not negative.
        dtype: Precision of the computation, e.g. ``torch.float64``; by default that of ``gram``.

    Returns:
        ``a``, shape ``(n, c)``, in the dtype of ``gram``, and the amount that had to be added to
        the diagonal beside ``reg``: 0.0 as a rule.

    Raises:
        ValueError: shapes disagree, ``reg`` is negative, or no amount helps (NaN, for example).
        TypeError: the dtype is unsupported, or differs between inputs.

    Warns:
        RuntimeWarning: something had to be added to the diagonal.
    """
    check_float("gram", gram)
    check_float("targets", targets)
    check_shape("gram", gram, (None, gram.shape[0]))
    check_shape("targets", targets, (gram.shape[0], None))
    check_like("targets", targets, "gram", gram)
    if not reg >= 0:
        msg = f"reg must not be negative, got {reg}"
        raise ValueError(msg)
    system, right = gram.to(dtype or gram.dtype), targets.to(dtype or gram.dtype)
    if targets.numel() == 0:
        return targets.clone(), 0.0
    if not runs_natively(system):
        coef, jitter = solve_gram(system, right, reg)
        return coef.to(gram.dtype), jitter
    threads = _dispatch.threads()
    scale = max(1.0, float(system.diagonal().max()))
    for step in jitter_ladder(system.dtype):
        factor = Factor.of_matrix(system, reg + step * scale, threads)
        if factor is not None:
            if step:
                warn_jitter(step * scale, reg)
            return factor.solve(right).to(gram.dtype), step * scale
    raise ValueError(FAILED)
