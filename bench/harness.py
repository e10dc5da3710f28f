"""Timing, table, CSV and comparison for every bench.

A bench hands over named callables that do the same work. Their answers are compared first; then
they run interleaved, in rounds, so that whatever disturbs the machine disturbs all of them. Ratios
are taken within each round, and the median of these paired ratios is what a bench reports.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import dataclasses
import gc
import pathlib
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Call = Callable[[], Any]
# A ratio counts as worse only if it moved by more than this, and past the old run's spread.
TOLERANCE = 0.05


@dataclasses.dataclass
class Row:
    """One callable in one case; times in microseconds per call."""

    case: str
    name: str
    threads: int
    clock: str
    median: float
    p20: float
    p80: float
    ratio: float  # median over rounds of own time / the base's time in the same round
    ratio_p20: float
    ratio_p80: float
    over_floor: float  # the same, against the case's floor; 0 where it has none
    gflops: float  # 0 where the case states no operation count
    peak_mib: float  # memory that one call needs above what it started with; -1 if not measured


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that every bench has; a bench adds its own."""
    p = argparse.ArgumentParser(description=description)
    p.add_argument("--device", default="cpu")
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--rounds", type=int, default=15)
    p.add_argument(
        "--budget", type=float, default=20.0, help="seconds per case (5 rounds at least)"
    )
    p.add_argument("--sample", type=float, default=0.01, help="seconds per callable and round")
    p.add_argument("--quick", action="store_true", help="few rounds: shows that it runs")
    p.add_argument("--csv", help="write the rows to this file")
    p.add_argument("--compare", help="CSV of an earlier run; a regression beyond noise fails")
    return p


class Bench:
    """Runs cases, prints their tables, and keeps the rows for CSV and comparison."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.rows: list[Row] = []
        self.device = torch.device(args.device)
        self.rounds = 3 if args.quick else args.rounds
        self.sample = 0.001 if args.quick else args.sample
        torch.set_num_threads(args.threads)
        self.facts = facts(args.threads)
        for key, value in self.facts.items():
            print(f"# {key}: {value}")

    def case(
        self,
        case: str,
        calls: Mapping[str, Call],
        base: str,
        *,
        check: Callable[[], None] | None = None,
        floor: str | None = None,
        flops: float | Mapping[str, float] = 0.0,
        clock: str | None = None,
        prepare: Mapping[str, Call] | None = None,
        memory: bool = False,
        quiet: bool = False,
    ) -> dict[str, Row]:
        """Times ``calls`` interleaved and prints one line each.

        Args:
            case: What is measured, for the table and for later comparison.
            calls: Callables without arguments; a call runs once or more in each round.
            base: Name of the callable that ratios refer to.
            check: Runs first; it compares answers and raises if they differ.
            floor: Name of the callable that does the least possible, for a second ratio.
            flops: Operations of one call, for GFLOP/s; one number, or one for each name.
            clock: ``"process"`` (CPU time; the default with one thread) or ``"wall"``.
            prepare: For some names, what to set before each of their samples (not timed; a call
                that is not timed either follows it).
            memory: Also measure the peak memory of one call.
            quiet: Print nothing.
        """
        if check is not None:
            check()
        clock = clock or ("process" if self.args.threads == 1 and not self.on_gpu else "wall")
        samples = self._sample(calls, clock, prepare or {})
        result = {}
        for name, times in samples.items():
            ratios = _paired(times, samples[base])
            over_floor = statistics.median(_paired(times, samples[floor])) if floor else 0.0
            work = flops.get(name, 0.0) if isinstance(flops, Mapping) else flops
            result[name] = Row(
                case=case, name=name, threads=self.args.threads, clock=clock,
                **_spread("", times, 1e6), **_spread("ratio", ratios), over_floor=over_floor,
                gflops=work / statistics.median(times) / 1e9,
                peak_mib=self._peak_mib(calls[name]) if memory else -1.0,
            )  # fmt: skip
        self.rows += result.values()
        if not quiet:
            print_rows(list(result.values()))
        return result

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def _sync(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def _sample(
        self, calls: Mapping[str, Call], clock: str, prepare: Mapping[str, Call]
    ) -> dict[str, list[float]]:
        """Seconds per call of every callable in every round."""
        now = time.process_time if clock == "process" else time.perf_counter
        repeats, round_seconds = {}, 0.0
        for name, call in calls.items():
            prepare.get(name, _nothing)()
            call()  # compilation, workspaces
            self._sync()
            start = time.perf_counter()
            call()
            self._sync()
            seconds = time.perf_counter() - start
            repeats[name] = max(1, round(self.sample / seconds))
            round_seconds += repeats[name] * seconds
        rounds = min(self.rounds, max(5, int(self.args.budget / round_seconds)))
        samples: dict[str, list[float]] = {name: [] for name in calls}
        names = list(calls)
        gc.collect()
        gc.disable()
        try:
            for i in range(rounds):
                shift = i % len(names)  # nobody always runs after the same neighbour's caches
                for name in names[shift:] + names[:shift]:
                    call, n = calls[name], repeats[name]
                    if name in prepare:
                        prepare[name]()
                        call()
                    self._sync()
                    start = now()
                    for _ in range(n):
                        call()
                    self._sync()
                    samples[name].append((now() - start) / n)
        finally:
            gc.enable()
        return samples

    def _peak_mib(self, call: Call) -> float:
        """Growth of memory during one call; of the process's resident set on the CPU."""
        if self.on_gpu:
            self._sync()
            before = torch.cuda.memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            call()
            self._sync()
            return (torch.cuda.max_memory_allocated(self.device) - before) / 2**20
        try:
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)  # else freed blocks hide what the call takes
            pathlib.Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        except (OSError, AttributeError):  # not Linux with glibc
            return -1.0
        before = _status_kib("VmRSS")
        call()
        return max(0.0, (_status_kib("VmHWM") - before) / 1024)

    def finish(self) -> int:
        """Writes the CSV, compares with an earlier one, and returns the exit status."""
        if self.args.csv:
            write_csv(self.args.csv, self.rows, self.facts)
        if not self.args.compare:
            return 0
        worse = regressions(read_csv(self.args.compare), self.rows)
        print("\n".join(worse) if worse else f"no regression against {self.args.compare}")
        return 1 if worse else 0


def _nothing() -> None:
    pass


def _paired(times: Sequence[float], base: Sequence[float]) -> list[float]:
    return [t / b for t, b in zip(times, base, strict=True)]


def _spread(name: str, values: Sequence[float], scale: float = 1.0) -> dict[str, float]:
    """Median, 20th and 80th percentile, as fields of a row."""
    ordered = sorted(scale * v for v in values)
    last = len(ordered) - 1
    prefix = f"{name}_" if name else ""
    return {
        name or "median": statistics.median(ordered),
        prefix + "p20": ordered[round(0.2 * last)],
        prefix + "p80": ordered[round(0.8 * last)],
    }


def _status_kib(field: str) -> int:
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise OSError(field)


def print_rows(rows: Sequence[Row]) -> None:
    """One line for each callable."""
    width = max(len(r.name) for r in rows) + 2
    print(f"\n{rows[0].case}  ({rows[0].threads} thread(s), {rows[0].clock} time)")
    titles = (
        f"{'us/call':>11}{'p20':>11}{'p80':>11}{'ratio':>8}{'/floor':>8}{'GFLOP/s':>9}{'MiB':>8}"
    )
    print(f"  {'':{width}}{titles}")
    for r in rows:
        floor = f"{r.over_floor:.2f}" if r.over_floor else "-"
        gflops = f"{r.gflops:.1f}" if r.gflops else "-"
        mib = f"{r.peak_mib:.1f}" if r.peak_mib >= 0 else "-"
        print(
            f"  {r.name:{width}}{r.median:11.1f}{r.p20:11.1f}{r.p80:11.1f}{r.ratio:8.2f}"
            f"{floor:>8}{gflops:>9}{mib:>8}",
            flush=True,
        )


def matmul_gflops(dtype: torch.dtype, device: str = "cpu", n: int = 1024) -> float:
    """What a large matrix product reaches here: the measured peak that fractions refer to."""
    a, b = torch.randn(n, n, dtype=dtype, device=device), torch.randn(n, n, dtype=dtype)
    b = b.to(device)
    best = float("inf")
    for _ in range(6):
        start = time.perf_counter()
        (a @ b).sum().item()
        best = min(best, time.perf_counter() - start)
    return 2 * n**3 / best / 1e9


def facts(threads: int) -> dict[str, Any]:
    """Where and with what a run was made."""
    peaks = [matmul_gflops(dtype) for dtype in (torch.float32, torch.float64)]
    result = {
        "commit": _git_commit(),
        "processor": _processor(),
        "threads": threads,
        "torch": torch.__version__,
        "measured peak": "{:.0f} GFLOP/s f32, {:.0f} f64 (1024^3 matmul)".format(*peaks),
    }
    try:
        from normalign._config import config

        result["instruction set"] = config()["instruction set"]
    except ImportError:
        result["instruction set"] = "normalign is not importable"
    return result


def _git_commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=9"]
    folder = pathlib.Path(__file__).parent
    try:
        run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return run.stdout.strip()


def _processor() -> str:
    info = {}
    try:
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            info.setdefault(key.strip(), value.strip())
    except OSError:
        return platform.processor() or platform.machine()
    family = f"family {info.get('cpu family', '?')} model {info.get('model', '?')}"
    return f"{info.get('model name', platform.machine())} ({family})"


def write_csv(path: str, rows: Sequence[Row], header: Mapping[str, Any]) -> None:
    """Rows as CSV, with the facts of the run as leading comment lines."""
    with open(path, "w", newline="") as file:
        for key, value in header.items():
            file.write(f"# {key}: {value}\n")
        writer = csv.DictWriter(file, [f.name for f in dataclasses.fields(Row)])
        writer.writeheader()
        writer.writerows(dataclasses.asdict(r) for r in rows)


def read_csv(path: str) -> list[Row]:
    """The rows of an earlier run."""
    types = {"str": str, "int": int, "float": float}
    fields = {f.name: types[str(f.type)] for f in dataclasses.fields(Row)}
    with open(path, newline="") as file:
        lines = (line for line in file if not line.startswith("#"))
        return [Row(**{k: fields[k](v) for k, v in r.items()}) for r in csv.DictReader(lines)]


def regressions(old: Sequence[Row], new: Sequence[Row]) -> list[str]:
    """One message for each ratio that got worse beyond the noise of both runs."""
    before = {(r.case, r.name, r.threads, r.clock): r for r in old}
    messages = []
    for r in new:
        o = before.get((r.case, r.name, r.threads, r.clock))
        if o and r.ratio > o.ratio * (1 + TOLERANCE) and r.ratio_p20 > o.ratio_p80:
            messages.append(
                f"REGRESSION {r.case} / {r.name}: ratio {r.ratio:.3f} "
                f"(p20 {r.ratio_p20:.3f}), was {o.ratio:.3f} (p80 {o.ratio_p80:.3f})"
            )
    return messages


def flatten(answer: Any) -> list[torch.Tensor]:
    """All tensors in nested tuples, lists and dicts, in order."""
    if isinstance(answer, torch.Tensor):
        return [answer]
    if isinstance(answer, Mapping):
        answer = [answer[k] for k in sorted(answer)]
    return [t for part in answer for t in flatten(part)]


def assert_same(answers: Mapping[str, Any], reference: str, tolerance: float) -> None:
    """Raises if an answer differs from the reference's.

    The error of each tensor is relative to the largest value of the reference's tensor.
    """
    expected = flatten(answers[reference])
    for name, answer in answers.items():
        got = flatten(answer)
        if len(got) != len(expected):
            msg = f"{name} has {len(got)} results, {reference} has {len(expected)}"
            raise AssertionError(msg)
        for i, (g, e) in enumerate(zip(got, expected, strict=True)):
            scale = max(e.abs().max().item(), torch.finfo(e.dtype).tiny)
            error = (g.double() - e.double()).abs().max().item() / scale
            if not error <= tolerance:
                msg = f"{name}: result {i} differs from {reference} by {error:.2g} of its size"
                raise AssertionError(msg)


if __name__ == "__main__":
    sys.exit("harness.py is imported by the benches; run one of bench/bench_*.py")
