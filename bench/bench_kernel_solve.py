"""The solve with a kernel matrix and a ridge: Cholesky in place against LU.

python bench/bench_kernel_solve.py --threads 1
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import harness
import torch.nn.functional as F
from baselines import rfam as authors
from rfam_problems import BANDWIDTH, run, table
from torch import Tensor

import normalign
from normalign._rfam_kernels import Factor


def kernel_solve(bench: harness.Bench, threads: int) -> None:
    """One solve with a matrix that is there already."""
    for n in (500, 1000, 2000):
        x, labels = table(n, 20, 3)
        y = F.one_hot(labels, 3).float()
        m = authors.start(x, 0.0)
        k = authors.gram(x, x, m, BANDWIDTH)
        k.fill_diagonal_(1.0)

        def ours(k: Tensor = k, y: Tensor = y) -> Tensor:
            factor = Factor.of_matrix(k, 1e-3, threads)
            assert factor is not None
            return factor.solve(y)

        calls = {
            "authors (LU)": lambda k=k, y=y: authors.solve(k, y, 1e-3),
            "ours": ours,
            "normalign.kernel_solve": lambda k=k, y=y: normalign.kernel_solve(k, y, 1e-3)[0],
        }

        def check(calls: dict[str, Callable[[], Tensor]] = calls) -> None:
            answers = {name: call() for name, call in calls.items()}
            harness.assert_same(answers, "authors (LU)", 1e-2)

        flops = {name: n**3 / 3 for name in calls} | {"authors (LU)": 2 * n**3 / 3}
        bench.case(
            f"solve n={n}", calls, "authors (LU)", check=check, memory=n == 2000, flops=flops
        )


if __name__ == "__main__":
    sys.exit(run(__doc__, kernel_solve))
