"""The published attack on a kernel machine: 20 signed steps from a random start.

python bench/bench_pgd_attack.py --threads 1
"""

from __future__ import annotations

import sys

import harness
import torch
import torch.nn.functional as F
from baselines import rfam as authors
from rfam_problems import BANDWIDTH, first_points, run, table
from torch import Tensor

from normalign import _rfam_fit, _rfam_pgd


def pgd_attack(bench: harness.Bench, threads: int) -> None:
    """A quarter of a table attacked, the rest being the machine's points.

    Both end with the machine's outputs at the attacked points, which robust accuracy needs.
    """
    for n, d, c in ((150, 8, 2), (490, 16, 3), (750, 20, 3), (750, 60, 10)):
        x, labels = table(n + n // 3, d, c)
        x, q, labels, own = x[:n], x[n:], labels[:n], labels[n:]
        y, target = F.one_hot(labels, c).float(), F.one_hot(own, c).float()
        mean, factor, _points = first_points(x)
        machine = _rfam_fit.solve_machine(x, y, mean, factor, 1e-2, BANDWIDTH)
        m, coef = machine.feature_matrix.float(), machine.dual_coef
        start = q + torch.empty_like(q).uniform_(-1, 1)

        def theirs(q=q, own=own, x=x, coef=coef, m=m, start=start) -> tuple[Tensor, Tensor]:
            moved = authors.pgd(q, own, x, coef, m, BANDWIDTH, 1.0, first=start)
            return moved, authors.gram(moved, x, m, BANDWIDTH) @ coef

        def ours(machine=machine, q=q, target=target, start=start) -> tuple[Tensor, Tensor]:
            found = _rfam_pgd.pgd(machine, q, target, eps=1.0, step=0.1, iters=20, start=start)
            return found.x, found.outputs

        def check(ours=ours, theirs=theirs) -> None:
            # Signs of gradients near 0 differ by rounding: a few coordinates take other steps.
            same = ((ours()[0] - theirs()[0]).abs() < 1e-3).float().mean().item()
            if same < 0.97:
                msg = f"only {same:.3f} of the coordinates agree"
                raise AssertionError(msg)

        bench.case(
            f"pgd n={n} m={len(q)} d={d} c={c}", {"authors": theirs, "ours": ours}, "authors",
            check=check,
        )  # fmt: skip


if __name__ == "__main__":
    sys.exit(run(__doc__, pgd_attack))
