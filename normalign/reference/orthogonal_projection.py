"""Reference for ``orthogonal_projection``."""

from __future__ import annotations

import torch
from torch import Tensor


def orthogonal_projection(g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """``r = g - (g.x/|x|^2) x`` and ``|r|^2`` for each row; a row with ``x = 0`` is unchanged."""
    gx = (g * x).sum(-1, keepdim=True)  # (n, 1)
    xx = (x * x).sum(-1, keepdim=True)  # (n, 1)
    zero = xx == 0
    scale = torch.where(zero, torch.zeros_like(gx), gx / torch.where(zero, torch.ones_like(xx), xx))
    r = g - scale * x  # (n, d)
    return r, (r * r).sum(-1)
