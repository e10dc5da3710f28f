"""What an attack works on: model, inputs and labels, checked and turned into tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from normalign import _pgd
from normalign._checks import check_choice, check_count, check_float, check_positive, check_shape
from normalign._pgd import PUBLISHED, STRONG, Outcome, Settings, Victim
from normalign._rfam_base import RFAMBase, _available, _moved
from normalign._rfam_fit import Machine
from normalign._rfam_pgd import pgd
from normalign.rfam import RFAMClassifier

ATTACKS = {"published": PUBLISHED, "strong": STRONG}


class MachineVictim(Victim):
    """A kernel machine, through its analytic input gradient; rows in blocks of bounded memory."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        row_bytes = max(1, len(machine.points)) * machine.points.element_size()
        self.block = max(1, 2**26 // row_bytes)

    def outputs(self, x: Tensor) -> Tensor:
        """Outputs ``(B, c)``."""
        return self.machine.decision(x, self.block)

    def gradient(self, x: Tensor, cotangent: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Outputs, and ``J(x)^T cotangent(outputs)``."""
        outputs = self.outputs(x)
        parts = zip(x.split(self.block), cotangent(outputs).split(self.block), strict=True)
        gradients = [self.machine.input_gradient(rows, pulled) for rows, pulled in parts]
        return outputs, torch.cat(gradients) if gradients else torch.zeros_like(x)

    def attack(
        self,
        x: Tensor,
        labels: Tensor,
        start: Tensor,
        scale: Tensor,
        settings: Settings,
        bounds: tuple[Tensor | None, Tensor | None],
    ) -> tuple[Tensor, Tensor, int, int] | None:
        """All steps in one call."""
        if any(b is not None and b.dim() > 1 for b in bounds):
            return None  # bounds of each row
        lower, upper = (None if b is None else b.expand(x.shape[1]) for b in bounds)
        one_hot = torch.nn.functional.one_hot(labels, self.machine.dual_coef.shape[1])
        found = [
            pgd(
                self.machine,
                x[rows],
                one_hot[rows].to(x.dtype),
                eps=scale,
                step=settings.step_size * scale,
                iters=settings.steps,
                loss=settings.loss,
                norm=settings.norm,
                start=start[rows],
                lower=lower,
                upper=upper,
                select="margin" if settings.best_iterate else "last",
            )
            for rows in torch.arange(len(x)).split(self.block)
        ]
        zeros = sum(int(attack.zero_gradients.sum()) for attack in found)
        points, outputs = ([getattr(a, part) for a in found] for part in ("x", "outputs"))
        return torch.cat(points), torch.cat(outputs), zeros, settings.steps * len(x)


def attack_settings(attack: str | Settings | dict[str, Any]) -> Settings:
    if isinstance(attack, dict):
        names = tuple(field.name for field in dataclasses.fields(Settings))
        for name in attack:
            check_choice("an attack setting", name, names)
        attack = dataclasses.replace(STRONG, **attack)
    elif isinstance(attack, str):
        check_choice("attack", attack, tuple(ATTACKS))
        attack = ATTACKS[attack]
    check_choice("norm", attack.norm, _pgd.NORMS)
    check_choice("loss", attack.loss, _pgd.LOSSES)
    check_count("steps", attack.steps)
    check_count("restarts", attack.restarts)
    check_positive("step_size", attack.step_size)
    return attack


@dataclasses.dataclass
class Problem:
    """A model with its inputs and labels, checked and as tensors."""

    victim: Victim
    model: Any
    x: Tensor
    labels: Tensor
    machine: Machine | None
    as_numpy: bool


def _labels(values: Any, count: int) -> Tensor:
    labels = torch.as_tensor(values)
    check_shape("y", labels, (count,))
    if labels.is_floating_point() or labels.dtype == torch.bool or labels.is_complex():
        msg = f"y must hold integer class indices, got {labels.dtype}"
        raise TypeError(msg)
    return labels.long()


def as_problem(model: Any, x: Any, y: Any) -> Problem:
    if isinstance(model, RFAMBase):
        if not isinstance(model, RFAMClassifier):
            msg = f"an attack needs a classifier, got {type(model).__name__}"
            raise TypeError(msg)
        # Fitted state rests on the CPU; the attack runs where the estimator computes.
        device = model.device if _available(model.device) else "cpu"
        machine = _moved(model.machine_, device)
        values = x.detach().cpu().numpy() if isinstance(x, Tensor) else x
        rows = torch.from_numpy(np.array(model._check_rows(values)))
        found = np.asarray(y.cpu().numpy() if isinstance(y, Tensor) else y)
        codes = np.searchsorted(model.classes_, found)
        codes = np.minimum(codes, len(model.classes_) - 1)
        unknown = model.classes_[codes] != found
        if found.shape != (len(rows),):
            msg = f"y must have shape ({len(rows)},), got {found.shape}"
            raise ValueError(msg)
        if unknown.any():
            msg = f"y must hold labels of the fitted model, got {found[unknown][0]!r}"
            raise ValueError(msg)
        labels = torch.from_numpy(codes)
        as_numpy = not isinstance(x, Tensor)
        rows, labels = rows.to(device, machine.mean.dtype), labels.to(device)
        return Problem(MachineVictim(machine), model, rows, labels, machine, as_numpy)
    if isinstance(model, Machine):
        check_float("x", x)
        labels = _labels(y, len(x)).to(x.device)
        return Problem(MachineVictim(model), model, x.detach(), labels, model, False)
    if not callable(model):
        msg = f"model must be a fitted RFAMClassifier or a callable, got {type(model).__name__}"
        raise TypeError(msg)
    check_float("x", x)
    labels = _labels(y, len(x)).to(x.device)
    return Problem(_pgd.TorchVictim(model), model, x.detach(), labels, None, False)


def check_labels(labels: Tensor, classes: int) -> None:
    if len(labels) and not (0 <= int(labels.min()) and int(labels.max()) < classes):
        low, high = int(labels.min()), int(labels.max())
        msg = f"y must lie in 0..{classes - 1} for {classes} outputs, got {low}..{high}"
        raise ValueError(msg)


def region(x: Tensor, eps: float | ArrayLike | Tensor, frozen: Any) -> Tensor:
    """Half-widths that broadcast to one input, shape of ``x[0]``; frozen coordinates have 0."""
    scale = torch.as_tensor(eps, dtype=x.dtype, device=x.device)
    if not bool(((scale >= 0) & (scale < torch.inf)).all()):
        msg = f"eps must be non-negative and finite, got {eps!r}"
        raise ValueError(msg)
    try:
        scale = torch.broadcast_to(scale, x.shape[1:]).clone()
    except RuntimeError as error:
        msg = f"eps must be a number or have shape {tuple(x.shape[1:])}, got {tuple(scale.shape)}"
        raise ValueError(msg) from error
    if frozen is not None:
        mask = torch.as_tensor(frozen, device=x.device)
        if mask.dtype == torch.bool:
            check_shape("frozen", mask, tuple(x.shape[1:]))
            scale[mask] = 0.0
        else:
            scale.view(-1)[mask.long()] = 0.0
    return scale


def _bounds(x: Tensor, bounds: tuple[Any, Any] | None) -> tuple[Tensor | None, Tensor | None]:
    if bounds is None:
        return None, None
    low, high = (
        None if b is None else torch.as_tensor(b, dtype=x.dtype, device=x.device) for b in bounds
    )
    below = low is not None and bool((x < low).any())
    if below or (high is not None and bool((x > high).any())):
        msg = "x must lie within bounds before the attack"
        raise ValueError(msg)
    return low, high


def as_generator(random_state: int | torch.Generator | None) -> torch.Generator:
    if isinstance(random_state, torch.Generator):
        return random_state
    generator = torch.Generator()
    if random_state is None:
        generator.seed()
    else:
        generator.manual_seed(random_state)
    return generator


def attack_rows(
    problem: Problem,
    rows: Tensor | None,
    scale: Tensor,
    settings: Settings,
    generator: torch.Generator,
    bounds: tuple[Any, Any] | None,
    batch_size: int | None,
) -> Outcome:
    """Runs the attack on some rows, in batches."""
    x = problem.x if rows is None else problem.x[rows]
    labels = problem.labels if rows is None else problem.labels[rows]
    limits = _bounds(x, bounds)
    outcomes = []
    with _pgd.evaluation_mode(problem.model):
        if len(x):
            check_labels(labels, problem.victim.outputs(x[:1]).shape[1])
        size = batch_size or max(1, len(x))
        for part, target in zip(x.split(size), labels.split(size), strict=True):
            outcomes.append(
                _pgd.run(problem.victim, part, target, scale, settings, generator, limits)
            )
    return Outcome(
        torch.cat([o.x for o in outcomes]),
        torch.cat([o.wrong for o in outcomes]),
        sum(o.zero_gradients for o in outcomes),
        sum(o.gradients for o in outcomes),
    )
