"""The Laplace kernel matrix: the public call, and what fits make of it.

python bench/bench_laplace_gram.py --threads 1
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import harness
import torch
from baselines import rfam as authors
from rfam_problems import BANDWIDTH, first_points, fresh, run, table
from torch import Tensor

import normalign
from normalign import _rfam_kernels
from normalign._rfam_kernels import Points


def laplace_gram(bench: harness.Bench, threads: int) -> None:
    """Shapes of the bars; the kernel in factor space, and the call with M factored each time."""
    for n, d in ((5000, 30), (2000, 8)):
        x, _ = table(n, d, 2)
        m = authors.start(x, 0.0)
        points = first_points(x)[2]
        rows = _rfam_kernels.padded(n)
        packed = torch.empty(rows * (rows + 48) // 2)

        def lower(points: Points = points, packed: Tensor = packed, n: int = n) -> None:
            p = fresh(points)
            _rfam_kernels.native("laplace_gram_packed", torch.float32)(
                p.kernel.code, p.kernel.exponent, n, p.u.shape[1], p.panels(threads).data_ptr(),
                0, 1e-3, packed.data_ptr(), threads,
            )  # fmt: skip

        def full(points: Points = points) -> Tensor:
            p = fresh(points)
            return _rfam_kernels.gram(p, p, threads)

        calls: dict[str, Callable[[], object]] = {
            "authors": lambda x=x, m=m: authors.gram(x, x, m, BANDWIDTH),
            "ours, what a solve needs": lower,
            "ours, full matrix": full,
            "normalign.laplace_gram": lambda x=x, m=m: normalign.laplace_gram(x, x, m, BANDWIDTH),
        }

        def check(calls: dict[str, Callable[[], object]] = calls) -> None:
            answers = {name: call() for name, call in calls.items() if "solve" not in name}
            harness.assert_same(answers, "authors", 1e-2)

        bench.case(f"gram n={n} d={d}", calls, "authors", check=check)


if __name__ == "__main__":
    sys.exit(run(__doc__, laplace_gram))
