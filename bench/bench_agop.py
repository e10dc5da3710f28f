"""The average gradient outer product over all points, with its form picked by predicted cost.

python bench/bench_agop.py --threads 1
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import harness
import torch.nn.functional as F
from baselines import rfam as authors
from rfam_problems import BANDWIDTH, first_points, fresh, problem, run, table
from torch import Tensor

from normalign import _rfam_agop
from normalign._rfam_kernels import Points


def agop(bench: harness.Bench, threads: int) -> None:
    """Shapes of the bars, and some where the forms are close; compared at a trace of d."""
    for n, d, c in (
        (500, 8, 2), (1000, 20, 3), (2000, 16, 3), (2000, 30, 10), (2000, 100, 10),
        (10000, 30, 2), (500, 500, 10),
    ):  # fmt: skip
        big = n > 5000
        x, labels = table(n, d, c)
        y = F.one_hot(labels, c).float()
        m = authors.start(x, 0.0)
        a = y - 1 / c if big else problem(n, d, c)[2]  # no solve of 10,000 just for this
        _, factor, points = first_points(x)

        def ours(points: Points = points, a: Tensor = a) -> Tensor:
            p = fresh(points)
            return _rfam_agop.agop(p, p, a, threads)

        def check(
            x: Tensor = x, a: Tensor = a, m: Tensor = m, factor: Tensor = factor,
            ours: Callable[[], Tensor] = ours,
        ) -> None:  # fmt: skip
            scaled = authors.to_trace(factor @ ours() @ factor.T)
            exact = authors.to_trace(authors.agop(x, x, a, m, BANDWIDTH))
            harness.assert_same({"authors": exact, "ours": scaled}, "authors", 1e-2)

        method = _rfam_agop.agop_method(n, n, c, points.u.shape[1], True)
        bench.case(
            f"agop n={n} d={d} c={c} ({method})",
            {"authors": lambda x=x, a=a, m=m: authors.agop(x, x, a, m, BANDWIDTH), "ours": ours},
            "authors",
            check=check,
            memory=n == 2000,
        )


if __name__ == "__main__":
    sys.exit(run(__doc__, agop))
