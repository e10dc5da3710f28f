"""RFAM against the algorithm of its authors: stages, a fit, the whole published protocol.

Answers are compared first, with all points in both AGOPs and, for attacks, the same start. The
authors' float32 answers carry rounding of 1e-4 and more, so values are compared to 1e-2 there; the
float64 definition that ours follow to 1e-5 is checked in tests.

    python bench/bench_rfam.py                       everything, some minutes
    python bench/bench_rfam.py --only gram solve     some parts
    python bench/bench_rfam.py --only fit --threads 2

The stages are those of bench/bench_laplace_gram.py and its like, one file for each operator.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import harness
import torch
import torch.nn.functional as F
from baselines import rfam as authors
from bench_agop import agop
from bench_kernel_solve import kernel_solve
from bench_laplace_gram import laplace_gram
from bench_pgd_attack import pgd_attack
from rfam_problems import BANDWIDTH, table
from torch import Tensor

from normalign import _rfam_fit, _rfam_pgd


def bench_fit(bench: harness.Bench, threads: int) -> None:
    for n, d, c in ((500, 20, 3), (2000, 20, 3)):
        x, labels = table(n, d, c)
        y = F.one_hot(labels, c).float()

        def theirs(x: Tensor = x, y: Tensor = y) -> Tensor:
            return authors.fit(x, y, 1e-3)[0]

        def ours(x: Tensor = x, y: Tensor = y) -> Tensor:
            return _rfam_fit.fit(x, y).machine.feature_matrix

        calls = {"authors": theirs, "ours": ours}
        xrfm = _xrfm(x, y)
        if xrfm is not None:
            calls["xrfm"] = xrfm

        def check(ours: Callable[[], Tensor] = ours, theirs: Callable[[], Tensor] = theirs) -> None:
            harness.assert_same({"authors": theirs(), "ours": ours()}, "authors", 1e-2)

        rows = bench.case(
            f"fit n={n} d={d} c={c}, 5 iterations", calls, "authors", check=check, memory=True
        )
        square = n * n * 4 / 2**20
        for name, row in rows.items():
            print(f"  {name}: peak {row.peak_mib / square:.2f} n^2 floats")


def _xrfm(x: Tensor, y: Tensor) -> Callable[[], object] | None:
    """A fit of the package ``xrfm`` with the same settings, where it is installed."""
    try:
        from xrfm import RFM  # type: ignore[import-not-found]
    except ImportError:
        return None

    def call() -> object:
        # 4 updates between 5 solves, all points in the AGOP, no early stop. Its first M is I.
        model = RFM(
            kernel="l2", bandwidth=BANDWIDTH, iters=4, device="cpu", tuning_metric="mse",
            verbose=False,
        )  # fmt: skip
        model.fit(
            (x, y), (x[:10], y[:10]), reg=1e-3, method="solve", M_batch_size=len(x),
            early_stop_rfm=False, return_best_params=False, total_points_to_sample=len(x),
        )  # fmt: skip
        return model.M

    return call


def bench_protocol(bench: harness.Bench, threads: int) -> None:
    for n, d, c in ((200, 10, 3), (1000, 20, 3), (2000, 20, 3)):
        x, labels = table(n, d, c)
        order = torch.randperm(n, generator=torch.Generator().manual_seed(1))
        split = (order[: n // 2], order[n // 2 :])
        quarters = order.tensor_split(4)
        folds = [
            (torch.cat([q for j, q in enumerate(quarters) if j != i]), quarters[i])
            for i in range(4)
        ]

        def theirs(x=x, labels=labels, c=c, split=split, folds=folds) -> object:
            return authors.protocol(x, labels, c, split, folds)

        def ours(x=x, labels=labels, c=c, split=split, folds=folds) -> object:
            return our_protocol(x, labels, c, split, folds)

        def check(ours=ours, theirs=theirs) -> None:
            a, b = theirs(), ours()
            difference = abs(a[0].accuracy - b[0].accuracy)
            if difference > 0.02:
                msg = f"validation accuracies differ by {difference:.3f}"
                raise AssertionError(msg)

        bench.case(f"protocol N={n}", {"authors": theirs, "ours": ours}, "authors", check=check)


def our_protocol(
    x: Tensor, labels: Tensor, classes: int, split: tuple[Tensor, Tensor],
    folds: list[tuple[Tensor, Tensor]], alpha: float = 0.0,
) -> tuple[authors.Search, list[list[float]]]:  # fmt: skip
    """The published protocol on the fit core."""
    y = F.one_hot(labels, classes).to(x.dtype)
    train, val = split
    train_x, train_y, val_labels = x[train], y[train], labels[val]
    shared = _rfam_fit.prepare(train_x, alpha=alpha, x_val=x[val])

    def evaluate(f: Tensor) -> float:
        return accuracy(f, val_labels)

    best, factor = authors.Search(-1.0, 0.0, 0, x), shared.factor
    for reg in authors.REGS:
        found = _rfam_fit.fit(train_x, train_y, reg=reg, shared=shared, evaluate=evaluate)
        score = found.history[found.best_iter]["score"]
        if score > best.accuracy:
            best = authors.Search(score, reg, found.best_iter, x)
            factor = found.machine.factor
    results = []
    for a, b in folds:
        known, query, targets, own = x[a], x[b], y[b], labels[b]
        machine = _rfam_fit.solve_machine(known, y[a], known.mean(0), factor, best.reg, BANDWIDTH)
        row = [accuracy(machine.decision(query), own)]
        for eps in authors.EPSILONS:
            start = query + torch.empty_like(query).uniform_(-eps, eps)
            found = _rfam_pgd.pgd(
                machine, query, targets, eps=eps, step=eps / 10, iters=20, start=start
            )
            row.append(accuracy(found.outputs, own))
        results.append(row)
    return best, results


def accuracy(outputs: Tensor, labels: Tensor) -> float:
    """Share of rows whose largest output is the label's."""
    return (outputs.argmax(1) == labels).sum().item() / len(labels)


PARTS = {
    "gram": laplace_gram, "solve": kernel_solve, "agop": agop, "pgd": pgd_attack,
    "fit": bench_fit, "protocol": bench_protocol,
}  # fmt: skip


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    args = parser.parse_args()
    bench = harness.Bench(args)
    torch.manual_seed(0)
    for part in args.only:
        PARTS[part](bench, args.threads)
    return bench.finish()


if __name__ == "__main__":
    sys.exit(main())
