"""Sums of outer products of gradients on a GPU, for ``bench/device_check.py``."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor

from normalign import _rfam_agop_cuda, _rfam_cuda, reference

BANDWIDTH = 10.0


def _error(got: Tensor, exact: Tensor) -> float:
    return float((got - exact).abs().max() / exact.abs().max())


def rfam_agop(machine: Any, n: int, width: int, c: int) -> dict[str, Any]:
    """At n own points; up to 64 features both ways, to see whether the choice is right."""
    u = torch.randn(n, width, device=machine.device)
    coef = torch.randn(n, c, device=machine.device)

    def ours(rows: int = n) -> Tensor:
        few = u[:rows]
        return _rfam_agop_cuda.agop(few, few, coef[:rows], BANDWIDTH, 1.0)

    def definition(u: Tensor, coef: Tensor) -> Tensor:
        return u.shape[0] * reference.agop(u, u, coef, None, BANDWIDTH)

    row = {
        "case": f"agop n {n} width {width} classes {c}",
        "error": _error(ours(200), definition(u[:200].double(), coef[:200].double())),
        "seconds": machine.seconds(ours),
        "launches": machine.launches(ours),
    }
    if width <= 64:
        for way, few in (("kernel", 1 << 62), ("products", 0)):
            with mock.patch.object(_rfam_agop_cuda, "_FEW", few):
                row[f"{way}_error"] = _error(
                    ours(200), definition(u[:200].double(), coef[:200].double())
                )
                row[f"{way}_seconds"] = machine.seconds(ours)
                row[f"{way}_launches"] = machine.launches(ours)
    if n <= 5000:
        row["reference_seconds"] = machine.seconds(lambda: definition(u, coef), 0.1)
    return row


def rfam_agop_of_tables(machine: Any, count: int, n: int, width: int, c: int) -> dict[str, Any]:
    """Of many small problems at once, against gradients in memory and their product."""
    u = torch.randn(count, n, width, dtype=torch.float64, device=machine.device)
    coef = torch.randn(count, n, c, dtype=torch.float64, device=machine.device)

    def ours() -> Tensor:
        return _rfam_agop_cuda.agop(u, u, coef, BANDWIDTH, 1.0)

    def by_gradients() -> Tensor:
        g = _rfam_cuda.jacobian(u, u, coef, BANDWIDTH, 1.0).flatten(1, 2)
        return g.transpose(1, 2) @ g

    exact = [n * reference.agop(p, p, a, None, BANDWIDTH) for p, a in zip(u, coef, strict=True)]
    return {
        "case": f"agop of {count} tables, n {n} width {width} classes {c} float64",
        "error": _error(ours(), torch.stack(exact)),
        "seconds": machine.seconds(ours),
        "launches": machine.launches(ours),
        "gradients_seconds": machine.seconds(by_gradients),
        "gradients_launches": machine.launches(by_gradients),
    }
