"""What the CUDA kernels do on this GPU: answers first, then times, launches and rates.

    python bench/device_check.py --out FOLDER [--seconds 200] [--emulated]

Results are written to ``FOLDER/device_check.json`` after every case, and as a table to
``FOLDER/device_check.md``: whatever stops the run, what was measured is kept. ``--emulated`` puts
the host's kernels in the GPU's place, at small sizes: it shows that this script works, and its
times mean nothing. ``bench/MODEL.md`` says what to expect.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import json
import os
import pathlib
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from baselines import grokalign as peers
from baselines import problems
from baselines import rfam as rfam_authors
from baselines.problems import Problem
from device_agop import rfam_agop, rfam_agop_of_tables
from device_attack import rfam_attack
from device_gram import gram_precision
from device_protocol import rfam_table_protocol
from torch import Tensor

import normalign
from normalign import _gpu, _load, _rfam_cuda, reference, testing

Call = Callable[[], Any]
MODELS = ("parity", "parity64", "mnist", "modadd32", "modadd1116", "xor", "wide", "widegelu")
TABLES = ((150, 8, 2), (500, 16, 3), (1000, 20, 3))


class Machine:
    """The GPU, or the host that stands in for it."""

    def __init__(self, emulated: bool) -> None:
        self.emulated = emulated
        self.device = torch.device("cpu" if emulated else "cuda")

    @contextlib.contextmanager
    def host(self) -> Iterator[None]:
        """Runs the body with CPU tensors on the CPU's own kernels, also where emulated."""
        before, _gpu.emulating = _gpu.emulating, False
        try:
            yield
        finally:
            _gpu.emulating = before

    def name(self) -> str:
        return "emulated" if self.emulated else torch.cuda.get_device_name()

    def seconds(self, call: Call, budget: float = 0.3) -> float:
        """Median time of a call on the device, after a warm-up."""
        call()
        if self.emulated:
            start = time.perf_counter()
            call()
            return time.perf_counter() - start
        torch.cuda.synchronize()
        times, spent, start = [], 0.0, time.perf_counter()
        while len(times) < 5 or (spent < budget and len(times) < 200):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            call()
            last.record()
            last.synchronize()
            times.append(first.elapsed_time(last) / 1e3)
            spent = time.perf_counter() - start
        return statistics.median(times)

    def launches(self, call: Call) -> int:
        """Kernels that one call starts: all of them on a GPU, our own ones on the host."""
        call()
        if self.emulated:
            before = _load._emu.launches()
            call()
            return int(_load._emu.launches() - before)
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            call()
            torch.cuda.synchronize()
        return sum(
            event.device_type == torch.autograd.DeviceType.CUDA and "Mem" not in event.name
            for event in profile.events()
        )


def error(got: Tensor, exact: Tensor) -> float:
    """Largest difference, relative to the largest exact value."""
    scale = exact.double().abs().max().clamp_min(1e-30)
    return float((got.double() - exact.double()).abs().max() / scale)


def copy_rate(machine: Machine) -> dict[str, Any]:
    size = 1 << (12 if machine.emulated else 28)
    a = torch.randn(size, device=machine.device)
    b = torch.empty_like(a)
    seconds = machine.seconds(lambda: b.copy_(a))
    return {"case": "copy", "seconds": seconds, "gb_per_s": 8 * size / seconds / 1e9}


def projection(machine: Machine, rows: int, cols: int, dtype: torch.dtype) -> dict[str, Any]:
    """Forward, and backward of the squared norm (what GrokAlign needs)."""
    g, x = (torch.randn(rows, cols, dtype=dtype, device=machine.device) for _ in range(2))
    small = slice(0, 256)
    got = normalign.orthogonal_projection(g[small], x[small])[0]
    exact = reference.orthogonal_projection(g[small].double(), x[small].double())[0]
    leaf = g.clone().requires_grad_()
    ones = torch.ones(rows, dtype=dtype, device=machine.device)
    norm = normalign.orthogonal_projection(leaf, x)[1]
    with torch.no_grad():
        forward = machine.seconds(lambda: normalign.orthogonal_projection(g, x))
        plain = machine.seconds(lambda: reference.orthogonal_projection(g, x))
    backward = machine.seconds(lambda: torch.autograd.grad(norm, leaf, ones, retain_graph=True))
    size = g.element_size() * rows * cols
    return {
        "case": f"projection {rows} x {cols} {str(dtype)[6:]}",
        "error": error(got, exact),
        "seconds": forward,
        "gb_per_s": 3 * size / forward / 1e9,
        "backward_seconds": backward,
        "backward_gb_per_s": 3 * size / backward / 1e9,
        "reference_seconds": plain,
    }


def _on(problem: Problem, device: torch.device) -> Problem:
    model = copy.deepcopy(problem.model).to(device)
    return dataclasses.replace(problem, model=model, x=problem.x.to(device), y=problem.y.to(device))


def _ours(problem: Problem, vectors: Tensor | None = None) -> Call:
    loss_fn = _loss(problem)

    def step() -> Tensor:
        problem.model.zero_grad(set_to_none=True)
        loss = loss_fn(problem.model, problem.x, problem.y, probe_vectors=vectors)
        loss.backward()
        return loss.detach()

    return step


def _loss(problem: Problem) -> normalign.GrokAlignLoss:
    # The check of x for NaN is the CPU's: on a GPU it is not made.
    return normalign.GrokAlignLoss(problem.criterion, problem.weight, check_finite=False)


def _captured(problem: Problem) -> Call:
    """Forward, penalty, backward as one graph; gradients stay in their places."""
    model, loss_fn = problem.model, _loss(problem)

    def step(x: Tensor, y: Tensor) -> Tensor:
        model.zero_grad(set_to_none=True)
        loss = loss_fn(model, x, y)
        loss.backward()
        return loss.detach()

    run = normalign.graph_step(step, problem.x, problem.y)
    return lambda: run(*run.inputs)


def grokalign_step(machine: Machine, name: str) -> dict[str, Any]:
    problem = problems.make(name)
    if machine.emulated:  # a few rows: the host is slow
        problem = dataclasses.replace(problem, x=problem.x[:4], y=problem.y[:4])
    problem = _on(problem, machine.device)
    outputs = problem.widths[-1]
    vectors = torch.randn(1, problem.x.shape[0], outputs, device=machine.device).to(problem.x)
    _ours(problem, vectors)()
    got = [p.grad.clone() for p in problem.model.parameters() if p.grad is not None]
    peers.double_backward(problem, "orthogonal", lambda logits: vectors[0])()
    want = [p.grad for p in problem.model.parameters() if p.grad is not None]
    row = {
        "case": f"GrokAlign step {problem.name}",
        "path": normalign.explain(problem.model, problem.x).name,
        "error": max(error(a, b) for a, b in zip(got, want, strict=True)),
        "launches": machine.launches(_ours(problem)),
        "seconds": machine.seconds(_ours(problem)),
        "plain_seconds": machine.seconds(peers.plain(problem)),
        "authors_seconds": machine.seconds(peers.authors_joint(problem)),
        "authors_launches": machine.launches(peers.authors_joint(problem)),
    }
    if not machine.emulated:
        row["captured_seconds"] = machine.seconds(_captured(problem))
        row["authors_over_captured"] = row["authors_seconds"] / row["captured_seconds"]
    return row


def rfam_op(machine: Machine, name: str, n: int, width: int, c: int) -> dict[str, Any]:
    """A kernel between n points, against the definition in torch."""
    torch.manual_seed(0)
    u = torch.randn(n, width, device=machine.device)
    coef, v = (torch.randn(n, c, device=machine.device) for _ in range(2))
    calls: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
        "gram": (
            lambda u, a, v: _rfam_cuda.gram(u, u, 10.0, 1.0),
            lambda u, a, v: reference.laplace_gram(u, u, None, 10.0),
        ),
        "matvec": (
            lambda u, a, v: _rfam_cuda.matvec(u, u, a, 10.0, 1.0),
            lambda u, a, v: reference.laplace_matvec(u, u, a, None, 10.0),
        ),
        "gradient": (
            lambda u, a, v: _rfam_cuda.gradient(u, u, a, v, 10.0, 1.0),
            lambda u, a, v: reference.input_gradient(u, u, a, v, None, 10.0),
        ),
    }
    ours, definition = calls[name]
    few = [t[:200] for t in (u, coef, v)]
    row = {
        "case": f"{name} n {n} width {width} classes {c}",
        "error": error(ours(*few), definition(*(t.double() for t in few))),
        "seconds": machine.seconds(lambda: ours(u, coef, v)),
        "launches": machine.launches(lambda: ours(u, coef, v)),
    }
    if n <= 5000:
        row["reference_seconds"] = machine.seconds(lambda: definition(u, coef, v), 0.1)
    if name == "gram":
        row["gb_per_s"] = 4 * n * n / row["seconds"] / 1e9
    return row


def rfam_table(machine: Machine, n: int, d: int, c: int) -> dict[str, Any]:
    """Five iterations of a fit, against the reference and the authors' algorithm on this device."""
    from normalign import _rfam_fit

    n = 60 if machine.emulated else n
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, d, generator=generator).to(machine.device)
    y = torch.eye(c)[torch.randint(c, (n,), generator=generator)].to(machine.device)

    def fit() -> Any:
        return _rfam_fit.fit(x, y, reg=1e-3, bandwidth=10.0).machine

    row: dict[str, Any] = {"case": f"RFAM fit n {n} d {d} classes {c}"}
    m = fit().feature_matrix
    row["launches"] = machine.launches(fit)
    row["seconds"] = machine.seconds(fit)
    with _environment("NORMALIGN_IMPL", "reference"):
        row["error"] = error(m, fit().feature_matrix)
        row["reference_seconds"] = machine.seconds(fit)
    theirs = lambda: rfam_authors.fit(x, y, 1e-3, bandwidth=10.0)  # noqa: E731
    row["authors_seconds"] = machine.seconds(theirs)
    row["authors_launches"] = machine.launches(theirs)
    return row


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def cases(machine: Machine) -> Iterator[Callable[[], dict[str, Any]]]:
    """Every measurement, the most telling first."""
    small = machine.emulated
    yield lambda: copy_rate(machine)
    for rows, cols, dtype in (
        (1 << 18, 784, torch.float32),
        (1 << 20, 43, torch.float32),
        (1 << 15, 8192, torch.float32),
        (1 << 17, 784, torch.float64),
    ):
        yield lambda r=rows, c=cols, t=dtype: projection(machine, 16 if small else r, c, t)
    for name in ("parity", "mnist") if small else MODELS:
        yield lambda n=name: grokalign_step(machine, n)
    for n, d, c in TABLES[:1] if small else TABLES:
        yield lambda n=n, d=d, c=c: rfam_table_protocol(machine, n, d, c)
    for n, d, c in TABLES[:1] if small else TABLES:
        yield lambda n=n, d=d, c=c: rfam_table(machine, n, d, c)
    for folds, n, d, c, m in ((4, 113, 8, 2, 37), (4, 750, 20, 3, 250), (1, 5000, 30, 10, 500)):
        yield lambda a=(folds, n, d, c, m): rfam_attack(machine, *a)
    for name, n, width, c in (
        ("gram", 20000, 8, 1),
        ("gram", 20000, 30, 1),
        ("gram", 20000, 64, 1),
        ("gram", 2000, 20, 1),
        ("matvec", 20000, 16, 3),
        ("gradient", 5000, 20, 3),
    ):
        yield lambda a=name, n=n, w=width, c=c: rfam_op(machine, a, 70 if small else n, w, c)
    for n, width, clustered in (
        (20000, 64, False),
        (20000, 500, False),
        (20000, 64, True),
        (2000, 100, False),
    ):
        yield lambda a=(n, width, clustered): gram_precision(machine, *a)
    for n, width, c in ((1000, 20, 3), (2000, 30, 10), (10000, 30, 2), (500, 500, 10)):
        yield lambda a=(70 if small else n, width, c): rfam_agop(machine, *a)
    for count, n, width, c in ((10, 100, 8, 2), (10, 500, 20, 3)):
        yield lambda a=(count, 20 if small else n, width, c): rfam_agop_of_tables(machine, *a)


def markdown(report: dict[str, Any]) -> str:
    """The report as a table; times in microseconds."""
    lines = [
        f"# {report['device']}, torch {report['torch']}, {report['kernels']}",
        "",
        "| case | us | launches | error | GB/s | other |",
        "|---|---|---|---|---|---|",
    ]
    for row in report["cases"]:
        if "failed" in row:
            lines.append(f"| {row['case']} | | | | | failed: {row['failed']} |")
            continue
        shown = ("case", "seconds", "launches", "error", "gb_per_s")
        other = [
            f"{key.replace('_seconds', ' us')} {1e6 * value:.1f}"
            if key.endswith("_seconds")
            else f"{key} {value:.3g}"
            if isinstance(value, float)
            else f"{key} {value}"
            for key, value in row.items()
            if key not in shown
        ]
        rate = f"{row['gb_per_s']:.0f}" if "gb_per_s" in row else ""
        wrong = f"{row['error']:.1e}" if "error" in row else ""
        lines.append(
            f"| {row['case']} | {1e6 * row['seconds']:.1f} | {row.get('launches', '')} | {wrong} "
            f"| {rate} | {', '.join(other)} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    """Runs every case; the number of cases that failed is the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--seconds", type=float, default=200.0, help="no new case after this")
    parser.add_argument("--emulated", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    machine = Machine(args.emulated)
    report: dict[str, Any] = {
        "device": machine.name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kernels": "emulated" if args.emulated else _gpu.status(),
        "cases": [],
    }
    failed, start = 0, time.perf_counter()
    with testing.emulated_gpu() if args.emulated else contextlib.nullcontext():
        for index, case in enumerate(cases(machine)):
            if time.perf_counter() - start > args.seconds:
                report["cut_short"] = f"{args.seconds} s were over before case {index}"
                break
            torch.manual_seed(0)
            try:
                row = case()
            except Exception as problem:  # one bad case must not cost the others
                row = {"case": f"case {index}", "failed": f"{type(problem).__name__}: {problem}"}
                failed += 1
            report["cases"].append(row)
            print(json.dumps(row), flush=True)
            (args.out / "device_check.json").write_text(json.dumps(report, indent=1))
            (args.out / "device_check.md").write_text(markdown(report))
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
