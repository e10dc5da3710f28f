"""Attacks and Jacobian measures of many kernel machines at once, on a GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from normalign import _pgd, _rfam_attack_cuda, _rfam_cuda
from normalign._jacobian_measures import jacobian_measures
from normalign._pgd import Settings
from normalign._rfam_batch import Machines
from normalign._rfam_tables import Array, Queries, padded


@dataclass
class Figures:
    """What attacks did to one machine; the lists follow the radii, ascending.

    Attributes as in ``normalign.RobustnessReport``, which attacks one machine at a time.
    """

    clean_accuracy: float
    eps: list[float]
    robust_accuracy: list[float]
    accuracy_at_result: list[float]
    attack_success_on_correct: list[float]
    zero_gradient_share: list[float]


def starts(
    x: Tensor, eps: Sequence[float], settings: Settings, generator: torch.Generator
) -> Array:
    """First iterates for each radius and restart, shape ``(E, m, d)``; drawn on the CPU.

    In the order of ``robustness_report``, whose published attack starts at the same points.
    """
    draws = [
        _pgd.first_iterate(x, torch.full_like(x[0], radius), settings, generator)
        for radius in eps
        for _ in range(settings.restarts)
    ]
    return torch.stack(draws).numpy().astype(np.float64)


def attacks(
    machines: Machines,
    points: Queries,
    eps: Sequence[float],
    settings: Settings,
    seeds: Sequence[int],
) -> list[Figures] | None:
    """Attacks every machine with every radius and restart: one launch.

    Args:
        machines: Classifiers.
        points: What to attack, with the true classes.
        eps: Radii.
        settings: The attack. Where the best iterate counts, every point is attacked with every
            radius, also where a smaller one has succeeded: the share of zero gradients is that of
            all points.
        seeds: From which each table's starts are drawn.

    Returns:
        None where a machine does not fit into the kernel's shared memory.
    """
    radii = sorted({float(radius) for radius in eps})
    tables, coef = machines.tables, machines.coef
    if not _rfam_attack_cuda.fits(machines.points, coef, tables.x.shape[2]):
        return None
    clean = _wrong(machines.outputs(points), points, machines.index)
    first = [
        starts(x, radii, settings, torch.Generator().manual_seed(seed))
        for x, seed in zip(points.raw, seeds, strict=True)
    ]
    d = tables.x.shape[2]
    sizes = np.repeat(radii, settings.restarts)[:, None] * np.ones(d)
    one_hot = [np.eye(coef.shape[2])[labels] for labels in points.expected]
    raw = [x.numpy().astype(np.float64) for x in points.raw]
    found = _rfam_attack_cuda.attack(
        machines.points, coef, tables.upload(tables.mean[machines.index]), machines.factor,
        tables.upload(padded(raw))[machines.table], tables.upload(padded(one_hot))[machines.table],
        tables.upload(padded(first))[machines.table], tables.upload(sizes),
        tables.upload(settings.step_size * sizes), length=machines.form[0],
        exponent=machines.form[1], iterations=settings.steps, loss=settings.loss,
        norm=settings.norm, select="margin" if settings.best_iterate else "last",
    )  # fmt: skip
    wrong = _wrong(found.outputs.transpose(1, 2), points, machines.index)  # (m, E) of each
    zeros = found.zero_gradients.cpu().numpy()
    results = []
    for b, t in enumerate(machines.index):
        of_radius = wrong[b].reshape(len(clean[b]), len(radii), settings.restarts).any(2)
        zero = zeros[b, :, : points.sizes[t]].reshape(len(radii), -1).mean(1) / settings.steps
        results.append(
            _figures(clean[b], radii, list(of_radius.T), [float(z) for z in zero], settings)
        )
    return results


def _wrong(outputs: Tensor, points: Queries, index: list[int]) -> list[Array]:
    """Where each machine's outputs ``(m, ..., c)`` miss the class, without the padding."""
    values = outputs.cpu().numpy()
    found = []
    for b, t in enumerate(index):
        own = values[b, : points.sizes[t]]
        label = points.expected[t].reshape(-1, *[1] * (own.ndim - 2))
        found.append((own.argmax(-1) != label) | np.isnan(own).any(-1))
    return found


def _figures(
    clean: Array, radii: list[float], wrong: list[Array], zeros: list[float], settings: Settings
) -> Figures:
    """Accuracies from what is wrong at the points themselves and at each radius."""

    def share(mask: Array) -> float:
        return float(mask.mean()) if len(mask) else math.nan

    figures = Figures(1.0 - share(clean), radii, [], [], [], zeros)
    turned = clean
    for found in wrong:
        result = turned | found if settings.best_iterate else found
        turned = turned | result
        figures.robust_accuracy.append(1.0 - share(turned))
        figures.accuracy_at_result.append(1.0 - share(result))
        figures.attack_success_on_correct.append(share(turned[~clean]))
    return figures


def measures(machines: Machines, x: Sequence[Tensor]) -> list[tuple[float, float]]:
    """Mean effective rank and normal alignment of each machine's Jacobians.

    Args:
        machines: The machines.
        x: Points of each table, shape ``(m, d)``, on the CPU.
    """
    tables = machines.tables
    u = _rfam_cuda.project_batch(tables.centred(x), machines.factor, machines.table)
    own_m = tables.pick(machines.index, [len(part) for part in x])
    slopes = _rfam_cuda.jacobian(
        u, machines.points, machines.coef, *machines.form, own_m=own_m, own_n=machines.own_n
    )
    (count, m, c, _), d = slopes.shape, tables.x.shape[2]
    slopes = slopes.flatten(1, 2) @ machines.factor.transpose(1, 2)
    jacobians = slopes.reshape(count * m, c, d)
    raw = tables.upload(padded([part.numpy().astype(np.float64) for part in x]))[machines.table]
    alignments, ranks = jacobian_measures(jacobians, raw.flatten(0, 1))
    means = torch.stack([ranks, alignments], 1).view(count, m, 2).nanmean(1).tolist()
    return [(rank, alignment) for rank, alignment in means]
