"""The bars of the GrokAlign step: what is required, aimed at, and measured on this machine."""

from __future__ import annotations

import copy
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import bench_grokalign as steps
import harness
import torch
from baselines import grokalign as peers
from baselines import problems

import normalign
from normalign import _load
from normalign.testing import instruction_set, isa_names


@dataclasses.dataclass
class Line:
    """One line of the table."""

    what: str
    bar: str
    aim: str
    measured: str
    ok: bool
    remark: str = ""


# model: (bar, aim) of the step relative to a plain one, one probe
ORTHOGONAL = {
    "parity": (1.4, 1.28),
    "parity64": (1.2, 1.10),
    "mnist": (1.7, 1.55),
    "mnist1024": (1.3, 1.3),
    "modadd32": (0.7, 0.55),
    "modadd1116": (1.4, 1.22),
    "xor": (1.75, 1.55),
    "wide": (1.6, 1.48),
    "widegelu": (1.6, 1.48),
}
JOINT = {"parity": (1.9, 1.7), "mnist": (2.0, 1.7), "wide": (2.2, 1.7)}
GENERAL = ("cnn", "transformer")
SPEEDUP = 1.7
OVERHEAD_US = 15.0
ERROR = {torch.float32: 2e-6, torch.float64: 1e-10}


def run(bench: harness.Bench, models: Sequence[str]) -> None:
    """Measures every line that concerns ``models`` and prints the table."""
    lines: list[Line] = []
    for name in models:
        problem = problems.make(name)
        if name in ORTHOGONAL:
            lines.append(_ratio(bench, problem, "orthogonal", *ORTHOGONAL[name]))
            lines.append(_accuracy(problem))
        if name in JOINT:
            lines.append(_ratio(bench, problem, "joint", *JOINT[name]))
            lines.append(_two_threads(bench, problem))
            lines += _avx2(bench, problem)
        if name in GENERAL:
            lines.append(_general(bench, problem))
        if name == "tiny":
            lines.append(_overhead(problem))
    print_table(lines)


def print_table(lines: Sequence[Line]) -> None:
    """As Markdown, to be quoted."""
    print("\n| what | bar | aim | measured | | remark |\n|---|---|---|---|---|---|")
    for n in lines:
        verdict = "meets" if n.ok else "MISSES"
        print(f"| {n.what} | {n.bar} | {n.aim} | {n.measured} | {verdict} | {n.remark} |")


def _ratio(
    bench: harness.Bench, problem: problems.Problem, penalty: str, bar: float, aim: float
) -> Line:
    """The step relative to a plain one; the authors' and the floor beside it."""
    ours = steps.ours(problem, penalty)
    steps.check(problem, penalty, {"normalign": ours})
    calls: dict[str, Callable[[], Any]] = {
        "plain": peers.plain(problem),
        "authors (joint)": peers.authors_joint(problem),
        "normalign": ours(None),
        "6C products": peers.ProductFloor(problem),
    }
    title = f"{problem.name}, {penalty}"
    rows = bench.case(title, calls, "plain", floor="6C products", memory=True)
    row, authors, floor = rows["normalign"], rows["authors (joint)"], rows["6C products"]
    remark = (
        f"authors {authors.ratio:.2f}, 6C products {floor.ratio:.2f}, "
        f"memory {row.peak_mib:.1f} MiB (plain {rows['plain'].peak_mib:.1f}); "
        f"{steps.our_name(problem, penalty)}"
    )
    return Line(title, f"{bar:g}", f"{aim:g}", f"{row.ratio:.2f}", row.ratio <= bar, remark)


def _accuracy(problem: problems.Problem) -> Line:
    """Largest error of a gradient, relative to that gradient's size, against float64."""
    torch.manual_seed(1)
    dtype = problem.x.dtype
    v = steps.probes_for(problem, "orthogonal")
    got = steps.answer(problem, steps.ours(problem, "orthogonal"), v)
    twin = dataclasses.replace(problem, model=copy.deepcopy(problem.model).double())
    twin.x = problem.x.double()
    if problem.y.is_floating_point():
        twin.y = problem.y.double()
    make = steps.eager_peers(twin, "orthogonal")["double backward"]
    exact = steps.answer(twin, make, v.double())
    errors = [((g.double() - e).norm() / e.norm()).item() for g, e in zip(got, exact, strict=True)]
    worst, bar = max(errors), ERROR[dtype]
    return Line(
        f"{problem.name}, gradients against float64", f"{bar:g}", "", f"{worst:.1e}", worst <= bar,
        "relative, largest over loss, penalty and every parameter",
    )  # fmt: skip


def _two_threads(bench: harness.Bench, problem: problems.Problem) -> Line:
    """Elapsed time with one thread over that with two."""
    ours, plain = steps.ours(problem, "orthogonal")(None), peers.plain(problem)
    calls = {"one": ours, "two": ours, "plain one": plain, "plain two": plain}
    prepare = {
        name: functools.partial(torch.set_num_threads, 2 if name.endswith("two") else 1)
        for name in calls
    }
    title = f"{problem.name}, 1 and 2 threads"
    rows = bench.case(title, calls, "two", clock="wall", prepare=prepare)
    torch.set_num_threads(bench.args.threads)
    speedup = rows["one"].ratio
    plain_speedup = rows["plain one"].median / rows["plain two"].median
    remark = f"times faster than with one thread; the plain step: {plain_speedup:.2f}"
    return Line(title, f"{SPEEDUP:g}", "", f"{speedup:.2f}", speedup >= SPEEDUP, remark)


def _avx2(bench: harness.Bench, problem: problems.Problem) -> list[Line]:
    """With AVX2 kernels only, against the products through torch."""
    if "avx2" not in isa_names():
        return []
    ours = steps.ours(problem, "orthogonal")(None)

    def avx2() -> None:
        with instruction_set("avx2"):
            ours()

    title = f"{problem.name}, AVX2 only, against the 6C products"
    calls = {"6C products": peers.ProductFloor(problem), "normalign avx2": avx2}
    ratio = bench.case(title, calls, "6C products")["normalign avx2"].ratio
    remark = "torch picks its own instruction set for the products"
    return [Line(title, "1", "", f"{ratio:.2f}", ratio <= 1, remark)]


def _general(bench: harness.Bench, problem: problems.Problem) -> Line:
    """A model outside the fused stack, against the best eager form; the compiled one beside it."""
    makes = steps.eager_peers(problem, "orthogonal")
    makes["normalign"] = steps.ours(problem, "orthogonal")
    steps.check(problem, "orthogonal", makes)
    calls = {"plain": peers.plain(problem)} | {key: make(None) for key, make in makes.items()}
    with steps.skipping("torch.func compiled"):
        compiled = steps.compiled_peer(problem, "orthogonal")
        steps.check(problem, "orthogonal", {"compiled": compiled})
        calls["torch.func compiled"] = compiled(None)
    rows = bench.case(f"{problem.name}, orthogonal", calls, "normalign", memory=True)
    best = min(("double backward", "torch.func"), key=lambda n: rows[n].ratio)
    ratio = 1 / rows[best].ratio
    # equal algorithms differ by noise: the bar is met where the spread reaches 1
    ok = rows[best].ratio_p80 >= 1
    others = [f"{key} {row.ratio:.2f}" for key, row in rows.items() if key != "normalign"]
    remark = "relative to normalign: " + ", ".join(others)
    return Line(f"{problem.name}, against {best}", "1", "compiled", f"{ratio:.2f}", ok, remark)


class _Timed:
    """Stands for the extension, or one of its objects, and adds up the time spent inside."""

    def __init__(self, inside: Any, clock: list[float]) -> None:
        self._inside = inside
        self._clock = clock

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inside, name)
        if not callable(value):
            return value

        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            result = value(*args)
            self._clock[0] += time.perf_counter() - start
            works = type(result).__name__.startswith("GrokalignStackStep")
            return _Timed(result, self._clock) if works else result

        return timed


def _overhead(problem: problems.Problem) -> Line:
    """Elapsed time of one call on a tiny model, less the time inside the extension."""
    module, clock = _load._C, [0.0]
    samples = []
    _load._C = _Timed(module, clock)
    try:
        for i in range(600):
            clock[0] = 0.0
            start = time.perf_counter()
            normalign.grokalign(problem.model, problem.x)
            total = time.perf_counter() - start
            if i >= 100:
                samples.append(1e6 * (total - clock[0]))
    finally:
        _load._C = module
    us = statistics.median(samples)
    remark = "one call of grokalign, less the time in the extension; " + steps.our_name(
        problem, "orthogonal"
    )
    return Line(
        "overhead of a call, us", f"{OVERHEAD_US:g}", "", f"{us:.1f}", us <= OVERHEAD_US, remark
    )
