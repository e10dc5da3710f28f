"""A full training step with the GrokAlign penalty, against every other way to take it.

A step is zero_grad, forward, loss, penalty, backward. All ways are checked to give the same
penalty and gradients on the same probes, then timed interleaved, each drawing its own probes.

    python bench/bench_grokalign.py                      every model, every peer
    python bench/bench_grokalign.py --model parity wide  some models
    python bench/bench_grokalign.py --penalty joint      the authors' penalty
    python bench/bench_grokalign.py --table              the table of bars, in a few minutes
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator, Mapping

import harness
import torch
from baselines import grokalign as peers
from baselines import problems
from baselines.problems import Problem
from torch import Tensor

import normalign

Make = Callable[[peers.Draw | None], peers.Step]
# Above this many parameters answers are compared in the model's own dtype, not in float64.
LARGE = 10**7


def ours(problem: Problem, penalty: str, implementation: str = "auto") -> Make:
    """The step through ``normalign.GrokAlignLoss``, on drawn or given probes."""
    model, x, y = problem.model, problem.x, problem.y
    kind = "sphere" if penalty == "joint" else "gaussian"
    loss_fn = normalign.GrokAlignLoss(
        problem.criterion, problem.weight, penalty=penalty, probes=kind,
        implementation=implementation,
    )  # fmt: skip

    def make(draw: peers.Draw | None) -> peers.Step:
        vectors = None if draw is None else draw(x)[None]

        def step() -> tuple[Tensor, Tensor]:
            model.zero_grad()
            loss_fn(model, x, y, vectors).backward()
            assert loss_fn.last is not None
            return loss_fn.last.task_loss, loss_fn.last.penalty

        return step

    return make


def our_name(problem: Problem, penalty: str) -> str:
    """``normalign``, with the path that this model takes."""
    return f"normalign {normalign.explain(problem.model, problem.x, penalty=penalty).name}"


def eager_peers(problem: Problem, penalty: str) -> dict[str, Make]:
    """The peers that compute this penalty without a compiler."""
    if penalty == "joint":
        return {"authors": lambda d: peers.authors_joint(problem, d or peers.sphere)}
    return {
        "double backward": lambda d: peers.double_backward(problem, penalty, d or peers.gaussian),
        "torch.func": lambda d: peers.torch_func(problem, penalty, d or peers.gaussian),
    }


def compiled_peer(problem: Problem, penalty: str) -> Make:
    """torch.func as a whole through the inductor."""
    return lambda d: peers.torch_func(problem, penalty, d or peers.gaussian, compiled="inductor")


def gradients(problem: Problem) -> list[Tensor]:
    return [p.grad for p in problem.model.parameters() if p.grad is not None]


def answer(problem: Problem, make: Make, v: Tensor) -> list[Tensor]:
    """Loss, penalty and gradients on the probes ``v``."""
    loss, value = make(lambda _: v)()
    return [loss, value, *(g.clone() for g in gradients(problem))]


def probes_for(problem: Problem, penalty: str) -> Tensor:
    with torch.no_grad():
        logits = problem.model(problem.x)
    draw = peers.sphere if penalty == "joint" else peers.gaussian
    return draw(logits)


def exact_answer(problem: Problem, penalty: str, v: Tensor) -> list[Tensor]:
    """The same by double backward, in float64 unless the model is large."""
    size = sum(p.numel() for p in problem.model.parameters())
    dtype = torch.float64 if size < LARGE else problem.x.dtype
    twin = copy.copy(problem)
    twin.model = copy.deepcopy(problem.model).to(dtype)
    twin.x = problem.x.to(dtype)
    if problem.y.is_floating_point():
        twin.y = problem.y.to(dtype)
    make = next(iter(eager_peers(twin, penalty).values()))
    return answer(twin, make, v.to(dtype))


def check(problem: Problem, penalty: str, makes: Mapping[str, Make]) -> None:
    """Everyone gives the same loss, penalty and gradients on the same probes.

    float32 sums of up to 40,000 terms, in different orders, and sign changes of single
    pre-activations next to 0 leave differences of this size; a wrong formula leaves larger ones.
    """
    v = probes_for(problem, penalty)
    answers = {name: answer(problem, make, v) for name, make in makes.items()}
    answers["exact"] = exact_answer(problem, penalty, v)
    harness.assert_same(answers, "exact", 1e-9 if problem.x.dtype is torch.float64 else 1e-4)


def with_optimizer(problem: Problem, step: peers.Step) -> Callable[[], None]:
    """The step followed by AdamW; at learning rate 0, so that the model stays what it is."""
    optimizer = torch.optim.AdamW(problem.model.parameters(), lr=0.0, fused=True)

    def run() -> None:
        step()
        optimizer.step()

    return run


@contextlib.contextmanager
def skipping(name: str) -> Iterator[None]:
    """Reports a peer that cannot run here (no C++ compiler, an unsupported operation)."""
    try:
        yield
    except Exception as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else ""
        print(f"  {name} skipped: {type(error).__name__}: {first[:120]}")


def compare(bench: harness.Bench, problem: Problem, penalty: str) -> None:
    """All ways to take the step on one model."""
    name = our_name(problem, penalty)
    makes = eager_peers(problem, penalty)
    makes[name] = ours(problem, penalty)
    makes["normalign reference"] = ours(problem, penalty, "reference")
    check(problem, penalty, makes)
    if penalty != "joint":
        with skipping("torch.func compiled"):
            compiled = compiled_peer(problem, penalty)
            check(problem, penalty, {"compiled": compiled})
            makes["torch.func compiled"] = compiled
    calls: dict[str, harness.Call] = {"plain": peers.plain(problem)}
    if penalty != "joint":
        calls["authors (joint)"] = peers.authors_joint(problem)
        calls["per-batch regulariser"] = peers.jacobian_regulariser(problem)
    calls |= {key: make(None) for key, make in makes.items()}
    if bench.args.adamw:
        calls = {key: with_optimizer(problem, call) for key, call in calls.items()}
    floor = "6C products" if problem.widths else None
    if floor:
        calls[floor] = peers.ProductFloor(problem)
    flops = dict.fromkeys(["6C products", name], peers.flops(problem)) if floor else 0.0
    title = f"{problem.name}, {penalty}" + (", with AdamW" if bench.args.adamw else "")
    bench.case(title, calls, "plain", floor=floor, flops=flops, memory=True)


def main(argv: list[str] | None = None) -> int:
    p = harness.parser(__doc__)
    p.add_argument("--model", nargs="+", choices=problems.PROBLEMS, default=list(problems.PROBLEMS))
    p.add_argument("--penalty", choices=("orthogonal", "jacobian", "joint"), default="orthogonal")
    p.add_argument("--adamw", action="store_true", help="add a step of torch's fused AdamW")
    p.add_argument("--table", action="store_true", help="the table of bars, for the given models")
    args = p.parse_args(argv)
    bench = harness.Bench(args)
    if args.table:
        import grokalign_table

        grokalign_table.run(bench, args.model)
    else:
        for model in args.model:
            compare(bench, problems.make(model), args.penalty)
    return bench.finish()


if __name__ == "__main__":
    sys.exit(main())
