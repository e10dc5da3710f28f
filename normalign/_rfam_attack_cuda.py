"""Projected gradient ascent on kernel machines on a GPU: a whole attack is one launch.

Many machines, radii and points go together: all folds and strengths of a table, say.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from normalign import _gpu
from normalign._rfam_machine import Machine

# Numbered as in csrc/rfam_attack.h.
_LOSSES = ("mse", "margin", "cross_entropy")
_SELECT = ("last", "loss", "margin")


@dataclass
class Found:
    """What attacks on P machines with E radii at m points each found.

    Attributes:
        points: Attacked points, shape ``(P, E, m, d)``.
        value: Their loss, or their margin with ``select="margin"``, shape ``(P, E, m)``.
        outputs: The machine's outputs there, shape ``(P, E, m, c)``.
        zero_gradients: In how many steps the gradient was 0, shape ``(P, E, m)``.
    """

    points: Tensor
    value: Tensor
    outputs: Tensor
    zero_gradients: Tensor


def fits(z: Tensor, coef: Tensor, d: int) -> bool:
    """Whether machines with points ``(P, n, r)`` and ``coef`` ``(P, n, c)`` take the kernel.

    Two rows of kernel values have to fit into a block's shared memory: on a GPU with 227 KiB of it,
    n up to about 14,000 in float32, half of that in float64.
    """
    n, r = z.shape[1:]
    module = _gpu.module(z.device)
    return bool(
        module.attack_fits(n, coef.shape[2], d, r, z.element_size(), _gpu.where(z.device)[0])
    )


def serves(machine: Machine) -> bool:
    """Whether this machine takes the kernel."""
    return fits(machine.points[None], machine.dual_coef[None], machine.mean.shape[0])


def attack(
    z: Tensor,
    coef: Tensor,
    mean: Tensor,
    factor: Tensor,
    x: Tensor,
    targets: Tensor,
    start: Tensor,
    eps: Tensor,
    step: Tensor,
    *,
    length: float,
    exponent: float,
    iterations: int,
    loss: str = "mse",
    norm: str = "linf",
    select: str = "last",
    lower: Tensor | None = None,
    upper: Tensor | None = None,
) -> Found:
    """Attacks every point of every machine with every radius.

    Machines of different sizes go together when padded with zeros: rows of ``z`` whose ``coef`` is
    0 and columns of ``factor`` that are 0 change nothing; results of padded rows of ``x`` mean
    nothing. Lengths that differ go into ``z`` and ``factor``, both divided by them.

    Args:
        z: Training points in factor space, shape ``(P, n, r)``; its dtype is the computation's.
        coef: Coefficients, shape ``(P, n, c)``.
        mean: Centres, shape ``(P, d)``.
        factor: Factors of M, shape ``(P, d, r)``; read in float64, like ``mean``, because points
            enter factor space as the training points did.
        x: Clean points, shape ``(P, m, d)``.
        targets: Targets, shape ``(P, m, c)``; the true class is where a row is largest.
        start: First iterates, shape ``(P, E, m, d)``.
        eps: Radii, shape ``(E, d)``: the region is ``x + eps z`` with ``|z| <= 1`` in the norm.
        step: Lengths of a step, shape ``(E, d)``.
        length: L of ``exp(-(D / L)^q)``.
        exponent: q.
        iterations: Steps.
        loss: ``"mse"``, ``"margin"`` or ``"cross_entropy"``.
        norm: ``"linf"``: signed steps. ``"l2"``: along ``eps * gradient``, normalised.
        select: ``"last"``, or ``"loss"`` and ``"margin"``: the iterate, start included, where that
            is largest.
        lower: Least allowed value of each feature, shape ``(d,)``.
        upper: Greatest allowed value.
    """
    dtype, device = z.dtype, z.device
    (count, n, r), (m, d), c, radii = z.shape, x.shape[1:], coef.shape[2], eps.shape[0]
    points = start.to(dtype).clone(memory_format=torch.contiguous_format)
    value = points.new_empty(count, radii, m)
    outputs = points.new_empty(count, radii, m, c)
    zero = torch.empty(count, radii, m, dtype=torch.int64, device=device)
    found = Found(points, value, outputs, zero)
    if min(count, radii, m) == 0:
        return found
    arrays = [
        z.transpose(1, 2).contiguous(), coef.to(dtype).transpose(1, 2).contiguous(),
        mean.double().contiguous(), factor.double().contiguous(),
        factor.to(dtype).transpose(1, 2).contiguous(), x.to(dtype).contiguous(),
        targets.to(dtype).contiguous(),
    ]  # fmt: skip
    eps, step = eps.to(dtype).contiguous(), step.to(dtype).contiguous()
    bounds = [b if b is None else b.to(dtype).expand(d).contiguous() for b in (lower, upper)]
    assert all(t is None or t.device == device for t in (*arrays, points, eps, step, *bounds))
    getattr(_gpu.module(device), f"attack_{_gpu.suffix(eps)}")(
        exponent, length, _LOSSES.index(loss), _SELECT.index(select), norm == "l2", iterations,
        [count, radii, m, n, c, d, r], [t.data_ptr() for t in arrays], eps.data_ptr(),
        step.data_ptr(), *(0 if b is None else b.data_ptr() for b in bounds),
        [points.data_ptr(), value.data_ptr(), outputs.data_ptr(), zero.data_ptr()],
        *_gpu.where(device),
    )  # fmt: skip
    return found


def attack_machine(
    machine: Machine,
    x: Tensor,
    targets: Tensor,
    start: Tensor,
    eps: float | Tensor,
    step: float | Tensor,
    *,
    iterations: int,
    loss: str,
    norm: str,
    select: str,
    lower: Tensor | None,
    upper: Tensor | None,
) -> Found:
    """``attack`` with one machine and one radius, as ``normalign._rfam_pgd.pgd`` takes them."""
    kernel, d = machine.packed.kernel, x.shape[1]

    def vector(number: float | Tensor) -> Tensor:
        return torch.as_tensor(number, dtype=machine.points.dtype, device=x.device).expand(1, d)

    return attack(
        machine.packed.u[None], machine.dual_coef[None], machine.mean[None], machine.factor[None],
        x[None], targets[None], start[None, None], vector(eps), vector(step),
        length=kernel.length, exponent=kernel.exponent, iterations=iterations, loss=loss,
        norm=norm, select=select, lower=lower, upper=upper,
    )  # fmt: skip
