"""One task of a sweep: a fold of a table with fixed alpha, bandwidth and kernel, for all reg."""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import clone
from sklearn.model_selection import train_test_split

from normalign import _rfam_fit
from normalign._attack_input import MachineVictim
from normalign._jacobian_measures import jacobian_measures
from normalign._pgd import Settings
from normalign._rfam_memory import check_memory
from normalign._sweep_runner import Row
from normalign.robustness import robustness_report

Array = NDArray[Any]
# Test rows whose Jacobians give the mean effective rank and normal alignment.
MEASURED_ROWS = 256


@dataclasses.dataclass(frozen=True)
class Common:
    """What all tasks of a sweep share."""

    n_iter: int
    tol: float | None
    eps: tuple[float, ...]
    attack: Settings
    dtype: str
    validation_fraction: float | None
    seed: int
    memory_limit: float | str | None
    device: str = "cpu"


@dataclasses.dataclass(frozen=True)
class FoldTask:
    """One fold; the key columns tell alpha, bandwidth, kernel and the wanted reg."""

    X: Any
    y: Array  # codes of classes, or real targets (n, c)
    classes: int  # 0 for regression
    train: Array
    test: Array
    preprocess: Any
    common: Common


def check_device(device: str) -> None:
    """Refuses a device that is not there."""
    kind = torch.device(device).type
    if kind == "cuda" and not torch.cuda.is_available():
        msg = f"device must be usable, got {device!r}, but torch finds no GPU here"
        raise ValueError(msg)


def columns(eps: tuple[float, ...]) -> list[str]:
    """Result columns that follow the key columns."""
    under_attack = [f"{name}_{radius:g}" for radius in eps for name in ("robust", "success")]
    return [
        *("rows", "features", "outputs", "best_iter", "valid_score", "test_score"),
        *under_attack,
        *("effective_rank", "normal_alignment", "zero_gradient_share", "jitter", "seconds"),
        "error",
    ]


def _rows(X: Any, rows: Array) -> Any:
    return X.iloc[rows] if hasattr(X, "iloc") else X[rows]


def features(
    task: FoldTask, train: Array, others: list[Array], device: torch.device
) -> list[torch.Tensor]:
    """Training, validation and test features, scaled by the training rows alone."""
    transformer = None if task.preprocess is None else clone(task.preprocess)
    if transformer is not None:
        transformer.fit(_rows(task.X, train))
    tensors: list[torch.Tensor] = []
    for rows in (train, *others):
        if not len(rows):
            tensors.append(tensors[0][:0])
            continue
        part = _rows(task.X, rows)
        if transformer is not None:
            part = transformer.transform(part)
        array = part.toarray() if hasattr(part, "toarray") else np.asarray(part)
        array = np.ascontiguousarray(array, dtype=task.common.dtype)
        if not np.isfinite(array).all():
            msg = "the features hold NaN or infinity; impute them with preprocess="
            raise ValueError(msg)
        tensors.append(torch.from_numpy(array).to(device))
    return tensors


def split_rows(task: FoldTask) -> tuple[Array, Array]:
    """Rows to train on, and those that choose the iteration."""
    common = task.common
    if common.validation_fraction is None:
        return task.train, np.empty(0, dtype=np.int64)
    train, valid = train_test_split(
        task.train, test_size=common.validation_fraction, random_state=common.seed
    )
    return train, valid


def run_fold(task: FoldTask, missing: list[Row]) -> Iterator[Row]:
    """Fits, scores and attacks; yields one row for each key, whose reg differ alone."""
    common = task.common
    train, valid = split_rows(task)
    X, X_valid, X_test = features(task, train, [valid, task.test], torch.device(common.device))
    targets, intercept = target_values(task, train, X.dtype)
    targets = targets.to(X.device)
    n, d = X.shape
    check_memory(n, d, targets.shape[1], X.element_size(), common.memory_limit)
    key = missing[0]
    shared = _rfam_fit.prepare(
        X,
        alpha=key["alpha"],
        x_val=X_valid if len(valid) else None,
    )

    def score(outputs: torch.Tensor, rows: Array) -> float:
        return _score(task, outputs.double().cpu().numpy() + intercept, rows)

    for key in missing:
        start = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # the column jitter tells it
            result = _rfam_fit.fit(
                X,
                targets,
                alpha=key["alpha"],
                reg=key["reg"],
                bandwidth=key["bandwidth"],
                kernel=key["kernel"],
                n_iter=common.n_iter,
                tol=common.tol,
                evaluate=(lambda outputs: score(outputs, valid)) if len(valid) else None,
                shared=shared,
            )
        machine = result.machine
        outputs = MachineVictim(machine).outputs(X_test)
        row = {
            **key,
            "rows": n,
            "features": d,
            "outputs": targets.shape[1],
            "best_iter": result.best_iter,
            "valid_score": result.history[result.best_iter]["score"],
            "test_score": score(outputs, task.test),
            "jitter": machine.jitter,
        }
        if task.classes:
            labels = torch.from_numpy(task.y[task.test]).to(X.device)
            row.update(_robustness(machine, X_test, labels, common))
        row["seconds"] = time.perf_counter() - start
        yield result_row(row)


def result_row(row: Row) -> Row:
    """A row as it is written: empty where there is no value."""
    return {name: "" if value is None else value for name, value in row.items()}


def target_values(task: FoldTask, train: Array, dtype: torch.dtype) -> tuple[torch.Tensor, Array]:
    """One-hot labels, or centred targets with their mean."""
    if task.classes:
        one_hot = torch.nn.functional.one_hot(torch.from_numpy(task.y[train]), task.classes)
        return one_hot.to(dtype), np.zeros(task.classes)
    values = task.y[train]
    mean = values.mean(axis=0)
    return torch.from_numpy(values - mean).to(dtype), mean


def _score(task: FoldTask, outputs: Array, rows: Array) -> float:
    """Accuracy, or R^2 over all targets."""
    expected = task.y[rows]
    if task.classes:
        return float((outputs.argmax(axis=1) == expected).mean())
    residual = float(np.square(expected - outputs).sum())
    spread = float(np.square(expected - expected.mean(axis=0)).sum())
    return 1.0 - residual / spread if spread > 0 else -residual


def _robustness(
    machine: _rfam_fit.Machine, X: torch.Tensor, labels: torch.Tensor, common: Common
) -> Row:
    row: Row = {}
    zero = 0.0
    if common.eps:
        report = robustness_report(
            machine,
            X,
            labels,
            eps=common.eps,
            attack=common.attack,
            measures=False,
            certify=False,
            random_state=common.seed,
        )
        for radius in common.eps:
            at = report.eps.index(radius)
            row[f"robust_{radius:g}"] = report.robust_accuracy[at]
            row[f"success_{radius:g}"] = report.attack_success_on_correct[at]
        zero = float(np.nanmax([0.0, *report.zero_gradient_share]))
    X = X[:MEASURED_ROWS]
    jacobians = torch.cat([machine.jacobian(rows) for rows in X.split(64)])
    alignments, ranks = jacobian_measures(jacobians, X)
    row["effective_rank"] = float(ranks.nanmean())
    row["normal_alignment"] = float(alignments.nanmean())
    row["zero_gradient_share"] = zero
    return row
