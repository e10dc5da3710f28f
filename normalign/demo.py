"""The demonstration: two tasks that a network first memorises, and how soon GrokAlign groks them.

Sparse parity and scikit-learn's digits, each trained with and without the penalty, from the same
weights. A run has grokked at the first epoch with train accuracy above 99% and test accuracy above
90%.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from normalign.geometry import normal_alignment
from normalign.grokalign import grokalign
from normalign.loss import GrokAlignLoss

TRAIN_BAR, TEST_BAR = 0.99, 0.90
MEASURED_ROWS = 200  # of the data, for the penalty and alignment curves


@dataclasses.dataclass
class Task:
    """Data, network and optimizer of one experiment; full-batch training."""

    name: str
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    widths: tuple[int, ...]
    init_scale: float  # of the initial weights: large ones memorise first
    weight: float  # of the penalty
    optimizer: dict[str, Any]
    budget: int  # epochs after which a run is given up


@dataclasses.dataclass
class Run:
    """What one training run did; the curves are sampled at ``epochs``."""

    task: str
    method: str
    seed: int
    budget: int
    epochs: list[int] = dataclasses.field(default_factory=list)
    train_accuracy: list[float] = dataclasses.field(default_factory=list)
    test_accuracy: list[float] = dataclasses.field(default_factory=list)
    penalty: list[float] = dataclasses.field(default_factory=list)
    alignment: list[float] = dataclasses.field(default_factory=list)
    grokked: int | None = None  # epoch
    seconds: float = 0.0  # of training, until it grokked or was given up


def sparse_parity(budget: int = 4000, n: int = 2000) -> Task:
    """The parity of 3 bits among 43; half of the samples train."""
    bits = torch.randint(2, (n, 43), generator=torch.Generator().manual_seed(0))
    x, y = bits.float(), bits[:, :3].sum(1) % 2
    half = n // 2
    optimizer = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-25, "weight_decay": 0.1}
    return Task(
        "sparse parity", (x[:half], y[:half]), (x[half:], y[half:]), (43, 200, 200, 2), 1.0, 1.0,
        optimizer, budget,
    )  # fmt: skip


def digits(budget: int = 4000, n_train: int = 300) -> Task:
    """Handwritten digits, 8 x 8: 300 train, 1497 test, from large initial weights."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(data.data / 16, dtype=torch.float32)[order]
    y = torch.tensor(data.target)[order].long()
    return Task(
        "digits", (x[:n_train], y[:n_train]), (x[n_train:], y[n_train:]), (64, 200, 200, 10), 8.0,
        2e-3, {"lr": 1e-3, "weight_decay": 0.01}, budget,
    )  # fmt: skip


TASKS: dict[str, Callable[..., Task]] = {"parity": sparse_parity, "digits": digits}


def make_model(task: Task, seed: int) -> nn.Sequential:
    """ReLU layers from a seed; torch's global random state stays as it was."""
    layers: list[nn.Module] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for d, n in zip(task.widths[:-1], task.widths[1:], strict=True):
            layers += [nn.Linear(d, n), nn.ReLU()]
    model = nn.Sequential(*layers[:-1])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(task.init_scale)
    return model


def _accuracy(logits: Tensor, y: Tensor) -> float:
    return (logits.argmax(1) == y).float().mean().item()


def train(
    task: Task, weight: float, seed: int, bar: Any = None, curves: bool = False, after: float = 0.0
) -> Run:
    """Trains until it groks, or the budget is spent.

    Args:
        task: What to train.
        weight: Of the penalty; 0 is the baseline.
        seed: Of the initial weights and the probes.
        bar: A tqdm bar that shows the accuracies.
        curves: Whether to sample penalty and alignment on the way.
        after: Goes on after grokking, for this share of the epochs that it took.
    """
    model = make_model(task, seed)
    # fused=True: the default AdamW costs up to half a plain step on networks of this size
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **task.optimizer)
    loss_fn = GrokAlignLoss(nn.CrossEntropyLoss(), weight, seed=seed)
    (x, y), (x_test, y_test) = task.train, task.test
    run = Run(task.name, "GrokAlign" if weight else "baseline", seed, task.budget)
    last, sample_at = task.budget, 1
    for epoch in range(1, task.budget + 1):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss_fn(model, x, y).backward()
        optimizer.step()
        if run.grokked is None:
            run.seconds += time.perf_counter() - start
        assert loss_fn.last is not None
        train_accuracy = _accuracy(loss_fn.last.logits, y)
        with torch.no_grad():
            test_accuracy = _accuracy(model(x_test), y_test)
        if run.grokked is None and train_accuracy > TRAIN_BAR and test_accuracy > TEST_BAR:
            run.grokked = epoch
            last = min(last, math.ceil(epoch * (1 + after)))
        if curves and (epoch >= sample_at or epoch == last):
            sample_at = math.ceil(epoch * 1.06)
            run.epochs.append(epoch)
            run.train_accuracy.append(train_accuracy)
            run.test_accuracy.append(test_accuracy)
            _measure(run, model, x[:MEASURED_ROWS], x_test[:MEASURED_ROWS])
        if bar is not None:
            bar.update()
            if epoch % 10 == 0 or epoch == last:
                bar.set_postfix_str(f"train {train_accuracy:4.0%} test {test_accuracy:4.0%}")
        if epoch == last:
            break
    return run


def _measure(run: Run, model: nn.Module, x: Tensor, x_test: Tensor) -> None:
    """The exact penalty on training rows, and the alignment on test rows."""
    with torch.no_grad():
        run.penalty.append(grokalign(model, x, exact=True)[1].item())
    run.alignment.append(normal_alignment(model, x_test).mean().item())


def _with_progress(task: Task, weight: float, seed: int, **options: Any) -> Run:
    from tqdm import tqdm

    name = f"{task.name}, {'GrokAlign' if weight else 'baseline'}, seed {seed}"
    layout = "{desc:34}{n:5d} epochs {elapsed} {rate_fmt} {postfix}"
    with tqdm(total=task.budget, desc=name, bar_format=layout, unit=" epochs") as bar:
        return train(task, weight, seed, bar, **options)


def table(runs: Sequence[Run]) -> str:
    """Epochs and seconds to grok, one line for each task and method."""
    lines = [f"{'task':15}{'method':11}{'seeds':>5}  {'epochs to grok':22}{'seconds':>8}  grokked"]
    medians: dict[tuple[str, str], tuple[float, float]] = {}
    for key in dict.fromkeys((r.task, r.method) for r in runs):
        group = [r for r in runs if (r.task, r.method) == key]
        done = [r for r in group if r.grokked is not None]
        seconds = statistics.median(r.seconds for r in group)
        epochs = f"not within {group[0].budget}"
        if len(done) > len(group) / 2:
            values = sorted(r.grokked or r.budget for r in group)
            median = statistics.median(values)
            medians[key] = (median, seconds)
            epochs = f"{median:.0f}"
            if len(group) > 1:
                epochs += f" (median; {values[0]} to {values[-1]})"
        counts = f"{len(done)} of {len(group)}"
        lines.append(f"{key[0]:15}{key[1]:11}{len(group):5}  {epochs:22}{seconds:8.2f}  {counts}")
    for name in dict.fromkeys(r.task for r in runs):
        base, ours = medians.get((name, "baseline")), medians.get((name, "GrokAlign"))
        if base and ours:
            lines.append(
                f"{name}: {base[0] / ours[0]:.0f} times fewer epochs, "
                f"{base[1] / ours[1]:.0f} times less training time"
            )
    return "\n".join(lines)


def _figure() -> Callable[[Sequence[Run], str], None] | None:
    """What draws the figure, or ``None``, said before the training and not after it."""
    try:
        from normalign._demo_figure import save
    except ImportError as error:
        print(f"no figure: {error}; pip install 'normalign[plot]' brings matplotlib")
        return None
    return save


def add_parser(commands: Any) -> None:
    """Adds ``demo`` to the command line."""
    p = commands.add_parser("demo", help="sparse parity and digits, with and without GrokAlign")
    p.add_argument("--task", nargs="+", choices=tuple(TASKS), default=list(TASKS))
    p.add_argument("--seeds", type=int, default=5, help="GrokAlign runs per task (baseline: one)")
    p.add_argument("--budget", type=int, default=4000, help="epochs after which a run is given up")
    p.add_argument("--output", default="demo_grokalign.png", help="where the figure goes")
    p.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Runs the demonstration."""
    save = _figure()
    runs = []
    for name in args.task:
        task = TASKS[name](args.budget)
        runs.append(_with_progress(task, 0.0, 0, curves=True, after=0.3))
        runs.append(_with_progress(task, task.weight, 0, curves=True, after=2.0))
        runs += [_with_progress(task, task.weight, s) for s in range(1, args.seeds)]
    print(f"\nGrokked: train accuracy above {TRAIN_BAR:.0%}, test accuracy above {TEST_BAR:.0%}.")
    print(f"{torch.get_num_threads()} thread(s); seconds are those of the training steps.\n")
    print(table(runs))
    if save is not None:
        save([r for r in runs if r.epochs], args.output)
        print(f"\nfigure: {args.output}")
    return 0
