"""Gram matrices in float32, tf32 and bf16 for ``device_check.py``: times, and errors in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from normalign import _gpu, _rfam_cuda, reference


class Machine(Protocol):
    """The part of ``device_check.Machine`` that is used here."""

    emulated: bool
    device: torch.device

    def seconds(self, call: Callable[[], Any], budget: float = 0.3) -> float:
        """Median time of a call."""

    def launches(self, call: Callable[[], Any]) -> int:
        """Kernels that a call starts."""


def gram_precision(machine: Machine, n: int, width: int, clustered: bool) -> dict[str, Any]:
    """K between n points: far apart, or in clusters where many pairs are near."""
    n = 150 if machine.emulated else n
    u = torch.randn(n, width, device=machine.device)
    if clustered:  # neighbours in memory are neighbours in space, so whole tiles are near
        centres = torch.randn(-(-n // 100), width, device=machine.device)
        u = 3 * centres.repeat_interleave(100, 0)[:n] + 0.3 * u
    length = width**0.5
    few = u[:: max(1, n // 500)]
    exact = reference.laplace_gram(few.double(), few.double(), None, length)
    kind = "clustered" if clustered else "normal"
    row: dict[str, Any] = {
        "case": f"gram precision n {n} width {width} {kind}",
        "tensor_cores": _gpu.tensor_cores(machine.device),
    }
    for precision in (None, "tf32", "bf16"):
        name = f"{precision}_" if precision else ""
        few_got = _rfam_cuda.gram(few, few, length, 1.0, precision=precision)
        row[f"{name}error"] = float((few_got.double() - exact).abs().max())
        row[f"{name}seconds"] = machine.seconds(
            lambda p=precision: _rfam_cuda.gram(u, u, length, 1.0, precision=p)
        )
    row["launches"] = machine.launches(lambda: _rfam_cuda.gram(u, u, length, 1.0, precision="tf32"))
    row["gb_per_s"] = 4 * n * n / row["seconds"] / 1e9
    return row
