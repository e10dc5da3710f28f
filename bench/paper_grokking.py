"""The paper's grokking experiments on this package: runs, checks of the theory, and the report.

python bench/paper_grokking.py --set reduced --jobs 2 --minutes 30   (make paper)
python bench/paper_grokking.py --set full --jobs 8                   (every run of the report)
python bench/paper_grokking.py --task parity --method baseline orthogonal --seeds 5
python bench/paper_grokking.py --report                              (bench/results/paper.md)

Runs stream to a file; the same command, given again, goes on where the last one stopped.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import pathlib
import time

from grokking import regions, report, theory
from grokking.methods import METHODS
from grokking.runner import Spec, epoch_cost, run_all
from grokking.tasks import TASKS, mnist_file

RESULTS = pathlib.Path(__file__).parent / "results"
PAPER = ("parity", "modadd", "mnist_ce", "mnist_se", "xor")  # fastest first
# An SVD of every gradient takes seconds a step on XOR, and four times the epoch on MNIST.
TOO_SLOW = {("xor", "egalitarian"), ("xor_full", "egalitarian")}
SLOW = {("mnist_ce", "egalitarian"), ("mnist_se", "egalitarian")}
REDUCED_CAPS = {"parity": 5000, "xor": 500, "mnist_ce": 1000, "mnist_se": 1500}


def comparison(seeds: int, reduced: bool = True) -> list[Spec]:
    """Every method on every task; whole seeds first, so that a short budget compares fairly."""
    left_out = TOO_SLOW | SLOW if reduced else TOO_SLOW
    caps = REDUCED_CAPS if reduced else {}
    return [
        Spec(task, method, seed, epochs=caps.get(task), trace=seed == 0)
        for seed, task, method in itertools.product(range(seeds), PAPER, METHODS)
        if (task, method) not in left_out
    ]


def parity(seeds: int) -> list[Spec]:
    """The task that the headline speed-up is about."""
    return [s for s in comparison(seeds) if s.task == "parity"]


def ablation(seeds: int) -> list[Spec]:
    """The projection alone: orthogonal against plain Jacobian norm at the same weight."""
    return [
        Spec(task, method, seed, epochs=REDUCED_CAPS.get(task), trace=seed == 0)
        for task, seed, method in itertools.product(PAPER, range(seeds), ("orthogonal", "jacobian"))
    ]


def phase_map(seeds: int) -> list[Spec]:
    """Training-set size against penalty weight, on sparse parity."""
    weights, samples = (0, 0.03, 0.3, 1, 3), (350, 500, 700, 1000)
    return [
        Spec("parity", "orthogonal" if weight else "baseline", seed, weight, count, 2500)
        for seed, weight, count in itertools.product(range(seeds), weights, samples)
    ]


def tokens(seeds: int) -> list[Spec]:
    """The penalty on the embeddings of a small transformer."""
    return [
        Spec("tokens", method, seed, weight, trace=seed == 0 and weight in (None, 0.01))
        for seed in range(seeds)
        for method, weight in (
            ("baseline", None), ("orthogonal", 0.001), ("orthogonal", 0.01), ("orthogonal", 0.1),
            ("jacobian", 0.01),
        )
    ]  # fmt: skip


SETS = {
    "reduced": lambda: parity(5) + comparison(3) + tokens(2) + phase_map(1) + ablation(20),
    "full": lambda: comparison(10, reduced=False) + tokens(5) + phase_map(3) + ablation(20),
    "comparison": lambda: comparison(3),
    "tokens": lambda: tokens(3),
    "phase": lambda: phase_map(1),
    "ablation": lambda: ablation(20),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", nargs="+", choices=TASKS, default=list(PAPER))
    parser.add_argument("--method", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--weight", type=float, nargs="+", default=[None], help="penalty weights")
    parser.add_argument("--epochs", type=int, help="stop here instead of at the task's cap")
    parser.add_argument("--set", choices=SETS, help="a planned set of runs, and then its report")
    parser.add_argument("--theory", type=int, metavar="SEEDS", help="check Theorems 1 to 3")
    parser.add_argument("--regions", nargs=2, metavar=("TASK", "METHOD"), help="draw the regions")
    parser.add_argument(
        "--report", action="store_true", help="write paper.md from the file of runs"
    )
    parser.add_argument("--cost", action="store_true", help="milliseconds per epoch by method")
    parser.add_argument("--jobs", type=int, default=1, help="processes, of one thread each")
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--runs", type=pathlib.Path, default=RESULTS / "paper_runs.jsonl")
    args = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    start = time.time()

    if args.cost:
        for task, method in itertools.product(args.task, args.method):
            print(f"{task} {method}: {epoch_cost(task, method):.1f} ms", flush=True)
        return
    if args.theory or args.set in ("reduced", "full"):
        numbers = theory.check(args.theory or 3)
        (RESULTS / "theory.json").write_text(json.dumps(numbers, indent=1) + "\n")
    if args.regions or (args.set in ("reduced", "full") and mnist_file().exists()):
        task, method = args.regions or ("mnist_se", "joint")
        regions.draw(task, method, 0, RESULTS / f"regions_{task}_{method}.png")
    if args.set or not (args.theory or args.regions or args.report):
        chosen = itertools.product(range(args.seeds), args.weight, args.task, args.method)
        specs = SETS[args.set]() if args.set else [
            Spec(task, method, args.first_seed + seed, weight, epochs=args.epochs)
            for seed, weight, task, method in chosen
        ]  # fmt: skip
        if not mnist_file().exists():
            print(f"no {mnist_file()}, so no MNIST; NORMALIGN_DATA names its folder")
            specs = [s for s in specs if not s.task.startswith("mnist")]
        minutes = args.minutes - (time.time() - start) / 60
        left = run_all(specs, args.runs, args.jobs, minutes)
        print(f"{len(left)} runs left" + ("; the same command goes on with them" if left else ""))
    if args.report or args.set:
        print(report.write(args.runs, RESULTS, [*PAPER, "xor_full"]))


if __name__ == "__main__":
    main()
