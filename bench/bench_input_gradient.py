"""The gradient of a kernel machine in its inputs: analytic, against autograd.

python bench/bench_input_gradient.py --threads 1
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import harness
import torch
from baselines import rfam as authors
from rfam_problems import BANDWIDTH, run, table
from torch import Tensor

import normalign
from normalign import reference


def input_gradient(bench: harness.Bench, threads: int) -> None:
    """One gradient at each of m points, as an attack takes it in every step."""
    for m, n, d, c in ((50, 150, 8, 2), (250, 750, 20, 3), (500, 2000, 60, 10)):
        x, _ = table(n + m, d, c)
        coef, cotangent = torch.randn(n, c), torch.randn(m, c)
        matrix = authors.start(x, 0.0)
        arguments = x[n:], x[:n], matrix, BANDWIDTH

        def by_autograd(arguments=arguments, coef=coef, cotangent=cotangent) -> Tensor:
            q, z, matrix, length = arguments
            q = q.detach().requires_grad_()
            qm, zm = q @ matrix, z @ matrix
            squared = (qm * q).sum(1, keepdim=True) + (zm * z).sum(1) - 2 * qm @ z.T
            f = torch.exp(-squared.clamp(min=1e-12).sqrt() / length) @ coef
            return torch.autograd.grad(f, q, cotangent)[0]

        def call(arguments=arguments, coef=coef, cotangent=cotangent) -> Tensor:
            return normalign.input_gradient(*arguments, coef, cotangent)

        calls: dict[str, Callable[[], Tensor]] = {
            "authors (autograd)": by_autograd, "normalign.input_gradient": call,
        }  # fmt: skip

        def check(calls=calls, arguments=arguments, coef=coef, cotangent=cotangent) -> None:
            *tensors, length = arguments
            q, z, matrix, a, v = (t.double() for t in (*tensors, coef, cotangent))
            exact = reference.input_gradient(q, z, a, v, matrix, length)
            answers = {name: call() for name, call in calls.items()}
            harness.assert_same({"exact": exact, **answers}, "exact", 1e-2)
            del answers["authors (autograd)"]
            harness.assert_same({"exact": exact, **answers}, "exact", 1e-5)

        bench.case(f"gradient m={m} n={n} d={d} c={c}", calls, "authors (autograd)", check=check)


if __name__ == "__main__":
    sys.exit(run(__doc__, input_gradient))
