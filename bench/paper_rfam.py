"""The paper's table of RFAM and RFM on the public tables, beside the published figures.

    python bench/paper_rfam.py --data fd-uci.tar.xz --alpha 0 1 --published fd-published.tsv

Protocol: for each reg and 5 iterations the accuracy on the archive's validation half picks reg,
iteration and M; with these, each of 4 folds is solved, tested, attacked (``--attack published``:
L-infinity, 20 steps of eps/10 from a random start, squared error to the one-hot label, the last
point counts). Results stream to a CSV file; a run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import math
import pathlib
import time
import warnings
from typing import Any

import numpy as np
import torch
from tables import Table, archive_tables, csv_gz_tables, published_results

import normalign
from normalign import _rfam_fit
from normalign._jacobian_measures import effective_ranks, normal_alignments
from normalign._rfam_memory import check_memory
from normalign._sweep_runner import ResultFile, Row, Task, fingerprint, run_tasks

REGS = (10.0, 1.0, 0.1, 0.01, 0.001)
EPS = (0.1, 1.0, 2.0)
BANDWIDTH = 10.0
ITERATIONS = 5
MEASURED_ROWS = 500  # of each fold's training rows, for effective rank and alignment
KEYS = ("table", "alpha", "attack")
FIGURES = (
    "test_acc",
    *(f"robust_acc_{eps}" for eps in EPS),
    *(f"kept_robust_acc_{eps}" for eps in EPS),
    "success_on_correct_1.0",
    "zero_gradient_share_1.0",
    "effective_rank",
    "normal_alignment",
)
SEARCH = ("valid_acc", "reg", "iteration", "search_seconds", "fold_seconds")
COLUMNS = (*KEYS, "rows", "features", "classes", *SEARCH, *FIGURES, "error")


def one_hot(y: torch.Tensor, classes: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(y, classes).float()


def search(
    table: Table, X: torch.Tensor, y: torch.Tensor, alpha: float
) -> tuple[Row, torch.Tensor]:
    """The best (reg, iteration) on the validation half, and the factor of its M."""
    train, valid = (torch.from_numpy(rows) for rows in table.search)
    targets = one_hot(y[train], table.classes)
    expected = y[valid]

    def accuracy(outputs: torch.Tensor) -> float:
        return (outputs.argmax(1) == expected).double().mean().item()

    x = X[train].contiguous()
    shared = _rfam_fit.prepare(x, alpha=alpha, bandwidth=BANDWIDTH, x_val=X[valid].contiguous())
    best: Row = {"valid_acc": -1.0}
    factor = shared.factor
    for reg in REGS:
        result = _rfam_fit.fit(
            x,
            targets,
            alpha=alpha,
            reg=reg,
            bandwidth=BANDWIDTH,
            n_iter=ITERATIONS,
            evaluate=accuracy,
            shared=shared,
        )
        score = result.history[result.best_iter]["score"]
        if score > best["valid_acc"]:
            best = {"valid_acc": score, "reg": reg, "iteration": result.best_iter}
            factor = result.machine.factor.clone()
    return best, factor


def fold_figures(
    table: Table,
    X: torch.Tensor,
    y: torch.Tensor,
    k: int,
    factor: torch.Tensor,
    reg: float,
    attack: str,
) -> Row:
    """Solves one fold, tests and attacks it."""
    train, test = (torch.from_numpy(rows) for rows in table.folds[k])
    x = X[train].contiguous()
    mean = x.mean(0)
    machine = _rfam_fit.solve_machine(
        x, one_hot(y[train], table.classes), mean, factor, reg, BANDWIDTH
    )
    report = normalign.robustness_report(
        machine,
        X[test].contiguous(),
        y[test],
        eps=EPS,
        attack=attack,
        measures=False,
        certify=False,
        random_state=k,
    )
    at = {eps: report.eps.index(eps) for eps in EPS}
    figures: Row = {"test_acc": report.clean_accuracy}
    for eps in EPS:
        figures[f"robust_acc_{eps}"] = report.accuracy_at_result[at[eps]]
        figures[f"kept_robust_acc_{eps}"] = report.robust_accuracy[at[eps]]
    figures["success_on_correct_1.0"] = report.attack_success_on_correct[at[1.0]]
    figures["zero_gradient_share_1.0"] = report.zero_gradient_share[at[1.0]]
    rows = torch.randperm(len(x), generator=torch.Generator().manual_seed(k))[:MEASURED_ROWS]
    parts = [machine.jacobian(part) for part in x[rows].split(64)]
    jacobians = torch.cat(parts)
    figures["effective_rank"] = effective_ranks(jacobians).nanmean().item()
    figures["normal_alignment"] = normal_alignments(jacobians, x[rows]).nanmean().item()
    return figures


def work(payload: tuple[Table, str | None], missing: list[Row]) -> Any:
    """The whole protocol of one table, for each (alpha, attack) wanted."""
    table, memory = payload
    warnings.simplefilter("ignore", RuntimeWarning)  # jitter is part of the published runs too
    fold_rows = max(len(train) for train, _ in table.folds)
    check_memory(fold_rows, table.X.shape[1], table.classes, 4, memory)
    X = torch.from_numpy(table.X).float()
    y = torch.from_numpy(table.y)
    searched: dict[float, Any] = {}
    for key in missing:
        alpha = key["alpha"]
        if alpha not in searched:
            start = time.perf_counter()
            best, factor = search(table, X, y, alpha)
            best["search_seconds"] = time.perf_counter() - start
            searched[alpha] = best, factor
        best, factor = searched[alpha]
        start = time.perf_counter()
        folds = [
            fold_figures(table, X, y, k, factor, best["reg"], key["attack"])
            for k in range(len(table.folds))
        ]
        sizes = {"rows": len(X), "features": X.shape[1], "classes": table.classes}
        figures = {name: float(np.nanmean([f[name] for f in folds])) for name in FIGURES}
        seconds = time.perf_counter() - start
        yield {**key, **sizes, **best, **figures, "fold_seconds": seconds}


def predicted_seconds(table: Table) -> float:
    """A rough cost on one core: Cholesky, AGOP, and the attack's kernel evaluations."""
    n = len(table.search[0])
    fold, test = (len(rows) for rows in table.folds[0])
    d, c = table.X.shape[1], table.classes
    solves = 25 * n**3 / 3 + 4 * fold**3 / 3
    pairs = 20 * n**2 * (2 + d * c / 8) + 4 * 60 * fold * test * (d + c)
    return solves / 4e10 + pairs / 1e9 + 0.05


def report(rows: list[Row], published: dict[tuple[str, float], Row], folder: pathlib.Path) -> str:
    """Markdown of all figures beside the published ones, and a plot."""
    lines = []
    for attack in sorted({row["attack"] for row in rows}):
        for alpha in sorted({row["alpha"] for row in rows}):
            chosen = [r for r in rows if r["alpha"] == alpha and r["attack"] == attack]
            if chosen:
                lines += _section(chosen, published, alpha, attack)
    _plot(rows, published, folder / "paper_rfam.png")
    lines += ["", "![accuracy and attack success](paper_rfam.png)", ""]
    text = "\n".join(lines)
    (folder / "paper_rfam.md").write_text(text)
    return text


def success(row: Row, name: str = "robust_acc_1.0") -> float:
    """Attack success rate in percent, as published: (test - robust) / test."""
    return 100.0 * (row["test_acc"] - row[name]) / row["test_acc"] if row["test_acc"] else math.nan


def _section(rows: list[Row], published: dict[tuple[str, float], Row], alpha: float, attack: str):  # type: ignore[no-untyped-def]
    name = {0.0: "RFAM", 1.0: "RFM"}.get(float(alpha), f"alpha = {alpha}")
    good = sorted((r for r in rows if not r["error"]), key=lambda r: r["table"])
    lines = [
        "",
        f"## {name} (alpha = {alpha:g}), {attack} attack",
        "",
        "Percent; published figures in brackets. Success: (test - robust) / test at eps = 1. Kept: "
        "robust accuracy where an input that a smaller eps turned stays turned.",
        "",
        "| table | n | d | c | reg | it | test | robust .1 | robust 1 | robust 2 | success | "
        "kept 1 | eff. rank | alignment | zero grad. | s |",
        "|---|" + "---:|" * 15,
    ]
    ours: list[list[float]] = []
    theirs: list[list[float]] = []
    for row in good:
        old = published.get((row["table"], float(alpha)), {})
        figures = [100 * row["test_acc"], *(100 * row[f"robust_acc_{eps}"] for eps in EPS)]
        names = ("test_acc", *(f"robust_acc_{eps}" for eps in EPS))
        figures.append(success(row))
        if old:
            ours.append(figures)
            theirs.append([*(old[n] for n in names), success(old)])
        cells = [
            f"{value:.2f}" + (f" ({theirs[-1][i]:.2f})" if old else "")
            for i, value in enumerate(figures)
        ]
        rank = f"{row['effective_rank']:.2f}" + (f" ({old['effective_rank']:.2f})" if old else "")
        align = f"{row['normal_alignment']:.3f}"
        align += f" ({old['normal_alignment']:.3f})" if old else ""
        seconds = row["search_seconds"] + row["fold_seconds"]
        lines.append(
            f"| {row['table']} | {row['rows']} | {row['features']} | {row['classes']} | "
            f"{row['reg']:g} | {row['iteration']} | {' | '.join(cells)} | "
            f"{100 * row['kept_robust_acc_1.0']:.2f} | {rank} | {align} | "
            f"{row['zero_gradient_share_1.0']:.3f} | {seconds:.1f} |"
        )
    if ours:
        a, b = np.array(ours).mean(axis=0), np.array(theirs).mean(axis=0)
        cells = [f"**{x:.2f} ({y:.2f})**" for x, y in zip(a, b, strict=True)]
        lines.append(f"| **mean of {len(ours)}** |" + " |" * 5 + " " + " | ".join(cells) + " |" * 6)
    failed = [r for r in rows if r["error"]]
    if failed:
        lines += ["", "Left out:", "", *(f"- {r['table']}: {r['error']}" for r in failed)]
    return lines


def _plot(rows: list[Row], published: dict[tuple[str, float], Row], path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 4.2), layout="constrained")
    for alpha, colour in ((0.0, "tab:blue"), (1.0, "tab:orange")):
        pairs = [
            (row, published[row["table"], alpha])
            for row in rows
            if float(row["alpha"]) == alpha
            and not row["error"]
            and row["attack"] == "published"
            and (row["table"], alpha) in published
        ]
        name = "RFAM" if alpha == 0.0 else "RFM"
        for axis, values in (
            (axes[0], [(old["test_acc"], 100 * row["test_acc"]) for row, old in pairs]),
            (axes[1], [(success(old), success(row)) for row, old in pairs]),
        ):
            if values:
                axis.scatter(*zip(*values, strict=True), s=14, alpha=0.7, color=colour, label=name)
    for axis, title in zip(axes, ("test accuracy", "attack success at eps = 1"), strict=True):
        axis.axline((50, 50), slope=1, color="0.7", linewidth=1)
        axis.set(title=f"{title} (%)", xlabel="published", ylabel="normalign")
        if axis.collections:
            axis.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=pathlib.Path, help="archive (tar or folder)")
    parser.add_argument("--tabarena", type=pathlib.Path, help="folder of NAME.csv.gz tables")
    parser.add_argument("--published", type=pathlib.Path, help="published figures (tsv)")
    parser.add_argument("--alpha", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument(
        "--attack", nargs="+", choices=("published", "strong"), default=["published"]
    )
    parser.add_argument("--tables", nargs="+", help="only these tables")
    parser.add_argument("--max-rows", type=int, help="leave out tables with more rows")
    parser.add_argument("--memory", help='memory for one table, such as "8GB"')
    parser.add_argument("--jobs", type=int, default=1, help="tables at once, one thread each")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("bench/results"))
    args = parser.parse_args()
    if args.data is None and args.tabarena is None:
        parser.error("give --data or --tabarena")

    tables: list[Table] = []
    if args.data is not None:
        tables += archive_tables(args.data, args.tables)
    if args.tabarena is not None:
        tables += [t for t in csv_gz_tables(args.tabarena) if t.classes]
    published_path = args.published
    if published_path is None and args.data is not None:
        published_path = args.data.parent / "fd-published.tsv"
    has_published = published_path is not None and published_path.exists()
    published = published_results(published_path) if has_published else {}

    args.out.mkdir(parents=True, exist_ok=True)
    settings = {"regs": REGS, "eps": EPS, "bandwidth": BANDWIDTH, "iterations": ITERATIONS}
    file = ResultFile(args.out / "paper_rfam.csv", COLUMNS, KEYS, fingerprint(settings))
    tasks = []
    for table in sorted(tables, key=predicted_seconds):
        keys = [
            {"table": table.name, "alpha": alpha, "attack": attack}
            for alpha in args.alpha
            for attack in args.attack
        ]
        if args.max_rows is not None and len(table.X) > args.max_rows:
            continue
        tasks.append(Task(keys, (table, args.memory), predicted_seconds(table) * len(args.alpha)))
    predicted = sum(task.cost for task in tasks)
    print(f"{len(tasks)} tables, about {predicted / 60:.0f} core minutes predicted", flush=True)
    run_tasks(tasks, work, file, n_jobs=args.jobs, threads=1, description="tables")
    print(report(file.rows, published, args.out))


if __name__ == "__main__":
    main()
