"""Projected gradient ascent on the inputs of a kernel machine, with its analytic gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from normalign import _dispatch, _load, _rfam_attack_cuda
from normalign._checks import check_choice, check_count, check_shape
from normalign._rfam_kernels import machine_tuple, native
from normalign._rfam_machine import Machine, on_cpu_kernels

LOSSES = ("mse", "margin", "cross_entropy")
NORMS = ("linf", "l2")
SELECT = ("last", "loss", "margin")


@dataclass
class Attack:
    """What an attack found.

    Attributes:
        x: Attacked points, shape ``(m, d)``.
        value: What ``select`` maximises at ``x``, shape ``(m,)``; with ``"last"``, the loss.
        outputs: Decision values at ``x``, shape ``(m, c)``.
        zero_gradients: In how many of the steps each point's gradient was 0, shape ``(m,)``.
            A kernel that underflows, or a start on a training point, reads as robustness.
    """

    x: Tensor
    value: Tensor
    outputs: Tensor
    zero_gradients: Tensor


def attack_loss(f: Tensor, targets: Tensor, loss: str) -> Tensor:
    """The loss of each row, shape ``(m,)``, from decision values and targets ``(m, c)``.

    ``mse`` is the squared distance to the target row; ``margin`` the largest other output minus
    that of the true class (positive where misclassified); ``cross_entropy`` is of the softmax.
    The true class is where the target row is largest.
    """
    if loss == "mse":
        return (f - targets).square().sum(1)
    label = targets.argmax(1, keepdim=True)
    own = f.gather(1, label).squeeze(1)
    if loss == "cross_entropy":
        return f.logsumexp(1) - own
    return f.scatter(1, label, -torch.inf).amax(1) - own


def loss_cotangent(f: Tensor, targets: Tensor, loss: str) -> Tensor:
    """The gradient of ``attack_loss`` in ``f``, shape ``(m, c)``, up to a positive factor."""
    if loss == "mse":
        return f - targets
    label = targets.argmax(1, keepdim=True)
    if loss == "cross_entropy":
        v = f.softmax(1)
    else:
        other = f.scatter(1, label, -torch.inf).argmax(1, keepdim=True)
        v = torch.zeros_like(f).scatter(1, other, 1.0)
    return v.scatter_add(1, label, torch.full_like(f, -1.0))


def pgd(
    machine: Machine,
    x: Tensor,
    targets: Tensor,
    *,
    eps: float | Tensor,
    step: float | Tensor,
    iters: int,
    loss: str = "mse",
    norm: str = "linf",
    start: Tensor | None = None,
    lower: Tensor | None = None,
    upper: Tensor | None = None,
    select: str = "last",
) -> Attack:
    """Maximises a loss of ``machine`` over a ball around each row of ``x``.

    Args:
        machine: The kernel machine.
        x: Clean points, shape ``(m, d)``.
        targets: One-hot labels or regression targets, shape ``(m, c)``.
        eps: Radius, or one for each feature, shape ``(d,)``: the region is ``x + eps z`` with
            ``|z| <= 1`` in the norm. A feature with radius 0 is frozen.
        step: Length of a step; like ``eps``.
        iters: Number of steps.
        loss: ``"mse"``, ``"margin"`` or ``"cross_entropy"``.
        norm: ``"linf"`` (signed steps) or ``"l2"`` (along ``eps * gradient``, normalised).
        start: First iterate, shape ``(m, d)``; ``x`` if None.
        lower: Least allowed value of each feature, shape ``(d,)``.
        upper: Greatest allowed value of each feature.
        select: ``"last"`` returns the last iterate; ``"loss"`` and ``"margin"`` the one, start
            included, where that is largest.
    """
    check_choice("loss", loss, LOSSES)
    check_choice("norm", norm, NORMS)
    check_choice("select", select, SELECT)
    check_count("iters", iters, least=0)
    check_shape("x", x, (None, machine.mean.shape[0]))
    check_shape("targets", targets, (x.shape[0], machine.dual_coef.shape[1]))
    if start is not None:
        check_shape("start", start, tuple(x.shape))
    current = (x if start is None else start).to(x.dtype, copy=True)
    if on_cpu_kernels(x, machine.points):
        bounds = (lower, upper)
        return _native(machine, x, targets, current, eps, step, iters, loss, norm, bounds, select)
    if machine.packed.gpu and _rfam_attack_cuda.serves(machine):
        found = _rfam_attack_cuda.attack_machine(
            machine, x, targets, current, eps, step, iterations=iters, loss=loss, norm=norm,
            lower=lower, upper=upper, select=select,
        )  # fmt: skip
        results = found.points, found.value, found.outputs, found.zero_gradients
        moved, value, outputs, zero = (result[0, 0] for result in results)
        return Attack(moved.to(x.dtype), value.to(x.dtype), outputs.to(x.dtype), zero)
    value = x.new_full((x.shape[0],), -torch.inf)
    best = current.clone()
    outputs = x.new_full(targets.shape, torch.nan)
    zero = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
    for iteration in range(iters + 1):
        f = machine.decision(current)
        reached = attack_loss(f, targets, "margin" if select == "margin" else loss)
        better = (reached > value) | (select == "last")
        value = torch.where(better, reached, value)
        # Where nothing is better (NaN, a single class), the start is the result.
        better |= iteration == 0
        best = torch.where(better.unsqueeze(1), current, best)
        outputs = torch.where(better.unsqueeze(1), f, outputs)
        if iteration == iters:
            break
        g = machine.input_gradient(current, loss_cotangent(f, targets, loss))
        zero += (g == 0).all(1)
        if norm == "linf":
            move = current + step * g.sign() - x
            current = x + torch.clamp(move, -eps, eps)  # type: ignore[arg-type]
        else:
            radius = torch.as_tensor(eps, dtype=x.dtype, device=x.device).expand(x.shape[1])
            g = radius * g
            length = g.norm(dim=1, keepdim=True)
            move = current + step * g / torch.where(length > 0, length, 1.0) - x
            size = torch.where(radius > 0, move / radius, 0.0).norm(dim=1, keepdim=True)
            current = x + torch.where(radius > 0, move / size.clamp(min=1.0), 0.0)
        if lower is not None:
            current = torch.maximum(current, lower)
        if upper is not None:
            current = torch.minimum(current, upper)
    return Attack(best, value, outputs, zero)


def _native(
    machine: Machine,
    x: Tensor,
    targets: Tensor,
    current: Tensor,
    eps: float | Tensor,
    step: float | Tensor,
    iters: int,
    loss: str,
    norm: str,
    bounds: tuple[Tensor | None, Tensor | None],
    select: str,
) -> Attack:
    """The whole attack in one call."""
    dtype, (m, d) = machine.points.dtype, x.shape
    c, threads = machine.dual_coef.shape[1], _dispatch.threads()
    clean, targets = x.to(dtype).contiguous(), targets.to(dtype).contiguous()
    current = current.to(dtype).contiguous()
    mean, factor = machine.projection
    coef = machine.dual_coef.contiguous()
    # One for each feature, or none and a number for all.
    vectors = [
        torch.as_tensor(v, dtype=dtype).expand(d).contiguous() if isinstance(v, Tensor) else None
        for v in (eps, step, *bounds)
    ]
    numbers = [0.0 if isinstance(v, Tensor) else float(v) for v in (eps, step)]
    value, outputs = clean.new_empty(m), clean.new_empty(m, c)
    zero = torch.empty(m, dtype=torch.int64)
    if m:
        size = _load._C.rfam_attack_workspace(machine.points.shape[0], c, d, factor.shape[1])
        workspace = clean.new_empty(threads * size)
        eps_at, step_at, *bounds_at = (0 if v is None else v.data_ptr() for v in vectors)
        native("rfam_attack", dtype)(
            machine_tuple(machine.packed, coef, threads, mean, factor), LOSSES.index(loss),
            SELECT.index(select), norm == "l2", iters, eps_at, step_at, *numbers, *bounds_at, m,
            clean.data_ptr(), targets.data_ptr(), current.data_ptr(), value.data_ptr(),
            outputs.data_ptr(), zero.data_ptr(), workspace.data_ptr(), threads,
        )  # fmt: skip
    return Attack(current.to(x.dtype), value.to(x.dtype), outputs.to(x.dtype), zero)
