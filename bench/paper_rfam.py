"""The paper's table of RFAM and RFM on the public tables, beside the published figures.

    python bench/paper_rfam.py --data fd-uci.tar.xz --alpha 0 1 --published fd-published.tsv

Protocol: for each reg and 5 iterations the accuracy on the archive's validation half picks reg,
iteration and M; with these, each of 4 folds is solved, tested, attacked (``--attack published``:
L-infinity, 20 steps of eps/10 from a random start, squared error to the one-hot label, the last
point counts). Results stream to a CSV file; a run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import pathlib
import time
import warnings
from typing import Any

import numpy as np
import rfam_protocol
import torch
from paper_rfam_report import EPS, differing, report, success
from tables import Table, archive_tables, csv_gz_tables, published_results

import normalign
from normalign import _rfam_fit
from normalign._attack_input import ATTACKS
from normalign._jacobian_measures import jacobian_measures
from normalign._rfam_batch import MOST_POINTS
from normalign._rfam_batch_attack import Figures
from normalign._rfam_memory import check_memory
from normalign._sweep_runner import ResultFile, Row, Task, fingerprint, run_tasks

REGS = (10.0, 1.0, 0.1, 0.01, 0.001)
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
# Runs with the published sampling of AGOP points, for tables whose figures differ.
SAMPLED_KEYS = ("table", "alpha", "seed")
SAMPLED_COLUMNS = (*SAMPLED_KEYS, "reg", "iteration", "test_acc", "success", "error")
CHANCE_ROWS = 4000  # larger tables are left out of these runs, and of those of all choices
AGOP_POINTS = 20_000
COLUMNS = (*KEYS, "rows", "features", "classes", *SEARCH, *FIGURES, "error")


def one_hot(y: torch.Tensor, classes: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(y, classes).float()


def search(
    table: Table, X: torch.Tensor, y: torch.Tensor, alpha: float, seed: int | None = None
) -> tuple[Row, torch.Tensor]:
    """The best (reg, iteration) on the validation half, and the factor of its M.

    With a seed the AGOP takes points drawn with replacement, as published; else all points.
    """
    train, valid = (torch.from_numpy(rows) for rows in table.search)
    targets = one_hot(y[train], table.classes)
    expected = y[valid]

    def accuracy(outputs: torch.Tensor) -> float:
        return (outputs.argmax(1) == expected).double().mean().item()

    x = X[train].contiguous()
    shared = _rfam_fit.prepare(x, alpha=alpha, x_val=X[valid].contiguous())
    generator = None if seed is None else torch.Generator().manual_seed(seed)
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
            agop_samples=None if seed is None else min(len(x), AGOP_POINTS),
            generator=generator,
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
    seed: int = 0,
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
        random_state=1000 * seed + k,
    )
    at = {eps: report.eps.index(eps) for eps in EPS}
    figures: Row = {"test_acc": report.clean_accuracy}
    for eps in EPS:
        figures[f"robust_acc_{eps}"] = report.accuracy_at_result[at[eps]]
        figures[f"kept_robust_acc_{eps}"] = report.robust_accuracy[at[eps]]
    figures["success_on_correct_1.0"] = report.attack_success_on_correct[at[1.0]]
    figures["zero_gradient_share_1.0"] = report.zero_gradient_share[at[1.0]]
    rows = measured_rows(len(x), k)
    parts = [machine.jacobian(part) for part in x[rows].split(64)]
    jacobians = torch.cat(parts)
    alignments, ranks = jacobian_measures(jacobians, x[rows])
    figures["effective_rank"] = ranks.nanmean().item()
    figures["normal_alignment"] = alignments.nanmean().item()
    return figures


def measured_rows(count: int, k: int) -> torch.Tensor:
    """Which training rows of fold k have their Jacobians measured."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(k))[:MEASURED_ROWS]


def device_work(payload: tuple[Table, str | None, str], missing: list[Row]) -> Any:
    """The protocol of one table on a GPU, all alphas at once; large tables go to the CPU."""
    table, memory, device = payload
    if max(len(table.search[0]), *(len(train) for train, _ in table.folds)) > MOST_POINTS:
        yield from work((table, memory), missing)
        return
    warnings.simplefilter("ignore", RuntimeWarning)  # jitter is part of the published runs too
    X = torch.from_numpy(table.X).float()
    measured = [X[train][measured_rows(len(train), k)] for k, (train, _) in enumerate(table.folds)]
    for attack in sorted({key["attack"] for key in missing}):
        keys = [key for key in missing if key["attack"] == attack]
        start = time.perf_counter()
        outcomes = rfam_protocol.run(
            table, [key["alpha"] for key in keys], ATTACKS[attack], torch.device(device),
            regs=REGS, bandwidth=BANDWIDTH, iterations=ITERATIONS, eps=EPS, measured=measured,
        )  # fmt: skip
        seconds = (time.perf_counter() - start) / len(keys)
        for key, found in zip(keys, outcomes, strict=True):
            folds = [
                device_figures(figures, *measures)
                for figures, measures in zip(found.folds, found.measures, strict=True)
            ]
            yield {
                **key,
                "rows": len(X),
                "features": X.shape[1],
                "classes": table.classes,
                "valid_acc": found.valid_acc,
                "reg": found.reg,
                "iteration": found.iteration,
                **{name: float(np.nanmean([f[name] for f in folds])) for name in FIGURES},
                "search_seconds": 0.0,  # search and folds are one run
                "fold_seconds": seconds,
            }


def device_figures(figures: Figures, rank: float, alignment: float) -> Row:
    """One fold's figures under the names of ``fold_figures``."""
    row: Row = {"test_acc": figures.clean_accuracy}
    for eps in EPS:
        at = figures.eps.index(eps)
        row[f"robust_acc_{eps}"] = figures.accuracy_at_result[at]
        row[f"kept_robust_acc_{eps}"] = figures.robust_accuracy[at]
    at = figures.eps.index(1.0)
    row["success_on_correct_1.0"] = figures.attack_success_on_correct[at]
    row["zero_gradient_share_1.0"] = figures.zero_gradient_share[at]
    row["effective_rank"], row["normal_alignment"] = rank, alignment
    return row


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


def sampled_work(table: Table, missing: list[Row]) -> Any:
    """Test accuracy and attack success where the AGOP is sampled, for each (alpha, seed)."""
    warnings.simplefilter("ignore", RuntimeWarning)
    X, y = torch.from_numpy(table.X).float(), torch.from_numpy(table.y)
    for key in missing:
        best, factor = search(table, X, y, key["alpha"], key["seed"])
        folds = [
            fold_figures(table, X, y, k, factor, best["reg"], "published", key["seed"])
            for k in range(len(table.folds))
        ]
        means = {name: float(np.mean([f[name] for f in folds])) for name in FIGURES[:4]}
        chosen = {"reg": best["reg"], "iteration": best["iteration"]}
        yield {**key, **chosen, "test_acc": 100 * means["test_acc"], "success": success(means)}


def predicted_seconds(table: Table) -> float:
    """A rough cost on one core: Cholesky, AGOP, and the attack's kernel evaluations."""
    n = len(table.search[0])
    fold, test = (len(rows) for rows in table.folds[0])
    d, c = table.X.shape[1], table.classes
    solves = 25 * n**3 / 3 + 4 * fold**3 / 3
    pairs = 20 * n**2 * (2 + d * c / 8) + 4 * 60 * fold * test * (d + c)
    return solves / 4e10 + pairs / 1e9 + 0.05


def main() -> None:
    import paper_rfam_candidates as candidates  # which imports this module

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
    parser.add_argument(
        "--sampled", type=int, default=0, help="seeds of drawn AGOP points where figures differ"
    )
    parser.add_argument(
        "--candidates", action="store_true", help="every (reg, iteration) where figures differ"
    )
    parser.add_argument("--jobs", type=int, default=1, help="tables at once, one thread each")
    parser.add_argument(
        "--device", default="cpu", help="cuda takes whole tables of a few thousand rows"
    )
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("bench/results"))
    args = parser.parse_args()
    if args.data is None and args.tabarena is None:
        parser.error("give --data or --tabarena")

    tables: list[Table] = []
    if args.data is not None:
        tables += archive_tables(args.data, args.tables)
    if args.tabarena is not None:
        tables += [t for t in csv_gz_tables(args.tabarena, args.tables) if t.classes]
    published_path = args.published
    if published_path is None and args.data is not None:
        published_path = args.data.parent / "fd-published.tsv"
    has_published = published_path is not None and published_path.exists()
    published = published_results(published_path) if has_published else {}

    args.out.mkdir(parents=True, exist_ok=True)
    settings = {"regs": REGS, "eps": EPS, "bandwidth": BANDWIDTH, "iterations": ITERATIONS}
    file = ResultFile(args.out / "paper_rfam.csv", COLUMNS, KEYS, fingerprint(settings))
    tasks = []
    left_out = []
    for table in sorted(tables, key=predicted_seconds):
        if args.max_rows is not None and len(table.X) > args.max_rows:
            reason = f"{len(table.X):,} rows, more than --max-rows {args.max_rows:,}"
            left_out.append(f"{table.name}: {reason}")
            continue
        keys = [
            {"table": table.name, "alpha": alpha, "attack": name}
            for alpha in args.alpha
            for name in args.attack
        ]
        if args.device != "cpu":
            tasks.append(Task(keys, (table, args.memory, args.device), predicted_seconds(table)))
            continue
        for first in range(0, len(keys), len(args.attack)):
            own = keys[first : first + len(args.attack)]
            tasks.append(Task(own, (table, args.memory), predicted_seconds(table)))
    predicted = sum(task.cost for task in tasks)
    print(f"{len(tasks)} runs, about {predicted / 60:.0f} core minutes predicted", flush=True)
    run = work if args.device == "cpu" else device_work
    run_tasks(tasks, run, file, n_jobs=args.jobs, threads=1, description="tables")
    drawn = ResultFile(
        args.out / "paper_rfam_sampled.csv", SAMPLED_COLUMNS, SAMPLED_KEYS, fingerprint(settings)
    )
    by_name = {table.name: table for table in tables}
    extra = [
        Task(
            [{"table": name, "alpha": alpha, "seed": seed} for seed in range(args.sampled)],
            by_name[name],
            predicted_seconds(by_name[name]) * args.sampled,
        )
        for name, alpha in differing(file.rows, published)
        if name in by_name and args.sampled and len(by_name[name].X) <= CHANCE_ROWS
    ]
    extra.sort(key=lambda task: task.cost)
    run_tasks(extra, sampled_work, drawn, n_jobs=args.jobs, threads=1, description="drawn")
    choices = ResultFile(
        args.out / "paper_rfam_candidates.csv", candidates.COLUMNS, candidates.KEYS,
        fingerprint(settings),
    )  # fmt: skip
    every = [
        Task(candidates.keys(name, alpha), by_name[name], predicted_seconds(by_name[name]) * 15)
        for name, alpha in differing(file.rows, published)
        if name in by_name and args.candidates and len(by_name[name].X) <= CHANCE_ROWS
    ]
    every.sort(key=lambda task: task.cost)
    run_tasks(
        every, candidates.work, choices, n_jobs=args.jobs, threads=1, description="candidates"
    )
    print(report(file.rows, drawn.rows, choices.rows, published, args.out, left_out))


if __name__ == "__main__":
    import paper_rfam  # workers import the functions by name, which __main__ doesn't allow

    paper_rfam.main()
