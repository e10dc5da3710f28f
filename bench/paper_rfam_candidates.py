"""Every (reg, iteration) of a table's search, for tables whose figures differ from the published.

Validation halves have few rows, so many choices come out within one or two of them; where the
published figures are those of such a choice, the search explains the difference.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from paper_rfam import BANDWIDTH, FIGURES, ITERATIONS, REGS, Row, fold_figures, one_hot
from paper_rfam_report import success
from tables import Table

from normalign import _rfam_fit

KEYS = ("table", "alpha", "reg", "iteration")
COLUMNS = (*KEYS, "valid_right", "valid_rows", "test_acc", "success", "error")


def keys(name: str, alpha: float) -> list[Row]:
    """One for each choice that the search has."""
    base = {"table": name, "alpha": alpha}
    return [{**base, "reg": reg, "iteration": i} for reg in REGS for i in range(ITERATIONS)]


def work(table: Table, missing: list[Row]) -> Any:
    """Validation and test accuracy and attack success of each choice."""
    warnings.simplefilter("ignore", RuntimeWarning)
    X, y = torch.from_numpy(table.X).float(), torch.from_numpy(table.y)
    train, valid = (torch.from_numpy(rows) for rows in table.search)
    x, x_val = X[train].contiguous(), X[valid].contiguous()
    targets = one_hot(y[train], table.classes)
    for key in missing:
        right: list[int] = []

        def last(outputs: torch.Tensor, right: list[int] = right) -> float:
            right.append(int((outputs.argmax(1) == y[valid]).sum()))
            return float(len(right))  # so that the last machine is kept

        machine = _rfam_fit.fit(
            x,
            targets,
            alpha=key["alpha"],
            reg=key["reg"],
            bandwidth=BANDWIDTH,
            n_iter=key["iteration"] + 1,
            evaluate=last,
            x_val=x_val,
        ).machine
        folds = [
            fold_figures(table, X, y, k, machine.factor, key["reg"], "published")
            for k in range(len(table.folds))
        ]
        means = {name: float(np.mean([f[name] for f in folds])) for name in FIGURES[:4]}
        found = {"valid_right": right[-1], "valid_rows": len(valid)}
        yield {**key, **found, "test_acc": 100 * means["test_acc"], "success": success(means)}
