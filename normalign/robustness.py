"""How easily a classifier is led astray: attacks, a report over eps, and a certificate."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from normalign import _pgd
from normalign._attack_input import (
    Problem,
    as_generator,
    as_problem,
    attack_rows,
    attack_settings,
    check_labels,
    region,
)
from normalign._certificate import certified_distance, unit_distance
from normalign._checks import check_choice, check_count
from normalign._jacobian_measures import jacobian_measures
from normalign._pgd import Settings, Victim
from normalign._rfam_base import _moved
from normalign._rfam_machine import Machine
from normalign._robustness_report import RobustnessReport
from normalign.rfam import RFAMClassifier

__all__ = ["RobustnessReport", "certified_radius", "pgd_attack", "robustness_report"]

Array = NDArray[Any]


def pgd_attack(
    model: Any,
    x: Any,
    y: Any,
    *,
    eps: float | ArrayLike | Tensor,
    norm: str = "linf",
    loss: str = "margin",
    steps: int = 40,
    step_size: float = 0.1,
    restarts: int = 1,
    random_start: bool = True,
    best_iterate: bool = True,
    bounds: tuple[Any, Any] | None = None,
    frozen: Any = None,
    batch_size: int | None = None,
    random_state: int | torch.Generator | None = 0,
) -> Any:
    """Projected gradient ascent on a classifier's loss, within ``eps`` of each input.

    Steps ``z <- P(z + step_size * direction(grad))`` in coordinates ``x + eps * z``, with ``P``
    the projection to ``|z| <= 1``. The direction is the gradient's sign (``linf``) or the
    normalised gradient (``l2``). Gradients are analytic for RFAM and come from autograd for any
    other model, which is run in eval mode and left as it was.

    Args:
        model: A fitted ``RFAMClassifier``, or a callable from tensors ``(B, ...)`` to outputs
            ``(B, c)``, such as an ``nn.Module``.
        x: Inputs, shape ``(B, ...)``; an array or DataFrame for an RFAM model, else a tensor.
        y: Labels, shape ``(B,)``: an RFAM model's own labels, else class indices.
        eps: Radius; one number, or one per feature (0 freezes it). With ``l2`` per-feature radii
            are the half-axes of an ellipsoid.
        norm: ``"linf"`` or ``"l2"``.
        loss: ``"margin"`` (best other output minus the label's), ``"cross_entropy"``, or
            ``"mse"`` to the one-hot label.
        steps: Gradient steps.
        step_size: Length of a step as a share of ``eps``.
        restarts: Independent starts; a row that is misclassified is left alone from then on.
        random_start: Start at a uniformly drawn point of the region; else at the input.
        best_iterate: Return, of all points visited (the input first), the first that is
            misclassified, else the one with the largest loss. Without it the last point is
            returned, which may well be classified correctly although an earlier one was not.
        bounds: Least and largest allowed value, each None, a number, or one per feature. The
            input itself must lie within.
        frozen: Features that must not move: a boolean mask of one input's shape, or indices.
        batch_size: Rows attacked at once; ``None`` takes all.
        random_state: Seed of the starts, or a CPU generator; torch's global state isn't used.

    Returns:
        Adversarial inputs, as ``x``: an array for array or DataFrame input, else a tensor.

    Raises:
        ValueError: a shape, label or setting is out of range, or ``x`` violates ``bounds``.
        TypeError: the model is no classifier, or ``y`` holds no class indices.
    """
    settings = attack_settings(
        dataclasses.asdict(
            Settings(norm, loss, steps, step_size, restarts, random_start, best_iterate)
        )
    )
    problem = as_problem(model, x, y)
    if batch_size is not None:
        check_count("batch_size", batch_size)
    scale = region(problem.x, eps, frozen)
    outcome = attack_rows(
        problem, None, scale, settings, as_generator(random_state), bounds, batch_size
    )
    if problem.as_numpy:
        return outcome.x.cpu().numpy()
    return outcome.x.to(x.device)


def certified_radius(
    model: RFAMClassifier, x: ArrayLike, y: ArrayLike, *, norm: str = "linf"
) -> Array:
    """A lower bound of the distance to the nearest misclassified input, for Laplace machines.

    No attack, however strong, finds a misclassified input closer than this. The bound lives in
    the metric of M, ``|x' - x|_M`` (proof in ``normalign._certificate.certified_distance``), and
    is carried over by ``|x' - x|_M <= c |x' - x|`` with the smallest known ``c`` for the norm. It
    is a proof, not an estimate, and therefore far below what attacks need in practice.

    Args:
        model: A fitted classifier with ``kernel="laplace"``.
        x: Inputs, shape ``(m, d)``.
        y: Labels, shape ``(m,)``.
        norm: ``"linf"`` or ``"l2"``.

    Returns:
        Shape ``(m,)``, float64; 0 for a misclassified row.

    Raises:
        ValueError: another kernel, or bad shapes.
        TypeError: the model is not an RFAM classifier.
    """
    check_choice("norm", norm, _pgd.NORMS)
    problem = as_problem(model, x, y)
    if problem.machine is None:
        msg = f"a certificate needs an RFAMClassifier, got {type(model).__name__}"
        raise TypeError(msg)
    machine, distance = _certified_distance(problem.machine, problem)
    ones = torch.ones(problem.x.shape[1], dtype=torch.float64)
    unit = unit_distance(machine.factor, ones, norm)
    return np.asarray((distance / unit).numpy()) if unit > 0 else _keeps(distance)


def _certified_distance(machine: Machine, problem: Problem) -> tuple[Machine, Tensor]:
    """Computed on the CPU, in float64; with the machine there."""
    machine = _moved(machine, "cpu")
    return machine, certified_distance(machine, problem.x.cpu(), problem.labels.cpu())


def _keeps(distance: Tensor) -> Array:
    """Where M is 0 no input has any effect: what is right stays right."""
    return np.where(distance.numpy() > 0, np.inf, 0.0)


def robustness_report(
    model: Any,
    x: Any,
    y: Any,
    *,
    eps: Sequence[float] = (0.1, 1.0, 2.0),
    attack: str | Settings | dict[str, Any] = "strong",
    bounds: tuple[Any, Any] | None = None,
    frozen: Any = None,
    measures: bool = True,
    certify: bool | None = None,
    batch_size: int | None = None,
    random_state: int | torch.Generator | None = 0,
) -> RobustnessReport:
    """Accuracy under attack over a range of radii, with what is needed to trust the figures.

    Robust accuracy never rises with eps, by construction: an input that some radius turned stays
    turned at every larger one, whose region holds the same point. At eps 0 it is the clean
    accuracy.

    Args:
        model: A fitted ``RFAMClassifier``, or a callable from tensors to outputs ``(B, c)``.
        x: Inputs; see ``pgd_attack``.
        y: Labels; see ``pgd_attack``.
        eps: Radii, non-negative; 0 is added.
        attack: ``"strong"`` (margin loss, 40 steps, 2 restarts, best iterate), ``"published"``
            (the paper's table: squared error, 20 steps of eps / 10 from a random start, the last
            point counts), or a dictionary of changes to the strong one: ``norm``, ``loss``,
            ``steps``, ``step_size``, ``restarts``, ``random_start``, ``best_iterate``.
        bounds: Least and largest allowed values.
        frozen: Features that must not move.
        measures: Computes normal alignment and effective rank, from the Jacobians at ``x``.
        certify: Computes the certified accuracy; ``None`` does so for RFAM with the Laplace
            kernel.
        batch_size: Rows handled at once.
        random_state: Seed of the random starts.

    Returns:
        The report; ``print`` shows a table, ``plot`` draws the curve.

    Raises:
        ValueError: a shape, label, radius or setting is out of range, or there are no rows.
        TypeError: the model is no classifier.
    """
    settings = attack_settings(attack)
    problem = as_problem(model, x, y)
    count = len(problem.x)
    if count == 0:
        msg = "x must have at least one row, got none"
        raise ValueError(msg)
    generator = as_generator(random_state)
    radii = sorted({0.0, *map(float, eps)})
    with _pgd.evaluation_mode(problem.model):
        outputs = [problem.victim.outputs(part) for part in problem.x.split(batch_size or count)]
    check_labels(problem.labels, outputs[0].shape[1])
    wrong = _pgd.misclassified(torch.cat(outputs), problem.labels)
    clean = 1.0 - _share(wrong)
    turned = wrong.clone()
    robust, at_result, on_correct, zeros = [], [], [], []
    for radius in radii:
        scale = region(problem.x, radius, frozen)
        if radius == 0.0:
            result_wrong, zero = wrong, math.nan
        elif settings.best_iterate:  # what is turned already stays so: attack the rest
            rest = torch.nonzero(~turned)[:, 0]
            result_wrong, zero = turned.clone(), math.nan
            if len(rest):
                found = attack_rows(problem, rest, scale, settings, generator, bounds, batch_size)
                result_wrong[rest] = found.wrong
                zero = found.zero_gradients / max(found.gradients, 1)
        else:
            found = attack_rows(problem, None, scale, settings, generator, bounds, batch_size)
            result_wrong, zero = found.wrong, found.zero_gradients / max(found.gradients, 1)
        turned = turned | result_wrong
        robust.append(1.0 - _share(turned))
        at_result.append(1.0 - _share(result_wrong))
        on_correct.append(_share(turned[~wrong]))
        zeros.append(zero)
    alignment = rank = None
    if measures:
        alignment, rank = _measures(problem, batch_size)
    certified = _certified(problem, wrong, radii, settings.norm, frozen, certify)
    return RobustnessReport(
        rows=count,
        clean_accuracy=clean,
        eps=radii,
        robust_accuracy=robust,
        accuracy_at_result=at_result,
        attack_success_published=[
            (clean - value) / clean if clean > 0 else math.nan for value in at_result
        ],
        attack_success_on_correct=on_correct,
        zero_gradient_share=zeros,
        normal_alignment=alignment,
        effective_rank=rank,
        certified_accuracy=certified,
        settings=settings,
    )


def _share(mask: Tensor) -> float:
    return float(mask.double().mean()) if len(mask) else math.nan


def _measures(problem: Problem, batch_size: int | None) -> tuple[float, float]:
    """Mean normal alignment and effective rank; rows with a zero Jacobian are left out."""
    measured = []
    with _pgd.evaluation_mode(problem.model):
        for rows in problem.x.split(batch_size or 64):
            if problem.machine is not None:
                jacobians = problem.machine.jacobian(rows)
            else:
                jacobians = _autograd_jacobians(problem.victim, rows)
            measured.append(torch.stack(jacobian_measures(jacobians, rows.flatten(1))))
    alignment, rank = torch.cat(measured, 1).nanmean(1).tolist()
    return alignment, rank


def _autograd_jacobians(victim: Victim, x: Tensor) -> Tensor:
    """One vector-Jacobian product per output, shape ``(B, c, d)``."""
    classes = victim.outputs(x[:1]).shape[1]
    rows = []
    for k in range(classes):

        def unit(outputs: Tensor, k: int = k) -> Tensor:
            cotangent = torch.zeros_like(outputs)
            cotangent[:, k] = 1.0
            return cotangent

        rows.append(victim.gradient(x, unit)[1].flatten(1))
    return torch.stack(rows, dim=1)


def _certified(
    problem: Problem,
    wrong: Tensor,
    radii: list[float],
    norm: str,
    frozen: Any,
    certify: bool | None,
) -> list[float] | None:
    laplace = problem.machine is not None and problem.machine.kernel in ("laplace", 1.0)
    if certify is None:
        certify = laplace
    if not certify:
        return None
    if problem.machine is None or not laplace:
        msg = 'certify needs an RFAMClassifier with kernel="laplace"'
        raise ValueError(msg)
    machine, distance = _certified_distance(problem.machine, problem)
    shares, right = [], ~wrong.cpu()
    for radius in radii:
        scale = region(problem.x, radius, frozen).cpu()
        reached = unit_distance(machine.factor, scale, norm)
        shares.append(_share(right & ((distance > reached) | (radius == 0.0))))
    return shares
