"""The training methods that the paper compares, and two more."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import torch
from baselines.grokalign import authors_joint
from baselines.problems import Problem
from torch import Tensor

import normalign
from grokking.tasks import Setup, Task
from normalign.optim import EgalitarianGradient, Grokfast, OrthoGrad

Step = Callable[[Tensor, Tensor], float]


@dataclasses.dataclass(frozen=True)
class Method:
    """A penalty, or an optimizer wrapper, or neither."""

    title: str
    penalty: str | None = None
    wrap: Callable[[torch.optim.Optimizer], torch.optim.Optimizer] | None = None
    sgd_momentum: float = 0.2
    authors: bool = False  # the authors' way to compute the same joint penalty


METHODS = {
    "baseline": Method("Baseline"),
    "grokfast": Method("Grokfast", wrap=lambda base: Grokfast(base, 0.8, 0.1)),
    "orthograd": Method("OrthoGrad", wrap=OrthoGrad, sgd_momentum=0.8),
    "egalitarian": Method("Egalitarian descent", wrap=EgalitarianGradient),
    "jacobian": Method("Jacobian norm", penalty="jacobian"),
    "orthogonal": Method("GrokAlign, orthogonal", penalty="orthogonal"),
    "joint": Method("GrokAlign, joint", penalty="joint"),
    "joint_authors": Method("joint, authors' algorithm", penalty="joint", authors=True),
}


def make_optimizer(task: Task, name: str, params: Iterable[Tensor]) -> torch.optim.Optimizer:
    """The task's optimizer under the method's wrapper."""
    method = METHODS[name]
    if name == "egalitarian":  # defined for plain gradient descent, with a rate of its own
        rate, decay = task.egalitarian
        base: torch.optim.Optimizer = torch.optim.SGD(params, rate, weight_decay=decay)
    elif task.sgd:
        base = torch.optim.SGD(params, task.lr, method.sgd_momentum, weight_decay=task.weight_decay)
    else:
        base = torch.optim.AdamW(
            params, task.lr, (0.9, 0.99), eps=1e-25, weight_decay=task.weight_decay, fused=True
        )
    return method.wrap(base) if method.wrap else base


def make_step(
    task: Task, name: str, setup: Setup, weight: float, generator: torch.Generator
) -> Step:
    """A function of a batch that leaves gradients in the parameters and returns the penalty."""
    method, model = METHODS[name], setup.model
    embed, body = setup.penalised()
    probes = "sphere" if method.penalty == "joint" else "gaussian"

    if method.authors:
        return lambda x, y: authors_joint(Problem(name, model, x, y, task.loss, weight))()[1].item()

    def step(x: Tensor, y: Tensor) -> float:
        model.zero_grad()
        if method.penalty is None:
            task.loss(model(x), y).backward()
            return 0.0
        logits, penalty = normalign.grokalign(
            body, embed(x), penalty=method.penalty, probes=probes, generator=generator
        )
        (task.loss(logits, y) + weight * penalty).backward()
        return penalty.item()

    return step
