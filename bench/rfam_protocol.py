"""The published protocol for a small table on a GPU, for several alphas at once.

The same search, folds and attacks as in ``paper_rfam.py``; every stage is one launch for all reg,
alpha, folds and radii, so their number does not grow with any of these.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from tables import Table

from normalign._pgd import Settings
from normalign._rfam_batch import fit, solve
from normalign._rfam_batch_attack import Figures, attacks, measures
from normalign._rfam_tables import Problem, Queries, Tables


@dataclasses.dataclass
class Outcome:
    """What one alpha gives: the choice on the validation half, and each fold's figures.

    Attributes:
        valid_acc: The best accuracy on the validation half.
        reg: Where it was reached first.
        iteration: Likewise.
        folds: Accuracies of each fold, clean and under attack.
        measures: Effective rank and normal alignment of each fold, where rows were given.
    """

    valid_acc: float
    reg: float
    iteration: int
    folds: list[Figures]
    measures: list[tuple[float, float]]


def run(
    table: Table,
    alphas: Sequence[float],
    settings: Settings,
    device: torch.device,
    *,
    regs: Sequence[float],
    bandwidth: float,
    iterations: int,
    eps: Sequence[float],
    measured: Sequence[torch.Tensor] | None = None,
) -> list[Outcome]:
    """The protocol of a table.

    Args:
        table: A classification table, with its splits.
        alphas: Shares of the identity in the first M.
        settings: The attack.
        device: Where to compute.
        regs: Ridges, in the order of preference.
        bandwidth: Length of the kernel.
        iterations: Solves of each fit.
        eps: Radii of the attack.
        measured: Training rows of each fold whose Jacobians are measured.
    """
    X, y = torch.from_numpy(table.X).float(), torch.from_numpy(table.y)
    targets = torch.nn.functional.one_hot(y, table.classes).float()
    train, valid = table.search
    half = Tables([X[train]], [targets[train]], device)
    problems = [Problem(0, alpha, reg) for alpha in alphas for reg in regs]
    found = fit(
        half, problems, bandwidth=bandwidth, n_iter=iterations,
        valid=Queries(half, [X[valid]], [table.y[valid]]),
    )  # fmt: skip
    best = [max(row) for row in found.scores]
    chosen = []
    for a in range(len(alphas)):
        own = range(a * len(regs), (a + 1) * len(regs))
        chosen.append(max(own, key=lambda b: best[b]))  # the first one on ties

    folds = Tables(
        [X[rows] for rows, _ in table.folds], [targets[rows] for rows, _ in table.folds], device
    )
    index = [k for _ in alphas for k in range(len(table.folds))]
    of_problem = [b for b in chosen for _ in table.folds]
    factor = found.machines.factor[half.upload(np.array(of_problem))]
    machines = solve(folds, index, factor, [problems[b].reg for b in of_problem], bandwidth)
    test = Queries(
        folds, [X[rows] for _, rows in table.folds], [table.y[rows] for _, rows in table.folds]
    )
    figures = attacks(machines, test, eps, settings, range(len(table.folds)))
    if figures is None:
        msg = f"{table.name} does not fit into one attack"
        raise ValueError(msg)
    measured_by_fold = measures(machines, list(measured)) if measured is not None else []
    outcomes = []
    for a, b in enumerate(chosen):
        part = slice(a * len(table.folds), (a + 1) * len(table.folds))
        outcomes.append(
            Outcome(
                best[b], problems[b].reg, found.best_iter[b], figures[part], measured_by_fold[part]
            )
        )
    return outcomes


def random_table(n: int, d: int, classes: int, seed: int = 0) -> Table:
    """A made-up table whose classes depend on a few features, split as the published ones are."""
    generator = np.random.default_rng(seed)
    X = generator.standard_normal((n, d))
    scores = X[:, : min(d, 4)] @ generator.standard_normal((min(d, 4), classes))
    y = (scores + 0.3 * generator.standard_normal((n, classes))).argmax(1)
    order = generator.permutation(n)
    parts = np.array_split(order, 4)
    folds = [(np.concatenate([p for p in parts if p is not part]), part) for part in parts]
    return Table("made up", X, y, classes, (order[: n // 2], order[n // 2 :]), folds)
