"""All folds and settings of a table at once, for a sweep on a GPU."""

from __future__ import annotations

import dataclasses
import itertools
import time
import warnings
from collections.abc import Iterator

import numpy as np
import torch

from normalign import _dispatch
from normalign._rfam_batch import MOST_POINTS, Fitted, fit
from normalign._rfam_batch_attack import attacks, measures
from normalign._rfam_memory import check_memory
from normalign._rfam_tables import Problem, Queries, Tables
from normalign._sweep_runner import Row, Task, run_one
from normalign._sweep_task import (
    MEASURED_ROWS,
    Common,
    FoldTask,
    features,
    result_row,
    run_fold,
    split_rows,
    target_values,
)

# Bytes of the largest arrays of one batch.
_BYTES = 1 << 31


@dataclasses.dataclass(frozen=True)
class TableTask:
    """The folds of a table; the key columns tell which, and alpha, reg, bandwidth and kernel."""

    folds: dict[int, FoldTask]


def applies(common: Common, rows: int) -> bool:
    """Whether a sweep with these settings, and so many rows to fit, can take whole tables."""
    some = torch.empty(0, device=common.device)
    return common.tol is None and rows <= MOST_POINTS and _dispatch.gpu_module(some) is not None


def run(payload: FoldTask | TableTask, missing: list[Row]) -> Iterator[Row]:
    """The work of a sweep's task; yields one row for each key."""
    if isinstance(payload, FoldTask):
        yield from run_fold(payload, missing)
        return
    for keys in _batches(payload, missing):
        try:
            yield from _run_batch(payload, keys)
        except Exception:  # one fold may be at fault: by itself each keeps its own error
            for fold, alpha in sorted({(key["fold"], key["alpha"]) for key in keys}):
                own = [key for key in keys if (key["fold"], key["alpha"]) == (fold, alpha)]
                task = payload.folds[fold]
                yield from run_one(run_fold, Task(own, task), own, torch.get_num_threads())


def _batches(task: TableTask, missing: list[Row]) -> Iterator[list[Row]]:
    """Keys that go together: one bandwidth and kernel, and matrices that fit."""
    folds = list(task.folds.values())
    rows = max(len(fold.train) for fold in folds)
    outputs = max(fold.classes or fold.y.shape[1] for fold in folds)
    features = folds[0].X.shape[1]
    # Kernel matrices, the gradients of every output at every point, and factors of M.
    columns = outputs * features
    most = max(rows * rows, rows * columns, features * features)
    # A launch has at most 65535 blocks in its third direction, one for each 64 columns.
    step = max(1, min(_BYTES // (8 * most), 65535 // (columns // 64 + 1)))

    def shared(key: Row) -> tuple[float, str]:
        return key["bandwidth"], str(key["kernel"])

    for _, group in itertools.groupby(sorted(missing, key=shared), shared):
        keys = list(group)
        for first in range(0, len(keys), step):
            yield keys[first : first + step]


def _run_batch(task: TableTask, keys: list[Row]) -> list[Row]:
    start = time.perf_counter()
    numbers = sorted({key["fold"] for key in keys})
    place = {fold: t for t, fold in enumerate(numbers)}
    folds = [task.folds[fold] for fold in numbers]
    common = folds[0].common
    device = torch.device(common.device)
    parts = [split_rows(fold) for fold in folds]
    data = [
        features(fold, train, [valid, fold.test], torch.device("cpu"))
        for fold, (train, valid) in zip(folds, parts, strict=True)
    ]
    made = [
        target_values(fold, train, X[0].dtype)
        for fold, (train, _), X in zip(folds, parts, data, strict=True)
    ]
    for X, (targets, _) in zip(data, made, strict=True):
        n, d = X[0].shape
        check_memory(n, d, targets.shape[1], X[0].element_size(), common.memory_limit)
    tables = Tables([X[0] for X in data], [targets for targets, _ in made], device)

    def queries(which: int) -> Queries:
        """Validation or test points; targets less the mean that the fit doesn't see."""
        rows = [
            part[1] if which == 1 else fold.test for fold, part in zip(folds, parts, strict=True)
        ]
        expected = [
            fold.y[own] if fold.classes else fold.y[own] - mean
            for fold, own, (_, mean) in zip(folds, rows, made, strict=True)
        ]
        return Queries(tables, [X[which] for X in data], expected)

    problems = [Problem(place[key["fold"]], key["alpha"], key["reg"]) for key in keys]
    valid = queries(1) if common.validation_fraction is not None else None
    test = queries(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the column jitter tells it
        found = fit(
            tables, problems, bandwidth=keys[0]["bandwidth"], kernel=keys[0]["kernel"],
            n_iter=common.n_iter, valid=valid,
        )  # fmt: skip
    scores, jitters = found.machines.scores(test), found.machines.jitter.tolist()
    rows = []
    robust = _robustness(found, test, common) if folds[0].classes else [{} for _ in keys]
    seconds = (time.perf_counter() - start) / len(keys)
    for b, (key, problem) in enumerate(zip(keys, problems, strict=True)):
        best = found.best_iter[b]
        row = {
            **key,
            "rows": tables.sizes[problem.table],
            "features": tables.features[problem.table],
            "outputs": made[problem.table][0].shape[1],
            "best_iter": best,
            "valid_score": found.scores[b][best] if valid is not None else None,
            "test_score": scores[b],
            "jitter": jitters[b],
            **robust[b],
            "seconds": seconds,
        }
        rows.append(result_row(row))
    return rows


def _robustness(found: Fitted, test: Queries, common: Common) -> list[Row]:
    rows: list[Row] = [{} for _ in found.best_iter]
    if common.eps:
        seeds = [common.seed] * len(test.raw)
        figures = attacks(found.machines, test, common.eps, common.attack, seeds)
        if figures is None:
            msg = "too many training points or features for one attack of all"
            raise ValueError(msg)
        for row, own in zip(rows, figures, strict=True):
            for radius in common.eps:
                at = own.eps.index(radius)
                robust, success = own.robust_accuracy[at], own.attack_success_on_correct[at]
                row[f"robust_{radius:g}"], row[f"success_{radius:g}"] = robust, success
            row["zero_gradient_share"] = float(np.nanmax([0.0, *own.zero_gradient_share]))
    points = [part[:MEASURED_ROWS] for part in test.raw]
    for row, (rank, alignment) in zip(rows, measures(found.machines, points), strict=True):
        row["effective_rank"], row["normal_alignment"] = rank, alignment
        row.setdefault("zero_gradient_share", 0.0)
    return rows
