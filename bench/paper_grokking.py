"""The paper's grokking experiments on this package: runs, checks of the theory, and the report.

python bench/paper_grokking.py --set reduced --jobs 2 --minutes 30   (make paper)
python bench/paper_grokking.py --set full --jobs 8                   (every run of the report)
python bench/paper_grokking.py --task parity --method baseline orthogonal --seeds 5
python bench/paper_grokking.py --report                              (bench/results/paper.md)

Runs stream to a file; the same command, given again, goes on where the last one stopped.
"""

from __future__ import annotations

import argparse
import math
import pathlib
import time
from collections.abc import Iterable, Mapping
from itertools import product

from grokking import cost, regions, report, theory
from grokking.methods import METHODS
from grokking.runner import Spec, run_all
from grokking.tasks import TASKS, mnist_file

RESULTS = pathlib.Path(__file__).parent / "results"
PAPER = ("parity", "modadd", "mnist_ce", "mnist_se", "xor")  # fastest first
REDUCED_CAPS = {"parity": 5000, "xor": 300, "mnist_ce": 800, "mnist_se": 1500}
Caps = Mapping[str, int]
PAIR = ["orthogonal", "jacobian"]  # the ablation: the projection alone, at the same weight
OURS = ["baseline", *PAIR, "joint"]
RIVALS = [m for m in METHODS if m != "egalitarian"]  # its SVD takes seconds a step on XOR


def plan(seeds: int, tasks: Iterable[str], methods: Iterable[str], caps: Caps) -> list[Spec]:
    """Whole seeds first, so that a short budget compares fairly; the first seed is traced."""
    chosen = product(range(seeds), tasks, methods)
    return [Spec(t, m, s, epochs=caps.get(t), trace=s == 0) for s, t, m in chosen]


def phase_map(seeds: int) -> list[Spec]:
    """Training-set size against penalty weight, on sparse parity."""
    weights, samples = (0, 0.03, 0.3, 1, 3), (350, 500, 700, 1000)
    return [
        Spec("parity", "orthogonal" if weight else "baseline", seed, weight, count, 2500)
        for seed, weight, count in product(range(seeds), weights, samples)
    ]


SETS = {
    "reduced": plan(5, ["parity"], METHODS, REDUCED_CAPS) + plan(20, ["parity"], PAIR, REDUCED_CAPS)
    + plan(1, PAPER, RIVALS, REDUCED_CAPS) + plan(1, PAPER[2:4], ["egalitarian"], REDUCED_CAPS)
    + plan(1, ["tokens"], OURS, {}) + phase_map(1) + plan(3, PAPER, OURS, REDUCED_CAPS),
    "full": plan(10, PAPER, RIVALS, {}) + plan(10, PAPER[:-1], ["egalitarian"], {})
    + plan(5, ["tokens"], OURS, {}) + phase_map(3) + plan(20, PAPER, PAIR, {}),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("--task", nargs="+", choices=TASKS, default=list(PAPER))
    option("--method", nargs="+", choices=METHODS, default=list(METHODS))
    option("--seeds", type=int, default=3)
    option("--first-seed", type=int, default=0)
    option("--weight", type=float, nargs="+", default=[None], help="penalty weights")
    option("--epochs", type=int, help="stop here instead of at the task's cap")
    option("--set", choices=SETS, help="a planned set of runs, and then its report")
    option("--theory", type=int, metavar="SEEDS", help="check Theorems 1 to 3")
    option("--regions", nargs=2, metavar=("TASK", "METHOD"), help="draw the linear regions")
    option("--report", action="store_true", help="write paper.md from the file of runs")
    option("--cost", action="store_true", help="milliseconds per epoch by method")
    option("--jobs", type=int, default=1, help="processes, of one thread each")
    option("--minutes", type=float, default=math.inf)
    option("--runs", type=pathlib.Path, default=RESULTS / "paper_runs.jsonl")
    option("--out", type=pathlib.Path, default=RESULTS, help="folder of the report and its figures")
    args = parser.parse_args()
    start, planned = time.time(), args.set in ("reduced", "full")
    args.out.mkdir(parents=True, exist_ok=True)

    if args.cost:
        cost.write(args.task, args.out / "cost.json")
    if args.theory or planned:
        theory.write(args.theory or 3, args.out / "theory.json")
    if args.regions or (planned and mnist_file().exists()):
        task, method = args.regions or ("mnist_se", "orthogonal")
        regions.draw(task, method, 0, args.out / f"regions_{task}_{method}.png")
    if args.set or not (args.cost or args.theory or args.regions or args.report):
        seeds = range(args.first_seed, args.first_seed + args.seeds)
        specs = SETS[args.set] if args.set else [
            Spec(task, method, seed, weight, epochs=args.epochs, trace=seed == 0)
            for seed, weight, task, method in product(seeds, args.weight, args.task, args.method)
        ]  # fmt: skip
        if not mnist_file().exists():
            print(f"no {mnist_file()}, so no MNIST; NORMALIGN_DATA names its folder")
            specs = [s for s in specs if not s.task.startswith("mnist")]
        left = run_all(specs, args.runs, args.jobs, args.minutes - (time.time() - start) / 60)
        print(f"{len(left)} runs left" + ("; the same command goes on with them" if left else ""))
    if args.report or args.set:
        print(report.write(args.runs, args.out, [*PAPER, "xor_full"]))


if __name__ == "__main__":
    main()
