"""Grids of RFAM settings over tables and folds, resumable, with accuracy and robustness."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.model_selection import KFold, StratifiedKFold
from sklearn.preprocessing import StandardScaler
from sklearn.utils.multiclass import type_of_target

from normalign._attack_input import attack_settings
from normalign._checks import check_choice, check_count, check_positive
from normalign._pgd import Settings
from normalign._rfam_kernels import make_kernel
from normalign._rfam_memory import parse_bytes
from normalign._sweep_batch import TableTask, applies, run
from normalign._sweep_runner import ResultFile, Row, Task, fingerprint, run_tasks
from normalign._sweep_task import Common, FoldTask, check_device, columns

__all__ = ["SweepResult", "sweep"]

Array = NDArray[Any]
KEYS = ("table", "fold", "alpha", "reg", "bandwidth", "kernel")
SETTING = ("table", "alpha", "reg", "bandwidth", "kernel")


def sweep(
    tables: Any,
    *,
    alpha: float | Sequence[float] = (0.0, 1.0),
    reg: float | Sequence[float] = (1.0, 0.1, 0.01, 0.001),
    bandwidth: float | Sequence[float] = 10.0,
    kernel: str | float | Sequence[str | float] = "laplace",
    n_iter: int = 5,
    tol: float | None = None,
    folds: Any = 4,
    task: str = "auto",
    preprocess: Any = "auto",
    validation_fraction: float | None = None,
    eps: Sequence[float] = (0.1, 1.0),
    attack: str | Settings | dict[str, Any] = "strong",
    dtype: str = "float32",
    device: str = "cpu",
    out: str | os.PathLike[str] | None = None,
    retry_failed: bool = False,
    n_jobs: int = 1,
    threads: int = 1,
    memory_limit: float | str | None = None,
    random_state: int = 0,
    progress: bool = True,
) -> SweepResult:
    """Fits, scores and attacks every combination of settings on every fold of every table.

    Combinations that differ in reg alone share their preparation. Each result is written as it
    comes; a sweep that was killed goes on where it was when called again with the same file. A
    combination that fails leaves a row with the ``error``, and the sweep goes on.

    Workers come from joblib: ``n_jobs`` local processes by default, or any other backend by
    ``with joblib.parallel_config(backend="dask"): sweep(...)``.

    Args:
        tables: ``(X, y)``, or a mapping from names to ``(X, y)``; X an array or a DataFrame.
        alpha: Shares of the identity in the first M: 0 is RFAM, 1 RFM.
        reg: Ridges.
        bandwidth: Lengths of the kernel.
        kernel: ``"laplace"``, ``"gaussian"``, exponents, or a list of them.
        n_iter: Solves of each fit.
        tol: Stops a fit when M changes by less.
        folds: A number of shuffled folds (stratified for classes), a scikit-learn splitter, or a
            list of ``(train, test)`` row indices that holds for every table.
        task: ``"classification"``, ``"regression"``, or ``"auto"``: by scikit-learn's
            ``type_of_target``.
        preprocess: A scikit-learn transformer, cloned and fitted on the training rows of each
            fold; ``None`` for none; ``"auto"`` standardises numbers, and in a DataFrame fills
            gaps with the median and turns text and categories into one column per value.
        validation_fraction: Share of the training rows that chooses the iteration; ``None`` keeps
            the last.
        eps: Radii of the attack, in units of the preprocessed features; empty for no attack.
        attack: As in ``robustness_report``.
        dtype: ``"float32"`` or ``"float64"``.
        device: Where to compute, as torch names it. Workers share a GPU, so ``n_jobs=1`` is best
            there.
        out: Result file, ``.csv`` or ``.parquet``.
        retry_failed: Runs combinations again whose row in ``out`` holds an error.
        n_jobs: Workers; -1 is every core.
        threads: Threads of each worker.
        memory_limit: For one worker, in bytes or text such as ``"8GB"``; ``None`` is the memory
            available when a fit starts.
        random_state: Seed of folds, validation split and attack.
        progress: Shows a bar with the time left.

    Returns:
        The rows, with methods to average, rank and plot them.

    Raises:
        ValueError: a setting is out of range, or ``out`` holds results of other settings.
    """
    check_choice("task", task, ("auto", "classification", "regression"))
    check_choice("dtype", dtype, ("float32", "float64"))
    check_device(device)
    check_count("n_iter", n_iter)
    check_count("threads", threads)
    if not isinstance(random_state, int):
        msg = f"random_state must be an integer, so that a sweep can resume, got {random_state!r}"
        raise ValueError(msg)
    if memory_limit is not None:
        parse_bytes(memory_limit)
    grid = _grid(alpha, reg, bandwidth, kernel)
    settings = attack_settings(attack)
    radii = tuple(float(radius) for radius in eps)
    for radius in radii:
        check_positive("eps", radius)
    common = Common(
        n_iter, tol, radii, settings, dtype, validation_fraction, random_state, memory_limit, device
    )
    tasks: list[Task] = []
    for name, (X, y) in _named(tables).items():
        targets, classes = _encode(name, X, y, task)
        tasks += _tasks(name, X, targets, classes, folds, preprocess, grid, common)
    tasks.sort(key=lambda one: -one.cost)  # the longest first: no worker ends with it alone
    same = dataclasses.asdict(dataclasses.replace(common, memory_limit=None))
    del same["device"]  # a sweep may go on elsewhere
    digest = fingerprint(
        {
            **same,
            "folds": folds if isinstance(folds, int) else repr(folds),
            "preprocess": repr(preprocess),
            "task": task,
        }
    )
    file = ResultFile(out, [*KEYS, *columns(radii)], KEYS, digest, retry_failed=retry_failed)
    rows = run_tasks(tasks, run, file, n_jobs=n_jobs, threads=threads, progress=progress)
    return SweepResult(rows)


def _several(value: Any) -> list[Any]:
    """Each value once, in the order given."""
    many = isinstance(value, Iterable) and not isinstance(value, str)
    return list(dict.fromkeys(value if many else [value]))


def _grid(alpha: Any, reg: Any, bandwidth: Any, kernel: Any) -> list[list[Row]]:
    """Groups of settings that differ in reg alone."""
    alphas = [float(value) for value in _several(alpha)]
    regs = sorted({float(value) for value in _several(reg)}, reverse=True)
    lengths = [float(value) for value in _several(bandwidth)]
    for value in alphas:
        if not 0.0 <= value <= 1.0:
            msg = f"alpha must lie between 0 (RFAM) and 1 (RFM), got {value!r}"
            raise ValueError(msg)
    for value in regs:
        if not 0.0 <= value < math.inf:
            msg = f"reg must be non-negative and finite, got {value!r}"
            raise ValueError(msg)
    for value in lengths:
        check_positive("bandwidth", value)
    kernels = _several(kernel)
    for value in kernels:
        make_kernel(value, 1.0)
    groups = itertools.product(alphas, lengths, kernels)
    return [
        [{"alpha": a, "reg": r, "bandwidth": length, "kernel": k} for r in regs]
        for a, length, k in groups
    ]


def _named(tables: Any) -> dict[str, tuple[Any, Any]]:
    if isinstance(tables, Mapping):
        return {str(name): (pair[0], pair[1]) for name, pair in tables.items()}
    if isinstance(tables, tuple) and len(tables) == 2:
        return {"table": (tables[0], tables[1])}
    msg = f"tables must be (X, y) or a mapping of names to (X, y), got {type(tables).__name__}"
    raise TypeError(msg)


def _encode(name: str, X: Any, y: Any, task: str) -> tuple[Array, int]:
    """Codes and number of the classes, or targets ``(n, c)`` and 0."""
    values = np.asarray(y)
    if len(values) != len(X):
        msg = f"table {name}: X and y must have as many rows, got {len(X)} and {len(values)}"
        raise ValueError(msg)
    if task == "auto":
        kind = type_of_target(values)
        task = "classification" if kind in ("binary", "multiclass") else "regression"
    if task == "classification":
        labels, codes = np.unique(values, return_inverse=True)
        return codes.reshape(-1), len(labels)
    targets = values.astype(np.float64).reshape(len(values), -1)
    if not np.isfinite(targets).all():
        msg = f"table {name}: y holds NaN or infinity"
        raise ValueError(msg)
    return targets, 0


def _splits(X: Any, y: Array, classes: int, folds: Any, seed: int) -> list[tuple[Array, Array]]:
    if isinstance(folds, int):
        check_count("folds", folds, least=2)
        smallest = int(np.bincount(y).min()) if classes else 0
        splitter: Any = KFold(folds, shuffle=True, random_state=seed)
        if smallest >= folds:
            splitter = StratifiedKFold(folds, shuffle=True, random_state=seed)
    elif hasattr(folds, "split"):
        splitter = folds
    else:
        return [(np.asarray(train), np.asarray(test)) for train, test in folds]
    return list(splitter.split(np.zeros(len(y)), y if classes else None))


def _tasks(
    name: str,
    X: Any,
    y: Array,
    classes: int,
    folds: Any,
    preprocess: Any,
    grid: list[list[Row]],
    common: Common,
) -> list[Task]:
    transformer = _transformer(X) if isinstance(preprocess, str) else preprocess
    if isinstance(preprocess, str):
        check_choice("preprocess", preprocess, ("auto",))
    data = X if hasattr(X, "iloc") else np.asarray(X)
    tasks = []
    payloads: dict[int, FoldTask] = {}
    for fold, (train, test) in enumerate(_splits(X, y, classes, folds, common.seed)):
        payload = FoldTask(data, y, classes, train, test, transformer, common)
        payloads[fold] = payload
        d, c = data.shape[1], classes or y.shape[1]
        solves = common.n_iter * (len(train) ** 3 / 3 + len(train) ** 2 * (20 + 2 * c * d))
        attacks = len(common.eps) * common.attack.steps * common.attack.restarts
        pairs = len(train) * len(test) * (20 + c + d) * (1 + attacks)
        for group in grid:
            keys = [{"table": name, "fold": fold, **setting} for setting in group]
            tasks.append(Task(keys, payload, len(group) * (solves + pairs)))
    if not applies(common, max(len(payload.train) for payload in payloads.values())):
        return tasks
    # One task for each bandwidth and kernel: a GPU takes all folds, alpha and reg at once.
    merged: dict[tuple[float, str], Task] = {}
    for task in tasks:
        shared = task.keys[0]["bandwidth"], str(task.keys[0]["kernel"])
        whole = merged.setdefault(shared, Task([], TableTask(payloads), 0.0))
        whole.keys.extend(task.keys)
        whole.cost += task.cost
    return list(merged.values())


def _transformer(X: Any) -> Any:
    """Standardised numbers; in a DataFrame, gaps filled and categories spread over columns."""
    if not hasattr(X, "select_dtypes"):
        return StandardScaler()
    from sklearn.compose import make_column_selector, make_column_transformer
    from sklearn.impute import SimpleImputer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder

    numbers = make_pipeline(SimpleImputer(strategy="median"), StandardScaler())
    categories = OneHotEncoder(handle_unknown="ignore", sparse_output=False)
    return make_column_transformer(
        (numbers, make_column_selector(dtype_include="number")),
        (categories, make_column_selector(dtype_exclude="number")),
    )


@dataclasses.dataclass
class SweepResult:
    """The rows of a sweep.

    Attributes:
        rows: One dictionary per table, fold and setting; ``error`` is empty where it succeeded.
    """

    rows: list[Row]

    @property
    def failed(self) -> list[Row]:
        """Rows whose setting failed."""
        return [row for row in self.rows if row["error"]]

    def to_frame(self) -> Any:
        """The rows as a pandas DataFrame."""
        import pandas

        return pandas.DataFrame(self.rows)

    def summary(self) -> list[Row]:
        """One row per table and setting: its figures averaged over the folds that succeeded."""
        groups: dict[tuple[Any, ...], list[Row]] = {}
        for row in self.rows:
            if not row["error"]:
                groups.setdefault(tuple(row[name] for name in SETTING), []).append(row)
        averaged = []
        for key, rows in groups.items():
            figures = {
                name: float(np.mean([row[name] for row in rows]))
                for name in rows[0]
                if name not in (*KEYS, "error", "config")
                and all(isinstance(row[name], int | float) for row in rows)
            }
            averaged.append({**dict(zip(SETTING, key, strict=True)), "folds": len(rows), **figures})
        return averaged

    def best(self, by: str = "test_score") -> dict[str, Row]:
        """For each table, the setting with the highest mean of a column.

        Args:
            by: ``"test_score"``, ``"valid_score"`` (which doesn't use the test rows), or a
                robust accuracy such as ``"robust_1"``.
        """
        found: dict[str, Row] = {}
        for row in self.summary():
            if by not in row:
                msg = f"by must be a column with numbers, got {by!r}"
                raise ValueError(msg)
            if row["table"] not in found or row[by] > found[row["table"]][by]:
                found[row["table"]] = row
        return found

    def pareto(self, table: str, eps: float) -> list[Row]:
        """Settings of a table that none beats in both accuracy and robust accuracy.

        Args:
            table: Name of the table.
            eps: One of the sweep's radii.

        Returns:
            Rows of ``summary``, by rising accuracy.
        """
        name = _radius_column(self.summary(), eps)
        rows = [row for row in self.summary() if row["table"] == table]
        front: list[Row] = []
        for row in sorted(rows, key=lambda row: (-row["test_score"], -row[name])):
            if not front or row[name] > front[-1][name]:
                front.append(row)
        return front[::-1]

    def plot(self, path: str | os.PathLike[str] | None = None, eps: float | None = None) -> Any:
        """Draws accuracy against robust accuracy, one panel per table, with the Pareto front.

        Args:
            path: Image file; ``None`` writes none.
            eps: Radius; ``None`` is the largest.

        Returns:
            The matplotlib figure.
        """
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        summary = self.summary()
        if eps is None:
            eps = max(_radii(summary), default=math.nan)
        name = _radius_column(summary, eps)
        tables = sorted({row["table"] for row in summary if name in row})
        across = max(1, min(4, len(tables)))
        down = max(1, math.ceil(len(tables) / across))
        figure = Figure(figsize=(1 + 3.4 * across, 3.4 * down), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(down, across, squeeze=False).ravel()
        for axis, table in itertools.zip_longest(axes, tables):
            if table is None:
                axis.set_visible(False)
                continue
            for alpha in sorted({row["alpha"] for row in summary}):
                rows = [r for r in summary if r["table"] == table and r["alpha"] == alpha]
                label = {0.0: "RFAM", 1.0: "RFM"}.get(alpha, f"alpha {alpha:g}")
                points = [r["test_score"] for r in rows], [r[name] for r in rows]
                axis.scatter(*points, s=18, alpha=0.8, label=label)
            front = self.pareto(table, eps)
            line = [r["test_score"] for r in front], [r[name] for r in front]
            axis.plot(*line, color="0.3", linewidth=1, label="Pareto front")
            axis.set(title=table, xlabel="accuracy", ylabel=f"robust accuracy, eps {eps:g}")
        if tables:
            axes[0].legend(fontsize="small")
        if path is not None:
            figure.savefig(path, dpi=120)
        return figure


def _radii(rows: list[Row]) -> list[float]:
    names = {name for row in rows for name in row if name.startswith("robust_")}
    return [float(name.removeprefix("robust_")) for name in names]


def _radius_column(rows: list[Row], eps: float) -> str:
    name = f"robust_{eps:g}"
    if rows and not any(name in row for row in rows):
        msg = f"eps must be one of the sweep's radii {sorted(_radii(rows))}, got {eps}"
        raise ValueError(msg)
    return name
