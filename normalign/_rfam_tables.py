"""Tables of one batch of RFAM problems, padded to common sizes, on the device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from normalign._rfam_factor import initial_factor

Array = NDArray[Any]


@dataclass(frozen=True)
class Problem:
    """One fit: which table, the share of the identity in its first M, its ridge."""

    table: int
    alpha: float
    reg: float


def padded(parts: Sequence[Array], fill: float = 0) -> Array:
    """The arrays one after another, each filled up to the largest size."""
    shape = np.max([part.shape for part in parts], axis=0)
    out = np.full((len(parts), *shape), fill, dtype=parts[0].dtype)
    for b, part in enumerate(parts):
        inside: Any = (b, *(slice(size) for size in part.shape))
        out[inside] = part
    return out


def _wide(x: Tensor) -> Array:
    array: Array = x.numpy().astype(np.float64)
    return array


class Tables:
    """Training points of some tables.

    Args:
        x: Points of each, shape ``(n, d)``, on the CPU.
        targets: Targets of each, shape ``(n, c)``, on the CPU; one c for all, because an output
            that only fills up could be the greatest.
        device: Where to compute.
    """

    def __init__(self, x: Sequence[Tensor], targets: Sequence[Tensor], device: torch.device):
        for name, parts in (("X", x), ("y", targets)):
            if not all(np.isfinite(part.numpy()).all() for part in parts):
                msg = f"{name} must be finite, got NaN or infinity"
                raise ValueError(msg)
        columns = {part.shape[1] for part in targets}
        if len(columns) != 1:
            msg = f"y must have as many columns in every table, got {sorted(columns)}"
            raise ValueError(msg)
        self.raw = list(x)
        self.device = device
        self.sizes = [len(part) for part in x]
        self.features = [part.shape[1] for part in x]
        # Rounded to the dtype of the points, as for one table.
        means = [
            part.numpy().mean(0, dtype=np.float64).astype(part.numpy().dtype).astype(np.float64)
            for part in x
        ]
        self.mean = padded(means)
        self.x = self.centred(x)  # (t, n, d)
        self.targets = self.upload(padded([_wide(part).T for part in targets]))  # (t, c, n)

    def upload(self, array: Array) -> Tensor:
        """A copy on the device; the host does not wait for what the device is doing."""
        # Memory that is not pinned has been read when the call returns.
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device, non_blocking=True)

    def centred(self, x: Sequence[Tensor]) -> Tensor:
        """Points of each table less its mean, shape ``(t, m, d)``."""
        parts = [_wide(p) - mean[: p.shape[1]] for p, mean in zip(x, self.mean, strict=True)]
        return self.upload(padded(parts))

    def pick(self, index: Sequence[int], values: Sequence[int]) -> Tensor:
        """A number of each problem's table, int32."""
        return self.upload(np.array([values[t] for t in index], dtype=np.int32))

    def first_factors(self, problems: Sequence[Problem]) -> tuple[Tensor, Tensor]:
        """The first factor of each problem, shape ``(B, d, r)``, and their ranks, int32."""
        made: dict[tuple[int, float], Array] = {}
        for p in problems:
            if (p.table, p.alpha) not in made:
                factor = initial_factor(self.raw[p.table], p.alpha)[1]
                made[p.table, p.alpha] = factor.numpy()
        parts = [made[p.table, p.alpha] for p in problems]
        factors = padded(parts)
        rows = self.x.shape[2] - factors.shape[1]
        factors = np.pad(factors, ((0, 0), (0, rows), (0, 0)))
        ranks = np.array([part.shape[1] for part in parts], dtype=np.int32)
        return self.upload(factors), self.upload(ranks)


class Queries:
    """Further points of the same tables, with what is expected there.

    Args:
        tables: The tables.
        x: Points of each, shape ``(m, d)``, on the CPU.
        expected: Class of each point, shape ``(m,)``, integers; or targets, ``(m, c)``.
    """

    def __init__(self, tables: Tables, x: Sequence[Tensor], expected: Sequence[Array]):
        self.raw = list(x)
        self.expected = list(expected)
        self.sizes = [len(part) for part in x]
        self.x = tables.centred(x)
        self.classes = expected[0].ndim == 1
        # No output's place is -1: points that only fill up are never right.
        self.filled = tables.upload(padded(self.expected, -1 if self.classes else 0))

    def sums(self, outputs: Tensor, index: Tensor) -> Tensor:
        """How many are right, or the sum of squared errors, of outputs ``(..., B, m, c)``.

        Returns:
            Shape ``(..., B)``.
        """
        expected = self.filled[index]
        if self.classes:
            return (outputs.argmax(-1) == expected).sum(-1)
        return (outputs - expected).square_().sum((-2, -1))

    def score(self, table: int, value: float) -> float:
        """Accuracy, or R^2 over all targets, from such a sum."""
        if self.classes:
            return value / self.sizes[table] if self.sizes[table] else math.nan
        expected = self.expected[table]
        spread = float(np.square(expected - expected.mean(axis=0)).sum())
        return 1.0 - value / spread if spread > 0 else -value
