"""Runs that stream to a file and resume from it, in several processes."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import math
import multiprocessing
import pathlib
import time
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

import normalign
from grokking.methods import make_optimizer, make_step
from grokking.tasks import TASKS, Setup

Row = dict[str, Any]
BEAT = "{} epoch {} train {:.0f} test {:.0f}"
TRACED_POINTS = 16  # training points whose Jacobians a traced run measures


@dataclasses.dataclass(frozen=True)
class Spec:
    """One run; what is None is as the task has it."""

    task: str
    method: str
    seed: int
    weight: float | None = None
    samples: int | None = None
    epochs: int | None = None
    trace: bool = False  # also measures geometry, and goes on a little after grokking

    @property
    def key(self) -> str:
        parts = [self.task, self.method, f"s{self.seed}"]
        parts += [f"w{self.weight_used:g}"] if self.weight_used else []
        parts += [f"n{self.samples}"] if self.samples else []
        return "/".join(parts)

    @property
    def weight_used(self) -> float:
        default = TASKS[self.task].weights.get(self.method, 0.0)
        return default if self.weight is None else self.weight

    @property
    def cap(self) -> int:
        return self.epochs or TASKS[self.task].max_epochs


def logged(epoch: int) -> bool:
    """The epochs at which the authors' code measures accuracy: finer early, coarser late."""
    return (
        epoch % (1 if epoch < 100 else 10 if epoch < 1000 else 100 if epoch < 10_000 else 1000) == 0
    )


def geometry(setup: Setup) -> Row:
    """Means over some training points of what the paper follows through training."""
    x = setup.x[:TRACED_POINTS]
    model = setup.model
    if hasattr(model, "embed"):
        x, model = model.embed(x).detach(), model.body
    return {
        "normal": normalign.normal_alignment(model, x).mean().item(),
        "centroid": normalign.centroid_alignment(model, x).mean().item(),
        "rank": normalign.effective_rank(model, x).mean().item(),
    }


def accuracy(spec: Spec, setup: Setup, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return TASKS[spec.task].accuracy(setup.model(x), y)


def run(spec: Spec, deadline: float = math.inf, heartbeat: Any = None) -> Row | None:
    """Trains until it groks or reaches its cap; None if the deadline came first."""
    task = TASKS[spec.task]
    torch.set_num_threads(1)
    torch.manual_seed(spec.seed)
    setup = task.setup(**({"samples": spec.samples} if spec.samples else {}))
    model = setup.model
    # All methods see the same batches, and probes come from a stream of their own.
    batches, probes = (torch.Generator().manual_seed(1000 * spec.seed + i) for i in range(2))
    step = make_step(task, spec.method, model, spec.weight_used, probes)
    optimizer = make_optimizer(task, spec.method, model.parameters())
    count = len(setup.x)
    size = task.batch or count

    history: list[Row] = []
    memorised = grokked = None
    seconds = cpu = penalty = due = 0.0
    epoch, last = 0, spec.cap
    while True:
        if logged(epoch) or epoch == last:
            entry: Row = {"epoch": epoch, "train": accuracy(spec, setup, setup.x, setup.y)}
            entry["test"] = accuracy(spec, setup, setup.x_test, setup.y_test)
            passed = entry["train"] > task.train_above and entry["test"] > task.test_above
            if setup.disturb is not None:
                entry["noisy"] = accuracy(spec, setup, setup.disturb(setup.x_test), setup.y_test)
                passed = passed and entry["noisy"] > task.test_above
            if memorised is None and entry["train"] > task.train_above:
                memorised = epoch
            if grokked is None and passed:
                grokked, at_grok = epoch, (seconds, cpu)
                last = min(last, epoch + 20 + epoch // 4) if spec.trace else epoch
            # Jacobians of many outputs cost more than training: at epochs 12% apart, and turns.
            if spec.trace and (epoch >= due or epoch in (memorised, grokked, last)):
                entry |= {"penalty": penalty, **geometry(setup)}
                due = 1.12 * epoch
            history.append(entry)
            if heartbeat is not None:
                heartbeat.put((spec.key, epoch, entry["train"], entry["test"]))
        if epoch >= last or not math.isfinite(penalty):
            break
        if time.time() > deadline:
            return None
        wall_start, cpu_start = time.perf_counter(), time.process_time()
        order = torch.randperm(count, generator=batches)
        for rows in [slice(None)] if size == count else order.split(size):
            penalty = step(setup.x[rows], setup.y[rows])
            optimizer.step()
        seconds += time.perf_counter() - wall_start
        cpu += time.process_time() - cpu_start
        epoch += 1
    wall, processor = at_grok if grokked is not None else (seconds, cpu)
    return {
        "key": spec.key, "task": spec.task, "method": spec.method, "seed": spec.seed,
        "weight": spec.weight_used, "samples": count, "cap": spec.cap, "memorised": memorised,
        "grokked": grokked, "epochs": epoch, "seconds": round(wall, 3), "cpu": round(processor, 3),
        "final": history[-1], "history": history if spec.trace else [],
    }  # fmt: skip


def epoch_cost(task_name: str, method: str, seconds: float = 1.0) -> float:
    """Processor milliseconds of one epoch of training on one thread."""
    task = TASKS[task_name]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    setup = task.setup()
    weight = task.weights.get(method, 0.0)
    step = make_step(task, method, setup.model, weight, torch.Generator().manual_seed(0))
    optimizer = make_optimizer(task, method, setup.model.parameters())
    epochs, start = 0, time.process_time()
    while epochs < 3 or time.process_time() - start < seconds:
        order = torch.arange(len(setup.x)).split(task.batch or len(setup.x))
        for rows in order if task.batch else [slice(None)]:
            step(setup.x[rows], setup.y[rows])
            optimizer.step()
        epochs += 1
    return 1000 * (time.process_time() - start) / epochs


def read(path: pathlib.Path) -> dict[str, Row]:
    """Finished runs by key; the last of a key counts, a line cut short does not."""
    rows: dict[str, Row] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        rows[row["key"]] = row
    return rows


def missing(specs: Iterable[Spec], rows: dict[str, Row]) -> list[Spec]:
    """The runs that the file does not answer: absent, stopped earlier, or lacking a trace."""

    def answered(spec: Spec) -> bool:
        row = rows.get(spec.key)
        if row is None or (spec.trace and not row["history"]):
            return False
        return row["grokked"] is not None or row["cap"] >= spec.cap

    return [s for s in dict.fromkeys(specs) if not answered(s)]


def _results(specs: Sequence[Spec], jobs: int, deadline: float, bar: Any) -> Iterator[Any]:
    """Pairs of a spec and its row, as they come; with one job in this process."""
    if jobs == 1:
        show = SimpleNamespace(put=lambda beat: bar.set_postfix_str(BEAT.format(*beat)))
        yield from ((spec, run(spec, deadline, show)) for spec in specs)
        return
    context = multiprocessing.get_context("spawn")
    with (
        context.Manager() as manager,
        concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool,
    ):
        beats = manager.Queue()
        futures = {pool.submit(run, spec, deadline, beats): spec for spec in specs}
        waiting = set(futures)
        while waiting:
            done, waiting = concurrent.futures.wait(waiting, timeout=2)
            running = {}
            while not beats.empty():
                beat = beats.get()
                running[beat[0]] = BEAT.format(*beat)
            if running:
                bar.set_postfix_str("; ".join(running.values()))
            yield from ((futures[f], f.result()) for f in done)


def run_all(
    specs: Sequence[Spec], path: pathlib.Path, jobs: int = 1, minutes: float = math.inf
) -> list[Spec]:
    """Runs what the file lacks, in the given order; returns what the time did not suffice for."""
    todo = missing(specs, read(path))
    deadline = time.time() + 60 * minutes
    left = []
    path.parent.mkdir(parents=True, exist_ok=True)
    text = path.read_text() if path.exists() else ""
    if text and not text.endswith("\n"):
        path.write_text(text + "\n")  # a line cut short stays, and is skipped
    with path.open("a") as out, tqdm(total=len(todo), unit="run", smoothing=0) as bar:
        for spec, row in _results(todo, jobs, deadline, bar):
            if row is None:
                left.append(spec)
                continue
            out.write(json.dumps(row) + "\n")
            out.flush()
            result = "never" if row["grokked"] is None else f"at epoch {row['grokked']}"
            bar.write(f"{row['key']}: grokked {result}, {row['seconds']:.1f} s")
            bar.update()
    return left
