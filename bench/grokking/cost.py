"""What an epoch of training costs in processor time, by task and method."""

from __future__ import annotations

import json
import pathlib
import statistics
import time
from collections.abc import Iterable

from grokking.runner import Spec, Training

METHODS = ("joint_authors", "joint", "orthogonal", "jacobian", "baseline")
ROUNDS = 5


def epochs(tasks: Iterable[str], seconds: float = 0.15) -> dict[str, dict[str, float]]:
    """Median milliseconds of an epoch on one thread; methods take turns, so that all share noise.

    Each turn trains for ``seconds`` of processor time, and for one epoch at least.
    """
    costs = {}
    for task in tasks:
        trainings = {method: Training(Spec(task, method, 0)) for method in METHODS}
        measured: dict[str, list[float]] = {method: [] for method in METHODS}
        for _ in range(ROUNDS + 1):
            for method, training in trainings.items():
                count, start = 0, time.process_time()
                while count == 0 or time.process_time() - start < seconds:
                    training.epoch()
                    count += 1
                measured[method].append(1000 * (time.process_time() - start) / count)
        # The first round is warming up.
        costs[task] = {m: statistics.median(times[1:]) for m, times in measured.items()}
    return costs


def write(tasks: Iterable[str], path: pathlib.Path) -> None:
    """Adds the tasks' costs to a JSON file, which the report reads."""
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | epochs(tasks), indent=1) + "\n")
