"""``python -m normalign sweep``: a grid of RFAM settings over CSV files."""

from __future__ import annotations

import argparse
import pathlib
import sys
from typing import Any


def add_parser(commands: Any) -> None:
    """Adds the command ``sweep`` to a parser's subparsers."""
    parser = commands.add_parser(
        "sweep",
        help="grid of RFAM settings over tables: accuracy and robustness",
        description="Fits RFAM over a grid of settings on every fold of every table, attacks each "
        "fit, and streams the results to a file. Run again, it goes on where it stopped.",
    )
    parser.add_argument("tables", type=pathlib.Path, nargs="+", help="CSV files with a header")
    parser.add_argument("--target", required=True, help="name of the column to predict")
    parser.add_argument("--drop", nargs="*", default=[], help="columns to leave out")
    parser.add_argument("--alpha", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--reg", type=float, nargs="+", default=[1.0, 0.1, 0.01, 0.001])
    parser.add_argument("--bandwidth", type=float, nargs="+", default=[10.0])
    parser.add_argument(
        "--kernel", nargs="+", default=["laplace"], help="laplace, gaussian, or exponents in (0, 2]"
    )
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--folds", type=int, default=4)
    parser.add_argument("--task", choices=("auto", "classification", "regression"), default="auto")
    parser.add_argument("--eps", type=float, nargs="*", default=[0.1, 1.0], help="attack radii")
    parser.add_argument("--attack", choices=("strong", "published"), default="strong")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("sweep.csv"))
    parser.add_argument("--plot", type=pathlib.Path, help="image of accuracy against robustness")
    parser.add_argument("--jobs", type=int, default=1, help="worker processes; -1 is every core")
    parser.add_argument("--threads", type=int, default=1, help="threads of each worker")
    parser.add_argument("--memory", help='memory for one worker, such as "8GB"')
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--retry-failed", action="store_true")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command; 1 when a setting failed or the input can't be used."""
    from normalign._sweep import sweep

    try:
        tables = {
            path.name.split(".")[0]: read_table(path, args.target, args.drop)
            for path in args.tables
        }
        result = sweep(
            tables,
            alpha=args.alpha,
            reg=args.reg,
            bandwidth=args.bandwidth,
            kernel=[_kernel(text) for text in args.kernel],
            n_iter=args.iterations,
            folds=args.folds,
            task=args.task,
            eps=args.eps,
            attack=args.attack,
            out=args.out,
            retry_failed=args.retry_failed,
            n_jobs=args.jobs,
            threads=args.threads,
            memory_limit=args.memory,
            random_state=args.seed,
            progress=not args.quiet,
        )
    except (ValueError, TypeError, ImportError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for table, row in result.best().items():
        figures = [f"alpha {row['alpha']:g}", f"reg {row['reg']:g}"]
        figures += [f"bandwidth {row['bandwidth']:g}", f"kernel {row['kernel']}"]
        figures += [
            f"{name.replace('_', ' ')} {value:.4f}"
            for name, value in row.items()
            if name.startswith(("test_score", "robust_"))
        ]
        print(f"{table}: {', '.join(figures)}")
    for row in result.failed[:10]:
        print(f"failed: {row['table']}, fold {row['fold']}: {row['error']}", file=sys.stderr)
    if args.plot is not None:
        result.plot(args.plot)
    return 1 if result.failed else 0


def _kernel(text: str) -> str | float:
    return text if text in ("laplace", "gaussian") else float(text)


def read_table(path: pathlib.Path, target: str, drop: list[str]) -> tuple[Any, Any]:
    """Features and target of a CSV file, as a DataFrame and a column.

    Raises:
        ImportError: pandas isn't installed.
        ValueError: a column is missing, or the target has gaps.
    """
    try:
        import pandas
    except ImportError as error:
        msg = "reading tables needs pandas: pip install pandas"
        raise ImportError(msg) from error
    frame = pandas.read_csv(path)
    for name in (target, *drop):
        if name not in frame.columns:
            known = ", ".join(map(str, frame.columns[:20]))
            msg = f"{path} has no column {name!r}; its columns are {known}"
            raise ValueError(msg)
    if frame[target].isna().any():
        msg = f"{path}: the target {target!r} has {int(frame[target].isna().sum())} gaps"
        raise ValueError(msg)
    return frame.drop(columns=[target, *drop]), frame[target]
