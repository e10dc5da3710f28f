"""Products with the kernel matrix, never stored here, against storing it.

python bench/bench_laplace_matvec.py --threads 1
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
from normalign import _rfam_kernels, reference
from normalign._rfam_kernels import Points


def laplace_matvec(bench: harness.Bench, threads: int) -> None:
    """Predictions: m rows against n points and c outputs."""
    for m, n, d, c in ((50, 150, 8, 2), (500, 1500, 20, 3), (2000, 5000, 30, 10)):
        x, _ = table(n + m, d, c)
        coef = torch.randn(n, c)
        _, _, points = first_points(x)
        z, q = Points(points.u[:n], points.kernel), Points(points.u[n:], points.kernel)
        matrix = authors.start(x, 0.0)

        def kernel(q: Points = q, z: Points = z, coef: Tensor = coef) -> Tensor:
            return _rfam_kernels.matvec(fresh(q), fresh(z), coef, threads)

        arguments = x[n:], x[:n], matrix, BANDWIDTH

        def call(arguments=arguments, coef=coef) -> Tensor:
            return normalign.laplace_matvec(*arguments, coef)

        def stored(arguments=arguments, coef=coef) -> Tensor:
            return authors.gram(*arguments) @ coef

        calls: dict[str, Callable[[], Tensor]] = {
            "authors": stored, "ours, in factor space": kernel, "normalign.laplace_matvec": call,
        }  # fmt: skip

        def check(calls=calls, arguments=arguments, coef=coef) -> None:
            x, z, matrix, length = arguments
            exact = reference.laplace_matvec(
                x.double(), z.double(), coef.double(), matrix.double(), length
            )
            answers = {name: call() for name, call in calls.items()}
            harness.assert_same({"exact": exact, **answers}, "exact", 1e-2)
            del answers["authors"]
            harness.assert_same({"exact": exact, **answers}, "exact", 1e-5)

        bench.case(
            f"matvec m={m} n={n} d={d} c={c}", calls, "authors", check=check, memory=n == 5000
        )


if __name__ == "__main__":
    sys.exit(run(__doc__, laplace_matvec))
