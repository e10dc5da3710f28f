"""Runs that stream to a file and resume from it, in several processes."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import math
import multiprocessing
import pathlib
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from tqdm import tqdm

import normalign
from grokking.methods import make_optimizer, make_step
from grokking.tasks import TASKS

Row = dict[str, Any]
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
    """Where the authors' code measures: each epoch to 100, each 10th to 1000, and so on."""
    return epoch % 10 ** max(len(str(epoch)) - 2, 0) == 0


class Training:
    """A task under a method, from a seed: model, data, optimizer and streams of random numbers."""

    def __init__(self, spec: Spec) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(spec.seed)
        self.task = TASKS[spec.task]
        self.setup = self.task.setup(**({"samples": spec.samples} if spec.samples else {}))
        # All methods see the same batches, and probes come from a stream of their own.
        self.batches, probes = (torch.Generator().manual_seed(1000 * spec.seed + i) for i in (0, 1))
        self.step = make_step(self.task, spec.method, self.setup, spec.weight_used, probes)
        self.optimizer = make_optimizer(self.task, spec.method, self.setup.model.parameters())

    def epoch(self) -> float:
        """Trains on every point once; returns the penalty of the last batch."""
        x, y, size = self.setup.x, self.setup.y, self.task.batch
        order = torch.randperm(len(x), generator=self.batches)
        for rows in order.split(size) if size else [slice(None)]:
            penalty = self.step(x[rows], y[rows])
            self.optimizer.step()
        return penalty

    def measure(self) -> Row:
        """Accuracies in percent on training points, test points and, if the task asks, noise."""
        setup = self.setup
        sets = {"train": (setup.x, setup.y), "test": (setup.x_test, setup.y_test)}
        if setup.disturb is not None:
            sets["noisy"] = (setup.disturb(setup.x_test), setup.y_test)
        with torch.no_grad():
            return {k: self.task.accuracy(setup.model(x), y) for k, (x, y) in sets.items()}

    def passed(self, measured: Row) -> bool:
        """Whether these accuracies count as grokked."""
        held_out = [v for k, v in measured.items() if k != "train"]
        return measured["train"] > self.task.train_above and min(held_out) > self.task.test_above

    def geometry(self) -> Row:
        """Means over some training points of what the paper follows through training."""
        embed, body = self.setup.penalised()
        x = embed(self.setup.x[:TRACED_POINTS]).detach()
        return {
            "normal": normalign.normal_alignment(body, x).mean().item(),
            "centroid": normalign.centroid_alignment(body, x).mean().item(),
            "rank": normalign.effective_rank(body, x).mean().item(),
        }


def run(spec: Spec, deadline: float = math.inf) -> Row | None:
    """Trains until it groks or reaches its cap; None if the deadline came first."""
    training = Training(spec)
    history: list[Row] = []
    memorised = grokked = None
    seconds = cpu = penalty = due = 0.0
    epoch, last = 0, spec.cap
    while True:
        if logged(epoch) or epoch == last:
            measured = training.measure()
            entry = {"epoch": epoch, **measured}
            if memorised is None and measured["train"] > training.task.train_above:
                memorised = epoch
            if grokked is None and training.passed(measured):
                grokked, at_grok = epoch, (seconds, cpu)
                last = min(last, epoch + 20 + epoch // 4) if spec.trace else epoch
            # Jacobians of many outputs cost more than training: at epochs 12% apart, and turns.
            if spec.trace and (epoch >= due or epoch in (memorised, grokked, last)):
                entry |= {"penalty": penalty, **training.geometry()}
                due = 1.12 * epoch
            history.append(entry)
        if epoch >= last or not math.isfinite(penalty):
            break
        if time.time() > deadline:
            return None
        wall_start, cpu_start = time.perf_counter(), time.process_time()
        penalty = training.epoch()
        seconds += time.perf_counter() - wall_start
        cpu += time.process_time() - cpu_start
        epoch += 1
    wall, processor = at_grok if grokked is not None else (seconds, cpu)
    return {
        "key": spec.key, "task": spec.task, "method": spec.method, "seed": spec.seed,
        "weight": spec.weight_used, "samples": len(training.setup.x), "cap": spec.cap,
        "memorised": memorised, "grokked": grokked, "epochs": epoch, "seconds": round(wall, 3),
        "cpu": round(processor, 3), "final": history[-1], "history": history if spec.trace else [],
    }  # fmt: skip


def read(path: pathlib.Path) -> dict[str, Row]:
    """Finished runs by key; the last of a key counts, a line cut short does not."""
    rows: dict[str, Row] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            row = json.loads(line)
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


def run_all(
    specs: Sequence[Spec], path: pathlib.Path, jobs: int = 1, minutes: float = math.inf
) -> list[Spec]:
    """Runs what the file lacks, in the given order; returns what the time did not suffice for."""
    todo, left = missing(specs, read(path)), []
    deadline = time.time() + 60 * minutes
    path.parent.mkdir(parents=True, exist_ok=True)
    text = path.read_text() if path.exists() else ""
    if text and not text.endswith("\n"):
        path.write_text(text + "\n")  # a line cut short stays, and is skipped
    spawn = multiprocessing.get_context("spawn")
    with (
        concurrent.futures.ProcessPoolExecutor(jobs, spawn) as pool,
        path.open("a") as out,
        tqdm(total=len(todo), unit="run", smoothing=0) as bar,
    ):
        futures = {pool.submit(run, spec, deadline): spec for spec in todo}
        for future in concurrent.futures.as_completed(futures):
            row = future.result()
            if row is None:
                left.append(futures[future])
                continue
            out.write(json.dumps(row) + "\n")
            out.flush()
            result = "never" if row["grokked"] is None else f"at epoch {row['grokked']}"
            bar.write(f"{row['key']}: grokked {result}, {row['seconds']:.1f} s")
            bar.update()
    return left
