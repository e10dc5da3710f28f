"""The device check's case for a whole table of the published protocol."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import paper_rfam
import rfam_protocol
import torch
from baselines import rfam as authors
from tables import Table

from normalign._pgd import PUBLISHED

if TYPE_CHECKING:
    from device_check import Machine

ALPHAS = (0.0, 1.0)


def rfam_table_protocol(machine: Machine, n: int, d: int, c: int) -> dict[str, Any]:
    """Search, folds and attacks for both alphas, against the authors' algorithm on this device.

    ``error`` is the largest difference between the folds' accuracies here and on the CPU, one fit
    after another: a multiple of one test point, usually 0.
    """
    n = 48 if machine.emulated else n
    table = rfam_protocol.random_table(n, d, c)

    def ours(table: Table = table) -> list[rfam_protocol.Outcome]:
        return rfam_protocol.run(
            table, ALPHAS, PUBLISHED, machine.device, regs=paper_rfam.REGS,
            bandwidth=paper_rfam.BANDWIDTH, iterations=paper_rfam.ITERATIONS, eps=paper_rfam.EPS,
        )  # fmt: skip

    x, y = torch.from_numpy(table.X).float(), torch.from_numpy(table.y)
    found, differences, agree = ours(), [], 0
    with machine.host():
        for alpha, outcome in zip(ALPHAS, found, strict=True):
            best, factor = paper_rfam.search(table, x, y, alpha)
            agree += (outcome.reg, outcome.iteration) == (best["reg"], best["iteration"])
            for k, own in enumerate(outcome.folds):
                want = paper_rfam.fold_figures(table, x, y, k, factor, best["reg"], "published")
                differences.append(abs(own.clean_accuracy - want["test_acc"]))
    device = machine.device
    split = tuple(torch.from_numpy(rows).to(device) for rows in table.search)
    folds = [tuple(torch.from_numpy(rows).to(device) for rows in fold) for fold in table.folds]
    x, y = x.to(device), y.to(device)

    def theirs() -> None:
        for alpha in ALPHAS:
            authors.protocol(x, y, c, split, folds, alpha)

    row: dict[str, Any] = {
        "case": f"RFAM protocol n {n} d {d} classes {c}, two alphas",
        "error": max(differences),
        "same_choice": f"{agree} of {len(ALPHAS)}",
        "launches": machine.launches(ours),
        "seconds": machine.seconds(ours),
        "authors_seconds": machine.seconds(theirs, 0.1),
    }
    if n <= 500:  # tens of thousands of events
        row["authors_launches"] = machine.launches(theirs)
        # A copy of a column is given up in the first update; that starts nothing more.
        copied = dataclasses.replace(table, X=np.column_stack((table.X, table.X[:, 0])))
        row["launches_losing_rank"] = machine.launches(lambda: ours(copied))
    row["authors_over_ours"] = row["authors_seconds"] / row["seconds"]
    return row
